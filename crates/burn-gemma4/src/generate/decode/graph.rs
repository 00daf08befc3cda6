//! A decoder's passes and a drafter's rounds by kernels, whose launches are captured in a graph once and replayed.

use super::{
    DecodeMode, Part, Streams,
    ahead::Ahead,
    inputs::{Begun, Inputs, Uploaded},
    position::{Outputs, Position},
    round::Round,
};
use crate::{
    Cache, Drafter, Gemma4Error, Gemma4Model, Guesses, LayerType,
    generate::sampling::device::DeviceSampler,
    model::few_rows::FewRows,
    op::{overwrite::overwrite_floats, reading::Reading, recorded::Recorded},
};
use burn::tensor::{Int, Tensor};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
};

/// The computations, kept as long as the cache's buffers have room.
pub(super) struct GraphCapture {
    may_capture: bool,
    /// By the positions that a pass reads of each sequence.
    passes: BTreeMap<usize, Recorded<Position>>,
    /// By the tokens that a round guesses.
    rounds: BTreeMap<usize, Recorded<Round>>,
    /// Who draws each sequence's next token in passes that read one of each.
    sampler: Option<DeviceSampler>,
    /// Whether the last pass was replayed.
    replayed: bool,
    /// The pass after the last one, where it is under way already.
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
    /// `None` where the kernels do not serve the model or the cache.
    pub fn new(model: &Gemma4Model, cache: &Cache) -> Option<Self> {
        let serves = FewRows::serve(model, cache.batch());
        serves.then_some(Self {
            may_capture: true,
            passes: BTreeMap::new(),
            rounds: BTreeMap::new(),
            sampler: None,
            replayed: false,
            ahead: None,
        })
    }

    pub fn without_graph_capture(mut self) -> Self {
        self.release();
        Self {
            may_capture: false,
            ..self
        }
    }

    /// With another sampler.
    pub fn with_sampler(mut self, sampler: Option<DeviceSampler>) -> Self {
        self.release();
        Self { sampler, ..self }
    }

    /// Forgets what a drafter has guessed by.
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

    /// Lets go of the cache's buffers, which something else is to write.
    pub fn release(&mut self) {
        self.ahead = None;
        self.passes.clear();
        self.rounds.clear();
        self.replayed = false;
    }

    /// Reads as many tokens of each sequence, `[batch · positions]`.
    pub fn step(&mut self, model: &Gemma4Model, cache: &mut Cache, tokens: &[u32]) -> Outputs {
        let count = self.prepare(model, cache, tokens);
        let outputs = self.run_pass(count);
        cache.advance_by(count);
        outputs
    }

    /// Runs the pass of so many positions, which there is.
    fn run_pass(&mut self, count: usize) -> Outputs {
        let pass = self.passes.get_mut(&count).expect("it is prepared");
        let outputs = pass.run(&mut self.may_capture);
        self.replayed = pass.is_captured();
        outputs
    }

    /// Lets go of the pass that is under way, if there is one.
    pub fn leave_what_is_ahead(&mut self) {
        self.ahead = None;
    }

    /// Whether tokens are drawn.
    pub fn draws(&self) -> bool {
        self.sampler.is_some()
    }

    /// Reads a token of each sequence, and gives those that come next, nothing where none does. Where `goes_on`, what reads these
    /// is on the device before they are on the host: it is what the next call with them gives.
    pub fn follow(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        goes_on: bool,
    ) -> Result<Vec<Option<u32>>, Gemma4Error> {
        let taken_up = self.ahead.take().and_then(|ahead| ahead.after(tokens));
        let chosen = match taken_up {
            Some(chosen) => {
                cache.advance_by(1);
                chosen
            }
            None => Reading::begin(self.step(model, cache, tokens).chosen.tokens()),
        };
        let next = match goes_on && model.host_table.is_none() {
            true => self.go_on(cache, &chosen),
            false => None,
        };
        let number = |token: i32| u32::try_from(token).ok();
        let tokens: Vec<Option<u32>> = chosen.wait()?.into_iter().map(number).collect();
        self.ahead = next.map(|chosen| Ahead::new(tokens.clone(), chosen));
        Ok(tokens)
    }

