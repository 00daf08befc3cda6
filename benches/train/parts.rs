//! Times each part of a training step separately, and a whole step. Both measurements launch every kernel separately,
//! without a CUDA graph, so both have a comparable launch overhead.

use crate::training::{Text, Training, median};
use attention_cube::{AttentionOptions, fused_attention};
use attention_workspace::Error;
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{Device, Distribution, Int, Tensor},
};
use burn_gemma4::{
    Gemma4Config, Gemma4Model, LayerType,
    layer::{DecoderLayer, Linear},
};
use gemma4_train::args::StepArguments;
use serde::Serialize;
use std::{collections::BTreeMap, time::Instant};

/// The number of warm-up runs per part. Burn compiles and tunes kernels and explores fusions over several runs.
const WARMUP: usize = 3;

/// The number of timed batches of runs. The median of the batches' times is reported.
const BATCHES: usize = 3;

/// The number of runs per batch. The runs are launched back to back, so that the host runs ahead of the device as in
/// training.
const RUNS: usize = 4;

/// The number of timed steps without graph capture. The median of their times is reported.
const STEPS: usize = 3;

/// The times of a step without graph capture, and of each part of the step, in seconds.
#[derive(Clone, Copy, Serialize)]
pub struct Parts {
    /// The time of the whole step. Like the parts, the step is launched without graph capture.
    step: f64,
    /// The time of the attention of all layers, forward and backward.
    attention: f64,
    /// The time of the GEMMs with the weights of all layers. A trained weight has one GEMM in the forward and two in the
    /// backward. A frozen weight has one GEMM in the forward and one in the backward.
    products: f64,
    /// The time of the language model head and the loss, forward and backward.
    loss: f64,
    /// The time of gradient clipping and the optimizer.
    optimizer: f64,
}

impl Parts {
    /// Times a step with `[batch, length]` tokens of `text`, and the parts of the step. The loss covers the last `last`
    /// positions of each sequence. Returns the times, and the model after several updates.
    pub fn measure(
        training: Training,
        text: &Text,
        [batch, length, last]: [usize; 3],
        arguments: &StepArguments,
    ) -> Result<(Self, Training), Error> {
        let (step, training) = step(training, text, arguments)?;
        let model = training.model();
        let (config, device) = (model.config(), model.device());
        let attention = attention(config, [batch, length, last], &device)?;
        let products = products(model, [batch * length, batch * last])?;
        let loss = loss(model, [batch, last])?;
        let (optimizer, training) = optimise(training)?;
        let parts = Self {
            step,
            attention,
            products,
            loss,
            optimizer,
        };
        Ok((parts, training))
    }

    /// Formats the time of each part and its share of the step. The rest of the step is norms, activations, embeddings and
    /// recomputation. The rest is negative if the sum of the parts exceeds the step.
    pub fn line(&self) -> String {
        let step = self.step;
        let rest = step - self.attention - self.products - self.loss - self.optimizer;
        let shares = [
            ("attention", self.attention),
            ("products", self.products),
            ("loss", self.loss),
            ("optimizer", self.optimizer),
            ("rest", rest),
        ]
        .map(|(name, seconds)| format!("{name} {:.4} s ({:.0} %)", seconds, 100.0 * seconds / step))
        .join(", ");
        format!("without graph capture {step:.4} s: {shares}")
    }
}

/// Returns the median time of a step without graph capture, and the model after all timed steps.
fn step(
    training: Training,
    text: &Text,
    arguments: &StepArguments,
) -> Result<(f64, Training), Error> {
    let arguments = StepArguments {
        no_graph: true,
        ..arguments.clone()
    };
    let mut training = training.begin_anew(&arguments);
    let mut times = Vec::new();
    for _ in 0..WARMUP + STEPS {
        let step;
        (training, step) = training.step(text)?;
        times.push(step.seconds);
    }
    Ok((median(times.split_off(WARMUP)), training))
}

