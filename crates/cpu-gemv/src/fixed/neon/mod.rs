//! The kernels for ARM: with int8 dot products, with products of int8 matrices, and with neither.
//!
//! The inner loops have these instructions per weight, counted in the code that rustc 1.95 emits:
//!
//! | codes | 1 row, no extension | 1 row, `sdot` | 2 rows, `smmla` | 8 rows, `sdot` | 8 rows, `smmla` |
//! |---|---|---|---|---|---|
//! | 4 bits | 1.1 | 0.65 | 0.75 | 4.6 | 2.1 |
//! | 5 bits | 1.4 | 0.92 | | | |
//! | 6 bits | 1.5 | 0.98 | | | |
//! | 8 bits | 1.3 | 0.68 | | | |
//!
//! A kernel that converts each code to f32 takes about 1.5 instructions per 4-bit weight and row. A core that
//! completes 4 instructions per cycle at 3 GHz can read 10 GB/s of Q4_0, or 19 GB/s of Q8_0, with `sdot` and one input
//! row. Products are bound by memory if a core's share of the bandwidth is less.

mod codes;
mod dots;
mod pairs;
mod rows;

use crate::fixed_point::BLOCK;
use crate::kernel::{Format, Kernel};
use crate::layout::{Layout, Rounding, Scales};
use crate::scales::Groups;
use crate::simd::{Neon, Simd};
use codes::{Codes, EightBits, FiveBits, FourBits, SixBits};

/// The variant for groups that have only a scale.
const PLAIN: u8 = 0;
/// The variant for groups that have a scale and a minimum.
const LEAST: u8 = 1;
/// The variant for groups of 16 columns that have only a scale.
const HALF_BLOCKS: u8 = 2;

/// Returns the variant for a layout, or `None` if the kernels of this module do not support the layout.
fn variant(layout: Layout) -> Option<u8> {
    let format = layout.format;
    let has_zero = format.zero() == 1 << (format.bits - 1);
    let is_whole = layout.group().is_multiple_of(BLOCK);
    match format.scales {
        _ if format.rounding != Rounding::None || format.codebook.is_some() => None,
        Scales::HalfAndLeast | Scales::BytesAndLeast | Scales::NibblesAndLeast => {
            (is_whole && format.bits < 6).then_some(LEAST)
        }
        Scales::Half { .. } | Scales::Single { .. } => {
            (is_whole && has_zero && format.bits != 6).then_some(PLAIN)
        }
        Scales::Bytes { .. } => (has_zero && format.bits == 6).then_some(HALF_BLOCKS),
        Scales::SingleAndZero => None,
    }
}

/// The kernels of an instruction set, for all formats of codes.
trait Kernels {
    /// Returns the kernel for the format of codes `C` and the variant `KIND`. `rows` is the number of input rows.
    fn of_codes<C: Codes, const KIND: u8>(layout: Layout, rows: usize) -> Kernel;

    /// Returns the kernel of a layout for `rows` input rows. `kind` is the variant of the layout.
    fn of_layout(layout: Layout, kind: u8, rows: usize) -> Kernel {
        match (layout.format.bits, kind) {
            (4, LEAST) => Self::of_codes::<FourBits, LEAST>(layout, rows),
            (4, _) => Self::of_codes::<FourBits, PLAIN>(layout, rows),
            (5, LEAST) => Self::of_codes::<FiveBits, LEAST>(layout, rows),
            (5, _) => Self::of_codes::<FiveBits, PLAIN>(layout, rows),
            (6, _) => Self::of_codes::<SixBits, HALF_BLOCKS>(layout, rows),
            _ => Self::of_codes::<EightBits, PLAIN>(layout, rows),
        }
    }
}

/// Returns the kernel of a format for `rows` input rows, or `None` if this module has no kernel for the format. The CPU
/// has the extensions for which `has_dots` and `has_products` are true: DotProd and I8MM.
pub(crate) fn kernel(
    format: Format,
    rows: usize,
    has_dots: bool,
    has_products: bool,
) -> Option<Kernel> {
    let Format::Words(layout) = format else {
        return None;
    };
    let kind = variant(layout)?;
    Some(match (has_dots, has_products) {
        (_, true) if rows > 1 => pairs::Pairs::of_layout(layout, kind, rows),
        (true, _) => rows::sdot::Rows::of_layout(layout, kind, rows),
        (false, _) => rows::plain::Rows::of_layout(layout, kind, rows),
    })
}

/// The distance in bytes at which the kernels prefetch codes.
const AHEAD: usize = 2048;

/// Prefetches the scales of the row that lies about [`AHEAD`] bytes after `row`. The CPU's own prefetcher follows only
/// increasing addresses, and a kernel reads the scales first, although they lie after the row's codes.
fn prefetch_scales(layout: Layout, row: *const u8) {
    let of_row = 4 * layout.words();
    let first = AHEAD.div_ceil(of_row) * of_row + 4 * layout.scales();
    for line in (0..4 * (layout.words() - layout.scales())).step_by(64) {
        Neon::prefetch(row.wrapping_add(first + line));
    }
}

/// Reads the parameters of a row of the weights. The function is not inlined, so that the many kernels share its code.
///
/// # Safety
/// `weights` points to a row of `layout`.
#[inline(never)]
unsafe fn read_groups(groups: &mut Groups, layout: Layout, weights: *const u8) {
    prefetch_scales(layout, weights);
    unsafe { groups.read::<Neon>(layout, weights.cast::<u32>().add(layout.scales())) };
}

/// True if the limbs of even columns come before the limbs of odd columns, as the codes do in `codes.rs`.
fn is_interleaved(layout: Layout) -> bool {
    layout.format.low_bits() == 4
}
