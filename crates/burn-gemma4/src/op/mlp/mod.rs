//! A dense MLP whose matrices have LoRA adapters. The MLP and its backward are one operator each.
//!
//! An MLP's activations are several times as wide as the residual stream, but cheap to recompute. The operator can
//! therefore recompute these activations in the backward instead of saving them.

mod autodiff;

use super::geglu::GateBackend;
use super::linear::Matrix;
use super::lora::{AdaptedBackend, AdaptedMatrix, AdaptedOptions, parts};
use burn::{
    backend::{Dispatch, backend_extension, tensor::FloatTensor},
    module::LoraAdapter,
    tensor::Tensor,
};

/// Computes `down(gelu(gate(input)) · up(input))` for `input`, `[rows, columns]`, on devices that run the kernels of
/// this crate. `matrices` are gate, up and down, in this order.
///
/// The forward saves the outputs of gate and up for the backward. With `recompute` the backward recomputes these
/// outputs instead.
pub(crate) fn adapted_mlp(
    input: Tensor<2>,
    matrices: [(Matrix, &LoraAdapter); 3],
    recompute: bool,
) -> Tensor<2> {
    let [gate, up, down] = matrices.map(|(base, adapter)| parts(base, adapter));
    let options = MlpOptions {
        gate: gate.1,
        up: up.1,
        down: down.1,
        recompute,
    };
    Tensor::from_dispatch(Dispatch::adapted_mlp(
        input.into_dispatch(),
        gate.0,
        up.0,
        down.0,
        options,
    ))
}

/// The options of an MLP. The options are on the host, separate from the MLP's device tensors.
#[derive(Clone, Copy, Debug)]
pub struct MlpOptions {
    pub gate: AdaptedOptions,
    pub up: AdaptedOptions,
    pub down: AdaptedOptions,
    /// True if the backward recomputes the outputs of the gate and up projections.
    pub recompute: bool,
}

/// The backend operator that computes the MLP.
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait AdaptedMlpBackend: AdaptedBackend + GateBackend {
    /// See [`adapted_mlp`].
    #[fusion(default)]
    fn adapted_mlp(
        input: FloatTensor<Self>,
        #[extension_type] gate: AdaptedMatrix<Self>,
        #[extension_type] up: AdaptedMatrix<Self>,
        #[extension_type] down: AdaptedMatrix<Self>,
        options: MlpOptions,
    ) -> FloatTensor<Self> {
        let gate = Self::adapted(input.clone(), gate, options.gate).output;
        let up = Self::adapted(input, up, options.up).output;
        Self::adapted(Self::gated(gate, up), down, options.down).output
    }
}

impl AdaptedMlpBackend for burn_cubecl::CubeBackend {}
