//! Broadcasts model parameters from one process to all processes.

use crate::{
    Error,
    distributed::{
        ProcessGroup,
        buckets::{BUCKET, sum_in_buckets},
        zero1::Owners,
    },
    optim::gradients::leaf,
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor},
};

impl ProcessGroup {
    /// Returns a copy of `model` on `device` with the trained parameters and the parameter identifiers of the first
    /// process. Parameters are broadcast because random initial values may differ between devices. Identifiers are
    /// broadcast because the optimizer's records refer to parameters by identifier. The group must be
    /// [`connect`](Self::connect)ed.
    ///
    /// # Errors
    /// Returns an error if a process is gone, or if a process has another model.
    pub fn broadcast_model<M: Module>(&self, model: M, device: &Device) -> Result<M, Error> {
        if !self.has_others() {
            return Ok(model);
        }
        let mut own = Identifiers(Vec::new());
        model.visit(&mut own);
        let of_first = self.broadcast_text(|| Ok(serde_json::to_string(&own.0)?))?;
        let of_first: Vec<u64> = serde_json::from_str(&of_first)?;
        if of_first.len() != own.0.len() {
            return Err("the first process has another number of parameters; expected the same model in every process".into());
        }
        let model = model.map(&mut Renamed(of_first.into_iter()));
        let is_first = self.rank.is_first();
        Ok(self.broadcast_from(model, device, |_| is_first))
    }

    /// Returns the model on `device` with the newest value of every parameter. Each process has updated only its own
    /// shard of the parameters, and broadcasts this shard to the other processes.
    pub fn gather_updated<M: Module>(&self, model: M, device: &Device) -> M {
        let owners = Owners::of(&model, self.rank.size);
        self.broadcast_from(model, device, |id| owners.has(self.rank.global, id))
    }

    /// Broadcasts each trained parameter from the one process in which `counts` returns true for the parameter. Returns the
    /// model with the received parameters. The broadcast is a sum, to which all other processes add zeros.
    fn broadcast_from<M: Module>(
        &self,
        model: M,
        device: &Device,
        counts: impl Fn(ParamId) -> bool,
    ) -> M {
        let mut own = Own {
            counts,
            values: GradientsParams::new(),
        };
        model.visit(&mut own);
        let no_loss = Tensor::zeros([1], (&device.clone().without_autodiff(), DType::F32));
        let sum = |bucket| self.sum(bucket);
        let (_, values) = sum_in_buckets(no_loss, own.values, &model, BUCKET, sum);
        model.map(&mut Received(values))
    }
}

/// A visitor that collects the identifiers of all float parameters, in the order of the model.
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

/// A visitor that collects what this process adds to the sum of each parameter: the parameter's value if `counts` returns
/// true, and otherwise zeros.
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
