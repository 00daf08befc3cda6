//! `cargo xtask kernels`: compiles kernels for GPUs that this machine does not have, and writes tables of the results.
//!
//! For NVIDIA, the library emits CUDA C++ of the mma engine, which `nvcc` compiles. For AMD, CubeCL's own compiler
//! generates machine code of the cmma and unit engines. The tables of registers, shared memory and register spills go
//! into `docs`. A spill is hot if it is executed in a loop with multiply instructions.

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

/// The suffixes of kernel names: an empty suffix for kernels without options, and a suffix for kernels with as many
/// options as can be combined.
const OPTIONS: &[&str] = &["", "-softcap-bias-mask-lengths-segments"];

/// Emits and compiles kernels for NVIDIA's GPUs, and writes a table to the docs. The table lists the registers and the
/// shared memory that each kernel needs.
pub fn nvidia() -> Result<()> {
    setup::llvm_if_possible();
    nvidia::run()
}

/// Emits and compiles kernels for AMD's GPUs, and writes a table of the results to the docs.
pub fn amd() -> Result<()> {
    setup::llvm_if_possible();
    amd::run()
}

/// Returns a list with two names for each kernel in `kernels`: the kernel without options, and the kernel with the
/// combined options.
fn options(kernels: impl Iterator<Item = String>) -> Vec<String> {
    kernels
        .flat_map(|kernel| {
            OPTIONS
                .iter()
                .map(move |options| format!("{kernel}{options}"))
        })
        .collect()
}

/// A build of `attention-cube`: the Cargo feature that the build enables, and the name of the test that emits the
/// kernels.
struct Library {
    feature: &'static str,
    test: &'static str,
}

impl Library {
    /// Runs the test that emits kernels into `folder/kernels`.
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

/// Returns the number that stands between the texts `after` and `before` in a compiler's log.
fn number_between(log: &str, after: &str, before: &str) -> Option<usize> {
    let rest = &log[log.find(after)? + after.len()..];
    rest[..rest.find(before)?].trim().parse().ok()
}

/// Counts the instructions that access spilled registers in loops with multiply instructions. A loop is the code from
/// the target of a backward branch to that branch. `instructions` holds the address and the text of each instruction.
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
    fn number_between_of_compiler_log_gives_its_numbers() {
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
