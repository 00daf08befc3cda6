//! GELU and GeGLU, the activations of every MLP.
//!
//! On CubeCL devices GeGLU is one operator, which saves only its inputs for the backward pass. Burn's own operators
//! save eight tensors in f32.

#[cfg(feature = "cube")]
mod autodiff;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;

use burn::tensor::{DType, Tensor};
#[cfg(feature = "cube")]
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension, fusion::custom::TensorSpec,
        tensor::FloatTensor,
    },
    tensor::Shape,
};

/// Computes GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415), in f32, and rounds the result
/// once.
///
/// Burn's own GELU computes in the input's dtype, which rounds bf16 several times.
pub(crate) fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    let dtype = input.dtype();
    let x = input.cast(DType::F32);
    let cubed = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cubed * 0.044715) * SQRT_2_OVER_PI;
    (x * (inner.tanh() + 1.0) * 0.5).cast(dtype)
}

/// Computes GeGLU, `gelu(gate) · through`. Both tensors must have the same shape and dtype. `gelu(gate)` is rounded to
/// this dtype before the multiplication.
pub(crate) fn gated<const D: usize>(gate: Tensor<D>, through: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if super::runs(&gate.device(), gate.dtype()) {
        let gated = Dispatch::gated(gate.into_dispatch(), through.into_dispatch());
        return Tensor::from_dispatch(gated);
    }
    gelu(gate) * through
}

/// The column ranges of the gate and of `through`.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
pub struct GateColumns {
    /// The first column of the gate.
    pub gate: usize,
    /// The first column of `through`.
    pub through: usize,
    /// The number of columns.
    pub count: usize,
}

/// Computes [`gated`] on ranges of columns, without copying the ranges. The output is `[rows, count]`. The kernels must
/// support the device and the dtype of both tensors.
#[cfg(feature = "cube")]
pub(crate) fn gated_columns(
    gate: Tensor<2>,
    through: Tensor<2>,
    columns: GateColumns,
) -> Tensor<2> {
    let gated = Dispatch::gated_columns(gate.into_dispatch(), through.into_dispatch(), columns);
    Tensor::from_dispatch(gated)
}

/// The gradients with respect to the gate and `through`.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct GateGradients<B: Backend> {
    pub gate: FloatTensor<B>,
    pub through: FloatTensor<B>,
}

/// The backend operators for GeGLU and its gradients.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait GateBackend: Backend {
    /// See [`gated`].
    #[fusion(meta = |gate, _through| gate.clone())]
    fn gated(gate: FloatTensor<Self>, through: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Returns the gradients of [`gated`] with respect to its inputs, given the gradient with respect to its output.
    #[fusion(meta = |gate, through, _gradient| GateGradientsMetadata {
        gate: gate.clone(),
        through: through.clone(),
    })]
    fn gate_gradients(
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> GateGradients<Self>;
}

/// The backend operator for GeGLU of column ranges.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait GateColumnsBackend: Backend {
    /// See [`gated_columns`].
    #[fusion(meta = |gate, _through, columns| {
        TensorSpec::new(Shape::new([gate.shape[0], columns.count]), gate.dtype)
    })]
    fn gated_columns(
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
        columns: GateColumns,
    ) -> FloatTensor<Self>;
}

