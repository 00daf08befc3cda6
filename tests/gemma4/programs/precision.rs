//! Tests that `finetune` reaches the same losses in half precision as in f32, and that the adapter's tensors have the names
//! that PEFT expects.

use super::{
    folder::{Folder, Stored, tensors},
    succeed,
    training::{conversations, finetune, losses, validation},
};
use safetensors::{SafeTensors, tensor::Dtype};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path};
use tempfile::TempDir;

/// Writes 120 lines of a fixed text to `path` as training data.
fn texts(path: &Path) {
    let text = include_str!("../../../LICENSE-APACHE");
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| (20..200).contains(&line.len()));
    let lines = lines
        .take(120)
        .map(|line| serde_json::json!({ "text": line }));
    let lines: Vec<String> = lines.map(|line| line.to_string()).collect();
    fs::write(path, lines.join("\n")).expect("the file is written");
}

/// Returns the validation losses of a full fine-tuning run.
fn full(base: &Folder, folder: &Path, dtype: &str, steps: &str, rate: &str) -> Vec<f64> {
    let data = folder.join("texts.jsonl");
    texts(&data);
    let out = folder.join(format!("{dtype}-{steps}-{rate}"));
    let mut command = finetune(base, &data, &out, &["--full", "--dtype", dtype]);
    command.args(["--length", "64", "--steps", steps, "--learning-rate", rate]);
    command.args(["--weight-decay", "0", "--checkpoint-every", "30"]);
    let ended = succeed(&mut command);
    let losses = validation(&ended.stdout).into_iter().map(|(_, loss)| loss);
    losses.collect()
}

/// Returns the distance between two numbers, in units of the distance between neighboring bf16 numbers. `from` is a
/// bf16 number and `to` is an f32 number, both given as bits. The result is at most 1.
fn share_of_the_way(from: u16, to: u32) -> f64 {
    let (kept, share) = ((to >> 16) as u16, f64::from(to & 0xFFFF) / 65536.0);
    match from.wrapping_sub(kept) {
        0 => share,
        1 => 1.0 - share,
        _ => 1.0,
    }
}

/// Returns how far training moved the layers' weights from their initial bf16 numbers. For bf16 weights, the result is the
/// share of weights that changed. For f32 weights, the result is the mean distance that a weight moved, in units of the
/// distance to the next bf16 number.
fn changed(before: &BTreeMap<String, Stored>, after: &BTreeMap<String, Stored>) -> f64 {
    let layers = before.keys().filter(|name| name.contains(".layers."));
    let (mut changed, mut all) = (0.0, 0);
    for name in layers.filter(|name| name.ends_with("_proj.weight")) {
        let [before, after] = [before, after].map(|tensors| &tensors[name]);
        assert_eq!(before.dtype, Dtype::BF16);
        let halves = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
        let before = before.bytes.chunks_exact(2).map(halves);
        all += before.len();
        let shares = |width, whole: fn(&[u8]) -> u32| -> f64 {
            let after = after.bytes.chunks_exact(width).map(whole);
            let pairs = before.zip(after);
            pairs.map(|(from, to)| share_of_the_way(from, to)).sum()
        };
        changed += match after.dtype {
            Dtype::BF16 => shares(2, |bytes| {
                u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16
            }),
            Dtype::F32 => shares(4, |bytes| {
                u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            }),
            other => panic!("{other:?}"),
        };
    }
    changed / all as f64
}

/// Each update is less than half of the distance to the next bf16 number, so rounding to the nearest number would
/// discard the update. Stochastic rounding keeps the mean of the updates. The share of bf16 weights that change equals
/// the mean movement of the f32 weights, in units of the distance to the next bf16 number.
#[test]
fn finetune_bf16_weights_change_as_often_as_f32_weights_move() {
    let base = Folder::copy("dense-ple-mm-bf16");
    let folder = TempDir::new().expect("a temporary folder");
    let before = tensors(base.path());
    let [exact, found] = ["f32", "bf16"].map(|dtype| {
        full(&base, folder.path(), dtype, "50", "1e-5");
        let after = tensors(&folder.path().join(format!("{dtype}-50-1e-5")));
        changed(&before, &after)
    });
    println!("changed: {exact:.4} in f32, {found:.4} in bf16");
    assert!(exact > 0.05);
    assert!((found / exact - 1.0).abs() < 0.1, "{found}, not {exact}");
}

