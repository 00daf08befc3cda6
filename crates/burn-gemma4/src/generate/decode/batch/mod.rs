//! A batch of sequences that join and leave between decode steps (continuous batching).

mod adapters;
mod buffers;
mod joins;
#[cfg(feature = "cube")]
mod sampler;

#[cfg(feature = "cube")]
use super::graph::GraphCapture;
use super::next::Next;
use super::row_logits::{RowChoice, RowLogits, RowResult};
use crate::error::Gemma4Error;
use crate::model::adapters::AdapterId;
use crate::model::cache::Cache;
use crate::model::cache::kind::CacheKind;
use crate::model::tokens::Tokens;
use crate::model::{Gemma4Model, Logits};
#[cfg(feature = "cube")]
use crate::op::gemv;
use adapters::BatchAdapters;
use buffers::by_rows;
#[cfg(feature = "cube")]
use sampler::{BatchSampler, same_choice};
use std::fmt;
use std::marker::PhantomData;

/// Steps shrink the batch's buffers if at most one in `LEAST_SHARE` buffer rows holds a sequence. This limit applies
/// while the decode step has a captured graph, because new buffers need a new capture. With a limit of one in two, a
/// new capture would be needed whenever the number of sequences passes a power of two.
#[cfg(feature = "cube")]
const LEAST_SHARE: usize = 4;

/// The number of consecutive steps with so few sequences after which the buffers shrink. Requests that arrive together
/// reach the batch over several steps.
#[cfg(feature = "cube")]
const SPARSE_STEPS: usize = 64;

