//! The scales of keys and values in int8: a lane has those of one key of a block, read a block ahead, and asks the others for those of its
//! columns.

use crate::engine::mma::forward::copies::{HeadRows, HeadSource, head_source};
use crate::engine::mma::forward::warp::ColumnScales;
use crate::engine::mma::plan::split_n::SplitNTiles;
use cube_kit::ampere::few_rows::read_word;
use cubecl::prelude::*;

/// Where the scales of a head's keys and values lie.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct ScaleSources {
    pub keys: HeadSource,
    pub values: HeadSource,
}

/// Those of a head; of operands without scales nothing that is read.
#[cube]
pub(super) fn scale_sources(
    key_scales: ComptimeOption<&Tensor<f32>>,
    value_scales: ComptimeOption<&Tensor<f32>>,
    head: HeadRows,
) -> ScaleSources {
    ScaleSources {
        keys: scale_source(key_scales, head),
        values: scale_source(value_scales, head),
    }
}

#[cube]
fn scale_source(scales: ComptimeOption<&Tensor<f32>>, head: HeadRows) -> HeadSource {
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

/// The scales of the lane's key of a block, and of its value: zeros where the head has none.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct LaneScales {
    pub key: f32,
    pub value: f32,
}

/// Asks for the scales of a block.
#[cube]
pub(super) fn lane_scales(
    sources: &ScaleSources,
    block: i32,
    #[comptime] tiles: SplitNTiles,
) -> LaneScales {
    let mut scales = LaneScales {
        key: f32::new(0.0),
        value: f32::new(0.0),
    };
    if comptime!(tiles.reads_words) {
        let keys = comptime!(tiles.keys as i32);
        let position = block * keys + (UNIT_POS % comptime!(tiles.keys as u32)) as i32;
        scales.key = scale_at(&sources.keys, position);
        scales.value = scale_at(&sources.values, position);
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

/// What the lane's columns of scores are multiplied by, of what all lanes have.
#[cube]
pub(super) fn column_scales(own: f32, #[comptime] tiles: SplitNTiles) -> ColumnScales {
    let mut scales = ColumnScales::zeroed();
    if comptime!(tiles.reads_words) {
        #[unroll]
        for i in 0..comptime!(tiles.keys / 4) {
            let of_pair = comptime!((8 * (i / 2) + i % 2) as u32);
            scales.insert(i, plane_shuffle(own, of_pair + UNIT_POS % 4u32 * 2u32));
        }
    }
    scales
}

/// The dots with codes as dots with keys.
#[cube]
pub(super) fn with_scales<AS: Size>(
    s: Vector<f32, AS>,
    scales: ColumnScales,
    #[comptime] tiles: SplitNTiles,
) -> Vector<f32, AS> {
    let mut s = s;
    if comptime!(tiles.reads_words) {
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
