//! CUDA graphs of the forward pass over a prompt. A prompt of up to 2,048 tokens has more launches than work, so its time
//! would be the host's.

use super::decode::Next;
#[cfg(feature = "cube")]
use crate::config::Gemma4Config;
use crate::error::Gemma4Error;
use crate::model::cache::Cache;
use crate::model::cache::kind::CacheKind;
#[cfg(feature = "cube")]
use crate::model::cache::precision::KvPrecision;
#[cfg(feature = "cube")]
use crate::model::prompt_pass::PromptPass;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
#[cfg(feature = "cube")]
use crate::op::graph_capture::CapturedGraph;
#[cfg(feature = "cube")]
use crate::op::stream::stream_of;
#[cfg(feature = "cube")]
use burn::backend::fusion::custom::StreamId;
use burn::tensor::Tensor;
use std::fmt;
#[cfg(feature = "cube")]
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// The lengths of prompts that have a graph. A prompt is padded to the next of these lengths.
#[cfg(feature = "cube")]
const LENGTHS: [usize; 10] = [32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048];

/// The number of prompts of a length that run without a graph. A capture takes as long as about five prompts.
#[cfg(feature = "cube")]
const BEFORE_CAPTURE: usize = 1;

/// The number of floating-point operations per layer up to which a prompt is captured. A prompt with more work takes longer
/// than its launches, so that a graph would save no time, and padding would cost time.
///
/// On one H200 (2026-11-28), E2B's launches took 11 ms for 35 layers, and its prompts ran at about 300 TFLOP/s.
#[cfg(feature = "cube")]
const MOST_WORK_PER_LAYER: f64 = 1e11;

/// A model, and the CUDA graphs of its passes over prompts. [`Gemma4`](crate::Gemma4) has its own.
///
/// Prompts of up to 2,048 tokens may have a graph, in large models fewer tokens. The first prompt of a length runs without a
/// graph. Prompts on other threads than the one that loaded the weights run without graphs: see
/// [`Gemma4::on_stream_of_weights`](crate::Gemma4::on_stream_of_weights). Each graph keeps the memory of its intermediate
/// tensors: 0.8 GB for all lengths of E2B. Clones share the graphs.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Gemma4, LoadOptions, PromptGraphs};
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// let graphs = PromptGraphs::new(gemma.model().clone());
/// let mut cache = gemma.model().cache(vec![0]);
/// let next = graphs.read(&[2, 17, 5], &mut cache)?.argmax()?;
/// assert_eq!((next.len(), cache.len()), (1, 3));
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PromptGraphs {
    model: Gemma4Model,
    captured: CapturedPrompts,
}

impl PromptGraphs {
    /// Takes a model, without capturing a graph yet.
    pub fn new(model: Gemma4Model) -> Self {
        Self {
            model,
            captured: CapturedPrompts::default(),
        }
    }

    /// Runs the model over tokens that follow the tokens in `cache`, and returns the logits after the last token. Replays a
    /// graph if the cache is empty and has one sequence.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if `tokens` is empty or has a token outside the vocabulary, or if the cache does not
    /// have one sequence.
    pub fn read(&self, tokens: &[u32], cache: &mut Cache) -> Result<Next<'_>, Gemma4Error> {
        let config = self.model.config();
        config.check_tokens(tokens.iter().map(|token| i64::from(*token)))?;
        let hidden = match self.captured.read(&self.model, tokens, cache) {
            Some(hidden) => hidden,
            None => {
                let device = self.model.device();
                let tokens = Tokens::upload(tokens.to_vec(), [1, tokens.len()], &device);
                let hidden = self.model.step_hidden(&tokens, cache, Logits::Last(1))?;
                hidden.expect("Logits::Last(1) gives a hidden state")
            }
        };
        Ok(Next::of_hidden(&self.model, hidden))
    }
}

