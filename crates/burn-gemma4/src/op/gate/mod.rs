//! GELU, the activation of every gate, and what goes through it.
//!
//! On CubeCL devices a gate is one operator, forward and backward, that keeps what it reads: as Burn's own operators, tracked one by
//! one, it keeps eight tensors in f32.

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

/// GELU by its approximation through tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415), in f32, rounded once.
///
/// Burn's own raises to the power of 3.0 in the input's dtype, which rounds bf16 several times.
pub(crate) fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    let dtype = input.dtype();
    let x = input.cast(DType::F32);
    let cubed = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cubed * 0.044715) * SQRT_2_OVER_PI;
    (x * (inner.tanh() + 1.0) * 0.5).cast(dtype)
}

/// `gelu(gate) · through`, of one shape and dtype: the gate is rounded before what goes through it is multiplied.
pub(crate) fn gated<const D: usize>(gate: Tensor<D>, through: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if super::runs(&gate.device(), gate.dtype()) {
        let gated = Dispatch::gated(gate.into_dispatch(), through.into_dispatch());
        return Tensor::from_dispatch(gated);
    }
    gelu(gate) * through
}

/// Columns of a gate's rows and of those of what goes through it.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
pub struct GateColumns {
    /// The gate's first column.
    pub gate: usize,
    /// The other's.
    pub through: usize,
    /// How many.
    pub count: usize,
}

/// [`gated`] of some columns of rows, read where they lie: `[rows, count]`. Where kernels serve both.
#[cfg(feature = "cube")]
pub(crate) fn gated_columns(
    gate: Tensor<2>,
    through: Tensor<2>,
    columns: GateColumns,
) -> Tensor<2> {
    let gated = Dispatch::gated_columns(gate.into_dispatch(), through.into_dispatch(), columns);
    Tensor::from_dispatch(gated)
}

/// The gradients of what a gate reads.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct GateGradients<B: Backend> {
    pub gate: FloatTensor<B>,
    pub through: FloatTensor<B>,
}

/// A gate as an operator of a backend, forward and backward.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait GateBackend: Backend {
    /// See [`gated`].
    #[fusion(meta = |gate, _through| gate.clone())]
    fn gated(gate: FloatTensor<Self>, through: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Its gradients.
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

/// A gate of columns as an operator of a backend.
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

    /// The formula by Burn's operators.
    fn composed(gate: Tensor<2>, through: Tensor<2>) -> Tensor<2> {
        let inner = gate.clone() + gate.clone().powi_scalar(3) * 0.044_715;
        // Drivers may compute tanh through exponentials that overflow; it is 1 long before.
        let tanh = (inner * 0.797_884_560_802_865_4).clamp(-20.0, 20.0).tanh();
        gate * 0.5 * (tanh + 1.0) * through
    }

    /// A gate of two leaves, of which the second is a part of a wider one, and the leaves' gradients.
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
        let [gate, through] = [gate, through].map(|leaf| leaf.grad(&gradients).expect("one"));
        [output.inner(), gate, through].map(|tensor| tensor.into_data().iter::<f32>().collect())
    }

    fn largest(numbers: impl Iterator<Item = f32>) -> f32 {
        numbers.fold(0.0, |most, number| most.max(number.abs()))
    }

    /// By Burn's operators in f32, of the same numbers, on the processor; on the device the same operators may err, too, by its tanh.
    #[test]
    fn is_the_formula_with_its_gradients() {
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
                // The ends of what tanh is computed of.
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
                            "{dtype:?}, {rows} · {columns}: {found}, not {expected}"
                        );
                    }
                }
            }
        }
    }

    /// Of columns of wider rows, bit by bit as of rows of their own.
    #[test]
    fn of_columns_is_as_of_rows() {
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
