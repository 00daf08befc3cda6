//! A computation whose launches are captured in a graph once and replayed from then on.

use burn::{
    backend::{Backend, BackendGraph, Dispatch, DispatchDevice},
    tensor::{Device, ExecutionError},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs that find memory for what is captured, and let Burn's fusion and CubeCL tune: nothing may be allocated while launches are captured. The
/// first run after another fuses anew.
const WARM_UPS: usize = 3;

/// What nothing but tensors on the device decides about. To compute it once more changes nothing.
pub(crate) trait Computation: 'static {
    /// Runs before launches are captured: capturing runs them a few times, which has to be earned back.
    const BEFORE_CAPTURE: usize;

    /// Its tensors.
    type Outputs: Clone;

    /// Puts it on the device.
    fn compute(&self) -> Self::Outputs;

    /// Puts it on the device while its launches are captured.
    fn compute_captured(&self) -> Self::Outputs {
        self.compute()
    }

    /// Without autodiff, of which a graph knows nothing.
    fn device(&self) -> Device;
}

/// A computation, and the graph of its launches once there is one.
pub(crate) struct Recorded<C: Computation> {
    pub computation: C,
    runs: usize,
    graph: Option<Graph<C::Outputs>>,
}

/// Launches, and the tensors that they write.
struct Graph<O> {
    launches: BackendGraph<Dispatch>,
    outputs: O,
}

impl<C: Computation> Recorded<C> {
    pub fn new(computation: C) -> Self {
        Self {
            computation,
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
        if *may_capture && self.graph.is_none() && self.runs > C::BEFORE_CAPTURE {
            match self.capture() {
                Ok(graph) => self.graph = Some(graph),
                Err(error) => {
                    log::debug!("the launches could not be captured: {error}");
                    // Nor could others be.
                    *may_capture = false;
                }
            }
        }
        let Some(graph) = &self.graph else {
            return self.computation.compute();
        };
        // SAFETY: what launches read and write is the computation's and its outputs, which are here as long as the graph; the memory in
        // between is the graph's. Nothing here leaves its thread, whose launches are ordered.
        let replayed = unsafe {
            Dispatch::graph_replay(self.computation.device().as_dispatch(), &graph.launches)
        };
        replayed.expect("a graph that was captured");
        graph.outputs.clone()
    }

    /// Captures the launches, which do not run.
    fn capture(&self) -> Result<Graph<C::Outputs>, ExecutionError> {
        let device = self.computation.device();
        let device = device.as_dispatch();
        Dispatch::graph_prepare(device)?;
        let mut window = Window {
            device,
            is_open: true,
        };
        for _ in 0..WARM_UPS {
            // Of what nobody has any more, fusion launches nothing.
            let outputs = self.computation.compute_captured();
            Dispatch::sync(device)?;
            drop(outputs);
        }
        Dispatch::graph_start_capture(device)?;
        let outputs = self.computation.compute_captured();
        let launches = window.close()?;
        Ok(Graph { launches, outputs })
    }
}

/// From the preparations on. Where these fail, and where a computation panics, it is closed all the same: a device that goes on capturing runs nothing more.
struct Window<'a> {
    device: &'a DispatchDevice,
    is_open: bool,
}

impl Window<'_> {
    fn close(&mut self) -> Result<BackendGraph<Dispatch>, ExecutionError> {
        self.is_open = false;
        Dispatch::graph_stop_capture(self.device)
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // What went wrong is told by whoever closes it this way.
            let _ = catch_unwind(AssertUnwindSafe(|| self.close()));
        }
    }
}
