//! Inline PTX that Ampere and Hopper share: addresses, small arithmetic, words of shared memory, `ldmatrix`.
//!
//! Addresses are byte addresses in the shared window (`.shared`). In a PTX text, `%N` is operand number `N`. The
//! outputs are numbered before the inputs. `gpu_asm!` requires that its text contains every operand once, so a trailing
//! PTX comment lists the operands.

use crate::nvidia::Half;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Returns the value of a local variable. `gpu_asm!` accepts only a value, but a mutable local variable is a memory
/// location.
#[cube]
pub fn value_of<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| { x.read_value(scope).into() })
}

/// Emits a PTX text without operands.
#[cube]
pub(crate) fn plain(#[comptime] text: String) {
    gpu_asm!("{text}");
}

/// Emits a PTX text with one u32 operand.
#[cube]
pub(crate) fn with_one(a: u32, #[comptime] text: String) {
    gpu_asm!("{text} // {a}\n", a = in(_) value_of::<u32>(a));
}

/// Emits a PTX text with two u32 operands.
#[cube]
pub(crate) fn with_two(a: u32, b: u32, #[comptime] text: String) {
    gpu_asm!("{text} // {a} {b}\n", a = in(_) value_of::<u32>(a), b = in(_) value_of::<u32>(b));
}

/// Returns the address of `memory` in the shared window.
#[cube]
pub fn shared_address(memory: &Shared<[u32]>) -> u32 {
    // SAFETY: this expression only takes the address of `memory` and reads no memory.
    generic_to_shared::<u32>(unsafe { memory.as_slice().as_ptr_unchecked() })
}

/// Returns `2^x` within 2 ulps. The function flushes subnormals to zero.
#[cube]
pub fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) value_of::<f32>(x), options(pure, nomem));
    y
}

/// Returns `1 / x` within 1 ulp. The function flushes subnormals to zero.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("rcp.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) value_of::<f32>(x), options(pure, nomem));
    y
}

/// Returns the smaller of two f32 numbers, or NaN if one of them is NaN.
#[cube]
pub fn fmin_nan(a: f32, b: f32) -> f32 {
    let y: f32;
    gpu_asm!(
        "min.NaN.f32 {y}, {a}, {b};",
        y = out(_) y,
        a = in(_) value_of::<f32>(a),
        b = in(_) value_of::<f32>(b),
        options(pure, nomem)
    );
    y
}

/// Moves a number that is equal in all lanes of the warp into a uniform register. Numbers that the kernel computes from
/// this number are then uniform as well. If the lanes differ, the result is the bitwise or of their numbers.
#[cube]
pub fn uniform(x: u32) -> u32 {
    let y: u32;
    gpu_asm!(
        "redux.sync.or.b32 {y}, {x}, 0xFFFFFFFF;",
        y = out(_) y,
        x = in(_) value_of::<u32>(x)
    );
    y
}

/// Returns `x`, and keeps the compiler from moving the computation of `x` behind the next inline assembly with side
/// effects. Without this function, the compiler would move the computation to the first use of `x`, for example behind
/// a wait.
#[cube]
pub fn computed_here(x: u32) -> u32 {
    let y: u32;
    gpu_asm!("mov.b32 {y}, {x};", y = out(_) y, x = in(_) value_of::<u32>(x));
    y
}

/// Compares the two f16 halves of `x` and `y`. If `above`, the comparison is true where `x` is greater than `y`. Otherwise
/// it is true where `x` is not greater than `y`, or is NaN. In each half of the result, all bits are 1 if the comparison
/// is true, and 0 otherwise.
#[cube]
pub fn mask_of_f16(x: u32, y: u32, #[comptime] above: bool) -> u32 {
    let mask: u32;
    let comparison = comptime!(comparison(above));
    gpu_asm!(
        "set.{comparison}.u32.f16x2 {mask}, {x}, {y};",
        mask = out(_) mask,
        x = in(_) value_of::<u32>(x),
        y = in(_) value_of::<u32>(y),
        options(pure, nomem)
    );
    mask
}

/// Compares the two halves of `x` and `y` as [`mask_of_f16`] does. Each half of the result is the f16 number 1 if the
/// comparison is true, and 0 otherwise.
#[cube]
pub fn ones_of_f16(x: u32, y: u32, #[comptime] above: bool) -> u32 {
    let ones: u32;
    let comparison = comptime!(comparison(above));
    gpu_asm!(
        "set.{comparison}.f16x2.f16x2 {ones}, {x}, {y};",
        ones = out(_) ones,
        x = in(_) value_of::<u32>(x),
        y = in(_) value_of::<u32>(y),
        options(pure, nomem)
    );
    ones
}

