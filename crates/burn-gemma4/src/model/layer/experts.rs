//! The mixture of experts (MoE). A router chooses several experts per token, and only these experts process the token.

use super::{Linear, RmsNorm, Weight, constant};
use crate::config::ExpertsConfig;
use crate::config::Gemma4Config;
use crate::op::geglu::gated;
#[cfg(feature = "cube")]
use crate::op::gemv::Origin;
use crate::op::linear;
#[cfg(feature = "cube")]
use crate::op::moe_gemm::Groups;
#[cfg(feature = "cube")]
use crate::op::moe_router::{Choice, RouteOptions, RouterWeights};
use crate::op::norm::normalize;
#[cfg(feature = "cube")]
use crate::op::{moe_gemm, moe_router};
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Int, Tensor, TensorData, activation::softmax},
};

/// The modules of a layer's mixture of experts.
#[derive(Clone, Copy)]
pub(crate) struct Mixture<'a> {
    pub router: &'a Router,
    pub experts: &'a Experts,
    /// The norm of the experts' input. The router reads the same input without this norm.
    pub norm: &'a RmsNorm,
}

/// The MoE router.
#[derive(Module, Debug)]
pub struct Router {
    /// The router's projection, `[experts, hidden]`.
    pub proj: Linear,
    /// The scale of each channel of the router's normalized input, `[hidden]`.
    pub scale: Param<Tensor<1>>,
    /// The factor of each expert, `[experts]`. The factor multiplies the expert's weight in the weighted sum of the
    /// experts' outputs.
    pub per_expert_scale: Param<Tensor<1>>,
    #[module(skip)]
    top_k: usize,
    #[module(skip)]
    epsilon: f64,
}

