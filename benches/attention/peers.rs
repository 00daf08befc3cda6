//! The implementations of attention that the benchmark compares, here called peers.

use attention_cube::{
    AttentionProblem, quantized::try_quantized_attention, reference, try_fused_attention,
};
use attention_workspace::{
    Error,
    accuracy::Triple,
    workload::{Inputs, Workload},
};
use burn::tensor::{Bool, Tensor, TensorData, module, ops::AttentionModuleOptions};

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Peer {
    /// `attention_cube::fused_attention`.
    Ours,
    /// `burn::tensor::module::attention`.
    Burn,
    /// `attention_cube::reference::attention`, which computes GEMMs and softmax as separate operators.
    Composed,
}

impl Peer {
    pub const ALL: [Self; 3] = [Self::Ours, Self::Burn, Self::Composed];
}

/// An implementation of attention, with the inputs in the form that this implementation accepts.
pub struct Prepared<'a> {
    peer: Peer,
    workload: &'a Workload,
    pub inputs: Inputs,
    /// The mask tensor, which is true for hidden keys, or `None` if the implementation needs no mask tensor.
    hidden: Option<Tensor<4, Bool>>,
    /// A note on how the inputs were converted for this implementation, or `None` without a conversion. The timing
    /// excludes the conversion.
    pub note: Option<String>,
}

impl<'a> Prepared<'a> {
    pub fn new(
        peer: Peer,
        workload: &'a Workload,
        inputs: &Inputs,
        problem: &AttentionProblem,
    ) -> Self {
        let mut prepared = Self {
            peer,
            workload,
            inputs: inputs.clone(),
            hidden: None,
            note: None,
        };
        if peer != Peer::Burn {
            return prepared;
        }
        let mut notes = Vec::new();
        let group = problem.group();
        if group > 1 {
            prepared.inputs.key = repeated(&inputs.key, group);
            prepared.inputs.value = repeated(&inputs.value, group);
            notes.push(format!("keys and values repeated {group} times beforehand"));
        }
        if workload.window.is_some() {
            prepared.hidden = Some(hidden(problem, inputs));
            notes.push("window as a mask".into());
        }
        if let Some(mask) = &inputs.mask {
            prepared.hidden = Some(mask.clone().bool_not().expand(scores(problem)));
        }
        if let Some(bias) = &inputs.bias {
            prepared.inputs.bias = Some(bias.clone().expand(scores(problem)));
        }
        prepared.note = (!notes.is_empty()).then(|| notes.join(", "));
        prepared
    }

    /// Estimates the bytes that a pass of [`Peer::Burn`] or [`Peer::Composed`] allocates beyond its inputs and outputs.
    /// Both peers store all scores.
    pub fn memory(workload: &Workload, backward: bool) -> f64 {
        // The forward stores the scores, the probabilities and a temporary of the same size. For the backward, autodiff
        // keeps every result, which doubles the memory.
        workload.score_bytes() * if backward { 6.0 } else { 3.0 }
    }

    pub fn forward(&self, [query, key, value]: Triple) -> Result<Tensor<4>, Error> {
        let options = || self.workload.options(&self.inputs);
        match self.peer {
            Peer::Ours => match self.inputs.quantized.clone() {
                Some([key, value]) => Ok(try_quantized_attention(query, key, value, options())?.0),
                None => Ok(try_fused_attention(query, key, value, options())?),
            },
            Peer::Composed => Ok(reference::attention(query, key, value, options())?.0),
            Peer::Burn => {
                let options = AttentionModuleOptions {
                    is_causal: self.workload.causal,
                    softcap: self.workload.softcap,
                    ..AttentionModuleOptions::default()
                };
                Ok(module::attention(
                    query,
                    key,
                    value,
                    self.hidden.clone(),
                    self.inputs.bias.clone(),
                    options,
                ))
            }
        }
    }

    /// Returns query, keys and values as tensors without autodiff.
    pub fn plain(&self) -> Triple {
        [&self.inputs.query, &self.inputs.key, &self.inputs.value].map(Tensor::clone)
    }

    /// Returns query, keys and values as new leaf tensors of an autodiff graph.
    pub fn tracked(&self) -> Triple {
        self.plain().map(|tensor| tensor.autodiff().require_grad())
    }

    /// Returns the gradients with the original number of key and value heads. If the inputs hold copies of each head,
    /// the function adds the gradients of all copies of a head.
    pub fn folded(&self, [query, key, value]: Triple) -> Triple {
        let heads = self.workload.kv_heads;
        let fold = |tensor: Tensor<4>| {
            let [batch, repeated, length, width] = tensor.dims();
            match repeated == heads {
                true => tensor,
                false => tensor
                    .reshape([batch, heads, repeated / heads, length, width])
                    .sum_dim(2)
                    .reshape([batch, heads, length, width]),
            }
        };
        [query, fold(key), fold(value)]
    }
}

/// Repeats every head `group` times. The copies of a head are consecutive heads of the result.
fn repeated(tensor: &Tensor<4>, group: usize) -> Tensor<4> {
    let [batch, heads, length, width] = tensor.dims();
    tensor
        .clone()
        .reshape([batch, heads, 1, length, width])
        .repeat_dim(2, group)
        .reshape([batch, heads * group, length, width])
}

/// Returns the mask that hides the keys before each query's window. The mask need not hide the keys after the query,
/// because Burn's causal option hides those keys.
fn hidden(problem: &AttentionProblem, inputs: &Inputs) -> Tensor<4, Bool> {
    let (rows, columns) = (problem.q_len, problem.kv_len);
    let left = problem.window_left.unwrap_or(columns);
    let mut hidden = vec![false; rows * columns];
    for row in 0..rows {
        let first = (row + columns).saturating_sub(rows + left).min(columns);
        hidden[row * columns..row * columns + first].fill(true);
    }
    let data = TensorData::new(hidden, [1, 1, rows, columns]);
    Tensor::<4, Bool>::from_data(data, &inputs.query.device()).expand(scores(problem))
}

fn scores(problem: &AttentionProblem) -> [usize; 4] {
    [
        problem.batch,
        problem.q_heads,
        problem.q_len,
        problem.kv_len,
    ]
}
