//! Attention over shards of the keys, as in ring attention and context parallelism.
//!
//! A shard is a part of the keys and values. Attention over a shard uses all queries.
//! [`attention_with_lse`](crate::attention_with_lse) on a shard gives an output and a logsumexp (LSE). [`merge`] turns
//! the results of all shards into the result over all keys. Autodiff can differentiate the whole computation.
//!
//! A ring that passes keys from device to device cannot keep its forward pass in one autodiff graph. In this case,
//! [`backward`] computes a shard's gradients from the merged output and logsumexp. The query gradients of all shards
//! must be added.
//!
//! In a call on a shard, key positions count from the shard's first key, also in the code of a [score
//! mod](crate::score_mod). Replace a causal mask by [`visible_between`](AttentionOptions::visible_between), which gets
//! the end of each query's visible keys, counted from the shard's first key. Pass sinks to one shard only.
//!
//! The method is the one of ring attention (Liu et al., 2023, arXiv:2310.01889).

use crate::backend::{AttentionBackend, check_backend};
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use crate::problem::{AttentionProblem, check_dims, check_dtype, check_place, check_strategies};
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionSaved, MaybeFloat, inputs, logsumexp_dtype};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};

/// Merges the attention outputs and logsumexps of disjoint shards of the keys into the output and logsumexp over all keys.
///
/// The result is differentiable. A query that sees no key of any shard has the output 0 and the logsumexp −∞. The sums
/// are computed in f32, or in f64 for f64 outputs.
///
/// # Shapes
/// Per shard: `output [batch, q_heads, q_len, value_dim]`, `logsumexp [batch, q_heads, q_len]`. The results have the
/// same shapes. All outputs have the same dtype. The logsumexps are f32, or f64 for f64 outputs.
///
/// ```
/// use attention_cube::{AttentionOptions, attention_with_lse, shards};
/// use burn::tensor::{Device, Distribution, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let random = |length| Tensor::<4>::random([1, 2, length, 16], Distribution::Default, &device);
/// let query = random(3);
/// let shard = || attention_with_lse(query.clone(), random(5), random(5), AttentionOptions::new());
/// let (output, logsumexp) = shards::merge(vec![shard()?, shard()?])?; // attention over 10 keys
/// assert_eq!((output.dims(), logsumexp.dims()), ([1, 2, 3, 16], [1, 2, 3]));
/// # }
/// # Ok::<(), attention_cube::AttentionError>(())
/// ```
///
/// # Errors
/// Returns [`AttentionError`] if there is no shard, or if the shapes, dtypes or devices of the shards differ.
pub fn merge(
    shards: Vec<(Tensor<4>, Tensor<3>)>,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let Some((first, _)) = shards.first() else {
        return Err(AttentionError::Value {
            argument: "shards",
            has: 0.0,
            expected: "at least one shard",
        });
    };
    let (shape, dtype, device) = (first.dims(), first.dtype(), first.device());
    let sums = lse_dtype(dtype);
    let tensors = shards.iter().flat_map(|(output, logsumexp)| {
        [
            ("output", output.device()),
            ("logsumexp", logsumexp.device()),
        ]
    });
    check_strategies(tensors.map(|(argument, device)| (argument, Some(device))))?;
    for (output, logsumexp) in &shards {
        check_output("output", output, shape, "the first shard's")?;
        check_dtype("output", output.dtype(), &[(dtype, "the first shard's")])?;
        check_first_device("output", output.device(), &device)?;
        check_lse("logsumexp", logsumexp, shape)?;
        check_dtype(
            "logsumexp",
            logsumexp.dtype(),
            &[(sums, "of the outputs' LSE")],
        )?;
        check_first_device("logsumexp", logsumexp.device(), &device)?;
    }
    let (outputs, logsumexps): (Vec<_>, Vec<_>) = shards.into_iter().unzip();
    let logsumexps = Tensor::stack::<4>(logsumexps, 0);
    // The result does not depend on the maximum that is subtracted, so autodiff need not differentiate the maximum.
    let largest = logsumexps.clone().detach().max_dim(0);
    let sees_no_key = largest.clone().equal_elem(f64::NEG_INFINITY);
    let largest = largest.mask_fill(sees_no_key.clone(), 0.0);
    let weights = (logsumexps - largest.clone()).exp();
    let sum = weights
        .clone()
        .sum_dim(0)
        .mask_fill(sees_no_key.clone(), 1.0);
    let shares = weights / sum.clone();
    let weighted = outputs.into_iter().enumerate().map(|(index, output)| {
        let share = shares.clone().narrow(0, index, 1);
        output.cast(sums) * share.squeeze_dim::<3>(0).unsqueeze_dim(3)
    });
    let output = weighted
        .reduce(|sum, output| sum + output)
        .expect("the first shard exists");
    let logsumexp = (largest + sum.log()).mask_fill(sees_no_key, f64::NEG_INFINITY);
    Ok((output.cast(dtype), logsumexp.squeeze_dim(0)))
}

