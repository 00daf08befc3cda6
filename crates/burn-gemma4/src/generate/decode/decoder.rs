//! The decoder, which runs decode steps of one token per sequence, and forward passes over several tokens.

#[cfg(feature = "cube")]
use super::graph::GraphCapture;
use super::mode::DecodeMode;
use super::next::{Next, check_samplers};
use crate::error::Gemma4Error;
#[cfg(feature = "cube")]
use crate::generate::sampling::device::DeviceSampler;
use crate::generate::sampling::sampler::Sampler;
use crate::model::cache::Cache;
use crate::model::observe::Part;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
#[cfg(feature = "cube")]
use crate::op::gemv;
use crate::speculative::drafter::Drafter;
use std::marker::PhantomData;

/// A decoder, which generates the tokens that follow the tokens in a filled [`Cache`]. Each decode step runs the model
/// over one more token of every sequence.
///
/// On CubeCL devices a decode step of up to 8 sequences runs memory-bound decode kernels. With NVIDIA's tensor cores in
/// f16 or bf16, the limit is 64 sequences. If the device supports CUDA graphs, the kernel launches are captured once
/// and then replayed. The decode kernels support a model if it has at most 512 experts, and if all parameters of the
/// model have one dtype: f32, f16 or bf16. All other models run through [`Gemma4Model::step`].
///
/// The decoder captures a graph at the third or fourth token, and again whenever the KV cache has grown. On CUDA a
/// capture affects the whole process, because CubeCL 0.11 captures in CUDA's global mode. If another thread
/// synchronizes with the device or allocates device memory during a capture, that thread gets an error. A program whose
/// threads share a CUDA device should decode [`without_graph_capture`](Self::without_graph_capture). Decoding is then
/// about a third as fast as with graphs.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_gemma4::{Gemma4Config, Gemma4Model, LayerType, Logits};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let config = Gemma4Config {
///     vocab_size: 100,
///     hidden_size: 32,
///     intermediate_size: 64,
///     layer_types: vec![LayerType::Sliding, LayerType::Full],
///     num_attention_heads: 2,
///     sliding_head_dim: 16,
///     global_head_dim: 32,
///     num_kv_shared_layers: 0,
///     hidden_size_per_layer_input: 0,
///     ..Gemma4Config::e2b()
/// };
/// let device = Device::flex();
/// let model = Gemma4Model::new(&config, &device);
/// let mut cache = model.cache(vec![0]);
/// let prompt = Tensor::<2, Int>::from_data([[2, 17, 5]], &device);
/// model.step(prompt, &mut cache, Logits::None)?;
/// let mut decoder = model.decoder(&mut cache);
/// let mut token = 44;
/// for _ in 0..3 {
///     token = decoder.step(&[token])?.argmax()?[0];
/// }
/// assert_eq!(cache.len(), 6);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Decoder<'a> {
    pub(super) model: &'a Gemma4Model,
    pub(super) cache: &'a mut Cache,
    pub(super) drafter: Option<&'a Drafter>,
    /// True if the decode kernels support the drafter.
    #[cfg(feature = "cube")]
    pub(super) has_drafter_kernels: bool,
    /// True if the caller has attached samplers. Either the device or the host may draw with them.
    #[cfg(feature = "cube")]
    pub(super) has_samplers: bool,
    #[cfg(feature = "cube")]
    pub(super) graph: Option<GraphCapture>,
    /// Makes the type `!Send`. A graph must be replayed on the thread that captured it, because only earlier work of
    /// that thread is certain to run before the replay.
    pub(super) _of_one_thread: PhantomData<*const ()>,
}

impl Gemma4Model {
    /// Creates a decoder that continues the sequences of a filled cache.
    pub fn decoder<'a>(&'a self, cache: &'a mut Cache) -> Decoder<'a> {
        Decoder::new(self, cache)
    }
}

impl<'a> Decoder<'a> {
    fn new(model: &'a Gemma4Model, cache: &'a mut Cache) -> Self {
        Self {
            #[cfg(feature = "cube")]
            graph: GraphCapture::new(model, cache),
            model,
            cache,
            drafter: None,
            #[cfg(feature = "cube")]
            has_drafter_kernels: false,
            #[cfg(feature = "cube")]
            has_samplers: false,
            _of_one_thread: PhantomData,
        }
    }

