//! GEMV with tensor cores: matrix products of few rows, with `mma.sync` of 16 × 8 × 16. Operands may be loaded from global
//! memory straight into registers, without shared memory and without `ldmatrix`.
//!
//! The left operand of `mma.sync` has 16 rows. [`add_pairs()`] multiplies at most 8 rows, so rows 8 to 15 of the left
//! operand are zeros. [`add_pairs_of_two_rows()`] multiplies at most 16 rows. The right operand has 8 rows.
//!
//! Lane `l` holds some columns of row `l / 4` of both operands. In row `l / 4` of the result, the lane holds elements
//! `2 (l % 4)` and `2 (l % 4) + 1`.
//!
//! `mma.sync` sums over the inner columns, so the order of these columns does not matter. A lane may hold any columns,
//! if it holds the same columns of both operands. Each lane gets adjacent columns, which one load reads.

use crate::nvidia::Half;
use crate::nvidia::ptx::value_of;
use cubecl::prelude::*;

/// The number of rows of the right operand of `mma.sync`. [`add_pairs()`] also uses only the first 8 rows of the left
/// operand, and the other rows of the left operand are zeros.
pub const PRODUCT_ROWS: usize = 8;

/// The number of inner columns per step. In each step, a lane loads one [`PIECE`](super::cp_async::PIECE) of 16 bytes
/// per operand. The loaded pieces are the operands of two `mma.sync`.
pub const PIECE_COLUMNS: usize = 32;

/// Starts a load of `words` words at `offset` bytes after a global address, without keeping the data in the L1 cache.
/// The loaded address must be aligned to the size of the load.
///
/// Calls of this function stay in program order.
#[cube]
pub fn stream<N: Size>(
    address: u64,
    #[comptime] offset: usize,
    #[comptime] words: usize,
) -> Vector<u32, N> {
    let text = comptime!(stream_text(offset, words));
    let read: Vector<u32, N>;
    gpu_asm!(
        "{text} // {read} {address}\n",
        read = out(_) read,
        address = in(_) value_of::<u64>(address)
    );
    read
}

/// Returns the PTX of [`stream()`]. Outputs: the words. Input: the address.
fn stream_text(offset: usize, words: usize) -> String {
    let names = crate::hopper::wgmma::registers(0, words);
    format!("ld.global.L1::no_allocate.v{words}.u32 {{{names}}}, [%{words}+{offset}];")
}

/// Loads the word at `offset` bytes after a global address. Calls of this function stay in program order.
#[cube]
pub fn read_word(address: u64, #[comptime] offset: usize) -> u32 {
    let word: u32;
    gpu_asm!(
        "ld.global.u32 {word}, [{address}+{offset}];",
        word = out(_) word,
        address = in(_) value_of::<u64>(address)
    );
    word
}

/// Loads 16 bytes at `offset` bytes after a global address. If `is_there` is 0, the function reads no memory and
/// returns zeros.
#[cube]
pub fn read_piece_if(
    address: u64,
    is_there: u32,
    #[comptime] offset: usize,
) -> Vector<u32, Const<4>> {
    let text = comptime!(piece_text(offset));
    let piece: Vector<u32, Const<4>>;
    gpu_asm!(
        "{text} // {piece} {address} {is_there}\n",
        piece = out(_) piece,
        address = in(_) value_of::<u64>(address),
        is_there = in(_) value_of::<u32>(is_there)
    );
    piece
}

/// Returns the PTX of [`read_piece_if()`]. Outputs: the words. Inputs: the address and the condition. The PTX reads the
/// condition before it writes any word, because the compiler may assign one register to the condition and to a word.
fn piece_text(offset: usize) -> String {
    let zeros: String = (0..4).map(|i| format!("mov.b32 %{i}, 0;\n")).collect();
    format!(
        "{{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n{zeros}\
         @there ld.global.v4.u32 {{%0, %1, %2, %3}}, [%4+{offset}];\n}}\n"
    )
}

/// Loads 8 bytes at `offset` bytes after a global address, and 8 bytes `apart` bytes further on. If `is_there` is 0,
/// the function reads no memory and returns zeros.
#[cube]
pub fn read_half_pieces_if(
    address: u64,
    is_there: u32,
    #[comptime] offset: usize,
    #[comptime] apart: usize,
) -> Vector<u32, Const<4>> {
    let text = comptime!(half_pieces_text(offset, apart));
    let piece: Vector<u32, Const<4>>;
    gpu_asm!(
        "{text} // {piece} {address} {is_there}\n",
        piece = out(_) piece,
        address = in(_) value_of::<u64>(address),
        is_there = in(_) value_of::<u32>(is_there)
    );
    piece
}

