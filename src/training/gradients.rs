//! Sums of gradients, their norm, and what they are the gradients of.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, Tensor},
};
use burn_gemma4::update::SumOfSquares;
use std::mem;

/// Keeps a norm of 0 from being divided by.
const SMALLEST_NORM: f32 = 1e-6;

/// `value`, which no graph knows, as the parameter `like` is known to the backward.
pub fn leaf<const D: usize>(value: Tensor<D>, like: &Tensor<D>) -> Tensor<D> {
    match like.gradient_checkpointing_strategy() {
        Some(strategy) => value
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy)
            .set_require_grad(like.is_require_grad()),
        None => value,
    }
}

/// Adds gradients to those that are there, in f32: of many terms in half precision, the last ones would be rounded away.
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

/// The Euclidean norm of all gradients together, `[1]` in f32, if there are any.
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

/// What gradients of the norm `norm` are multiplied by so that theirs is `largest` at most, `[1]` in f32: 0, which leaves the step out, where one
/// of them is no number, or so large that the norm is none.
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
    fn gradients_are_clipped_and_what_is_no_number_counts_nothing() {
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
