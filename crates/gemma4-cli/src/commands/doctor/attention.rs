//! The part of the report about attention. For each of Gemma 4's shapes, the report gives the engine, its time, and the
//! reasons why faster engines refuse the shape.

use super::measure::seconds;
use attention_cube::{AttentionOptions, AttentionProblem, Explanation, explain, fused_attention};
use burn::tensor::{DType, Device, Tensor};
use burn_gemma4::catch_panic;
use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::path::Path;

/// The shape of one attention call in a Gemma 4 model, with 8 query heads that share one key head.
struct Shape {
    name: &'static str,
    head_dim: usize,
    window: Option<usize>,
    /// True for a decode step, which has one query per head.
    is_decode: bool,
}

const SHAPES: [Shape; 4] = [
    Shape {
        name: "prompt, sliding layer",
        head_dim: 256,
        window: Some(512),
        is_decode: false,
    },
    Shape {
        name: "prompt, full layer",
        head_dim: 512,
        window: None,
        is_decode: false,
    },
    Shape {
        name: "decode step, sliding layer",
        head_dim: 256,
        window: Some(512),
        is_decode: true,
    },
    Shape {
        name: "decode step, full layer",
        head_dim: 512,
        window: None,
        is_decode: true,
    },
];

/// The number of query heads in every shape.
const HEADS: usize = 8;

/// Returns a table of the engines, with the time of each forward. The reasons why faster engines refused a shape follow
/// the table. `tokens` is the number of keys. If `measures` is false, the table has no times.
pub(super) fn report(device: &Device, dtype: DType, tokens: usize, measures: bool) -> String {
    let mut text = format!(
        "\nAttention in {dtype:?}, {HEADS} query heads, 1 key head, {tokens} keys:\n\n\
         | shape | head size | forward | backward | time of the forward |\n|---|---|---|---|---|\n"
    );
    let mut refusals = BTreeMap::<String, Vec<&str>>::new();
    let mut verdicts = Vec::new();
    for shape in SHAPES {
        let inputs = inputs(&shape, device, dtype, tokens);
        let explanation = match catch_panic(|| explained(&inputs, device)).flatten() {
            Ok(explanation) => explanation,
            Err(error) => {
                let (name, head_dim) = (shape.name, shape.head_dim);
                let _ = writeln!(text, "| {name} | {head_dim} | failed: {error} | | |");
                continue;
            }
        };
        let time = match measures.then(|| time(&inputs, device)) {
            Some(Ok(seconds)) => format!("{:.3} ms", 1e3 * seconds),
            Some(Err(error)) => format!("failed: {error}"),
            None => "not measured".into(),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {time} |",
            shape.name,
            shape.head_dim,
            explanation.forward.kernel.engine(),
            explanation.backward.kernel.engine()
        );
        if let Some(device) = &explanation.device {
            verdicts = device.fragments.verdict_lines();
        }
        for selection in [&explanation.forward, &explanation.backward] {
            for (engine, reason) in &selection.refusals {
                let shapes = refusals.entry(format!("{engine}: {reason}")).or_default();
                if !shapes.contains(&shape.name) {
                    shapes.push(shape.name);
                }
            }
        }
    }
    if !refusals.is_empty() {
        text += "\nFaster engines that refused:\n\n";
    }
    for (refusal, shapes) in refusals {
        match shapes.len() == SHAPES.len() {
            true => _ = writeln!(text, "- {refusal}"),
            false => _ = writeln!(text, "- {refusal} ({})", shapes.join("; ")),
        }
    }
    text + &verdict_list(&verdicts, env::home_dir().as_deref())
}

/// Returns the verdicts of the self-check of the device's matrix units as a list. The report may become public, so `~`
/// replaces the user's home folder, which has the user's name.
fn verdict_list(verdicts: &[String], home: Option<&Path>) -> String {
    if verdicts.is_empty() {
        return String::new();
    }
    let mut text = String::from("\nMatrix units:\n\n");
    for verdict in verdicts {
        let _ = writeln!(text, "- {verdict}");
    }
    match home.map(|home| home.display().to_string()) {
        Some(home) if home.len() > 1 => text.replace(&home, "~"),
        _ => text,
    }
}

/// The tensors and options of a call.
struct Inputs {
    query: Tensor<4>,
    key: Tensor<4>,
    options: AttentionOptions,
}

fn inputs(shape: &Shape, device: &Device, dtype: DType, tokens: usize) -> Inputs {
    let q_len = if shape.is_decode { 1 } else { tokens };
    // In a sliding layer, a decode step reads only the keys in the ring buffer, which holds one window.
    let keys = match (shape.is_decode, shape.window) {
        (true, Some(window)) => window.min(tokens),
        _ => tokens,
    };
    let tensor = |heads, rows| Tensor::<4>::ones([1, heads, rows, shape.head_dim], (device, dtype));
    let mut options = AttentionOptions::new().scale(1.0);
    if !shape.is_decode {
        options = options.causal();
        if let Some(window) = shape.window {
            options = options.window(Some(window - 1), Some(0));
        }
    }
    Inputs {
        query: tensor(HEADS, q_len),
        key: tensor(1, keys),
        options,
    }
}

fn explained(inputs: &Inputs, device: &Device) -> Result<Explanation, String> {
    let problem = AttentionProblem::new(&inputs.query, &inputs.key, &inputs.key, &inputs.options);
    let explanation = explain(&problem.map_err(|error| error.to_string())?, device);
    match explanation.error {
        Some(error) => Err(error.to_string()),
        None => Ok(explanation),
    }
}

/// Returns the time of a forward in seconds.
fn time(inputs: &Inputs, device: &Device) -> Result<f64, String> {
    let attend = || {
        let (query, key) = (inputs.query.clone(), inputs.key.clone());
        fused_attention(query, key.clone(), key, inputs.options.clone())
    };
    catch_panic(|| seconds(device, attend)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_list_hides_the_home_folder() {
        assert_eq!(verdict_list(&[], None), "");
        let verdicts = ["cmma: passed", "kept in /home/jane/.cache/file.json"].map(String::from);
        assert_eq!(
            verdict_list(&verdicts, Some(Path::new("/home/jane"))),
            "\nMatrix units:\n\n- cmma: passed\n- kept in ~/.cache/file.json\n"
        );
        let whole = verdict_list(&verdicts, None);
        assert!(whole.contains("/home/jane/.cache"), "{whole}");
        assert_eq!(verdict_list(&verdicts, Some(Path::new("/"))), whole);
    }
}