/// Returns the PTX of [`read_half_pieces_if()`]. As in [`read_piece_if()`], the PTX reads the condition before it
/// writes any word.
fn half_pieces_text(offset: usize, apart: usize) -> String {
    let zeros: String = (0..4).map(|i| format!("mov.b32 %{i}, 0;\n")).collect();
    format!(
        "{{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n{zeros}\
         @there ld.global.v2.u32 {{%0, %1}}, [%4+{offset}];\n\
         @there ld.global.v2.u32 {{%2, %3}}, [%4+{}];\n}}\n",
        offset + apart
    )
}

/// Multiplies 16 inner columns and adds the result to `sums`. The lane passes two pairs of columns of each operand.
/// Only the first two elements of the lane's result have a meaning, because rows 8 to 15 of the left operand are zeros.
#[cube]
pub fn add_pairs(
    sums: Vector<f32, Const<4>>,
    left: u32,
    next_left: u32,
    right: u32,
    next_right: u32,
    #[comptime] half: Half,
) -> Vector<f32, Const<4>> {
    let text = comptime!(product_text(half));
    let sum: Vector<f32, Const<4>>;
    gpu_asm!(
        "{text} // {sum} {before} {left} {next_left} {right} {next_right}\n",
        sum = out(_) sum,
        before = in(_) value_of::<Vector<f32, Const<4>>>(sums),
        left = in(_) value_of::<u32>(left),
        next_left = in(_) value_of::<u32>(next_left),
        right = in(_) value_of::<u32>(right),
        next_right = in(_) value_of::<u32>(next_right),
        options(pure, nomem)
    );
    sum
}

/// Returns the PTX of [`add_pairs()`]. Outputs: four sums. Inputs: the four previous sums, two pairs of the left
/// operand, and two pairs of the right operand.
fn product_text(half: Half) -> String {
    let half = half.ptx();
    format!(
        "{{\n.reg .b32 zeros;\nmov.b32 zeros, 0;\n\
         mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 \
         {{%0, %1, %2, %3}}, {{%8, zeros, %9, zeros}}, {{%10, %11}}, {{%4, %5, %6, %7}};\n}}\n"
    )
}

/// Multiplies 16 inner columns of 16 rows and adds the result to `sums`. Lane `l` passes two pairs of columns of rows
/// `l / 4` (`upper`) and `l / 4 + 8` (`lower`) of the left operand, and of row `l / 4` of the right operand. The first
/// two elements of the lane's result are in row `l / 4`, and the last two elements are in row `l / 4 + 8`.
#[cube]
pub fn add_pairs_of_two_rows(
    sums: Vector<f32, Const<4>>,
    upper: u32,
    next_upper: u32,
    lower: u32,
    next_lower: u32,
    right: u32,
    next_right: u32,
    #[comptime] half: Half,
) -> Vector<f32, Const<4>> {
    let text = comptime!(product_of_two_rows_text(half));
    let sum: Vector<f32, Const<4>>;
    gpu_asm!(
        "{text} // {sum} {before} {upper} {next_upper} {lower} {next_lower} {right} {next_right}\n",
        sum = out(_) sum,
        before = in(_) value_of::<Vector<f32, Const<4>>>(sums),
        upper = in(_) value_of::<u32>(upper),
        next_upper = in(_) value_of::<u32>(next_upper),
        lower = in(_) value_of::<u32>(lower),
        next_lower = in(_) value_of::<u32>(next_lower),
        right = in(_) value_of::<u32>(right),
        next_right = in(_) value_of::<u32>(next_right),
        options(pure, nomem)
    );
    sum
}

/// Returns the PTX of [`add_pairs_of_two_rows()`]. Outputs: four sums. Inputs: the four previous sums, two pairs of
/// each of the two rows of the left operand, and two pairs of the right operand.
fn product_of_two_rows_text(half: Half) -> String {
    let half = half.ptx();
    format!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 \
         {{%0, %1, %2, %3}}, {{%8, %10, %9, %11}}, {{%12, %13}}, {{%4, %5, %6, %7}};"
    )
}

/// Adds two packed pairs of half-precision numbers (f16 or bf16) element by element.
#[cube]
pub fn add_halves(a: u32, b: u32, #[comptime] half: Half) -> u32 {
    let text = comptime!(sums_text(half));
    let sum: u32;
    gpu_asm!(
        "{text} // {sum} {a} {b}\n",
        sum = out(_) sum,
        a = in(_) value_of::<u32>(a),
        b = in(_) value_of::<u32>(b),
        options(pure, nomem)
    );
    sum
}

/// Returns the PTX of [`add_halves()`]. Output: the packed sums. Inputs: two packed pairs. The PTX multiplies the first
/// pair by one and adds the second pair, because sm_80 (Ampere) has no plain addition of bf16.
fn sums_text(half: Half) -> String {
    let name = half.ptx();
    let one = match half {
        Half::F16 => "0x3C003C00",
        Half::Bf16 => "0x3F803F80",
    };
    format!("{{\n.reg .b32 one;\nmov.b32 one, {one};\nfma.rn.{name}x2 %0, %1, one, %2;\n}}\n")
}
