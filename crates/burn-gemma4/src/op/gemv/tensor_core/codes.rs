//! Conversion of quantized codes to half precision, two at a time, for the tensor-core kernels of quantized weights.

use burn::tensor::{bf16, f16};
use cube_kit::ampere::gemv::add_halves;
use cube_kit::nvidia::Half;
use cube_kit::nvidia::ptx::permuted_bytes;
use cubecl::prelude::*;

/// The number of columns in a quantization group.
pub(super) const GROUP: usize = 32;
/// The number of columns in a step. A step is two quantization groups, because the two 16-bit scales of a row fill one
/// word.
pub(super) const STEP: usize = 2 * GROUP;
/// The number of codes that a thread reads per weight row in a step.
const CODES: usize = STEP / 4;

/// The width of codes, and the dtype of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Codes {
    /// The number of bits of a code, 4 or 8. The zero point is 8 for 4 bits, and 128 for 8 bits.
    pub bits: usize,
    pub half: Half,
}

impl Codes {
    /// The number of words with codes that a thread reads per weight row in a step of 64 columns.
    pub(super) const fn words(self) -> usize {
        CODES * self.bits / 32
    }

    /// Returns a word with two equal 16-bit floats. Each float is the power of two for which the lowest mantissa bit
    /// has the value 1. ORing a code into the mantissa therefore adds the code to the float.
    fn base(self) -> u32 {
        self.pair(self.base_number())
    }

    fn base_number(self) -> f32 {
        match self.half {
            Half::F16 => 1024.0,
            Half::Bf16 => 128.0,
        }
    }

    /// Returns a word with two equal 16-bit floats. Each float is the negative sum of the zero point and the power of
    /// two in [`base`](Self::base).
    fn shift(self) -> u32 {
        self.pair(-(self.base_number() + (1 << (self.bits - 1)) as f32))
    }

    /// The mask of the code bits that fit into the mantissa of a 16-bit float. A word holds two floats, so the mask
    /// appears twice.
    pub(super) fn mask(self) -> u32 {
        match (self.bits, self.half) {
            (4, _) => 0x000f_000f,
            (_, Half::F16) => 0x00ff_00ff,
            (_, Half::Bf16) => 0x007f_007f,
        }
    }

    /// True if the top bit of a code does not fit into the mantissa of a 16-bit float. This is the case for 8-bit codes
    /// and bf16.
    fn has_top(self) -> bool {
        self.bits == 8 && self.half == Half::Bf16
    }

    fn pair(self, number: f32) -> u32 {
        let bits = match self.half {
            Half::F16 => f16::from_f32(number).to_bits(),
            Half::Bf16 => bf16::from_f32(number).to_bits(),
        };
        u32::from(bits) << 16 | u32::from(bits)
    }
}

/// Converts two codes, which lie 16 bits apart in a word, to two 16-bit floats in one word. `mask` is
/// [`Codes::mask`].
#[cube]
pub(super) fn numbers(
    words: &Array<u32>,
    mask: u32,
    #[comptime] pair: usize,
    #[comptime] codes: Codes,
) -> u32 {
    let of_word = comptime!(16 / codes.bits);
    let word = words[comptime!(pair / of_word)] >> comptime!((pair % of_word * codes.bits) as u32);
    let bits = (word & mask) | comptime!(codes.base());
    if comptime!(codes.has_top()) {
        // Subtract the power of two and the zero point, 128 each. A bf16 has only 7 mantissa bits, so `bits` lacks the
        // top bit of an 8-bit code. This top bit has the value 128. If it is 1, subtract only 128 instead of 256, to
        // add the missing 128.
        let shift = (word & 0x0080_0080u32) ^ 0xc380_c380u32;
        add_halves(bits, shift, codes.half)
    } else {
        add_halves(bits, comptime!(codes.shift()), codes.half)
    }
}

/// Packs 8 input columns into four words with two 16-bit floats each. The order of the inputs is the order in which
/// [`numbers`] returns the codes.
#[cube]
pub(super) fn as_codes_lie(
    pairs: &mut Array<u32>,
    row: Vector<u32, Const<4>>,
    #[comptime] codes: Codes,
) {
    // The distance, in input words, between two columns whose codes lie 16 bits apart.
    let apart = comptime!(8 / codes.bits);
    #[unroll]
    for two in 0..2usize {
        let first = comptime!(two * 2 / apart);
        let one = row.extract(first);
        let other = row.extract(comptime!(first + apart));
        pairs[comptime!(2 * two)] = permuted_bytes(one, other, 0x5410u32);
        pairs[comptime!(2 * two + 1)] = permuted_bytes(one, other, 0x7632u32);
    }
}
