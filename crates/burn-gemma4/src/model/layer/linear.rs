//! A linear projection as a module.

use super::Weight;
use crate::op::linear::{Matrix, rows};
use crate::op::static_range::round_by_scale;
use crate::op::{flat_rows, lora};
#[cfg(feature = "cube")]
use burn::module::LoraAdapter;
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// A linear projection: `output = input · weightᵀ`.
#[derive(Module, Debug)]
pub struct Linear {
    /// The weight, `[columns out, columns in]`, as in checkpoints. GEMMs read the transpose through the strides.
    pub weight: Weight,
    /// The scales by which the input and the output are rounded, or `None` if nothing is rounded.
    #[module(skip)]
    pub(crate) activation_scales: Option<ActivationScales>,
}

/// The static scales of a linear projection's activations, which a checkpoint with `quant_method` "gemma" brings. A scale
/// of 0 rounds nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ActivationScales {
    pub input: f32,
    pub output: f32,
}

impl ActivationScales {
    /// True if at least one of the scales rounds.
    pub fn round_something(self) -> bool {
        self.input != 0.0 || self.output != 0.0
    }

    /// Applies `project` to rows, and rounds its input and its output by the scales, if there are any.
    pub fn rounded(
        scales: Option<Self>,
        input: Tensor<2>,
        project: impl FnOnce(Tensor<2>) -> Tensor<2>,
    ) -> Tensor<2> {
        match scales {
            None => project(input),
            Some(scales) => {
                let output = project(round_by_scale(input, scales.input));
                round_by_scale(output, scales.output)
            }
        }
    }
}

impl From<Weight> for Linear {
    /// Creates a projection by a weight, `[columns out, columns in]`.
    fn from(weight: Weight) -> Self {
        Self {
            weight,
            activation_scales: None,
        }
    }
}

impl Linear {
    pub(crate) fn new(input: usize, output: usize, deviation: f64, device: &Device) -> Self {
        Weight::random([output, input], deviation, device).into()
    }

    /// Applies the projection to the last dimension.
    ///
    /// # Shapes
    /// `input` is `[batch, positions, columns in]`; the result is `[batch, positions, columns out]`.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let [batch, positions, _] = input.dims();
        let rows = self.rows(flat_rows(input));
        let [_, output] = rows.dims();
        rows.reshape([batch, positions, output])
    }

    /// Projects `[rows, columns in]` to `[rows, columns out]`. See [`Weight::project`].
    pub(crate) fn rows(&self, input: Tensor<2>) -> Tensor<2> {
        self.rounded(input, |input| self.weight.project(input))
    }

    /// Projects rows by `project`, which multiplies by the transpose of the weight. The input and the output are rounded
    /// by the static scales, if there are any.
    pub(crate) fn rounded(
        &self,
        input: Tensor<2>,
        project: impl FnOnce(Tensor<2>) -> Tensor<2>,
    ) -> Tensor<2> {
        ActivationScales::rounded(self.activation_scales, input, project)
    }

    /// Returns the base weight and its adapter, or `None` if the weight has no adapter or if the base weight is
    /// trained.
    #[cfg(feature = "cube")]
    pub(super) fn adapted(&self) -> Option<(Matrix, &LoraAdapter)> {
        let adapter = self.weight.adapter()?;
        let base = self.weight.base();
        base.tracked().is_none().then_some((base, adapter))
    }

    /// Computes [`rows`](Self::rows) with the given matmul function, for inference.
    pub(crate) fn rows_by(
        &self,
        input: Tensor<2>,
        product: impl Fn(Tensor<2>, Matrix) -> Tensor<2>,
    ) -> Tensor<2> {
        self.weight.project_by(input, product)
    }
}

impl Weight {
    /// Multiplies `[rows, columns in]` by the transpose of the weight, which gives `[rows, columns out]`.
    ///
    /// A LoRA adapter is two narrow matrices. The rows are multiplied by both matrices one after the other, in the dtype of
    /// the rows. The product of the two matrices and its gradient would have the size of the weight, so they are never
    /// stored.
    pub(in crate::model) fn project(&self, input: Tensor<2>) -> Tensor<2> {
        let Some(adapter) = self.adapter() else {
            return rows(input, self.matrix());
        };
        match self.base() {
            // Multiply by the packed weight and the adapter separately, because `lora_product` would dequantize the
            // weight.
            Matrix::Quantized(_) if !input.device().is_autodiff() => self.project_by(input, rows),
            base => lora::lora_product(input, base, adapter),
        }
    }

    /// Computes [`project`](Self::project) with the given matmul function, for inference.
    fn project_by(
        &self,
        input: Tensor<2>,
        product: impl Fn(Tensor<2>, Matrix) -> Tensor<2>,
    ) -> Tensor<2> {
        let Some(adapter) = self.adapter() else {
            return product(input, self.matrix());
        };
        let dtype = input.dtype();
        let [reads, writes] =
            [&adapter.b, &adapter.a].map(|factor| Matrix::Whole(factor.val().cast(dtype)));
        let added = product(product(input.clone(), reads), writes);
        product(input, self.base()) + added * adapter.scale
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::{
        module::{Lora, ModuleMapper, Param},
        tensor::Distribution,
    };

    /// A mapper that fills both LoRA matrices with random values. Otherwise the adapter's output would be 0, because
    /// one matrix is initialized with zeros.
    struct Drawn;

    impl ModuleMapper for Drawn {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match param.is_require_grad() {
                true => param.map(|factor| {
                    let drawn = factor.inner().random_like(Distribution::Default);
                    drawn.autodiff().require_grad()
                }),
                false => param,
            }
        }
    }

