//! The parts of a step, each alone.

use crate::training::Training;
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
use serde::Serialize;
use std::{collections::BTreeMap, time::Instant};

/// Runs to take the mean of.
const RUNS: usize = 3;

/// Seconds that a step spends in each part.
#[derive(Clone, Copy, Serialize)]
pub struct Parts {
    /// Attention of all layers, forward and backward.
    attention: f64,
    /// Products with the weights of all layers, the forward's one and the backward's two, or with frozen weights one.
    products: f64,
    /// The head and its loss, forward and backward.
    loss: f64,
    /// Clipping and the optimizer.
    optimizer: f64,
}

impl Parts {
    /// Of a step over `[batch, length]` tokens with the loss on the `last` positions; and the model after more steps of the optimizer.
    pub fn measure(
        training: Training,
        [batch, length, last]: [usize; 3],
    ) -> Result<(Self, Training), Error> {
        let model = training.model();
        let (config, device) = (model.config(), model.device());
        let attention = attention(config, [batch, length, last], &device)?;
        let products = products(model, [batch * length, batch * last])?;
        let loss = loss(model, [batch, last])?;
        let (optimizer, training) = optimise(training)?;
        let parts = Self {
            attention,
            products,
            loss,
            optimizer,
        };
        Ok((parts, training))
    }

    /// Each with its share of `step`.
    pub fn line(&self, step: f64) -> String {
        let rest = step - self.attention - self.products - self.loss - self.optimizer;
        [
            ("attention", self.attention),
            ("products", self.products),
            ("loss", self.loss),
            ("optimizer", self.optimizer),
            ("rest", rest),
        ]
        .map(|(name, seconds)| format!("{name} {:.3} s ({:.0} %)", seconds, 100.0 * seconds / step))
        .join(", ")
    }
}

/// The mean time of `work`, after a run to compile and tune.
fn seconds<O>(device: &Device, mut work: impl FnMut() -> O) -> Result<f64, Error> {
    let device = device.clone().inner();
    work();
    device.sync()?;
    let start = Instant::now();
    for _ in 0..RUNS {
        work();
    }
    device.sync()?;
    Ok(start.elapsed().as_secs_f64() / RUNS as f64)
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn attention(
    config: &Gemma4Config,
    [batch, length, last]: [usize; 3],
    device: &Device,
) -> Result<f64, Error> {
    // Layers that read an earlier layer's keys and values have queries of the last positions only.
    let mut kinds: BTreeMap<(bool, usize), (usize, usize)> = BTreeMap::new();
    for layer in 0..config.num_layers() {
        let is_full = config.layer_types[layer] == LayerType::Full;
        let queries = match config.is_shared(layer) {
            true => last,
            false => length,
        };
        kinds.entry((is_full, queries)).or_insert((layer, 0)).1 += 1;
    }
    let mut sum = 0.0;
    for ((is_full, queries), (layer, count)) in kinds {
        let (columns, key_heads) = (config.head_dim(layer), config.key_value_heads(layer));
        let query = random(
            [batch, config.num_attention_heads, queries, columns],
            device,
        );
        let [key, value] = [(); 2].map(|()| random([batch, key_heads, length, columns], device));
        let [query, key, value] = [query, key, value].map(Tensor::require_grad);
        let mut options = AttentionOptions::new().scale(1.0).causal();
        if !is_full {
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

/// A layer's matrices but for experts, each with the columns that it reads.
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

/// Those of a model by the rows that they see, and the columns that they read and write: one of each kind, and how many there are.
fn kinds(model: &Gemma4Model, [all, last]: [usize; 2]) -> BTreeMap<[usize; 3], (&Linear, usize)> {
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
        // Layers that read an earlier layer's keys and values are computed for the last positions only.
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
    for ([rows, columns, written], (linear, count)) in kinds(model, positions) {
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

/// A gradient of ones for every parameter that has one.
struct Ones(GradientsParams);

impl ModuleVisitor for Ones {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if value.is_require_grad() {
            self.0.register(param.id, value.inner().ones_like());
        }
    }
}

/// Clipping and the optimizer.
fn optimise(mut training: Training) -> Result<(f64, Training), Error> {
    let device = training.model().device().inner();
    let mut time = 0.0;
    // The last step counts: the first one compiles.
    for _ in 0..2 {
        let mut gradients = Ones(GradientsParams::new());
        training.model().visit(&mut gradients);
        device.sync()?;
        let start = Instant::now();
        training = training.optimize(gradients.0);
        device.sync()?;
        time = start.elapsed().as_secs_f64();
    }
    Ok((time, training))
}
