//! Trains a small Burn module that contains fused attention. The module learns to output, at each position, the mean of the
//! inputs up to that position.
//!
//! ```text
//! cargo run --release --example training_step
//! ```

use attention_cube::{AttentionOptions, fused_attention};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams},
    tensor::{Bool, Device, Distribution, Tensor},
};

const BATCH: usize = 4;
const POSITIONS: usize = 16;
const HEADS: usize = 2;
const WIDTH: usize = 32;

/// A self-attention layer with its projections.
#[derive(Module, Debug)]
struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

impl SelfAttention {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self {
            query: linear(),
            key: linear(),
            value: linear(),
            output: linear(),
        }
    }

    /// Computes self-attention.
    ///
    /// # Shapes
    /// - `input`: `[batch, positions, width]`
    /// - `mask`: `[batch, 1, 1, positions]`, true for visible keys
    /// - returns `[batch, positions, width]`
    fn forward(&self, input: Tensor<3>, mask: Tensor<4, Bool>) -> Tensor<3> {
        let heads = |projection: &Linear| {
            projection
                .forward(input.clone())
                .reshape([BATCH, POSITIONS, HEADS, WIDTH / HEADS])
                .swap_dims(1, 2)
        };
        let options = AttentionOptions::new().causal().mask(mask);
        let attended = fused_attention(
            heads(&self.query),
            heads(&self.key),
            heads(&self.value),
            options,
        );
        let merged = attended.swap_dims(1, 2).reshape([BATCH, POSITIONS, WIDTH]);
        self.output.forward(merged)
    }
}

fn main() {
    let device = Device::flex().autodiff();
    let input = Tensor::<3>::random(
        [BATCH, POSITIONS, WIDTH],
        Distribution::Normal(0.0, 1.0),
        &device,
    );
    // The mask hides position 0 from all queries, because position 0 is padding.
    let is_padding = |position: usize| position == 0;
    let visible: Vec<bool> = (0..BATCH * POSITIONS)
        .map(|index| !is_padding(index % POSITIONS))
        .collect();
    let mask = Tensor::<1, Bool>::from_data(&visible[..], &device);
    let mask = mask.reshape([BATCH, 1, 1, POSITIONS]);
    let target = mean_of_visible(&input);

    let mut module = SelfAttention::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let steps = 100;
    for step in 0..=steps {
        let output = module.forward(input.clone(), mask.clone());
        let loss = (output - target.clone()).square().mean();
        if step % 20 == 0 {
            let loss = loss.clone().into_scalar::<f32>();
            println!("step {step:3}: loss {loss:.5}");
        }
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        module = optimizer.step(0.01, module, gradients);
    }
}

/// Returns the target output of each position, which is the mean of all inputs up to and including that position. The padding
/// at position 0 is left out.
fn mean_of_visible(input: &Tensor<3>) -> Tensor<3> {
    let mut sum = Tensor::zeros([BATCH, 1, WIDTH], &input.device());
    let mut means = vec![sum.clone()];
    for position in 1..POSITIONS {
        sum = sum + input.clone().narrow(1, position, 1);
        means.push(sum.clone().div_scalar(position as f64));
    }
    Tensor::cat(means, 1)
}