    fn close(found: Tensor<2>, expected: Tensor<2>, what: &str) {
        let [found, expected] =
            [found, expected].map(|tensor| tensor.into_data().iter::<f32>().collect::<Vec<_>>());
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.into_iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(error < 1e-4, "{what}: found {found}, expected {expected}");
        }
    }

    #[test]
    fn rows_with_adapter_equals_the_merged_weight() {
        let device = Device::flex().autodiff();
        let linear = Linear::new(5, 7, 1.0, &device).apply_lora(Lora::new(3, 6.0));
        let linear = linear.map(&mut Drawn);
        let input = Tensor::<2>::random([4, 5], Distribution::Default, &device).require_grad();
        let weighted = |output: Tensor<2>| (output.clone().tanh() * output).sum();
        let found = linear.rows(input.clone());
        let expected = rows(input.clone(), linear.weight.val());
        close(found.clone(), expected.clone(), "output");
        let [found, expected] = [found, expected].map(|output| weighted(output).backward());
        let adapter = linear.weight.adapter().expect("the linear has an adapter");
        for (what, leaf) in [
            ("input", input),
            ("a", adapter.a.val()),
            ("b", adapter.b.val()),
        ] {
            let [found, expected] = [&found, &expected].map(|gradients| leaf.grad(gradients));
            close(
                found.expect("the leaf has a gradient"),
                expected.expect("the leaf has a gradient"),
                what,
            );
        }
        let Matrix::Whole(base) = linear.weight.base() else {
            panic!("the base weight is not quantized")
        };
        assert!(base.grad(&found).is_none());
    }

    /// Compares the output and the gradients of an adapter with a computation in f32. The adapter's input and output
    /// are in half precision. The LoRA matrices and their gradients are in f32.
    #[cfg(feature = "cube")]
    #[test]
    fn lora_product_in_half_precision_has_f32_gradients() {
        use burn::tensor::DType;
        let device = Device::default();
        for (dtype, rounding) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            if !crate::op::runs(&device, dtype) {
                continue;
            }
            let device = device.clone().autodiff();
            let random = |shape: [usize; 2]| {
                let drawn = Tensor::<2>::random(shape, Distribution::Default, &device);
                drawn.cast(dtype)
            };
            let (input, base) = (random([24, 32]), random([40, 32]));
            let linear = Linear::new(32, 40, 1.0, &device).apply_lora(Lora::new(8, 4.0));
            let linear = linear.map(&mut Drawn);
            let adapter = linear.weight.adapter().expect("the linear has an adapter");
            let found = lora::lora_product(input.clone(), base.clone().into(), adapter);
            let product = adapter.a.val().matmul(adapter.b.val()) * adapter.scale;
            let whole = base.cast(DType::F32) + product;
            let expected = rows(input.cast(DType::F32), whole);
            let [found, expected] = [found.cast(DType::F32), expected].map(|output| {
                let gradients = output.clone().sum().backward();
                let of =
                    |factor: Tensor<2>| factor.grad(&gradients).expect("the leaf has a gradient");
                let numbers = [output.inner(), of(adapter.a.val()), of(adapter.b.val())];
                numbers.map(|tensor| {
                    assert_eq!(tensor.dtype(), DType::F32);
                    tensor.into_data().iter::<f32>().collect::<Vec<_>>()
                })
            });
            for (found, expected) in found.iter().zip(&expected) {
                let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
                for (found, expected) in found.iter().zip(expected) {
                    let error = (found - expected).abs();
                    // Allow for the rounding of four values: an element of each LoRA matrix, the adapter's output, and the
                    // sum of this output and the base output.
                    assert!(
                        error <= 4.0 * rounding * largest,
                        "{dtype:?}: found {found}, expected {expected}"
                    );
                }
            }
        }
    }

    /// Checks that a trained base weight under an adapter gets its gradient, and that the input's gradient is correct too.
    #[test]
    fn lora_product_with_trained_base_gives_its_gradient() {
        let device = Device::flex().autodiff();
        let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device);
        let [input, base] = [[4, 5], [7, 5]].map(|shape| random(shape).require_grad());
        let linear = Linear::new(5, 7, 1.0, &device).apply_lora(Lora::new(3, 6.0));
        let linear = linear.map(&mut Drawn);
        let adapter = linear.weight.adapter().expect("the linear has an adapter");
        let found = lora::lora_product(input.clone(), base.clone().into(), adapter);
        let product = adapter.a.val().matmul(adapter.b.val()) * adapter.scale;
        let expected = rows(input.clone(), base.clone() + product);
        let weighted = |output: Tensor<2>| (output.clone().tanh() * output).sum().backward();
        let [found, expected] = [found, expected].map(weighted);
        for (what, leaf) in [("input", input), ("base", base)] {
            let [found, expected] = [&found, &expected].map(|gradients| leaf.grad(gradients));
            close(
                found.expect("the leaf has a gradient"),
                expected.expect("the leaf has a gradient"),
                what,
            );
        }
    }
}
