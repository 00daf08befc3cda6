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

/// What gradients of the norm `norm` are multiplied by so that theirs is `largest` at most, `[1]` in f32.
pub fn clipping(norm: Tensor<1>, largest: f32) -> Tensor<1> {
    (norm + SMALLEST_NORM)
        .recip()
        .mul_scalar(largest)
        .clamp_max(1.0)
}
