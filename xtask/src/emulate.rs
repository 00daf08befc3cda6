//! `cargo xtask emulate`: runs the operator's CUDA tests without a GPU. `docs/emulator.md` describes what the emulator checks.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    process::{self, Result},
    setup,
};

/// The file names under which programs load the CUDA driver and the CUDA C++ compiler. The name `libcuda.so.1` is left out,
/// because the real compiler loads a driver under that name and needs functions that the emulator lacks.
const NAMES: [&str; 2] = ["libcuda.so", "libnvrtc.so"];

/// The cargo options of the build.
const PROFILE: [&str; 4] = [
    "--release",
    "--no-default-features",
    "--features",
    "cuda,flex",
];

/// A Python program that prints the folders of NVIDIA's Python packages, one per line.
const PACKAGES: &str = "import nvidia; print('\\n'.join(nvidia.__path__))";

/// Builds the emulator, runs the tests with the emulator, and returns the exit code of the tests.
pub fn run(args: &[String]) -> Result<u8> {
    if !cfg!(target_os = "linux") {
        return Err("the emulator supports only Linux".into());
    }
    let (card, args) = card(args)?;
    let cuda = Cuda::find()?;
    let target = process::target_folder().join("emulator");
    let libraries = build(&target)?;
    setup::llvm_if_possible();

    let path = |folder: &Path| folder.display().to_string();
    let others = env::var("LD_LIBRARY_PATH").map_or(String::new(), |others| format!(":{others}"));
    let mut environment = vec![
        format!(
            "LD_LIBRARY_PATH={}:{}{others}",
            path(&libraries),
            path(&cuda.libraries)
        ),
        format!("CUDA_PATH={}", path(&cuda.root)),
        format!("EMULATOR_NVRTC={}", path(&cuda.nvrtc)),
        format!("EMULATOR_CACHE={}", path(&target.join("ptx"))),
    ];
    if let Some(card) = card {
        environment.push(format!("EMULATED_CARD={card}"));
    }
    if env::var_os("ATTENTION_TEST_DEVICES").is_none() {
        environment.push("ATTENTION_TEST_DEVICES=cuda".into());
    }

    let mut command = process::cargo();
    // The environment variables are set through cargo's `runner` setting, so that only the programs that cargo runs see them.
    // If cargo itself saw another CUDA_PATH, it would rebuild the CUDA crates.
    command.arg("--config").arg(runner(&environment));
    command.arg("test").args(PROFILE);
    if !chooses_test(args) {
        command.args(["--test", "operator"]);
        // Build the example program `attention` here, because one of the operator's tests starts it.
        process::run(
            process::cargo()
                .args(["build", "--example", "attention"])
                .args(PROFILE),
        )?;
    }
    let status = process::status(command.args(args))?;
    match status.code() {
        Some(code) => Ok(u8::try_from(code).unwrap_or(1)),
        None => Err(format!("the tests were stopped ({status})")),
    }
}

/// Splits the arguments into the name of the requested GPU and the arguments for cargo.
fn card(args: &[String]) -> Result<(Option<&str>, &[String])> {
    match args {
        [option, card, rest @ ..] if option == "--card" => Ok((Some(card), rest)),
        [option] if option == "--card" => Err("`--card` takes a name, such as a100 or h100".into()),
        [option, rest @ ..] => match option.strip_prefix("--card=") {
            Some(card) => Ok((Some(card), rest)),
            None => Ok((None, args)),
        },
        [] => Ok((None, args)),
    }
}

fn chooses_test(args: &[String]) -> bool {
    let mut for_cargo = args.iter().take_while(|arg| *arg != "--");
    for_cargo.any(|arg| arg == "--test" || arg.starts_with("--test="))
}

/// Returns the cargo setting that runs programs with the environment variables `environment`.
fn runner(environment: &[String]) -> String {
    // The `Debug` format of a Rust string is also a valid TOML string for all characters that paths contain.
    let words = environment.iter().map(|variable| format!("{variable:?}"));
    let words: Vec<_> = std::iter::once("\"env\"".to_string())
        .chain(words)
        .collect();
    format!("target.'cfg(unix)'.runner = [{}]", words.join(", "))
}

