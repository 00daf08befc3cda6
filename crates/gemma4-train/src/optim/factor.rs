//! The factor by which all gradients of a step are multiplied. The multiplication clips the gradients and divides them
//! by the loss scale.
//!
//! A separate multiplication would cost one kernel launch per parameter. Instead, the optimizer multiplies each
//! gradient when it reads the gradient. The factor is a thread-local variable, because Burn's `Optimizer::step` has no
//! argument for the factor.

use burn::tensor::{DType, Device, Tensor};
use std::cell::RefCell;

thread_local! {
    static FACTOR: RefCell<Option<Tensor<1>>> = const { RefCell::new(None) };
}

/// A guard that clears [`FACTOR`] when a step returns or panics, so that this step's factor does not multiply the next
/// step's gradients.
struct Ended;

impl Drop for Ended {
    fn drop(&mut self) {
        FACTOR.set(None);
    }
}

/// Calls `step`. During the call, [`of_this_step`] returns `factor`, which is a tensor `[1]` in f32.
pub fn during<R>(factor: Tensor<1>, step: impl FnOnce() -> R) -> R {
    FACTOR.set(Some(factor));
    let _ended = Ended;
    step()
}

/// Returns the factor of the current step, `[1]` in f32. Outside of a call of [`during`], the factor is 1.
pub fn of_this_step(device: &Device) -> Tensor<1> {
    FACTOR
        .with_borrow(Clone::clone)
        .unwrap_or_else(|| Tensor::ones([1], (device, DType::F32)))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn factor_outside_of_a_step_is_one() {
        let device = Device::flex();
        let found = || of_this_step(&device).into_scalar::<f32>();
        assert_eq!(found(), 1.0);
        let factor = Tensor::from_data([0.5], (&device, DType::F32));
        assert_eq!(during(factor.clone(), found), 0.5);
        assert_eq!(found(), 1.0);
        let panics = || during(factor, || panic!("a step"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(found(), 1.0);
    }
}
