//! The layer check: verifies that no module of a crate imports from a higher layer, or from the crate's root.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::process::{self, Result};

/// The modules of a crate, grouped by layers, with the lowest layer first. A module is listed by one or two names: the
/// first name after `crate::`, or the first two names.
struct Crate {
    folder: &'static str,
    layers: &'static [&'static [&'static str]],
    /// The test-only modules. Such a module may import from any layer, and any layer may import from it.
    tests: &'static [&'static str],
}

const CRATES: &[Crate] = &[
    Crate {
        folder: "crates/cpu-gemv/src",
        layers: &[
            &["layout", "simd", "team"],
            &["fixed_point", "formats", "input", "scales"],
            &["kernel"],
            &["dots", "fixed"],
            &["isa"],
            &["lib"],
        ],
        tests: &[],
    },
    Crate {
        folder: "crates/cube-kit/src",
        layers: &[
            &["launch", "nvidia", "pdl", "rounding"],
            &["ampere", "hopper"],
            &["lib"],
        ],
        tests: &[],
    },
    Crate {
        folder: "crates/attention-cube/src",
        layers: &[
            &[
                "block_mask",
                "error",
                "integers",
                "math",
                "options",
                "problem",
                "types",
            ],
            &["device", "kernel_args", "reference", "tile_ops"],
            &["auxiliary", "blocks"],
            &["engine"],
            &["select"],
            &["self_check"],
            &["backend"],
            &["call", "explain", "quantized", "score_mod", "shards"],
            &["paged", "varlen"],
            &["nn"],
            &["internals", "lib"],
        ],
        tests: &["source", "testing"],
    },
    Crate {
        folder: "crates/gemma4-serve/src",
        layers: &[
            &["error"],
            &["engine"],
            &["text"],
            &["http"],
            &["batch_retries"],
            &["batch_file"],
            &["lib"],
        ],
        tests: &["testing"],
    },
    Crate {
        folder: "crates/burn-gemma4/src",
        layers: &[
            &[
                "cancellation",
                "error",
                "escaped",
                "json",
                "media_file",
                "media_hash",
                "media_size",
            ],
            &["audio", "quant", "vision"],
            &["config"],
            &["text"],
            &["op"],
            &["model"],
            &["speculative::drafter"],
            &["checkpoint", "train"],
            &["generate", "speculative"],
            &["embedding_gemma", "gemma", "session"],
            &["lib"],
        ],
        tests: &[],
    },
];

impl Crate {
    /// Returns the layer of a path, or `None` if no layer lists it. A layer may list the path's first two names as one
    /// module. Such a layer takes precedence over a layer that lists only the first name.
    fn layer(&self, path: &str) -> Option<usize> {
        let mut names = path.split("::");
        let first = names.next().unwrap_or_default();
        let both = names.next().map(|second| format!("{first}::{second}"));
        let of = |name: &str| self.layers.iter().position(|layer| layer.contains(&name));
        both.and_then(|both| of(&both)).or_else(|| of(first))
    }

    /// Returns the imports in a file of `module` that violate the layers.
    fn faults(&self, module: &str, text: &str) -> Vec<String> {
        let is_of_tests = |path: &str| {
            self.tests
                .contains(&path.split("::").next().unwrap_or_default())
        };
        if is_of_tests(module) {
            return Vec::new();
        }
        let Some(own) = self.layer(module) else {
            return vec![format!("module `{module}` has no layer")];
        };
        imports(text)
            .into_iter()
            .filter(|path| {
                let is_lower = self.layer(path).is_some_and(|layer| layer <= own);
                !is_lower && !is_of_tests(path)
            })
            .map(|path| format!("`{module}` imports `crate::{path}` from a higher layer"))
            .collect()
    }
}

/// Returns the paths after `crate::` in a file's code. Comments and test modules are skipped.
fn imports(text: &str) -> Vec<String> {
    let code: Vec<&str> = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default()
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n");
    code.split("crate::")
        .skip(1)
        .flat_map(|after| match after.starts_with('{') {
            true => names(&after[1..]),
            false => vec![first_names(after)],
        })
        .filter(|path| !path.is_empty())
        .collect()
}

