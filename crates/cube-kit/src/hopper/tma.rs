//! Boxes of tensors by the copy engine (TMA): how it sees a tensor, loads and stores.

use crate::hopper::accumulator::Pair;
use crate::hopper::barriers::warpgroup_barrier;
use crate::hopper::ptx::{
    async_proxy_fence, pack, store_matrices, tma_load, tma_load_subtiles, tma_store, tma_store_wait,
};
use crate::hopper::wgmma::matrix_row;
use crate::hopper::{Half, SUBTILE, WARPGROUP, is_whole};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::Shape;
use burn_cubecl::{cubecl, tensor::CubeTensor};
use cubecl::prelude::*;

/// Whether all of a dimension is the same: there is one, or it is broadcast.
pub fn is_single(tensor: &CubeTensor, dim: usize) -> bool {
    tensor.meta.shape()[dim] == 1 || tensor.meta.strides()[dim] == 0
}

/// How the copy engine sees a tensor: boxes of `[1, heads, rows, 64]` elements, or of `[1, heads, subtiles, rows,
/// 64]` where `subtiles` are asked for and rows are whole subtiles. Beyond the shape it reads zeros, and writes
/// nothing.
pub fn map(
    tensor: &CubeTensor,
    [heads, rows]: [usize; 2],
    subtiles: Option<usize>,
) -> TensorMapArg<Tiled> {
    let mut shape = tensor.meta.shape().to_vec();
    let mut strides = tensor.meta.strides().to_vec();
    for dim in 0..3 {
        if is_single(tensor, dim) {
            // A stride that nothing is read by must still be a legal one.
            shape[dim] = 1;
            strides[dim] = shape[3].next_multiple_of(SUBTILE);
        }
    }
    let mut tile_size = vec![1, heads, rows, SUBTILE];
    if let Some(subtiles) = subtiles
        && is_whole(shape[3])
    {
        shape.insert(2, shape[3] / SUBTILE);
        strides.insert(2, SUBTILE);
        tile_size.insert(2, subtiles);
        shape[4] = SUBTILE;
    }
    boxes(tensor, shape, strides, tile_size)
}

/// Boxes of `tile_size` elements of a view of the tensor, which reaches no other elements.
pub fn boxes(
    tensor: &CubeTensor,
    shape: Vec<usize>,
    strides: Vec<usize>,
    tile_size: Vec<usize>,
) -> TensorMapArg<Tiled> {
    // SAFETY: the callers' shapes and strides reach the same elements as the tensor's, or fewer.
    let view = unsafe {
        TensorArg::from_raw_parts(tensor.handle.clone(), strides.into(), Shape::from(shape))
    };
    let args = TiledArgs {
        tile_size: Shape::from(tile_size),
    };
    TensorMapArg::new(args, view, dtype_to_storage_type(tensor.dtype))
        .with_swizzle(TensorMapSwizzle::B128)
}

/// Copies `subtiles` subtiles of rows from `row` and `column` on to `target`. The map is of whole subtiles
/// if these are `whole`, else of columns.
#[cube]
pub fn load_subtiles(
    target: u32,
    map: u64,
    batch: u32,
    head: u32,
    row: i32,
    barrier: u32,
    #[comptime] column: usize,
    #[comptime] subtiles: usize,
    #[comptime] subtile_bytes: usize,
    #[comptime] whole: bool,
) {
    if comptime!(whole) {
        tma_load_subtiles(
            target,
            map,
            batch,
            head,
            row,
            comptime!((column / SUBTILE) as u32),
            barrier,
        );
    } else {
        load_columns(
            target,
            map,
            batch,
            head,
            row,
            comptime!(column as u32),
            barrier,
            subtiles,
            subtile_bytes,
        );
    }
}

/// Copies `subtiles` subtiles of columns, which the map is of, one by one.
#[cube]
pub fn load_columns(
    target: u32,
    map: u64,
    batch: u32,
    head: u32,
    row: i32,
    column: u32,
    barrier: u32,
    #[comptime] subtiles: usize,
    #[comptime] subtile_bytes: usize,
) {
    #[unroll]
    for subtile in 0..subtiles {
        tma_load(
            target + comptime!((subtile * subtile_bytes) as u32),
            map,
            batch,
            head,
            row,
            column + comptime!((subtile * SUBTILE) as u32),
            barrier,
        );
    }
}

/// Before the cube ends: waits until its stores have read their sources.
#[cube]
pub fn await_stores() {
    let thread = UNIT_POS % comptime!(WARPGROUP as u32);
    if thread == 0u32 {
        tma_store_wait();
    }
}

/// Writes a warpgroup's 64 rows of output from its fragments to `target`, subtiles `subtile_bytes` apart,
/// and from there to the tensor. Each warp must be done with what was there, but for what the warpgroup last stored from it.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub fn store_tma_tiles<NO: Size>(
    o: Vector<f32, NO>,
    factors: Pair,
    target: u32,
    map: u64,
    batch: u32,
    head: u32,
    row: i32,
    first_column: u32,
    #[comptime] columns: usize,
    #[comptime] subtile_bytes: usize,
    #[comptime] own_place: bool,
    #[comptime] half: Half,
) {
    let thread = UNIT_POS % comptime!(WARPGROUP as u32);
    if comptime!(own_place) {
        if thread == 0u32 {
            tma_store_wait();
        }
    }
    // The last store has read its source: thread 0 waited for it, here or after it.
    warpgroup_barrier();
    #[unroll]
    for step in 0..columns / 16 {
        store_matrices(
            matrix_row(
                target + comptime!((step / 4 * subtile_bytes) as u32),
                comptime!(step % 4),
            ),
            pack(
                o.extract(8 * step) * factors.first,
                o.extract(8 * step + 1) * factors.first,
                half,
            ),
            pack(
                o.extract(8 * step + 2) * factors.second,
                o.extract(8 * step + 3) * factors.second,
                half,
            ),
            pack(
                o.extract(8 * step + 4) * factors.first,
                o.extract(8 * step + 5) * factors.first,
                half,
            ),
            pack(
                o.extract(8 * step + 6) * factors.second,
                o.extract(8 * step + 7) * factors.second,
                half,
            ),
        );
    }
    async_proxy_fence();
    warpgroup_barrier();
    if thread == 0u32 {
        #[unroll]
        for subtile in 0..comptime!(columns.div_ceil(SUBTILE)) {
            tma_store(
                map,
                target + comptime!((subtile * subtile_bytes) as u32),
                batch,
                head,
                row,
                first_column + comptime!((subtile * SUBTILE) as u32),
            );
        }
        if comptime!(!own_place) {
            tma_store_wait();
        }
    }
}
