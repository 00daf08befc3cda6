//! Installs Debian packages.

use std::process::Command;

use crate::process::{self, Result};

/// Returns the names in `packages` whose packages are not installed, or all names if dpkg is missing.
pub fn missing<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let installed = |package: &str| {
        let mut query = Command::new("dpkg-query");
        query.args(["--show", "--showformat=${db:Status-Status}", package]);
        // If a package is installed for two architectures, dpkg-query prints the status twice. The code therefore compares
        // only the beginning of the output.
        process::output(&mut query).is_some_and(|status| status.starts_with("installed"))
    };
    packages
        .iter()
        .copied()
        .filter(|package| !installed(package))
        .collect()
}

/// True if [`install`] can work: apt-get exists, and the user is root.
pub fn usable() -> bool {
    process::output(Command::new("apt-get").arg("--version")).is_some()
        && process::output(Command::new("id").arg("-u")).is_some_and(|id| id.trim() == "0")
}

pub fn install(packages: &[&str]) -> Result<()> {
    println!("Installing {}", packages.join(" "));
    // A failed update alone is not an error. A broken third-party source makes the update fail even if the packages are
    // available, so only the result of the installation decides.
    let update = process::run(apt_get().arg("update"));
    let install = process::run(
        apt_get()
            .args(["install", "-y", "--no-install-recommends"])
            .args(packages),
    );
    match (update, install) {
        (_, Ok(())) => Ok(()),
        (Ok(()), Err(install)) => Err(install),
        (Err(update), Err(install)) => Err(format!("{update}, then {install}")),
    }
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    // `Dpkg::Use-Pty=0` keeps dpkg's progress bars out of logs.
    command
        .args(["-qq", "-o", "Dpkg::Use-Pty=0"])
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}
