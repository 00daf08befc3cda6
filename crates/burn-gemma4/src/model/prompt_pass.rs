//! The forward pass over the tokens of a prompt, padded at their end to a fixed number. The tokens are a whole prompt, or
//! they follow earlier tokens whose keys and values are known.
//!
//! The host determines only the shapes. The launches read the tokens and their positions from device memory. A CUDA graph
//! can therefore capture the launches and replay them for other prompts. The padding follows the tokens, so under the
//! causal mask no token sees the padding.

use super::cache::Cache;
use super::cache::history::{Continuation, History};
use super::cache::key_values::SharedKeyValues;
use super::decode_ops::DecodeOps;
use super::layer::Weight;
use super::layer::ops::ResidualStream;
use super::prefill_ops::{KvDestination, PrefillOps, Rotations};
use super::row_rules::RowRules;
use super::soft_tokens::CallMedia;
use super::text_model::Gemma4Model;
use crate::config::LayerType;
use crate::op::graph_capture::Computation;
use crate::op::in_place::{copied, overwrite_three};
use crate::op::moe_gemm::infers_on_device;
use crate::op::rope::{Positions, RotationTables};
use crate::op::stream::StreamCheck;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The forward pass over a prompt's tokens and their padding, with all tensors that its launches read.
pub(crate) struct PromptPass {
    model: Gemma4Model,
    /// The token ids with padding, `[length]`.
    tokens: Tensor<1, Int>,
    /// The index of the last token, `[1]`.
    last: Tensor<1, Int>,
    /// The number of keys that the last token sees in sliding layers, `[1]`.
    sliding_length: Tensor<1, Int>,
    sliding: RotationTables,
    full: RotationTables,
    earlier: Earlier,
}

/// The tokens before those of a pass.
enum Earlier {
    /// The pass runs over whole prompts, whose tokens have these rotations.
    None(Box<Rotations>),
    Some(Box<EarlierTokens>),
}

/// The tokens before those of a pass, with the inputs that depend on their number.
struct EarlierTokens {
    history: History,
    /// The number of earlier tokens, `[1]`.
    start: Tensor<1, Int>,
    /// The number of earlier tokens plus the length of the pass, `[1]`.
    end: Tensor<1, Int>,
    /// The position of each token, `[length]`.
    positions: Tensor<1, Int>,
    /// The position of the last token, `[1]`.
    last_position: Tensor<1, Int>,
    /// The number of earlier tokens and of tokens without padding, `[1]`.
    full_length: Tensor<1, Int>,
}

/// The results of a forward pass over a prompt's tokens and their padding.
#[derive(Clone)]
pub(crate) struct PromptOutputs {
    /// The normalized hidden state of the last token, `[1, hidden]`.
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

    /// Creates the pass over whole prompts of up to `length` tokens. The inputs are uninitialized.
    pub fn new(model: &Gemma4Model, length: usize) -> Self {
        let positions = Positions::Range {
            first: 0,
            count: length,
        };
        let rotations = Rotations::new(&model.rope, &positions, model.dtype(), &model.device());
        Self::with(model, length, length, Earlier::None(Box::new(rotations)))
    }

    /// Creates the pass over up to `length` tokens that follow those in `history`. The inputs are uninitialized.
    pub fn after(model: &Gemma4Model, length: usize, history: History) -> Self {
        let device = model.device();
        let positions = history.capacity();
        let earlier = EarlierTokens {
            history,
            start: integers(1, &device),
            end: integers(1, &device),
            positions: integers(length, &device),
            last_position: integers(1, &device),
            full_length: integers(1, &device),
        };
        Self::with(model, length, positions, Earlier::Some(Box::new(earlier)))
    }

