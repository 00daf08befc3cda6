//! The device layout of quantized rows, in 32-bit words. The layout is the same for all file formats and all devices.
//!
//! A row holds the lower bits of all codes, then the upper bits of 5-bit and 6-bit codes, then the scales of each group
//! of columns. A *group* is a run of columns that share a scale. The row is padded to a multiple of 4 words. A kernel
//! can read any row without reading other rows.
//!
//! Burn 0.22's own quantized tensors cannot replace this layout. They are symmetric, but half of the formats of this
//! module have minimums or zero points. Burn's GEMM and row selection also dequantize the whole matrix.

use half::{bf16, f16};

/// The format of codes and scales. A code decodes to `round((code - zero) · scale + least)` in f32. `zero` is the zero
/// point, and `least` is the minimum of the group. A format without zero points has no `zero`, and a format without minimums
/// has no `least`. In a format with a codebook, the codebook's number stands in place of `code - zero`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// The number of bits per code: 4, 5, 6 or 8.
    pub bits: usize,
    /// The number of columns per group, or `None` if the whole row is one group.
    pub group: Option<usize>,
    /// The parameters of a group, and their storage.
    pub scales: Scales,
    /// The numbers that the codes stand for, or `None` if a code stands for itself. Only formats of 4 bits without
    /// minimums and zero points have a codebook.
    pub codebook: Option<Codebook>,
    /// The rounding of each dequantized element.
    pub rounding: Rounding,
}

/// The numbers that the 16 codes of 4 bits stand for, where their distances are not equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codebook {
    /// The table of ggml's types IQ4_NL and IQ4_XS.
    Iq4,
    /// Twice the floats of one sign bit, two exponent bits and one mantissa bit, as in MXFP4 and NVFP4. Twice a float
    /// is an integer. Code 8 stands for -0.
    E2m1,
}

impl Codebook {
    /// Returns the number of each code, as an integer.
    pub const fn integers(self) -> [i8; 16] {
        match self {
            Self::Iq4 => [
                -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
            ],
            Self::E2m1 => [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
        }
    }

    /// Returns the number of a code.
    ///
    /// # Panics
    /// Panics if the code has more than 4 bits.
    pub fn number(self, code: u32) -> f32 {
        match (self, code) {
            (Self::E2m1, 8) => -0.0,
            _ => f32::from(self.integers()[code as usize]),
        }
    }
}

/// The parameters that all columns of a group share, and their storage. In some variants, all groups share one zero
/// point, which is the field `zero`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// Each group has an f16 scale, and two scales share a word.
    Half {
        /// The zero point of all groups.
        zero: u32,
    },
    /// Each group has one word, with an f16 scale in the low half and an f16 minimum in the high half.
    HalfAndLeast,
    /// Each group has one word, which holds an f32 scale.
    Single {
        /// The zero point of all groups.
        zero: u32,
    },
    /// Each group has two words: an f32 scale, and the zero point that is subtracted from each code.
    SingleAndZero,
    /// Each run of [`SUPER`] columns has five words: an f16 scale, and a signed byte for each of 16 groups. The scale of a
    /// group is the f16 scale times the byte.
    Bytes {
        /// The zero point of all groups.
        zero: u32,
    },
    /// Each run of [`SUPER`] columns has five words: the f16 multiplier of scales, the f16 multiplier of minimums, 8
    /// bytes of group scales and 8 bytes of group minimums. The parameter `least` of a group is minus the product of
    /// the group's minimum byte and the multiplier of minimums.
    BytesAndLeast,
    /// Each run of [`SUPER`] columns has five words: the multipliers as in [`BytesAndLeast`](Self::BytesAndLeast), and
    /// a byte for each of 16 groups. The low 4 bits of the byte are the group's scale, the high 4 bits its minimum.
    NibblesAndLeast,
}

/// The dtype to which an element is rounded (ties to even) before it is converted to the requested dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// No rounding.
    None,
    /// Rounding to f16.
    F16,
    /// Rounding to bf16.
    BF16,
}

/// The number of columns in a super-block of ggml. All group scales in a super-block are multiplied by the same f16 number.
pub const SUPER: usize = 256;
/// The number of words that hold the parameters of [`SUPER`] columns: the f16 multipliers, the scales of the groups
/// and, in some formats, the minimums of the groups.
pub const SUPER_WORDS: usize = 5;
/// The number of 4-bit codes in a word. Every group size is a multiple of this number.
const CODES: usize = 8;
/// The number of words in one vector load. The length of a row is padded to a multiple of this number.
const VECTOR: usize = 4;

