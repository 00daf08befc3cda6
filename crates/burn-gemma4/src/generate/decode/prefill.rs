//! The prefill of a prompt whose sequence joins a batch.

use super::next::Next;
use super::packed::PackedPrompt;
use super::prefill_media::PrefillMedia;
use super::row_logits::RowLogits;
use crate::checkpoint::media::{MediaEncoders, MediumInput};
use crate::error::Gemma4Error;
use crate::generate::encoded::PlacedMedium;
use crate::generate::{CapturedPrompts, Size};
use crate::model::adapters::{AdapterId, LoadedAdapter, PassAdapters};
use crate::model::cache::Cache;
use crate::model::cache::checkpoint::Checkpoint;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::prefix::Prefix;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
use burn::module::{ParamId, list_param_ids};
use burn::tensor::Tensor;
use std::ops::Range;
use std::sync::Arc;

/// The prefill of one prompt, in chunks that the caller chooses.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Batch, CacheKind, Gemma4, LoadOptions, Prefill, RowChoice, RowResult};
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// let kind = CacheKind::default();
/// let mut batch = Batch::new(gemma.model(), kind)?;
/// let mut tokens = Vec::new();
/// for prompt in ["fn main", "# Title"] {
///     let mut prefill = Prefill::new(gemma.model(), gemma.tokens(&prompt.into(), gemma.options().chat)?, kind)?;
///     let logits = loop {
///         if let Some(logits) = prefill.advance(512)? {
///             break logits;
///         }
///     };
///     tokens.push(logits.choose(&[RowChoice::Argmax])?.remove(0));
///     batch.join(&prefill)?;
/// }
/// let tokens: Vec<u32> = tokens.iter().filter_map(RowResult::token).collect();
/// let next = batch.step(&tokens)?.choose(&[RowChoice::Argmax; 2])?;
/// assert_eq!(next.len(), 2);
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Debug)]
pub struct Prefill {
    model: Gemma4Model,
    /// The ids of the model's parameters, by which prefills of one model are found.
    parameters: Vec<ParamId>,
    cache: Cache,
    /// The earlier prompt from which the prefill continues, as long as the cache has no copy of its keys and values.
    prefix: Option<Prefix>,
    /// The keys and values of a prompt that was read in one pass with others, or `None`. The cache is then empty.
    packed: Option<PackedPrompt>,
    /// True if the prompt must not run in one pass with others.
    is_alone: bool,
    tokens: Vec<u32>,
    media: PrefillMedia,
    /// The adapter of the sequence, or `None` if the model runs without an adapter.
    adapter: Option<Arc<LoadedAdapter>>,
    /// The CUDA graphs that can run a prompt, or `None` if the kernels are always launched one by one.
    graphs: Option<CapturedPrompts>,
    /// The sizes of graphs for which this prompt was counted.
    counted: Vec<Size>,
    /// The number of prompt tokens whose keys and values were copied from the cache of an earlier prompt.
    reused: usize,
    /// The number of prompt tokens after which the prefill takes a checkpoint, or `None` if it takes none. A checkpoint
    /// is a copy of the cache's ring buffers. Other prompts may continue from the checkpoint.
    boundary: Option<usize>,
    /// The checkpoints at tokens that the cache already holds, in ascending order of position. Each checkpoint is a
    /// copy of the ring buffers as they were at its position.
    checkpoints: Vec<Arc<Checkpoint>>,
}

/// The tokens and the KV cache of a finished prefill. Another prompt that begins with some of these tokens can continue
/// from the cache, or from one of the checkpoints (copies of the ring buffers at earlier tokens).
#[derive(Debug)]
pub(super) struct Prefilled {
    pub tokens: Vec<u32>,
    pub media: Vec<PlacedMedium>,
    /// The adapter with which the keys and values were computed, or `None` if no adapter was used.
    pub adapter: Option<AdapterId>,
    pub cache: Arc<Cache>,
    pub checkpoints: Vec<Arc<Checkpoint>>,
}

