//! The workspace's manifest beside those of its dependencies.

use serde_json::Value;
use std::process::Command;

/// The packages that Cargo resolves, without a network.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let ended = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args([
            "--manifest-path",
            concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
        ])
        .output()
        .expect("cargo");
    let text = String::from_utf8_lossy(&ended.stderr);
    let metadata: Value = serde_json::from_slice(&ended.stdout)
        .unwrap_or_else(|error| panic!("cargo metadata: {error}: {text}"));
    metadata["packages"].as_array().expect("packages").clone()
}

/// A compiler that Burn refuses is of no use, and an older one than Burn asks for is refused.
#[test]
fn rust_version_is_burns() {
    let packages = packages();
    let rust_version = |name: &str| {
        let mut named = packages.iter().filter(|package| package["name"] == name);
        named.next().expect(name)["rust_version"].clone()
    };
    let version = |name: &str| -> Vec<u32> {
        let version = rust_version(name);
        let parts = version.as_str().expect("a version").split('.');
        // `1.95` and `1.95.0` are one version.
        parts
            .take(2)
            .map(|part| part.parse().expect("a number"))
            .collect()
    };
    for own in ["attention-cube", "burn-gemma4", "attention-workspace"] {
        assert_eq!(version(own), version("burn"), "{own}");
    }
}
