//! Attention on CubeCL devices: runs the engine that [`select`](crate::select) chose.

use super::*;
use crate::auxiliary::lengths::lengths_as_read;
use crate::auxiliary::pages::{appended, as_rows, gathered_where_seen, page_table_as_read};
use crate::auxiliary::quantize::{dequantized, dequantized_where_seen, e4m3_words, quantized};
use crate::engine::ForwardKernel;
use crate::engine::api::RowScales;
use crate::kernel_args::{
    BROADCAST_KEYS, BROADCAST_QUERIES, is_in_vectors, is_tma_readable, tma_operands,
};
use crate::select::{Selection, select_backward, select_forward};
use crate::self_check::select_checked;
use crate::types::device::DeviceProfile;
use crate::types::engine::Engine;
use crate::types::request::{BackwardRequest, Layouts, Operands, Pass};
use burn::tensor::Shape;
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
            return reference::empty::forward_in_parts::<Self>(&inputs, &problem);
        }
        let inputs = rows_of(inputs);
        let layouts = forward_layouts(&inputs);
        let selection = forward_selection(&inputs.query, &problem, layouts);
        match selection.copies_pages {
            true => {
                let (inputs, problem) = contiguous(inputs, &problem);
                Self::attention_forward(inputs, problem)
            }
            false => {
                let inputs = with_page_table_as_read(inputs);
                selection.kernel.forward(inputs, &problem)
            }
        }
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
            tma_bias: has_tma_bias(&inputs),
        };
        let select = |device: &_| select_backward(&problem, Some(device), layouts);
        let query = &inputs.query;
        let (device, selection) =
            select_checked(&query.device, &query.client, &problem, layouts, select);
        log_selection(&selection, &problem, Pass::Backward);
        let kernel = selection.kernel;
        let recomputed = match request.lse_of_all_shards {
            true => None,
            false => recompute_lse(kernel.engine(), &inputs, &problem, &device),
        };
        let saved = match recomputed {
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
        let inputs = match reads_codes_in_place(inputs, &problem) {
            Ok(output) => return output,
            Err(inputs) => *inputs,
        };
        if problem.page_len.is_some() {
            let (inputs, problem) = contiguous_quantized(inputs, &problem);
            return Self::quantized_attention_forward(inputs, problem);
        }
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

    fn e4m3_words(rows: FloatTensor<Self>, scales: FloatTensor<Self>) -> IntTensor<Self> {
        match has_kernels(&rows, rows.dtype) {
            true => e4m3_words(untile(rows), untile(scales)),
            false => reference::quantized::e4m3_words::<Self>(rows, scales),
        }
    }

    fn dequantize_rows(
        rows: QuantizedTensors<Self>,
        format: CodeFormat,
        dtype: DType,
    ) -> FloatTensor<Self> {
        match has_kernels(&rows.scales, dtype) {
            true => dequantized(untiled(rows), format, dtype),
            false => reference::quantized::dequantize::<Self>(rows, format, dtype),
        }
    }

    fn append_rows(
        pages: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        places: AppendPlaces<Self>,
    ) -> FloatTensor<Self> {
        match has_kernels(&rows, rows.dtype) {
            true => appended(untile(pages), untile(rows), places),
            false => reference::pages::append_floats::<Self>(pages, rows, places),
        }
    }

    fn append_words(
        pages: IntTensor<Self>,
        rows: IntTensor<Self>,
        places: AppendPlaces<Self>,
    ) -> IntTensor<Self> {
        appended(untile(pages), untile(rows), places)
    }
}

/// Converts the page table to the layout that kernels read.
fn with_page_table_as_read(inputs: AttentionInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
    let page_table = inputs.page_table.as_option();
    let pages = inputs.key.meta.shape()[0];
    let page_table = page_table.map(|page_table| page_table_as_read(page_table, pages));
    AttentionInputs {
        page_table: page_table.into(),
        ..inputs
    }
}

/// Copies the pages of keys and values to contiguous tensors. Only rows that a query sees are copied. Also returns the
/// problem, changed to contiguous keys and values.
fn contiguous(
    inputs: AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
) -> (AttentionInputs<CubeBackend>, AttentionProblem) {
    if !has_kernels(&inputs.key, problem.dtype) {
        return reference::pages::contiguous::<CubeBackend>(inputs, problem);
    }
    let lengths = inputs.kv_lengths.as_option();
    let lengths = lengths.map(|lengths| lengths_as_read(lengths, problem));
    let count = inputs.key.meta.shape()[0];
    let gathered = gather(inputs.page_table, count, problem, &lengths);
    let inputs = AttentionInputs {
        key: gathered(inputs.key),
        value: gathered(inputs.value),
        page_table: MaybeInt::Absent,
        kv_lengths: lengths.clone().into(),
        ..inputs
    };
    (inputs, problem.over_contiguous_keys())
}

/// Copies the pages of quantized keys and values to contiguous tensors, as [`contiguous`] does for float keys and
/// values.
fn contiguous_quantized(
    inputs: QuantizedInputs<CubeBackend>,
    problem: &AttentionProblem,
) -> (QuantizedInputs<CubeBackend>, AttentionProblem) {
    let lengths = inputs.kv_lengths.as_option();
    let lengths = lengths.map(|lengths| lengths_as_read(lengths, problem));
    let count = inputs.key.words.meta.shape()[0];
    let gathered = gather(inputs.page_table, count, problem, &lengths);
    let gathered_rows = |rows: QuantizedTensors<CubeBackend>| {
        let scales = gathered(as_rows(rows.scales));
        let shape = scales.meta.shape();
        let of_rows = Shape::new([shape[0], shape[1], shape[2]]);
        QuantizedTensors {
            words: gathered(untile(rows.words)),
            scales: burn_cubecl::ops::reshape(scales, of_rows),
        }
    };
    let inputs = QuantizedInputs {
        key: gathered_rows(inputs.key),
        value: gathered_rows(inputs.value),
        page_table: MaybeInt::Absent,
        kv_lengths: lengths.clone().into(),
        ..inputs
    };
    (inputs, problem.over_contiguous_keys())
}