/// The output and logsumexp over all keys, and the gradients of both. [`backward`] computes a shard's gradients from
/// these tensors.
#[derive(Clone, Debug)]
pub struct Merged {
    /// The output over all keys, `[batch, q_heads, q_len, value_dim]`.
    pub output: Tensor<4>,
    /// The logsumexp over all keys, `[batch, q_heads, q_len]`. It is a natural logarithm in f32, or in f64 for f64 outputs.
    pub logsumexp: Tensor<3>,
    /// The gradient of `output`, `[batch, q_heads, q_len, value_dim]`.
    pub output_gradient: Tensor<4>,
    /// The gradient of `logsumexp`, `[batch, q_heads, q_len]`, if the loss depends on it.
    pub logsumexp_gradient: Option<Tensor<3>>,
}

/// The gradients of one shard, in the shapes and dtypes of the inputs.
#[derive(Clone, Debug)]
pub struct ShardGradients {
    /// The shard's contribution to the query's gradient. The query's gradient is the sum of the contributions of all shards.
    pub query: Tensor<4>,
    /// The gradient of the shard's keys.
    pub key: Tensor<4>,
    /// The gradient of the shard's values.
    pub value: Tensor<4>,
    /// The gradient of the shard's bias, or `None` without a bias.
    pub bias: Option<Tensor<4>>,
    /// The gradient of the sinks, or `None` without sinks.
    pub sinks: Option<Tensor<1>>,
    /// The shard's contribution to the gradient of a learned score mod's table, in f32, or `None` without such a table.
    pub table: Option<Tensor<1>>,
}

/// Computes the gradients of one shard of the keys from the results over all keys.
///
/// Autodiff does not track the returned gradients.
///
/// If scores exceed some hundreds, the probabilities may lose a few of f32's digits, because forward and backward
/// kernels may sum `q·k` in different orders.
///
/// NaN in the shard's keys or values, or in the output's gradient, may also reach the gradients of queries that see no key
/// of the shard.
///
/// # Shapes
/// `query`, `key` and `value` have the shapes of [`fused_attention`](crate::fused_attention), with the keys of this
/// shard. `options` must be the options of the shard's forward pass.
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit, if the shard has no key, or if a shard of one key has a bias.
pub fn backward(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
    merged: Merged,
) -> Result<ShardGradients, AttentionError> {
    let [query, key, value] = [query, key, value].map(Tensor::without_autodiff);
    let options = options.without_autodiff();
    let problem = AttentionProblem::new(&query, &key, &value, &options)?;
    check_backend(&query.device())?;
    check_shard(&problem)?;
    check_merged(&merged, &problem, &query)?;
    // If the bias has one element per query, kernels compute the bias gradient from the LSE gradient, which covers the
    // keys of all shards. Expand such a bias over the shard's keys, so that kernels sum only the gradients of this
    // shard's scores.
    let constant = options
        .bias
        .as_ref()
        .is_some_and(|bias| bias.dims()[3] == 1);
    let options = match constant {
        true => options.with_bias_of_keys(problem.kv_len),
        false => options,
    };
    let problem = AttentionProblem::new(&query, &key, &value, &options)?;
    let request = BackwardRequest {
        query: true,
        key: true,
        value: true,
        bias: options.bias.is_some(),
        sinks: options.sinks.is_some(),
        table: problem.learned_code().is_some(),
        lse_of_all_shards: true,
    };
    let logsumexp = merged.logsumexp.without_autodiff();
    // The logsumexp is saved in two halves. The first half holds the reference scores, which the softmax subtracts, and
    // the second half the logarithms of the softmax sums. Here the first half holds the whole logsumexp, so all
    // logarithms are zeros. A logarithm of −0 marks a query that sees no key. The other logarithms are +0.
    let sees_no_key = logsumexp.clone().equal_elem(f64::NEG_INFINITY);
    let logarithms = logsumexp.zeros_like().mask_fill(sees_no_key, -0.0);
    let gradient = merged.logsumexp_gradient.map(|gradient| {
        let gradient = gradient.without_autodiff();
        Tensor::cat(vec![gradient.clone(), gradient], 0)
    });
    let saved = AttentionSaved {
        output: merged.output.without_autodiff().into_dispatch(),
        logsumexp: Tensor::cat(vec![logsumexp, logarithms], 0).into_dispatch(),
        output_gradient: merged.output_gradient.without_autodiff().into_dispatch(),
        logsumexp_gradient: gradient.map(Tensor::into_dispatch).into(),
    };
    let gradients =
        Dispatch::attention_backward(inputs(query, key, value, options), saved, problem, request);
    let wanted = |gradient: MaybeFloat<Dispatch>| {
        let gradient = gradient
            .into_option()
            .expect("the request wants this gradient");
        Tensor::from_dispatch(gradient)
    };
    Ok(ShardGradients {
        query: wanted(gradients.query),
        key: wanted(gradients.key),
        value: wanted(gradients.value),
        bias: gradients.bias.into_option().map(|gradient| {
            let gradient = Tensor::<4>::from_dispatch(gradient);
            match constant {
                true => gradient.sum_dim(3),
                false => gradient,
            }
        }),
        sinks: gradients.sinks.into_option().map(Tensor::from_dispatch),
        table: gradients.table.into_option().map(Tensor::from_dispatch),
    })
}

