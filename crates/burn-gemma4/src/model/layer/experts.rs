//! The mixture of experts: each token goes through the few small networks that its router chooses.

use super::{Linear, RmsNorm, Weight, constant};
#[cfg(feature = "cube")]
use crate::op::{
    linear::grouped::{self, Groups},
    route::{self, Choice, RouterWeights},
};
use crate::{
    Gemma4Config,
    config::ExpertsConfig,
    op::{gate::gated, linear, norm::normalize},
};
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Int, Tensor, TensorData, activation::softmax},
};

/// The parts of a layer's mixture of experts.
#[derive(Clone, Copy)]
pub(crate) struct Mixture<'a> {
    pub router: &'a Router,
    pub experts: &'a Experts,
    /// Before the experts, not before the router.
    pub norm: &'a RmsNorm,
}

/// Chooses experts.
#[derive(Module, Debug)]
pub struct Router {
    /// `[experts, hidden]`.
    pub proj: Linear,
    /// `[hidden]`: of the normalised input.
    pub scale: Param<Tensor<1>>,
    /// `[experts]`: of what an expert contributes.
    pub per_expert_scale: Param<Tensor<1>>,
    #[module(skip)]
    top_k: usize,
    #[module(skip)]
    epsilon: f64,
}

/// Which experts each row goes through.
#[derive(Clone, Debug)]
pub struct Routing {
    /// `[rows, experts]` in f32.
    pub probabilities: Tensor<2>,
    /// `[rows, top_k]`, the most probable first.
    pub experts: Tensor<2, Int>,
    /// `[rows, top_k]` in f32: what each contributes.
    pub weights: Tensor<2>,
}

impl Router {
    pub(crate) fn new(config: &Gemma4Config, experts: &ExpertsConfig, device: &Device) -> Self {
        Self {
            proj: Linear::new(
                config.hidden_size,
                experts.num_experts,
                config.initializer_range,
                device,
            ),
            scale: constant(1.0, [config.hidden_size], device),
            per_expert_scale: constant(1.0, [experts.num_experts], device),
            top_k: experts.top_k_experts,
            epsilon: config.rms_norm_eps,
        }
    }

    /// Chooses for each row of `[rows, hidden]`: on the device where kernels serve, else on the host.
    pub fn forward(&self, input: Tensor<2>) -> Routing {
        let [rows, hidden] = input.dims();
        // All in f32: rounding decides between experts whose probabilities are close.
        let scale = self.scale.val().cast(DType::F32).unsqueeze::<2>();
        let scaled =
            normalize(input.cast(DType::F32), self.epsilon) * scale * (hidden as f64).powf(-0.5);
        let logits = linear::rows(scaled, self.proj.weight.val().cast(DType::F32));
        let probabilities = softmax(logits, 1);

        let experts = self.most_probable(&probabilities);
        let weights = probabilities.clone().gather(1, experts.clone());
        // The gradient of a choice among rows is a sum of rows, of a choice among numbers one unit's work.
        let scales = self.per_expert_scale.val().cast(DType::F32);
        let [count] = scales.dims();
        let scales = scales.unsqueeze::<2>().expand([rows, count]);
        let scales = scales.gather(1, experts.clone());
        let weights = weights.clone() / weights.sum_dim(1) * scales;
        Routing {
            probabilities,
            experts,
            weights,
        }
    }

    /// The same choice for a few rows, by one kernel.
    #[cfg(feature = "cube")]
    pub(crate) fn choice(&self, input: Tensor<2>) -> Choice {
        let dtype = input.dtype();
        let weights = RouterWeights {
            proj: self.proj.weight.val().cast(dtype),
            scale: self.scale.val(),
            per_expert_scale: self.per_expert_scale.val(),
        };
        route::route(input, weights, self.top_k, self.epsilon)
    }

    /// The most probable experts of each row, `[rows, top_k]`; of equally probable ones those of smaller numbers.
    fn most_probable(&self, probabilities: &Tensor<2>) -> Tensor<2, Int> {
        #[cfg(feature = "cube")]
        if let Some(chosen) = route::choose(probabilities, self.top_k) {
            return chosen;
        }
        let [rows, experts] = probabilities.dims();
        let values = probabilities.clone().detach().into_data();
        let values: Vec<f32> = values.iter::<f32>().collect();
        let mut chosen: Vec<i32> = Vec::with_capacity(rows * self.top_k);
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        for row in values.chunks(experts) {
            order.clear();
            order.extend(0..experts);
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            chosen.extend(order[..self.top_k].iter().map(|expert| *expert as i32));
        }
        let chosen = TensorData::new(chosen, [rows, self.top_k]);
        Tensor::from_data(chosen, &probabilities.device())
    }
}

