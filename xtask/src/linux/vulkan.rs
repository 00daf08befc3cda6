//! Installs a Vulkan driver and the Vulkan loader for the tests. On a machine without a GPU, Mesa's lavapipe runs the kernels
//! on the CPU.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{self, Command},
};

use super::apt;
use crate::process::{Result, output};

const PACKAGES: &[&str] = &["mesa-vulkan-drivers", "libvulkan1"];

const BY_HAND: &str = "\
Install Mesa's Vulkan drivers and the loader, or your GPU's own driver, then run this again:
  Debian, Ubuntu:  sudo apt-get update && sudo apt-get install mesa-vulkan-drivers libvulkan1
  Fedora:          sudo dnf install mesa-vulkan-drivers vulkan-loader
  Arch:            sudo pacman -S vulkan-swrast vulkan-icd-loader
If they are in an unusual place, set VK_DRIVER_FILES and LD_LIBRARY_PATH.";

const LOADER: &str = "libvulkan.so.1";

const LOADER_DIRS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
];

/// The directories in which the Vulkan loader looks for driver manifests.
const MANIFEST_DIRS: &[&str] = &[
    "/usr/share/vulkan/icd.d",
    "/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
];

/// The directory in which some container hosts mount the manifest of NVIDIA's driver. The loader does not search this
/// directory.
const MOUNTED_MANIFEST_DIR: &str = "/usr/local/nvidia/share/vulkan/icd.d";

/// The environment variables of the Vulkan loader that list driver manifests. The loader uses the first variable that
/// is set. If one of the variables is set, the loader does not search the directories in `MANIFEST_DIRS`.
const MANIFEST_VARIABLES: &[&str] = &["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];

/// The environment variables that programs need for Vulkan.
#[derive(Default)]
pub struct Graphics {
    driver_files: Option<OsString>,
    runtime_dir: Option<RuntimeDir>,
}

impl Graphics {
    pub fn apply(&self, command: &mut Command) {
        if let Some(files) = &self.driver_files {
            command.env(MANIFEST_VARIABLES[0], files);
        }
        if let Some(dir) = &self.runtime_dir {
            command.env(RuntimeDir::VARIABLE, &dir.0);
        }
    }
}

/// Ensures that programs can use Vulkan. Installs Mesa's drivers if possible.
pub fn graphics() -> Result<Graphics> {
    let mut drivers = find_drivers()?;
    if drivers.is_none() || !has_loader() {
        install()?;
        drivers = find_drivers()?;
    }
    match drivers {
        Some(drivers) if has_loader() => Ok(Graphics {
            driver_files: drivers.to_name,
            runtime_dir: RuntimeDir::if_unset()?,
        }),
        _ => Err(format!(
            "{} are installed, but Vulkan was still not found.\n{BY_HAND}",
            PACKAGES.join(" and ")
        )),
    }
}

fn install() -> Result<()> {
    if !apt::usable() {
        return Err(format!(
            "the tests need Vulkan, which is missing; installing it needs apt-get and root.\n\
             {BY_HAND}"
        ));
    }
    apt::install(PACKAGES).map_err(|error| format!("Vulkan is missing, and {error}.\n{BY_HAND}"))
}

/// The Vulkan drivers of this machine. `to_name` is the list of driver manifests to which the loader's environment
/// variable must be set. `to_name` is `None` if the loader finds the drivers with the variable as it is.
struct Drivers {
    to_name: Option<OsString>,
}

fn find_drivers() -> Result<Option<Drivers>> {
    let chosen = MANIFEST_VARIABLES
        .iter()
        .find_map(|name| Some((name, env::var_os(name)?)));
    if let Some((name, value)) = chosen.filter(|(_, value)| !value.is_empty()) {
        return if manifests_named(&value).is_empty() {
            Err(format!(
                "{name}={} does not name an existing Vulkan driver manifest; correct or unset it",
                value.display()
            ))
        } else {
            Ok(Some(Drivers { to_name: None }))
        };
    }

    let data_home = user_data_dir().map(|dir| dir.join("vulkan/icd.d"));
    let mut known = MANIFEST_DIRS.iter().map(PathBuf::from).chain(data_home);
    if known.any(|dir| !manifests_in(&dir).is_empty()) {
        return Ok(Some(Drivers { to_name: None }));
    }

    let mounted = manifests_in(Path::new(MOUNTED_MANIFEST_DIR));
    if mounted.is_empty() {
        return Ok(None);
    }
    let to_name = env::join_paths(&mounted).map_err(|error| {
        format!("the manifests in {MOUNTED_MANIFEST_DIR} cannot be listed in a variable: {error}")
    })?;
    Ok(Some(Drivers {
        to_name: Some(to_name),
    }))
}

/// Returns the user's data directory by the XDG rules, or `None` if it is unknown.
pub fn user_data_dir() -> Option<PathBuf> {
    let absolute = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|dir| dir.is_absolute())
    };
    absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))
}

