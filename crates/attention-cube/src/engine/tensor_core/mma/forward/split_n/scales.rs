//! The scales of quantized keys and values. Each lane loads the scale of one key and the scale of the matching value.
//! The lane loads the scales of a block while the warp processes its previous block. Warp shuffles then give each lane
//! the scales of the score columns that the lane holds.

use super::pages::{PageSources, page_of_block, paged_head};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::forward::load::{HeadRows, HeadSource, head_source};
use crate::engine::tensor_core::mma::forward::warp::ColumnScales;
use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
use cube_kit::ampere::gemv::read_word;
use cubecl::prelude::*;

/// The addresses of the scales of a head's keys and values.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct ScaleSources {
    pub keys: HeadSource,
    pub values: HeadSource,
}

/// Computes the addresses of a head's scales. The addresses are not used if the operands have no scales.
#[cube]
pub(super) fn scale_sources(
    key_scales: &ComptimeOption<OwnedTensor<f32>>,
    value_scales: &ComptimeOption<OwnedTensor<f32>>,
    head: HeadRows,
) -> ScaleSources {
    ScaleSources {
        keys: scale_source(key_scales, head),
        values: scale_source(value_scales, head),
    }
}

#[cube]
fn scale_source(scales: &ComptimeOption<OwnedTensor<f32>>, head: HeadRows) -> HeadSource {
    let mut address = 0u64;
    let mut row_bytes = 0u64;
    #[comptime]
    match scales {
        ComptimeOption::Some(scales) => {
            let source = head_source::<f32>(scales, head);
            address = source.address;
            row_bytes = source.row_bytes;
        }
        ComptimeOption::None => {}
    }
    HeadSource {
        address,
        row_bytes,
        first: head.first,
        end: head.end,
    }
}

/// The scales of one key and of its value. Each lane holds the scales of one row of a block, or zeros if the head has
/// no such row.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct LaneScales {
    pub key: f32,
    pub value: f32,
}

/// Loads the scales of a block. Each lane loads the scales of one key and of its value.
#[cube]
pub(super) fn lane_scales(
    sources: &ScaleSources,
    pages: &PageSources,
    block: i32,
    #[comptime] tiles: MmaSplitNTiles,
    #[comptime] kind: TileKind,
) -> LaneScales {
    let mut scales = LaneScales {
        key: f32::new(0.0),
        value: f32::new(0.0),
    };
    if comptime!(tiles.codes.is_some()) {
        let keys = comptime!(tiles.keys as i32);
        let first = block * keys;
        let position = first + (UNIT_POS % comptime!(tiles.keys as u32)) as i32;
        let page = page_of_block(pages, block, tiles, kind);
        let of_keys = paged_head(sources.keys, pages.key_scale_bytes, page, first, kind);
        let of_values = paged_head(sources.values, pages.value_scale_bytes, page, first, kind);
        scales.key = scale_at(&of_keys, position);
        scales.value = scale_at(&of_values, position);
    }
    scales
}

#[cube]
fn scale_at(source: &HeadSource, position: i32) -> f32 {
    let mut scale = f32::new(0.0);
    if position >= source.first && position < source.end {
        let at = source.address + position as u64 * source.row_bytes;
        scale = f32::reinterpret(read_word(at, 0usize));
    }
    scale
}

/// Returns the scales of the score columns that the lane holds. Warp shuffles gather these scales from all lanes.
#[cube]
pub(super) fn column_scales(own: f32, #[comptime] tiles: MmaSplitNTiles) -> ColumnScales {
    let mut scales = ColumnScales::zeroed();
    if comptime!(tiles.codes.is_some()) {
        #[unroll]
        for i in 0..comptime!(tiles.keys / 4) {
            let of_pair = comptime!((8 * (i / 2) + i % 2) as u32);
            scales.insert(i, plane_shuffle(own, of_pair + UNIT_POS % 4u32 * 2u32));
        }
    }
    scales
}

/// Multiplies the scores, which are dot products of queries and codes, by the scales of the keys.
#[cube]
pub(super) fn with_scales<AS: Size>(
    s: Vector<f32, AS>,
    scales: ColumnScales,
    #[comptime] tiles: MmaSplitNTiles,
) -> Vector<f32, AS> {
    let mut s = s;
    if comptime!(tiles.codes.is_some()) {
        let count = comptime!(tiles.vectors()[0]);
        #[unroll]
        for fragment in 0..tiles.fragments {
            #[unroll]
            for i in 0..comptime!(tiles.keys / 2) {
                let register = comptime!(fragment * count + i);
                let scale = scales.extract(comptime!(2 * (i / 4) + i % 2));
                s.insert(register, s.extract(register) * scale);
            }
        }
    }
    s
}
