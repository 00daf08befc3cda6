//! The driver function that encodes tensor maps. A tensor map describes a tensor to TMA.

use std::ffi::c_uint;

use super::{INVALID_VALUE, NOT_SUPPORTED, SUCCESS, Status};
use crate::cube::{DIMENSIONS, MAP_BYTES, TensorMap};

/// The largest number of elements of a box in one dimension.
const BOX: u64 = 256;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut [u8; MAP_BYTES],
    element_type: c_uint,
    rank: c_uint,
    start: u64,
    sizes: *const u64,
    strides: *const u64,
    boxes: *const c_uint,
    element_strides: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    _promotion: c_uint,
    fill: c_uint,
) -> Status {
    // The numbers of the element types come from `cuda.h`.
    let element = match element_type {
        0 => 1,
        1 | 6 | 9 => 2,
        2 | 3 | 7 | 10 => 4,
        4 | 5 | 8 => 8,
        _ => return NOT_SUPPORTED,
    };
    let rank = rank as usize;
    if map.is_null() || !(1..=DIMENSIONS).contains(&rank) {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes one size per dimension, and one stride for each dimension except the first.
    let (sizes, strides, boxes, element_strides) = unsafe {
        (
            std::slice::from_raw_parts(sizes, rank),
            match rank {
                1 => &[][..],
                _ => std::slice::from_raw_parts(strides, rank - 1),
            },
            std::slice::from_raw_parts(boxes, rank),
            std::slice::from_raw_parts(element_strides, rank),
        )
    };
    if interleave != 0 || fill != 0 || swizzle > 3 || element_strides.iter().any(|by| *by != 1) {
        return NOT_SUPPORTED;
    }
    let mut encoded = TensorMap {
        rank,
        element,
        swizzle,
        start,
        ..TensorMap::default()
    };
    encoded.sizes[..rank].copy_from_slice(sizes);
    encoded.strides[1..rank].copy_from_slice(strides);
    for (to, from) in encoded.boxes.iter_mut().zip(boxes) {
        *to = u64::from(*from);
    }
    if !is_valid(&encoded) {
        return INVALID_VALUE;
    }
    // SAFETY: `map` is not null, and the caller guarantees that it may be written.
    unsafe { map.write(encoded.to_bytes()) };
    SUCCESS
}

/// Returns true if the tensor map meets CUDA's requirements.
fn is_valid(map: &TensorMap) -> bool {
    let row = map.boxes[0] * map.element as u64;
    let of_dimensions = |all: &[u64; DIMENSIONS], holds: fn(u64) -> bool| {
        all[..map.rank].iter().all(|value| holds(*value))
    };
    map.start.is_multiple_of(16)
        && row.is_multiple_of(16)
        && (map.swizzle == 0 || row <= 16 << map.swizzle)
        && of_dimensions(&map.strides, |stride| {
            stride.is_multiple_of(16) && stride < 1 << 40
        })
        && of_dimensions(&map.boxes, |size| (1..=BOX).contains(&size))
        && of_dimensions(&map.sizes, |size| (1..=1 << 32).contains(&size))
}
