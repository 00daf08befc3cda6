//! Distributes numbered problems among worker processes. A process compiles only one kernel at a time, so several processes
//! are faster. All workers use the same device. A worker that ends or hangs at a problem is replaced by a new worker.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The environment variable that is set in a worker process.
const WORKER: &str = "ATTENTION_TEST_WORKER";

/// The time without an answer after which a worker counts as hung. An answer may take seconds if all kernels of a problem must
/// be compiled.
const PATIENCE: Duration = Duration::from_secs(150);

/// The number of problems between two progress lines. Each progress line tells how many problems were checked so far.
const PROGRESS: u64 = 500;

/// A worker's verdict on a problem.
pub enum Verdict {
    /// The results are right. Each text names a kind of problem to which this problem counts, such as its dtype or its
    /// kernel. The test counts the problems of each kind.
    Right(Vec<String>),
    /// The results are wrong, as the text says.
    Wrong(String),
    /// The operator panicked with this text. The device may refuse all later calls, so the worker ends.
    Panicked(String),
}

/// The results of the checked problems.
#[derive(Default)]
pub struct Tally {
    /// The number of checked problems.
    pub checked: u64,
    /// The numbers of the wrong problems, each with a description of the fault.
    pub wrong: BTreeMap<u64, String>,
    /// The number of problems of each kind, such as a dtype or a kernel.
    pub kinds: BTreeMap<String, u64>,
}

impl Tally {
    /// Records a wrong problem and prints it at once, since a run may be stopped before its end.
    fn add_wrong(&mut self, number: u64, fault: String) {
        println!("problem {number} is wrong: {fault}");
        self.wrong.insert(number, fault);
    }
}

/// Returns true if this process is a worker.
pub fn is_worker() -> bool {
    std::env::var_os(WORKER).is_some()
}

/// Draws and checks the problems whose numbers arrive on the standard input, until the input ends.
///
/// # Panics
/// Panics if a line of the input is not a range of numbers.
pub fn work<P: Debug>(draw: impl Fn(u64) -> P, check: impl Fn(&P) -> Verdict) {
    // The test harness may have printed the start of a line. The newline ends that line, so that the first answer begins a
    // new line.
    println!();
    for line in std::io::stdin().lines() {
        let line = line.expect("the standard input is readable");
        let bound = |text: Option<&str>| text.and_then(|text| text.parse::<u64>().ok());
        let mut words = line.split(' ');
        let (first, end) = (bound(words.next()), bound(words.next()));
        for number in first.expect("the first number")..end.expect("the end") {
            let problem = draw(number);
            println!("begin {problem:?}");
            match check(&problem) {
                Verdict::Right(kinds) => {
                    for kind in kinds {
                        println!("kind {kind}");
                    }
                    println!("right");
                }
                Verdict::Wrong(fault) => println!("wrong {}", one_line(&fault)),
                Verdict::Panicked(text) => {
                    println!("wrong panic: {}", one_line(&text));
                    std::process::exit(1);
                }
            }
        }
        println!("done");
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

/// A worker process. In this process the calling test runs [`work`], which writes its answers to standard output.
struct Worker {
    process: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    fn start(test: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("the test has a path"))
            .args(["--exact", test, "--nocapture"])
            .env(WORKER, "1")
            // One thread computes the reference, because there is a worker for each processor core.
            .env("RAYON_NUM_THREADS", "1")
            // The environment variables make glibc keep freed memory. By default, glibc would return memory to the system
            // each time the worker frees a tensor.
            .envs([
                ("MALLOC_ARENA_MAX", "1"),
                ("MALLOC_MMAP_MAX_", "0"),
                ("MALLOC_TRIM_THRESHOLD_", "100000000000"),
                ("MALLOC_TOP_PAD_", "268435456"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test binary starts");
        let orders = process.stdin.take().expect("the standard input is piped");
        let output = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let (sender, answers) = channel();
        thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).all(|sent| sent.is_ok())
        });
        Self {
            process,
            orders,
            answers,
        }
    }

    /// Sends the range `numbers` to the worker and waits for its verdicts. Returns the part of the range that is still
    /// unchecked. Returns `None` if the worker ends or hangs before it begins its first problem, and before the
    /// deadline. Such a worker probably cannot start.
    fn check(
        &mut self,
        numbers: Range<u64>,
        tally: &Mutex<Tally>,
        deadline: Option<Instant>,
    ) -> Option<Range<u64>> {
        let tally = || tally.lock().expect("no thread panics with the lock");
        let left = || deadline.map(|end| end.saturating_duration_since(Instant::now()));
        let patience = || left().map_or(PATIENCE, |left| left.min(PATIENCE));
        let mut at = numbers.start;
        let mut begun = None;
        if writeln!(self.orders, "{} {}", numbers.start, numbers.end).is_ok() {
            while let Ok(line) = self.answers.recv_timeout(patience()) {
                let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
                match word {
                    "begin" => begun = Some(rest.to_string()),
                    "kind" => *tally().kinds.entry(rest.into()).or_default() += 1,
                    "right" | "wrong" => {
                        let mut tally = tally();
                        tally.checked += 1;
                        let problem = begun.take().unwrap_or_default();
                        if word == "wrong" {
                            tally.add_wrong(at, format!("{rest}: {problem}"));
                        } else if tally.checked.is_multiple_of(PROGRESS) {
                            println!("{} checked", tally.checked);
                        }
                        at += 1;
                    }
                    "done" => return Some(at..numbers.end),
                    _ => {}
                }
            }
        }
        // If the worker ended or hung at a problem before the deadline, that problem counts as wrong. If the worker ended
        // between two problems, a new worker gets the rest.
        let in_time = left().is_none_or(|left| !left.is_zero());
        if let Some(problem) = begun.filter(|_| in_time) {
            let fault = match self.process.try_wait() {
                Ok(Some(status)) => format!("its process ended: {status}"),
                _ => format!("no answer for {} s", PATIENCE.as_secs()),
            };
            let mut tally = tally();
            tally.checked += 1;
            tally.add_wrong(at, format!("{fault}: {problem}"));
            at += 1;
        }
        (at > numbers.start || !in_time).then_some(at..numbers.end)
    }

    fn end(mut self) {
        drop(self.orders);
        // The worker is idle or hangs at this point, so it can be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Checks the problems with the numbers below `count` in `jobs` worker processes. Stops when all problems are checked,
/// or when `time` has passed. Each worker runs the test `test`, which calls [`work`], and gets `bundle` numbers at a
/// time.
pub fn share(test: &str, count: u64, bundle: u64, jobs: usize, time: Option<Duration>) -> Tally {
    let (next, tally) = (AtomicU64::new(0), Mutex::new(Tally::default()));
    let deadline = time.map(|time| Instant::now() + time);
    let is_late = || deadline.is_some_and(|end| Instant::now() >= end);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                let mut worker = Worker::start(test);
                loop {
                    let first = next.fetch_add(bundle, Ordering::Relaxed);
                    if first >= count {
                        break;
                    }
                    let mut left = first..(first + bundle).min(count);
                    while !left.is_empty() && !is_late() {
                        // A worker that cannot start has printed the reason on its standard error. A new worker would fail too,
                        // so the thread ends.
                        let Some(rest) = worker.check(left, &tally, deadline) else {
                            return worker.end();
                        };
                        if !rest.is_empty() && !is_late() {
                            std::mem::replace(&mut worker, Worker::start(test)).end();
                        }
                        left = rest;
                    }
                }
                worker.end();
            });
        }
    });
    tally.into_inner().expect("no thread panics with the lock")
}