/// The captured passes over prompts of one model, whose weights must not change. Clones share the graphs.
#[derive(Clone, Default)]
pub(crate) struct CapturedPrompts {
    #[cfg(feature = "cube")]
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for CapturedPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedPrompts").finish_non_exhaustive()
    }
}

#[cfg(feature = "cube")]
#[derive(Default)]
struct State {
    /// The stream of the weights, on which the graphs are captured and replayed.
    stream: Option<StreamId>,
    /// The largest length of a prompt that may have a graph, once it has been computed.
    longest: Option<usize>,
    /// The number of prompts of each length so far.
    seen: [usize; LENGTHS.len()],
    /// The graph of each length.
    graphs: [Option<CapturedGraph<PromptPass>>; LENGTHS.len()],
}

impl CapturedPrompts {
    /// Returns the index of the length of a prompt with `count` tokens, and the state of the graphs. Returns `None` if no
    /// graph can run the prompt on this stream.
    #[cfg(feature = "cube")]
    fn state(&self, model: &Gemma4Model, count: usize) -> Option<(usize, MutexGuard<'_, State>)> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // Another thread replays a graph, which this thread must not do.
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

    /// True if a prompt of `count` tokens may replay a graph when an empty cache of one sequence of this kind reads it at
    /// once.
    pub fn serve(&self, model: &Gemma4Model, count: usize, kind: CacheKind) -> bool {
        #[cfg(feature = "cube")]
        return is_plain(kind) && self.state(model, count).is_some();
        #[cfg(not(feature = "cube"))]
        {
            let _ = (model, count, kind);
            false
        }
    }

    /// Runs the model over a whole prompt with a graph, and fills the empty `cache` of one sequence. Returns the normalized
    /// hidden state of the last token, `[1, 1, hidden]`. Returns `None` if no graph can run the prompt; the cache is then
    /// still empty.
    #[cfg(feature = "cube")]
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

    /// Returns `None`, because only CubeCL devices capture graphs.
    #[cfg(not(feature = "cube"))]
    pub fn read(
        &self,
        _model: &Gemma4Model,
        _prompt: &[u32],
        _cache: &mut Cache,
    ) -> Option<Tensor<3>> {
        None
    }
}

#[cfg(feature = "cube")]
impl State {
    /// Drops all graphs, and captures none from now on.
    fn stop(&mut self) {
        self.longest = Some(0);
        self.graphs = Default::default();
    }
}

/// True if keys and values are stored as the model computes them. The passes do not write other formats.
#[cfg(feature = "cube")]
fn is_plain(kind: CacheKind) -> bool {
    kind.precision == KvPrecision::Model && !kind.compact_keys
}

/// Returns the largest number of tokens of a prompt that may have a graph.
#[cfg(feature = "cube")]
fn longest(model: &Gemma4Model) -> usize {
    let config = model.config();
    match PromptPass::serves(model) {
        true => {
            let most = MOST_WORK_PER_LAYER * config.num_layers() as f64 / work_of_token(config);
            let positions = config.max_position_embeddings;
            (most as usize)
                .min(positions)
                .min(LENGTHS[LENGTHS.len() - 1])
        }
        false => 0,
    }
}

/// Returns the number of floating-point operations of a prompt token: a multiply-add for each weight of the layers that
/// compute their own keys and values. The other layers run only for the last token.
#[cfg(feature = "cube")]
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

#[cfg(all(test, feature = "cube"))]
mod tests {
    use super::*;

    /// Checks the largest lengths, which follow from the numbers of weights.
    #[test]
    fn work_of_token_allows_long_prompts_of_small_models() {
        let most = |config: Gemma4Config| {
            (MOST_WORK_PER_LAYER * config.num_layers() as f64 / work_of_token(&config)) as usize
        };
        assert!(most(Gemma4Config::e2b()) >= 2048);
        assert!((512..2048).contains(&most(Gemma4Config::e4b())));
        assert!((32..256).contains(&most(Gemma4Config::dense_31b())));
    }
}
