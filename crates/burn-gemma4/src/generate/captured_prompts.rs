//! CUDA graphs of the model's forward passes over prompts, and the rules that decide which prompts get a graph.
//!
//! A prompt may continue from a KV cache with earlier tokens, such as those of a conversation or of a shared prefix. Its
//! graph reads a copy of their keys and values, which is refilled before each replay.

use crate::config::Gemma4Config;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::cache::history::History;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::prefix::Prefix;
use crate::model::prompt_pass::PromptPass;
use crate::op::graph_capture::CapturedGraph;
use crate::op::stream::stream_of;
use burn::backend::fusion::custom::StreamId;
use burn::tensor::Tensor;
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, TryLockError},
};

/// The prompt lengths for which a graph is captured, in tokens. A prompt is padded to the next of these lengths.
const LENGTHS: [usize; 10] = [32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048];

/// The smallest number of tokens for which a graph of continued prompts copies the keys and values of full-attention
/// layers. The number doubles for longer texts.
const LEAST_CAPACITY: usize = 4096;

/// The largest size of the copied keys and values of a graph of continued prompts, in bytes. Longer texts continue
/// without a graph: their attention takes the device longer than the launches take the host.
const MOST_HISTORY_BYTES: usize = 256 << 20;

/// The largest number of graphs. Each graph keeps the memory of its intermediate tensors.
const MOST_GRAPHS: usize = 24;

/// The number of prompts of each padded length that run without a graph. The next prompt of this length captures a
/// graph. A capture takes as long as about five prompts, so it does not pay off for a length that occurs only once.
const BEFORE_CAPTURE: usize = 1;

/// The largest number of floating-point operations per layer for which a prompt gets a graph. With more operations, the
/// device computes longer than the host needs to launch the kernels. A graph would then save no time, and the padding
/// of the prompt would cost time.
///
/// On one H200 (2026-11-28), E2B's launches took 11 ms for 35 layers, and its prompts ran at about 300 TFLOP/s.
const MOST_WORK_PER_LAYER: f64 = 1e11;

/// The CUDA graphs of one model's forward passes over prompts. The model's weights must not change. Clones share the
/// graphs.
#[derive(Clone, Default)]
pub(crate) struct CapturedPrompts {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for CapturedPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedPrompts").finish_non_exhaustive()
    }
}

/// The size of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    /// The number of tokens to which prompts are padded.
    length: usize,
    /// The number of earlier and new tokens for which the graph has slots, or `None` for whole prompts.
    capacity: Option<usize>,
}

impl Size {
    /// Returns the size of the graph for tokens that are padded to `length` and follow those in `cache`. Returns `None`
    /// if no graph can continue from `cache`.
    fn of(model: &Gemma4Model, length: usize, cache: &Cache) -> Option<Self> {
        if cache.is_empty() {
            let capacity = None;
            let serves = cache.has_one_plain_sequence();
            return serves.then_some(Self { length, capacity });
        }
        let size = Self::after(model, length, cache.len());
        size.filter(|_| cache.fills_history())
    }

    /// Returns the size of the graph for tokens that are padded to `length` and follow `past` tokens. Returns `None` if
    /// there are too many tokens for a graph.
    fn after(model: &Gemma4Model, length: usize, past: usize) -> Option<Self> {
        let end = past + length;
        let capacity = end.next_power_of_two().max(LEAST_CAPACITY);
        let serves = end <= model.config().max_position_embeddings
            && History::bytes(model, capacity) <= MOST_HISTORY_BYTES;
        let capacity = Some(capacity);
        serves.then_some(Self { length, capacity })
    }
}

#[derive(Default)]
struct State {
    /// The stream on which the weights were loaded. The graphs are captured and replayed on this stream.
    stream: Option<StreamId>,
    /// The number of tokens of the longest prompt that may have a graph, or `None` if this number has not been computed
    /// yet.
    longest: Option<usize>,
    /// The number of prompts so far of each size.
    seen: HashMap<Size, usize>,
    /// The graphs. The least recently used graph comes first.
    graphs: Vec<(Size, CapturedGraph<PromptPass>)>,
    /// The copies of earlier keys and values, by their capacity. All graphs of one capacity share a copy.
    histories: HashMap<usize, History>,
}

