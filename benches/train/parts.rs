//! The parts of a step, each alone.

use attention_cube::{AttentionOptions, fused_attention};
use attention_workspace::Error;
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::{GradientsParams, ModuleOptimizer},
    tensor::{Device, Distribution, Int, Tensor},
};
use burn_gemma4::{
    Gemma4Config, Gemma4Model, LayerType,
    layer::{Linear, Weight},
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
    /// Products with the weights of all layers, the forward's one and the backward's two.
    products: f64,
    /// The head and its loss, forward and backward.
    loss: f64,
    /// The optimizer.
    optimizer: f64,
}

impl Parts {
    /// Of a step over `[batch, length]` tokens with the loss on the `last` positions.
    pub fn measure(
        model: Gemma4Model,
        optimizer: ModuleOptimizer,
        [batch, length, last]: [usize; 3],
        device: &Device,
    ) -> Result<Self, Error> {
        let config = model.config().clone();
        Ok(Self {
            attention: attention(&config, [batch, length, last], device)?,
            products: products(&model, [batch * length, batch * last])?,
            loss: loss(&model, [batch, last])?,
            optimizer: optimise(model, optimizer)?,
        })
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

/// The shapes of a model's matrices by how many positions they see.
struct Matrices {
    path: Vec<String>,
    first_shared_layer: usize,
    shapes: BTreeMap<(bool, [usize; 2]), usize>,
}

impl ModuleVisitor for Matrices {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(shape) = <[usize; 2]>::try_from(param.lazy_shape().to_vec()) else {
            return;
        };
        let names: Vec<&str> = self.path.iter().map(String::as_str).collect();
        let is_shared = match names[..] {
            ["layers", layer, ..] => layer
                .parse()
                .is_ok_and(|layer: usize| layer >= self.first_shared_layer),
            ["per_layer_model_projection", ..] => false,
            // The tables are looked up; the head is part of the loss.
            _ => return,
        };
        *self.shapes.entry((is_shared, shape)).or_default() += 1;
    }
}

fn products(model: &Gemma4Model, [all, last]: [usize; 2]) -> Result<f64, Error> {
    let mut matrices = Matrices {
        path: Vec::new(),
        first_shared_layer: model.config().first_shared_layer(),
        shapes: BTreeMap::new(),
    };
    model.visit(&mut matrices);
    let device = model.device();
    let mut sum = 0.0;
    for ((is_shared, [output, input]), count) in matrices.shapes {
        let rows = if is_shared { last } else { all };
        let rows_in = random([1, rows, input], &device).require_grad();
        let gradient = random([1, rows, output], &device);
        let linear = Linear {
            weight: Weight::Whole(Param::from_tensor(random([output, input], &device))),
        };
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
        let value = param.val();
        if value.is_require_grad() {
            self.0.register(param.id, value.inner().ones_like());
        }
    }
}

fn optimise(mut model: Gemma4Model, mut optimizer: ModuleOptimizer) -> Result<f64, Error> {
    let device = model.device().inner();
    let mut time = 0.0;
    // The last step counts: the first one compiles.
    for _ in 0..2 {
        let mut gradients = Ones(GradientsParams::new());
        model.visit(&mut gradients);
        device.sync()?;
        let start = Instant::now();
        model = optimizer.step(1e-4, model, gradients.0);
        device.sync()?;
        time = start.elapsed().as_secs_f64();
    }
    Ok(time)
}