/// Returns the driver manifests in a directory. The list is empty if the directory does not exist.
fn manifests_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut manifests: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| is_manifest(path))
        .collect();
    manifests.sort();
    manifests
}

/// Returns the driver manifests in a list of files and directories. The list has the format of `VK_DRIVER_FILES`.
fn manifests_named(list: &OsStr) -> Vec<PathBuf> {
    env::split_paths(list)
        .flat_map(|path| {
            if is_manifest(&path) {
                vec![path]
            } else {
                manifests_in(&path)
            }
        })
        .collect()
}

fn is_manifest(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("json")) && path.is_file()
}

fn has_loader() -> bool {
    // The full path of ldconfig is tried too, because the folder `/sbin` is often not in the PATH of ordinary users.
    let cached = ["ldconfig", "/sbin/ldconfig"].iter().any(|program| {
        output(Command::new(program).arg("-p")).is_some_and(|cache| cache.contains(LOADER))
    });
    let extra = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut dirs = LOADER_DIRS
        .iter()
        .map(PathBuf::from)
        .chain(env::split_paths(&extra));
    cached || dirs.any(|dir| dir.join(LOADER).exists())
}

/// A private directory that replaces the runtime directory of a login session (`XDG_RUNTIME_DIR`). Without a runtime directory,
/// Mesa prints a warning in every test.
struct RuntimeDir(PathBuf);

impl RuntimeDir {
    const VARIABLE: &str = "XDG_RUNTIME_DIR";

    fn if_unset() -> Result<Option<Self>> {
        if env::var_os(Self::VARIABLE).is_some() {
            return Ok(None);
        }
        let path = env::temp_dir().join(format!("attention-cube-{}", process::id()));
        Self::create(&path).map(Some).map_err(|error| {
            let (path, variable) = (path.display(), Self::VARIABLE);
            format!("{path} could not be created: {error}; remove it, or set {variable} or TMPDIR")
        })
    }

    fn create(path: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(path)?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        // The result is ignored, because it does no harm if the directory remains in the temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> RuntimeDir {
        let path = env::temp_dir().join(format!("xtask-{name}-{}", process::id()));
        RuntimeDir::create(&path).unwrap()
    }

    #[test]
    fn manifests_in_directory_gives_its_json_files() {
        let dir = directory("manifests-in");
        for name in ["b.json", "a.json", "notes.txt"] {
            fs::write(dir.0.join(name), "{}").unwrap();
        }
        fs::create_dir(dir.0.join("folder.json")).unwrap();
        assert_eq!(
            manifests_in(&dir.0),
            [dir.0.join("a.json"), dir.0.join("b.json")]
        );
        assert!(manifests_in(&dir.0.join("absent")).is_empty());
    }

    #[test]
    fn manifests_named_by_list_covers_files_and_directories() {
        let dir = directory("manifests-named");
        let (file, folder) = (dir.0.join("one.json"), dir.0.join("more"));
        fs::create_dir(&folder).unwrap();
        fs::write(&file, "{}").unwrap();
        fs::write(folder.join("two.json"), "{}").unwrap();

        let list = env::join_paths([&file, &folder, &dir.0.join("absent.json")]).unwrap();
        assert_eq!(manifests_named(&list), [file, folder.join("two.json")]);
        assert!(manifests_named(OsStr::new("/absent.json")).is_empty());
    }

    #[test]
    fn runtime_dir_on_drop_is_removed() {
        let dir = directory("runtime-dir");
        let path = dir.0.clone();
        fs::write(path.join("socket"), "").unwrap();
        drop(dir);
        assert!(!path.exists());
    }
}