impl Prefill {
    /// Creates the prefill of the prompt `tokens`, without running the model yet.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the prompt is empty, or has a token outside the vocabulary, or leaves no position
    /// for an answer. Returns the same error if the model does not support the storage format `kind`.
    pub fn new(
        model: &Gemma4Model,
        tokens: Vec<u32>,
        kind: CacheKind,
    ) -> Result<Self, Gemma4Error> {
        let config = model.config();
        let positions = config.max_position_embeddings;
        let refuse = |reason| {
            let argument = "prompt";
            Err(Gemma4Error::Argument { argument, reason })
        };
        if tokens.is_empty() {
            return refuse("has no tokens; it should have at least 1".into());
        }
        if tokens.len() >= positions {
            return refuse(format!(
                "has {} tokens, but the model has {positions} positions; at least one position must be left for the answer",
                tokens.len()
            ));
        }
        config.check_tokens(tokens.iter().map(|token| i64::from(*token)))?;
        Ok(Self {
            model: model.clone(),
            parameters: list_param_ids(model),
            cache: model.cache_of(kind, vec![0])?,
            prefix: None,
            packed: None,
            is_alone: false,
            tokens,
            media: PrefillMedia::default(),
            adapter: None,
            graphs: None,
            counted: Vec::new(),
            reused: 0,
            boundary: None,
            checkpoints: Vec::new(),
        })
    }

    /// Runs the prompt and its answer with an adapter. Such a prefill replays no CUDA graph, because the graphs compute
    /// without adapters.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the adapter was read for another model, or if the model has processed a
    /// part of the prompt already. Returns the same error if the prompt has images, and the adapter changes the vision,
    /// or if the prompt has audio, and the adapter changes the audio.
    pub fn with_adapter(self, adapter: &Arc<LoadedAdapter>) -> Result<Self, Gemma4Error> {
        adapter.check(&self.model)?;
        for input in self.media.inputs() {
            match input {
                MediumInput::Image(_) => adapter.check_images()?,
                MediumInput::Audio(_) => adapter.check_audio()?,
            }
        }
        if self.has_begun() {
            return Err(Gemma4Error::Argument {
                argument: "adapter",
                reason: "is set after the prefill has begun; set it before".into(),
            });
        }
        Ok(Self {
            adapter: Some(adapter.clone()),
            graphs: None,
            ..self
        })
    }

    /// Lets the prefill replay one of `graphs` for each of its chunks. The graphs must belong to the prefill's model.
    pub(crate) fn with_graphs(self, graphs: &CapturedPrompts) -> Self {
        Self {
            graphs: Some(graphs.clone()),
            ..self
        }
    }

    /// Launches the kernels of each chunk one by one, without CUDA graphs.
    pub fn without_graph_capture(self) -> Self {
        Self {
            graphs: None,
            ..self
        }
    }

    /// Puts images and audio clips in the places of some tokens. `inputs` holds the input of each of them, which
    /// `encoders` must be able to read.
    pub(crate) fn with_media(
        self,
        media: Vec<PlacedMedium>,
        inputs: Vec<MediumInput>,
        encoders: &MediaEncoders,
    ) -> Self {
        Self {
            media: PrefillMedia::new(media, inputs, encoders.clone()),
            ..self
        }
    }

    /// Continues from the first tokens of this prompt. `checkpoints` holds copies of the ring buffers at these tokens
    /// and at earlier ones. The prefill must not have begun yet.
    pub(super) fn continue_from(&mut self, prefix: Prefix, checkpoints: Vec<Arc<Checkpoint>>) {
        debug_assert!(!self.has_begun() && prefix.len() < self.tokens.len());
        self.reused = prefix.len();
        self.prefix = Some(prefix);
        self.checkpoints = checkpoints;
    }

    /// Makes [`advance`](Self::advance) take a checkpoint, a copy of the cache's ring buffers, as soon as the cache
    /// holds `boundary` tokens.
    pub(super) fn take_checkpoint_at(&mut self, boundary: usize) {
        self.boundary = Some(boundary);
    }

    /// The number of prompt tokens after which the prefill takes a checkpoint, or has taken the last one.
    pub(super) fn boundary(&self) -> Option<usize> {
        self.boundary
    }

    /// The number of checkpoints that this prefill has taken itself. Those of the earlier prompt do not count.
    pub(super) fn count_own_checkpoints(&self) -> usize {
        let checkpoints = self.checkpoints.iter();
        checkpoints
            .filter(|checkpoint| checkpoint.column > self.reused)
            .count()
    }

    /// The number of tokens at the last checkpoint, or that of the reused tokens if no checkpoint is later.
    pub(super) fn last_state(&self) -> usize {
        let checkpoints = self.checkpoints.iter().map(|checkpoint| checkpoint.column);
        checkpoints.fold(self.reused, usize::max)
    }

    /// The earlier prompt from which the prefill continues, as long as the cache has no copy of its keys and values.
    pub(super) fn prefix(&self) -> Option<&Prefix> {
        self.prefix.as_ref()
    }

    /// The tokens of the prompt.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The images and audio clips of the prompt in ascending order.
    pub(super) fn media(&self) -> &[PlacedMedium] {
        self.media.placed()
    }

    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    pub(super) fn model(&self) -> &Gemma4Model {
        &self.model
    }

