//! Decode passes and drafting rounds that run on the decode kernels. The kernel launches are captured in a CUDA graph,
//! which is then replayed.
//!
//! A pass runs the model over one or a few tokens of each sequence. A drafting round runs the drafter, which proposes
//! draft tokens.

use super::{
    ahead::Ahead,
    guessed::Streams,
    inputs::{AdapterInputs, Begun, Inputs, Uploaded},
    mode::DecodeMode,
    position::{CAPTURED_AFTER, Outputs, Position},
    round::Round,
};
use crate::config::LayerType;
use crate::error::Gemma4Error;
use crate::generate::sampling::device::DeviceSampler;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::decode_ops::DecodeOps;
use crate::model::observe::Part;
use crate::op::graph_capture::CapturedGraph;
use crate::op::in_place::{copied, overwrite_floats};
use crate::op::reading::Reading;
use crate::speculative::drafter::{Draft, Drafter};
use burn::tensor::{Int, Tensor};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
};

/// The kind of a forward pass. Each kind has its own graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PassKind {
    /// The number of positions per sequence.
    pub count: usize,
    /// True if the sampler draws the next tokens. Otherwise the pass takes the argmax of each row.
    pub draws: bool,
}

/// The forward passes of a decoder and the runs of its drafter (drafting rounds), with their captured graphs. Reallocating
/// the cache's buffers invalidates the graphs.
pub(super) struct GraphCapture {
    may_capture: bool,
    /// The number of forward passes before a capture.
    captured_after: usize,
    passes: BTreeMap<PassKind, CapturedGraph<Position>>,
    /// The runs of the drafter (drafting rounds). The key is the number of draft tokens per sequence.
    rounds: BTreeMap<usize, CapturedGraph<Round>>,
    /// The sampler that draws the next tokens on the device. Only forward passes over one token of each sequence use the
    /// sampler.
    sampler: Option<DeviceSampler>,
    /// The adapters that the rows of a forward pass select, or `None` if no row selects an adapter.
    adapters: Option<AdapterInputs>,
    /// True if the last forward pass was a replay of its captured graph.
    replayed: bool,
    /// The decode step that is queued although the caller has not requested it yet, or `None` if no step is queued.
    ahead: Option<Ahead>,
}

impl fmt::Debug for GraphCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphCapture")
            .field("passes", &self.passes.keys())
            .field("rounds", &self.rounds.keys())
            .field("mode", &self.mode())
            .finish_non_exhaustive()
    }
}

impl GraphCapture {
    /// Creates the state of a decoder that has not captured a CUDA graph yet. Returns `None` if the decode kernels do
    /// not support the model or the batch size.
    pub fn new(model: &Gemma4Model, cache: &Cache) -> Option<Self> {
        let serves = DecodeOps::serve(model, cache.batch());
        serves.then_some(Self {
            may_capture: true,
            captured_after: CAPTURED_AFTER,
            passes: BTreeMap::new(),
            rounds: BTreeMap::new(),
            sampler: None,
            adapters: None,
            replayed: false,
            ahead: None,
        })
    }

    /// Lets each row of a forward pass over one token per sequence select an adapter. Drops all captured graphs. The
    /// caller must overwrite the selection before the next step.
    pub fn with_adapters(mut self, adapters: Option<AdapterInputs>) -> Self {
        self.release();
        Self { adapters, ..self }
    }

    /// The adapters that the rows select, or `None` if no row selects an adapter.
    pub fn adapters(&self) -> Option<&AdapterInputs> {
        self.adapters.as_ref()
    }

    /// Captures the second forward pass already. This suits a batch, whose graph serves further sequences after the first
    /// ones have ended. The first pass runs without a capture, because requests that arrive together often reallocate
    /// the buffers after it.
    pub fn capturing_early(self) -> Self {
        Self {
            captured_after: 1,
            ..self
        }
    }

    pub fn without_graph_capture(mut self) -> Self {
        self.release();
        Self {
            may_capture: false,
            ..self
        }
    }

    /// Replaces the sampler. Drops the queued decode step, and the captured graphs that draw with the old sampler.
    pub fn set_sampler(&mut self, sampler: Option<DeviceSampler>) {
        self.ahead = None;
        self.passes.retain(|pass, _| !pass.draws);
        self.sampler = sampler;
    }

    /// The sampler, or `None` if forward passes can only take the argmax.
    pub fn sampler(&self) -> Option<&DeviceSampler> {
        self.sampler.as_ref()
    }

    /// Drops the captured runs of the drafter, because the caller replaces the drafter.
    pub fn without_rounds(self) -> Self {
        Self {
            rounds: BTreeMap::new(),
            ..self
        }
    }

