//! Installs LLVM for builds with the feature `cuda` or `rocm`.
//!
//! cubecl-cuda 0.11.3 always depends on tracel-llvm-bundler, even if no kernel needs LLVM. The bundler's build script looks
//! for LLVM in the user's data directory, and downloads LLVM from GitHub if the directory has none. So that builds also work
//! without access to GitHub, this module installs Debian's LLVM 22 in that directory.
//!
//! AMD's kernels are compiled through LLVM, so the bundler's own LLVM 23 is the better choice for `rocm` if it can be
//! downloaded. CUDA's kernels are compiled by NVRTC, so any LLVM that links is enough.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use super::{apt, vulkan::user_data_dir};
use crate::process::{Result, workspace_root};

const BUNDLER: &str = "tracel-llvm-bundler";

/// The marker file in the LLVM directory. The bundler considers an installation with this file to be complete.
const MARKER: &str = ".tracel-llvm-installed";

const DEBIAN_LLVM: &str = "/usr/lib/llvm-22";

/// The required Debian packages: LLVM, the libraries that LLVM's static archives need, LLD for the AMD code of cubecl-llvm, and
/// a C++ compiler for cubecl-llvm's shims.
const PACKAGES: &[&str] = &[
    "llvm-22-dev",
    "libpolly-22-dev",
    "liblld-22-dev",
    "libzstd-dev",
    "zlib1g-dev",
    "libxml2-dev",
    "g++",
];

/// A shell script that wraps Debian's llvm-config and removes libz3 from its output. The output contains libz3 as a
/// path, which the bundler cannot turn into an `-l` flag. LLVM's static archives do not need libz3.
const LLVM_CONFIG: &str = r#"#!/bin/sh
case " $* " in
  *" --system-libs "*) /usr/lib/llvm-22/bin/llvm-config "$@" | sed 's#[^ ]*libz3[^ ]*##g' ;;
  *) exec /usr/lib/llvm-22/bin/llvm-config "$@" ;;
esac
"#;

/// Installs LLVM in the directory in which the bundler looks for it, unless LLVM is already there.
pub fn llvm() -> Result<()> {
    let prefix = prefix()?;
    let ready = prefix.join(MARKER).exists();
    let downloaded = ready && !prefix.join("lib").is_symlink();
    let missing = if downloaded {
        Vec::new()
    } else {
        apt::missing(PACKAGES)
    };
    if !missing.is_empty() {
        install(&missing)?;
    }
    if ready {
        println!("LLVM for CubeCL is in place: {}", prefix.display());
        return Ok(());
    }
    lay_out(&prefix).map_err(|error| {
        let prefix = prefix.display();
        format!("Debian's LLVM could not be installed: {error}; remove {prefix} and run this again")
    })?;
    println!(
        "Debian's LLVM 22 now replaces CubeCL's bundle: {}",
        prefix.display()
    );
    Ok(())
}

/// Runs [`llvm`] if its packages can be installed. A failure is only a warning, because the bundler's own download may still
/// succeed.
pub fn llvm_if_possible() {
    let in_place = prefix().is_ok_and(|prefix| prefix.join(MARKER).exists());
    let can_install = cfg!(target_arch = "x86_64") && apt::usable();
    if !(in_place || can_install) {
        println!("Leaving LLVM for CubeCL to the download in its build.");
    } else if let Err(error) = llvm() {
        eprintln!(
            "warning: {error}\nThe build continues with the LLVM that is installed or that it can download."
        );
    }
}

fn install(missing: &[&str]) -> Result<()> {
    let by_hand = format!(
        "Either let the build download its own LLVM from GitHub, or install Debian's by hand \
         (Debian 12 or later) and run this again:\n  \
         sudo apt-get update && sudo apt-get install --no-install-recommends {}",
        missing.join(" ")
    );
    if !apt::usable() {
        return Err(format!(
            "Debian's LLVM 22 is not complete; installing it needs apt-get and root.\n\
             {by_hand}"
        ));
    }
    apt::install(missing)
        .map_err(|error| format!("Debian's LLVM 22 could not be installed: {error}.\n{by_hand}"))
}

/// Returns the directory in which this workspace's version of the bundler looks for LLVM.
fn prefix() -> Result<PathBuf> {
    let path = workspace_root().join("Cargo.lock");
    let lockfile = fs::read_to_string(&path)
        .map_err(|error| format!("{} could not be read: {error}", path.display()))?;
    let version = locked_version(&lockfile, BUNDLER).ok_or_else(|| {
        format!(
            "{} does not contain {BUNDLER}: CubeCL no longer needs this set-up",
            path.display()
        )
    })?;
    let data = user_data_dir()
        .ok_or("the user's data directory is unknown: set HOME or XDG_DATA_HOME to a full path")?;
    Ok(data.join(format!("tracel/tracel-llvm-{version}")))
}

fn locked_version<'a>(lockfile: &'a str, package: &str) -> Option<&'a str> {
    let name = format!("name = \"{package}\"");
    let mut lines = lockfile.lines().skip_while(|line| *line != name).skip(1);
    lines
        .next()?
        .strip_prefix("version = \"")?
        .strip_suffix('"')
}

fn lay_out(prefix: &Path) -> io::Result<()> {
    let bin = prefix.join("bin");
    fs::create_dir_all(&bin)?;
    for name in ["lib", "include"] {
        let link = prefix.join(name);
        if link.is_symlink() {
            fs::remove_file(&link)?;
        }
        symlink(Path::new(DEBIAN_LLVM).join(name), &link)?;
    }
    let llvm_config = bin.join("llvm-config");
    fs::write(&llvm_config, LLVM_CONFIG)?;
    fs::set_permissions(&llvm_config, fs::Permissions::from_mode(0o755))?;
    // The marker file is written last. Otherwise the bundler would consider an interrupted installation to be complete.
    fs::write(prefix.join(MARKER), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_version_of_named_package_ignores_dependencies() {
        let lockfile = "[[package]]\nname = \"a-b\"\nversion = \"1.0.0\"\n\n\
                        [[package]]\nname = \"a\"\nversion = \"2.1.0-4\"\n\
                        dependencies = [\n \"b\",\n]\n";
        assert_eq!(locked_version(lockfile, "a"), Some("2.1.0-4"));
        assert_eq!(locked_version(lockfile, "b"), None);
    }

    #[test]
    fn lay_out_twice_gives_same_folder() {
        let prefix = std::env::temp_dir().join(format!("xtask-llvm-{}", std::process::id()));
        lay_out(&prefix).unwrap();
        lay_out(&prefix).unwrap();
        assert_eq!(
            fs::read_link(prefix.join("lib")).unwrap(),
            Path::new("/usr/lib/llvm-22/lib")
        );
        assert!(prefix.join(MARKER).is_file());
        let mode = fs::metadata(prefix.join("bin/llvm-config"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o755);
        fs::remove_dir_all(&prefix).unwrap();
    }
}
