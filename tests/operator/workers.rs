//! Numbered problems shared among processes, each with the device to itself as far as it knows: compiling a kernel takes
//! longer than running it, and a process compiles one at a time. A worker that ends or hangs at a problem is replaced.

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

/// Set in the environment of a worker.
const WORKER: &str = "ATTENTION_TEST_WORKER";

/// A problem takes seconds where all its kernels have to be compiled; after this time it hangs.
const PATIENCE: Duration = Duration::from_secs(150);

/// After so many problems, how many there were is said.
const PROGRESS: u64 = 500;

/// What a worker says of a problem.
pub enum Verdict {
    /// It is right; what should be counted of it.
    Right(Vec<String>),
    /// What is wrong.
    Wrong(String),
    /// The operator panicked: after that a device may refuse everything.
    Panicked(String),
}

/// What came of the problems.
#[derive(Default)]
pub struct Tally {
    /// How many were checked.
    pub checked: u64,
    /// Those that are wrong, with what is.
    pub wrong: BTreeMap<u64, String>,
    /// How many were of each kind.
    pub kinds: BTreeMap<String, u64>,
}

impl Tally {
    /// Says it at once: a run may be stopped before its end.
    fn add_wrong(&mut self, number: u64, fault: String) {
        println!("problem {number} is wrong: {fault}");
        self.wrong.insert(number, fault);
    }
}

/// Whether this process is a worker.
pub fn is_worker() -> bool {
    std::env::var_os(WORKER).is_some()
}

/// Draws and checks the problems whose numbers come through the standard input, until it ends.
///
/// # Panics
/// Where the input is no range of numbers.
pub fn work<P: Debug>(draw: impl Fn(u64) -> P, check: impl Fn(&P) -> Verdict) {
    // The test harness may have begun a line.
    println!();
    for line in std::io::stdin().lines() {
        let line = line.expect("lines of numbers");
        let bound = |text: Option<&str>| text.and_then(|text| text.parse::<u64>().ok());
        let mut words = line.split(' ');
        let (first, end) = (bound(words.next()), bound(words.next()));
        for number in first.expect("a number")..end.expect("a number") {
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

/// A process that runs the calling test as [`work`].
struct Worker {
    process: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    fn start(test: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("the path of this test"))
            .args(["--exact", test, "--nocapture"])
            .env(WORKER, "1")
            // The definition runs on the processor, whose cores have a worker each.
            .env("RAYON_NUM_THREADS", "1")
            // Its tensors come and go: glibc would fetch the pages from the system each time.
            .envs([
                ("MALLOC_ARENA_MAX", "1"),
                ("MALLOC_MMAP_MAX_", "0"),
                ("MALLOC_TRIM_THRESHOLD_", "100000000000"),
                ("MALLOC_TOP_PAD_", "268435456"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let orders = process.stdin.take().expect("it is piped");
        let output = BufReader::new(process.stdout.take().expect("it is piped"));
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

    /// Has `numbers` checked; what is left of them where the worker came to an end, `None` where it never began.
    fn check(
        &mut self,
        numbers: Range<u64>,
        tally: &Mutex<Tally>,
        deadline: Option<Instant>,
    ) -> Option<Range<u64>> {
        let tally = || tally.lock().expect("no holder panics");
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
        // Where it came to an end between two problems the next worker goes on, and where time is up nobody does.
        let in_time = left().is_none_or(|left| !left.is_zero());
        if let Some(problem) = begun.filter(|_| in_time) {
            let fault = match self.process.try_wait() {
                Ok(Some(status)) => format!("its process ended: {status}"),
                _ => format!("nothing for {} s", PATIENCE.as_secs()),
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
        // It has nothing left to do, or hangs.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Has the numbers below `count` checked by `jobs` processes, which run `test` and [`work`] there, `bundle` at a time,
/// until the time is up.
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
                        // Why it cannot start is on its standard error.
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
    tally.into_inner().expect("no holder panics")
}
