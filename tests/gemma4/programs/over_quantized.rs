//! Tests `finetune` over quantized weights (QLoRA). The training loss decreases, a run resumes only over the same weights,
//! and the program writes the trained adapter or the merged model.

use super::{
    folder::{Folder, tensors},
    gemma4,
    refused::check,
    report, run, succeed,
    training::{conversations, finetune, losses, validation},
};
use crate::fixture;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

/// A folder with training data, and the folder of the base checkpoint.
struct Tuning {
    folder: TempDir,
    base: Folder,
}

impl Tuning {
    fn new() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        fs::write(folder.path().join("data.jsonl"), conversations()).expect("the file is written");
        Self {
            folder,
            base: Folder::copy("dense-ple"),
        }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the command that runs `finetune`. The command trains the checkpoint `model`, or the base checkpoint if
    /// `model` is `None`.
    fn command(&self, model: Option<&Path>, out: &str, arguments: &[&str]) -> Command {
        let data = self.out("data.jsonl");
        // A row of 48 tokens holds a whole conversation.
        let mut command = finetune(&self.base, &data, &self.out(out), &["--length", "48"]);
        command.args(arguments);
        if let Some(model) = model {
            command.arg("--model").arg(model);
        }
        command
    }

    /// Returns the cross entropy of the training data that the command `evaluate` reports. If an argument does not
    /// begin with `--`, it is the name of a file or folder in the test's folder.
    fn told(&self, model: &Path, arguments: &[&str]) -> f64 {
        let mut command = gemma4("evaluate");
        command.args(["--device", "flex", "--json", "--length", "64", "--model"]);
        command.arg(model).arg("--data").arg(self.out("data.jsonl"));
        for argument in arguments {
            match argument.starts_with("--") {
                true => command.arg(argument),
                false => command.arg(self.out(argument)),
            };
        }
        let told = report(&succeed(&mut command));
        told["cross_entropy"]
            .as_f64()
            .expect("the field is a number")
    }
}

#[test]
fn finetune_adapter_over_quantized_weights_lowers_the_loss() {
    let tuning = Tuning::new();
    let gguf = fixture::folder("gguf").join("dense-ple.Q8_0.gguf");
    let packed = fixture::folder("compressed").join("mixed");
    for (out, model, arguments) in [
        ("q4", None, &["--quantize", "q4"][..]),
        ("file", Some(&*gguf), &["--checkpointing", "both"]),
        ("folder", Some(&*packed), &["--devices", "0,0"]),
    ] {
        let ended = succeed(&mut tuning.command(model, out, arguments));
        assert!(
            ended.stderr.contains("GB of quantized weights"),
            "{ended:?}"
        );
        let losses = validation(&ended.stdout);
        assert!(losses[3].1 < 0.8 * losses[0].1, "{out}: {ended:?}");
        let adapter = tensors_of(&tuning.out(out));
        assert!(adapter.exists() && !tuning.out(out).join("model.safetensors").exists());
        let told = tuning.told(model.unwrap_or(tuning.base.path()), &["--adapter", out]);
        assert!(told < losses[0].1, "{out}: {told}");
    }
}

fn tensors_of(adapter: &Path) -> PathBuf {
    adapter.join("adapter_model.safetensors")
}

/// After training over quantized weights, `--merge` writes an unquantized checkpoint. Its weights are the dequantized weights
/// with the adapter added.
#[test]
fn finetune_merge_over_quantized_weights_is_unquantized() {
    let tuning = Tuning::new();
    let packed = fixture::folder("compressed").join("mixed");
    let ended = succeed(&mut tuning.command(Some(&packed), "merged", &["--merge"]));
    assert!(
        ended.stderr.contains("the weights were quantized"),
        "{ended:?}"
    );
    let merged = tensors(&tuning.out("merged"));
    assert!(
        merged
            .keys()
            .all(|name| !name.contains("packed") && !name.contains("lora"))
    );
    assert!(merged.contains_key("model.layers.0.self_attn.q_proj.weight"));
    // The merged checkpoint must have the same cross entropy as the quantized weights with a separate adapter, except
    // for rounding. A second, equal training run creates this separate adapter. Only the merged weights are rounded
    // after the addition of the adapter.
    succeed(&mut tuning.command(Some(&packed), "apart", &[]));
    let apart = tuning.told(&packed, &["--adapter", "apart"]);
    let told = tuning.told(&tuning.out("merged"), &[]);
    assert!((told - apart).abs() < 0.05 * apart, "{told}, {apart}");
}

#[test]
fn finetune_resume_over_other_weights_is_refused() {
    let tuning = Tuning::new();
    let whole = succeed(&mut tuning.command(None, "whole", &["--quantize", "q4"]));
    let mut stopped = tuning.command(None, "stopped", &["--quantize", "q4"]);
    let mut child = stopped.spawn().expect("the process starts");
    let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut lines = output.lines().map(|line| line.expect("the output is text"));
    assert!(lines.any(|line| line.starts_with("step 5/")));
    child.kill().expect("the process can be killed");
    child.wait().expect("the process ends");
    for (arguments, word) in [
        (&["--quantize", "q8", "--resume"][..], "\"q8\""),
        (&["--resume"], "\"q4\""),
    ] {
        let ended = run(&mut tuning.command(None, "stopped", arguments));
        check("another form", &ended, 2, &["the run was begun with", word]);
    }
    let gguf = fixture::folder("gguf").join("dense-ple.Q8_0.gguf");
    let arguments = ["--quantize", "q4", "--resume", "--dtype", "f32"];
    let ended = run(&mut tuning.command(Some(&gguf), "stopped", &arguments));
    check("other weights", &ended, 2, &["weights in bytes"]);
    let arguments = ["--quantize", "q4", "--resume"];
    let resumed = succeed(&mut tuning.command(None, "stopped", &arguments));
    let (of_whole, of_resumed) = (
        losses(&whole.stdout, "  loss "),
        losses(&resumed.stdout, "  loss "),
    );
    let begun = of_whole.len() - of_resumed.len();
    assert!(begun >= 2, "{resumed:?}");
    assert_eq!(of_resumed, of_whole[begun..]);
    let written = |out: &str| fs::read(tensors_of(&tuning.out(out))).expect("the adapter is valid");
    assert!(written("whole") == written("stopped"));
}

#[test]
fn finetune_full_over_quantized_weights_is_refused() {
    let tuning = Tuning::new();
    let ended = run(&mut tuning.command(None, "out", &["--full", "--quantize", "q4"]));
    check("all weights", &ended, 2, &["--quantize q4 with --full"]);
    // A packed checkpoint is dequantized for full fine-tuning.
    let packed = fixture::folder("compressed").join("w4a16-grouped");
    let arguments = ["--full", "--steps", "2", "--dtype", "f32"];
    succeed(&mut tuning.command(Some(&packed), "whole", &arguments));
    let written = tensors(&tuning.out("whole"));
    assert!(written.keys().all(|name| !name.contains("packed")));
}
