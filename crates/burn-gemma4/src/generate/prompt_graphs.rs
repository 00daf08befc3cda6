//! CUDA graphs of the forward pass over a prompt. For prompts of up to 2,048 tokens, the host may need longer to launch
//! the kernels one by one than the device needs to run them.

#[cfg(feature = "cube")]
pub(crate) use super::captured_prompts::{CapturedPrompts, Size};
use super::decode::{Next, Prefill};
use crate::error::Gemma4Error;
use crate::model::cache::{Cache, kind::CacheKind};
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
#[cfg(not(feature = "cube"))]
pub(crate) use without_graphs::{CapturedPrompts, Size};

/// A model with CUDA graphs of its forward passes over prompts. A [`Gemma4`](crate::Gemma4) does not need this type,
/// because it holds such graphs itself.
///
/// Prompts of up to 2,048 tokens may have a graph, and so may as many tokens that continue a text. In large models this
/// limit is lower. The first prompt of each padded length runs without a graph. Prompts on a thread that did not load
/// the weights also run without graphs: see [`Gemma4::on_stream_of_weights`](crate::Gemma4::on_stream_of_weights).
///
/// Each graph keeps the memory of its intermediate tensors, about 0.12 MB per token of its length in E2B. At most 24
/// graphs are kept. The graphs for continued texts also keep copies of keys and values, at most 256 MiB for each power of
/// two of the text's length. Clones share the graphs.
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
    /// Wraps a model. No graph is captured yet.
    pub fn new(model: Gemma4Model) -> Self {
        Self {
            model,
            captured: CapturedPrompts::default(),
        }
    }

    /// Creates the prefill of a prompt, which can join a [`Batch`](crate::Batch), as
    /// [`Gemma4::prefill`](crate::Gemma4::prefill) does. The prefill may replay these graphs.
    ///
    /// # Errors
    /// Passes on the errors of [`Prefill::new`].
    pub fn prefill(&self, tokens: Vec<u32>, kind: CacheKind) -> Result<Prefill, Gemma4Error> {
        let prefill = Prefill::new(&self.model, tokens, kind)?;
        Ok(prefill.with_graphs(&self.captured))
    }

    /// Runs the model over tokens that follow the tokens in `cache`, and returns the logits after the last token.
    ///
    /// The function may replay a graph if the cache is empty, or if it fills the window of sliding layers.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if `tokens` is empty or has a token outside the vocabulary, or if the cache does not
    /// have one sequence.
    pub fn read(&self, tokens: &[u32], cache: &mut Cache) -> Result<Next<'_>, Gemma4Error> {
        let config = self.model.config();
        config.check_tokens(tokens.iter().map(|token| i64::from(*token)))?;
        let captured = &self.captured;
        let hidden = match captured.read(&self.model, tokens, cache, &mut Vec::new()) {
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

/// A stand-in for builds without CubeCL, which capture no graphs.
#[cfg(not(feature = "cube"))]
mod without_graphs {
    use crate::model::Gemma4Model;
    use crate::model::cache::Cache;
    use crate::model::cache::kind::CacheKind;
    use crate::model::cache::prefix::Prefix;
    use burn::tensor::Tensor;

    #[derive(Clone, Debug, Default)]
    pub(crate) struct CapturedPrompts;

    /// The size of a graph. Builds without CubeCL have no graphs.
    #[derive(Debug)]
    pub(crate) enum Size {}

    impl CapturedPrompts {
        pub fn serve_whole(&self, _model: &Gemma4Model, _count: usize, _kind: CacheKind) -> bool {
            false
        }

        pub fn serve_after(&self, _model: &Gemma4Model, _count: usize, _prefix: &Prefix) -> bool {
            false
        }

        pub fn longest_whole(&self, _model: &Gemma4Model, _kind: CacheKind) -> usize {
            0
        }

        pub fn read(
            &self,
            _model: &Gemma4Model,
            _tokens: &[u32],
            _cache: &mut Cache,
            _counted: &mut Vec<Size>,
        ) -> Option<Tensor<3>> {
            None
        }
    }
}