/// In the second half of training, the validation losses in bf16 and f16 differ by less than 0.5 % from the losses in f32.
/// The first half is not compared, because the rounding in the bf16 forward changes the losses there.
#[test]
fn finetune_half_precision_loss_curve_is_that_of_f32() {
    let base = Folder::copy("dense-ple-mm-bf16");
    let folder = TempDir::new().expect("a temporary folder");
    let [exact, of_bf16, of_f16] =
        ["f32", "bf16", "f16"].map(|dtype| full(&base, folder.path(), dtype, "300", "1e-5"));
    assert!(exact[9] < 0.95 * exact[0], "{exact:?}");
    for (dtype, found) in [("bf16", of_bf16), ("f16", of_f16)] {
        let apart = exact.iter().zip(&found).map(|(a, b)| (b / a - 1.0).abs());
        let apart: Vec<f64> = apart.collect();
        println!("{dtype} is apart from f32 by {apart:.4?}");
        let largest = apart[5..].iter().copied().fold(0.0, f64::max);
        assert!(largest < 5e-3, "{dtype}: {found:?}, not {exact:?}");
    }
}

/// A trained model is fine-tuned in bf16 and in f32. The losses of both runs differ by at most 0.5 %. For the adapter,
/// the losses are compared step by step. For full fine-tuning, sums over 20 consecutive steps are compared.
#[test]
fn finetune_bf16_loss_curve_of_a_trained_model_is_that_of_f32() {
    let base = Folder::embedded();
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("texts.jsonl");
    texts(&data);
    for (name, arguments, over) in [
        ("adapter", &["--learning-rate", "2e-4"][..], 1),
        ("full", &["--full", "--learning-rate", "1e-4"], 20),
    ] {
        let [exact, found] = ["f32", "bf16"].map(|dtype| {
            let out = folder.path().join(format!("{name}-{dtype}"));
            let common = [
                "--length",
                "64",
                "--steps",
                "300",
                "--checkpoint-every",
                "30",
            ];
            let mut command = finetune(&base, &data, &out, &common);
            command.args(["--dtype", dtype, "--warmup", "15"]);
            let ended = succeed(command.args(arguments));
            [losses(&ended.stdout, "  loss "), validation(&ended.stdout)]
                .map(|losses| losses.into_iter().map(|(_, loss)| loss).collect::<Vec<_>>())
        });
        assert_eq!([exact[0].len(), exact[1].len()], [300, 10], "{name}");
        assert!(exact[1][9] < 0.95 * exact[1][0], "{name}: {exact:?}");
        for (kind, over) in [(0, over), (1, 1)] {
            let sums = |losses: &[f64]| -> Vec<f64> {
                let windows = losses.windows(over);
                windows.map(|window| window.iter().sum()).collect()
            };
            let [exact, found] = [&exact, &found].map(|losses| sums(&losses[kind]));
            let apart = exact.iter().zip(&found).map(|(a, b)| (b / a - 1.0).abs());
            let largest = apart.fold(0.0, f64::max);
            println!("{name}, over {over}: apart from f32 by {largest:.5}");
            assert!(largest < 5e-3, "{name}: {found:?}, not {exact:?}");
        }
    }
}

/// The adapter's tensors have the names that PEFT uses for the class that loads the base checkpoint. PEFT applies the
/// pattern `target_modules` to all modules, so the pattern must not match modules of vision and audio towers.
#[test]
fn finetune_adapter_names_the_modules_of_the_published_classes() {
    for (name, prefix) in [
        ("dense-ple", "model.layers"),
        ("dense-ple-mm-bf16", "model.language_model.layers"),
    ] {
        let base = Folder::copy(name);
        let folder = TempDir::new().expect("a temporary folder");
        let data = folder.path().join("data.jsonl");
        fs::write(&data, conversations()).expect("the file is written");
        let out = folder.path().join("adapter");
        succeed(&mut finetune(&base, &data, &out, &["--rank", "4"]));
        let file = fs::read(out.join("adapter_model.safetensors")).expect("the file is readable");
        let adapter = SafeTensors::deserialize(&file).expect("the tensors parse");
        let first = format!("base_model.model.{prefix}.");
        let mut zeros = 0;
        for (tensor, view) in adapter.iter() {
            assert!(tensor.starts_with(&first), "{name}: {tensor}");
            // The LoRA matrices A and B are trained in f32, even over bf16 weights.
            assert_eq!(view.dtype(), Dtype::F32, "{name}: {tensor}");
            let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
            zeros += usize::from(is_zero(view.data()));
        }
        assert_eq!(zeros, 0, "{name}: some factors are still zero");
        let config = fs::read(out.join("adapter_config.json")).expect("the file is readable");
        let config: Value = serde_json::from_slice(&config).expect("the text is JSON");
        let modules = config["target_modules"].as_str().expect("a pattern");
        let expected = r"model\.(?:language_model\.)?layers\.\d+\.(?:[^.]+\.)*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)";
        assert_eq!(modules, expected, "{name}");
    }
}
