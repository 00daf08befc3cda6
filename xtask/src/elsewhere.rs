//! Sets up systems other than Linux. Nothing needs to be installed on these systems: they have a graphics driver, and
//! CubeCL's build downloads LLVM.

use std::process::Command;

use crate::process::Result;

pub struct Graphics;

impl Graphics {
    pub fn apply(&self, _: &mut Command) {}
}

pub fn graphics() -> Result<Graphics> {
    Ok(Graphics)
}

pub fn llvm() -> Result<()> {
    println!("Nothing to do on this system: CubeCL's build downloads its LLVM.");
    Ok(())
}

pub fn llvm_if_possible() {}

/// Returns false, because the build with MPI has not been tried on these systems.
pub fn has_mpi() -> bool {
    false
}

pub fn mpi_if_possible() {}

/// The linker of programs for ARM, which [`aarch64`] would install.
pub const AARCH64_LINKER: &str = "";

/// The command that runs a program for ARM, which [`aarch64`] would install.
pub const AARCH64_RUNNER: &str = "";

/// Returns an error, because QEMU runs a program without its system only on Linux.
pub fn aarch64() -> Result<()> {
    Err("the emulation of an ARM CPU supports only Linux".into())
}