/// Returns the first one or two names of each path in a `{…}` group. The text `group` begins after the opening brace.
fn names(group: &str) -> Vec<String> {
    let mut depth = 0;
    let mut names = Vec::new();
    let mut start = 0;
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(first_names(&group[start..at]));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(first_names(&group[start..at]));
                start = at + 1;
            }
            _ => {}
        }
    }
    names
}

/// Returns the first two names of a path, or its only name.
fn first_names(path: &str) -> String {
    let name = |text: &str| -> usize {
        let end = text.find(|character: char| !character.is_alphanumeric() && character != '_');
        end.unwrap_or(text.len())
    };
    let path = path.trim_start();
    let first = &path[..name(path)];
    let second = path[first.len()..].strip_prefix("::").unwrap_or_default();
    match name(second) {
        0 => first.to_string(),
        length => format!("{first}::{}", &second[..length]),
    }
}

/// Returns all Rust files in a folder and its subfolders, sorted.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| format!("{}: {error}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the module of a file: the first two components of its path in `folder`, or the only component, without the
/// extension.
fn module_of(folder: &Path, file: &Path) -> String {
    let inside = file.strip_prefix(folder).unwrap_or(file).with_extension("");
    let names: Vec<_> = inside
        .components()
        .take(2)
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    names.join("::")
}

/// Checks all crates, and fails if a module imports from a higher layer.
pub fn check() -> Result<()> {
    let root = process::workspace_root();
    let mut faults = Vec::new();
    for owner in CRATES {
        let folder = root.join(owner.folder);
        for file in files(&folder)? {
            let text = fs::read_to_string(&file)
                .map_err(|error| format!("{}: {error}", file.display()))?;
            // The layers do not apply to files of tests (`tests.rs`), nor to files that emit kernels as text (`source.rs`).
            let name = file.file_name().unwrap_or_default();
            if name == "tests.rs" || name == "source.rs" {
                continue;
            }
            for fault in owner.faults(&module_of(&folder, &file), &text) {
                faults.push(format!("{}: {fault}", file.display()));
            }
        }
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{}\nLayers are in xtask/src/layers.rs.",
            faults.join("\n")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERED: Crate = Crate {
        folder: "",
        layers: &[&["low", "high::part"], &["middle"], &["high"], &["lib"]],
        tests: &["testing"],
    };

    #[test]
    fn faults_upward_import_is_found() {
        for (text, found) in [
            ("use crate::low::Thing;", 0),
            ("use crate::middle::{self, Thing};", 0),
            ("use crate::lib::Thing;", 1),
            ("use crate::{low::Thing, high::{A, B}, middle};", 1),
            ("let x = crate::high::call();", 1),
            ("use crate::Root;", 1),
            ("use crate::high::part::Thing;", 0),
            ("use crate::high::{part, Thing};", 1),
            ("// crate::high\nuse crate::testing::card;", 0),
            (
                "#[cfg(test)]\nmod tests {\n    use crate::high::Thing;\n}",
                0,
            ),
        ] {
            assert_eq!(LAYERED.faults("middle", text).len(), found, "{text}");
        }
        assert_eq!(LAYERED.faults("low", "use crate::middle::Thing;").len(), 1);
        assert_eq!(LAYERED.faults("unknown", "").len(), 1);
    }

    #[test]
    fn check_workspace_has_no_upward_import() {
        check().unwrap();
    }

    #[test]
    fn module_of_nested_file_is_its_first_folder() {
        let folder = Path::new("src");
        for (file, module) in [
            ("src/lib.rs", "lib"),
            ("src/engine/tiling/backward_tiles.rs", "engine::tiling"),
            ("src/select.rs", "select"),
        ] {
            assert_eq!(module_of(folder, Path::new(file)), module);
        }
    }
}