    pub fn mode(&self) -> DecodeMode {
        match self.replayed {
            true => DecodeMode::Graph,
            false => DecodeMode::Kernels,
        }
    }

    /// Drops the queued decode step and all captured graphs, which hold handles to the cache's buffers. Other code can then
    /// write to the buffers in place.
    pub fn release(&mut self) {
        self.ahead = None;
        self.passes.clear();
        self.rounds.clear();
        self.replayed = false;
    }

    /// Runs a forward pass over `tokens`, `[batch · positions]`. If `draws` is true, the pass has one position per
    /// sequence, and the sampler draws the next tokens.
    pub fn step(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        draws: bool,
    ) -> Outputs {
        let kind = self.prepare(model, cache, tokens, draws);
        let outputs = self.run_pass(kind);
        cache.advance_by(kind.count);
        outputs
    }

    /// Runs a forward pass. The pass must be in `passes`, and its inputs must be written.
    fn run_pass(&mut self, kind: PassKind) -> Outputs {
        let pass = self
            .passes
            .get_mut(&kind)
            .expect("the pass has been prepared");
        let outputs = pass.run(&mut self.may_capture);
        self.replayed = pass.is_captured();
        outputs
    }

    /// Drops the queued decode step, if any.
    pub fn discard_lookahead(&mut self) {
        self.ahead = None;
    }

    /// Runs a decode step over one token of each sequence and returns the next token of each row. The result is `None`
    /// for a row without a possible token. `tokens` has the input token of each row, or `None` for a row without a
    /// sequence. If `draws` is true, the sampler draws the next tokens.
    ///
    /// If `goes_on` is true, the decode step over the returned tokens is queued before the host receives these tokens.
    /// No step is queued if the per-layer embedding table is in host memory, or if the cache's buffers are full.
    pub fn follow(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[Option<u32>],
        draws: bool,
        goes_on: bool,
    ) -> Result<Vec<Option<u32>>, Gemma4Error> {
        let kind = PassKind { count: 1, draws };
        let ahead = self.ahead.take();
        let taken_up = ahead.and_then(|ahead| ahead.after(kind, tokens));
        let chosen = match taken_up {
            Some(chosen) => {
                cache.advance_by(1);
                chosen
            }
            None => {
                let rows: Vec<u32> = tokens.iter().map(|token| token.unwrap_or(0)).collect();
                Reading::begin(self.step(model, cache, &rows, draws).chosen.tokens())
            }
        };
        let next = match goes_on && model.host_table.is_none() {
            true => self.go_on(kind, cache, &chosen),
            false => None,
        };
        let number = |token: i32| u32::try_from(token).ok();
        let tokens: Vec<Option<u32>> = chosen.wait()?.into_iter().map(number).collect();
        self.ahead = next.map(|chosen| Ahead::new(kind, tokens.clone(), chosen));
        Ok(tokens)
    }

    /// Queues the decode step over the `chosen` tokens, which are still on the device. Returns the pending copy of the
    /// tokens that the queued step chooses, or `None` if the cache's buffers are full.
    fn go_on(&mut self, kind: PassKind, cache: &Cache, chosen: &Reading) -> Option<Reading> {
        if cache.len() + 1 > cache.room() {
            return None;
        }
        let pass = self.passes.get_mut(&kind)?;
        pass.computation.inputs.go_on(chosen.numbers.clone());
        Some(Reading::begin(self.run_pass(kind).chosen.tokens()))
    }

    pub fn step_by_parts(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        after: &mut dyn FnMut(Part),
    ) -> Outputs {
        let kind = self.prepare(model, cache, tokens, self.sampler.is_some());
        let pass = self.passes.get(&kind).expect("the pass has been prepared");
        let outputs = pass.computation.compute_by_parts(after);
        cache.advance_by(kind.count);
        outputs
    }

