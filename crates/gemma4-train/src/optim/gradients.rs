//! Accumulates gradients, and computes their norm and the clipping factor. Also creates leaf parameters of the autodiff graph.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, Tensor},
};
use burn_gemma4::update::SumOfSquares;
use std::mem;

/// A small number that is added to the norm, so that clipping does not divide by 0.
const SMALLEST_NORM: f32 = 1e-6;

/// Returns `value` as a leaf of the autodiff graph. The leaf gets the autodiff settings of the parameter `like`.
/// `value` must not yet be part of an autodiff graph.
pub fn leaf<const D: usize>(value: Tensor<D>, like: &Tensor<D>) -> Tensor<D> {
    match like.gradient_checkpointing_strategy() {
        Some(strategy) => value
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy)
            .set_require_grad(like.is_require_grad()),
        None => value,
    }
}

/// Adds the gradients `new` to `sum` in f32. In half precision, the last terms of a long sum would be rounded away.
pub fn add(sum: &mut GradientsParams, new: GradientsParams, module: &impl Module) {
    let mut new = new;
    module.visit(&mut Add { sum, new: &mut new });
}

struct Add<'a> {
    sum: &'a mut GradientsParams,
    new: &'a mut GradientsParams,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(new) = self.new.remove::<D>(param.id) else {
            return;
        };
        let new = new.cast(DType::F32);
        let sum = match self.sum.remove::<D>(param.id) {
            Some(old) => old + new,
            None => new,
        };
        self.sum.register(param.id, sum);
    }
}

/// Returns the Euclidean norm of all gradients together, `[1]` in f32, or `None` if there are no gradients.
pub fn norm(gradients: &GradientsParams, module: &impl Module) -> Option<Tensor<1>> {
    let sum = SumOfSquares::new();
    let mut squares = Squares { gradients, sum };
    module.visit(&mut squares);
    squares.sum.sum().map(Tensor::sqrt)
}

struct Squares<'a> {
    gradients: &'a GradientsParams,
    sum: SumOfSquares,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.sum = mem::take(&mut self.sum).with(gradient);
        }
    }
}

/// Returns the clipping factor, `[1]` in f32, for gradients whose global norm is `norm`. The factor reduces a norm above
/// `largest` to `largest`. A NaN or infinite norm gives the factor 0, so that the step is skipped.
pub fn clipping(norm: Tensor<1>, largest: Option<f32>) -> Tensor<1> {
    let is_none = norm.clone().is_finite().bool_not();
    let factor = match largest {
        Some(largest) => (norm + SMALLEST_NORM)
            .recip()
            .mul_scalar(largest)
            .clamp_max(1.0),
        None => norm.ones_like(),
    };
    factor.mask_fill(is_none, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn clipping_factor_of_nan_or_infinite_norm_is_zero() {
        let devices = [
            #[cfg(feature = "flex")]
            Device::flex(),
            Device::default(),
        ];
        for device in devices {
            let factor = |norm: f32, largest| {
                let norm = Tensor::from_data([norm], (&device, DType::F32));
                clipping(norm, largest).into_scalar::<f32>()
            };
            for largest in [None, Some(2.0)] {
                assert_eq!(factor(0.0, largest), 1.0);
                assert_eq!(factor(1.5, largest), 1.0);
                assert_eq!(factor(f32::NAN, largest), 0.0);
                assert_eq!(factor(f32::INFINITY, largest), 0.0);
            }
            assert_eq!(factor(1e30, None), 1.0);
            assert!((factor(8.0, Some(2.0)) - 0.25).abs() < 1e-6);
            assert!(factor(1.8e19, Some(1.0)) > 0.0);
        }
    }
}
