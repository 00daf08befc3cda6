//! CubeCL devices: says how a problem's tensors lie, and hands them to the engine that [`select`](crate::select) chose.

use super::*;
use crate::arguments::{
    BROADCAST_KEYS, BROADCAST_QUERIES, is_in_vectors, is_tma_readable, tma_operands,
};
use crate::device::DeviceProfile;
#[cfg(feature = "cuda")]
use crate::engine::mma::Mma;
use crate::engine::{Engine, ForwardKernel};
use crate::passes::lengths::lengths_as_read;
use crate::passes::quantize::{dequantized, dequantized_where_seen, quantized};
use crate::select::{
    BackwardRequest, Layouts, Operands, Pass, Selection, select_backward, select_forward,
};
use crate::tiled::launch::forward::{Scales, launch};
use burn_cubecl::{
    CubeBackend,
    kernel::{into_contiguous, untile},
    tensor::CubeTensor,
};

impl AttentionBackend for CubeBackend {
    fn attention_forward(
        inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        if problem.is_empty() {
            return reference::forward_in_parts::<Self>(inputs, &problem);
        }
        let inputs = rows_of(inputs);
        let layouts = forward_layouts(&inputs);
        let device = DeviceProfile::of_client(&inputs.query.client);
        forward_kernel(&device, &problem, layouts).forward(inputs, &problem)
    }

    fn attention_backward(
        inputs: AttentionInputs<Self>,
        saved: AttentionSaved<Self>,
        problem: AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        if problem.is_empty() {
            return reference::empty::backward::<Self>(inputs, saved, &problem, request);
        }
        let inputs = rows_of(inputs);
        let saved = AttentionSaved {
            output: into_contiguous(saved.output),
            output_gradient: untile(saved.output_gradient),
            ..saved
        };
        let layouts = Layouts {
            vectors: [
                &inputs.query,
                &inputs.key,
                &inputs.value,
                &saved.output,
                &saved.output_gradient,
            ]
            .into_iter()
            .all(|tensor| is_in_vectors(tensor, 4)),
            tma: tma_operands(&inputs, Some(&saved.output_gradient)),
            // It is read by threads.
            tma_bias: false,
        };
        let device = DeviceProfile::of_client(&inputs.query.client);
        let selection = select_backward(&problem, Some(&device), layouts);
        log_selection(&selection, &problem, Pass::Backward);
        let kernel = selection.kernel;
        let saved = match own_logsumexp(kernel.engine(), &inputs, &problem, &device) {
            Some(logsumexp) => AttentionSaved { logsumexp, ..saved },
            None => saved,
        };
        kernel.backward(inputs, saved, &problem, request)
    }

    fn quantized_attention_forward(
        inputs: QuantizedInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        if problem.is_empty() {
            return forward_of_copy(inputs, problem);
        }
        let inputs = match in_words(inputs, &problem) {
            Ok(output) => return output,
            Err(inputs) => *inputs,
        };
        match has_kernels(&inputs.query, problem.dtype) {
            true => forward_of_seen(inputs, problem),
            false => forward_of_copy(inputs, problem),
        }
    }

    fn quantize_rows(rows: FloatTensor<Self>) -> QuantizedTensors<Self> {
        match has_kernels(&rows, rows.dtype) {
            true => quantized(untile(rows)),
            false => reference::quantized::quantize::<Self>(rows),
        }
    }

    fn dequantize_rows(rows: QuantizedTensors<Self>, dtype: DType) -> FloatTensor<Self> {
        match has_kernels(&rows.scales, dtype) {
            true => dequantized(untiled(rows), dtype),
            false => reference::quantized::dequantize::<Self>(rows, dtype),
        }
    }
}

/// Keys and values of an attention as they lie in words, where the query and the values of the output are read in vectors.
fn in_words(
    inputs: QuantizedInputs<CubeBackend>,
    problem: &AttentionProblem,
) -> Result<AttentionOutput<CubeBackend>, Box<QuantizedInputs<CubeBackend>>> {
    let scales = Scales {
        key: untile(inputs.key.scales.clone()),
        value: untile(inputs.value.scales.clone()),
    };
    let query = untile(inputs.query.clone());
    // On this backend a tensor is one of any elements.
    let [key, value] = [&inputs.key, &inputs.value].map(|rows| untile(rows.words.clone()));
    let layouts = Layouts {
        vectors: is_in_vectors(&query, 4),
        tma: Operands {
            query: is_tma_readable(&query, BROADCAST_QUERIES),
            key: is_tma_readable(&key, BROADCAST_KEYS),
            value: is_tma_readable(&value, BROADCAST_KEYS),
            output_gradient: false,
        },
        tma_bias: false,
    };
    let device = DeviceProfile::of_client(&query.client);
    match forward_kernel(&device, problem, layouts) {
        #[cfg(feature = "cuda")]
        ForwardKernel::Mma(plan) => {
            let words = AttentionInputs {
                query,
                key,
                value,
                ..inputs.read(|rows| rows.words)
            };
            Ok(Mma::forward_of_words(plan, words, scales, problem))
        }
        ForwardKernel::Cmma(plan) | ForwardKernel::Unit(plan) => {
            let words = AttentionInputs {
                query,
                key: rows_in_order(key),
                value: rows_in_order(value),
                ..inputs.read(|rows| rows.words)
            };
            Ok(launch(words, Some(scales), problem, plan))
        }
        _ => Err(Box::new(inputs)),
    }
}

