//! MPI for tests of training by several processes: a library, its launcher, and libclang, which reads its header.

use std::{fs, path::Path, process::Command};

use super::apt;
use crate::process;

const PACKAGES: &[&str] = &["libopenmpi-dev", "openmpi-bin", "libclang-dev"];

/// Whether a build with MPI can work.
pub fn has_mpi() -> bool {
    let compiles = process::output(Command::new("mpicc").arg("-show")).is_some();
    compiles && has_libclang()
}

/// Where Debian's packages have it, each version of LLVM in a folder, or where `LIBCLANG_PATH` says.
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

/// Installs it where that is possible. Elsewhere the tests do without.
pub fn mpi_if_possible() {
    if has_mpi() {
        println!("MPI is in place.");
    } else if !apt::usable() {
        println!("There is no MPI: what needs it is not built.");
    } else if let Err(error) = apt::install(&apt::missing(PACKAGES)) {
        eprintln!("warning: {error}\nWhat needs MPI is not built.");
    }
}
