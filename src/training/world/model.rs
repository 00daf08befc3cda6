//! Parameters that one process sends to all.

use super::{World, shards::Owners};
use crate::{
    Error,
    training::{
        buckets::{BUCKET, exchange},
        gradients::leaf,
    },
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor},
};

impl World {
    /// A model on `device` with the trained parameters of the first process, since random numbers may differ from one device to
    /// another, and with its identifiers, by which records of the optimizer know parameters. Once [`connect`](Self::connect)ed.
    ///
    /// # Errors
    /// Where a process is gone, or has another model.
    pub fn of_first_process<M: Module>(&self, model: M, device: &Device) -> Result<M, Error> {
        if !self.has_others() {
            return Ok(model);
        }
        let mut own = Identifiers(Vec::new());
        model.visit(&mut own);
        let of_first = self.text_of_first(|| Ok(serde_json::to_string(&own.0)?))?;
        let of_first: Vec<u64> = serde_json::from_str(&of_first)?;
        if of_first.len() != own.0.len() {
            return Err("the first process has another model".into());
        }
        let model = model.map(&mut Renamed(of_first.into_iter()));
        let is_first = self.place.is_first();
        Ok(self.of_whom(model, device, |_| is_first))
    }

    /// A model on `device` with parameters that each process has updated a part of.
    pub fn of_owners<M: Module>(&self, model: M, device: &Device) -> M {
        let owners = Owners::of(&model, self.place.size);
        self.of_whom(model, device, |id| owners.has(self.place.rank, id))
    }

    /// With trained parameters from where they count: the others add zeros.
    fn of_whom<M: Module>(&self, model: M, device: &Device, counts: impl Fn(ParamId) -> bool) -> M {
        let mut own = Own {
            counts,
            values: GradientsParams::new(),
        };
        model.visit(&mut own);
        let no_loss = Tensor::zeros([1], (&device.clone().without_autodiff(), DType::F32));
        let sum = |bucket| self.sum(bucket);
        let (_, values) = exchange(no_loss, own.values, &model, BUCKET, sum);
        model.map(&mut Received(values))
    }
}

/// Of all parameters of floats, in the order of the model.
struct Identifiers(Vec<u64>);

impl ModuleVisitor for Identifiers {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.id.val());
    }
}

struct Renamed<I>(I);

impl<I: Iterator<Item = u64>> ModuleMapper for Renamed<I> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (own, tensor, mapper) = param.consume();
        let id = self.0.next().map_or(own, ParamId::from);
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// What a process adds: its values, or zeros.
struct Own<C> {
    counts: C,
    values: GradientsParams,
}

impl<C: Fn(ParamId) -> bool> ModuleVisitor for Own<C> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        if !tensor.is_require_grad() {
            return;
        }
        let value = match (self.counts)(param.id) {
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
