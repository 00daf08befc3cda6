//! The optimizers for training.

use crate::{
    args::{OptimizerName, StepArguments},
    optim::{
        factor,
        master_weights::{InF32, MasterState},
    },
};
use burn::{
    optim::{
        AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer, SgdConfig,
    },
    tensor::{DType, Device, Tensor},
};
use burn_gemma4::update::{AdamW, ParamUpdate};

/// The decay rates of AdamW's two moments. Language models since GPT-3 use these values.
const BETAS: [f32; 2] = [0.9, 0.95];

/// Returns the optimizer that the arguments choose. The optimizer computes in f32 and clips the gradients.
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

/// Calls `made` with `tensor`, and returns the result. The result is allocated in CubeCL's persistent memory, so it
/// must live as long as the training. Outside of the persistent memory, hundreds of small long-lived tensors would slow
/// down the search for free memory. `docs/adapters.md` has the times.
fn kept<const D: usize>(
    tensor: Tensor<D>,
    made: impl Fn(Tensor<D>) -> Tensor<D> + Send,
) -> Tensor<D> {
    let device = tensor.device();
    device.memory_persistent_allocations(tensor, made)
}

/// AdamW in f32 for weights of any dtype. Weight decay does not apply to one-dimensional parameters, which are norms
/// and scales.
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
        // If there is a master weight, the model's weight is dropped here, so that its memory can be reused for the new weight.
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
        let trained = ParamUpdate {
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
