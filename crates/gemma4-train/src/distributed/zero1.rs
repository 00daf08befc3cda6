//! Shards the optimizer's state among processes (ZeRO's first stage, Rajbhandari et al. 2020, arXiv:1910.02054). Each
//! process keeps the optimizer state of some parameters, updates these parameters, and sends them to all other
//! processes. ZeRO's second stage would save no memory here, because Burn's backward pass returns all gradients at
//! once.

use crate::distributed::ProcessGroup;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::Tensor,
};
use std::{cmp::Reverse, collections::HashMap};

/// A map from each parameter to its owner, the process that keeps the optimizer state of the parameter.
pub(super) struct Owners(HashMap<ParamId, usize>);

impl Owners {
    /// Assigns the parameters of `model` to processes, so that all processes own about the same number of elements.
    pub(super) fn of(model: &impl Module, processes: usize) -> Self {
        let mut sizes = Sizes(Vec::new());
        model.visit(&mut sizes);
        let Sizes(mut sizes) = sizes;
        // The sort is stable, so all processes compute the same owners.
        sizes.sort_by_key(|(_, size)| Reverse(*size));
        let mut loads = vec![0; processes];
        let mut owners = HashMap::new();
        for (id, size) in sizes {
            let lightest = (0..processes).min_by_key(|process| loads[*process]);
            let owner = lightest.unwrap_or(0);
            loads[owner] += size;
            owners.insert(id, owner);
        }
        Self(owners)
    }

    /// True if the process owns the parameter.
    pub(super) fn has(&self, process: usize, id: ParamId) -> bool {
        self.0.get(&id) == Some(&process)
    }
}

/// A visitor that collects the trained parameters, each with its number of elements, in the order of the model.
struct Sizes(Vec<(ParamId, usize)>);

impl ModuleVisitor for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.base().is_require_grad() {
            self.0
                .push((param.id, param.base().dims().iter().product()));
        }
    }
}

impl ProcessGroup {
    /// Returns the gradients of the parameters that this process owns.
    pub fn own_gradients(
        &self,
        mut gradients: GradientsParams,
        model: &impl Module,
    ) -> GradientsParams {
        let mut own = OwnGradients {
            owners: Owners::of(model, self.rank.size),
            process: self.rank.global,
            all: &mut gradients,
            own: GradientsParams::new(),
        };
        model.visit(&mut own);
        own.own
    }
}

struct OwnGradients<'a> {
    owners: Owners,
    process: usize,
    all: &'a mut GradientsParams,
    own: GradientsParams,
}

impl ModuleVisitor for OwnGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.all.remove::<D>(param.id);
        if let Some(gradient) = gradient.filter(|_| self.owners.has(self.process, param.id)) {
            self.own.register(param.id, gradient);
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn owners_of_parameters_are_unique_and_balanced() {
        let device = Device::flex().autodiff();
        let parameter = |size: usize| {
            let tensor = Tensor::<1>::zeros([size], &device);
            Param::from_tensor(tensor.require_grad())
        };
        let model: Vec<_> = [3, 10, 4, 1, 2].map(parameter).into();
        let owners = Owners::of(&model, 2);
        let own = |process| {
            let own = model.iter().filter(|param| owners.has(process, param.id));
            own.map(|param| param.base().dims()[0]).collect::<Vec<_>>()
        };
        assert_eq!([own(0), own(1)], [vec![10], vec![3, 4, 1, 2]]);
        // With 9 processes and 5 parameters, some processes own no parameter, but every parameter must have an owner.
        let owners = Owners::of(&model, 9);
        assert!(
            model
                .iter()
                .all(|param| (0..9).any(|process| owners.has(process, param.id)))
        );
    }
}