    /// Runs a decode step over one more token of each sequence.
    ///
    /// # Errors
    /// Returns an error if the number of tokens differs from the number of sequences in the cache, or if a token is outside
    /// the vocabulary.
    pub fn step(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        self.check(tokens)?;
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph
            && self.cache.has_begun()
        {
            let draws = graph.sampler().is_some();
            return Ok(graph.step(self.model, self.cache, tokens, draws).into());
        }
        self.plain_step(tokens, 1)
    }

    /// Runs a decode step and returns the next token of each sequence. The next token is the argmax, or the token that
    /// the device drew with the [samplers](Self::with_samplers). A sequence whose logits are all NaN or −∞ has `None`.
    ///
    /// The function does not record the tokens in the host's samplers. If `goes_on` is true, the decoder queues the
    /// following decode step before the host has received the tokens. If the next call passes exactly the returned
    /// tokens, that call uses the queued step. Otherwise the decoder discards the queued step. The device's samplers
    /// have then already counted the returned tokens for the repetition penalty.
    ///
    /// Returns `None` instead of the list if the device does not choose tokens, as on a CPU. Also returns `None` if the
    /// host must draw for the given samplers.
    ///
    /// # Errors
    /// Passes on the errors of [`step`](Self::step). Returns [`Gemma4Error::Device`] if the device failed.
    pub fn follow(
        &mut self,
        tokens: &[u32],
        goes_on: bool,
    ) -> Result<Option<Vec<Option<u32>>>, Gemma4Error> {
        self.check(tokens)?;
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph
            && self.cache.has_begun()
            && graph.sampler().is_some() == self.has_samplers
        {
            let draws = self.has_samplers;
            let tokens: Vec<Option<u32>> = tokens.iter().copied().map(Some).collect();
            let next = graph.follow(self.model, self.cache, &tokens, draws, goes_on)?;
            return Ok(Some(next));
        }
        let _ = goes_on;
        Ok(None)
    }

