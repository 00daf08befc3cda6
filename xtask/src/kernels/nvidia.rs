//! Compiles the mma engine's kernels with NVIDIA's compiler.
//!
//! The library emits the CUDA C++ of its kernels, and `nvcc` compiles this source for each GPU. The table of registers,
//! shared memory and spills goes into `docs/mma-compiled.md`. A spill is hot if it is executed in a loop with HMMA
//! instructions, which multiply matrices.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread,
};

use super::{Library, hot_spills, number_between, options, tempfolder, without};
use crate::process::{self, Result};

/// GPU architectures with the same maximum of shared memory per CTA, and this maximum in bytes.
struct Cards {
    architectures: &'static [&'static str],
    shared_memory: usize,
}

const CARDS: &[Cards] = &[
    Cards {
        architectures: &["sm_90", "sm_100"],
        shared_memory: 232_448,
    },
    Cards {
        architectures: &["sm_80"],
        shared_memory: 166_912,
    },
    Cards {
        architectures: &["sm_86", "sm_89", "sm_120"],
        shared_memory: 101_376,
    },
];

/// The tested pairs of a pass (such as forward) and the head sizes of keys and values. Each pair of head sizes has its
/// own tile sizes.
const WIDTHS: &[(&str, &str)] = &[
    ("forward", "64-64"),
    ("forward", "128-128"),
    ("forward", "256-256"),
    ("forward", "320-320"),
    ("forward", "512-512"),
    ("forward", "576-512"),
    ("backward", "64-64"),
    ("backward", "128-128"),
    ("backward", "256-256"),
    ("backward", "512-512"),
    ("bias", "64-64"),
    ("bias", "128-128"),
    ("decode16", "128-128"),
    ("decode16", "512-512"),
    ("decode64", "256-256"),
    ("words16", "512-512"),
];

const TABLE: &str = "docs/mma-compiled.md";

/// The compiler's results for one kernel on one GPU.
#[derive(Debug, PartialEq, Eq)]
struct Compiled {
    registers: usize,
    shared_memory: usize,
    spilled_bytes: usize,
    /// The number of instructions that load or store spilled registers, counted in loops with HMMA instructions.
    hot_spills: usize,
}

/// Emits and compiles the kernels, and writes the table of the results to the docs.
pub fn run() -> Result<()> {
    let nvcc = nvcc()?;
    let folder = tempfolder()?;
    let mut jobs = Vec::new();
    for cards in CARDS {
        let sources = folder.join(cards.shared_memory.to_string());
        emit(&sources, cards.shared_memory)?;
        for source in sources_of(&sources.join("kernels"))? {
            for architecture in cards.architectures {
                jobs.push((source.clone(), *architecture));
            }
        }
    }
    let compiled = compile_all(&nvcc, jobs)?;
    let version = process::output(Command::new(&nvcc).arg("--version")).unwrap_or_default();
    let table = table(&compiled, version.lines().last().unwrap_or_default());
    let path = process::workspace_root().join(TABLE);
    fs::write(&path, &table).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{table}");
    // The folder is removed only after a success. If a compilation fails, the folder is kept for inspection.
    without(&folder)?;
    let hot: Vec<_> = compiled
        .iter()
        .filter(|(_, kernel)| kernel.hot_spills > 0)
        .map(|((name, architecture), _)| format!("{name} for {architecture}"))
        .collect();
    match hot.is_empty() {
        true => Ok(()),
        false => Err(format!("spills in loops that multiply: {}", hot.join(", "))),
    }
}

/// Returns the path of `nvcc`, which is in the folder `CUDA_PATH` or else on the PATH.
fn nvcc() -> Result<PathBuf> {
    let own = env::var_os("CUDA_PATH").map(|path| Path::new(&path).join("bin/nvcc"));
    let candidates = own.into_iter().chain([PathBuf::from("nvcc")]);
    candidates
        .into_iter()
        .find(|nvcc| process::output(Command::new(nvcc).arg("--version")).is_some())
        .ok_or_else(|| {
            "nvcc was not found: set CUDA_PATH to a CUDA toolkit of version 12.8 or later, which supports all of these cards"
                .into()
        })
}

/// Runs the library's test that emits kernels. The kernels are for GPUs with `shared_memory` bytes per CTA.
fn emit(folder: &Path, shared_memory: usize) -> Result<()> {
    let names = options(
        WIDTHS
            .iter()
            .map(|(pass, widths)| format!("{pass}-{widths}")),
    );
    let library = Library {
        feature: "cuda",
        test: "engine::tensor_core::mma::source::write",
    };
    library.write(
        &names,
        folder,
        &[("SHARED_MEMORY", shared_memory.to_string())],
    )
}

fn sources_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(failed)?;
    let mut sources = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            sources.push(path);
        }
    }
    Ok(sources)
}

/// The results by kernel name and GPU architecture.
type Kernels = BTreeMap<(String, &'static str), Compiled>;

/// Compiles all sources for their architectures, in parallel on all CPU cores.
fn compile_all(nvcc: &Path, jobs: Vec<(PathBuf, &'static str)>) -> Result<Kernels> {
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let jobs = Mutex::new(jobs);
    let done = Mutex::new(Ok(Kernels::new()));
    let next = || jobs.lock().ok().and_then(|mut jobs| jobs.pop());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((source, architecture)) = next() {
                    let outcome = compile(nvcc, &source, architecture);
                    let name = source.file_stem().unwrap_or_default();
                    let key = (name.to_string_lossy().into_owned(), architecture);
                    let Ok(mut done) = done.lock() else { return };
                    match (&mut *done, outcome) {
                        (Ok(kernels), Ok(compiled)) => {
                            kernels.insert(key, compiled);
                        }
                        (Ok(_), Err(error)) => *done = Err(error),
                        (Err(_), _) => {}
                    }
                }
            });
        }
    });
    done.into_inner()
        .unwrap_or_else(|_| Err("a compiling thread panicked".into()))
}

