//! The optimizers that models are trained with.

use super::{
    arguments::{OptimizerName, StepArguments},
    masters::InF32,
};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};

/// AdamW's decay of its two means, as language models are trained since GPT-3.
const BETAS: [f32; 2] = [0.9, 0.95];

/// The optimizer, which computes in f32. The gradients that it gets are clipped.
pub fn optimizer(arguments: &StepArguments) -> ModuleOptimizer {
    match arguments.optimizer {
        OptimizerName::Sgd => ModuleOptimizer::from(InF32::of_all(SgdConfig::new().build())),
        OptimizerName::Adamw => {
            let adamw = |decay| {
                let adamw = AdamWConfig::new()
                    .with_beta_1(BETAS[0])
                    .with_beta_2(BETAS[1])
                    .with_epsilon(1e-8)
                    .with_weight_decay(decay);
                adamw.build()
            };
            ModuleOptimizer::from(InF32 {
                matrices: adamw(arguments.weight_decay),
                vectors: adamw(0.0),
            })
        }
    }
}