    /// The ids of the model's parameters.
    pub(super) fn parameters(&self) -> &[ParamId] {
        &self.parameters
    }

    /// The adapter of the sequence, or `None` if the model runs without an adapter.
    pub(super) fn adapter(&self) -> Option<&Arc<LoadedAdapter>> {
        self.adapter.as_ref()
    }

    /// True if the prefill continues from an earlier prompt, if it has keys and values of its own, or if soft tokens of
    /// its media exist.
    pub(super) fn has_begun(&self) -> bool {
        self.prefix.is_some() || self.has_run()
    }

    /// True if keys and values of the prompt's own tokens exist, in a KV cache or in those of a pass over several
    /// prompts, or if soft tokens of its media do.
    fn has_run(&self) -> bool {
        !self.cache.is_empty() || self.packed.is_some() || self.media.has_begun()
    }

    /// True if the model has not run over a part of the prompt, and one call can run over the rest. The prefill then
    /// takes no checkpoint, need not run alone, and has no images or audio after the tokens of the earlier prompt.
    pub(super) fn is_one_call(&self) -> bool {
        let rest = self.reused..self.tokens.len();
        !self.has_run() && self.boundary.is_none() && !self.is_alone && !self.media.any_in(&rest)
    }

    /// The keys and values of a prompt that was read in one pass with others.
    #[cfg(feature = "cube")]
    pub(super) fn packed(&self) -> Option<&PackedPrompt> {
        self.packed.as_ref()
    }

    /// Returns a new KV cache of a prompt that was read in one pass with others, or `None` if the prefill has a cache.
    pub(super) fn unpacked_cache(&self) -> Option<Cache> {
        self.packed.as_ref().map(|packed| {
            let mut cache = Cache::new(self.model.config(), vec![0], self.cache.kind());
            packed.fill(&mut cache);
            cache
        })
    }

    /// Ends a prefill whose prompt was read in one pass with others.
    pub(super) fn end_packed(&mut self, packed: PackedPrompt) {
        self.packed = Some(packed);
    }

    /// Makes [`can_pack`](Self::can_pack) false, so that [`advance`](Self::advance) must run the prompt. Drops the keys
    /// and values that [`read_packed`](Self::read_packed) has computed, and keeps those of `advance`.
    pub fn run_alone(&mut self) {
        self.packed = None;
        self.is_alone = true;
    }

    /// The size on the device in bytes that the prompt's KV cache has when the whole prompt has been read.
    pub(super) fn cache_bytes(&self) -> usize {
        let (model, count) = (&self.model, self.tokens.len());
        self.cache.bytes_at(model.config(), count, model.dtype())
    }

    /// The largest size on the device in bytes of a checkpoint of the prompt's KV cache.
    pub(super) fn checkpoint_bytes(&self) -> usize {
        let model = &self.model;
        self.cache.checkpoint_bytes(model.config(), model.dtype())
    }

    pub(super) fn into_prefilled(mut self) -> Prefilled {
        if let Some(packed) = self.packed.take() {
            packed.fill(&mut self.cache);
        }
        Prefilled {
            adapter: self.adapter.map(|adapter| adapter.id()),
            tokens: self.tokens,
            media: self.media.into_placed(),
            cache: Arc::new(self.cache),
            checkpoints: self.checkpoints,
        }
    }

    /// The number of prompt tokens that the prefill took over from an earlier prompt. See
    /// [`PrefixCache`](super::PrefixCache).
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// The number of prompt tokens that the model has not processed yet.
    pub fn remaining(&self) -> usize {
        match (&self.packed, &self.prefix) {
            (Some(_), _) => 0,
            (None, Some(prefix)) => self.tokens.len() - prefix.len(),
            (None, None) => self.tokens.len() - self.cache.len(),
        }
    }

    /// True if a CUDA graph may run all tokens that the model has not processed yet.
    pub(super) fn can_replay(&self) -> bool {
        let Some(prefix) = &self.prefix else {
            return self.can_replay_whole();
        };
        let rest = self.reused..self.tokens.len();
        let graphs = self.graphs.as_ref().filter(|_| !self.media.any_in(&rest));
        graphs.is_some_and(|graphs| graphs.serve_after(&self.model, rest.len(), prefix))
    }

    /// True if a CUDA graph may run the whole prompt.
    pub(super) fn can_replay_whole(&self) -> bool {
        let (count, kind) = (self.tokens.len(), self.cache.kind());
        // No graph runs a prompt with images or audio.
        let graphs = self.graphs.as_ref().filter(|_| self.media.is_empty());
        graphs.is_some_and(|graphs| graphs.serve_whole(&self.model, count, kind))
    }

