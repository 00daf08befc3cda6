//! Runs the whole test suite as a queue of jobs. There is one worker per CPU core, and each worker takes one job after
//! another.
//!
//! A software driver compiles the kernels of a process on one thread. The operator's tests compile most kernels, so each of
//! their modules is a job with a process of its own.

use crate::process::{self, Result};
use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// The test target that takes longer than all other test targets together.
const LONGEST: &str = "operator";

struct Job {
    name: String,
    command: Command,
}

struct Outcome {
    name: String,
    time: Duration,
    /// The exit code, or the reason why the job has no exit code.
    code: Result<u8>,
}

/// Builds all tests, runs them and returns an exit code. `prepare` sets the environment variables that the tests need.
pub fn run(prepare: &dyn Fn(&mut Command)) -> Result<u8> {
    let cargo_test = |arguments: &[&str]| {
        let mut command = process::test_workspace();
        command.args(arguments);
        prepare(&mut command);
        command
    };
    process::run(&mut cargo_test(&["--no-run"]))?;

    let list = ["--test", LONGEST, "--", "--list", "--format", "terse"];
    let list = process::output(&mut cargo_test(&list));
    let list = list.ok_or_else(|| format!("the tests of `{LONGEST}` could not be listed"))?;

    let targets = test_targets(process::workspace_root())?;
    let mut others = vec!["--lib", "--bins", "--no-fail-fast"];
    for target in targets.iter().filter(|target| *target != LONGEST) {
        others.extend(["--test", target]);
    }
    let mut jobs = VecDeque::from([
        job("all other targets", cargo_test(&others)),
        job("documentation", cargo_test(&["--doc"])),
    ]);
    for (module, tests) in modules(&list) {
        let mut arguments = vec!["--test", LONGEST, "--", "--exact"];
        arguments.extend(tests);
        jobs.push_back(job(&format!("{LONGEST}::{module}"), cargo_test(&arguments)));
    }
    let outcomes = run_jobs(jobs);
    Ok(summarize(&outcomes))
}

fn job(name: &str, command: Command) -> Job {
    let name = name.into();
    Job { name, command }
}

/// Returns the modules in the output of `--list`, each with the names of its tests. The modules with most tests come
/// first, because a long job at the end would leave CPU cores idle.
fn modules(list: &str) -> Vec<(&str, Vec<&str>)> {
    let mut modules: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for test in list.lines().filter_map(|line| line.strip_suffix(": test")) {
        let module = test.split("::").next().unwrap_or(test);
        modules.entry(module).or_default().push(test);
    }
    let mut modules: Vec<_> = modules.into_iter().collect();
    modules.sort_by_key(|(_, tests)| std::cmp::Reverse(tests.len()));
    modules
}

/// Runs the jobs on as many threads as there are CPU cores, and prints the output of each job when it ends.
fn run_jobs(jobs: VecDeque<Job>) -> Vec<Outcome> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (jobs, outcomes) = (Mutex::new(jobs), Mutex::new(Vec::new()));
    let next = || jobs.lock().ok()?.pop_front();
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(mut job) = next() {
                    let start = Instant::now();
                    let output = job.command.output();
                    let time = start.elapsed();
                    // While this thread holds the lock, no other job prints, so the outputs of two jobs do not mix.
                    if let Ok(mut outcomes) = outcomes.lock() {
                        println!("== {}", job.name);
                        let code = output
                            .map_err(|error| format!("the tests could not be started: {error}"))
                            .and_then(|output| printed(&output));
                        outcomes.push(Outcome {
                            name: job.name,
                            time,
                            code,
                        });
                    }
                }
            });
        }
    });
    outcomes.into_inner().unwrap_or_default()
}

/// Prints the output of a job and returns its exit code.
fn printed(output: &Output) -> Result<u8> {
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    match output.status.code() {
        Some(code) => Ok(u8::try_from(code).unwrap_or(1)),
        None => Err(format!("the tests were stopped ({})", output.status)),
    }
}

/// Prints the time of each job and the jobs that failed. Returns the first exit code that is not 0, or 0 if all jobs
/// succeeded.
fn summarize(outcomes: &[Outcome]) -> u8 {
    println!("== times of the tests");
    for Outcome { name, time, .. } in outcomes {
        println!("{:8.1} s  {name}", time.as_secs_f64());
    }
    let mut first = 0;
    for Outcome { name, code, .. } in outcomes {
        let code = match code {
            Ok(0) => continue,
            Ok(code) => {
                println!("error: {name} failed with exit code {code}");
                *code
            }
            Err(error) => {
                println!("error: {name}: {error}");
                1
            }
        };
        first = if first == 0 { code } else { first };
    }
    first
}

/// Returns the names of the workspace's test targets.
fn test_targets(root: &Path) -> Result<Vec<String>> {
    let mut names = targets_in(&root.join("tests"))?;
    for package in entries(&root.join("crates"))? {
        let folder = package.join("tests");
        if folder.is_dir() {
            names.extend(targets_in(&folder)?);
        }
    }
    names.sort();
    names.dedup();
    Ok(names)
}

/// Returns the names of the test targets in one folder. A target is a file `NAME.rs` or a folder `NAME` with a `main.rs`.
fn targets_in(folder: &Path) -> Result<Vec<String>> {
    let is_target = |path: &PathBuf| {
        path.join("main.rs").is_file() || path.extension().is_some_and(|it| it == "rs")
    };
    let stem = |path: PathBuf| {
        path.file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
    };
    let targets = entries(folder)?.into_iter().filter(is_target);
    Ok(targets.filter_map(stem).collect())
}

/// Returns the paths of a folder's entries.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).and_then(|entries| {
        entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    });
    entries.map_err(|error| format!("{}: {error}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_targets_of_this_workspace_include_files_and_folders() {
        let names = test_targets(process::workspace_root()).unwrap();
        for name in [LONGEST, "fuzz", "gemma4", "memory", "program", "serve"] {
            assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
        }
        assert!(!names.iter().any(|name| name == "clients"), "{names:?}");
    }

    #[test]
    fn modules_group_tests_with_the_largest_first() {
        let list =
            "a::one: test\nb::two: test\nb::c::three: test\nfour: test\n\n4 tests, 0 benchmarks\n";
        let expected = [
            ("b", vec!["b::two", "b::c::three"]),
            ("a", vec!["a::one"]),
            ("four", vec!["four"]),
        ];
        assert_eq!(modules(list), expected);
    }

    #[test]
    fn run_jobs_gives_each_exit_code() {
        let shell = |code: u8| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exit {code}")]);
            job(&code.to_string(), command)
        };
        let outcomes = run_jobs((0..5).map(shell).collect());
        assert_eq!(outcomes.len(), 5);
        for outcome in &outcomes {
            assert_eq!(
                outcome.code.as_ref().map(u8::to_string),
                Ok(outcome.name.clone())
            );
        }
        assert_ne!(summarize(&outcomes), 0);
        assert_eq!(summarize(&outcomes[..0]), 0);
    }
}