impl Rounding {
    /// Rounds a number.
    pub fn of(self, number: f32) -> f32 {
        match self {
            Self::None => number,
            Self::F16 => f16::from_f32(number).to_f32(),
            Self::BF16 => bf16::from_f32(number).to_f32(),
        }
    }
}

impl Format {
    /// The number of lower bits of a code: 8 for an 8-bit code, and 4 for a shorter code. The lower bits of all codes are
    /// the first part of the row.
    pub const fn low_bits(self) -> usize {
        match self.bits {
            8 => 8,
            _ => 4,
        }
    }

    /// Returns how many upper bits a code has. In a row, the upper bits of all codes follow the lower bits of all codes.
    pub const fn top_bits(self) -> usize {
        self.bits - self.low_bits()
    }

    /// Returns the zero point that all codes of the format have in common, or 0 if the format has no common zero point.
    pub const fn zero(self) -> u32 {
        match self.scales {
            Scales::Half { zero } | Scales::Single { zero } | Scales::Bytes { zero } => zero,
            Scales::HalfAndLeast
            | Scales::SingleAndZero
            | Scales::BytesAndLeast
            | Scales::NibblesAndLeast => 0,
        }
    }

    /// True if dequantization adds a minimum per group (`least`) to the scaled codes.
    pub const fn has_least(self) -> bool {
        matches!(
            self.scales,
            Scales::HalfAndLeast | Scales::BytesAndLeast | Scales::NibblesAndLeast
        )
    }

    /// Returns the number that a code stands for before scaling: the codebook's number, or `code - zero`. A zero point
    /// of a single group is not subtracted.
    pub fn unscaled(self, code: u32) -> f32 {
        match self.codebook {
            Some(codebook) => codebook.number(code),
            None => code as f32 - self.zero() as f32,
        }
    }

    /// True if each dequantized value is exactly the scale times [`unscaled`](Self::unscaled).
    pub fn is_linear(self) -> bool {
        !self.has_least() && self.rounding == Rounding::None
    }

    /// Returns the number of codes whose lower bits fit into one word.
    pub const fn codes_of_word(self) -> usize {
        32 / self.low_bits()
    }
}

/// The layout of rows that have a certain format and number of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The format of codes and scales.
    pub format: Format,
    /// The number of elements in a row.
    pub columns: usize,
}

impl Layout {
    /// Creates a layout. Returns `None` if the columns do not form whole groups or super-blocks, or if no kernel
    /// supports the format. Also returns `None` if the codes of a group or the upper bits of a row do not fill whole
    /// words.
    pub fn new(format: Format, columns: usize) -> Option<Self> {
        let layout = Self { format, columns };
        let is_rounded_sum = format.has_least() && format.rounding != Rounding::None;
        let has_only_scales = !format.has_least() && format.scales != Scales::SingleAndZero;
        let may_have_codebook = format.bits == 4 && format.zero() == 0 && has_only_scales;
        if !matches!(format.bits, 4 | 5 | 6 | 8)
            || is_rounded_sum
            || (format.codebook.is_some() && !may_have_codebook)
        {
            return None;
        }
        let is_whole = match format.scales {
            Scales::NibblesAndLeast => columns.is_multiple_of(SUPER) && format.group == Some(16),
            Scales::Bytes { .. } => columns.is_multiple_of(SUPER) && format.group == Some(16),
            Scales::BytesAndLeast => columns.is_multiple_of(SUPER) && format.group == Some(32),
            _ => {
                let of_top_bits = columns * format.top_bits();
                layout.group().is_multiple_of(CODES)
                    && columns.is_multiple_of(layout.group())
                    && of_top_bits.is_multiple_of(32)
            }
        };
        (is_whole && columns > 0).then_some(layout)
    }

    /// Returns the number of columns per group.
    pub fn group(self) -> usize {
        self.format.group.unwrap_or(self.columns)
    }

    /// Returns the offset of the upper bits in a row, in words.
    pub fn top(self) -> usize {
        self.columns / self.format.codes_of_word()
    }

    /// Returns the offset of the scales in a row, in words.
    pub fn scales(self) -> usize {
        self.top() + self.columns * self.format.top_bits() / 32
    }

    /// Returns the number of words in a row.
    pub fn words(self) -> usize {
        let groups = self.columns / self.group();
        let scales = match self.format.scales {
            Scales::Half { .. } => groups.div_ceil(2),
            Scales::HalfAndLeast | Scales::Single { .. } => groups,
            Scales::SingleAndZero => 2 * groups,
            Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast => {
                self.columns / SUPER * SUPER_WORDS
            }
        };
        (self.scales() + scales).next_multiple_of(VECTOR)
    }