    /// Creates the pass over up to `length` tokens, at positions below `positions`.
    fn with(model: &Gemma4Model, length: usize, positions: usize, earlier: Earlier) -> Self {
        let (device, dtype) = (model.device(), model.dtype());
        let tables = |kind| model.rope.tables(kind, positions, dtype, &device);
        Self {
            tokens: integers(length, &device),
            last: integers(1, &device),
            sliding_length: integers(1, &device),
            sliding: tables(LayerType::Sliding),
            full: tables(LayerType::Full),
            earlier,
            model: model.clone(),
        }
    }

    /// Overwrites the inputs with `tokens`, which follow the tokens in `cache`. There must be at least one token, and at
    /// most the length of the pass.
    ///
    /// # Panics
    /// Panics if a pass over whole prompts gets a cache with tokens, or if the history cannot hold the cache's tokens
    /// and the pass.
    pub fn overwrite(&self, tokens: &[u32], cache: &Cache) {
        let ([length], count, past) = (self.tokens.dims(), tokens.len(), cache.len());
        let mut numbers: Vec<usize> = tokens.iter().map(|token| *token as usize).collect();
        numbers.resize(length, self.model.config().pad_token as usize);
        let mut sliding_length = count;
        match &self.earlier {
            Earlier::None(_) => assert_eq!(past, 0, "the pass runs over whole prompts"),
            Earlier::Some(earlier) => {
                assert!(past + length <= earlier.history.capacity());
                cache.copy_to(&earlier.history);
                sliding_length += earlier.history.kept();
                let positions = (past..past + length).collect();
                let inputs = [&earlier.positions, &earlier.start, &earlier.end];
                self.upload(inputs, positions, [past, past + length]);
                let end = past + count;
                // Three inputs are written at once, so this write and the last one both set the third input.
                let inputs = [
                    &earlier.last_position,
                    &earlier.full_length,
                    &self.sliding_length,
                ];
                self.upload(inputs, vec![end - 1], [end, sliding_length]);
            }
        }
        let inputs = [&self.tokens, &self.last, &self.sliding_length];
        self.upload(inputs, numbers, [count - 1, sliding_length]);
    }

    /// Overwrites three inputs. The last two have one element each.
    fn upload(&self, inputs: [&Tensor<1, Int>; 3], first: Vec<usize>, rest: [usize; 2]) {
        let numbers = first.into_iter().chain(rest);
        let numbers: Vec<i32> = numbers.map(|number| number as i32).collect();
        let shape = [numbers.len()];
        let numbers = TensorData::new(numbers, shape);
        let numbers = Tensor::from_data(numbers, (&self.device(), DType::I32));
        overwrite_three(inputs.map(Tensor::clone), numbers);
    }

    fn rotations(&self) -> Rotations {
        match &self.earlier {
            Earlier::None(rotations) => (**rotations).clone(),
            Earlier::Some(earlier) => {
                let [sliding, full] = [&self.sliding, &self.full];
                let tables = [&sliding.cos, &sliding.sin, &full.cos, &full.sin];
                Rotations::of_tables(tables.map(|table| {
                    let rows = table.clone().select(0, earlier.positions.clone());
                    rows.unsqueeze::<4>()
                }))
            }
        }
    }
}

fn integers(count: usize, device: &Device) -> Tensor<1, Int> {
    Tensor::empty([count], (device, DType::I32))
}

impl Computation for PromptPass {
    type Outputs = PromptOutputs;

