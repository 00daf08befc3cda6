//! The buffers of the kernel that gives all gradients.

use crate::AttentionProblem;
use crate::device::DeviceProfile;

/// Where things are in the two buffers of the kernel that gives all gradients, in elements of f32: one has the operands,
/// the query first, the other the gradients, the parts of the query's first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// From a row of the query or of a key to the next.
    pub head_pitch: usize,
    /// From a row of a value or of the output's gradient to the next.
    pub value_pitch: usize,
    pub key: usize,
    pub value: usize,
    pub output_gradient: usize,
    /// Elements of all operands.
    pub operands: usize,
    /// Elements of a part of the query's gradient.
    pub query_gradient: usize,
    pub key_gradient: usize,
    pub value_gradient: usize,
    /// Elements of all gradients.
    pub gradients: usize,
}

impl Packing {
    /// Of `problem`, with the query's gradient in `parts`.
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

    /// Whether the device has room for either buffer.
    pub fn fits(&self, device: &DeviceProfile) -> bool {
        self.operands.max(self.gradients) <= device.largest_buffer / size_of::<f32>()
    }
}

/// Elements from one row of an operand to the next: an odd number of the processor's cache lines, so that
/// the rows that are read side by side do not all take each other's place in the cache.
fn pitch(columns: usize) -> usize {
    const LINE: usize = 16;
    (columns.div_ceil(LINE) | 1) * LINE
}