    /// Returns the average number of bits per element, including scales and padding.
    pub fn bits_of_number(self) -> f64 {
        (self.words() * 32) as f64 / self.columns as f64
    }

    /// Dequantizes a row.
    pub fn dequantize(self, words: &[u32], numbers: &mut [f32]) {
        let write = match (self.format.bits, self.format.codebook) {
            (4, None) => Self::write::<4, 0, false>,
            (4, Some(_)) => Self::write::<4, 0, true>,
            (5, _) => Self::write::<4, 1, false>,
            (6, _) => Self::write::<4, 2, false>,
            _ => Self::write::<8, 0, false>,
        };
        write(self, words, numbers);
    }

    /// Dequantizes codes that have `LOW` lower and `TOP` upper bits. The numbers of bits are constants, so that the compiler
    /// can unroll the loops. `BOOK` is true if the format has a codebook.
    fn write<const LOW: usize, const TOP: usize, const BOOK: bool>(
        self,
        words: &[u32],
        numbers: &mut [f32],
    ) {
        let codes = 32 / LOW;
        let book: [f32; 16] = match self.format.codebook {
            Some(codebook) if BOOK => std::array::from_fn(|code| codebook.number(code as u32)),
            _ => [0.0; 16],
        };
        let (of_top, of_groups) = (&words[self.top()..], &words[self.scales()..]);
        let mut low = words.iter();
        for (group, numbers) in numbers.chunks_exact_mut(self.group()).enumerate() {
            let of_group = Group::read(self.format.scales, of_groups, group);
            let first = group * self.group() / codes;
            let low = low.by_ref().take(numbers.len() / codes);
            for ((at, low), numbers) in (first..).zip(low).zip(numbers.chunks_exact_mut(codes)) {
                let top = match TOP {
                    0 => 0,
                    _ => of_top[at * codes * TOP / 32] >> (at * codes * TOP % 32),
                };
                for (index, number) in numbers.iter_mut().enumerate() {
                    let code = low >> (index * LOW) & ((1 << LOW) - 1);
                    let above = top >> (index * TOP) & ((1 << TOP) - 1);
                    *number = match BOOK {
                        true => book[code as usize] * of_group.scale,
                        false => of_group.number(code | above << LOW),
                    };
                }
            }
            match self.format.rounding {
                Rounding::None => {}
                rounding => {
                    for number in numbers {
                        *number = rounding.of(*number);
                    }
                }
            }
        }
    }
}

/// The decoding parameters of one group.
#[derive(Clone, Copy)]
struct Group {
    zero: f32,
    scale: f32,
    /// The minimum, which is added to each element.
    least: f32,
}

impl Group {
    fn number(self, code: u32) -> f32 {
        (code as f32 - self.zero) * self.scale + self.least
    }

    fn read(scales: Scales, words: &[u32], group: usize) -> Self {
        let half = |bits: u32| f16::from_bits(bits as u16).to_f32();
        let byte = |words: &[u32], index: usize| (words[index / 4] >> (index % 4 * 8)) as u8;
        let of = |zero: u32, scale: f32| Self {
            zero: zero as f32,
            scale,
            // The minimum is -0 if the format has none. Adding -0 leaves every element unchanged, including the sign of a zero.
            least: -0.0,
        };
        match scales {
            Scales::Half { zero } => of(zero, half(words[group / 2] >> (group % 2 * 16))),
            Scales::HalfAndLeast => Self {
                zero: 0.0,
                scale: half(words[group]),
                least: half(words[group] >> 16),
            },
            Scales::Single { zero } => of(zero, f32::from_bits(words[group])),
            Scales::SingleAndZero => of(words[2 * group + 1], f32::from_bits(words[2 * group])),
            Scales::Bytes { zero } => {
                let words = &words[group / 16 * SUPER_WORDS..];
                let factor = byte(&words[1..], group % 16) as i8;
                of(zero, half(words[0]) * f32::from(factor))
            }
            Scales::BytesAndLeast => {
                let words = &words[group / 8 * SUPER_WORDS..];
                let factor = |from: usize| f32::from(byte(&words[from..], group % 8));
                Self {
                    zero: 0.0,
                    scale: half(words[0]) * factor(1),
                    least: -(half(words[0] >> 16) * factor(3)),
                }
            }
            Scales::NibblesAndLeast => {
                let words = &words[group / 16 * SUPER_WORDS..];
                let factors = byte(&words[1..], group % 16);
                Self {
                    zero: 0.0,
                    scale: half(words[0]) * f32::from(factors & 15),
                    least: -(half(words[0] >> 16) * f32::from(factors >> 4)),
                }
            }
        }
    }
}
