//! The worker process, which fuzzes one format. The worker reads inputs one after the other until its time is up or an input
//! kills the process.

use crate::{mutation, supervision::Note, targets::Target};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    collections::{BTreeMap, HashSet},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The maximum number of broken inputs that the worker keeps in memory and mutates further. Reading an input gives a
/// description of the result. The worker keeps the input if no earlier input gave this description.
const KEPT: usize = 2048;
/// The worker compares only this number of words at the start of each result or error message. A message counts as new
/// if no earlier message began with these words.
const WORDS: usize = 8;
/// The maximum length of an input in bytes. Longer inputs are skipped.
const LONGEST: usize = 256 << 10;

/// Returns the folder with the corpus of the format `name`.
pub fn corpus(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fuzz/corpus")
        .join(name)
}

/// Reads the files of the corpus, and then reads broken inputs for `seconds`. A panic aborts the process, even if the code
/// under test would catch the panic.
pub fn run(target: &Target, state: &Path, seconds: u64, seed: u64) {
    let to_stderr = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        to_stderr(panic);
        std::process::abort();
    }));
    let mut note = Note::create(state);
    let mut read = (target.prepare)();
    let mut inputs: Vec<Vec<u8>> = files(&corpus(target.name))
        .map(|path| fs::read(path).expect("the corpus is readable"))
        .collect();
    assert!(!inputs.is_empty(), "{} has no corpus", target.name);

    let mut ends = HashSet::new();
    let mut kinds = BTreeMap::<&str, u64>::new();
    let mut try_one = |input: &[u8]| {
        note.write(input);
        let end = read(input);
        let kind = if end.is_ok() { "read" } else { "refused" };
        *kinds.entry(kind).or_default() += 1;
        let text = end.unwrap_or_else(|error| error);
        ends.insert(fingerprint(&text))
    };
    for input in &inputs {
        try_one(input);
    }
    let of_corpus = inputs.len();
    let mut random = StdRng::seed_from_u64(seed ^ fingerprint(target.name));
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        // About half of the new inputs are mutations of files in the corpus. Mutating only kept inputs, which are broken
        // already, would give files that are ever further from valid files.
        let known = match random.random_bool(0.5) {
            true => &inputs[..of_corpus],
            false => &inputs[..],
        };
        let input = mutation::broken(target.format, known, &mut random);
        if input.len() <= LONGEST && try_one(&input) && inputs.len() < of_corpus + KEPT {
            inputs.push(input);
        }
    }
    let kinds: Vec<String> = kinds
        .iter()
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    println!(
        "{}: {of_corpus} files of the corpus; inputs {}; {} different results",
        target.name,
        kinds.join(", "),
        ends.len()
    );
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("the folder is readable").path());
    let mut paths: Vec<PathBuf> = entries.collect();
    // The order of the files in a folder differs between machines. With sorted paths, a seed gives the same inputs on every
    // machine.
    paths.sort();
    paths.into_iter()
}

/// Returns a hash of the first words of a message. The hash ignores quoted texts and numbers.
fn fingerprint(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.split(['"', '`', '\''])
        .step_by(2)
        .flat_map(|outside| outside.split(|character: char| !character.is_alphabetic()))
        .filter(|word| !word.is_empty())
        .take(WORDS)
        .for_each(|word| word.hash(&mut hasher));
    hasher.finish()
}