/// Returns the PTX name of the comparison of [`mask_of_f16`].
fn comparison(above: bool) -> &'static str {
    if above { "gt" } else { "leu" }
}

/// Multiplies the two halves of `x` and `y`.
#[cube]
pub fn half_products(x: u32, y: u32, #[comptime] half: Half) -> u32 {
    let products: u32;
    // `mul.bf16x2` needs Hopper. The sum with −0 keeps the sign of a product of 0.
    let name = comptime!(half.ptx());
    gpu_asm!(
        "fma.rn.{name}x2 {products}, {x}, {y}, {zeros};",
        products = out(_) products,
        x = in(_) value_of::<u32>(x),
        y = in(_) value_of::<u32>(y),
        zeros = in(_) value_of::<u32>(0x8000_8000u32),
        options(pure, nomem)
    );
    products
}

/// Returns a word of four selected bytes of `low` (indices 0 to 3) and `high` (indices 4 to 7). Hexadecimal digit `i`
/// of `selector`, counted from the lowest digit, is the index of the byte that becomes byte `i` of the result.
#[cube]
pub fn permuted_bytes(low: u32, high: u32, selector: u32) -> u32 {
    let bytes: u32;
    gpu_asm!(
        "prmt.b32 {bytes}, {low}, {high}, {selector};",
        bytes = out(_) bytes,
        low = in(_) value_of::<u32>(low),
        high = in(_) value_of::<u32>(high),
        selector = in(_) value_of::<u32>(selector),
        options(pure, nomem)
    );
    bytes
}

/// Rounds two f32 values to half precision, and packs them into a word. `low` goes to the low bits.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] half: Half) -> u32 {
    let name = comptime!(half.ptx());
    let y: u32;
    gpu_asm!(
        "cvt.rn.{name}x2.f32 {y}, {high}, {low};",
        y = out(_) y,
        high = in(_) value_of::<f32>(high),
        low = in(_) value_of::<f32>(low),
        options(pure, nomem)
    );
    y
}

/// Returns a pointer as an integer, for use in `gpu_asm!` only.
#[cube]
pub(crate) fn number_of<T: CubePrimitive>(pointer: *const T) -> u64 {
    // SAFETY: no memory is read. `*pointer` only builds an expression of the kernel, whose value is the pointer.
    intrinsic!(|scope| unsafe { *pointer }.value(scope).into())
}

/// Returns the global address that is `index` 4-byte words after `start`.
#[cube]
pub fn word_address<T: CubePrimitive>(start: *const T, index: u64) -> u64 {
    element_address::<T>(start, index, 4usize)
}

/// Returns the global address that is `index` elements after `start`. An element has `bytes` bytes.
#[cube]
pub fn element_address<T: CubePrimitive>(
    start: *const T,
    index: u64,
    #[comptime] bytes: usize,
) -> u64 {
    let address: u64;
    gpu_asm!(
        "mad.lo.u64 {address}, {index}, {bytes}, {start};",
        address = out(_) address,
        index = in(_) value_of::<u64>(index),
        start = in(_) number_of::<T>(start),
        options(pure, nomem)
    );
    address
}

/// Loads the word `offset` words after a global address, through the read-only cache. No launch may write this word
/// while the kernel runs.
#[cube]
pub fn load_word(address: u64, #[comptime] offset: usize) -> u32 {
    let bytes = comptime!(4 * offset);
    let word: u32;
    gpu_asm!(
        "ld.global.nc.b32 {word}, [{address}+{bytes}];",
        word = out(_) word,
        address = in(_) value_of::<u64>(address)
    );
    word
}

/// Atomically adds 1 to the word at a global address, and returns the previous value of the word.
#[cube]
pub fn atomic_inc(address: u64) -> u32 {
    let before: u32;
    gpu_asm!(
        "atom.global.relaxed.gpu.add.u32 {before}, [{address}], 1;",
        before = out(_) before,
        address = in(_) value_of::<u64>(address)
    );
    before
}

/// Unpacks the two half-precision elements of a word to f32. The element in the low bits comes first.
#[cube]
pub fn unpack(word: u32, #[comptime] half: Half) -> Vector<f32, Const<2>> {
    let name = comptime!(half.ptx());
    let both: Vector<f32, Const<2>>;
    gpu_asm!(
        "{{.reg .b16 low, high; mov.b32 {{low, high}}, %2; cvt.f32.{name} %0, low; cvt.f32.{name} %1, high;}} // {both} {word}\n",
        both = out(_) both,
        word = in(_) value_of::<u32>(word),
        options(pure, nomem)
    );
    both
}