/// Returns the time of one run of `work` in seconds. After the warm-up, `BATCHES` batches of `RUNS` runs are timed. The
/// result is the median over the batches.
fn seconds<O>(device: &Device, mut work: impl FnMut() -> O) -> Result<f64, Error> {
    let device = device.clone().inner();
    for _ in 0..WARMUP {
        work();
        device.sync()?;
    }
    let mut times = Vec::new();
    for _ in 0..BATCHES {
        let start = Instant::now();
        for _ in 0..RUNS {
            work();
        }
        device.sync()?;
        times.push(start.elapsed().as_secs_f64() / RUNS as f64);
    }
    Ok(median(times))
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A kind of attention layers. All layers of one kind take the same time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttentionKind {
    is_full: bool,
    /// The number of queries per sequence. A layer that uses an earlier layer's KV cache computes only the queries of the
    /// positions that the loss covers.
    pub queries: usize,
}

impl AttentionKind {
    /// Returns the maximum number of keys that a query sees in a layer of this kind.
    pub fn window(self, config: &Gemma4Config) -> usize {
        match self.is_full {
            true => usize::MAX,
            false => config.sliding_window,
        }
    }
}

/// Returns the kinds of attention layers as a map. Each kind maps to `(layer, count)`. `layer` is the index of one
/// layer of the kind, and `count` is the number of layers of the kind.
pub fn attention_kinds(
    config: &Gemma4Config,
    [length, last]: [usize; 2],
) -> BTreeMap<AttentionKind, (usize, usize)> {
    let mut kinds = BTreeMap::new();
    for layer in 0..config.num_layers() {
        let kind = AttentionKind {
            is_full: config.layer_types[layer] == LayerType::Full,
            queries: if config.is_shared(layer) {
                last
            } else {
                length
            },
        };
        kinds.entry(kind).or_insert((layer, 0)).1 += 1;
    }
    kinds
}

fn attention(
    config: &Gemma4Config,
    [batch, length, last]: [usize; 3],
    device: &Device,
) -> Result<f64, Error> {
    let mut sum = 0.0;
    for (kind, (layer, count)) in attention_kinds(config, [length, last]) {
        let queries = kind.queries;
        let (columns, key_heads) = (config.head_dim(layer), config.key_value_heads(layer));
        let query = random(
            [batch, config.num_attention_heads, queries, columns],
            device,
        );
        let [key, value] = [(); 2].map(|()| random([batch, key_heads, length, columns], device));
        let [query, key, value] = [query, key, value].map(Tensor::require_grad);
        let mut options = AttentionOptions::new().scale(1.0).causal();
        if !kind.is_full {
            options = options.window(Some(config.sliding_window - 1), Some(0));
        }
        let once = seconds(device, || {
            let (query, key, value) = (query.clone(), key.clone(), value.clone());
            fused_attention(query, key, value, options.clone())
                .sum()
                .backward()
        })?;
        sum += count as f64 * once;
    }
    Ok(sum)
}

/// Returns the weight matrices of a layer, except those of experts. An entry is a matrix and the number of input
/// columns of the matrix.
fn matrices<'a>(
    layer: &'a DecoderLayer,
    config: &Gemma4Config,
    index: usize,
) -> Vec<(&'a Linear, usize)> {
    let (attention, mlp) = (&layer.self_attn, &layer.mlp);
    let (hidden, own) = (config.hidden_size, config.hidden_size_per_layer_input);
    let heads = config.num_attention_heads * config.head_dim(index);
    let all = [
        (Some(&attention.q_proj), hidden),
        (attention.k_proj.as_ref(), hidden),
        (attention.v_proj.as_ref(), hidden),
        (Some(&attention.o_proj), heads),
        (Some(&mlp.gate_proj), hidden),
        (Some(&mlp.up_proj), hidden),
        (Some(&mlp.down_proj), config.intermediate_size(index)),
        (layer.per_layer_input_gate.as_ref(), hidden),
        (layer.per_layer_projection.as_ref(), own),
    ];
    let there = all
        .into_iter()
        .filter_map(|(linear, columns)| Some((linear?, columns)));
    there.collect()
}

/// Returns the GEMMs with a model's weights as a map. A key is the shape of a GEMM,
/// `[rows, input columns, output columns]`. Its value is one weight matrix of this shape, and the number of such
/// matrices in the model.
pub fn matrix_kinds(
    model: &Gemma4Model,
    [all, last]: [usize; 2],
) -> BTreeMap<[usize; 3], (&Linear, usize)> {
    let (config, device) = (model.config(), model.device().inner());
    let mut kinds = BTreeMap::new();
    let mut add = |linear, rows, columns| {
        let row = Tensor::zeros([1, 1, columns], (&device, model.dtype()));
        let [_, _, written] = Linear::forward(linear, row).dims();
        let kind = [rows, columns, written];
        kinds.entry(kind).or_insert((linear, 0)).1 += 1;
    };
    if let Some(linear) = &model.per_layer_model_projection {
        add(linear, all, config.hidden_size);
    }
    for (index, layer) in model.layers.iter().enumerate() {
        // A layer that uses an earlier layer's KV cache produces no keys and values for other layers. The layer is therefore
        // computed only for the positions that the loss covers.
        let rows = if config.is_shared(index) { last } else { all };
        for (linear, columns) in matrices(layer, config, index) {
            add(linear, rows, columns);
        }
    }
    kinds
}

fn products(model: &Gemma4Model, positions: [usize; 2]) -> Result<f64, Error> {
    let device = model.device();
    let mut sum = 0.0;
    for ([rows, columns, written], (linear, count)) in matrix_kinds(model, positions) {
        let rows_in = random([1, rows, columns], &device).require_grad();
        let gradient = random([1, rows, written], &device);
        let once = seconds(&device, || {
            let output = linear.forward(rows_in.clone()) * gradient.clone();
            output.sum().backward()
        })?;
        sum += count as f64 * once;
    }
    Ok(sum)
}

fn loss(model: &Gemma4Model, [batch, last]: [usize; 2]) -> Result<f64, Error> {
    let device = model.device();
    let hidden = random([batch, last, model.config().hidden_size], &device).require_grad();
    let targets = Tensor::<2, Int>::zeros([batch, last], &device.clone().inner());
    seconds(&device, || {
        model
            .loss(hidden.clone(), targets.clone())
            .map(|loss| loss.backward())
    })
}

/// A visitor that sets the gradient of every trained parameter to ones.
struct Ones(GradientsParams);

impl ModuleVisitor for Ones {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if value.is_require_grad() {
            self.0.register(param.id, value.inner().ones_like());
        }
    }
}

/// Returns the median time of gradient clipping and the optimizer's update together, in seconds, and the updated model.
fn optimise(mut training: Training) -> Result<(f64, Training), Error> {
    let device = training.model().device().inner();
    let mut times = Vec::new();
    for _ in 0..WARMUP + BATCHES {
        let mut gradients = Ones(GradientsParams::new());
        training.model().visit(&mut gradients);
        device.sync()?;
        let start = Instant::now();
        training = training.optimize(gradients.0);
        device.sync()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok((median(times.split_off(WARMUP)), training))
}
