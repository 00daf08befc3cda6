//! Tests GGUF files in llama.cpp's mixtures of K formats, with and without an importance matrix. The quantized tensors
//! equal those of llama.cpp, by checksums that `tests/fixtures/gguf/make_mixtures.py` has written.

use crate::{
    fixture,
    programs::{refused::check, report},
};
use attention_workspace::testing::{
    gguf::Gguf,
    program::{gemma4, run, succeed},
};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    ExportForm, ExportOptions, Gemma4, ImportanceMatrix, LoadOptions, quantize_checkpoint,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

const MIXTURES: [ExportForm; 9] = [
    ExportForm::Q2K,
    ExportForm::Q3KSmall,
    ExportForm::Q3KMedium,
    ExportForm::Q3KLarge,
    ExportForm::Q4KSmall,
    ExportForm::Q4KMedium,
    ExportForm::Q5KSmall,
    ExportForm::Q5KMedium,
    ExportForm::Q6K,
];
/// ggml's quantized types: the id, the number of elements per block, and the number of bytes per block.
const TYPES: [(u32, usize, usize); 10] = [
    (2, 32, 18),
    (3, 32, 20),
    (6, 32, 22),
    (7, 32, 24),
    (8, 32, 34),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (13, 256, 176),
    (14, 256, 210),
];

fn fixture_file(name: &str) -> PathBuf {
    fixture::folder("gguf").join(name)
}

/// Returns the bytes of all quantized tensors of a file, in the order of their names.
fn quantized_bytes(path: &Path) -> Vec<u8> {
    let gguf =
        Gguf::read(&fs::read(path).expect("the file is readable")).expect("the file is GGUF");
    let mut bytes = Vec::new();
    for tensor in gguf.tensors.values() {
        if let Some((_, block, size)) = TYPES.iter().find(|(id, _, _)| *id == tensor.kind) {
            let elements: u64 = tensor.dimensions.iter().product();
            bytes.extend(&tensor.bytes[..elements as usize / block * size]);
        }
    }
    bytes
}

/// Two fixtures have rows of 256 and rows that need smaller blocks. One of them has 8 experts, for which llama.cpp
/// chooses other types. The importance matrices exist in both forms of files, and lack one matrix.
#[test]
fn quantize_to_mixture_equals_llama_cpp_bitwise() {
    let expected = fs::read(fixture_file("mixtures.json")).expect("the fixture is readable");
    let expected: Value = serde_json::from_slice(&expected).expect("the fixture is JSON");
    let expected: BTreeMap<String, BTreeMap<String, u32>> =
        serde_json::from_value(expected["bytes"].clone()).expect("the fixture has checksums");
    assert_eq!(expected.len(), 2);
    let folder = TempDir::new().expect("a temporary folder");
    let out = folder.path().join("out.gguf");
    for (name, checksums) in expected {
        let matrix = |form| {
            let path = fixture_file(&format!("{name}.imatrix.{form}"));
            ImportanceMatrix::from_file(path).expect("the importance matrix is valid")
        };
        let matrices = [matrix("gguf"), matrix("dat")];
        for form in MIXTURES {
            let plain = ExportOptions::from(form);
            for (options, suffix) in [
                (plain, ""),
                (plain.importance(&matrices[0]), "+imatrix"),
                (plain.importance(&matrices[1]), "+imatrix"),
            ] {
                let written = quantize_checkpoint(fixture::folder(&name), &out, options, |_| ());
                let written = written.expect(&name);
                let key = format!("{form}{suffix}");
                let found = fixture::crc32(&quantized_bytes(&out));
                assert_eq!(found, checksums[&key], "{name}, {key}");
                let lacking: &[&str] = match suffix {
                    "" => &[],
                    _ => &["layers.0.mlp.up_proj.weight"],
                };
                assert_eq!(written.without_importance, lacking, "{name}, {key}");
                assert!(!written.small_blocks.is_empty(), "{name}, {key}");
                fs::remove_file(&out).expect("the file is removed");
            }
        }
    }
}

