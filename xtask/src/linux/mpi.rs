//! Installs MPI for the tests that train in several processes. The packages are the MPI library, its launcher, and libclang,
//! which parses the header of the MPI library.

use std::{fs, path::Path, process::Command};

use super::apt;
use crate::process;

const PACKAGES: &[&str] = &["libopenmpi-dev", "openmpi-bin", "libclang-dev"];

/// True if a build with MPI can work.
pub fn has_mpi() -> bool {
    let compiles = process::output(Command::new("mpicc").arg("-show")).is_some();
    compiles && has_libclang()
}

/// True if Debian's packages have installed libclang for some LLVM version, or if `LIBCLANG_PATH` is set.
fn has_libclang() -> bool {
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return true;
    }
    let versions = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    versions
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("llvm-"))
        .any(|entry| holds_libclang(&entry.path().join("lib")))
}

fn holds_libclang(folder: &Path) -> bool {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    names.any(|name| name.starts_with("libclang") && name.contains(".so") && !name.contains("cpp"))
}

/// Installs MPI if possible. Otherwise the tests run without MPI.
pub fn mpi_if_possible() {
    if has_mpi() {
        println!("MPI is installed.");
    } else if !apt::usable() {
        println!("MPI is not installed: the parts that need it are not built.");
    } else if let Err(error) = apt::install(&apt::missing(PACKAGES)) {
        eprintln!("warning: {error}\nThe parts that need MPI are not built.");
    }
}
