//! Device tensors that hold the tokens and positions of a forward pass. A captured graph reads these tensors at each replay.

use super::guessed::Streams;
use crate::model::adapters::{AdapterStack, PassAdapters};
use crate::model::cache::Cache;
use crate::op::in_place::{
    advance_inputs, begin_round_with, overwrite_integers, overwrite_three, take_guesses_of,
};
use crate::op::stream::StreamCheck;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::sync::Arc;

/// The input tensors of a forward pass, or of a run of the drafter. Before each run, launches outside the captured
/// graph overwrite these tensors.
pub(super) struct Inputs {
    /// The token ids, `[rows]`, ordered by sequence. Each sequence has equally many tokens.
    pub tokens: Tensor<1, Int>,
    /// The position of each token, `[rows]`.
    pub positions: Tensor<1, Int>,
    /// The number of columns (tokens) that each sequence has in the cache after this forward pass, `[batch]`.
    pub lengths: Tensor<1, Int>,
}

impl Inputs {
    /// Allocates uninitialized inputs for `batch` sequences with `rows` tokens in total.
    pub fn empty(rows: usize, batch: usize, device: &Device) -> Self {
        let own = |count| Tensor::empty([count], (device, DType::I32));
        Self {
            tokens: own(rows),
            positions: own(rows),
            lengths: own(batch),
        }
    }

    /// Overwrites the inputs with uploaded tokens, positions and lengths of the same shapes.
    pub fn overwrite(&self, uploaded: Uploaded) {
        overwrite_three(self.all(), uploaded.numbers);
    }

    /// Overwrites these tensors with the inputs of the next decode step. `chosen` holds the input tokens of the next
    /// step, one per sequence.
    pub fn go_on(&self, chosen: Tensor<1, Int>) {
        advance_inputs(self.all(), chosen);
    }

    /// Overwrites these tensors with the inputs `begun` of a run of the drafter. Also overwrites `hidden`,
    /// `[batch, columns]`, with the hidden states from which the input tokens were chosen.
    pub fn begin_round(&self, begun: Begun, hidden: Tensor<2>) {
        begin_round_with(self.all(), hidden, begun.streams, begun.numbers);
    }

    /// Overwrites these tensors with the inputs of the forward pass that follows a run of the drafter. For each
    /// sequence, the pass runs over the drafter's input token and then over the draft tokens. `first` holds the inputs
    /// of the drafter's run. `guesses` holds the draft tokens, ordered by drafting step.
    pub fn take_guesses(&self, first: [Tensor<1, Int>; 3], guesses: Tensor<1, Int>) {
        take_guesses_of(self.all(), first, guesses);
    }

    /// Returns the tokens, the positions and the lengths.
    pub fn all(&self) -> [Tensor<1, Int>; 3] {
        [&self.tokens, &self.positions, &self.lengths].map(Tensor::clone)
    }

    /// The number of tokens of all sequences together.
    pub fn rows(&self) -> usize {
        self.tokens.dims()[0]
    }

    pub fn device(&self) -> Device {
        self.tokens.device()
    }
}

/// The adapters of a decode step, and the tensor by which each row selects one of them. Launches outside the captured
/// graph overwrite the tensor when sequences join or leave the batch.
#[derive(Clone)]
pub(super) struct AdapterInputs {
    pub stack: Arc<AdapterStack>,
    /// The slot of each row's adapter, `[rows]`.
    rows: Tensor<1, Int>,
}

impl AdapterInputs {
    /// Allocates the selection of `rows` rows. The caller must [overwrite](Self::overwrite) the selection.
    pub fn new(stack: Arc<AdapterStack>, rows: usize, device: &Device) -> Self {
        let rows = Tensor::empty([rows], (device, DType::I32));
        Self { stack, rows }
    }

    /// Selects the adapters with these slots, one slot per row.
    pub fn overwrite(&self, slots: Vec<i32>) {
        let shape = [slots.len()];
        let slots = TensorData::new(slots, shape);
        let slots = Tensor::<1, Int>::from_data(slots, (&self.rows.device(), DType::I32));
        overwrite_integers(self.rows.clone(), slots.into_dispatch());
    }

    /// Returns the adapters of a step whose launches read the selection from the device.
    pub fn pass(&self) -> PassAdapters {
        self.stack.pass(&self.rows)
    }

    /// Checks the streams of all tensors.
    pub fn check_streams(&self, check: &mut StreamCheck) {
        self.stack.check_streams(check);
        check.integers(self.rows.clone());
    }
}

/// The uploaded inputs of a forward pass in one tensor: the tokens, their positions, and the lengths of the sequences.
pub(super) struct Uploaded {
    numbers: Tensor<1, Int>,
}

impl Uploaded {
    pub fn new(cache: &Cache, tokens: &[u32], device: &Device) -> Self {
        let (rows, batch) = (tokens.len(), cache.batch());
        let count = rows / batch;
        let mut numbers = integers(tokens);
        let first: Vec<_> = cache.next_positions().collect();
        for first in &first {
            numbers.extend((*first..first + count).map(|position| position as i32));
        }
        numbers.extend(first.iter().map(|first| (first + count) as i32));
        let numbers = TensorData::new(numbers, [2 * rows + batch]);
        Self {
            numbers: Tensor::from_data(numbers, (device, DType::I32)),
        }
    }
}

/// The inputs of a run of the drafter: a token per sequence, the token's position, and the hidden state from which the model
/// chose the token.
pub(super) struct Begun {
    /// A concatenation of four lists, `[4 · batch]`: tokens, positions, lengths, and row indices of the hidden states.
    numbers: Tensor<1, Int>,
    streams: Tensor<2>,
}

impl Begun {
    pub fn new(cache: &Cache, tokens: &[u32], streams: &Streams, device: &Device) -> Self {
        let mut numbers = integers(tokens);
        let first: Vec<_> = cache.next_positions().collect();
        numbers.extend(first.iter().map(|first| *first as i32));
        numbers.extend(first.iter().map(|first| (first + 1) as i32));
        numbers.extend(streams.of.iter().map(|row| *row as i32));
        let numbers = TensorData::new(numbers, [4 * tokens.len()]);
        Self {
            numbers: Tensor::from_data(numbers, (device, DType::I32)),
            streams: streams.rows.clone(),
        }
    }
}

fn integers(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|token| *token as i32).collect()
}
