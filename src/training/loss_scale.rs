//! The factor that keeps gradients in f16 from vanishing (Micikevicius et al. 2018, arXiv:1710.03740).
//!
//! f16 has nothing between 0 and 6e-8, and above 65504 only infinity. So the loss is multiplied by as large a number as no
//! gradient overflows with: a step with a gradient that is no number is left out and halves it, and so many steps without
//! one double it. bf16 has f32's range and needs none.

use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor},
};

/// To begin with.
const FIRST: f32 = 65536.0;
/// Steps without an overflow after which it is doubled.
const PATIENCE: f32 = 2000.0;
/// It stays within these: a loss that is no number is so at every scale.
const BOUNDS: [f32; 2] = [1.0, 16_777_216.0];

/// The scale of a run's loss. It is a parameter that nothing trains, so that checkpoints have it.
#[derive(Module, Debug)]
pub struct LossScale {
    /// `[2]`: the scale, and the steps since it has changed.
    state: Param<Tensor<1>>,
}

impl LossScale {
    /// What a run begins with.
    pub fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let state = Tensor::<1>::from_data([FIRST, 0.0], (&device, DType::F32));
        Self {
            state: Param::from_tensor(state).set_require_grad(false),
        }
    }

    /// The scale, read from the device.
    pub fn value(&self) -> f32 {
        self.read()[0]
    }

    fn read(&self) -> [f32; 2] {
        let mut state = [FIRST, 0.0];
        let read = self.state.val().into_data();
        for (own, read) in state.iter_mut().zip(read.iter::<f32>()) {
            *own = read;
        }
        state
    }

    /// After a step whose gradients were numbers, or were not.
    pub fn after(self, were_numbers: bool) -> Self {
        let next = next(self.read(), were_numbers);
        let state = self.state.map(|state| {
            Tensor::from_data(next, (&state.device(), DType::F32)).set_require_grad(false)
        });
        Self { state }
    }
}

fn next([scale, steps]: [f32; 2], were_numbers: bool) -> [f32; 2] {
    let [lowest, highest] = BOUNDS;
    match were_numbers {
        false => [(scale / 2.0).max(lowest), 0.0],
        true if steps + 1.0 >= PATIENCE => [(scale * 2.0).min(highest), 0.0],
        true => [scale, steps + 1.0],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_once_and_doubles_after_a_while() {
        assert_eq!(next([1024.0, 7.0], false), [512.0, 0.0]);
        assert_eq!(next([1024.0, 7.0], true), [1024.0, 8.0]);
        assert_eq!(next([1024.0, PATIENCE - 1.0], true), [2048.0, 0.0]);
        assert_eq!(next([1.0, 0.0], false), [1.0, 0.0]);
    }
}