fn compile(nvcc: &Path, source: &Path, architecture: &str) -> Result<Compiled> {
    let cubin = source.with_extension(format!("{architecture}.cubin"));
    let text = text_of(source)?;
    let own = source.with_extension(format!("{architecture}.cu"));
    fs::write(&own, integers_of_nvcc(&text))
        .map_err(|error| format!("{}: {error}", own.display()))?;
    let failed = |what: &Path, error: String| {
        format!("`{}` of {}: {error}", what.display(), source.display())
    };
    let output = Command::new(nvcc)
        .args([
            "--cubin",
            "--std=c++17",
            "-Xptxas=-v",
            &format!("-arch={architecture}"),
        ])
        .arg("-o")
        .arg(&cubin)
        .arg(&own)
        .output()
        .map_err(|error| failed(nvcc, error.to_string()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(failed(nvcc, log.into_owned()));
    }
    let disassembler = nvcc.with_file_name("cuobjdump");
    let sass = process::output(Command::new(&disassembler).arg("--dump-sass").arg(&cubin))
        .ok_or_else(|| failed(&disassembler, "it is missing or fails".into()))?;
    let number = |after: &str, before: &str| {
        number_between(&log, after, before)
            .ok_or_else(|| failed(nvcc, format!("no number in `{after} … {before}`")))
    };
    Ok(Compiled {
        registers: number("Used", "registers")?,
        shared_memory: number_between(&text, "// ", " bytes of shared memory")
            .ok_or_else(|| format!("{} does not begin with its shared memory", source.display()))?,
        spilled_bytes: number("bytes stack frame,", "bytes spill stores")?
            + number("bytes spill stores,", "bytes spill loads")?,
        hot_spills: hot_spills_of(&sass),
    })
}

fn text_of(source: &Path) -> Result<String> {
    fs::read_to_string(source).map_err(|error| format!("{}: {error}", source.display()))
}

/// Removes the definition of `int64_t`, which only NVRTC needs. `nvcc` already defines this name as another type of the same
/// size, so a second definition would be an error.
fn integers_of_nvcc(source: &str) -> String {
    source.replace("typedef signed long long int int64_t;\n", "")
}

/// Counts the instructions that access spilled registers in loops with HMMA instructions.
fn hot_spills_of(sass: &str) -> usize {
    let instructions: Vec<(usize, &str)> = sass.lines().filter_map(instruction).collect();
    hot_spills(
        &instructions,
        branch_target,
        |text| text.contains("HMMA"),
        |text| text.contains("LDL") || text.contains("STL"),
    )
}

/// Returns the address and the text of an instruction, from a line such as `/*0f30*/ HMMA.16816.F32.BF16 R4, … ;`.
fn instruction(line: &str) -> Option<(usize, &str)> {
    let (at, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let text = text.trim_start();
    let at = usize::from_str_radix(at, 16).ok()?;
    text.contains(';').then_some((at, text))
}

/// Returns the target address of a branch, from a text such as `@P0 BRA 0x1230 ;`.
fn branch_target(text: &str) -> Option<usize> {
    let (_, target) = text.split_once("BRA")?;
    let (_, target) = target.split_once("0x")?;
    let digits = target
        .split(|digit: char| !digit.is_ascii_hexdigit())
        .next()?;
    usize::from_str_radix(digits, 16).ok()
}

fn table(kernels: &Kernels, version: &str) -> String {
    let mut text = format!(
        "# The mma engine's kernels, compiled\n\n\
         `cargo xtask kernels` wrote this page: bf16, {version}. A row has a kernel without options and one with a softcap, a bias, a mask,\n\
         lengths and segments. *Spills* are bytes stored and loaded in all; *hot* are instructions on them in loops that multiply.\n\n\
         | kernel | card | shared memory | registers | spills | hot |\n|---|---|---|---|---|---|\n"
    );
    for ((name, architecture), kernel) in kernels {
        let Compiled {
            registers,
            shared_memory,
            spilled_bytes,
            hot_spills,
        } = kernel;
        text += &format!(
            "| {name} | {architecture} | {shared_memory} | {registers} | {spilled_bytes} | {hot_spills} |\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SASS: &str = "
        /*0000*/                   LDL R1, [R2] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0018*/  /* 0x000fe2000001ff00 */
        /*0020*/                   STL [R2], R1 ;
        /*0030*/              @!P0 BRA 0x10 ;
        /*0040*/                   STL [R2+0x4], R1 ;
        /*0050*/                   BRA 0x50;
    ";

    #[test]
    fn hot_spills_of_loop_counts_only_if_it_multiplies() {
        assert_eq!(hot_spills_of(SASS), 1);
        assert_eq!(
            hot_spills_of(&SASS.replace("HMMA.16816.F32.BF16", "FADD")),
            0
        );
    }

    #[test]
    fn integers_of_nvcc_removes_duplicate_type() {
        let source = "typedef signed long long int int64_t;\nint64_t f() { return 0; }";
        assert_eq!(integers_of_nvcc(source), "int64_t f() { return 0; }");
    }
}
