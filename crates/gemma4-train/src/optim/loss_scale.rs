//! The loss scale, which keeps gradients in f16 from vanishing (Micikevicius et al. 2018, arXiv:1710.03740).
//!
//! f16 has no positive values below 6e-8, so smaller gradients would become 0. To enlarge the gradients, the loss is
//! multiplied by a scale. A step with a NaN or infinite gradient is skipped and halves the scale. After enough steps
//! without an overflow, the scale doubles. bf16 has the range of f32 and needs no scale.

use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor},
};

/// The scale at the beginning of a run.
const FIRST: f32 = 65536.0;
/// The number of consecutive steps without an overflow after which the scale doubles.
const PATIENCE: f32 = 2000.0;
/// The smallest and the largest scale. Without a lower bound, a loss that is NaN at every scale would halve the scale forever.
const BOUNDS: [f32; 2] = [1.0, 16_777_216.0];

/// The loss scale of a run. The scale is stored as a parameter that is not trained, so that checkpoints contain the scale.
#[derive(Module, Debug)]
pub struct LossScale {
    /// A tensor `[2]` in f32. Element 0 is the scale. Element 1 is the number of steps since the scale last changed.
    state: Param<Tensor<1>>,
}

impl LossScale {
    /// Returns the scale at the beginning of a run.
    pub fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let state = Tensor::<1>::from_data([FIRST, 0.0], (&device, DType::F32));
        Self {
            state: Param::from_tensor(state).set_require_grad(false),
        }
    }

    /// Reads the scale from the device.
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

    /// Returns the loss scale for the next step. `were_numbers` is true if all gradients of the current step were finite.
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
    fn loss_scale_halves_on_overflow_and_doubles_after_patience() {
        assert_eq!(next([1024.0, 7.0], false), [512.0, 0.0]);
        assert_eq!(next([1024.0, 7.0], true), [1024.0, 8.0]);
        assert_eq!(next([1024.0, PATIENCE - 1.0], true), [2048.0, 0.0]);
        assert_eq!(next([1.0, 0.0], false), [1.0, 0.0]);
    }
}
