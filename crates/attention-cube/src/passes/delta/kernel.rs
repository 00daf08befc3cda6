//! Before the backward: the logsumexp and `Δ = rowsum(do ∘ o) − dlse` of every query: of a head all references, then all Δ, and
//! then all logarithms of the sums by the references, each padded with zeros to a multiple of [`MULTIPLE`]. Together a reference
//! and a logarithm are the logsumexp. Kernels that read one number of it have it as the reference; where it is [`FAR`], they have a
//! mark there, and the reference behind the logarithm.
//!
//! Budget: 1 KB of shared memory, one vector of each operand in registers. Bound by memory: reads the
//! output and its gradient once. Eight units share a row.

use super::form::LogsumexpForm;
use crate::math::gradient::RowTerms;
use crate::math::layout::{head_rows, row_offset};
use crate::math::score::{is_hidden, saw_no_key};
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

/// References from here on are far from 0. Below, the logsumexp's rounding is within 2⁻¹³ of P, less than half precision's own.
pub(crate) const FAR: f32 = 2048.0;

/// The bits of −0, which far queries have in place of a logsumexp: to subtract it changes nothing.
const FAR_MARK: u32 = 0x8000_0000;

/// Whether a query is far, by the first of its terms.
#[cube]
pub(crate) fn is_far(logsumexp: f32) -> bool {
    u32::reinterpret(logsumexp) == comptime!(FAR_MARK)
}

/// Numbers of a query.
pub(crate) const TERMS: usize = 4;

/// Places of a query's logarithm among these, and of a far query's reference.
pub(crate) const LOGARITHM: usize = 2;
pub(crate) const REFERENCE: usize = 3;

/// Hopper's copy engine reads rows that start at multiples of 16 bytes.
pub(crate) const MULTIPLE: usize = 4;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn row_terms<E: Float, N: Size>(
    output: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    logsumexp: &Tensor<f32>,
    logsumexp_gradient: ComptimeOption<&Tensor<f32>>,
    target: &mut Tensor<f32>,
    q_heads: u32,
    q_len: u32,
    padded: u32,
    row_count: u32,
    value_dim: u32,
    infinity: f32,
    #[comptime] form: LogsumexpForm,
    #[define(E)] _element: ElemType,
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
            }
            vector += ROW_UNITS;
        }
    }
    let mut partial = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    partial[UNIT_POS as usize] = sum;
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
        let blind = constant || saw_no_key(logarithm);
        let at = (TERMS as u32 * plane) as usize * padded as usize + query as usize;
        target[at + padded as usize] = select(constant, 0.0f32, delta);
        let is_marked =
            comptime!(form == LogsumexpForm::Marked) && reference.abs() >= FAR && !blind;
        if comptime!(form == LogsumexpForm::Apart) {
            target[at] = select(blind, infinity, reference);
            target[at + 2 * padded as usize] = logarithm;
        } else if is_marked {
            target[at] = f32::reinterpret(u32::new(comptime!(FAR_MARK as i64)));
            target[at + LOGARITHM * padded as usize] = logarithm;
            target[at + REFERENCE * padded as usize] = reference;
        } else {
            let sum = reference + logarithm;
            // A sum of −0 would be the mark.
            let logsumexp = select(sum == 0.0f32, 0.0f32, sum);
            target[at] = select(blind, infinity, logsumexp);
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