    /// Runs the model in one pass over several tokens that follow the cache's only sequence. Returns the logits after
    /// each of these tokens.
    ///
    /// The pass runs on the decode kernels only if `tokens` is short. The limit is 8 tokens (64 with tensor cores), or
    /// one token more than the cache can [forget](Cache::forgetting), whichever is smaller. If a caller rejects some of
    /// the tokens, [`forget`](Self::forget) removes the rejected tokens.
    ///
    /// # Errors
    /// Returns an error if the cache has several sequences, `tokens` is empty, or a token is outside the vocabulary.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        let refuse = |reason: String| {
            let argument = "tokens";
            Err(Gemma4Error::Argument { argument, reason })
        };
        match (self.cache.batch(), tokens.len()) {
            (_, 0) => refuse("are none; there should be at least 1".into()),
            (1, _) => self.read_each(tokens),
            (batch, _) => refuse(format!("belong to one sequence, but the cache has {batch}")),
        }
    }

    /// Runs the model over the next tokens of all sequences in one pass, like [`read`](Self::read). The tokens are
    /// ordered by sequence, with equally many tokens per sequence.
    pub(crate) fn read_each(&mut self, tokens: &[u32]) -> Result<Next<'_>, Gemma4Error> {
        self.check_vocabulary(tokens)?;
        let count = tokens.len() / self.cache.batch();
        #[cfg(feature = "cube")]
        if self.cache.has_begun()
            && self.fits_kernels(self.cache.batch(), count)
            && let Some(graph) = &mut self.graph
        {
            let draws = graph.sampler().is_some();
            return Ok(graph.step(self.model, self.cache, tokens, draws).into());
        }
        self.plain_step(tokens, count)
    }

    /// True if the decode kernels can run a forward pass over `count` tokens of each of `batch` sequences. The kernels
    /// limit the total number of tokens. The number of spare slots in the ring buffers limits the number of tokens per
    /// sequence.
    ///
    /// A pass writes the keys of all tokens before attention reads any key. In a ring buffer, each token after the
    /// first therefore needs a spare slot. Without the spare slot, the token's key would overwrite a key that the first
    /// token attends to.
    #[cfg(feature = "cube")]
    pub(super) fn fits_kernels(&self, batch: usize, count: usize) -> bool {
        let most = gemv::most_rows(&self.model.device(), self.model.dtype());
        batch * count <= most && count <= 1 + self.cache.spare()
    }

    /// Attaches one sampler per sequence. Each [`step`](Self::step) then draws the next tokens on the device, and
    /// [`Next::sample`] returns these tokens. Each sampler must already have recorded all tokens that the cache holds,
    /// and the input token of the next step.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the number of samplers differs from the number of sequences.
    pub fn with_samplers(self, samplers: &[&Sampler]) -> Result<Self, Gemma4Error> {
        check_samplers(samplers.len(), self.cache.batch())?;
        #[cfg(feature = "cube")]
        {
            let model = self.model;
            let (vocabulary, device) = (model.config().vocab_size, model.device());
            let sampler = DeviceSampler::new(samplers, vocabulary, model.dtype(), &device);
            let mut decoder = Self {
                has_samplers: true,
                ..self
            };
            if let Some(graph) = &mut decoder.graph {
                graph.set_sampler(sampler);
            }
            Ok(decoder)
        }
        #[cfg(not(feature = "cube"))]
        Ok(self)
    }

    /// Removes the last `count` tokens of every sequence from the cache: see [`Cache::forget`].
    ///
    /// # Errors
    /// Returns an error if the cache cannot remove `count` tokens.
    pub fn forget(&mut self, count: usize) -> Result<(), Gemma4Error> {
        self.discard_lookahead();
        self.cache.forget(count)
    }

    /// Removes the last tokens of each sequence from the cache. `counts` has one number of tokens per sequence.
    ///
    /// # Errors
    /// Returns an error if the cache cannot remove that many tokens.
    pub(crate) fn forget_each(&mut self, counts: &[usize]) -> Result<(), Gemma4Error> {
        self.discard_lookahead();
        self.cache.forget_each(counts)
    }

    /// Discards the queued decode step. The queued step's input tokens would be wrong, because the caller is about to
    /// change the last token in the cache.
    fn discard_lookahead(&mut self) {
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph {
            graph.discard_lookahead();
        }
    }

    /// The vocabulary size.
    pub(crate) fn vocabulary(&self) -> usize {
        self.model.config().vocab_size
    }

    /// The KV cache.
    pub fn cache(&self) -> &Cache {
        self.cache
    }

    /// Runs a decode step like [`step`](Self::step), and calls `after` after each [`Part`] of the computation. `after` is
    /// not called if the decode kernels do not support the model.
    ///
    /// # Errors
    /// Passes on the errors of [`step`](Self::step).
    pub fn step_by_parts(
        &mut self,
        tokens: &[u32],
        after: &mut dyn FnMut(Part),
    ) -> Result<Next<'_>, Gemma4Error> {
        self.check(tokens)?;
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph
            && self.cache.has_begun()
        {
            return Ok(graph
                .step_by_parts(self.model, self.cache, tokens, after)
                .into());
        }
        let _ = after;
        self.plain_step(tokens, 1)
    }

    /// The way in which the decoder currently computes its steps.
    pub fn mode(&self) -> DecodeMode {
        #[cfg(feature = "cube")]
        if let Some(graph) = &self.graph {
            return graph.mode();
        }
        DecodeMode::Layers
    }

    /// Disables CUDA graphs. Each decode step then launches its kernels one by one.
    pub fn without_graph_capture(self) -> Self {
        Self {
            #[cfg(feature = "cube")]
            graph: self.graph.map(GraphCapture::without_graph_capture),
            ..self
        }
    }

    fn check(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        let batch = self.cache.batch();
        if tokens.len() != batch {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!(
                    "are {}; expected one for each of the cache's {batch} sequences",
                    tokens.len()
                ),
            });
        }
        self.check_vocabulary(tokens)
    }

    fn check_vocabulary(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        let tokens = tokens.iter().map(|token| i64::from(*token));
        self.model.config().check_tokens(tokens)
    }

    /// Runs a forward pass over `count` tokens of each sequence through the layers' generic operations, without the decode
    /// kernels.
    fn plain_step(&mut self, tokens: &[u32], count: usize) -> Result<Next<'_>, Gemma4Error> {
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph {
            graph.release();
        }
        let device = self.model.device();
        let shape = [tokens.len() / count, count];
        let tokens = Tokens::upload(tokens.to_vec(), shape, &device);
        let hidden = self.model.step_hidden(&tokens, self.cache, Logits::All)?;
        let hidden = hidden.expect("Logits::All gives a hidden state for every position");
        Ok(Next::of_hidden(self.model, hidden))
    }
}
