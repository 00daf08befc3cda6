//! Before the backward: the logsumexp and `Δ = rowsum(do ∘ o) − dlse` of every query: of a head all references, then all Δ, and
//! then all logarithms of the sums by the references, each padded with zeros to a multiple of [`MULTIPLE`]. Together a reference
//! and a logarithm are the logsumexp; kernels that read one number of it have it as the reference.
//!
//! Budget: 2 KB of shared memory, one vector of each operand in registers. Bound by memory: reads the
//! output and its gradient once. Eight units share a row.

use crate::math::gradient::RowTerms;
use crate::math::layout::{head_rows, row_offset};
use crate::math::score::is_hidden;
use crate::tile::product::load_vec4;
use cubecl::prelude::*;

/// Units of a cube, and of a row.
pub(crate) const UNITS: u32 = 256;
const ROW_UNITS: u32 = 8;
/// Rows of a cube.
pub(crate) const ROWS: u32 = UNITS / ROW_UNITS;
/// Whether a query sees nothing, by its logsumexp among the terms: that is ∞ then, and the probabilities are 0 by it, too.
#[cube]
pub(crate) fn is_blind(logsumexp: f32) -> bool {
    u32::reinterpret(logsumexp) == 0x7F80_0000u32
}

/// Numbers of a query.
pub(crate) const TERMS: usize = 3;

/// Hopper's copy engine reads rows that start at multiples of 16 bytes.
pub(crate) const MULTIPLE: usize = 4;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn row_terms<E: Float, F: Float, N: Size>(
    output: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    logsumexp: &Tensor<f32>,
    logsumexp_gradient: ComptimeOption<&Tensor<f32>>,
    sinks: ComptimeOption<&Tensor<F>>,
    target: &mut Tensor<f32>,
    q_heads: u32,
    q_len: u32,
    padded: u32,
    row_count: u32,
    value_dim: u32,
    infinity: f32,
    #[comptime] apart: bool,
    #[define(E)] _element: ElemType,
    #[define(F)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
) {
    let row = CUBE_POS as u32 * ROWS + UNIT_POS / ROW_UNITS;
    let lane = UNIT_POS % ROW_UNITS;
    let query = row % padded;
    let plane = row / padded;
    let head = plane % q_heads;
    let batch = plane / q_heads;
    let exists = row < row_count && query < q_len;
    let mut sum = 0.0f32;
    let mut seen = 0.0f32;
    if exists {
        let end = q_len as i32;
        let output_rows = head_rows(output, batch, head, 0i32, end, value_dim);
        let gradient_rows = head_rows(output_gradient, batch, head, 0i32, end, value_dim);
        let at = row_offset(&output_rows, query, false);
        let gradient_at = row_offset(&gradient_rows, query, false);
        let vectors = value_dim.div_ceil(4u32);
        let mut vector = lane;
        while vector < vectors {
            let o = load_vec4(output, &output_rows, at, vector * 4u32);
            let g = load_vec4(output_gradient, &gradient_rows, gradient_at, vector * 4u32);
            #[unroll]
            for component in 0..4usize {
                // A query that sees nothing has an output of zeros, and a gradient that may be anything.
                let output = o.extract(component);
                sum += select(output == 0.0f32, 0.0f32, output * g.extract(component));
                seen += select(output == 0.0f32, 0.0f32, 1.0f32);
            }
            vector += ROW_UNITS;
        }
    }
    let mut partial = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    partial[UNIT_POS as usize] = sum;
    let mut partly_seen = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    partly_seen[UNIT_POS as usize] = seen;
    sync_cube();
    if lane == 0u32 && row < row_count {
        let at = (TERMS as u32 * plane) as usize * padded as usize + query as usize;
        #[unroll]
        for term in 0..TERMS {
            target[at + term * padded as usize] = 0.0f32;
        }
    }
    if lane == 0u32 && exists {
        let mut delta = 0.0f32;
        #[unroll]
        for other in 0..comptime!(ROW_UNITS as usize) {
            delta += partial[UNIT_POS as usize + other];
            seen += partly_seen[UNIT_POS as usize + other];
        }
        let at = batch as usize * logsumexp.stride(0)
            + head as usize * logsumexp.stride(1)
            + query as usize * logsumexp.stride(2);
        let reference = logsumexp[at];
        let logarithm = logsumexp[at + logsumexp.shape(0) / 2 * logsumexp.stride(0)];
        #[comptime]
        match &logsumexp_gradient {
            ComptimeOption::Some(gradient) => {
                delta -= gradient[batch as usize * gradient.stride(0)
                    + head as usize * gradient.stride(1)
                    + query as usize * gradient.stride(2)];
            }
            ComptimeOption::None => {}
        }
        let constant = is_hidden(reference);
        let mut blind = constant;
        #[comptime]
        match &sinks {
            ComptimeOption::Some(sinks) => {
                // Beside the sink alone the sum by it is 1, and the output 0. Together both numbers would be a large sink for keys,
                // too; a sum that they leave at 1 is one of which f32 holds nothing that they have.
                let sink = f32::cast_from(sinks[head as usize * sinks.stride(0)]);
                let alone = reference == sink && logarithm == 0.0f32;
                blind = constant || (alone && seen == 0.0f32);
            }
            ComptimeOption::None => {}
        }
        let at = (TERMS as u32 * plane) as usize * padded as usize + query as usize;
        target[at + padded as usize] = select(constant, 0.0f32, delta);
        if comptime!(apart) {
            target[at] = select(blind, infinity, reference);
            target[at + 2 * padded as usize] = logarithm;
        } else {
            target[at] = select(blind, infinity, reference + logarithm);
        }
    }
}

/// A query's terms; zeros where there is no such query.
#[cube]
pub(crate) fn row_terms_of(
    rows: &Tensor<f32>,
    batch: u32,
    head: u32,
    query: i32,
    q_len: i32,
) -> RowTerms {
    let mut reference = 0.0f32;
    let mut delta = 0.0f32;
    let mut logarithm = 0.0f32;
    if query < q_len {
        let at = batch as usize * rows.stride(0) + head as usize * rows.stride(1) + query as usize;
        reference = rows[at];
        delta = rows[at + rows.stride(2)];
        logarithm = rows[at + 2 * rows.stride(2)];
    }
    RowTerms {
        reference,
        delta,
        logarithm,
    }
}
