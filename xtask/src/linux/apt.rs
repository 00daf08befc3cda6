//! Debian's packages.

use std::process::Command;

use crate::process::{self, Result};

/// The packages among `packages` that are not installed; all of them where there is no dpkg.
pub fn missing<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let installed = |package: &str| {
        let mut query = Command::new("dpkg-query");
        query.args(["--show", "--showformat=${db:Status-Status}", package]);
        // A package can be there for two architectures, hence not an exact match.
        process::output(&mut query).is_some_and(|status| status.starts_with("installed"))
    };
    packages
        .iter()
        .copied()
        .filter(|package| !installed(package))
        .collect()
}

/// Whether [`install`] has a chance: there is an apt-get, and we are root.
pub fn usable() -> bool {
    process::output(Command::new("apt-get").arg("--version")).is_some()
        && process::output(Command::new("id").arg("-u")).is_some_and(|id| id.trim() == "0")
}

pub fn install(packages: &[&str]) -> Result<()> {
    println!("Installing {}", packages.join(" "));
    // One broken third-party source fails the update although the packages are at hand, so the
    // installation decides.
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
    // Without a terminal of its own, dpkg draws no progress bars into logs.
    command
        .args(["-qq", "-o", "Dpkg::Use-Pty=0"])
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}
