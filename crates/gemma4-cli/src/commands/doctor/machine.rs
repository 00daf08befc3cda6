//! The part of the report about the program and the machine.

use super::{gibibytes, table};
use crate::device::{DeviceName, has_nvidia_driver, is_built};
use crate::host_memory::host_memory;
use std::{env, fs, thread};

/// A part of the report, and advice for the end of the report.
pub(super) struct MachineReport {
    pub text: String,
    pub advice: Vec<String>,
}

/// The Cargo features of this build.
const FEATURES: &[(&str, bool)] = &[
    ("cuda", cfg!(feature = "cuda")),
    ("rocm", cfg!(feature = "rocm")),
    ("metal", cfg!(feature = "metal")),
    ("vulkan", cfg!(feature = "vulkan")),
    ("wgpu", cfg!(feature = "wgpu")),
    ("flex", cfg!(feature = "flex")),
    ("serve", cfg!(feature = "serve")),
    ("training", cfg!(feature = "training")),
    ("download", cfg!(feature = "download")),
    ("mpi", cfg!(feature = "mpi")),
    ("autotune", cfg!(feature = "autotune")),
    ("persistence", cfg!(feature = "persistence")),
];

/// The prefixes of environment variables that change devices or kernels. Only these variables are reported.
const VARIABLES: &[&str] = &[
    "ATTENTION_",
    "CUBECL_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "NVIDIA_",
    "VK_",
    "WGPU_",
];

/// Describes the program, its features, the processor, the memory and the NVIDIA driver.
pub(super) fn report() -> MachineReport {
    let features = FEATURES.iter().filter(|(_, is_on)| *is_on);
    let features: Vec<_> = features.map(|(name, _)| *name).collect();
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut rows = vec![
        (
            "program",
            format!(
                "gemma4 {} ({})",
                env!("CARGO_PKG_VERSION"),
                features.join(", ")
            ),
        ),
        (
            "system",
            format!("{} {}", env::consts::OS, env::consts::ARCH),
        ),
        (
            "processor",
            format!("{threads} threads; {}", vector_instructions()),
        ),
    ];
    if let Some([total, free]) = host_memory() {
        let text = format!("{}, {} available", gibibytes(total), gibibytes(free));
        rows.push(("memory", text));
    }
    if let Some(version) = nvidia_driver() {
        rows.push(("NVIDIA driver", version));
    }
    rows.extend(variables().into_iter().map(|text| ("environment", text)));
    let mut advice = Vec::new();
    if has_nvidia_driver() && !is_built(DeviceName::Cuda) {
        advice.push("This machine has an NVIDIA driver, but the program was built without CUDA, which is fastest there. Build it with `--features cuda`.".into());
    }
    if !cfg!(feature = "persistence") {
        advice.push("The program was built without the feature `persistence`, so each start compiles its kernels again.".into());
    }
    MachineReport {
        text: format!("# gemma4 doctor\n{}", table(&rows)),
        advice,
    }
}

/// Returns the vector instructions of the processor that matter for matrix products.
fn vector_instructions() -> String {
    #[cfg(target_arch = "x86_64")]
    let known = [
        ("AVX2", std::arch::is_x86_feature_detected!("avx2")),
        ("FMA", std::arch::is_x86_feature_detected!("fma")),
        ("AVX-512", std::arch::is_x86_feature_detected!("avx512f")),
        (
            "AVX-512 VNNI",
            std::arch::is_x86_feature_detected!("avx512vnni"),
        ),
        (
            "AVX-512 BF16",
            std::arch::is_x86_feature_detected!("avx512bf16"),
        ),
    ];
    #[cfg(target_arch = "aarch64")]
    let known = [
        ("NEON", std::arch::is_aarch64_feature_detected!("neon")),
        (
            "dot product",
            std::arch::is_aarch64_feature_detected!("dotprod"),
        ),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let known: [(&str, bool); 0] = [];
    let found: Vec<_> = known
        .into_iter()
        .filter(|(_, is_there)| *is_there)
        .map(|(name, _)| name)
        .collect();
    match found.is_empty() {
        true => "no known vector instructions".into(),
        false => found.join(", "),
    }
}

/// Returns the version of the running NVIDIA driver, on Linux.
fn nvidia_driver() -> Option<String> {
    driver_of(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// Reads the version from the contents of `/proc/driver/nvidia/version`.
fn driver_of(text: &str) -> Option<String> {
    let mut words = text.lines().next()?.split_whitespace();
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    words.find(is_version).map(str::to_owned)
}

/// Returns the environment variables that change devices or kernels.
fn variables() -> Vec<String> {
    let mut found: Vec<_> = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| VARIABLES.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(name, value)| format!("`{name}={}`", value.to_string_lossy()))
        .collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_of_both_kernel_modules_is_found() {
        for line in [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Mon Feb 26 2024",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
        ] {
            let version = driver_of(line).expect("the line has a version");
            assert!(line.contains(&format!(" {version} ")), "{version}");
        }
    }
}
