//! AdamW's formula, as numbers.

/// How AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) changes a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// What a step keeps of the means of gradients and of their squares.
    pub betas: [f32; 2],
    /// Added to the root of the mean of squares.
    pub epsilon: f32,
    /// The share of a weight that a step takes off it, times the learning rate.
    pub decay: f32,
}

/// What a step's formula has beside the tensors. The kernel's is the same.
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
    /// Of the step with this number, from 1, at a learning rate.
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