    /// True if a CUDA graph runs the whole prompt in less time than the host needs to launch the kernels for a part of
    /// the prompt. Measurements have shown this on an H200 only (2026-11-29), so the function returns false on all
    /// devices except Hopper cards. On slower devices, the computation takes longer than the launches. Reusing the keys
    /// and values of an earlier prompt then saves time.
    pub(super) fn is_fastest_whole(&self) -> bool {
        crate::op::is_hopper(&self.model.device()) && self.can_replay_whole()
    }

    /// Runs the model over the next `chunk` tokens of the prompt, but at least over one. The chunk is shorter if the
    /// prompt ends earlier, or if the prefill must stop earlier to store a state from which other prompts can continue.
    /// Returns the logits after the prompt's last token, or `None` if tokens remain.
    ///
    /// No chunk divides an image or an audio clip, so a chunk that begins with one of them may be longer. If one in the
    /// chunk has no soft tokens yet, the call runs some layers of the vision or audio in place of the chunk. Such a
    /// call takes about as long as a chunk, and leaves [`remaining`](Self::remaining) unchanged.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the whole prompt has been processed already. Returns
    /// [`Gemma4Error::Device`] if the device failed. Returns an error if the weights of the vision or audio
    /// cannot be loaded.
    pub fn advance(&mut self, chunk: usize) -> Result<Option<RowLogits<'_>>, Gemma4Error> {
        if self.remaining() == 0 {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: "are none; expected that the model has not processed the whole prompt"
                    .into(),
            });
        }
        if let Some(prefix) = self.prefix.take() {
            self.cache = prefix.fork(self.tokens.len());
        }
        let start = self.cache.len();
        let boundary = self.boundary.filter(|boundary| start < *boundary);
        let end = start
            .saturating_add(chunk.max(1))
            .min(boundary.unwrap_or(self.tokens.len()));
        let end = self.media.chunk_end(start, end);
        if self
            .media
            .advance(&(start..end), self.rows_of_tower(chunk))?
        {
            self.sync()?;
            return Ok(None);
        }
        let is_last = end == self.tokens.len();
        let tokens = &self.tokens[start..end];
        let has_media = self.media.any_in(&(start..end));
        let graphs = self.graphs.as_ref().filter(|_| !has_media);
        let replayed = graphs.and_then(|graphs| {
            graphs.read(&self.model, tokens, &mut self.cache, &mut self.counted)
        });
        let hidden = match replayed {
            Some(hidden) => is_last.then_some(hidden),
            None => self.run(start..end)?,
        };
        if boundary == Some(end) {
            self.checkpoints.push(Arc::new(self.cache.checkpoint()));
        }
        if hidden.is_none() {
            // Wait until the device has processed these prompt tokens. Otherwise the caller's next decode step would wait for
            // all prefill chunks that are queued before it.
            self.sync()?;
        }
        Ok(hidden.map(|hidden| RowLogits::of(Next::of_hidden(&self.model, hidden), vec![0])))
    }

    /// Returns the number of patches that run through one layer of the vision in about the time of a chunk of tokens. A
    /// layer of a vision tower has fewer operations for a patch than a layer of its text model for a token. E2B's have
    /// 9.4 million multiplications in products and up to 15 million in attention, and 36 million. A layer of E2B's
    /// audio tower has 26 million for a soft token.
    fn rows_of_tower(&self, chunk: usize) -> usize {
        chunk
            .max(1)
            .saturating_mul(self.model.config().num_layers())
    }

    /// Waits until the device has done the work of this prefill.
    fn sync(&self) -> Result<(), Gemma4Error> {
        let device = self.model.device();
        device
            .sync()
            .map_err(|error| Gemma4Error::Device(error.to_string()))
    }

    /// Runs the model over a range of the prompt. Returns the hidden state of the prompt's last token, if the range contains
    /// this token.
    fn run(&mut self, range: Range<usize>) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let asked = match range.end == self.tokens.len() {
            true => Logits::Last(1),
            false => Logits::None,
        };
        let media = self.media.take(&range);
        let tokens = self.tokens[range].to_vec();
        let shape = [1, tokens.len()];
        let pad = self.model.config().pad_token;
        let device = self.model.device();
        let tokens = Tokens::upload_with_media(tokens, shape, media, pad, &device);
        let adapters = self.adapter.as_deref().map(PassAdapters::of_all_rows);
        let cache = &mut self.cache;
        self.model.step_adapted(&tokens, cache, asked, adapters)
    }
}
