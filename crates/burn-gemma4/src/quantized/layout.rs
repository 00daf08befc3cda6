//! Quantized rows as a model holds them, on every device and whatever format they came in: words of 32 bits, which kernels read.
//!
//! A row is all codes, their upper bits apart where they have 5 or 6, and then what makes numbers of the codes of each group of columns. It is
//! filled up to whole vectors of 4 words. Rows are complete by themselves: some of them are a table's rows of some tokens, or the
//! outputs of a part of a product.
//!
//! Burn's own quantized tensors are symmetric (0.22): they have no smallest numbers and no zero points, which half of the formats
//! are made of, and a product of theirs and a choice of rows dequantize the whole matrix.

use burn::tensor::{bf16, f16};

/// How a code becomes a number: `round((code - zero) · scale + least)`, in f32, without what a format does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// Bits of a code: 4, 5, 6 or 8.
    pub bits: usize,
    /// Columns of a group; none where a row is one.
    pub group: Option<usize>,
    pub scales: Scales,
    /// What every number is rounded to.
    pub rounding: Rounding,
}

/// What a group of columns has in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// A scale in f16, two of them in a word.
    Half { zero: u32 },
    /// A word: a scale in f16, and above it the smallest number, in f16 as well.
    HalfAndLeast,
    /// A scale in f32, a word.
    Single { zero: u32 },
    /// Two words: a scale in f32, and what is subtracted from codes.
    SingleAndZero,
    /// 5 words for [`SUPER`] columns: a scale in f16, which is that of 16 groups' signed bytes.
    Bytes { zero: u32 },
    /// 5 words for [`SUPER`] columns: a scale in f16, which is that of 8 groups' bytes, and above it another, which is that of 8 more bytes:
    /// what is subtracted from numbers.
    BytesAndLeast,
}

/// To which dtype, half to even, on the way to the dtype that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    None,
    F16,
    BF16,
}

/// Columns under one scale of scales.
pub(crate) const SUPER: usize = 256;
/// Words that these have.
pub(crate) const SUPER_WORDS: usize = 5;
/// Groups are of whole words of codes, of which 4 bits' are this long.
const CODES: usize = 8;
/// Words of a row are a multiple of these.
const VECTOR: usize = 4;

impl Rounding {
    pub fn of(self, number: f32) -> f32 {
        match self {
            Self::None => number,
            Self::F16 => f16::from_f32(number).to_f32(),
            Self::BF16 => bf16::from_f32(number).to_f32(),
        }
    }
}

impl Format {
    /// Bits of a code that lie with those of the others, side by side.
    pub const fn low_bits(self) -> usize {
        match self.bits {
            8 => 8,
            _ => 4,
        }
    }

    /// Bits of a code that lie apart.
    pub const fn top_bits(self) -> usize {
        self.bits - self.low_bits()
    }

    /// Codes whose lower bits a word has.
    pub const fn codes_of_word(self) -> usize {
        32 / self.low_bits()
    }
}

/// Rows of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub format: Format,
    pub columns: usize,
}

impl Layout {
    /// Nothing where such rows are not served: where columns are no whole words, or groups no whole parts of them.
    pub fn new(format: Format, columns: usize) -> Option<Self> {
        let layout = Self { format, columns };
        let is_whole = match format.scales {
            Scales::Bytes { .. } | Scales::BytesAndLeast => columns.is_multiple_of(SUPER),
            _ => {
                let of_top_bits = columns * format.top_bits();
                layout.group().is_multiple_of(CODES)
                    && columns.is_multiple_of(layout.group())
                    && of_top_bits.is_multiple_of(32)
            }
        };
        (is_whole && columns > 0).then_some(layout)
    }

    /// Columns of a group.
    pub fn group(self) -> usize {
        self.format.group.unwrap_or(self.columns)
    }

    /// Where upper bits begin.
    pub fn top(self) -> usize {
        self.columns / self.format.codes_of_word()
    }

    /// Where scales begin.
    pub fn scales(self) -> usize {
        self.top() + self.columns * self.format.top_bits() / 32
    }

    /// Words of a row.
    pub fn words(self) -> usize {
        let groups = self.columns / self.group();
        let scales = match self.format.scales {
            Scales::Half { .. } => groups.div_ceil(2),
            Scales::HalfAndLeast | Scales::Single { .. } => groups,
            Scales::SingleAndZero => 2 * groups,
            Scales::Bytes { .. } | Scales::BytesAndLeast => self.columns / SUPER * SUPER_WORDS,
        };
        (self.scales() + scales).next_multiple_of(VECTOR)
    }

    /// Bits of a number, all in all.
    pub fn bits_of_number(self) -> f64 {
        (self.words() * 32) as f64 / self.columns as f64
    }

    /// Writes the numbers of a row.
    pub fn dequantize(self, words: &[u32], numbers: &mut [f32]) {
        let write = match self.format.bits {
            4 => Self::write::<4, 0>,
            5 => Self::write::<4, 1>,
            6 => Self::write::<4, 2>,
            _ => Self::write::<8, 0>,
        };
        write(self, words, numbers);
    }

    /// The numbers of codes with so many lower and upper bits, which the compiler knows.
    fn write<const LOW: usize, const TOP: usize>(self, words: &[u32], numbers: &mut [f32]) {
        let codes = 32 / LOW;
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
                    *number = of_group.number(code | above << LOW);
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

/// What makes numbers of a group's codes.
#[derive(Clone, Copy)]
struct Group {
    zero: f32,
    scale: f32,
    /// What is added.
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
            // What changes no number, not even a zero's sign.
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
        }
    }
}
