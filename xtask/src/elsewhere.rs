//! Set-up outside Linux: there is none. The system brings its graphics driver, and CubeCL's build
//! downloads its LLVM.

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

/// Nobody has tried it here.
pub fn has_mpi() -> bool {
    false
}

pub fn mpi_if_possible() {}