/// Sequences of different lengths that are decoded together. A sequence joins after its prefill, and leaves between two
/// steps.
///
/// The sequences have consecutive indices, in the order in which they joined. [`leave`](Self::leave) gives the last
/// sequence the index of the sequence that left, as [`Vec::swap_remove`] does.
///
/// On CubeCL devices a batch of up to 8 sequences runs the decode kernels. With NVIDIA's tensor cores in f16 or bf16,
/// the limit is 64 sequences. The kernels run as CUDA graphs if the device supports them. A captured graph stays valid
/// until the buffers of the KV cache must grow or shrink. The buffers grow if a sequence has more tokens than a buffer
/// row has slots, or if more sequences join than the buffers have rows. [`expect`](Self::expect) makes them grow only
/// once for several sequences. The buffers shrink after some steps for which at most a quarter of the rows hold a
/// sequence. See [`Decoder`](super::Decoder).
///
/// Sequences with different adapters are decoded in the same step. The first sequence with an adapter needs a new
/// graph, and so does each adapter that joins for the first time.
pub struct Batch {
    model: Gemma4Model,
    cache: Cache,
    kind: CacheKind,
    /// The buffer row of each sequence. A captured graph runs over all rows, so a sequence keeps its row while the graph
    /// is valid. Without a graph, the sequences have the first rows.
    rows: Vec<usize>,
    /// The number of sequences for which the cache's buffers have space.
    capacity: usize,
    /// The number of sequences that the caller expects to be in the batch soon.
    expected: usize,
    adapters: BatchAdapters,
    /// The largest number of buffer rows that the decode kernels support.
    #[cfg(feature = "cube")]
    most_rows: usize,
    #[cfg(feature = "cube")]
    may_capture: bool,
    #[cfg(feature = "cube")]
    graph: Option<GraphCapture>,
    /// The number of consecutive steps in which most buffer rows had no sequence.
    #[cfg(feature = "cube")]
    sparse_steps: usize,
    #[cfg(feature = "cube")]
    sampler: BatchSampler,
    /// Makes the type `!Send`. A graph must be replayed on the thread that captured it, because only earlier work of
    /// that thread is certain to run before the replay.
    _of_one_thread: PhantomData<*const ()>,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("lengths", &self.lengths())
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl Batch {
    /// Creates an empty batch whose KV cache has the storage format `kind`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model does not support the format.
    pub fn new(model: &Gemma4Model, kind: CacheKind) -> Result<Self, Gemma4Error> {
        kind.check(model.config())?;
        Ok(Self {
            model: model.clone(),
            cache: Cache::ragged(model.config(), kind),
            kind,
            rows: Vec::new(),
            capacity: 0,
            expected: 0,
            adapters: BatchAdapters::default(),
            #[cfg(feature = "cube")]
            most_rows: gemv::most_rows(&model.device(), model.dtype()),
            #[cfg(feature = "cube")]
            may_capture: true,
            #[cfg(feature = "cube")]
            graph: None,
            #[cfg(feature = "cube")]
            sparse_steps: 0,
            #[cfg(feature = "cube")]
            sampler: BatchSampler::default(),
            _of_one_thread: PhantomData,
        })
    }

    /// Returns the largest number of slots that a full-attention layer's KV buffer can have, summed over all buffer
    /// rows. The batch has at most `sequences` sequences of up to `tokens` tokens. A slot holds the key and value of
    /// one token. The ring buffers of sliding layers are smaller.
    pub fn largest_slots(sequences: usize, tokens: usize) -> usize {
        let rows = sequences.max(1).next_power_of_two();
        rows.saturating_mul(Cache::largest_slots(tokens))
    }

    /// Disables CUDA graphs. Each decode step then launches its kernels one by one.
    pub fn without_graph_capture(self) -> Self {
        Self {
            #[cfg(feature = "cube")]
            may_capture: false,
            ..self
        }
    }

    /// The number of sequences.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// True if the batch has no sequences.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The number of tokens of each sequence in the KV cache.
    pub fn lengths(&self) -> Vec<usize> {
        let lengths = self.cache.lengths();
        self.rows.iter().map(|row| lengths[*row]).collect()
    }

    /// The size of the KV cache on the device in bytes.
    pub fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Announces that up to `sequences` sequences will be in the batch soon, including those that are in it already. The
    /// next join allocates buffer rows for all of them, but for no more than the decode kernels support. The batch keeps
    /// these rows until the next announcement. Without an announcement, sequences that join one after another need a new
    /// graph whenever the rows have doubled.
    pub fn expect(&mut self, sequences: usize) {
        #[cfg(feature = "cube")]
        let sequences = sequences.min(self.most_rows);
        self.expected = sequences;
    }

    /// Frees the buffers and the captured graph if the batch is empty. A batch keeps both after its last sequence has
    /// left, so that the next sequence can use them.
    pub fn free_if_empty(&mut self) {
        if self.is_empty() {
            self.release();
            self.adapters = BatchAdapters::default();
            self.cache = Cache::ragged(self.model.config(), self.kind);
            self.capacity = 0;
        }
    }

    /// Removes the sequence at `index`. The last sequence moves to this index. The buffers stay allocated as long as
    /// their captured graph is valid: see [`free_if_empty`](Self::free_if_empty).
    ///
    /// # Panics
    /// Panics if the batch has no sequence at `index`.
    pub fn leave(&mut self, index: usize) {
        assert!(index < self.len(), "the batch has a sequence at `index`");
        let mut lengths = self.lengths();
        lengths.swap_remove(index);
        self.adapters.leave(index);
        self.rows.swap_remove(index);
        #[cfg(feature = "cube")]
        if self.graph.is_some() && !self.has_unused_adapters() {
            if self.is_empty() {
                self.adapters = BatchAdapters::default();
            }
            self.keep_graph(&lengths);
            return;
        }
        self.release();
        self.move_to_first_rows();
        match self.is_empty() {
            true => self.free_if_empty(),
            false => {
                let of_rows = by_rows(&self.rows, &lengths, self.len(), 0);
                self.cache.set_lengths(&of_rows);
                self.fit_capacity(self.len());
            }
        }
        self.set_lengths(&lengths);
    }

    /// Frees the batch's copy of an adapter. Does nothing while a sequence has the adapter.
    pub fn forget_adapter(&mut self, adapter: AdapterId) {
        if !self.adapters.forget(adapter, &self.model.device()) {
            return;
        }
        #[cfg(feature = "cube")]
        if self
            .graph
            .as_ref()
            .is_some_and(|graph| graph.adapters().is_some())
        {
            let lengths = self.lengths();
            self.release();
            self.set_lengths(&lengths);
        }
    }

    /// Runs the model over one more token of each sequence, and returns the logits after these tokens. `tokens` has the token
    /// of each sequence, in the order of the sequences' indices.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the number of tokens differs from the number of sequences, or if a token is
    /// outside the vocabulary. Returns the same error if a sequence has no position left.
    pub fn step(&mut self, tokens: &[u32]) -> Result<RowLogits<'_>, Gemma4Error> {
        self.prepare(tokens)?;
        // Give an arbitrary token to the buffer rows that have no sequence, because the caller does not receive the
        // logits of these rows.
        let tokens = by_rows(&self.rows, tokens, self.cache.batch(), 0);
        let rows = self.rows.clone();
        #[cfg(feature = "cube")]
        if let Some(graph) = &mut self.graph {
            let outputs = graph.step(&self.model, &mut self.cache, &tokens, false);
            return Ok(RowLogits::of(outputs.into(), rows));
        }
        self.cache.ensure_slots(self.cache.len() + 1);
        let device = self.model.device();
        let shape = [tokens.len(), 1];
        let adapters = self.adapters.pass(&rows, tokens.len(), &device);
        let tokens = Tokens::upload(tokens, shape, &device);
        let hidden = self
            .model
            .step_adapted(&tokens, &mut self.cache, Logits::Last(1), adapters)?
            .expect("Logits::Last(1) gives a hidden state for every sequence");
        Ok(RowLogits::of(Next::of_hidden(&self.model, hidden), rows))
    }

