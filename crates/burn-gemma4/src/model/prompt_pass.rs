//! The forward pass over one whole prompt, padded at its end to a fixed number of tokens.
//!
//! The host determines only the shapes. The launches read the tokens and the number of tokens from device memory. A
//! CUDA graph can therefore capture the launches and replay them for other prompts. The padding follows the prompt, so
//! under the causal mask no token of the prompt sees the padding.

use super::cache::Cache;
use super::cache::key_values::SharedKeyValues;
use super::decode_ops::DecodeOps;
use super::layer::Weight;
use super::layer::ops::ResidualStream;
use super::prefill_ops::{KvDestination, PrefillOps, Rotations};
use super::text_model::Gemma4Model;
use crate::config::LayerType;
use crate::op::graph_capture::Computation;
use crate::op::in_place::{copied, overwrite_three};
use crate::op::moe_gemm::infers_on_device;
use crate::op::rope::{Positions, RotationTables};
use crate::op::stream::StreamCheck;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The forward pass over a padded prompt, with all tensors that its launches read.
pub(crate) struct PromptPass {
    model: Gemma4Model,
    /// The token ids with padding, `[length]`.
    tokens: Tensor<1, Int>,
    /// The index of the prompt's last token, `[1]`.
    last: Tensor<1, Int>,
    /// The number of tokens in the prompt, `[1]`.
    count: Tensor<1, Int>,
    rotations: Rotations,
    sliding: RotationTables,
    full: RotationTables,
}

/// The results of a forward pass over a padded prompt.
#[derive(Clone)]
pub(crate) struct PromptOutputs {
    /// The normalized hidden state of the prompt's last token, `[1, hidden]`.
    hidden: Tensor<2>,
    /// The keys and values of each layer that computes its own keys and values. Each tensor is
    /// `[1, kv_heads, length, head_dim]`.
    key_values: Vec<[Tensor<4>; 2]>,
}

impl PromptPass {
    /// True if the launches of a forward pass over a prompt can be captured in a graph, because they need nothing from
    /// the host.
    pub fn serves(model: &Gemma4Model) -> bool {
        // Require float experts. For quantized experts a graph would keep each layer's dequantized experts in memory.
        // The dequantized experts are far larger than the quantized experts.
        let has_float_experts = || {
            let mut experts = model
                .layers
                .iter()
                .filter_map(|layer| layer.experts.as_ref());
            experts.all(|experts| matches!(experts.gate_up_proj, Weight::Whole(_)))
        };
        let experts_run_on_device = match model.config().experts {
            Some(_) => infers_on_device(&model.device(), model.dtype()) && has_float_experts(),
            None => true,
        };
        DecodeOps::serve(model, 1) && model.host_table.is_none() && experts_run_on_device
    }

    /// Creates the pass over prompts of up to `length` tokens. The inputs are uninitialized.
    pub fn new(model: &Gemma4Model, length: usize) -> Self {
        let (device, dtype) = (model.device(), model.dtype());
        let positions = Positions::Range {
            first: 0,
            count: length,
        };
        let integers = |count| Tensor::empty([count], (&device, DType::I32));
        let tables = |kind| model.rope.tables(kind, length, dtype, &device);
        Self {
            tokens: integers(length),
            last: integers(1),
            count: integers(1),
            rotations: Rotations::new(&model.rope, &positions, dtype, &device),
            sliding: tables(LayerType::Sliding),
            full: tables(LayerType::Full),
            model: model.clone(),
        }
    }

    /// Overwrites the input tensors with `prompt`. The prompt must have at least one token, and at most the number of
    /// tokens that was passed to [`new`](Self::new).
    pub fn overwrite(&self, prompt: &[u32]) {
        let [length] = self.tokens.dims();
        let mut numbers: Vec<i32> = prompt.iter().map(|token| *token as i32).collect();
        numbers.resize(length, self.model.config().pad_token as i32);
        numbers.extend([prompt.len() as i32 - 1, prompt.len() as i32]);
        let numbers = TensorData::new(numbers, [length + 2]);
        let numbers = Tensor::from_data(numbers, (&self.device(), DType::I32));
        let inputs = [&self.tokens, &self.last, &self.count].map(Tensor::clone);
        overwrite_three(inputs, numbers);
    }
}

impl Computation for PromptPass {
    /// Capture at the first run, because the caller decides when a capture pays off.
    const BEFORE_CAPTURE: usize = 0;
    type Outputs = PromptOutputs;

