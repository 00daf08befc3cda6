//! A computation whose launches are captured in a CUDA graph once. Later runs replay the graph.

use crate::op::device_use::capture_alone;
use burn::{
    backend::{Backend, BackendGraph, Dispatch, DispatchDevice, fusion::custom::StreamId},
    tensor::{Device, ExecutionError},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The number of warm-up runs before the capture. Memory cannot be allocated during a capture, so the warm-up runs
/// allocate the buffers. Burn's fusion and CubeCL also finish their autotuning in these runs.
const WARM_UPS: usize = 3;

/// A computation that reads only tensors on the device. Repeating the computation must not change its result.
pub(crate) trait Computation: 'static {
    /// The output tensors.
    type Outputs: Clone;

    /// The number of calls of [`CapturedGraph::run`] before the call that captures the launches. A capture pays off
    /// only for computations that repeat often. The default is 0, for callers that decide by themselves when a capture
    /// pays off.
    fn before_capture(&self) -> usize {
        0
    }

    /// Launches the computation on the device.
    fn compute(&self) -> Self::Outputs;

    /// Launches the computation in the warm-up runs, and once more while the launches are captured.
    fn compute_captured(&self) -> Self::Outputs {
        self.compute()
    }

    /// True if the tensors that the computation reads were allocated on the current stream: see
    /// [`stream`](super::stream).
    fn is_local(&self) -> bool;

    /// The device of the computation, without autodiff. A CUDA graph cannot track gradients.
    fn device(&self) -> Device;
}

/// A computation, and the CUDA graph of its launches once the launches have been captured.
pub(crate) struct CapturedGraph<C: Computation> {
    pub computation: C,
    runs: usize,
    graph: Option<Graph<C::Outputs>>,
}

/// The captured launches, and the tensors that they write.
struct Graph<O> {
    launches: BackendGraph<Dispatch>,
    outputs: O,
    /// The stream of the capture. Replays run only on this stream, in order with the other launches.
    stream: StreamId,
}

impl<C: Computation> CapturedGraph<C> {
    pub fn new(computation: C) -> Self {
        Self {
            computation,
            runs: 0,
            graph: None,
        }
    }

    /// True if the launches have been captured, so that the next run replays the graph.
    pub fn is_captured(&self) -> bool {
        self.graph.is_some()
    }

    /// Runs the computation. If `may_capture` is true and the computation has run often enough, first captures the
    /// computation's launches. Sets `may_capture` to false if the capture fails, or if a tensor of the computation was
    /// allocated on another stream.
    pub fn run(&mut self, may_capture: &mut bool) -> C::Outputs {
        self.runs += 1;
        let is_due =
            *may_capture && self.graph.is_none() && self.runs > self.computation.before_capture();
        if is_due && !self.computation.is_local() {
            log::debug!("CUDA graph: no capture, because tensors were allocated on another thread");
            *may_capture = false;
        } else if is_due {
            match capture_alone(&self.computation.device(), || self.capture()) {
                Ok(graph) => self.graph = Some(graph),
                Err(error) => {
                    log::debug!("CUDA graph: capture failed, the launches run one by one: {error}");
                    // Stop all further captures, because captures of other computations would fail too.
                    *may_capture = false;
                }
            }
        }
        let on_this_stream = |graph: &&Graph<_>| graph.stream == StreamId::current();
        let Some(graph) = self.graph.as_ref().filter(on_this_stream) else {
            return self.computation.compute();
        };
        // SAFETY: the launches access the tensors of `computation` and `graph.outputs`, and the graph's own
        // intermediate tensors. All these tensors live as long as the graph. All launches are issued on the graph's
        // stream, and therefore in order.
        let replayed = unsafe {
            Dispatch::graph_replay(self.computation.device().as_dispatch(), &graph.launches)
        };
        replayed.expect("the replay of a captured graph succeeds");
        graph.outputs.clone()
    }

    /// Runs the computation a few times to warm up. Then captures its launches in a graph, without running the captured
    /// launches.
    fn capture(&self) -> Result<Graph<C::Outputs>, ExecutionError> {
        let device = self.computation.device();
        let device = device.as_dispatch();
        Dispatch::graph_prepare(device)?;
        let mut window = Window {
            device,
            is_open: true,
        };
        for _ in 0..WARM_UPS {
            // Keep the outputs alive until the synchronization, because fusion does not launch operations whose results
            // have been dropped.
            let outputs = self.computation.compute_captured();
            Dispatch::sync(device)?;
            drop(outputs);
        }
        Dispatch::graph_start_capture(device)?;
        let outputs = self.computation.compute_captured();
        let launches = window.close()?;
        let stream = StreamId::current();
        Ok(Graph {
            launches,
            outputs,
            stream,
        })
    }
}

/// A capture that is prepared or in progress. While a capture is in progress, the device runs no launches. When this
/// value is dropped, the capture ends, even after a panic.
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
            // Ignore an error at the end of the capture. A capture is still open here only after another error or a
            // panic, and the caller gets that error or panic.
            let _ = catch_unwind(AssertUnwindSafe(|| self.close()));
        }
    }
}
