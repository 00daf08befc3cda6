//! The part of the report about attention. For each of Gemma 4's shapes, the report gives the engine, its time, and the
//! reasons why faster engines refuse the shape.

use super::measure::seconds;
use attention_cube::{AttentionOptions, AttentionProblem, Explanation, explain, fused_attention};
use burn::tensor::{DType, Device, Tensor};
use burn_gemma4::catch_panic;
use std::collections::BTreeMap;
use std::fmt::Write as _;

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
    text
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
