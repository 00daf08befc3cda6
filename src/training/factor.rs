//! What all gradients of a step count, on the way to the optimizer.
//!
//! Clipping and a loss's scale multiply every gradient by one number, which is on the device. Burn's optimizers are handed a gradient at a
//! time and nothing else; multiplied before, each is a launch more, of which an adapter has hundreds a step. So the number waits here,
//! in the thread that makes the step, for as long as the step takes.

use burn::tensor::{DType, Device, Tensor};
use std::cell::RefCell;

thread_local! {
    static FACTOR: RefCell<Option<Tensor<1>>> = const { RefCell::new(None) };
}

/// Takes the number away, also where a step panics.
struct Ended;

impl Drop for Ended {
    fn drop(&mut self) {
        FACTOR.set(None);
    }
}

/// What `step` returns, in which [`of_this_step`] is `factor`, `[1]` in f32.
pub fn during<R>(factor: Tensor<1>, step: impl FnOnce() -> R) -> R {
    FACTOR.set(Some(factor));
    let _ended = Ended;
    step()
}

/// What a gradient counts, `[1]` in f32: once where nothing else was said.
pub fn of_this_step(device: &Device) -> Tensor<1> {
    FACTOR
        .with_borrow(Clone::clone)
        .unwrap_or_else(|| Tensor::ones([1], (device, DType::F32)))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn it_is_there_during_the_step_alone() {
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
