//! Installs a compiler and an emulator for the tests on ARM.

use super::apt;
use crate::process::{self, Result};
use std::process::Command;

const PACKAGES: &[&str] = &[
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "qemu-user",
];

/// The linker of programs for ARM.
pub const AARCH64_LINKER: &str = "aarch64-linux-gnu-gcc";

/// The command that runs a program for ARM. The option names the folder of ARM's shared libraries.
pub const AARCH64_RUNNER: &str = "qemu-aarch64 -L /usr/aarch64-linux-gnu";

/// Installs the compiler and the emulator, if they are missing.
pub fn aarch64() -> Result<()> {
    let is_installed =
        |program: &str| process::output(Command::new(program).arg("--version")).is_some();
    if is_installed(AARCH64_LINKER) && is_installed("qemu-aarch64") {
        return Ok(());
    }
    if !apt::usable() {
        return Err(format!(
            "`{AARCH64_LINKER}` or `qemu-aarch64` is missing; install a C compiler for ARM and QEMU's user mode, on \
             Debian by `apt-get install {}`",
            PACKAGES.join(" ")
        ));
    }
    apt::install(&apt::missing(PACKAGES))
}
