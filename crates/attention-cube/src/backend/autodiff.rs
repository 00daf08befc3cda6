//! Attention as a node of Burn's autodiff graph. The backward recomputes the probabilities from the saved logsumexp.

use super::*;
use burn::backend::{
    Autodiff, AutodiffBackend, TensorMetadata,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
};
use std::sync::{Arc, Mutex};

/// The slot for the gradient of the logsumexp. The backward of the logsumexp's node writes the gradient to this slot,
/// and the backward of the output's node reads the gradient from the slot.
///
/// A node of Burn's graph produces only one tensor. The logsumexp therefore has its own node, a child of the output's
/// node. The backward of the child runs first and passes zeros to the output's node. The output's node then runs one
/// attention backward with the gradients of both the output and the logsumexp.
type LogsumexpGradient<B> = Arc<Mutex<Option<FloatTensor<B>>>>;

#[derive(Clone, Debug)]
struct AttentionState<B: Backend> {
    query: NodeId,
    key: NodeId,
    value: NodeId,
    bias: Option<NodeId>,
    sinks: Option<NodeId>,
    /// The table of a score mod whose table has a gradient.
    learned_table: Option<NodeId>,
    mask: MaybeBool<B>,
    kv_lengths: MaybeInt<B>,
    query_lengths: MaybeInt<B>,
    query_segments: MaybeInt<B>,
    key_segments: MaybeInt<B>,
    intervals: MaybeInt<B>,
    score_table: MaybeFloat<B>,
    mask_table: MaybeFloat<B>,
    output: FloatTensor<B>,
    logsumexp: FloatTensor<B>,
    logsumexp_gradient: LogsumexpGradient<B>,
    problem: AttentionProblem,
}

/// The attention node. Its parents are query, key and value, and then those of bias, sinks and learned table that are
/// present.
#[derive(Debug)]
struct AttentionStep;

