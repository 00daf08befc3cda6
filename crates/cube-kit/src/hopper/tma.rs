//! TMA access to tensors in boxes: tensor maps, loads and stores.

use crate::hopper::WARPGROUP;
use crate::hopper::barriers::warpgroup_barrier;
use crate::hopper::ptx::{
    async_proxy_fence, store_matrices, tma_load, tma_load_subtiles, tma_store, tma_store_wait,
};
use crate::hopper::wgmma::matrix_row;
use crate::nvidia::accumulator::Pair;
use crate::nvidia::ptx::pack;
use crate::nvidia::{Half, SUBTILE, is_whole};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::Shape;
use burn_cubecl::{cubecl, tensor::CubeTensor};
use cubecl::prelude::*;
pub use cubecl_cpp::cuda::ptx::tensor_map_address;

/// True if all indices of the dimension lead to the same elements. This is the case if the dimension's size is 1, or if
/// the dimension is broadcast (stride 0).
pub fn is_single(tensor: &CubeTensor, dim: usize) -> bool {
    tensor.meta.shape()[dim] == 1 || tensor.meta.strides()[dim] == 0
}

/// Builds the tensor map of a tensor `[batch, heads, length, columns]`. If `subtiles` is given and the rows consist of
/// whole subtiles of 64 columns, a box is `[1, heads, subtiles, rows, 64]`. Otherwise a box is `[1, heads, rows, 64]`.
///
/// Reads beyond the shape give zeros, and writes beyond the shape are dropped.
pub fn map(
    tensor: &CubeTensor,
    [heads, rows]: [usize; 2],
    subtiles: Option<usize>,
) -> TensorMapArg<Tiled> {
    let mut shape = tensor.meta.shape().to_vec();
    let mut strides = tensor.meta.strides().to_vec();
    for dim in 0..3 {
        if is_single(tensor, dim) {
            // Treat the dimension as one of size 1, with a stride that TMA accepts. TMA checks this stride, although
            // TMA never uses the stride.
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

/// Builds a tensor map with boxes of shape `tile_size` over a view with the given `shape` and `strides`. All elements
/// of the view must be elements of the tensor.
pub fn boxes(
    tensor: &CubeTensor,
    shape: Vec<usize>,
    strides: Vec<usize>,
    tile_size: Vec<usize>,
) -> TensorMapArg<Tiled> {
    // SAFETY: the callers choose `shape` and `strides` such that every index below `shape` is an element of `tensor`.
    let view = unsafe {
        TensorArg::from_raw_parts(tensor.handle.clone(), strides.into(), Shape::from(shape))
    };
    let args = TiledArgs {
        tile_size: Shape::from(tile_size),
    };
    TensorMapArg::new(args, view, dtype_to_storage_type(tensor.dtype))
        .with_swizzle(TensorMapSwizzle::B128)
}

/// Copies `subtiles` subtiles (of 64 columns) to `target`. The source begins at row `row` and column `column` of the
/// tensor.
///
/// If `whole` is true, one box contains all these subtiles, and one copy loads them. Otherwise each subtile is copied
/// separately.
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

/// Copies `subtiles` subtiles one by one, through a tensor map with boxes of 64 columns.
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

/// Waits until the cube's TMA stores have read shared memory. A cube must call this function before it ends, because
/// the end of the cube frees the shared memory.
#[cube]
pub fn await_stores() {
    let thread = UNIT_POS % comptime!(WARPGROUP as u32);
    if thread == 0u32 {
        tma_store_wait();
    }
}

/// Multiplies a warpgroup's 64 output rows by `factors`. Writes the rows from the accumulator fragments to `target` in
/// shared memory, and from there to the tensor. Neighboring subtiles in shared memory are `subtile_bytes` apart.
///
/// Before the call, each warp must have finished its reads of the previous data at `target`. Only the warpgroup's own
/// last TMA store may still read that data.
///
/// If `own_place` is true, no operand is loaded to `target` after the call. Each call then waits at its start for the TMA
/// store of the previous call. If `own_place` is false, an operand may be loaded to `target` after the call. Each call
/// then waits at its end for its own TMA store.
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
    // The warpgroup may overwrite the data at `target` after this barrier, because thread 0 has waited until the
    // previous TMA store has read the data.
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