#[cfg(all(test, feature = "cube", feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    /// Computes GeGLU by Burn's operators.
    fn composed(gate: Tensor<2>, through: Tensor<2>) -> Tensor<2> {
        let inner = gate.clone() + gate.clone().powi_scalar(3) * 0.044_715;
        // Clamp the argument of tanh to ±20, because drivers may compute tanh through exponentials that overflow.
        let tanh = (inner * 0.797_884_560_802_865_4).clamp(-20.0, 20.0).tanh();
        gate * 0.5 * (tanh + 1.0) * through
    }

    /// Returns the output of the function `gated`, and the gradients with respect to `leaves`. The first leaf is the
    /// gate. `through` is a range of the second leaf's columns, so there are gaps between the rows of `through` in
    /// memory.
    fn outcome(
        leaves: [&Tensor<2>; 2],
        gradient: &Tensor<2>,
        dtype: DType,
        gated: fn(Tensor<2>, Tensor<2>) -> Tensor<2>,
    ) -> [Vec<f32>; 3] {
        let [gate, through] = leaves.map(|leaf| leaf.clone().cast(dtype).autodiff().require_grad());
        let columns = gate.dims()[1];
        let gradient = gradient.clone().cast(dtype).autodiff();
        let output = gated(gate.clone(), through.clone().narrow(1, 1, columns));
        let gradients = (output.clone() * gradient).sum().backward();
        let [gate, through] =
            [gate, through].map(|leaf| leaf.grad(&gradients).expect("the leaf has a gradient"));
        [output.inner(), gate, through].map(|tensor| tensor.into_data().iter::<f32>().collect())
    }

    fn largest(numbers: impl Iterator<Item = f32>) -> f32 {
        numbers.fold(0.0, |most, number| most.max(number.abs()))
    }

    /// Checks GeGLU and its gradients against Burn's operators in f32 on the CPU. The tolerance includes twice the
    /// error of Burn's operators on the device, because the device's tanh may be inaccurate.
    #[test]
    fn gated_and_gradients_match_reference() {
        let device = Device::default();
        device.seed(3);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            for [rows, columns] in [[3, 5], [1, 1], [70, 256]] {
                let random = |columns| {
                    let shape = [rows, columns];
                    let numbers = Distribution::Normal(0.0, 3.0);
                    let drawn = Tensor::<2>::random(shape, numbers, (&device, DType::F32));
                    drawn.cast(dtype).cast(DType::F32)
                };
                let [gate, through, gradient] =
                    [random(columns), random(columns + 2), random(columns)];
                // Scale the gate, so that its values reach both ends of tanh's range.
                let gate = gate * 10.0;
                let found = outcome([&gate, &through], &gradient, dtype, gated);
                let whole = gate.clone().cast(dtype).cast(DType::F32);
                let on_device = outcome([&whole, &through], &gradient, DType::F32, composed);
                let [gate, through, gradient] =
                    [gate.cast(dtype).cast(DType::F32), through, gradient].map(|tensor| {
                        Tensor::<2>::from_data(tensor.into_data(), (&Device::flex(), DType::F32))
                    });
                let expected = outcome([&gate, &through], &gradient, DType::F32, composed);
                let rounding = match dtype {
                    DType::F32 => 1e-5,
                    DType::F16 => 2e-3,
                    _ => 1.6e-2,
                };
                let outcomes = found.iter().zip(&expected).zip(&on_device);
                for ((found, expected), on_device) in outcomes {
                    let errors = expected.iter().zip(on_device).map(|(a, b)| a - b);
                    let of_device = 2.0 * largest(errors);
                    let scale = 1e-2 * largest(expected.iter().copied());
                    for (found, expected) in found.iter().zip(expected) {
                        let error = (found - expected).abs();
                        assert!(
                            error <= of_device + rounding * (expected.abs() + scale),
                            "{dtype:?}, {rows} · {columns}: got {found}, expected {expected}"
                        );
                    }
                }
            }
        }
    }

    /// Checks that GeGLU of column ranges in wider rows has the same bits as GeGLU of separate tensors.
    #[test]
    fn gated_columns_match_gated() {
        let device = Device::default();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !crate::op::serves(&device, dtype) {
                continue;
            }
            for (columns, starts) in [(5, [3, 0]), (256, [256, 512]), (64, [0, 8])] {
                let drawn = |start: usize| {
                    let shape = [7, start + columns + 16];
                    let drawn = Tensor::<2>::random(shape, Distribution::Normal(0.0, 3.0), &device);
                    drawn.cast(dtype)
                };
                let [gate, through] = starts.map(drawn);
                let own = |rows: &Tensor<2>, start| rows.clone().narrow(1, start, columns) * 1.0;
                let expected = gated(own(&gate, starts[0]), own(&through, starts[1]));
                let columns = GateColumns {
                    gate: starts[0],
                    through: starts[1],
                    count: columns,
                };
                let found = gated_columns(gate, through, columns);
                assert_eq!(found.into_data(), expected.into_data(), "{dtype:?}");
            }
        }
    }
}
