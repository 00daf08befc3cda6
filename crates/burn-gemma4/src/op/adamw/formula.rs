//! The coefficients of AdamW's formula.

/// AdamW's hyperparameters (Loshchilov and Hutter 2019, arXiv:1711.05101).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The decay rates β₁ and β₂ of the running means of gradients and of squared gradients.
    pub betas: [f32; 2],
    /// The constant ε that is added to the square root of the running mean of squared gradients.
    pub epsilon: f32,
    /// The weight decay λ. A step reduces each weight by λ times the learning rate times the weight.
    pub decay: f32,
}

/// The scalar coefficients of one optimizer step. The kernel's `Coefficients` hold the same values.
#[derive(Clone, Copy, Debug)]
pub struct Formula {
    pub(super) kept_mean: f32,
    pub(super) kept_square: f32,
    pub(super) new_mean: f32,
    pub(super) new_square: f32,
    pub(super) of_mean: f32,
    pub(super) of_square: f32,
    pub(super) epsilon: f32,
    pub(super) kept_weight: f32,
    pub(super) rate: f32,
}

impl AdamW {
    /// Returns the coefficients of step `step`, counted from 1, at the learning rate `rate`.
    pub(super) fn formula(&self, step: usize, rate: f64) -> Formula {
        let [mean, square] = self.betas;
        let step = i32::try_from(step).unwrap_or(i32::MAX);
        Formula {
            kept_mean: mean,
            kept_square: square,
            new_mean: 1.0 - mean,
            new_square: 1.0 - square,
            of_mean: 1.0 - mean.powi(step),
            of_square: 1.0 - square.powi(step),
            epsilon: self.epsilon,
            kept_weight: (1.0 - rate * f64::from(self.decay)) as f32,
            rate: rate as f32,
        }
    }
}