/// Builds the emulator for this CPU, and copies the emulator's library to the file names under which programs load CUDA.
fn build(target: &Path) -> Result<PathBuf> {
    let mut flags = env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" -C target-cpu=native");
    let mut command = process::cargo();
    command.args(["build", "--release", "--package", "cuda-emulator"]);
    command
        .arg("--target-dir")
        .arg(target)
        .env("RUSTFLAGS", flags);
    process::run(&mut command)?;

    let libraries = target.join("lib");
    let built = target.join("release/libcuda_emulator.so");
    fs::create_dir_all(&libraries)
        .and_then(|()| {
            NAMES
                .iter()
                .try_for_each(|name| fs::copy(&built, libraries.join(name)).map(drop))
        })
        .map_err(|error| format!("{} could not be filled: {error}", libraries.display()))?;
    Ok(libraries)
}

/// The folders of CUDA's headers and of NVRTC, NVIDIA's compiler for CUDA C++. Neither the headers nor NVRTC need a GPU.
struct Cuda {
    root: PathBuf,
    libraries: PathBuf,
    nvrtc: PathBuf,
}

impl Cuda {
    fn find() -> Result<Self> {
        if let Some(root) = env::var_os("CUDA_PATH") {
            return Self::at(Path::new(&root)).ok_or_else(|| {
                format!(
                    "CUDA_PATH={} has no libnvrtc.so with its version in `lib` or `lib64`, or no `include/cuda_runtime.h`",
                    root.display()
                )
            });
        }
        let of_python = ["python3", "python"]
            .into_iter()
            .find_map(|python| process::output(Command::new(python).args(["-c", PACKAGES])));
        let of_python = of_python.unwrap_or_default();
        of_python
            .lines()
            .flat_map(|folder| entries(Path::new(folder)))
            .chain([PathBuf::from("/usr/local/cuda")])
            .find_map(|root| Self::at(&root))
            .ok_or_else(|| {
                "NVIDIA's compiler NVRTC and the CUDA headers were not found; they need no GPU. Either set CUDA_PATH to a CUDA \
                 toolkit, or let Python install them and run this again:\n  \
                 python3 -m pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl\n\
                 (in a virtual environment: activate it, or set CUDA_PATH to its `lib/python3.*/site-packages/nvidia/cu13`)"
                    .to_string()
            })
    }

    /// Returns the CUDA installation in the folder `root`, or `None` if it is not complete.
    fn at(root: &Path) -> Option<Self> {
        if !root.join("include/cuda_runtime.h").exists() {
            return None;
        }
        ["lib", "lib64"].into_iter().find_map(|folder| {
            let libraries = root.join(folder);
            let nvrtc = entries(&libraries).into_iter().rfind(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("libnvrtc.so.")
            })?;
            Some(Self {
                root: root.to_path_buf(),
                nvrtc,
                libraries,
            })
        })
    }
}

/// Returns the paths in a folder, sorted by name. The list is empty if the folder cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut entries: Vec<_> = entries.map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn card_with_leading_option_is_split_off() {
        for (line, expected, left) in [
            ("--card h100 -- masks", Some("h100"), 2),
            ("--card=a100", Some("a100"), 0),
            ("-- --card h100", None, 3),
            ("", None, 0),
        ] {
            let args = args(line);
            let (card, rest) = card(&args).unwrap();
            assert_eq!((card, rest.len()), (expected, left), "{line}");
        }
        assert!(card(&args("--card")).is_err());
    }

    #[test]
    fn chooses_test_with_test_option_is_true() {
        assert!(chooses_test(&args("--test memory -- x")));
        assert!(!chooses_test(&args("-- --test")));
    }

    #[test]
    fn runner_with_variables_escapes_them() {
        let variables = ["A=b c".to_string(), "D=\"".to_string()];
        let expected = r#"target.'cfg(unix)'.runner = ["env", "A=b c", "D=\""]"#;
        assert_eq!(runner(&variables), expected);
    }
}