/// Refuses shards whose gradients the kernels cannot compute: a shard without keys, and a shard of one key with a bias.
fn check_shard(problem: &AttentionProblem) -> Result<(), AttentionError> {
    let least = 1 + usize::from(problem.bias.is_some());
    if problem.kv_len >= least {
        return Ok(());
    }
    Err(AttentionError::Shape {
        argument: "key",
        has: vec![
            problem.batch,
            problem.kv_heads,
            problem.kv_len,
            problem.head_dim,
        ],
        dimension: "kv_len",
        found: problem.kv_len,
        expected: "at least 1, and at least 2 with a bias".into(),
    })
}

/// Checks that a tensor is on the device of the first shard's output.
fn check_first_device(
    argument: &'static str,
    has: Device,
    first: &Device,
) -> Result<(), AttentionError> {
    check_place(argument, has, first).map_err(|error| match error {
        AttentionError::Device {
            argument,
            has,
            expected,
            ..
        } => AttentionError::Device {
            argument,
            has,
            whose: "first output",
            expected,
        },
        error => error,
    })
}

fn check_merged(
    merged: &Merged,
    problem: &AttentionProblem,
    query: &Tensor<4>,
) -> Result<(), AttentionError> {
    let shape = problem.output_shape();
    let own = [(problem.dtype, "the query's")];
    for (argument, tensor) in [
        ("output", &merged.output),
        ("output gradient", &merged.output_gradient),
    ] {
        check_output(argument, tensor, shape, "the problem's")?;
        check_dtype(argument, tensor.dtype(), &own)?;
        check_place(argument, tensor.device(), &query.device())?;
    }
    let lse = [(logsumexp_dtype(problem), "the logsumexp's")];
    let gradient = merged.logsumexp_gradient.as_ref();
    let gradient = gradient.map(|gradient| ("logsumexp gradient", gradient));
    for (argument, tensor) in [("logsumexp", &merged.logsumexp)]
        .into_iter()
        .chain(gradient)
    {
        check_lse(argument, tensor, shape)?;
        check_dtype(argument, tensor.dtype(), &lse)?;
        check_place(argument, tensor.device(), &query.device())?;
    }
    Ok(())
}

fn check_output(
    argument: &'static str,
    output: &Tensor<4>,
    shape: [usize; 4],
    whose: &'static str,
) -> Result<(), AttentionError> {
    check_dims(
        argument,
        &output.dims(),
        &["batch", "q_heads", "q_len", "value_dim"],
        shape.map(|size| Some((size, whose))),
    )
}

fn check_lse(
    argument: &'static str,
    logsumexp: &Tensor<3>,
    [batch, q_heads, q_len, _]: [usize; 4],
) -> Result<(), AttentionError> {
    check_dims(
        argument,
        &logsumexp.dims(),
        &["batch", "q_heads", "q_len"],
        [batch, q_heads, q_len].map(|size| Some((size, "the output's"))),
    )
}

/// Returns the dtype of the logsumexp for outputs in `dtype`.
fn lse_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