/// The experts that the router chose for each row.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The router's probabilities in f32, `[rows, experts]`.
    pub probabilities: Tensor<2>,
    /// The indices of the chosen experts, `[rows, top_k]`, the most probable first.
    pub experts: Tensor<2, Int>,
    /// The weights of the chosen experts in the weighted sum of their outputs, in f32, `[rows, top_k]`.
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

    /// Chooses the experts of each row. The top-k runs on the device if a kernel supports it, otherwise on the host.
    ///
    /// # Shapes
    /// `input` is `[rows, hidden]`.
    pub fn forward(&self, input: Tensor<2>) -> Routing {
        let [rows, hidden] = input.dims();
        // Compute in f32, because rounding errors of a lower precision would decide between experts of similar
        // probability.
        let scale = self.scale.val().cast(DType::F32).unsqueeze::<2>();
        let scaled =
            normalize(input.cast(DType::F32), self.epsilon) * scale * (hidden as f64).powf(-0.5);
        let logits = linear::rows(scaled, self.proj.weight.val().cast(DType::F32));
        let probabilities = softmax(logits, 1);

        let experts = self.most_probable(&probabilities);
        let weights = probabilities.clone().gather(1, experts.clone());
        // Expand the scales to all rows before the gather, because the gradient of a gather from a single vector would
        // run on a single thread.
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

    /// Chooses the experts of a few rows in one or two kernels. Unlike [`forward`](Self::forward), this method does not
    /// return the probabilities.
    #[cfg(feature = "cube")]
    pub(crate) fn choice(&self, input: Tensor<2>) -> Choice {
        let dtype = input.dtype();
        let proj = self.proj.weight.val();
        let options = RouteOptions {
            top_k: self.top_k,
            epsilon: self.epsilon,
            origin: match proj.dtype() == dtype {
                true => Origin::Parameters,
                false => Origin::Computed,
            },
        };
        let weights = RouterWeights {
            proj: proj.cast(dtype),
            scale: self.scale.val(),
            per_expert_scale: self.per_expert_scale.val(),
        };
        moe_router::route(input, weights, options)
    }

    /// Chooses the experts of any number of rows with the kernels of [`choice`](Self::choice). Returns `None` if the
    /// device, the dtypes or the number of experts do not suit the kernels. The caller must then use
    /// [`forward`](Self::forward).
    #[cfg(feature = "cuda")]
    pub(crate) fn choice_of_rows(&self, input: &Tensor<2>) -> Option<Choice> {
        let (device, dtype) = (input.device(), input.dtype());
        let [experts] = self.per_expert_scale.dims();
        let serves = linear::on_tensor_cores(&device, dtype)
            && input.dims()[0] > 0
            && !device.is_autodiff()
            && moe_router::chooses(experts)
            && self.scale.val().dtype() == dtype
            && self.per_expert_scale.val().dtype() == dtype;
        serves.then(|| self.choice(input.clone()))
    }

    /// Returns the indices of the `top_k` most probable experts of each row, `[rows, top_k]`. On ties the lower index
    /// comes first.
    fn most_probable(&self, probabilities: &Tensor<2>) -> Tensor<2, Int> {
        #[cfg(feature = "cube")]
        if let Some(chosen) = moe_router::choose(probabilities, self.top_k) {
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

/// The stacked weights of all experts.
#[derive(Module, Debug)]
pub struct Experts {
    /// The gate and up projections, `[experts, 2 · intermediate, hidden]`, the gate first.
    pub gate_up_proj: Weight<3>,
    /// The down projections, `[experts, hidden, intermediate]`.
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

    /// Runs the chosen experts on each row, and returns the weighted sum of their outputs.
    ///
    /// # Shapes
    /// `input` and the result are `[rows, hidden]`.
    pub fn forward(&self, input: Tensor<2>, routing: &Routing) -> Tensor<2> {
        self.mix(input, &routing.experts, &routing.weights)
    }

    /// Runs each row's experts `chosen`, `[rows, top_k]`, and returns the weighted sum of their outputs. `weights`,
    /// `[rows, top_k]`, are the weights of this sum.
    pub(crate) fn mix(
        &self,
        input: Tensor<2>,
        chosen: &Tensor<2, Int>,
        weights: &Tensor<2>,
    ) -> Tensor<2> {
        let [rows, hidden] = input.dims();
        if rows == 0 {
            return input;
        }
        #[cfg(feature = "cuda")]
        if let Some(mixed) = moe_gemm::mixture(
            &input,
            [self.gate_up_proj.matrices(), self.down_proj.matrices()],
            chosen,
            weights,
        ) {
            return mixed;
        }
        let dtype = input.dtype();
        let [_, top_k] = chosen.dims();
        let weights = weights.clone().reshape([rows, top_k, 1]);
        let outputs = self.outputs(input, chosen);
        let outputs = outputs.reshape([rows, top_k, hidden]);
        (outputs.cast(DType::F32) * weights)
            .sum_dim(1)
            .reshape([rows, hidden])
            .cast(dtype)
    }

    /// Returns the outputs of each row's chosen experts, `[rows · top_k, hidden]`, row by row.
    fn outputs(&self, input: Tensor<2>, chosen: &Tensor<2, Int>) -> Tensor<2> {
        #[cfg(feature = "cube")]
        if moe_gemm::serves(&input) {
            let [_, top_k] = chosen.dims();
            let groups = moe_gemm::groups(chosen, self.count());
            return self.outputs_of_groups(input, &groups, top_k);
        }
        self.outputs_by_host(input, chosen)
    }

    #[cfg(feature = "cube")]
    fn outputs_of_groups(&self, input: Tensor<2>, groups: &Groups, top_k: usize) -> Tensor<2> {
        let inner = moe_gemm::rows(input, self.gate_up_proj.matrices(), groups, top_k);
        moe_gemm::rows(through_gates(inner), self.down_proj.matrices(), groups, 1)
    }

    /// Computes [`outputs`](Self::outputs) with one matmul per expert, so that each expert's weights are read only once.
    fn outputs_by_host(&self, input: Tensor<2>, chosen: &Tensor<2, Int>) -> Tensor<2> {
        let device = input.device();
        let [_, top_k] = chosen.dims();
        let chosen: Vec<i64> = chosen.clone().into_data().iter::<i64>().collect();

        // Sort the (row, chosen expert) pairs by expert. Pair `row · top_k + rank` is the `rank`-th expert of the row.
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

/// Computes GeGLU of `[rows, 2 · columns]`. The first half of the columns is the gate.
fn through_gates(inner: Tensor<2>) -> Tensor<2> {
    let columns = inner.dims()[1] / 2;
    let gate = inner.clone().narrow(1, 0, columns);
    gated(gate, inner.narrow(1, columns, columns))
}