    /// Runs the model like [`step`](Self::step), and chooses the next token of each sequence like
    /// [`RowLogits::choose`]. If `goes_on` is true, the device starts the next step over the chosen tokens before the
    /// host receives these tokens. The batch discards that step if a sequence joins or leaves before the next call, or
    /// if the caller then passes other tokens or choices.
    ///
    /// The device starts the next step early only if the captured step chooses the tokens. It does so if all sequences
    /// take the argmax, or if all draw with the same options. Seeds may differ.
    ///
    /// # Errors
    /// Passes on the errors of [`step`](Self::step) and [`RowLogits::choose`].
    pub fn follow(
        &mut self,
        tokens: &[u32],
        choices: &[RowChoice<'_>],
        goes_on: bool,
    ) -> Result<Vec<RowResult>, Gemma4Error> {
        #[cfg(feature = "cube")]
        if self.graph.is_some() && choices.len() == self.len() {
            self.prepare(tokens)?;
            let choice = same_choice(choices, || self.lengths());
            let (rows, count) = (&self.rows, self.cache.batch());
            if let Some(graph) = &mut self.graph
                && let Some(choice) = choice
                && let Some(draws) = self
                    .sampler
                    .prepare(&self.model, graph, choice, rows, count)
            {
                let tokens: Vec<_> = tokens.iter().copied().map(Some).collect();
                let tokens = by_rows(rows, &tokens, count, None);
                let cache = &mut self.cache;
                let next = graph.follow(&self.model, cache, &tokens, draws, goes_on)?;
                let of_sequences = rows.iter().map(|row| RowResult::Token(next[*row]));
                return Ok(of_sequences.collect());
            }
        }
        let _ = goes_on;
        self.step(tokens)?.choose(choices)
    }

    /// Checks the sequences' tokens. Removes buffer rows without a sequence if there are many of them, or if the buffers
    /// need more slots for the next step. Otherwise the rows without a sequence would get more slots too.
    fn prepare(&mut self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        let config = self.model.config();
        let refuse = |reason: String| {
            let argument = "tokens";
            Err(Gemma4Error::Argument { argument, reason })
        };
        if tokens.is_empty() || tokens.len() != self.len() {
            return refuse(format!(
                "are {}; expected one for each of {} sequences",
                tokens.len(),
                self.len()
            ));
        }
        config.check_tokens(tokens.iter().map(|token| i64::from(*token)))?;
        let positions = config.max_position_embeddings;
        if self.cache.len() >= positions {
            return refuse(format!(
                "exceed the model's {positions} positions; expected that full sequences leave"
            ));
        }
        #[cfg(feature = "cube")]
        {
            let is_sparse = self.len().max(self.expected) * LEAST_SHARE <= self.capacity;
            self.sparse_steps = if is_sparse { self.sparse_steps + 1 } else { 0 };
        }
        #[cfg(feature = "cube")]
        if self.graph.is_some()
            && (self.sparse_steps > SPARSE_STEPS || self.cache.len() >= self.cache.room())
        {
            let lengths = self.lengths();
            if self.fit_capacity(self.len()) {
                self.set_lengths(&lengths);
            }
        }
        Ok(())
    }
}