    /// Puts the pass that reads the chosen tokens on the device, if the cache's buffers have room for it.
    fn go_on(&mut self, cache: &Cache, chosen: &Reading) -> Option<Reading> {
        if cache.len() + 1 > cache.room() {
            return None;
        }
        let pass = self.passes.get_mut(&1)?;
        pass.computation.inputs.go_on(chosen.numbers.clone());
        Some(Reading::begin(self.run_pass(1).chosen.tokens()))
    }

    pub fn step_by_parts(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        after: &mut dyn FnMut(Part),
    ) -> Outputs {
        let count = self.prepare(model, cache, tokens);
        let pass = self.passes.get(&count).expect("it is prepared");
        let outputs = pass.computation.compute_by_parts(after);
        cache.advance_by(count);
        outputs
    }

    /// Guesses `count` tokens after one of each sequence, which were chosen by what the `streams` became.
    pub fn guess(
        &mut self,
        drafter: &Drafter,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> Guesses {
        // The guesses' own position is the next one.
        self.make_room(cache, 1);
        let (guesses, _) = self.run_round(drafter, model, cache, tokens, streams, count);
        guesses
    }

    /// [`guess`](Self::guess), and reads the tokens and their guesses, all of which are on the device before the guesses are on the host.
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
        let read = 1 + count;
        let pass = self.pass(model, cache, read, None);
        pass.computation.inputs.take_guesses(begun, guesses.tokens);
        let outputs = self.run_pass(read);
        cache.advance_by(read);
        (on_the_way, outputs)
    }

    /// What a round guesses, and what it began with. There is room for its position.
    fn run_round(
        &mut self,
        drafter: &Drafter,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> (Guesses, [Tensor<1, Int>; 3]) {
        self.ahead = None;
        let begun = Begun::new(cache, tokens, streams, &model.device());
        cache.turn();
        let round = self.rounds.entry(count);
        let round =
            round.or_insert_with(|| Recorded::new(Round::new(drafter, model, cache, count)));
        let inputs = &round.computation.inputs;
        inputs.begin_round(begun, round.computation.hidden.clone());
        let begun = inputs.all();
        (round.run(&mut self.may_capture), begun)
    }

    /// Sees to the pass, with the tokens and their positions on the device and room for their keys and values: how many positions it is of.
    fn prepare(&mut self, model: &Gemma4Model, cache: &mut Cache, tokens: &[u32]) -> usize {
        self.ahead = None;
        let count = tokens.len() / cache.batch();
        let device = model.device();
        let inputs = Uploaded::new(cache, tokens, &device);
        let from_host = model.host_rows(tokens, &device).map(flat);
        self.make_room(cache, count);
        // No pass holds buffers that are still to be turned: what turns them back has released them.
        cache.turn();
        let pass = self.pass(model, cache, count, from_host);
        pass.computation.inputs.overwrite(inputs);
        count
    }

    /// The computation after what the cache holds, whose tokens are still to be written.
    fn pass(
        &mut self,
        model: &Gemma4Model,
        cache: &Cache,
        count: usize,
        from_host: Option<Tensor<1>>,
    ) -> &mut Recorded<Position> {
        match self.passes.entry(count) {
            Entry::Occupied(pass) => {
                let pass = pass.into_mut();
                if let (Some(own), Some(rows)) = (&pass.computation.from_host, from_host) {
                    overwrite_floats(own.clone(), rows);
                }
                pass
            }
            Entry::Vacant(place) => {
                let from_host = from_host.map(own);
                let sampler = self.sampler.clone().filter(|_| count == 1);
                let position = Position {
                    sampler,
                    ..position(model, cache, count, from_host)
                };
                place.insert(Recorded::new(position))
            }
        }
    }

    /// Sees to room for `count` more columns.
    fn make_room(&mut self, cache: &mut Cache, count: usize) {
        if cache.len() + count > cache.room() {
            // Whoever holds a buffer would go on with the old one.
            self.release();
            cache.make_room(count);
        }
    }
}

/// All numbers, row after row.
fn flat(rows: Tensor<2>) -> Tensor<1> {
    let count = rows.dims().iter().product::<usize>();
    rows.reshape([count])
}

/// The same numbers under a handle of their own, over which the next ones are written.
fn own(numbers: Tensor<1>) -> Tensor<1> {
    let own = Tensor::empty(numbers.dims(), (&numbers.device(), numbers.dtype()));
    overwrite_floats(own.clone(), numbers);
    own
}

/// The computation after what the cache holds, and as far as it has room.
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
    }
}