    fn compute(&self) -> PromptOutputs {
        let model = &self.model;
        let config = model.config();
        let [length] = self.tokens.dims();
        let ids = self.tokens.clone().reshape([1, length]);
        let (embedded, embeddings) =
            model.embedded_rows(&ids, None, &CallMedia::default(), None, &mut ());
        let mut key_values = Vec::new();
        let (destination, last_position, full_length) = match &self.earlier {
            Earlier::None(_) => (
                KvDestination::List(&mut key_values),
                &self.last,
                &self.sliding_length,
            ),
            Earlier::Some(earlier) => (
                KvDestination::History(Continuation {
                    history: &earlier.history,
                    start: &earlier.start,
                    end: &earlier.end,
                    new: &mut key_values,
                }),
                &earlier.last_position,
                &earlier.full_length,
            ),
        };
        let mut all_rows = PrefillOps {
            batch: 1,
            rotations: self.rotations(),
            window: config.sliding_window,
            rules: RowRules::default(),
            destination,
            adapters: None,
            mlp_recompute: false,
            observer: &mut (),
        };
        let mut shared = SharedKeyValues::default();
        let own = 0..config.first_shared_layer();
        let stream = ResidualStream::new(embedded);
        let stream = model.layers(own, stream, embeddings.as_ref(), &mut shared, &mut all_rows);

        // The shared KV layers run only for the last token.
        let last_row = |rows: Tensor<2>| rows.select(0, self.last.clone());
        let mut stream = ResidualStream::new(last_row(stream.into_rows()));
        let rest = config.first_shared_layer()..config.num_layers();
        if !rest.is_empty() {
            shared.limit(&self.sliding_length, full_length);
            let mut one_row = DecodeOps {
                batch: 1,
                positions: last_position.clone(),
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
    /// Appends the keys and values of the first `count` tokens to a KV cache of one sequence. Returns the hidden state
    /// of the last token, `[1, 1, hidden]`, in a tensor that later passes do not overwrite.
    pub fn store(self, count: usize, cache: &mut Cache) -> Tensor<3> {
        let layers = self.key_values.into_iter();
        let first = |rows: Tensor<4>| rows.narrow(2, 0, count);
        cache.append(count, layers.map(|layer| layer.map(first)).collect());
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
                let mut cache = model.cache(vec![0]);
                pass.overwrite(&prompt, &cache);
                let mut found = floats(pass.compute().store(count, &mut cache));
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

    /// Checks that the pass over padded tokens after a history gives the same hidden state and KV cache as a call without
    /// padding. The history holds the tokens of an earlier, longer or shorter prompt, and its ring buffers have wrapped
    /// around. All prompts use the same input tensors.
    #[test]
    fn compute_after_history_matches_unpadded_prompt() {
        for shared in [0, 2] {
            let model = model(shared);
            let capacity = 3 * LENGTH;
            let pass = PromptPass::after(&model, LENGTH, History::new(&model, capacity));
            for (index, past) in [4, 5, 2 * LENGTH, 17, 6, 31].into_iter().enumerate() {
                let count = (index * 7 + 1) % LENGTH + 1;
                let token = |place: usize| (place * 37 + index) as u32 % 60;
                let earlier: Vec<u32> = (0..past).map(token).collect();
                let tokens: Vec<u32> = (past..past + count).map(token).collect();
                let mut cache = model.cache(vec![0]).forgetting(index % 3);
                let mut other = model.cache(vec![0]).forgetting(index % 3);
                step(&model, &mut cache, &earlier);
                step(&model, &mut other, &earlier);
                assert!(cache.fills_history());
                pass.overwrite(&tokens, &cache);
                let mut found = floats(pass.compute().store(count, &mut cache));
                let mut expected = step(&model, &mut other, &tokens);
                for next in [9, 10] {
                    found.extend(step(&model, &mut cache, &[next]));
                    expected.extend(step(&model, &mut other, &[next]));
                }
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (found - expected).abs();
                    let case = format!("{shared}, {count} after {past}");
                    assert!(error <= 1e-4, "{case}: {found}, {expected}");
                }
            }
        }
    }

    #[test]
    fn short_caches_fill_no_history() {
        let model = model(0);
        for (tokens, fills) in [(0, false), (3, false), (4, true)] {
            let mut cache = model.cache(vec![0]);
            if tokens > 0 {
                step(&model, &mut cache, &[7; 3][..tokens.min(3)]);
            }
            for _ in 3..tokens {
                step(&model, &mut cache, &[8]);
            }
            assert_eq!(cache.fills_history(), fills, "{tokens} tokens");
        }
    }
}
