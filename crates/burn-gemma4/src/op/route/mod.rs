//! The router of a mixture of experts: which experts a row goes through, and what each contributes.

mod kernel;
mod launch;

use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Shape, Tensor},
};

/// The experts of each row.
pub(crate) struct Choice {
    /// `[rows, top_k]`, the most probable first.
    pub experts: Tensor<2, Int>,
    /// `[rows, top_k]` in f32: what each contributes.
    pub shares: Tensor<2>,
}

/// Experts that the kernels choose among at most.
const MOST_EXPERTS: usize = 512;

/// Whether the kernels choose among so many experts.
pub(crate) fn chooses(experts: usize) -> bool {
    (1..=MOST_EXPERTS).contains(&experts)
}

/// The numbers of the `top_k` largest of each row of `[rows, experts]` in f32, without gradients: `[rows, top_k]`, the largest first, of
/// equal ones that of the smaller number, in the order of `f32::total_cmp`. Nothing where no kernel serves.
pub(crate) fn choose(probabilities: &Tensor<2>, top_k: usize) -> Option<Tensor<2, Int>> {
    let [rows, experts] = probabilities.dims();
    let device = probabilities.device();
    if !super::runs(&device, probabilities.dtype()) || !chooses(experts) || rows == 0 {
        return None;
    }
    let strategy = probabilities.gradient_checkpointing_strategy();
    let inner = probabilities.clone().inner().into_dispatch();
    let chosen: Tensor<2, Int> = Tensor::from_dispatch(Dispatch::choose(inner, top_k));
    Some(match strategy {
        Some(strategy) => chosen
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => chosen,
    })
}

/// What chooses.
pub(crate) struct RouterWeights {
    /// `[experts, hidden]`.
    pub proj: Tensor<2>,
    /// `[hidden]`: of the normalised rows.
    pub scale: Tensor<1>,
    /// `[experts]`: of what an expert contributes.
    pub per_expert_scale: Tensor<1>,
}

/// The choice of each of a few rows, `[rows, hidden]`, by one launch. All are of one dtype, and computed in f32.
pub(crate) fn route(
    input: Tensor<2>,
    weights: RouterWeights,
    top_k: usize,
    epsilon: f64,
) -> Choice {
    let result: Routed<Dispatch> = Dispatch::route(
        input.into_dispatch(),
        weights.proj.into_dispatch(),
        weights.scale.into_dispatch(),
        weights.per_expert_scale.into_dispatch(),
        top_k,
        epsilon,
    );
    Choice {
        experts: Tensor::from_dispatch(result.experts),
        shares: Tensor::from_dispatch(result.shares),
    }
}

/// See [`Choice`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Routed<B: Backend> {
    pub experts: IntTensor<B>,
    pub shares: FloatTensor<B>,
}

/// The dtype of experts' numbers.
const NUMBERS: DType = DType::I32;

fn metadata(input: &TensorSpec, top_k: usize) -> RoutedMetadata {
    let shape = || Shape::new([input.shape[0], top_k]);
    RoutedMetadata {
        experts: TensorSpec::new(shape(), NUMBERS),
        shares: TensorSpec::new(shape(), DType::F32),
    }
}

/// The kernels as operators of a backend. The functions above say what they compute.
#[backend_extension(Cube, Fusion)]
pub trait RouteBackend: Backend {
    #[fusion(meta = |probabilities, top_k| {
        TensorSpec::new(Shape::new([probabilities.shape[0], *top_k]), NUMBERS)
    })]
    fn choose(probabilities: FloatTensor<Self>, top_k: usize) -> IntTensor<Self>;

    #[fusion(meta = |input, _proj, _scale, _per_expert_scale, top_k, _epsilon| metadata(input, *top_k))]
    fn route(
        input: FloatTensor<Self>,
        proj: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        top_k: usize,
        epsilon: f64,
    ) -> Routed<Self>;
}