/// Compares the low elements of `a` and `b`, and compares their high elements. Each word holds two half-precision
/// elements. Returns a word with the two smaller elements. If only one of two compared elements is NaN, the other
/// element counts as the smaller one.
#[cube]
pub fn smaller_halves(a: u32, b: u32, #[comptime] half: Half) -> u32 {
    let name = comptime!(half.ptx());
    let y: u32;
    gpu_asm!(
        "min.{name}x2 {y}, {a}, {b};",
        y = out(_) y,
        a = in(_) value_of::<u32>(a),
        b = in(_) value_of::<u32>(b),
        options(pure, nomem)
    );
    y
}

/// Synchronizes `units` threads at the named barrier `id`, which must be from 1 to 15. `sync_cube` uses barrier 0.
#[cube]
pub fn named_barrier(id: u32, #[comptime] units: usize) {
    with_one(id, comptime!(format!("bar.sync %0, {units};\n")));
}

/// Arrives at the named barrier `id` without waiting.
#[cube]
pub fn named_barrier_arrive(id: u32, #[comptime] units: usize) {
    with_one(id, comptime!(format!("bar.arrive %0, {units};\n")));
}

/// Atomically sets those bits of a word in shared memory that are set in `bits`.
#[cube]
pub fn or_shared(address: u32, bits: u32) {
    with_two(
        address,
        bits,
        comptime!("red.shared::cta.or.b32 [%0], %1;\n".to_string()),
    );
}

/// Writes a word to shared memory.
#[cube]
pub fn store_shared(address: u32, value: u32) {
    with_two(
        address,
        value,
        comptime!("st.shared::cta.b32 [%0], %1;\n".to_string()),
    );
}

/// Writes four words to shared memory. The address must be a multiple of 16 bytes.
#[cube]
pub fn store_shared_four(address: u32, words: Vector<u32, Const<4>>) {
    let text = comptime!("st.shared::cta.v4.b32 [%0], {%1, %2, %3, %4};\n".to_string());
    gpu_asm!(
        "{text} // {address} {words}\n",
        address = in(_) value_of::<u32>(address),
        words = in(_) value_of::<Vector<u32, Const<4>>>(words)
    );
}

/// Writes 16 zero bytes to shared memory.
#[cube]
pub fn zero_fill_shared(address: u32) {
    with_one(
        address,
        comptime!(
            "{\n.reg .b32 zero;\nmov.b32 zero, 0;\nst.shared::cta.v4.b32 [%0], {zero, zero, zero, zero};\n}\n"
                .to_string()
        ),
    );
}

/// Reads a word of shared memory.
#[cube]
pub fn load_shared(address: u32) -> u32 {
    let x: u32;
    gpu_asm!("ld.shared::cta.b32 {x}, [{a}];", x = out(_) x, a = in(_) value_of::<u32>(address));
    x
}

/// Loads two adjacent f32 values from shared memory. The address must be a multiple of 8 bytes.
#[cube]
pub fn load_shared_pair(address: u32) -> Vector<f32, Const<2>> {
    let text = comptime!("ld.shared::cta.v2.f32 {%0, %1}, [%2];\n".to_string());
    let pair: Vector<f32, Const<2>>;
    gpu_asm!(
        "{text} // {pair} {x}\n",
        pair = out(_) pair,
        x = in(_) value_of::<u32>(address)
    );
    pair
}

/// Loads four adjacent f32 values from shared memory. The address must be a multiple of 16 bytes.
#[cube]
pub fn load_shared_four(address: u32) -> Vector<f32, Const<4>> {
    let text = comptime!("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];\n".to_string());
    let four: Vector<f32, Const<4>>;
    gpu_asm!(
        "{text} // {four} {x}\n",
        four = out(_) four,
        x = in(_) value_of::<u32>(address)
    );
    four
}

/// Loads four 8 × 8 matrices of half-precision elements from shared memory, in the register layout of `store_matrices`.
#[cube]
pub fn load_matrices(address: u32) -> Vector<u32, Const<4>> {
    load_four_matrices(address, false)
}

/// Loads four 8 × 8 matrices as [`load_matrices()`] does, but transposes each matrix.
#[cube]
pub fn load_matrices_transposed(address: u32) -> Vector<u32, Const<4>> {
    load_four_matrices(address, true)
}

#[cube]
fn load_four_matrices(address: u32, #[comptime] transposed: bool) -> Vector<u32, Const<4>> {
    let modifier = comptime!(if transposed { ".trans" } else { "" });
    let text = comptime!(format!(
        "ldmatrix.sync.aligned.m8n8.x4{modifier}.shared::cta.b16 {{%0, %1, %2, %3}}, [%4];\n"
    ));
    let matrices: Vector<u32, Const<4>>;
    gpu_asm!(
        "{text} // {matrices} {x}\n",
        matrices = out(_) matrices,
        x = in(_) value_of::<u32>(address)
    );
    matrices
}