    /// Proposes `count` draft tokens after each sequence's token in `tokens`. `streams` holds the hidden states from
    /// which `tokens` were chosen.
    pub fn guess(
        &mut self,
        drafter: &Drafter,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> Draft {
        // Make room in the KV cache for only one token of every sequence, because the drafter uses this token's
        // position for all draft tokens.
        self.make_room(cache, 1);
        let (guesses, _) = self.run_round(drafter, model, cache, tokens, streams, count);
        guesses
    }

    /// Runs the drafter like [`guess`](Self::guess), then a forward pass over the tokens and their draft tokens.
    pub fn guess_and_read(
        &mut self,
        drafter: &Drafter,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> (Reading, Outputs) {
        self.make_room(cache, 1 + count);
        let (guesses, begun) = self.run_round(drafter, model, cache, tokens, streams, count);
        let on_the_way = Reading::begin(guesses.tokens.clone());
        let kind = PassKind {
            count: 1 + count,
            draws: false,
        };
        let pass = self.pass(model, cache, kind, None);
        pass.computation.inputs.take_guesses(begun, guesses.tokens);
        let outputs = self.run_pass(kind);
        cache.advance_by(kind.count);
        (on_the_way, outputs)
    }

    /// Runs the drafter, and returns the draft tokens and the inputs of the run. The caller must have made room in the cache
    /// for the next token of every sequence.
    fn run_round(
        &mut self,
        drafter: &Drafter,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> (Draft, [Tensor<1, Int>; 3]) {
        self.ahead = None;
        let begun = Begun::new(cache, tokens, streams, &model.device());
        cache.rotate();
        let round = self.rounds.entry(count);
        let round =
            round.or_insert_with(|| CapturedGraph::new(Round::new(drafter, model, cache, count)));
        let inputs = &round.computation.inputs;
        inputs.begin_round(begun, round.computation.hidden.clone());
        let begun = inputs.all();
        (round.run(&mut self.may_capture), begun)
    }

    /// Prepares a forward pass over `tokens`: makes room in the cache, and uploads the tokens with their positions. Returns
    /// the kind of the pass, which draws only if it has one position per sequence.
    fn prepare(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        draws: bool,
    ) -> PassKind {
        self.ahead = None;
        let count = tokens.len() / cache.batch();
        let kind = PassKind {
            count,
            draws: draws && count == 1,
        };
        let device = model.device();
        let inputs = Uploaded::new(cache, tokens, &device);
        let from_host = model.host_rows(tokens, &device).map(flat);
        self.make_room(cache, count);
        // Rotate the buffers of padded sequences, so that slot 0 holds the first token of each sequence instead of padding.
        cache.rotate();
        let pass = self.pass(model, cache, kind, from_host);
        pass.computation.inputs.overwrite(inputs);
        kind
    }

    /// Returns a forward pass over the next positions of each sequence, and builds the pass if necessary. The caller must
    /// write the inputs of the pass.
    fn pass(
        &mut self,
        model: &Gemma4Model,
        cache: &Cache,
        kind: PassKind,
        from_host: Option<Tensor<1>>,
    ) -> &mut CapturedGraph<Position> {
        match self.passes.entry(kind) {
            Entry::Occupied(pass) => {
                let pass = pass.into_mut();
                if let (Some(own), Some(rows)) = (&pass.computation.from_host, from_host) {
                    overwrite_floats(own.clone(), rows);
                }
                pass
            }
            Entry::Vacant(place) => {
                let from_host = from_host.map(copied);
                let position = Position {
                    sampler: self.sampler.clone().filter(|_| kind.draws),
                    adapters: self.adapters.clone(),
                    captured_after: self.captured_after,
                    ..position(model, cache, kind.count, from_host)
                };
                place.insert(CapturedGraph::new(position))
            }
        }
    }

    /// Makes room for `count` more tokens of every sequence in the cache's buffers. Drops all captured graphs if the buffers
    /// must grow.
    fn make_room(&mut self, cache: &mut Cache, count: usize) {
        if cache.len() + count > cache.room() {
            // Drop the captured graphs, which would continue to write to the old buffers.
            self.release();
            cache.make_room(count);
        }
    }
}

/// Flattens a matrix to one dimension.
fn flat(rows: Tensor<2>) -> Tensor<1> {
    let count = rows.dims().iter().product::<usize>();
    rows.reshape([count])
}

/// Builds the forward pass over the next `count` positions of each sequence, with rotary tables for the full size of the
/// buffers.
fn position(
    model: &Gemma4Model,
    cache: &Cache,
    count: usize,
    from_host: Option<Tensor<1>>,
) -> Position {
    let (device, batch) = (model.device(), cache.batch());
    let positions = cache.room();
    let tables = |kind| model.rope.tables(kind, positions, model.dtype(), &device);
    Position {
        targets: cache.targets(),
        batch,
        is_ragged: cache.is_padded() || cache.may_be_ragged(),
        ring: cache.ring(),
        sliding: tables(LayerType::Sliding),
        full: tables(LayerType::Full),
        model: model.clone(),
        inputs: Inputs::empty(count * batch, batch, &device),
        from_host,
        sampler: None,
        adapters: None,
        captured_after: CAPTURED_AFTER,
    }
}
