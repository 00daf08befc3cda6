//! The MoE router, which chooses the top-k experts of each row, and computes the weights of the experts' outputs.

mod few_rows;
mod kernel;
mod launch;

use super::gemv::Origin;

use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Shape, Tensor},
};

/// The chosen experts of each row.
pub(crate) struct Choice {
    /// The indices of the experts, `[rows, top_k]`, the most probable first.
    pub experts: Tensor<2, Int>,
    /// The weights of the experts' outputs, `[rows, top_k]` in f32.
    pub shares: Tensor<2>,
}

/// The largest number of experts that the kernels support.
const MOST_EXPERTS: usize = 512;

/// True if the kernels support this number of experts.
pub(crate) fn chooses(experts: usize) -> bool {
    (1..=MOST_EXPERTS).contains(&experts)
}

/// Returns the indices of the `top_k` most probable experts of each row, `[rows, top_k]`, in descending order of
/// probability. `probabilities` are `[rows, experts]` in f32, without autodiff. Among equal probabilities the smaller
/// index comes first. Returns `None` if no kernel supports the tensor.
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

/// The router's parameters.
pub(crate) struct RouterWeights {
    /// The projection to logits, `[experts, hidden]`.
    pub proj: Tensor<2>,
    /// The scale of each channel of the normalized rows, `[hidden]`.
    pub scale: Tensor<1>,
    /// The factor that multiplies the weight of each expert's output, `[experts]`.
    pub per_expert_scale: Tensor<1>,
}

/// The options of a router.
#[derive(Clone, Copy, Debug)]
pub struct RouteOptions {
    /// The number of experts per row.
    pub top_k: usize,
    /// The epsilon of the norm.
    pub epsilon: f64,
    /// The origin of the router's matrix and of its scale.
    pub origin: Origin,
}

/// Routes the rows of `input`, `[rows, hidden]`. All tensors must have the same dtype. The kernels compute in f32.
pub(crate) fn route(input: Tensor<2>, weights: RouterWeights, options: RouteOptions) -> Choice {
    let result: Routed<Dispatch> = Dispatch::route(
        input.into_dispatch(),
        weights.proj.into_dispatch(),
        weights.scale.into_dispatch(),
        weights.per_expert_scale.into_dispatch(),
        options,
    );
    Choice {
        experts: Tensor::from_dispatch(result.experts),
        shares: Tensor::from_dispatch(result.shares),
    }
}

/// The experts and their weights: see [`Choice`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Routed<B: Backend> {
    pub experts: IntTensor<B>,
    pub shares: FloatTensor<B>,
}

/// The dtype of expert indices.
const NUMBERS: DType = DType::I32;

fn metadata(input: &TensorSpec, top_k: usize) -> RoutedMetadata {
    let shape = || Shape::new([input.shape[0], top_k]);
    RoutedMetadata {
        experts: TensorSpec::new(shape(), NUMBERS),
        shares: TensorSpec::new(shape(), DType::F32),
    }
}

/// The router kernels as operators of a backend. Each operator is documented at the function of this module that calls
/// the operator.
#[backend_extension(Cube, Fusion)]
pub trait RouteBackend: Backend {
    #[fusion(meta = |probabilities, top_k| {
        TensorSpec::new(Shape::new([probabilities.shape[0], *top_k]), NUMBERS)
    })]
    fn choose(probabilities: FloatTensor<Self>, top_k: usize) -> IntTensor<Self>;

    #[fusion(meta = |input, _proj, _scale, _per_expert_scale, options| metadata(input, options.top_k))]
    fn route(
        input: FloatTensor<Self>,
        proj: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        per_expert_scale: FloatTensor<Self>,
        options: RouteOptions,
    ) -> Routed<Self>;
}

#[cfg(all(test, any(feature = "wgpu", feature = "cuda")))]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    /// Checks single rows and a decode step of 64 rows. Each row must get the experts and weights that it gets among
    /// many rows, which other kernels route.
    #[test]
    fn route_of_few_rows_equals_many_rows() {
        let device = Device::default();
        device.seed(2);
        for (hidden, experts, top_k) in [(72, 37, 5), (2816, 130, 1)] {
            for dtype in [DType::F32, DType::BF16] {
                if device.supports_dtype(dtype) {
                    check_few_rows([hidden, experts, top_k], dtype, &device);
                }
            }
        }
    }

    fn check_few_rows([hidden, experts, top_k]: [usize; 3], dtype: DType, device: &Device) {
        const ROWS: usize = 131;
        let random = |shape: [usize; 2]| {
            let values = Tensor::<2>::random(shape, Distribution::Default, (device, DType::F32));
            (values - 0.5).cast(dtype)
        };
        let (proj, scale) = (random([experts, hidden]), random([1, hidden]));
        let per_expert_scale = random([1, experts]);
        let routed = |input: Tensor<2>| {
            let weights = RouterWeights {
                proj: proj.clone(),
                scale: scale.clone().reshape([hidden]),
                per_expert_scale: per_expert_scale.clone().reshape([experts]),
            };
            let options = RouteOptions {
                top_k,
                epsilon: 1e-6,
                origin: Origin::Parameters,
            };
            let Choice { experts, shares } = route(input, weights, options);
            let experts: Vec<i64> = experts.into_data().iter::<i64>().collect();
            let shares: Vec<f32> = shares.into_data().iter::<f32>().collect();
            (experts, shares)
        };
        let input = random([ROWS, hidden]);
        let (all, shares) = routed(input.clone());
        let single = (0..ROWS).map(|row| (row, 1));
        for (row, count) in single.chain([(5, 64)]) {
            let (found, found_shares) = routed(input.clone().narrow(0, row, count));
            let places = row * top_k..(row + count) * top_k;
            let what = format!("{dtype:?}, {hidden} columns, {count} rows from {row}");
            assert_eq!(all[places.clone()], found, "{what}");
            for (expected, found) in shares[places].iter().zip(found_shares) {
                let error = (found - expected).abs();
                assert!(
                    error <= 1e-5 * expected.abs(),
                    "{what}: {found}, {expected}"
                );
            }
        }
    }
}
