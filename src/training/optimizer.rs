//! The optimizers that models are trained with.

use super::{
    arguments::{OptimizerName, StepArguments},
    factor,
    masters::{InF32, MasterState},
};
use burn::{
    optim::{
        AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer, SgdConfig,
    },
    tensor::{DType, Device, Tensor},
};
use burn_gemma4::update::{AdamW, Trained};

/// AdamW's decay of its two means, as language models are trained since GPT-3.
const BETAS: [f32; 2] = [0.9, 0.95];

/// The optimizer, which computes in f32. The gradients that it gets are clipped.
pub fn optimizer(arguments: &StepArguments) -> ModuleOptimizer {
    match arguments.optimizer {
        OptimizerName::Sgd => ModuleOptimizer::from(InF32(SgdConfig::new().build())),
        OptimizerName::Adamw => ModuleOptimizer::from(AdamWInF32(AdamW {
            betas: BETAS,
            epsilon: 1e-8,
            decay: arguments.weight_decay,
        })),
    }
}

/// What is made of a tensor, for as long as the training lasts, in memory of its own: CubeCL looks through all that is in a page whenever
/// it finds a place there, hundreds of small tensors among a step's own (`docs/adapters.md` has the times).
fn kept<const D: usize>(
    tensor: Tensor<D>,
    made: impl Fn(Tensor<D>) -> Tensor<D> + Send,
) -> Tensor<D> {
    let device = tensor.device();
    device.memory_persistent_allocations(tensor, made)
}

/// AdamW in f32, whatever the weights are in. Vectors, which are norms and scales, do not decay.
#[derive(Clone)]
pub struct AdamWInF32(pub AdamW);

impl Optimizer for AdamWInF32 {
    type State<const D: usize> = MasterState<AdamWState<D>, D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let optimizer = AdamW {
            decay: if D > 1 { self.0.decay } else { 0.0 },
            ..self.0
        };
        let dtype = tensor.dtype();
        let (master, inner) = match state {
            Some(state) => (state.master, state.inner),
            None => (None, None),
        };
        // What the model has is not there any more when it is made anew.
        let weight = match master {
            Some(master) => {
                drop(tensor);
                master
            }
            None => kept(tensor, |tensor| tensor.cast(DType::F32)),
        };
        let (time, mean, square) = match inner.map(|state| state.momentum) {
            Some(means) => (means.time, means.moment_1, means.moment_2),
            None => {
                let zeros = || kept(weight.clone(), |weight| weight.zeros_like());
                (0, zeros(), zeros())
            }
        };
        let trained = Trained {
            weight,
            mean,
            square,
        };
        let time = time + 1;
        let factor = factor::of_this_step(&gradient.device());
        let (tensor, trained) = optimizer.step(time, rate, gradient, factor, trained, dtype);
        let means = AdaptiveMomentumState::new(time, trained.mean, trained.square);
        let state = MasterState {
            master: (dtype != DType::F32).then_some(trained.weight),
            inner: Some(AdamWState::new(means)),
        };
        (tensor, Some(state))
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.moved(device, |inner| {
            AdamWState::new(inner.momentum.to_device(device))
        })
    }
}
