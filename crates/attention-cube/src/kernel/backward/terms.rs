//! The queries' terms as the Hopper kernels read them: the logsumexps of a head in powers of two, and then its Δ,
//! `padded` of each, so that the copy engine brings both of a block at once.
//!
//! Budget: no shared memory; bound by the launch.

use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 256;

/// From `[batch, q_heads, q_len, 2]` to `[batch, q_heads, 2, padded]`, `count` numbers of either.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn spread_terms(
    rows: &Tensor<f32>,
    terms: &mut Tensor<f32>,
    q_len: u32,
    padded: u32,
    count: u32,
) {
    let index = ABSOLUTE_POS as u32;
    if index < count {
        let query = index % padded;
        let plane = (index / padded) as usize;
        let mut logsumexp = 0.0f32;
        let mut delta = 0.0f32;
        if query < q_len {
            let at = 2 * (plane * q_len as usize + query as usize);
            logsumexp = rows[at] * comptime!(std::f32::consts::LOG2_E);
            delta = rows[at + 1];
        }
        let at = 2 * plane * padded as usize + query as usize;
        terms[at] = logsumexp;
        terms[at + padded as usize] = delta;
    }
}