/// The written files are loaded again, and the model that `burn-gemma4` embeds loses little by quantization.
#[test]
fn quantize_program_to_mixture_reports_small_cost() {
    let embedded = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/burn-gemma4/embedded");
    let folder = TempDir::new().expect("a temporary folder");
    let text: String = include_str!("../../LICENSE-APACHE")
        .chars()
        .take(1000)
        .collect();
    let data = folder.path().join("text.txt");
    fs::write(&data, text).expect("the file is written");
    for (to, most) in [("q6_k", 0.01), ("Q4_K_M", 0.05), ("q2_k", 0.2)] {
        let out = folder.path().join(format!("{to}.gguf"));
        let mut command = gemma4("quantize");
        command.args([
            "--model", embedded, "--to", to, "--device", "flex", "--dtype", "f32",
        ]);
        command
            .arg("--out")
            .arg(&out)
            .arg("--data")
            .arg(&data)
            .arg("--json");
        let ended = succeed(&mut command);
        assert!(
            ended.stderr.contains("in blocks of 32 numbers"),
            "{ended:?}"
        );
        assert!(ended.stderr.contains("bits a weight"), "{ended:?}");
        let report = report(&ended);
        let of = |when: &str| report[when]["cross_entropy"].as_f64().expect("is a number");
        let more = of("after") / of("before") - 1.0;
        assert!(more != 0.0 && more.abs() < most, "{report}");
        let bits = report["bits_per_weight"].as_f64().expect("is a number");
        assert!((4.0..10.0).contains(&bits), "{report}");
    }
}

/// The types in the summary are those of the written file, and the file is loaded with its quantized weights.
#[test]
fn quantize_to_mixture_reports_types_of_file() {
    let folder = TempDir::new().expect("a temporary folder");
    let out = folder.path().join("out.gguf");
    let from = fixture::folder("realhead-ple");
    let written = quantize_checkpoint(&from, &out, ExportForm::Q4KMedium, |_| ());
    let types = written.expect("the file is written").types;
    for name in ["Q4_K", "Q5_0", "F32"] {
        assert!(types.contains_key(name), "{types:?}");
    }
    let options = LoadOptions::new().dtype(DType::F32);
    let gemma = Gemma4::load(&out, &Device::flex(), options).expect("the file is loaded");
    assert!(gemma.model().is_quantized());
}

#[test]
fn quantize_unsupported_mixtures_are_refused_by_argument() {
    let folder = TempDir::new().expect("a temporary folder");
    let (file, directory) = (folder.path().join("out.gguf"), folder.path().join("out"));
    let matrix = fixture_file("moe.imatrix.gguf");
    let broken = folder.path().join("broken.dat");
    let mut bytes = fs::read(fixture_file("moe.imatrix.dat")).expect("the fixture is readable");
    let text = folder.path().join("text.dat");
    fs::write(&text, "no matrix").expect("the file is written");
    // The first value follows the count, the name's length, the name, the number of calls and the number of values.
    let name = i32::from_le_bytes(bytes[4..8].try_into().expect("four bytes")) as usize;
    bytes[16 + name..20 + name].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&broken, bytes).expect("the file is written");
    let other = fixture_file("dense-ple.Q8_0.gguf");
    for (to, out, imatrix, code, words) in [
        (
            "q4_k_m",
            &directory,
            None,
            2,
            ["--to: Q4_K_M", "ends with .gguf"],
        ),
        (
            "q4",
            &directory,
            Some(&matrix),
            2,
            ["--imatrix", "ends with .gguf"],
        ),
        ("q8", &file, Some(&matrix), 2, ["--imatrix", "Q8_0"]),
        (
            "q4_k_m",
            &file,
            Some(&matrix),
            2,
            ["importance", "of another model"],
        ),
        (
            "q4_k_m",
            &file,
            Some(&broken),
            1,
            ["broken.dat", "not finite"],
        ),
        (
            "q4_k_m",
            &file,
            Some(&text),
            1,
            ["text.dat", "importance matrix"],
        ),
        ("q4_k_m", &file, Some(&other), 1, ["Q8_0.gguf", "in_sum2"]),
    ] {
        let mut command = gemma4("quantize");
        command.arg("--model").arg(fixture::folder("realhead-ple"));
        command.args(["--to", to]).arg("--out").arg(out);
        if let Some(imatrix) = imatrix {
            command.arg("--imatrix").arg(imatrix);
        }
        check(to, &run(&mut command), code, &words);
        assert!(!out.exists(), "{to}");
    }
    let written = quantize_checkpoint(
        fixture::folder("realhead-ple"),
        &directory,
        ExportForm::Q6K,
        |_| (),
    );
    let error = written.expect_err("folders have no K formats").to_string();
    assert!(
        error.contains("form: Q6_K exists in GGUF files only"),
        "{error}"
    );
}
