//! The first process's parameters in all of them: random numbers may differ from one device to another.

use super::World;
use crate::training::{
    buckets::{BUCKET, exchange},
    gradients::leaf,
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor},
};

impl World {
    /// A model on `device` with the trained parameters of the first process. Once [`connect`](Self::connect)ed.
    pub fn of_first_process<M: Module>(&self, model: M, device: &Device) -> M {
        if !self.has_others() {
            return model;
        }
        let mut own = Own {
            counts: self.place.is_first(),
            values: GradientsParams::new(),
        };
        model.visit(&mut own);
        let no_loss = Tensor::zeros([1], (&device.clone().without_autodiff(), DType::F32));
        let sum = |bucket| self.sum(bucket);
        let (_, values) = exchange(no_loss, own.values, &model, BUCKET, sum);
        model.map(&mut Received(values))
    }
}

/// What a process adds: its values, or zeros.
struct Own {
    counts: bool,
    values: GradientsParams,
}

impl ModuleVisitor for Own {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        if !tensor.is_require_grad() {
            return;
        }
        let value = match self.counts {
            true => tensor.without_autodiff(),
            false => tensor.without_autodiff().zeros_like(),
        };
        self.values.register(param.id, value);
    }
}

struct Received(GradientsParams);

impl ModuleMapper for Received {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.0.remove::<D>(id) {
            Some(value) => leaf(value, &tensor),
            None => tensor,
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
