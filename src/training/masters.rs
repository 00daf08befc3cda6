//! Weights in f32 behind weights in half precision.
//!
//! A weight in bf16 has 8 bits: an update of less than a 512th of it is rounded away, which at a fine-tuning's learning rate
//! is most of them. So the optimizer keeps each weight in f32, updates that, and rounds it for the model (Micikevicius et al.
//! 2018, arXiv:1710.03740), by [`rounded`]. Its moments are in f32, too.

use super::{arguments::OptimizerName, factor, gradients::leaf};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource, join_path},
    tensor::{DType, Device, Int, Tensor},
};
use burn_gemma4::update::rounded;
use std::fmt;

/// An optimizer that computes in f32, whatever the weights are in.
#[derive(Clone)]
pub struct InF32<O>(pub O);

/// What it keeps of a parameter.
#[derive(Clone)]
pub struct MasterState<S, const D: usize> {
    /// The parameter in f32, where the model has it in another dtype.
    pub(super) master: Option<Tensor<D>>,
    /// The optimizer's own.
    pub(super) inner: Option<S>,
}

impl<S, const D: usize> MasterState<S, D> {
    /// The same on another device, to which `move_inner` brings the optimizer's own.
    pub(super) fn moved(self, device: &Device, move_inner: impl FnOnce(S) -> S) -> Self {
        Self {
            master: self.master.map(|master| master.to_device(device)),
            inner: self.inner.map(move_inner),
        }
    }
}

impl<O: Optimizer> Optimizer for InF32<O> {
    type State<const D: usize> = MasterState<O::State<D>, D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (master, inner) = match state {
            Some(state) => (state.master, state.inner),
            None => (None, None),
        };
        let dtype = tensor.dtype();
        let factor = factor::of_this_step(&gradient.device());
        let factor = factor.reshape([1; D]);
        // Nothing times what is no number is none. Of no gradient, what is here without momentum and decay makes no step.
        let is_left_out = factor.clone().equal_elem(0.0).expand(gradient.shape());
        let gradient = (gradient.cast(DType::F32) * factor).mask_fill(is_left_out, 0.0);
        let master = master.unwrap_or_else(|| tensor.cast(DType::F32));
        let (master, inner) = self.0.step(rate, master, gradient, inner);
        let tensor = rounded(master.clone(), dtype);
        let master = (dtype != DType::F32).then_some(master);
        let state = (master.is_some() || inner.is_some()).then_some(MasterState { master, inner });
        (tensor, state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.moved(device, |inner| O::to_device(inner, device))
    }
}

/// The names of its parts in a record.
const MASTER: &str = "master";
const INNER: &str = "inner";

impl<S: RecordState, const D: usize> RecordState for MasterState<S, D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if let Some(master) = &self.master {
            out.push_tensor(prefix, MASTER, master.clone().into_data());
        }
        if let Some(inner) = &self.inner {
            inner.state_flatten(&join_path(prefix, INNER), out);
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let master = source
            .take_tensor(prefix, MASTER)
            .map(|data| Tensor::from_data(data, (device, DType::F32)));
        let inner = join_path(prefix, INNER);
        let inner = match source.has_under(&inner) {
            true => Some(S::state_unflatten(&inner, source, device)?),
            false => None,
        };
        Some(Self { master, inner })
    }
}

/// A model with its weights in another dtype.
pub fn cast<M: Module>(model: M, dtype: DType) -> M {
    model.map(&mut Cast(dtype))
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        if tensor.dtype() == self.0 {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        // A cast that autodiff sees would be a part of the model's graph.
        let cast = tensor.clone().without_autodiff().cast(self.0);
        Param::from_mapped_value(id, leaf(cast, &tensor), mapper)
    }
}

/// Bytes of what is trained, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Numbers that are trained.
    pub parameters: usize,
    /// Of these, numbers in half precision.
    pub halves: usize,
    /// Weights of the model, frozen ones included.
    pub weights: usize,
    /// Weights in f32 behind those.
    pub masters: usize,
    /// The optimizer's means.
    pub moments: usize,
    /// Gradients, at the end of a step.
    pub gradients: usize,
}

impl Memory {
    /// Of a model, whose gradients are added up in f32 or stay in the dtype of their weights.
    pub fn of(model: &impl Module, optimizer: OptimizerName, gradients_in_f32: bool) -> Self {
        let mut count = Count::default();
        model.visit(&mut count);
        let Count {
            weights,
            trained,
            halves,
        } = count;
        let gradients = match gradients_in_f32 {
            true => 4 * trained,
            false => 4 * trained - 2 * halves,
        };
        Self {
            parameters: trained,
            halves,
            weights,
            masters: 4 * halves,
            moments: match optimizer {
                OptimizerName::Adamw => 8 * trained,
                OptimizerName::Sgd => 0,
            },
            gradients,
        }
    }
}