    fn compute(&self) -> PromptOutputs {
        let model = &self.model;
        let config = model.config();
        let [length] = self.tokens.dims();
        let ids = self.tokens.clone().reshape([1, length]);
        let (embedded, embeddings) = model.embedded_rows(&ids, None, None, &mut ());
        let mut key_values = Vec::new();
        let mut all_rows = PrefillOps {
            batch: 1,
            rotations: self.rotations.clone(),
            window: config.sliding_window,
            segments: None,
            destination: KvDestination::List(&mut key_values),
            adapters: None,
            mlp_recompute: false,
            observer: &mut (),
        };
        let mut shared = SharedKeyValues::default();
        let own = 0..config.first_shared_layer();
        let stream = ResidualStream::new(embedded);
        let stream = model.layers(own, stream, embeddings.as_ref(), &mut shared, &mut all_rows);

        // The shared KV layers run only for the prompt's last token.
        let last_row = |rows: Tensor<2>| rows.select(0, self.last.clone());
        let mut stream = ResidualStream::new(last_row(stream.into_rows()));
        let rest = config.first_shared_layer()..config.num_layers();
        if !rest.is_empty() {
            shared.limit(&self.count);
            let mut one_row = DecodeOps {
                batch: 1,
                positions: self.last.clone(),
                sliding: self.sliding.clone(),
                full: self.full.clone(),
                targets: None,
                adapters: None,
                after: &mut |_| (),
            };
            let embeddings = embeddings.map(last_row);
            stream = model.layers(rest, stream, embeddings.as_ref(), &mut shared, &mut one_row);
        }
        let hidden = stream.norm(&model.norm);
        PromptOutputs { hidden, key_values }
    }

    fn is_local(&self) -> bool {
        StreamCheck::new().module(&self.model).are_local
    }

    fn device(&self) -> Device {
        self.tokens.device()
    }
}

impl PromptOutputs {
    /// Appends the keys and values of the first `count` tokens to an empty KV cache of one sequence. Returns the hidden state
    /// of the prompt's last token, `[1, 1, hidden]`, in a tensor that later passes do not overwrite.
    pub fn store(self, model: &Gemma4Model, count: usize, cache: &mut Cache) -> Tensor<3> {
        let call = cache.call(count, &model.device(), true);
        for (layer, key_values) in self.key_values.into_iter().enumerate() {
            let [key, value] = key_values.map(|rows| rows.narrow(2, 0, count));
            let norm = model.layers[layer].self_attn.key_norm();
            cache.extend(layer, &norm.weight, key, value, &call);
        }
        cache.advance(&call);
        let [rows, columns] = self.hidden.dims();
        copied(self.hidden.reshape([columns])).reshape([rows, 1, columns])
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::config::Gemma4Config;
    use crate::model::Logits;
    use crate::model::tokens::Tokens;
    use burn::tensor::DeviceKind;

    const LENGTH: usize = 24;

    /// A model with a window of 5 tokens and with `shared` shared KV layers.
    fn model(shared: usize) -> Gemma4Model {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        device.seed(1);
        let config = Gemma4Config {
            vocab_size: 60,
            hidden_size: 32,
            intermediate_size: 64,
            layer_types: vec![
                LayerType::Sliding,
                LayerType::Full,
                LayerType::Sliding,
                LayerType::Full,
            ],
            num_attention_heads: 2,
            sliding_head_dim: 16,
            global_head_dim: 32,
            num_kv_shared_layers: shared,
            hidden_size_per_layer_input: 8,
            vocab_size_per_layer_input: 60,
            sliding_window: 5,
            ..Gemma4Config::e2b()
        };
        Gemma4Model::new(&config, &device)
    }

    fn step(model: &Gemma4Model, cache: &mut Cache, tokens: &[u32]) -> Vec<f32> {
        let tokens = Tokens::upload(tokens.to_vec(), [1, tokens.len()], &model.device());
        let hidden = model.step_hidden(&tokens, cache, Logits::Last(1));
        floats(hidden.expect("the tokens fit").expect("one position"))
    }

    fn floats(hidden: Tensor<3>) -> Vec<f32> {
        hidden.into_data().iter::<f32>().collect()
    }

    /// Checks that the pass over a padded prompt gives the same hidden state and KV cache as a call without padding.
    /// The test runs one prompt of every possible length. All prompts use the same input tensors, so each prompt
    /// overwrites the tokens of the previous prompt, which was longer or shorter.
    #[test]
    fn compute_of_padded_prompt_matches_unpadded_prompt() {
        for shared in [0, 2] {
            let model = model(shared);
            assert!(PromptPass::serves(&model));
            let pass = PromptPass::new(&model, LENGTH);
            for index in 0..LENGTH {
                let count = index * 7 % LENGTH + 1;
                let prompt: Vec<u32> = (0..count as u32)
                    .map(|token| (token * 37 + index as u32) % 60)
                    .collect();
                pass.overwrite(&prompt);
                let mut cache = model.cache(vec![0]);
                let mut found = floats(pass.compute().store(&model, count, &mut cache));
                let mut other = model.cache(vec![0]);
                let mut expected = step(&model, &mut other, &prompt);
                found.extend(step(&model, &mut cache, &[9]));
                expected.extend(step(&model, &mut other, &[9]));
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (found - expected).abs();
                    assert!(error <= 1e-4, "{shared}, {count}: {found}, {expected}");
                }
            }
        }
    }
}
