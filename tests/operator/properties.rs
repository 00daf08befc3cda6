//! Tests of random combinations of shapes, options, layouts, data and dtypes, forward and backward, against the reference. A
//! repeated call must give the same bits.
//!
//! `PROPTEST_CASES` sets the number of problems (default 24), and `ATTENTION_TEST_SEED` sets the seed. `ATTENTION_TEST_JOBS`
//! sets the number of worker processes, and `ATTENTION_TEST_SECONDS` sets the time limit. With `ATTENTION_TEST_SIZES=every`,
//! the problems cover every row of the tile tables. This command is for a machine with a GPU and sixteen CPU cores:
//!
//! ```text
//! ATTENTION_TEST_DEVICES=cuda ATTENTION_TEST_SIZES=every ATTENTION_TEST_JOBS=15 ATTENTION_TEST_SECONDS=480 \
//!     PROPTEST_CASES=10000 cargo test --release --no-default-features --features cuda,flex --test operator -- \
//!     --exact properties::random_problem_matches_reference --nocapture
//! ```
//!
//! The test prints a line with the number of each wrong problem. A run with `ATTENTION_TEST_PROBLEM` set to that number
//! checks this problem alone and shrinks it.

use crate::case::seed;
use crate::random::{Sizes, Target, bundle, numbered};
use crate::workers::{self, Tally, Verdict};
use burn_gemma4::catch_panic;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestCaseError};
use std::time::{Duration, Instant};

/// Reads a number from the environment variable `name`. Returns `None` if the variable is not set.
///
/// # Panics
/// Panics if the value is not a number.
pub fn number<N: std::str::FromStr>(name: &str) -> Option<N> {
    let text = std::env::var(name).ok()?;
    let number = text.parse().ok();
    Some(number.unwrap_or_else(|| panic!("{name}={text}: expected a number")))
}

/// Returns the sizes that `ATTENTION_TEST_SIZES` chooses.
///
/// # Panics
/// Panics if the variable has another value than `small` or `every`.
pub fn sizes() -> Sizes {
    match std::env::var("ATTENTION_TEST_SIZES").as_deref() {
        Err(_) | Ok("small") => Sizes::Small,
        Ok("every") => Sizes::Every,
        Ok(other) => panic!("ATTENTION_TEST_SIZES={other}: expected small or every"),
    }
}

/// Returns the environment variables with which a run of the test repeats the problem `number`.
fn again(number: u64) -> String {
    let variables = [
        "ATTENTION_TEST_DEVICES",
        "ATTENTION_TEST_SIZES",
        "ATTENTION_TEST_DTYPE",
        "ATTENTION_TEST_SEED",
    ];
    let set = variables
        .into_iter()
        .filter_map(|name| Some(format!("{name}={} ", std::env::var(name).ok()?)));
    format!("{}ATTENTION_TEST_PROBLEM={number}", set.collect::<String>())
}

fn config() -> Config {
    Config {
        failure_persistence: None,
        max_shrink_iters: 60,
        ..Config::default()
    }
}

/// Checks the problems with the given numbers in sequence. The first wrong problem is shrunk and ends the test.
fn one_by_one(sizes: Sizes, numbers: impl Iterator<Item = u64>) {
    let targets = Target::all();
    for number in numbers {
        let (mut runner, tree) = numbered(sizes, number, config());
        let check =
            |problem: crate::random::Problem| problem.check(&targets).map_err(TestCaseError::fail);
        if let Err(failure) = runner.run_one(tree, check) {
            panic!("{}, seed {}: {failure}", again(number), seed());
        }
    }
}

fn work(sizes: Sizes) {
    let targets = Target::all();
    let draw = |number| numbered(sizes, number, config()).1.current();
    workers::work(draw, |problem| {
        match catch_panic(|| problem.check(&targets)) {
            Ok(Ok(())) => {
                let served = targets.iter().filter(|target| problem.is_served(target));
                let kinds = served.flat_map(|target| problem.kinds(target));
                Verdict::Right(kinds.collect())
            }
            Ok(Err(fault)) => Verdict::Wrong(fault),
            Err(panic) => Verdict::Panicked(panic),
        }
    });
}

fn share(sizes: Sizes, count: u64, jobs: usize) {
    let time = number("ATTENTION_TEST_SECONDS").map(Duration::from_secs);
    let start = Instant::now();
    let test = "properties::random_problem_matches_reference";
    let Tally {
        checked,
        wrong,
        kinds,
    } = workers::share(test, count, bundle(sizes), jobs, time);
    for (kind, count) in kinds {
        println!("{count:6} {kind}");
    }
    for (number, fault) in &wrong {
        println!("{}: {fault}", again(*number));
    }
    let seconds = start.elapsed().as_secs();
    println!(
        "{checked} of {count} problems in {seconds} s, {} wrong",
        wrong.len()
    );
    assert!(
        wrong.is_empty() && checked == count,
        "{} of {checked} problems are wrong, and {} were not checked",
        wrong.len(),
        count - checked
    );
}

#[test]
fn random_problem_matches_reference() {
    let sizes = sizes();
    let cases = number("PROPTEST_CASES").unwrap_or(24);
    if workers::is_worker() {
        work(sizes);
    } else if let Some(number) = number("ATTENTION_TEST_PROBLEM") {
        one_by_one(sizes, std::iter::once(number));
    } else if let Some(jobs) = number("ATTENTION_TEST_JOBS") {
        share(sizes, cases, jobs);
    } else {
        one_by_one(sizes, 0..cases);
    }
}
