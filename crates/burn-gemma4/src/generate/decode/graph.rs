//! The launches of a position, captured in a graph once and replayed for every token.

use super::{
    DecodeMode, Part, integers,
    position::{Outputs, Position},
};
use crate::{Cache, Gemma4Model, LayerType, model::few_rows::FewRows, op::overwrite::overwrite};
use burn::tensor::{DType, Device, Graph, Int, Tensor, TensorData, capture};
use std::{fmt, rc::Rc};

/// Tokens before launches are captured: capturing runs them a few times, which a short text would not earn back.
const BEFORE_CAPTURE: usize = 3;

/// The position's computation, kept as long as its buffers have room.
pub(super) struct GraphCapture {
    is_allowed: bool,
    position: Option<Rc<Position>>,
    /// Since the buffers last grew.
    steps: usize,
    graph: Option<PositionGraph>,
}

type PositionGraph = Graph<Outputs, Box<dyn FnMut() -> Outputs>>;

impl fmt::Debug for GraphCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphCapture")
            .field("steps", &self.steps)
            .field("mode", &self.mode())
            .finish_non_exhaustive()
    }
}

impl GraphCapture {
    /// `None` where the kernels do not serve the model or the cache.
    pub fn new(model: &Gemma4Model, cache: &Cache) -> Option<Self> {
        let serves = !cache.is_padded() && FewRows::serve(model, cache.batch());
        serves.then_some(Self {
            is_allowed: true,
            position: None,
            steps: 0,
            graph: None,
        })
    }

    pub fn without_graph_capture(self) -> Self {
        Self {
            is_allowed: false,
            graph: None,
            ..self
        }
    }

    pub fn mode(&self) -> DecodeMode {
        match &self.graph {
            Some(_) => DecodeMode::Graph,
            None => DecodeMode::Kernels,
        }
    }

    pub fn step(&mut self, model: &Gemma4Model, cache: &mut Cache, tokens: &[u32]) -> Outputs {
        let position = self.prepare(model, cache, tokens);
        self.steps += 1;
        let outputs = match &mut self.graph {
            // SAFETY: the graph owns every tensor that it reads and writes, through its closure and as its output, but
            // for the handles to the cache's buffers and to the inputs, which the decoder borrows or owns. The decoder
            // does not leave its thread, whose launches are ordered.
            Some(graph) => unsafe { graph.replay() }.clone(),
            None if self.is_allowed && self.steps > BEFORE_CAPTURE => self.capture(position),
            None => position.compute(&mut |_| ()),
        };
        cache.advance_one();
        outputs
    }

    pub fn step_by_parts(
        &mut self,
        model: &Gemma4Model,
        cache: &mut Cache,
        tokens: &[u32],
        after: &mut dyn FnMut(Part),
    ) -> Outputs {
        let outputs = self.prepare(model, cache, tokens).compute(after);
        cache.advance_one();
        outputs
    }

    /// Captures the launches. Their results are those of this step: computing a position once more changes nothing.
    fn capture(&mut self, position: Rc<Position>) -> Outputs {
        let device = position.inputs.device();
        let captured = position.clone();
        let compute: Box<dyn FnMut() -> Outputs> = Box::new(move || captured.compute(&mut |_| ()));
        let mut graph = capture(&device, compute);
        if !graph.is_hardware() {
            log::debug!("decode: the launches could not be captured");
            self.is_allowed = false;
            return position.compute(&mut |_| ());
        }
        // What was captured has not run.
        // SAFETY: as in `step`.
        let outputs = unsafe { graph.replay() }.clone();
        self.graph = Some(graph);
        outputs
    }

    /// The position's computation, with the tokens and their position on the device and room for its keys and values.
    fn prepare(&mut self, model: &Gemma4Model, cache: &mut Cache, tokens: &[u32]) -> Rc<Position> {
        let batch = tokens.len();
        let mut inputs = integers(tokens);
        inputs.extend(std::iter::repeat_n(cache.len() as i32, batch));
        let device = model.device();
        let inputs = TensorData::new(inputs, [2 * batch]);
        let inputs = Tensor::<1, Int>::from_data(inputs, (&device, DType::I32));
        match &self.position {
            Some(position) if cache.len() < cache.room() => {
                overwrite(position.inputs.clone(), inputs);
                position.clone()
            }
            _ => {
                self.graph = None;
                self.position = None;
                self.steps = 0;
                let position = Rc::new(make(model, cache, inputs, &device));
                self.position = Some(position.clone());
                position
            }
        }
    }
}

/// The computation after what the cache holds, and as many more as it gets room for.
fn make(
    model: &Gemma4Model,
    cache: &mut Cache,
    inputs: Tensor<1, Int>,
    device: &Device,
) -> Position {
    if cache.len() >= cache.room() {
        cache.make_room();
    }
    let positions = cache.room();
    let tables = |kind| model.rope.tables(kind, positions, model.dtype(), device);
    Position {
        targets: cache.targets(),
        sliding: tables(LayerType::Sliding),
        full: tables(LayerType::Full),
        model: model.clone(),
        inputs,
    }
}