/// The output and the logsumexp over a copy of the keys and values that queries see by causal mask, window and lengths. The cost of the
/// copy does not grow with the capacity of a KV cache.
fn forward_of_seen(
    inputs: QuantizedInputs<CubeBackend>,
    problem: AttentionProblem,
) -> AttentionOutput<CubeBackend> {
    let lengths = inputs.kv_lengths.as_option();
    let lengths = lengths.map(|lengths| lengths_as_read(lengths, &problem));
    let inputs = QuantizedInputs {
        // The attention does not convert the lengths once more.
        kv_lengths: lengths.clone().into(),
        ..inputs
    };
    let bounds = problem.clone();
    forward_of_numbers(inputs, problem, |rows| {
        dequantized_where_seen(untiled(rows), &bounds, lengths.clone())
    })
}

/// Words and scales in tensors that kernels read by strides.
fn untiled(rows: QuantizedTensors<CubeBackend>) -> QuantizedTensors<CubeBackend> {
    QuantizedTensors {
        words: untile(rows.words),
        scales: untile(rows.scales),
    }
}

/// Rows whose elements lie together.
fn rows_in_order(tensor: CubeTensor) -> CubeTensor {
    match tensor.meta.strides()[3] == 1 || tensor.meta.shape()[3] == 1 {
        true => tensor,
        false => into_contiguous(tensor),
    }
}

/// Whether kernels read and write the dtype.
fn has_kernels(tensor: &CubeTensor, dtype: DType) -> bool {
    DeviceProfile::of_client(&tensor.client)
        .dtypes
        .contains(&dtype)
}

/// How the rows lie that a forward reads.
fn forward_layouts(inputs: &AttentionInputs<CubeBackend>) -> Layouts {
    Layouts {
        vectors: [&inputs.query, &inputs.key, &inputs.value]
            .into_iter()
            .all(|tensor| is_in_vectors(tensor, 4)),
        tma: tma_operands(inputs, None),
        tma_bias: inputs
            .bias
            .as_option()
            .is_some_and(|bias| is_tma_readable(bias, 2)),
    }
}

/// The logsumexp as `engine` makes it with dots added up as its backward does, where the forward is another engine's or has another order.
/// A backward makes its probabilities of that and of scores that it computes anew; where these are in the hundreds, another order changes
/// them.
fn own_logsumexp(
    engine: Engine,
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    device: &DeviceProfile,
) -> Option<FloatTensor<CubeBackend>> {
    let layouts = forward_layouts(inputs);
    let chosen = select_forward(problem, Some(device), layouts).kernel;
    // An engine without a forward of this problem has nothing better.
    let own = engine
        .plan_forward_as_backward(problem, device, layouts)
        .ok()?;
    (own != chosen).then(|| own.forward(inputs.clone(), problem).logsumexp)
}

/// The kernel that serves a forward, logged with the reasons for the choice.
fn forward_kernel(
    device: &DeviceProfile,
    problem: &AttentionProblem,
    layouts: Layouts,
) -> ForwardKernel {
    let selection = select_forward(problem, Some(device), layouts);
    log_selection(&selection, problem, Pass::Forward);
    selection.kernel
}

fn log_selection<K: std::fmt::Debug>(
    selection: &Selection<K>,
    problem: &AttentionProblem,
    pass: Pass,
) {
    for (engine, reason) in &selection.refusals {
        log::debug!("attention {pass:?}: {engine:?} refused: {reason}");
    }
    for warning in &selection.warnings {
        log::debug!("attention {pass:?}: {warning}");
    }
    log::debug!("attention {pass:?}: {:?} for {problem:?}", selection.kernel);
}

/// The inputs with rows where storage tiles may lie.
fn rows_of(inputs: AttentionInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
    AttentionInputs {
        query: untile(inputs.query),
        key: untile(inputs.key),
        value: untile(inputs.value),
        ..inputs
    }
}
