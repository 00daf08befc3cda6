//! Ends of the forward's products, which free a stage of the tile's ring.

use crate::engine::wgmma::plan::SplitMTiles;
use cube_kit::hopper::ptx::value_of;
use cube_kit::hopper::wgmma::release_text;
use cubecl::prelude::*;

/// S, once at most one later product is in flight; frees the keys' stage.
#[cube]
pub(crate) fn take_scores<NS: Size>(
    s: Vector<f32, NS>,
    empty: u32,
    elected: u32,
    #[comptime] pending: usize,
    #[comptime] tiles: SplitMTiles,
) -> Vector<f32, NS> {
    let text = comptime!(release_text(tiles.keys / 2, tiles.fragments()[0], pending));
    let taken: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {taken} {s} {empty} {elected}\n",
        taken = out(_) taken,
        s = in(_) value_of::<Vector<f32, NS>>(s),
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected)
    );
    taken
}

/// O, once no product is in flight; frees the values' stage. P is named so that it outlives the product.
#[cube]
pub(crate) fn take_output<NO: Size, NP: Size>(
    o: Vector<f32, NO>,
    p: Vector<u32, NP>,
    empty: u32,
    elected: u32,
    #[comptime] tiles: SplitMTiles,
) -> Vector<f32, NO> {
    let text = comptime!(release_text(
        tiles.value_columns() / 2,
        tiles.fragments()[2],
        0
    ));
    let taken: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {taken} {o} {empty} {elected} {p}\n",
        taken = out(_) taken,
        o = in(_) value_of::<Vector<f32, NO>>(o),
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected),
        p = in(_) value_of::<Vector<u32, NP>>(p)
    );
    taken
}