impl<B: AttentionBackend, const N: usize> Backward<B, N> for AttentionStep {
    type State = AttentionState<B>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        gradients: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let state = ops.state;
        let mut saved_input = |node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node);
        let inputs = AttentionInputs {
            query: saved_input(state.query),
            key: saved_input(state.key),
            value: saved_input(state.value),
            page_table: MaybeInt::Absent,
            mask: state.mask,
            bias: state.bias.map(&mut saved_input).into(),
            kv_lengths: state.kv_lengths,
            query_lengths: state.query_lengths,
            query_segments: state.query_segments,
            key_segments: state.key_segments,
            intervals: state.intervals,
            sinks: state.sinks.map(&mut saved_input).into(),
            score_table: match state.learned_table.map(&mut saved_input) {
                Some(table) => MaybeFloat::Present(table),
                None => state.score_table,
            },
            mask_table: state.mask_table,
        };
        let output_gradient = gradients.consume::<B>(&ops.node);
        let logsumexp_gradient = take::<B>(&state.logsumexp_gradient);

        let mut parents = ops.parents.into_iter();
        let mut next = || parents.next().flatten();
        let (query, key, value) = (next(), next(), next());
        let bias = state.bias.and_then(|_| next());
        let sinks = state.sinks.and_then(|_| next());
        let table = state.learned_table.and_then(|_| next());

        let computed = B::attention_backward(
            inputs,
            AttentionSaved {
                output: state.output,
                logsumexp: state.logsumexp,
                output_gradient,
                logsumexp_gradient: logsumexp_gradient.into(),
            },
            state.problem,
            BackwardRequest {
                query: query.is_some(),
                key: key.is_some(),
                value: value.is_some(),
                bias: bias.is_some(),
                sinks: sinks.is_some(),
                table: table.is_some(),
                lse_of_all_shards: false,
            },
        );
        for (parent, gradient) in [
            (query, computed.query),
            (key, computed.key),
            (value, computed.value),
            (bias, computed.bias),
            (sinks, computed.sinks),
            (table, computed.table),
        ] {
            if let (Some(parent), Some(gradient)) = (parent, gradient.into_option()) {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

fn take<B: Backend>(slot: &LogsumexpGradient<B>) -> Option<FloatTensor<B>> {
    // The lock is poisoned if another thread of this backward panicked. Take the gradient even then, because the slot
    // still holds either a complete gradient or none.
    slot.lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .take()
}

#[derive(Debug)]
struct LogsumexpStep;

impl<B: AttentionBackend> Backward<B, 1> for LogsumexpStep {
    type State = (LogsumexpGradient<B>, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = gradients.consume::<B>(&ops.node);
        let (slot, output) = ops.state;
        *slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(gradient);
        let [output_node] = ops.parents;
        if let Some(node) = output_node {
            let dtype = output.dtype().into();
            let zeros = B::float_zeros(output.shape(), &output.device(), dtype);
            gradients.register::<B>(node.id, zeros);
        }
    }
}

/// Runs the forward with `N` differentiable inputs. Autodiff tracks the output and the logsumexp if it tracks any of these
/// inputs.
fn tracked_forward<B: AttentionBackend, C: CheckpointStrategy, const N: usize>(
    inputs: AttentionInputs<Autodiff<B, C>>,
    nodes: [NodeGuard; N],
    problem: AttentionProblem,
) -> AttentionOutput<Autodiff<B, C>> {
    let preparation = AttentionStep.prepare::<C>(nodes).compute_bound().stateful();
    match preparation {
        OpsKind::Tracked(mut preparation) => {
            let mut checkpoint = |tensor| preparation.checkpoint(tensor);
            let (query, key, value) = (
                checkpoint(&inputs.query),
                checkpoint(&inputs.key),
                checkpoint(&inputs.value),
            );
            let bias = inputs.bias.as_option().map(&mut checkpoint);
            let sinks = inputs.sinks.as_option().map(&mut checkpoint);
            let learned = inputs.score_table.as_option();
            let learned = learned.filter(|_| problem.learned_code().is_some());
            let learned_table = learned.map(&mut checkpoint);
            let inputs = untracked(inputs);
            let (mask, kv_lengths) = (inputs.mask.clone(), inputs.kv_lengths.clone());
            let query_lengths = inputs.query_lengths.clone();
            let query_segments = inputs.query_segments.clone();
            let key_segments = inputs.key_segments.clone();
            let intervals = inputs.intervals.clone();
            let score_table = match learned_table {
                Some(_) => MaybeFloat::Absent,
                None => inputs.score_table.clone(),
            };
            let mask_table = inputs.mask_table.clone();
            let result = B::attention_forward(inputs, problem.clone());
            let slot = LogsumexpGradient::<B>::default();
            let state = AttentionState {
                query,
                key,
                value,
                bias,
                sinks,
                learned_table,
                mask,
                kv_lengths,
                query_lengths,
                query_segments,
                key_segments,
                intervals,
                score_table,
                mask_table,
                output: result.output.clone(),
                logsumexp: result.logsumexp.clone(),
                logsumexp_gradient: slot.clone(),
                problem,
            };
            let output = preparation.finish(state, result.output.clone());
            let logsumexp = match LogsumexpStep
                .prepare::<C>([output.node()])
                .compute_bound()
                .stateful()
            {
                OpsKind::Tracked(preparation) => {
                    preparation.finish((slot, result.output), result.logsumexp)
                }
                OpsKind::UnTracked(preparation) => preparation.finish(result.logsumexp),
            };
            AttentionOutput { output, logsumexp }
        }
        OpsKind::UnTracked(preparation) => {
            let result = B::attention_forward(untracked(inputs), problem);
            AttentionOutput {
                output: preparation.finish(result.output),
                logsumexp: <Autodiff<B, C> as AutodiffBackend>::from_inner(result.logsumexp),
            }
        }
    }
}

/// Panics if autodiff tracks the table of a score mod or mask mod, because the table would silently get no gradient.
///
/// Burn tells only a graph node whether autodiff tracks the node's parents. The function therefore prepares a node
/// whose parent is the table. It asks the node whether the parent is tracked, and then drops the node.
fn refuse_tracked<B: AttentionBackend, C: CheckpointStrategy>(
    name: &str,
    remedy: &str,
    table: NodeGuard,
) {
    let node = Backward::<B, 1>::prepare::<C>(LogsumexpStep, [table]);
    assert!(
        matches!(node.compute_bound().stateful(), OpsKind::UnTracked(_)),
        "the table of the {name} needs a gradient; {remedy}"
    );
}

/// Removes the autodiff nodes from the inputs.
fn untracked<B: Backend, C: CheckpointStrategy>(
    inputs: AttentionInputs<Autodiff<B, C>>,
) -> AttentionInputs<B> {
    let float = |tensor: MaybeFloat<Autodiff<B, C>>| {
        let tensor = tensor.into_option();
        MaybeFloat::from(tensor.map(|tensor| tensor.into_primitive()))
    };
    // Bool and int tensors are passed on unchanged, because their primitives have the same type with and without autodiff.
    AttentionInputs {
        query: inputs.query.into_primitive(),
        key: inputs.key.into_primitive(),
        value: inputs.value.into_primitive(),
        page_table: inputs.page_table.into_option().into(),
        mask: inputs.mask.into_option().into(),
        bias: float(inputs.bias),
        kv_lengths: inputs.kv_lengths.into_option().into(),
        query_lengths: inputs.query_lengths.into_option().into(),
        query_segments: inputs.query_segments.into_option().into(),
        key_segments: inputs.key_segments.into_option().into(),
        intervals: inputs.intervals.into_option().into(),
        sinks: float(inputs.sinks),
        score_table: float(inputs.score_table),
        mask_table: float(inputs.mask_table),
    }
}

impl<B: AttentionBackend, C: CheckpointStrategy> AttentionBackend for Autodiff<B, C> {
    fn attention_forward(
        inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        // No kernel computes gradients of keys and values in pages, so differentiable operations first copy pages to
        // contiguous tensors.
        let (inputs, problem) = match problem.is_empty() {
            true => (inputs, problem),
            false => reference::pages::contiguous::<Self>(inputs, &problem),
        };
        let is_learned = problem.learned_code().is_some();
        let of_scores =
            "detach the table, or implement `LearnedScoreMod` and use `learned_score_mod`";
        let of_masks = "detach the table, because visibility has no gradient";
        for (name, remedy, table, is_learned) in [
            ("score mod", of_scores, &inputs.score_table, is_learned),
            ("mask mod", of_masks, &inputs.mask_table, false),
        ] {
            if let (MaybeFloat::Present(table), false) = (table, is_learned) {
                refuse_tracked::<B, C>(name, remedy, table.node());
            }
        }
        let (q, k, v) = (inputs.query.node(), inputs.key.node(), inputs.value.node());
        let table = inputs.score_table.as_option().filter(|_| is_learned);
        let others = [inputs.bias.as_option(), inputs.sinks.as_option(), table];
        let others: Vec<NodeGuard> = (others.into_iter().flatten())
            .map(|tensor| tensor.node())
            .collect();
        match <[NodeGuard; 3]>::try_from(others) {
            Ok([bias, sinks, table]) => {
                tracked_forward(inputs, [q, k, v, bias, sinks, table], problem)
            }
            Err(others) => {
                let mut others = others.into_iter();
                match (others.next(), others.next()) {
                    (Some(first), Some(second)) => {
                        tracked_forward(inputs, [q, k, v, first, second], problem)
                    }
                    (Some(first), None) => tracked_forward(inputs, [q, k, v, first], problem),
                    (None, _) => tracked_forward(inputs, [q, k, v], problem),
                }
            }
        }
    }

    fn attention_backward(
        _inputs: AttentionInputs<Self>,
        _saved: AttentionSaved<Self>,
        _problem: AttentionProblem,
        _request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        panic!("attention has first-order gradients only, like all of Burn")
    }

    fn quantize_rows(rows: FloatTensor<Self>) -> QuantizedTensors<Self> {
        let QuantizedTensors { words, scales } = B::quantize_rows(rows.into_primitive());
        QuantizedTensors {
            words,
            scales: <Self as AutodiffBackend>::from_inner(scales),
        }
    }

    fn e4m3_words(rows: FloatTensor<Self>, scales: FloatTensor<Self>) -> IntTensor<Self> {
        B::e4m3_words(rows.into_primitive(), scales.into_primitive())
    }

    fn dequantize_rows(
        rows: QuantizedTensors<Self>,
        format: CodeFormat,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let rows = QuantizedTensors {
            words: rows.words,
            scales: rows.scales.into_primitive(),
        };
        <Self as AutodiffBackend>::from_inner(B::dequantize_rows(rows, format, dtype))
    }
}
