//! Copies rows of any width and strides into rows that start at multiples of 16 bytes, as TMA requires.
//!
//! Schedule: a unit writes one 16-byte vector. The unit reads the elements of this vector in the widest loads that the
//! source allows. Budget: no shared memory, and one vector in registers. Bound: memory.

use crate::math::layout::{head_rows, row_offset};
use cubecl::prelude::*;

/// Writes `vectors` vectors of the contiguous `target`. A row of `target` consists of `row_vectors` vectors. These
/// vectors hold the `columns` elements of a source row, and then zeros as padding.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn align_rows<E: Numeric, N: Size, M: Size>(
    source: &Tensor<Vector<E, N>>,
    target: &mut Tensor<Vector<E, M>>,
    heads: u32,
    length: u32,
    columns: u32,
    row_vectors: u32,
    vectors: usize,
    #[define(E)] _element: ElemType,
    #[define(N)] _source_vector: usize,
    #[define(M)] _target_vector: usize,
) {
    let index = ABSOLUTE_POS;
    if index >= vectors {
        terminate!();
    }
    let target_size = target.vector_size();
    let first = (index % row_vectors as usize) as u32 * comptime!(target_size as u32);
    let row = (index / row_vectors as usize) as u32;
    let plane = row / length;
    let rows = head_rows(
        source,
        plane / heads,
        plane % heads,
        0i32,
        length as i32,
        columns,
    );
    let start = row_offset(&rows, row % length, false);
    let size = source.vector_size();
    let mut copied = Vector::<E, M>::zeroed();
    #[unroll]
    for step in 0..comptime!(target_size / size) {
        let column = first + comptime!((step * size) as u32);
        if column < columns {
            let values = source[(start + column as usize * rows.column_stride) / size];
            #[unroll]
            for lane in 0..size {
                copied.insert(comptime!(step * size + lane), values.extract(lane));
            }
        }
    }
    target[index] = copied;
}
