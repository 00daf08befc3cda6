//! Waits for the forward's GEMMs. Each wait also frees the shared-memory buffer that the GEMM has read.

use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use cube_kit::hopper::wgmma::release_text;
use cube_kit::nvidia::ptx::value_of;
use cubecl::prelude::*;

/// Waits until at most `pending` wgmma groups are in flight. S is then complete. Frees the shared-memory buffer of K,
/// and returns S.
#[cube]
pub(crate) fn take_scores<NS: Size>(
    s: Vector<f32, NS>,
    empty: u32,
    elected: u32,
    #[comptime] pending: usize,
    #[comptime] tiles: WgmmaSplitMTiles,
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

/// Waits until O is complete. Then frees the shared-memory buffer of V, and returns O. The asm lists P as an operand,
/// so that the compiler does not reuse P's registers before the GEMM has read them.
#[cube]
pub(crate) fn take_output<NO: Size, NP: Size>(
    o: Vector<f32, NO>,
    p: Vector<u32, NP>,
    empty: u32,
    elected: u32,
    #[comptime] tiles: WgmmaSplitMTiles,
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
