//! The vector operations of the kernels, and their implementation for each instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{AND_OR, Avx512, SELECT};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

/// The largest number of f32 lanes of a vector.
pub(crate) const MOST_LANES: usize = 16;

/// Vectors of 32-bit lanes.
///
/// # Safety
/// The caller of a method guarantees that the CPU has the instruction set. Pointers must point to as many elements as a
/// vector has lanes, in any alignment.
pub(crate) trait Simd: Copy {
    const LANES: usize;
    /// A vector of f32.
    type Floats: Copy;
    /// A vector of u32.
    type Words: Copy;
    /// The argument of the conversion by [`code_of_4`](Self::code_of_4): a lookup table, or the zero point.
    type FourBits: Copy;
    /// The lookup table of [`code_of_book`](Self::code_of_book).
    type Book: Copy;
    /// The argument of the conversion by [`code_of_5`](Self::code_of_5): lookup tables, or the zero point.
    type FiveBits: Copy;

    /// Prefetches the cache line at an address, which need not be valid.
    fn prefetch(address: *const u8);
    unsafe fn splat(number: f32) -> Self::Floats;
    unsafe fn load(numbers: *const f32) -> Self::Floats;
    /// Loads the first `count` lanes of a vector, where `count` is a power of two. The other lanes are unspecified. A
    /// CPU forwards recently stored elements to a load without delay only if a single store wrote all loaded elements.
    /// Loading all lanes could therefore be slower.
    #[inline(always)]
    unsafe fn load_first(numbers: *const f32, _count: usize) -> Self::Floats {
        unsafe { Self::load(numbers) }
    }
    unsafe fn store(numbers: *mut f32, vector: Self::Floats);
    /// Converts the bits of an f16 to f32.
    unsafe fn half(bits: u16) -> f32;
    /// Loads f16 elements, and converts them to f32.
    unsafe fn load_f16(numbers: *const u8) -> Self::Floats;
    unsafe fn load_words(words: *const u8) -> Self::Words;
    /// Loads bytes, and zero-extends them to 32 bits.
    unsafe fn load_bytes(bytes: *const u8) -> Self::Words;
    /// Loads little-endian 16-bit elements, and zero-extends them to 32 bits.
    unsafe fn load_u16(numbers: *const u8) -> Self::Words;
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn sub(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Computes `a · b + c`.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Returns the sum of all lanes.
    unsafe fn sum(vector: Self::Floats) -> f32;
    /// Selects `vector[lanes[i]]` for lane `i`.
    unsafe fn permute(vector: Self::Floats, lanes: Self::Words) -> Self::Floats;

    unsafe fn and(a: Self::Words, mask: u32) -> Self::Words;
    unsafe fn shift_left(words: Self::Words, count: u32) -> Self::Words;
    unsafe fn shift_right(words: Self::Words, count: u32) -> Self::Words;
    /// Interprets the bits as f32.
    unsafe fn bits(words: Self::Words) -> Self::Floats;

    /// Rounds to bf16, with ties to even.
    unsafe fn round_bf16(vector: Self::Floats) -> Self::Floats;
    /// Rounds to f16, with ties to even.
    unsafe fn round_f16(vector: Self::Floats) -> Self::Floats;

    unsafe fn four_bits(zero: f32) -> Self::FourBits;
    /// Returns `code - zero` for the 4-bit code that begins at bit `4 · index` of each word.
    unsafe fn code_of_4(words: Self::Words, index: usize, table: Self::FourBits) -> Self::Floats;
    /// Returns the lookup table of a codebook.
    unsafe fn book(integers: [i8; 16]) -> Self::Book;
    /// Returns the number of a codebook for the 4-bit code that begins at bit `4 · index` of each word.
    unsafe fn code_of_book(words: Self::Words, index: usize, book: Self::Book) -> Self::Floats;
    unsafe fn five_bits(zero: f32) -> Self::FiveBits;
    /// Returns `code - zero` for a 5-bit code. The code's lower 4 bits begin at bit `4 · index` of `words`, and the
    /// code's bit 4 is at bit `index + 4` of `top`.
    unsafe fn code_of_5(
        words: Self::Words,
        top: Self::Words,
        index: usize,
        table: Self::FiveBits,
    ) -> Self::Floats;
    /// Returns `code - zero` for a 6-bit code. The code's lower 4 bits begin at bit `4 · index` of `words`, and the
    /// code's bits 4 and 5 begin at bit `2 · index + 4` of `top`.
    unsafe fn code_of_6(
        words: Self::Words,
        top: Self::Words,
        index: usize,
        zero: f32,
    ) -> Self::Floats;
    /// Returns `code - zero` for the 8-bit code that begins at bit `8 · index` of each word.
    unsafe fn code_of_8(words: Self::Words, index: usize, zero: f32) -> Self::Floats;
}

/// The decoding of codes by shifts and masks, for instruction sets that cannot look up a code in a table of all codes.
pub(crate) trait ShiftedCodes: Simd {
    unsafe fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Converts the codes to floats, and subtracts `zero`.
    unsafe fn float(codes: Self::Words, zero: f32) -> Self::Floats;

    /// Returns `code - zero` for the code of `bits` bits that begins at bit `bits · index` of each word.
    #[inline(always)]
    unsafe fn code(words: Self::Words, index: usize, bits: usize, zero: f32) -> Self::Floats {
        unsafe {
            let codes = Self::shift_right(words, (bits * index) as u32);
            Self::float(Self::and(codes, (1 << bits) - 1), zero)
        }
    }

    /// Returns `code - zero` for a code with `bits` upper bits. The code's lower 4 bits begin at bit `4 · index` of
    /// `words`, and the code's upper bits begin at bit `bits · index + 4` of `top`.
    #[inline(always)]
    unsafe fn code_with_top(
        words: Self::Words,
        top: Self::Words,
        index: usize,
        bits: usize,
        zero: f32,
    ) -> Self::Floats {
        unsafe {
            let low = Self::and(Self::shift_right(words, 4 * index as u32), 15);
            let top = Self::shift_right(top, (bits * index) as u32);
            let top = Self::and(top, ((1 << bits) - 1) << 4);
            Self::float(Self::or(low, top), zero)
        }
    }
}
