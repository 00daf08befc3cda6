//! The mixture of experts: each token goes through the few small networks that its router chooses.

use super::{Linear, Weight, constant};
use crate::{
    Gemma4Config,
    config::ExpertsConfig,
    op::{gelu::gelu, linear, norm::normalize},
};
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Int, Tensor, TensorData, activation::softmax},
};

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
    /// The same experts, on the host.
    chosen: Vec<usize>,
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

    /// Chooses for each row of `[rows, hidden]`. Reads the probabilities back to the host.
    pub fn forward(&self, input: Tensor<2>) -> Routing {
        let [rows, hidden] = input.dims();
        // All in f32: rounding decides between experts whose probabilities are close.
        let scale = self.scale.val().cast(DType::F32).unsqueeze::<2>();
        let scaled =
            normalize(input.cast(DType::F32), self.epsilon) * scale * (hidden as f64).powf(-0.5);
        let logits = linear::rows(scaled, self.proj.weight.val().cast(DType::F32));
        let probabilities = softmax(logits, 1);

        let chosen = self.choose(probabilities.clone().detach().into_data());
        let indices: Vec<i32> = chosen.iter().map(|expert| *expert as i32).collect();
        let experts = Tensor::<2, Int>::from_data(
            TensorData::new(indices, [rows, self.top_k]),
            &probabilities.device(),
        );
        let weights = probabilities.clone().gather(1, experts.clone());
        let scales = self
            .per_expert_scale
            .val()
            .cast(DType::F32)
            .select(0, experts.clone().reshape([rows * self.top_k]))
            .reshape([rows, self.top_k]);
        let weights = weights.clone() / weights.sum_dim(1) * scales;
        Routing {
            probabilities,
            experts,
            weights,
            chosen,
        }
    }

    /// The most probable experts of each row, one row after the other.
    fn choose(&self, probabilities: TensorData) -> Vec<usize> {
        let experts = probabilities.shape()[1];
        let probabilities: Vec<f32> = probabilities.iter::<f32>().collect();
        let mut chosen = Vec::with_capacity(probabilities.len() / experts * self.top_k);
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        for row in probabilities.chunks(experts) {
            order.clear();
            order.extend(0..experts);
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            chosen.extend(&order[..self.top_k]);
        }
        chosen
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
    ///
    /// Rows are brought into the order of their experts, so that each expert reads its weights once.
    pub fn forward(&self, input: Tensor<2>, routing: &Routing) -> Tensor<2> {
        let [rows, hidden] = input.dims();
        if rows == 0 {
            return input;
        }
        let (dtype, device) = (input.dtype(), input.device());
        let top_k = routing.chosen.len() / rows;

        // A place is one choice of one row: `row · top_k + rank`.
        let mut places: Vec<usize> = (0..routing.chosen.len()).collect();
        places.sort_by_key(|place| routing.chosen[*place]);
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
        for run in places.chunk_by(|a, b| routing.chosen[*a] == routing.chosen[*b]) {
            let expert = routing.chosen[run[0]];
            let input = sorted.clone().narrow(0, start, run.len());
            let inner = linear::rows(input, self.gate_up_proj.matrix(expert));
            let columns = inner.dims()[1] / 2;
            let gate = gelu(inner.clone().narrow(1, 0, columns));
            let up = inner.narrow(1, columns, columns);
            outputs.push(linear::rows(gate * up, self.down_proj.matrix(expert)));
            start += run.len();
        }

        let weights = routing.weights.clone().reshape([rows, top_k, 1]);
        let outputs = Tensor::cat(outputs, 0)
            .select(0, upload(back))
            .reshape([rows, top_k, hidden]);
        (outputs.cast(DType::F32) * weights)
            .sum_dim(1)
            .reshape([rows, hidden])
            .cast(dtype)
    }
}
