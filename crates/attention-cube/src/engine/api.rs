//! The interface of an attention engine: the plans of its kernels, and their launch.

use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::{Refusal, Warning};
#[cfg(feature = "cube")]
use crate::types::request::BackwardRequest;
use crate::types::request::{Layouts, Pass};
#[cfg(feature = "cube")]
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
#[cfg(feature = "cube")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use std::fmt;

/// The largest number of query rows for which an engine uses its decode kernel. The number of query rows is `q_len` times
/// the number of query heads in a GQA group.
pub(crate) const DECODE_ROWS: usize = 32;

/// The planner of an engine. A plan depends only on the problem and on the device's profile, so tests of plans need no device.
pub trait AttentionEngine {
    /// The plan of a forward, which [`explain`](crate::explain) prints.
    type Forward: Clone + fmt::Debug + PartialEq;
    /// The plan of a backward.
    type Backward: Clone + fmt::Debug + PartialEq;

    /// The largest number of query rows (`q_len` times the query heads of a GQA group) for which the forward reads quantized keys
    /// and values directly. The constant is 0 for an engine whose kernels read only floats.
    const MOST_QUANTIZED_ROWS: usize = 0;

    /// True if selection must try this engine before all other engines, regardless of its position in the list of engines.
    fn goes_first(_problem: &AttentionProblem, _pass: Pass) -> bool {
        false
    }

    /// Plans the forward of `problem` on `device`.
    ///
    /// # Errors
    /// Returns a [`Refusal`] if the engine does not support the problem or the device.
    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<Self::Forward, Refusal>;

    /// Plans a forward that sums `q·k` in the same order as the engine's backward, so that both round each score alike. The
    /// backward recomputes the probabilities from the scores and the saved logsumexp. With scores in the hundreds, a rounding
    /// difference would give wrong probabilities.
    ///
    /// # Errors
    /// Returns a [`Refusal`] in the same cases as [`plan_forward`](Self::plan_forward).
    fn plan_forward_as_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<Self::Forward, Refusal> {
        Self::plan_forward(problem, device, layouts)
    }

    /// Plans the backward of `problem` on `device`.
    ///
    /// # Errors
    /// Returns a [`Refusal`] in the same cases as [`plan_forward`](Self::plan_forward).
    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<Self::Backward, Refusal>;

    /// Returns the number of key splits (split-KV, flash-decoding), or 1 without split-KV. If there are several splits,
    /// a second kernel combines their partial results.
    fn splits(plan: &Self::Forward) -> usize;

    /// True if the forward's kernels can read keys and values in pages of `page_len` keys. Otherwise a launch first copies
    /// the pages.
    fn reads_pages(_plan: &Self::Forward, _page_len: usize) -> bool {
        false
    }

    /// Returns one warning for each guarantee of the [crate's documentation](crate) that the backward's kernels do not meet.
    fn warnings(_problem: &AttentionProblem, _plan: &Self::Backward) -> Vec<Warning> {
        Vec::new()
    }
}

/// The f32 scales of quantized keys and values, one scale per row.
#[cfg(feature = "cube")]
pub struct RowScales {
    /// The scales of the keys, `[batch, kv_heads, kv_len]`.
    pub key: CubeTensor,
    /// The scales of the values, `[batch, kv_heads, kv_len]`.
    pub value: CubeTensor,
}

/// The launches of an engine's kernels. This trait exists only in builds that contain the kernels.
#[cfg(feature = "cube")]
pub trait Launch: AttentionEngine {
    /// Launches the forward and returns the output and the logsumexp. The problem's tensors have at least one element.
    ///
    /// # Shapes
    /// - Query: `[batch, q_heads, q_len, head_dim]`.
    /// - Key: `[batch, kv_heads, kv_len, head_dim]`.
    /// - Value: `[batch, kv_heads, kv_len, value_dim]`.
    /// - Output: `[batch, q_heads, q_len, value_dim]`, in the dtype of the problem.
    /// - Logsumexp: `[2 · batch, q_heads, q_len]`, f32. The first `batch` entries of the first dimension hold the
    ///   scores that the softmax subtracted, which are near the row maxima. The other `batch` entries hold the natural
    ///   logarithms of the row sums.
    fn forward(
        plan: Self::Forward,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend>;

    /// Launches the forward over quantized keys and values, packed four to a `u32`. The problem must have at most
    /// [`MOST_QUANTIZED_ROWS`](AttentionEngine::MOST_QUANTIZED_ROWS) query rows.
    ///
    /// # Shapes
    /// The key is `[batch, kv_heads, kv_len, head_dim / 4]` and the value `[batch, kv_heads, kv_len, value_dim / 4]`, in
    /// `u32`. Query, output and logsumexp have the shapes of [`forward`](Self::forward).
    fn forward_quantized(
        _plan: Self::Forward,
        _inputs: AttentionInputs<CubeBackend>,
        _scales: RowScales,
        _problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        unreachable!(
            "selection never gives quantized keys and values to an engine with MOST_QUANTIZED_ROWS = 0"
        )
    }

    /// Launches the backward for the requested gradients. The saved output must be contiguous.
    ///
    /// # Shapes
    /// Each gradient has the shape and the dtype of its input. The saved output and its gradient are
    /// `[batch, q_heads, q_len, value_dim]`.
    fn backward(
        plan: Self::Backward,
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend>;
}
