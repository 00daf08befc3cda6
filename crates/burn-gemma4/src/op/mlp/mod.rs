//! A dense feed-forward network whose matrices have low-rank adapters, as one operator with its gradients. Its inner width is several
//! times that of the stream: what the backward needs of it is most of what a step would keep, and cheap to make again.

mod autodiff;

use super::{
    gate::GateBackend,
    linear::{
        Matrix,
        adapted::{AdaptedBackend, AdaptedMatrix, AdaptedOptions, parts},
    },
};
use burn::{
    backend::{Dispatch, backend_extension, tensor::FloatTensor},
    module::LoraAdapter,
    tensor::Tensor,
};

/// `down(gelu(gate(input)) · up(input))` of rows, by the three matrices in this order; where kernels run. The backward has the gate and what
/// goes through it, not their product, or with `anew` makes them again, too.
pub(crate) fn adapted_mlp(
    input: Tensor<2>,
    matrices: [(Matrix, &LoraAdapter); 3],
    anew: bool,
) -> Tensor<2> {
    let [gate, up, down] = matrices.map(|(base, adapter)| parts(base, adapter));
    let options = MlpOptions {
        gate: gate.1,
        up: up.1,
        down: down.1,
        anew,
    };
    Tensor::from_dispatch(Dispatch::adapted_mlp(
        input.into_dispatch(),
        gate.0,
        up.0,
        down.0,
        options,
    ))
}

/// What is known of a network on the host.
#[derive(Clone, Copy, Debug)]
pub struct MlpOptions {
    pub gate: AdaptedOptions,
    pub up: AdaptedOptions,
    pub down: AdaptedOptions,
    /// Whether the backward makes the gate and what goes through it again.
    pub anew: bool,
}

/// The operator of a backend.
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
