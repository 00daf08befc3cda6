//! The streams of tensors. CubeCL gives each thread its own stream, and orders the work of two streams by events.
//!
//! During the capture of a CUDA graph, such an event invalidates the graph, because CubeCL 0.11 waits for the event on
//! a separate thread. The failed capture then marks every tensor that the graph would have written, such as the KV
//! cache, as unwritten. Therefore a computation is captured only if all its tensors were allocated on the stream that
//! captures.

use burn::{
    backend::{Cube, fusion::custom::StreamId},
    module::{Module, ModuleVisitor, Param},
    tensor::{Int, Tensor},
};
use burn_cubecl::CubeBackend;

/// Returns the stream on which a tensor of a CubeCL device was allocated, or `None` for a tensor of another device.
pub(crate) fn stream_of<const D: usize>(tensor: Tensor<D>) -> Option<StreamId> {
    let tensor = tensor.without_autodiff().try_into_primitive::<Cube>();
    let tensor = tensor.ok()?;
    let client = tensor.client.clone();
    let tensor = client.resolve_tensor_float::<CubeBackend>(tensor);
    Some(tensor.handle.stream)
}

/// Compares the streams of tensors with the current stream.
pub(crate) struct StreamCheck {
    current: StreamId,
    /// True if all tensors so far were allocated on the current stream.
    pub are_local: bool,
}

impl StreamCheck {
    pub fn new() -> Self {
        Self {
            current: StreamId::current(),
            are_local: true,
        }
    }

    /// Compares the streams of all parameters of a module with the current stream.
    pub fn module(mut self, module: &impl Module) -> Self {
        module.visit(&mut self);
        self
    }

    /// Checks a float tensor.
    pub fn floats<const D: usize>(&mut self, tensor: Tensor<D>) {
        self.are_local &= stream_of(tensor).is_none_or(|stream| stream == self.current);
    }

    /// Checks an integer tensor.
    pub fn integers<const D: usize>(&mut self, tensor: Tensor<D, Int>) {
        if let Ok(tensor) = tensor.without_autodiff().try_into_primitive::<Cube>() {
            let client = tensor.client.clone();
            let tensor = client.resolve_tensor_int::<CubeBackend>(tensor);
            self.are_local &= tensor.handle.stream == self.current;
        }
    }
}

impl ModuleVisitor for StreamCheck {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.are_local {
            self.floats(param.val());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.are_local {
            self.integers(param.val());
        }
    }
}
