//! `cargo xtask kernels`: what compilers make of kernels for cards that are not here.
//!
//! The library writes kernels without a card: the CUDA C++ of the mma engine's, which `nvcc` compiles, or the machine code of the cmma
//! and the unit engine's for AMD's cards, which CubeCL's own compiler makes. Tables of registers, shared memory and spills go into
//! `docs`. A spill counts as hot where a loop that multiplies runs over it.

mod amd;
mod nvidia;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{
    process::{self, Result},
    setup,
};

/// The fewest options, and the most that meet.
const OPTIONS: &[&str] = &["", "-softcap-bias-mask-lengths-segments"];

/// Writes, compiles and tells of NVIDIA's cards.
pub fn nvidia() -> Result<()> {
    setup::llvm_if_possible();
    nvidia::run()
}

/// Writes, compiles and tells of AMD's cards.
pub fn amd() -> Result<()> {
    setup::llvm_if_possible();
    amd::run()
}

/// Kernels without options, and with those that meet.
fn options(kernels: impl Iterator<Item = String>) -> Vec<String> {
    kernels
        .flat_map(|kernel| {
            OPTIONS
                .iter()
                .map(move |options| format!("{kernel}{options}"))
        })
        .collect()
}

/// The library, built with a feature, and its test that writes kernels.
struct Library {
    feature: &'static str,
    test: &'static str,
}

impl Library {
    /// Has it write kernels into `kernels` in a folder.
    fn write(&self, names: &[String], folder: &Path, environment: &[(&str, String)]) -> Result<()> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        process::run(
            process::cargo()
                .args(["test", "--release", "--package", "attention-cube", "--lib"])
                .args(["--no-default-features", "--features", self.feature, "--"])
                .args([self.test, "--exact", "--ignored"])
                .env("KERNELS", names.join(" "))
                .envs(environment.iter().map(|(name, value)| (name, value)))
                .env("TMPDIR", folder),
        )
    }
}

fn tempfolder() -> Result<PathBuf> {
    let folder = env::temp_dir().join(format!("attention-kernels-{}", std::process::id()));
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

fn without(folder: &Path) -> Result<()> {
    fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))
}

/// The number between two words of a compiler's log.
fn number_between(log: &str, after: &str, before: &str) -> Option<usize> {
    let rest = &log[log.find(after)? + after.len()..];
    rest[..rest.find(before)?].trim().parse().ok()
}

/// Instructions on spilled registers in loops that multiply: between a branch backward and its target. Instructions are where they lie
/// and their text.
fn hot_spills(
    instructions: &[(usize, &str)],
    branch_target: impl Fn(&str) -> Option<usize>,
    multiplies: impl Fn(&str) -> bool,
    spills: impl Fn(&str) -> bool,
) -> usize {
    let is_in = |&(at, _): &(usize, &str), (first, last): (usize, usize)| at >= first && at <= last;
    let loops: Vec<(usize, usize)> = instructions
        .iter()
        .filter_map(|&(at, text)| {
            let target = branch_target(text)?;
            (target < at).then_some((target, at))
        })
        .filter(|&range| {
            instructions
                .iter()
                .any(|instruction| is_in(instruction, range) && multiplies(instruction.1))
        })
        .collect();
    instructions
        .iter()
        .filter(|(_, text)| spills(text))
        .filter(|instruction| loops.iter().any(|&range| is_in(instruction, range)))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_off_the_compilers_log() {
        let log = "ptxas info    : Used 255 registers, used 1 barriers\n 8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads";
        assert_eq!(number_between(log, "Used", "registers"), Some(255));
        assert_eq!(
            number_between(log, "bytes stack frame,", "bytes spill stores"),
            Some(12)
        );
        assert_eq!(
            number_between(log, "bytes spill stores,", "bytes spill loads"),
            Some(16)
        );
        assert_eq!(number_between(log, "Used", "barrels"), None);
    }
}
