//! CUDA graphs of the forward pass over a prompt. A prompt of up to 2,048 tokens has more launches than work, so its time
//! would be the host's.

use super::decode::Next;
use crate::error::Gemma4Error;
use crate::model::cache::Cache;
#[cfg(feature = "cube")]
use crate::model::cache::precision::KvPrecision;
#[cfg(feature = "cube")]
use crate::model::prompt_pass::PromptPass;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
#[cfg(feature = "cube")]
use crate::op::graph_capture::CapturedGraph;
use burn::tensor::Tensor;
use std::fmt;
#[cfg(feature = "cube")]
use std::{
    sync::{Arc, Mutex},
    thread::{self, ThreadId},
};

/// The lengths of prompts that have a graph. A prompt is padded to the next of these lengths.
///
/// Longer prompts run without a graph, because their work takes longer than their launches.
#[cfg(feature = "cube")]
const LENGTHS: [usize; 10] = [32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048];

/// The number of prompts of a length that run without a graph. A capture takes as long as about five prompts.
#[cfg(feature = "cube")]
const BEFORE_CAPTURE: usize = 1;

/// The largest number of graphs. Each graph keeps the memory of its intermediate tensors, up to a few hundred megabytes. The
/// least recently used graph is dropped first.
#[cfg(feature = "cube")]
const MOST_GRAPHS: usize = 4;

/// A model, and the CUDA graphs of its passes over prompts. [`Gemma4`](crate::Gemma4) has its own.
///
/// The first prompt of a length runs without a graph. The graphs belong to the thread of the first prompt; prompts on other
/// threads run without them. Clones share the graphs.
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
    /// True once the device has failed to capture a graph.
    cannot_capture: bool,
    /// The thread whose work is ordered before and after the replays.
    thread: Option<ThreadId>,
    /// The number of prompts of each length so far.
    seen: [usize; LENGTHS.len()],
    /// The graphs, the least recently used first. Each has the index of its length in [`LENGTHS`].
    graphs: Vec<(usize, CapturedGraph<PromptPass>)>,
}

impl CapturedPrompts {
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
        // Another thread that holds the lock replays a graph, which this thread must not do.
        let mut state = self.state.try_lock().ok()?;
        let index = LENGTHS.iter().position(|length| prompt.len() <= *length)?;
        let kind = cache.kind();
        let is_plain = kind.precision == KvPrecision::Model && !kind.compact_keys;
        let is_new = cache.is_empty() && cache.batch() == 1 && !cache.is_padded();
        let thread = thread::current().id();
        if state.cannot_capture
            || prompt.is_empty()
            || !is_plain
            || !is_new
            || !PromptPass::serves(model)
            || *state.thread.get_or_insert(thread) != thread
        {
            return None;
        }
        state.seen[index] += 1;
        if state.seen[index] <= BEFORE_CAPTURE {
            return None;
        }
        let outputs = state.run(model, index, prompt);
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
    /// Runs the pass over prompts of length `LENGTHS[index]`, which captures the pass first if necessary.
    fn run(
        &mut self,
        model: &Gemma4Model,
        index: usize,
        prompt: &[u32],
    ) -> crate::model::prompt_pass::PromptOutputs {
        let known = self.graphs.iter().position(|(of, _)| *of == index);
        let (_, mut graph) = match known {
            Some(place) => self.graphs.remove(place),
            None => {
                if self.graphs.len() == MOST_GRAPHS {
                    self.graphs.remove(0);
                }
                let pass = PromptPass::new(model, LENGTHS[index]);
                (index, CapturedGraph::new(pass))
            }
        };
        graph.computation.overwrite(prompt);
        let mut may_capture = true;
        let outputs = graph.run(&mut may_capture);
        match may_capture {
            true => self.graphs.push((index, graph)),
            false => self.cannot_capture = true,
        }
        outputs
    }
}
