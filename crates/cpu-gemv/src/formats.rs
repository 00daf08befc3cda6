//! Converts the elements of a row to vectors of f32, for each format in which a row may be stored.
//!
//! A kernel reads a row in blocks. A block consists of several steps, and each step yields one vector. A format chooses
//! which columns form a vector, so that few instructions convert the elements. For example, one shift moves an element
//! of every 32-bit word into place. Neighboring elements of a word are therefore in different steps.

use crate::layout::{Codebook, Format};
use crate::simd::Simd;

/// A format of floats.
pub(crate) trait Floats<S: Simd> {
    /// The number of vectors in a block.
    const STEPS: usize;
    /// The number of bytes of an element.
    const BYTES: usize;

    /// Returns the column, within a block, of the element in a lane of the vector `step`.
    fn column(step: usize, lane: usize) -> usize {
        step * S::LANES + lane
    }

    /// Loads the vector `step` of a block, and converts it to f32.
    ///
    /// # Safety
    /// `block` points to a whole block, and the CPU has the instruction set.
    unsafe fn numbers(block: *const u8, step: usize) -> S::Floats;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct Bf16;

impl<S: Simd> Floats<S> for F32 {
    const STEPS: usize = 4;
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn numbers(block: *const u8, step: usize) -> S::Floats {
        unsafe { S::load(block.add(step * 4 * S::LANES).cast()) }
    }
}

impl<S: Simd> Floats<S> for F16 {
    const STEPS: usize = 4;
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn numbers(block: *const u8, step: usize) -> S::Floats {
        unsafe { S::load_f16(block.add(step * 2 * S::LANES)) }
    }
}

/// A word holds two bf16 elements, and the first element is in the low half. The bits of a bf16 are the high half of an
/// f32.
impl<S: Simd> Floats<S> for Bf16 {
    const STEPS: usize = 4;
    const BYTES: usize = 2;

    fn column(step: usize, lane: usize) -> usize {
        step / 2 * 2 * S::LANES + 2 * lane + step % 2
    }

    #[inline(always)]
    unsafe fn numbers(block: *const u8, step: usize) -> S::Floats {
        unsafe {
            let words = S::load_words(block.add(step / 2 * 4 * S::LANES));
            S::bits(match step % 2 {
                0 => S::shift_left(words, 16),
                _ => S::and(words, 0xffff_0000),
            })
        }
    }
}

/// A format of integer codes. The lower bits of a block's codes fill one vector of 32-bit words. The vector of step `i`
/// consists of the `i`-th code of each word.
pub(crate) trait Codes<S: Simd> {
    /// The number of codes whose lower bits fit into a word.
    const CODES: usize;
    /// The number of upper bits of a code. In a row, the upper bits of all codes follow the lower bits of all codes.
    const TOP_BITS: usize;
    /// The argument of the conversion from codes to floats: a lookup table, or the zero point.
    type Table: Copy;

    /// Returns the last argument with which [`codes`](Self::codes) returns the numbers of `format` before scaling.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn table(format: Format) -> Self::Table;

    /// Returns the upper bits of a block's codes, shifted left by 4. The function is called only for formats with upper
    /// bits.
    ///
    /// # Safety
    /// `top` points to the upper bits of a whole block, and the CPU has the instruction set.
    #[inline(always)]
    unsafe fn top(top: *const u8) -> S::Words {
        unsafe { S::load_words(top) }
    }

    /// Returns the vector `step` of a block, as floats before scaling: `code - zero`, or the codebook's numbers.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn codes(low: S::Words, top: S::Words, step: usize, table: Self::Table) -> S::Floats;
}

pub(crate) struct FourBits;
/// Codes of 4 bits with a codebook.
pub(crate) struct FourBitsOfBook;
pub(crate) struct FiveBits;
pub(crate) struct SixBits;
pub(crate) struct EightBits;

impl<S: Simd> Codes<S> for FourBits {
    const CODES: usize = 8;
    const TOP_BITS: usize = 0;
    type Table = S::FourBits;

    #[inline(always)]
    unsafe fn table(format: Format) -> S::FourBits {
        unsafe { S::four_bits(format.zero() as f32) }
    }

    #[inline(always)]
    unsafe fn codes(low: S::Words, _top: S::Words, step: usize, table: S::FourBits) -> S::Floats {
        unsafe { S::code_of_4(low, step, table) }
    }
}

impl<S: Simd> Codes<S> for FourBitsOfBook {
    const CODES: usize = 8;
    const TOP_BITS: usize = 0;
    type Table = S::Book;

    #[inline(always)]
    unsafe fn table(format: Format) -> S::Book {
        let integers = format.codebook.map_or([0; 16], Codebook::integers);
        unsafe { S::book(integers) }
    }

    #[inline(always)]
    unsafe fn codes(low: S::Words, _top: S::Words, step: usize, book: S::Book) -> S::Floats {
        unsafe { S::code_of_book(low, step, book) }
    }
}

impl<S: Simd> Codes<S> for FiveBits {
    const CODES: usize = 8;
    const TOP_BITS: usize = 1;
    type Table = S::FiveBits;

    #[inline(always)]
    unsafe fn table(format: Format) -> S::FiveBits {
        unsafe { S::five_bits(format.zero() as f32) }
    }

    #[inline(always)]
    unsafe fn top(top: *const u8) -> S::Words {
        unsafe { S::shift_left(S::load_bytes(top), 4) }
    }

    #[inline(always)]
    unsafe fn codes(low: S::Words, top: S::Words, step: usize, table: S::FiveBits) -> S::Floats {
        unsafe { S::code_of_5(low, top, step, table) }
    }
}

impl<S: Simd> Codes<S> for SixBits {
    const CODES: usize = 8;
    const TOP_BITS: usize = 2;
    type Table = f32;

    #[inline(always)]
    unsafe fn table(format: Format) -> f32 {
        format.zero() as f32
    }

    #[inline(always)]
    unsafe fn top(top: *const u8) -> S::Words {
        unsafe { S::shift_left(S::load_u16(top), 4) }
    }

    #[inline(always)]
    unsafe fn codes(low: S::Words, top: S::Words, step: usize, zero: f32) -> S::Floats {
        unsafe { S::code_of_6(low, top, step, zero) }
    }
}

impl<S: Simd> Codes<S> for EightBits {
    const CODES: usize = 4;
    const TOP_BITS: usize = 0;
    type Table = f32;

    #[inline(always)]
    unsafe fn table(format: Format) -> f32 {
        format.zero() as f32
    }

    #[inline(always)]
    unsafe fn codes(low: S::Words, _top: S::Words, step: usize, zero: f32) -> S::Floats {
        unsafe { S::code_of_8(low, step, zero) }
    }
}
