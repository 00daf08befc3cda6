//! The layout of the two buffers of the kernel that computes all three gradients.

use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;

/// The offsets and sizes, in f32 elements, of the two buffers of the kernel that computes all three gradients. One buffer
/// holds the operands, and begins with the query. The second buffer holds the gradients, and begins with the partial
/// gradients of the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// The number of elements from one row of the query or of the key to the next row.
    pub head_pitch: usize,
    /// The number of elements from one row of the value or of the output's gradient to the next row.
    pub value_pitch: usize,
    pub key: usize,
    pub value: usize,
    pub output_gradient: usize,
    /// The total number of elements in the operand buffer.
    pub operands: usize,
    /// The number of elements in one partial gradient of the query.
    pub query_gradient: usize,
    pub key_gradient: usize,
    pub value_gradient: usize,
    /// The total number of elements in the gradient buffer.
    pub gradients: usize,
}

impl Packing {
    /// Plans the buffers of `problem`, with `parts` partial gradients of the query.
    pub fn new(problem: &AttentionProblem, parts: usize) -> Self {
        let AttentionProblem {
            head_dim,
            value_dim,
            ..
        } = *problem;
        let (head_pitch, value_pitch) = (pitch(head_dim), pitch(value_dim));
        let q_rows = problem.batch * problem.q_heads * problem.q_len;
        let kv_rows = problem.batch * problem.kv_heads * problem.kv_len;
        let key = q_rows * head_pitch;
        let value = key + kv_rows * head_pitch;
        let output_gradient = value + kv_rows * value_pitch;
        let query_gradient = q_rows * head_dim;
        let key_gradient = parts * query_gradient;
        let value_gradient = key_gradient + kv_rows * head_dim;
        Self {
            head_pitch,
            value_pitch,
            key,
            value,
            output_gradient,
            operands: output_gradient + q_rows * value_pitch,
            query_gradient,
            key_gradient,
            value_gradient,
            gradients: value_gradient + kv_rows * value_dim,
        }
    }

    /// True if neither buffer exceeds the largest buffer that the device can allocate.
    pub fn fits(&self, device: &DeviceProfile) -> bool {
        self.operands.max(self.gradients) <= device.largest_buffer / size_of::<f32>()
    }
}

/// Returns the number of elements from one row of an operand to the next row: an odd number of cache lines of 16
/// elements. Because the number is odd, neighbouring rows fall into different cache sets.
fn pitch(columns: usize) -> usize {
    const LINE: usize = 16;
    (columns.div_ceil(LINE) | 1) * LINE
}
