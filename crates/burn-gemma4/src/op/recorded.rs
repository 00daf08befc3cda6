//! A computation whose launches are captured in a graph once and replayed from then on.

use crate::op::overlap_launches;
use burn::tensor::{Device, Graph, capture};
use std::rc::Rc;

/// Runs before launches are captured: capturing runs them a few times, which a short text would not earn back.
const BEFORE_CAPTURE: usize = 3;

/// What nothing but tensors on the device decides about. To compute it once more changes nothing.
pub(super) trait Computation: 'static {
    /// Its tensors.
    type Outputs: Clone;

    /// Puts it on the device.
    fn compute(&self) -> Self::Outputs;

    fn device(&self) -> Device;
}

/// A computation, and the graph of its launches once there is one.
pub(super) struct Recorded<C: Computation> {
    pub computation: Rc<C>,
    runs: usize,
    graph: Option<Captured<C::Outputs>>,
}

/// Launches, and how to put them on the device one by one.
type Captured<O> = Graph<O, Box<dyn FnMut() -> O>>;

impl<C: Computation> Recorded<C> {
    pub fn new(computation: C) -> Self {
        Self {
            computation: Rc::new(computation),
            runs: 0,
            graph: None,
        }
    }

    /// Whether it is replayed.
    pub fn is_captured(&self) -> bool {
        self.graph.is_some()
    }

    /// Computes it anew, by its graph if `may_capture` has allowed one. Sets `may_capture` to false where the device cannot.
    pub fn run(&mut self, may_capture: &mut bool) -> C::Outputs {
        self.runs += 1;
        match &mut self.graph {
            // SAFETY: the graph owns every tensor that it reads and writes, through its closure and as its output, but
            // for handles to the cache's buffers and to the inputs, which the decoder borrows or owns. The decoder
            // does not leave its thread, whose launches are ordered.
            Some(graph) => unsafe { graph.replay() }.clone(),
            None if *may_capture && self.runs > BEFORE_CAPTURE => self.capture(may_capture),
            None => self.computation.compute(),
        }
    }

    /// Captures the launches. Their results are those of this run.
    fn capture(&mut self, may_capture: &mut bool) -> C::Outputs {
        let captured = self.computation.clone();
        let compute: Box<dyn FnMut() -> C::Outputs> = Box::new(move || {
            let outputs = captured.compute();
            overlap_launches(&captured.device());
            outputs
        });
        let mut graph = capture(&self.computation.device(), compute);
        if !graph.is_hardware() {
            log::debug!("decode: the launches could not be captured");
            // Nor could others be.
            *may_capture = false;
            return self.computation.compute();
        }
        // What was captured has not run.
        // SAFETY: as in `run`.
        let outputs = unsafe { graph.replay() }.clone();
        self.graph = Some(graph);
        outputs
    }
}
