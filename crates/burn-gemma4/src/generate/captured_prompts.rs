//! CUDA graphs of the model's forward passes over whole prompts, and the rules that decide which prompts get a graph.

use crate::config::Gemma4Config;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::precision::KvPrecision;
use crate::model::prompt_pass::PromptPass;
use crate::op::graph_capture::CapturedGraph;
use crate::op::stream::stream_of;
use burn::backend::fusion::custom::StreamId;
use burn::tensor::Tensor;
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, TryLockError},
};

/// The prompt lengths for which a graph is captured, in tokens. A prompt is padded to the next of these lengths.
const LENGTHS: [usize; 10] = [32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048];

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

#[derive(Default)]
struct State {
    /// The stream on which the weights were loaded. The graphs are captured and replayed on this stream.
    stream: Option<StreamId>,
    /// The number of tokens of the longest prompt that may have a graph, or `None` if this number has not been computed
    /// yet.
    longest: Option<usize>,
    /// For each length in [`LENGTHS`], the number of prompts so far that were padded to this length.
    seen: [usize; LENGTHS.len()],
    /// For each length in [`LENGTHS`], the graph for prompts of this padded length, or `None` if no graph has been
    /// captured yet.
    graphs: [Option<CapturedGraph<PromptPass>>; LENGTHS.len()],
}

impl CapturedPrompts {
    /// Finds the smallest length in [`LENGTHS`] to which a prompt of `count` tokens can be padded. Returns the index of
    /// this length and the locked state of the graphs. Returns `None` if no graph can run the prompt on this stream.
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
        let index = LENGTHS.iter().position(|length| count <= *length)?;
        Some((index, state))
    }

    /// True if a graph may run over a whole prompt of `count` tokens. `kind` is the storage format of the prompt's KV
    /// cache, which must be empty and have one sequence.
    pub fn serve(&self, model: &Gemma4Model, count: usize, kind: CacheKind) -> bool {
        is_plain(kind) && self.state(model, count).is_some()
    }

    /// Runs the model over a whole prompt by replaying a graph, and writes the prompt's keys and values to `cache`.
    /// Returns the normalized hidden state of the last token, `[1, 1, hidden]`.
    ///
    /// Returns `None` and leaves `cache` unchanged if no graph can run the prompt. One case is a cache that is not
    /// empty or has several sequences. Another case is the first prompt of each padded length.
    pub fn read(
        &self,
        model: &Gemma4Model,
        prompt: &[u32],
        cache: &mut Cache,
    ) -> Option<Tensor<3>> {
        if !is_plain(cache.kind()) || !cache.is_empty() || cache.batch() != 1 || cache.is_padded() {
            return None;
        }
        let (index, mut state) = self.state(model, prompt.len())?;
        state.seen[index] += 1;
        if state.seen[index] <= BEFORE_CAPTURE {
            return None;
        }
        let mut graph = state.graphs[index].take().unwrap_or_else(|| {
            let length = LENGTHS[index].min(state.longest.unwrap_or(LENGTHS[index]));
            CapturedGraph::new(PromptPass::new(model, length))
        });
        graph.computation.overwrite(prompt);
        let mut may_capture = true;
        let outputs = graph.run(&mut may_capture);
        match may_capture {
            true => state.graphs[index] = Some(graph),
            false => state.stop(),
        }
        Some(outputs.store(model, prompt.len(), cache))
    }
}

impl State {
    /// Drops all graphs, and captures none from now on.
    fn stop(&mut self) {
        self.longest = Some(0);
        self.graphs = Default::default();
    }
}

/// True if the KV cache stores keys and values exactly as the model computes them. The captured passes support no other
/// storage format.
fn is_plain(kind: CacheKind) -> bool {
    kind.precision == KvPrecision::Model && !kind.compact_keys
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
