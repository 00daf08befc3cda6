//! Tests checkpoints in several GGUF files, as `llama-gguf-split` writes them. Any part opens all parts.

use super::{load, logits, parts, path, reference};
use attention_workspace::testing::gguf::{Gguf, kind};
use burn::tensor::Device;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

const COUNT: usize = 3;

/// Returns the parts of a fixture. As `llama-gguf-split` does, only the first part has the model's metadata.
fn split(name: &str) -> Vec<Gguf> {
    let whole = parts(name);
    let tensors = whole.tensors.len();
    let mut parts = vec![Gguf::default(); COUNT];
    parts[0].values = whole.values;
    for (index, (name, tensor)) in whole.tensors.into_iter().enumerate() {
        parts[index * COUNT / tensors].tensors.insert(name, tensor);
    }
    for (index, part) in parts.iter_mut().enumerate() {
        for (key, number) in [("no", index), ("count", COUNT), ("tensors.count", tensors)] {
            // The ids of the types are U16, and I32 for the number of tensors.
            let (kind, bytes) = match key {
                "tensors.count" => (5, (number as i32).to_le_bytes().to_vec()),
                _ => (2, (number as u16).to_le_bytes().to_vec()),
            };
            part.values.insert(format!("split.{key}"), (kind, bytes));
        }
    }
    parts
}

fn path_of(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("model-{:05}-of-{COUNT:05}.gguf", index + 1))
}

fn write(parts: &[Gguf]) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    for (index, part) in parts.iter().enumerate() {
        let written = fs::write(path_of(folder.path(), index), part.to_bytes());
        written.expect("the file is written");
    }
    folder
}

#[test]
fn gguf_any_part_opens_all_parts() {
    let name = "moe.Q4_0";
    let prompt = reference(name).prompt;
    let whole = load(&path(name), &Device::flex()).expect("the model is valid");
    let expected = logits(&whole, &prompt);
    let folder = write(&split(name));
    for index in 0..COUNT {
        let found = load(&path_of(folder.path(), index), &Device::flex());
        let found = found.expect("the parts are complete");
        assert_eq!(logits(&found, &prompt), expected, "part {}", index + 1);
        assert_eq!(found.defaults(), whole.defaults());
    }
}

/// Changes the parts, and checks that the error for each part contains all of `words`.
#[track_caller]
fn check(words: &[&str], change: impl FnOnce(&mut Vec<Gguf>, &Path)) {
    check_parts([0, 1, 2], words, change);
}

/// Changes the parts, and checks the error for each part in `indices`.
#[track_caller]
fn check_parts<const N: usize>(
    indices: [usize; N],
    words: &[&str],
    change: impl FnOnce(&mut Vec<Gguf>, &Path),
) {
    let mut parts = split("dense-ple.Q8_0");
    let folder = write(&parts);
    change(&mut parts, folder.path());
    for index in indices {
        let path = path_of(folder.path(), index);
        if !path.exists() {
            continue;
        }
        let Err(error) = load(&path, &Device::flex()) else {
            panic!("part {} should fail with {words:?}", index + 1);
        };
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is missing from {text}");
        }
    }
}

#[test]
fn gguf_missing_part_is_refused_by_its_name() {
    for index in 0..COUNT {
        let number = format!("part {} is missing", index + 1);
        let name = format!("model-{:05}-of-00003.gguf", index + 1);
        check(&["one of 3 parts", &number, &name], |_, folder| {
            fs::remove_file(path_of(folder, index)).expect("the file exists");
        });
    }
}

#[test]
fn gguf_doubled_and_foreign_parts_are_refused() {
    let replace = |folder: &Path, part: &Gguf| {
        fs::write(path_of(folder, 1), part.to_bytes()).expect("the file is written");
    };
    let by_name = "part 2 of 3 by its name";
    check(
        &["00002-of-00003", by_name, "part 1 of 3 by its metadata"],
        |parts, folder| replace(folder, &parts[0]),
    );
    check(&["00002-of-00003", "4"], |parts, folder| {
        parts[1].set_number("split.count", 4);
        replace(folder, &parts[1]);
    });
    // The second file alone would be a whole checkpoint.
    check_parts([0, 2], &["00002-of-00003", "no split.no"], |_, folder| {
        replace(folder, &super::parts("dense-ple.Q8_0"));
    });
    check(&["00002-of-00003", "an earlier part"], |parts, folder| {
        let tensors = parts[0].tensors.iter().next();
        let (name, tensor) = tensors.expect("the part has a tensor");
        let (name, tensor) = (name.clone(), tensor.clone());
        parts[1].tensors.insert(name, tensor);
        replace(folder, &parts[1]);
    });
    check(&["expected", "split.tensors.count"], |parts, folder| {
        parts[1].tensors.pop_first();
        replace(folder, &parts[1]);
    });
    check_parts([0, 2], &["00002-of-00003", "GGUF"], |_, folder| {
        fs::write(path_of(folder, 1), "<html>").expect("the file is written");
    });
}

#[test]
fn gguf_part_with_another_name_is_refused() {
    let folder = write(&split("dense-ple.Q8_0"));
    for name in [
        "model.gguf",
        "model-1-of-3.gguf",
        "model-00001-of-00004.gguf",
        "model-00004-of-00003.gguf",
    ] {
        let path = folder.path().join(name);
        fs::copy(path_of(folder.path(), 0), &path).expect("the file is copied");
        let error = load(&path, &Device::flex()).expect_err("the name is wrong");
        let text = error.to_string();
        assert!(
            text.contains("one of 3 parts") && text.contains("-00001-of-00003.gguf"),
            "{text}"
        );
    }
    let one = {
        let mut whole = parts("dense-ple.Q8_0");
        whole
            .values
            .insert("split.count".into(), (kind::U32, vec![1, 0, 0, 0]));
        whole
    };
    let path = folder.path().join("one.gguf");
    fs::write(&path, one.to_bytes()).expect("the file is written");
    load(&path, &Device::flex()).expect("one part is a whole file");
}