impl Memory {
    /// Of one of several processes that have as many parts of the optimizer's state, of about the same size.
    pub fn in_parts(self, parts: usize) -> Self {
        Self {
            masters: self.masters.div_ceil(parts),
            moments: self.moments.div_ceil(parts),
            ..self
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gigabytes = |bytes: usize| format!("{:.3} GB", bytes as f64 / 1e9);
        let what = match self.halves {
            0 => "in f32".to_owned(),
            halves if halves == self.parameters => "in half precision".to_owned(),
            halves => format!("({halves} in half precision)"),
        };
        write!(
            f,
            "{} numbers {what} to train: weights {}, masters in f32 {}, moments in f32 {}, gradients {}",
            self.parameters,
            gigabytes(self.weights),
            gigabytes(self.masters),
            gigabytes(self.moments),
            gigabytes(self.gradients),
        )
    }
}

#[derive(Default)]
struct Count {
    /// Bytes.
    weights: usize,
    trained: usize,
    halves: usize,
}

impl ModuleVisitor for Count {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        let count = base.dims().iter().product::<usize>();
        let is_half = matches!(base.dtype(), DType::F16 | DType::BF16);
        self.weights += count * if is_half { 2 } else { 4 };
        if base.is_require_grad() {
            self.trained += count;
            self.halves += if is_half { count } else { 0 };
        }
    }

    /// The words of quantized weights.
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let words = param.val();
        self.weights += words.dims().iter().product::<usize>() * words.dtype().size();
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::training::optimizer::AdamWInF32;
    use burn::{
        optim::{GradientsParams, ModuleOptimizer, SgdConfig},
        tensor::TensorData,
    };
    use burn_gemma4::update::AdamW;

    fn adamw() -> ModuleOptimizer {
        ModuleOptimizer::from(AdamWInF32(AdamW {
            betas: [0.9, 0.999],
            epsilon: 1e-5,
            decay: 0.5,
        }))
    }

    fn parameter<const D: usize>(data: impl Into<TensorData>, dtype: DType) -> Param<Tensor<D>> {
        let tensor = Tensor::<D>::from_data(data, (&Device::flex(), DType::F32));
        Param::from_tensor(tensor.cast(dtype).autodiff().require_grad())
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    fn gradient<const D: usize>(of: &Param<Tensor<D>>, value: f32) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        let like = of.val().inner();
        gradients.register(of.id, like.zeros_like() + value);
        gradients
    }

    /// A thousand updates of a 65,536th of the weight are a 65th of it.
    #[test]
    fn small_updates_of_halves_add_up() {
        for dtype in [DType::BF16, DType::F16] {
            let sgd = SgdConfig::new().build();
            let mut optimizer = ModuleOptimizer::from(InF32(sgd));
            let mut weight = parameter::<1>([1.0], dtype);
            for _ in 0..1000 {
                let gradients = gradient(&weight, 1.0);
                weight = optimizer.step(2.0f64.powi(-16), weight, gradients);
            }
            assert_eq!(weight.val().dtype(), dtype);
            let found = values(weight.val())[0];
            let expected = 1.0 - 1000.0 * 2.0f32.powi(-16);
            assert!((found - expected).abs() < 4e-3, "{dtype:?}: {found}");
        }
    }

    #[test]
    fn norms_and_scales_do_not_decay() {
        let mut optimizer = adamw();
        let vector = parameter::<1>([3.0, 4.0], DType::F32);
        let gradients = gradient(&vector, 0.0);
        let vector = optimizer.step(0.1, vector, gradients);
        assert_eq!(values(vector.val()), [3.0, 4.0]);
        let matrix = parameter::<2>([[3.0, 4.0]], DType::F32);
        let gradients = gradient(&matrix, 0.0);
        let matrix = optimizer.step(0.1, matrix, gradients);
        for (found, expected) in values(matrix.val()).into_iter().zip([2.85f32, 3.8]) {
            assert!((found - expected).abs() < 1e-6, "{found}");
        }
    }

    #[test]
    fn a_record_has_the_masters() {
        let mut optimizer = adamw();
        let mut weight = parameter::<1>([1.0, -3.0, 0.5], DType::BF16);
        let step = |optimizer: &mut ModuleOptimizer, weight: Param<Tensor<1>>| {
            let gradients = gradient(&weight, 0.25);
            optimizer.step(1e-4, weight, gradients)
        };
        for _ in 0..3 {
            weight = step(&mut optimizer, weight);
        }
        let mut restored = adamw().load_record(optimizer.to_record());
        let mut again = weight.clone();
        for _ in 0..60 {
            weight = step(&mut optimizer, weight);
            again = step(&mut restored, again);
        }
        assert_eq!(values(weight.val()), values(again.val()));
    }
}
