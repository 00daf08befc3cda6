//! Master weights in f32 for weights in half precision.
//!
//! A weight in bf16 has 8 significant bits, so an update of less than a 512th of the weight is rounded away. Most
//! updates of fine-tuning are that small. So the optimizer updates weights in f32, and rounds copies of them to the
//! model's dtype with [`rounded`] (Micikevicius et al. 2018, arXiv:1710.03740). The optimizer's moments are in f32,
//! too.

use crate::{
    args::OptimizerName,
    optim::{factor, gradients::leaf},
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource, join_path},
    tensor::{DType, Device, Int, Tensor},
};
use burn_gemma4::update::rounded;
use std::fmt;

/// An optimizer that computes in f32 for weights of any dtype.
#[derive(Clone)]
pub struct InF32<O>(pub O);

/// The optimizer state of a parameter.
#[derive(Clone)]
pub struct MasterState<S, const D: usize> {
    /// The master weight in f32, or `None` if the model's own parameter is in f32.
    pub(super) master: Option<Tensor<D>>,
    /// The state of the inner optimizer.
    pub(super) inner: Option<S>,
}

impl<S, const D: usize> MasterState<S, D> {
    /// Returns this state, moved to another device. `move_inner` moves the state of the inner optimizer.
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
        // A factor of 0 means that the step is skipped. A mask sets the gradient to 0, because 0 times NaN is NaN.
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

/// The names of the fields of [`MasterState`] in a record.
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

/// Returns the model with its weights cast to another dtype.
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
        // Autodiff is removed before the cast. Otherwise the cast would become a part of the model's autodiff graph.
        let cast = tensor.clone().without_autodiff().cast(self.0);
        Param::from_mapped_value(id, leaf(cast, &tensor), mapper)
    }
}

/// The number of trained parameters, and the memory in bytes that training needs for each purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The number of trained parameters.
    pub parameters: usize,
    /// The number of trained parameters that are in half precision.
    pub halves: usize,
    /// Bytes of the model's weights, including frozen ones.
    pub weights: usize,
    /// Bytes of the f32 master weights.
    pub masters: usize,
    /// Bytes of the optimizer's moments.
    pub moments: usize,
    /// Bytes of the gradients at the end of a step.
    pub gradients: usize,
}

impl Memory {
    /// Returns the memory that training `model` needs. If `gradients_in_f32` is false, each gradient has the dtype of its
    /// weight.
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
    /// Returns the memory per process if the optimizer's state is divided into `parts` shards of about equal size. The
    /// master weights are a part of this state.
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
    /// The number of bytes of all weights.
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

    /// Adds the bytes of quantized weights, which are packed integers.
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let words = param.val();
        self.weights += words.dims().iter().product::<usize>() * words.dtype().size();
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::optim::optimizer::AdamWInF32;
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

    /// Checks that small updates are not rounded away. A thousand updates by 1/65536 change the weight from 1 to about
    /// 0.985. Without master weights, rounding to bf16 or f16 would discard each single update.
    #[test]
    fn small_updates_in_half_precision_accumulate() {
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
    fn optimizer_record_contains_the_master_weights() {
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