/// Returns a function that copies pages of keys, values or scales to a contiguous tensor. Only rows that a query sees
/// are copied. `count` is the number of pages. `lengths` must be in the layout that kernels read.
fn gather<'a>(
    page_table: MaybeInt<CubeBackend>,
    count: usize,
    problem: &'a AttentionProblem,
    lengths: &'a Option<CubeTensor>,
) -> impl Fn(CubeTensor) -> CubeTensor + 'a {
    let Some(page_table) = page_table.into_option() else {
        unreachable!("a problem with pages has a page table")
    };
    let page_table = page_table_as_read(&page_table, count);
    move |pages| gathered_where_seen(pages, &page_table, problem, lengths.clone())
}

/// Runs the forward directly on the packed words of quantized keys and values. If the selected engine cannot read such
/// words, returns the inputs unchanged.
fn reads_codes_in_place(
    inputs: QuantizedInputs<CubeBackend>,
    problem: &AttentionProblem,
) -> Result<AttentionOutput<CubeBackend>, Box<QuantizedInputs<CubeBackend>>> {
    let scales = RowScales {
        key: untile(inputs.key.scales.clone()),
        value: untile(inputs.value.scales.clone()),
    };
    let query = untile(inputs.query.clone());
    // Pass the packed words as the keys and values of a float forward. This is possible because CubeBackend has one
    // tensor type for all element types.
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
    let Selection {
        kernel,
        copies_pages,
        ..
    } = forward_selection(&query, problem, layouts);
    if copies_pages || kernel.engine().most_quantized_rows() == 0 {
        return Err(Box::new(inputs));
    }
    let packed = AttentionInputs {
        query,
        key,
        value,
        ..inputs.read(|rows| rows.words)
    };
    Ok(kernel.forward_quantized(with_page_table_as_read(packed), scales, problem))
}

/// Runs the forward over a dequantized copy of keys and values. Only rows that queries see are dequantized, so the cost
/// does not grow with the capacity of the KV cache.
fn forward_of_seen(
    inputs: QuantizedInputs<CubeBackend>,
    problem: AttentionProblem,
) -> AttentionOutput<CubeBackend> {
    let lengths = inputs.kv_lengths.as_option();
    let lengths = lengths.map(|lengths| lengths_as_read(lengths, &problem));
    let inputs = QuantizedInputs {
        // The converted lengths replace the original lengths, so that the forward does not convert the lengths again.
        kv_lengths: lengths.clone().into(),
        ..inputs
    };
    let bounds = problem.clone();
    forward_of_numbers(inputs, problem, |rows| {
        dequantized_where_seen(untiled(rows), &bounds, lengths.clone())
    })
}

/// Converts words and scales from a tiled memory layout to strided tensors.
fn untiled(rows: QuantizedTensors<CubeBackend>) -> QuantizedTensors<CubeBackend> {
    QuantizedTensors {
        words: untile(rows.words),
        scales: untile(rows.scales),
    }
}

/// True if kernels on the tensor's device can read and write the dtype.
fn has_kernels(tensor: &CubeTensor, dtype: DType) -> bool {
    DeviceProfile::of_tensor(tensor).dtypes.contains(&dtype)
}

/// Returns the memory layout of a forward's inputs.
fn forward_layouts(inputs: &AttentionInputs<CubeBackend>) -> Layouts {
    Layouts {
        vectors: [&inputs.query, &inputs.key, &inputs.value]
            .into_iter()
            .all(|tensor| is_in_vectors(tensor, 4)),
        tma: tma_operands(inputs, None),
        tma_bias: has_tma_bias(inputs),
    }
}

/// True if TMA can read the bias in place.
fn has_tma_bias(inputs: &AttentionInputs<CubeBackend>) -> bool {
    let bias = inputs.bias.as_option();
    bias.is_some_and(|bias| is_tma_readable(bias, 2))
}

/// Runs the forward of `engine`, and returns the logsumexp of this forward for the engine's backward. Returns `None` if
/// the saved logsumexp already comes from this forward. Also returns `None` if the engine has no forward for the
/// problem.
///
/// Forwards of different engines may sum `q·k` in different orders, and therefore round the scores differently. For
/// scores in the hundreds, a backward with the logsumexp of another engine would compute wrong probabilities.
fn recompute_lse(
    engine: Engine,
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    device: &DeviceProfile,
) -> Option<FloatTensor<CubeBackend>> {
    let layouts = forward_layouts(inputs);
    let chosen = select_forward(problem, Some(device), layouts).kernel;
    let own = engine
        .plan_forward_as_backward(problem, device, layouts)
        .ok()?;
    (own != chosen).then(|| own.forward(inputs.clone(), problem).logsumexp)
}

/// Selects the kernel of a forward pass on the query's device, and logs the reasons for the choice.
fn forward_selection(
    query: &CubeTensor,
    problem: &AttentionProblem,
    layouts: Layouts,
) -> Selection<ForwardKernel> {
    let select = |device: &_| select_forward(problem, Some(device), layouts);
    let (_, selection) = select_checked(&query.device, &query.client, problem, layouts, select);
    log_selection(&selection, problem, Pass::Forward);
    selection
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

/// Converts query, key and value from a tiled memory layout to strided rows.
fn rows_of(inputs: AttentionInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
    AttentionInputs {
        query: untile(inputs.query),
        key: untile(inputs.key),
        value: untile(inputs.value),
        ..inputs
    }
}
