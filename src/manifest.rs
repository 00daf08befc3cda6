//! Compares the workspace's manifests with those of its dependencies.

use serde_json::Value;
use std::process::Command;

/// Returns the packages that Cargo resolves for this machine.
///
/// Packages that only other platforms need are left out, because a build on this machine has not downloaded them.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let ended = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", "host-tuple"])
        .args([
            "--manifest-path",
            concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
        ])
        .output()
        .expect("cargo runs");
    let text = String::from_utf8_lossy(&ended.stderr);
    let metadata: Value = serde_json::from_slice(&ended.stdout)
        .unwrap_or_else(|error| panic!("cargo metadata: {error}: {text}"));
    metadata["packages"]
        .as_array()
        .expect("the metadata list packages")
        .clone()
}

/// Checks that the workspace's `rust-version` equals Burn's. Burn does not compile with older compilers.
#[test]
fn rust_version_of_own_packages_equals_burns() {
    let packages = packages();
    let rust_version = |name: &str| {
        let mut named = packages.iter().filter(|package| package["name"] == name);
        named.next().expect(name)["rust_version"].clone()
    };
    let version = |name: &str| -> Vec<u32> {
        let version = rust_version(name);
        let parts = version
            .as_str()
            .expect("the version is a string")
            .split('.');
        // Only the major and the minor version are compared, because `1.95` and `1.95.0` are the same version.
        parts
            .take(2)
            .map(|part| part.parse().expect("the part is a number"))
            .collect()
    };
    for own in [
        "attention-cube",
        "burn-gemma4",
        "gemma4-train",
        "gemma4-serve",
        "gemma4-cli",
        "attention-workspace",
    ] {
        assert_eq!(version(own), version("burn"), "{own}");
    }
}
