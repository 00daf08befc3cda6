//! Products of at most 8 rows, whose operands come straight from global memory: `mma.sync` of 16 × 8 × 16 without shared memory and without
//! `ldmatrix`.
//!
//! The instruction's left operand has 16 rows, of which the upper 8 are the product's and the others zeros; its right operand has 8. Lane `l` has
//! row `l / 4` of both, and of the result elements `2 (l % 4)` and the next of that row. Which columns of the inner dimension a lane has is free, as long
//! as it has the same of both operands: what lies together in memory, so that one read brings it.

use crate::hopper::Half;
use crate::hopper::ptx::value_of;
use cubecl::prelude::*;

/// Rows of either operand.
pub const PRODUCT_ROWS: usize = 8;

/// Columns of the inner dimension of which a lane has [`PIECE`](super::copy::PIECE), 16 bytes: two products.
pub const PIECE_COLUMNS: usize = 32;

/// `words` words on their way from `offset` bytes behind an address in global memory, a multiple of as many bytes. They are read once: the cache of the
/// multiprocessor keeps none of them. Such reads stay in the order in which they are written.
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

/// The words | the address.
fn stream_text(offset: usize, words: usize) -> String {
    let names = crate::hopper::wgmma::registers(0, words);
    format!("ld.global.L1::no_allocate.v{words}.u32 {{{names}}}, [%{words}+{offset}];")
}

/// The word `offset` bytes behind an address in global memory. It stays where it is written among such reads.
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

/// 16 bytes from `offset` bytes behind an address in global memory; where `is_there` is 0, nothing is read, and they are zeros.
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

/// The words | the address, and whether they are there, which is read before any of the words is written.
fn piece_text(offset: usize) -> String {
    let zeros: String = (0..4).map(|i| format!("mov.b32 %{i}, 0;\n")).collect();
    format!(
        "{{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n{zeros}\
         @there ld.global.v4.u32 {{%0, %1, %2, %3}}, [%4+{offset}];\n}}\n"
    )
}

/// The sums with the products of 16 columns, of which the lane has two pairs of each operand. The first two of the sums are the product's.
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

/// Four sums | the same, two pairs of the left operand, two of the right one.
fn product_text(half: Half) -> String {
    let half = half.ptx();
    format!(
        "{{\n.reg .b32 zeros;\nmov.b32 zeros, 0;\n\
         mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 \
         {{%0, %1, %2, %3}}, {{%8, zeros, %9, zeros}}, {{%10, %11}}, {{%4, %5, %6, %7}};\n}}\n"
    )
}

/// The sums of two pairs of halves.
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

/// Their sums | two pairs. As products with one: of bf16 sm_80 (Ampere) has no other sums.
fn sums_text(half: Half) -> String {
    let name = half.ptx();
    let one = match half {
        Half::F16 => "0x3C003C00",
        Half::Bf16 => "0x3F803F80",
    };
    format!("{{\n.reg .b32 one;\nmov.b32 one, {one};\nfma.rn.{name}x2 %0, %1, one, %2;\n}}\n")
}
