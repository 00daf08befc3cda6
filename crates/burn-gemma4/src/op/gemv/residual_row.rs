//! The tensors of a GEMV that follows a residual addition.

use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn_cubecl::tensor::CubeTensor;

/// The residual stream after the addition, and the output of the GEMV that multiplies this stream or its norm.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AfterResidual<B: Backend> {
    pub stream: FloatTensor<B>,
    pub product: FloatTensor<B>,
}

/// The inputs of the residual addition: the stream, the block's output and the parameters of the norms.
pub(super) struct Row {
    pub stream: CubeTensor,
    pub added: CubeTensor,
    pub weight: CubeTensor,
    pub scalar: Option<CubeTensor>,
    pub next_weight: Option<CubeTensor>,
    pub epsilon: f64,
}