/// The experts' weights, stacked.
#[derive(Module, Debug)]
pub struct Experts {
    /// `[experts, 2 · intermediate, hidden]`: what opens the gates, then what goes through them.
    pub gate_up_proj: Weight<3>,
    /// `[experts, hidden, intermediate]`.
    pub down_proj: Weight<3>,
}

impl Experts {
    pub(crate) fn new(config: &Gemma4Config, experts: &ExpertsConfig, device: &Device) -> Self {
        let (hidden, inner) = (config.hidden_size, experts.moe_intermediate_size);
        let deviation = config.initializer_range;
        Self {
            gate_up_proj: Weight::random(
                [experts.num_experts, 2 * inner, hidden],
                deviation,
                device,
            ),
            down_proj: Weight::random([experts.num_experts, hidden, inner], deviation, device),
        }
    }

    /// The weighted sum of what the chosen experts make of each row of `[rows, hidden]`.
    pub fn forward(&self, input: Tensor<2>, routing: &Routing) -> Tensor<2> {
        let [rows, hidden] = input.dims();
        if rows == 0 {
            return input;
        }
        let dtype = input.dtype();
        let [_, top_k] = routing.experts.dims();
        let weights = routing.weights.clone().reshape([rows, top_k, 1]);
        let outputs = self.outputs(input, &routing.experts);
        let outputs = outputs.reshape([rows, top_k, hidden]);
        (outputs.cast(DType::F32) * weights)
            .sum_dim(1)
            .reshape([rows, hidden])
            .cast(dtype)
    }

    /// What each row's experts make of it, `[rows · top_k, hidden]`, one row after the other.
    fn outputs(&self, input: Tensor<2>, chosen: &Tensor<2, Int>) -> Tensor<2> {
        #[cfg(feature = "cube")]
        if grouped::serves(&input) {
            let [_, top_k] = chosen.dims();
            let groups = grouped::groups(chosen, self.count());
            return self.outputs_of_groups(input, &groups, top_k);
        }
        self.outputs_by_host(input, chosen)
    }

    #[cfg(feature = "cube")]
    fn outputs_of_groups(&self, input: Tensor<2>, groups: &Groups, top_k: usize) -> Tensor<2> {
        let inner = grouped::rows(input, self.gate_up_proj.matrices(), groups, top_k);
        grouped::rows(through_gates(inner), self.down_proj.matrices(), groups, 1)
    }

    /// Rows are brought into the order of their experts, so that each expert reads its weights once.
    fn outputs_by_host(&self, input: Tensor<2>, chosen: &Tensor<2, Int>) -> Tensor<2> {
        let device = input.device();
        let [_, top_k] = chosen.dims();
        let chosen: Vec<i64> = chosen.clone().into_data().iter::<i64>().collect();

        // A place is one choice of one row: `row · top_k + rank`.
        let mut places: Vec<usize> = (0..chosen.len()).collect();
        places.sort_by_key(|place| chosen[*place]);
        let mut back = vec![0; places.len()];
        for (sorted, place) in places.iter().enumerate() {
            back[*place] = sorted as i32;
        }
        let upload = |indices: Vec<i32>| {
            let count = indices.len();
            Tensor::<1, Int>::from_data(TensorData::new(indices, [count]), &device)
        };
        let row_of_place = upload(places.iter().map(|place| (place / top_k) as i32).collect());
        let sorted = input.select(0, row_of_place);

        let mut outputs = Vec::new();
        let mut start = 0;
        for run in places.chunk_by(|a, b| chosen[*a] == chosen[*b]) {
            let expert = chosen[run[0]] as usize;
            let input = sorted.clone().narrow(0, start, run.len());
            let inner = linear::rows(input, self.gate_up_proj.matrix(expert));
            outputs.push(linear::rows(
                through_gates(inner),
                self.down_proj.matrix(expert),
            ));
            start += run.len();
        }
        Tensor::cat(outputs, 0).select(0, upload(back))
    }

    #[cfg(feature = "cube")]
    fn count(&self) -> usize {
        let [count, _, _] = self.down_proj.dims();
        count
    }
}

/// What goes through the gates of `[rows, 2 · columns]`, whose first half opens them.
fn through_gates(inner: Tensor<2>) -> Tensor<2> {
    let columns = inner.dims()[1] / 2;
    let gate = inner.clone().narrow(1, 0, columns);
    gated(gate, inner.narrow(1, columns, columns))
}
