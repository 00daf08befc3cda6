//! Tests of the file of verdicts, each in a folder of its own.

use super::*;
use burn::tensor::DType;
use std::cell::Cell;
use tempfile::TempDir;

const PASSED: FragmentVerdict = FragmentVerdict::Passed {
    speed_percent: Some(250),
};

fn tiles(dtype: DType) -> TileCheck {
    TileCheck {
        pass: Pass::Backward,
        dtype,
        tiles: "rows 64; rows 32".into(),
    }
}

fn identity() -> Identity {
    Identity {
        runtime: "wgpu<spirv>".into(),
        device: "Some (TM) Card".into(),
        driver: "driver 1.2".into(),
        ..Identity::default()
    }
}

fn file(identity: &Identity, folder: &TempDir) -> VerdictFile {
    VerdictFile::in_folder(
        identity,
        Some(folder.path().to_path_buf()),
        Duration::from_millis(60),
    )
}

/// Returns the verdict of a file, and true if the check ran for the verdict.
fn ask(file: &VerdictFile, tiles: &TileCheck, answer: FragmentVerdict) -> (FragmentVerdict, bool) {
    let has_run = Cell::new(false);
    let (verdict, _) = file.verdict(tiles, || {
        has_run.set(true);
        answer
    });
    (verdict, has_run.get())
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn refused(reason: &str) -> FragmentVerdict {
    FragmentVerdict::Refused(reason.into())
}

#[test]
fn verdict_is_kept_for_each_dtype_and_driver() {
    let folder = folder();
    let [f16, bf16] = [DType::F16, DType::BF16].map(tiles);
    let first = file(&identity(), &folder);
    assert_eq!(ask(&first, &f16, PASSED), (PASSED, true));
    assert_eq!(
        ask(&first, &bf16, refused("wrong")),
        (refused("wrong"), true)
    );
    let later = file(&identity(), &folder);
    assert_eq!(ask(&later, &f16, refused("unused")), (PASSED, false));
    assert_eq!(ask(&later, &bf16, PASSED), (refused("wrong"), false));
    let path = folder
        .path()
        .join("attention-cube/cmma-wgpu-spirv-some-tm-card.json");
    let (_, kept) = later.verdict(&f16, || unreachable!("the verdict is known"));
    assert_eq!(kept, Some(path));
    let updated = Identity {
        driver: "driver 1.3".into(),
        ..identity()
    };
    let updated = file(&updated, &folder);
    assert_eq!(ask(&updated, &bf16, PASSED), (PASSED, true));
}

#[test]
fn verdict_after_a_check_without_end_is_refused() {
    let folder = folder();
    let file = file(&identity(), &folder);
    let tiles = tiles(DType::F16);
    let path = file.path.clone().expect("the folder is known");
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        file.verdict(&tiles, || panic!("this stands for a killed process"))
    }));
    assert!(killed.is_err());
    let (verdict, has_run) = ask(&file, &tiles, PASSED);
    let FragmentVerdict::Refused(reason) = verdict else {
        panic!("{verdict:?}");
    };
    assert!(!has_run && reason.contains("was killed"), "{reason}");
    assert!(
        reason.contains(&format!("delete {}", path.display())),
        "{reason}"
    );
    fs::remove_file(path).expect("the file exists");
    assert_eq!(ask(&file, &tiles, PASSED), (PASSED, true));
}

#[test]
fn kept_has_no_verdict_of_a_running_check() {
    let folder = folder();
    let file = file(&identity(), &folder);
    let tiles = tiles(DType::F16);
    assert_eq!(file.kept(&tiles), None);
    file.verdict(&tiles, || {
        assert_eq!(file.kept(&tiles), None);
        PASSED
    });
    let path = file.path.clone().expect("the folder is known");
    assert_eq!(file.kept(&tiles), Some((PASSED, path)));
}

#[test]
fn verdict_during_another_check_is_refused_for_this_process() {
    let folder = folder();
    let file = file(&identity(), &folder);
    let tiles = tiles(DType::F16);
    let (verdict, _) = file.verdict(&tiles, || {
        let (verdict, has_run) = ask(&file, &tiles, PASSED);
        let FragmentVerdict::Refused(reason) = verdict else {
            panic!("{verdict:?}");
        };
        assert!(!has_run && reason.contains("another process"), "{reason}");
        PASSED
    });
    assert_eq!(verdict, PASSED);
    assert_eq!(ask(&file, &tiles, refused("unused")), (PASSED, false));
}

#[test]
fn verdict_of_damaged_file_is_checked_again() {
    let folder = folder();
    let file = file(&identity(), &folder);
    let tiles = tiles(DType::F16);
    let path = file.path.clone().expect("the folder is known");
    for text in ["", "{", "[1]", "\u{0}\u{1}", "{\"check_version\": 1}"] {
        fs::create_dir_all(folder.path().join("attention-cube")).expect("a folder");
        fs::write(&path, text).expect("a file");
        assert_eq!(ask(&file, &tiles, PASSED), (PASSED, true), "{text:?}");
        assert_eq!(ask(&file, &tiles, refused("unused")), (PASSED, false));
    }
}

#[test]
fn verdict_without_writable_folder_is_checked_in_each_process() {
    let folder = folder();
    fs::write(folder.path().join("attention-cube"), "a file").expect("a file");
    let tiles = tiles(DType::F16);
    let blocked = file(&identity(), &folder);
    let unknown = VerdictFile::in_folder(&identity(), None, WAIT);
    for file in [blocked, unknown] {
        let (verdict, path) = file.verdict(&tiles, || PASSED);
        assert_eq!((verdict, path), (PASSED, None));
        assert_eq!(ask(&file, &tiles, PASSED), (PASSED, true));
    }
}

#[test]
fn verdict_of_file_in_folder_without_access_is_believed() {
    let folder = folder();
    let file = file(&identity(), &folder);
    let tiles = tiles(DType::F16);
    assert_eq!(ask(&file, &tiles, PASSED), (PASSED, true));
    // A folder in the place of the lock stands for a folder that this process cannot write.
    let path = file.path.clone().expect("the folder is known");
    let lock = path.with_extension("lock");
    fs::remove_file(&lock).expect("the check made the file");
    fs::create_dir(&lock).expect("a folder");
    assert_eq!(ask(&file, &tiles, refused("unused")), (PASSED, false));
}

#[test]
fn verdict_that_cannot_be_written_leaves_no_running_check() {
    let folder = folder();
    let file = file(&identity(), &folder);
    let tiles = tiles(DType::F16);
    let path = file.path.clone().expect("the folder is known");
    let temporary = path.with_extension("tmp");
    let (verdict, kept) = file.verdict(&tiles, || {
        // A folder in the place of the temporary file stands for a full disk.
        fs::create_dir(&temporary).expect("a folder");
        PASSED
    });
    assert_eq!((verdict, kept), (PASSED, None));
    fs::remove_dir(temporary).expect("the folder exists");
    assert_eq!(ask(&file, &tiles, PASSED), (PASSED, true));
}

#[test]
fn verdict_without_absolute_folder_is_not_kept() {
    let tiles = tiles(DType::F16);
    let relative = Some(PathBuf::from(".cache"));
    let file = VerdictFile::in_folder(&identity(), relative, WAIT);
    assert_eq!(file.verdict(&tiles, || PASSED), (PASSED, None));
}