impl CapturedPrompts {
    /// Returns the length to which `count` tokens are padded, and the locked state of the graphs. Returns `None` if no
    /// graph can run these tokens on this stream.
    fn state(&self, model: &Gemma4Model, count: usize) -> Option<(usize, MutexGuard<'_, State>)> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // Another thread is using the graphs, so this thread must not replay one.
            Err(TryLockError::WouldBlock) => return None,
            Err(TryLockError::Poisoned(state)) => {
                state.into_inner().stop();
                self.state.clear_poison();
                return None;
            }
        };
        let current = StreamId::current();
        let longest = *state.longest.get_or_insert_with(|| longest(model));
        let of_weights = *state
            .stream
            .get_or_insert_with(|| stream_of(model.norm.weight.val()).unwrap_or(current));
        if count == 0 || count > longest || of_weights != current {
            return None;
        }
        let length = LENGTHS.into_iter().find(|length| count <= *length)?;
        Some((length.min(longest), state))
    }

    /// True if a graph may run over a whole prompt of `count` tokens, with an empty KV cache of one sequence. `kind` is
    /// the storage format of the cache.
    pub fn serve_whole(&self, model: &Gemma4Model, count: usize, kind: CacheKind) -> bool {
        kind.is_plain() && self.state(model, count).is_some()
    }

    /// True if a graph may run over `count` tokens that follow `prefix`.
    pub fn serve_after(&self, model: &Gemma4Model, count: usize, prefix: &Prefix) -> bool {
        let length = self.state(model, count).map(|(length, _)| length);
        let size = length.and_then(|length| Size::after(model, length, prefix.len()));
        size.is_some() && prefix.fills_history()
    }

    /// Returns the number of tokens of the longest whole prompt over which a graph may run, or 0 if no graph may run.
    pub fn longest_whole(&self, model: &Gemma4Model, kind: CacheKind) -> usize {
        let state = kind.is_plain().then(|| self.state(model, 1)).flatten();
        state.and_then(|(_, state)| state.longest).unwrap_or(0)
    }

    /// Runs the model over tokens that follow those in `cache` by replaying a graph, and appends their keys and values
    /// to `cache`. Returns the normalized hidden state of the last token, `[1, 1, hidden]`.
    ///
    /// `counted` has the sizes for which the prompt of these tokens was counted already, because the chunks of one
    /// prompt must not make a size look frequent.
    ///
    /// Returns `None` and leaves `cache` unchanged if no graph can run the tokens. One case is a cache with several
    /// sequences, or with fewer tokens than the window of sliding layers. Another case is the first prompt of each size.
    pub fn read(
        &self,
        model: &Gemma4Model,
        tokens: &[u32],
        cache: &mut Cache,
        counted: &mut Vec<Size>,
    ) -> Option<Tensor<3>> {
        let (length, mut state) = self.state(model, tokens.len())?;
        let size = Size::of(model, length, cache)?;
        let seen = state.seen.entry(size).or_default();
        if !counted.contains(&size) {
            counted.push(size);
            *seen += 1;
        }
        if *seen <= BEFORE_CAPTURE {
            return None;
        }
        let known = state.graphs.iter().position(|(other, _)| *other == size);
        let mut graph = match known {
            Some(index) => state.graphs.remove(index).1,
            None => CapturedGraph::new(state.pass(model, size)),
        };
        graph.computation.overwrite(tokens, cache);
        let mut may_capture = true;
        let outputs = graph.run(&mut may_capture);
        match may_capture {
            true => state.keep(size, graph),
            false => state.stop(),
        }
        Some(outputs.store(tokens.len(), cache))
    }
}

impl State {
    /// Creates the pass of a graph.
    fn pass(&mut self, model: &Gemma4Model, size: Size) -> PromptPass {
        let Some(capacity) = size.capacity else {
            return PromptPass::new(model, size.length);
        };
        let history = self.histories.entry(capacity);
        let history = history.or_insert_with(|| History::new(model, capacity));
        PromptPass::after(model, size.length, history.clone())
    }

    /// Keeps a graph, and drops the least recently used one if there are too many.
    fn keep(&mut self, size: Size, graph: CapturedGraph<PromptPass>) {
        if self.graphs.len() == MOST_GRAPHS {
            let (dropped, _) = self.graphs.remove(0);
            // Count from the start again, so that a rare size does not replace a graph at each prompt.
            self.seen.remove(&dropped);
            let graphs = &self.graphs;
            let is_used = |capacity| {
                let mut sizes = graphs.iter().map(|(size, _)| size);
                sizes.any(|size| size.capacity == Some(capacity)) || size.capacity == Some(capacity)
            };
            self.histories.retain(|capacity, _| is_used(*capacity));
        }
        self.graphs.push((size, graph));
    }

    /// Drops all graphs, and captures none from now on.
    fn stop(&mut self) {
        self.longest = Some(0);
        self.graphs.clear();
        self.histories.clear();
    }
}

/// Returns the number of tokens of the longest prompt that may have a graph.
fn longest(model: &Gemma4Model) -> usize {
    let config = model.config();
    let longest = LENGTHS[LENGTHS.len() - 1].min(config.max_position_embeddings);
    match PromptPass::serves(model) {
        true => tokens_of_most_work(config).min(longest),
        false => 0,
    }
}

/// Returns the number of tokens of the longest prompt that a graph makes faster.
fn tokens_of_most_work(config: &Gemma4Config) -> usize {
    (MOST_WORK_PER_LAYER * config.num_layers() as f64 / work_of_token(config)) as usize
}

/// Returns the number of floating-point operations per prompt token: two operations (multiply and add) for each weight.
/// Only the weights of layers that compute their own keys and values count. Layers that share an earlier layer's KV
/// cache run only for the last token.
fn work_of_token(config: &Gemma4Config) -> f64 {
    let hidden = config.hidden_size;
    let of_layer = |layer| {
        let queries = config.num_attention_heads * config.head_dim(layer);
        let keys = config.key_value_heads(layer) * config.head_dim(layer);
        let experts = config.experts.as_ref();
        let inner = config.intermediate_size(layer)
            + experts.map_or(0, |experts| {
                experts.top_k_experts * experts.moe_intermediate_size
            });
        hidden * (2 * queries + 2 * keys + 3 * inner)
    };
    let weights: usize = (0..config.first_shared_layer()).map(of_layer).sum();
    2.0 * weights as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the length of the longest prompt with a graph for three models of different sizes.
    #[test]
    fn tokens_of_most_work_are_many_in_small_models() {
        assert!(tokens_of_most_work(&Gemma4Config::e2b()) >= 2048);
        assert!((512..2048).contains(&tokens_of_most_work(&Gemma4Config::e4b())));
        assert!((32..256).contains(&tokens_of_most_work(&Gemma4Config::dense_31b())));
    }
}
