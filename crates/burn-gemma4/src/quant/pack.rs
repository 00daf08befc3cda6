//! Packs the rows of a file into the words of a [`Layout`]. A packed row dequantizes to the same elements as the row in
//! the file.

use super::{
    blocks::{BlockFormat, five_bits, nibbles},
    codebooks::{iq4_xs_codes, iq4_xs_scales, mxfp4_codes, mxfp4_scale},
    layout::{Codebook, Format, Layout, Rounding, SUPER_WORDS, Scales},
    packed::{Packed, rounding},
    small_super_blocks::{Q3_K_ZERO, q2_k_codes, q3_k_codes, q3_k_scales},
    super_blocks::{codes, scales_and_least, six_bits},
};

/// A row whose words are being written.
pub(super) struct Row<'a> {
    pub layout: Layout,
    /// The words of the row, all zero at first.
    pub words: &'a mut [u32],
}

impl Row<'_> {
    /// Writes `codes` to consecutive columns, starting at column `first`. This column must be the first column of a
    /// word.
    pub fn codes(&mut self, first: usize, codes: &[u8]) {
        let (low, top) = (self.layout.format.low_bits(), self.layout.format.top_bits());
        for (word, codes) in self.words[first * low / 32..]
            .iter_mut()
            .zip(codes.chunks(32 / low))
        {
            let low_bits = |code: u8| u32::from(code) & ((1 << low) - 1);
            let codes = codes.iter().enumerate();
            *word = codes.fold(0, |word, (index, code)| {
                word | low_bits(*code) << (index * low)
            });
        }
        if top == 0 {
            return;
        }
        let start = self.layout.top() + first * top / 32;
        for (word, codes) in self.words[start..].iter_mut().zip(codes.chunks(32 / top)) {
            let codes = codes.iter().enumerate();
            *word = codes.fold(0, |word, (index, code)| {
                word | u32::from(code >> low) << (index * top)
            });
        }
    }

    /// Writes the 16-bit scale of a group.
    pub fn half(&mut self, group: usize, bits: u16) {
        let start = self.layout.scales();
        self.words[start + group / 2] |= u32::from(bits) << (group % 2 * 16);
    }

    /// Writes `words` to the part of the row that holds the scales, starting at word `at` of that part.
    pub fn scales(&mut self, at: usize, words: &[u32]) {
        let start = self.layout.scales() + at;
        self.words[start..][..words.len()].copy_from_slice(words);
    }

    /// Writes the scales of a super-block: one word of multipliers, and a byte for each of 16 groups.
    fn super_scales(&mut self, super_block: usize, multipliers: u32, factors: &[u8]) {
        let of_four = |index: usize| word(&factors[4 * index..]);
        let words = [multipliers, of_four(0), of_four(1), of_four(2), of_four(3)];
        self.scales(super_block * SUPER_WORDS, &words);
    }
}

impl BlockFormat {
    /// Returns the layout of rows with `columns` columns, or `None` if the kernels do not support such rows.
    pub fn words(self, columns: usize) -> Option<Layout> {
        let (bits, scales, group) = match self {
            Self::Q4_0 => (4, Scales::Half { zero: 8 }, 32),
            Self::Q4_1 => (4, Scales::HalfAndLeast, 32),
            Self::Q5_0 => (5, Scales::Half { zero: 16 }, 32),
            Self::Q5_1 => (5, Scales::HalfAndLeast, 32),
            Self::Q8_0 => (8, Scales::Half { zero: 128 }, 32),
            // The layout has no codes of 2 and 3 bits.
            Self::Q2K => (4, Scales::NibblesAndLeast, 16),
            Self::Q3K => {
                let zero = u32::from(Q3_K_ZERO);
                (4, Scales::Bytes { zero }, 16)
            }
            Self::Q4K => (4, Scales::BytesAndLeast, 32),
            Self::Q5K => (5, Scales::BytesAndLeast, 32),
            Self::Q6K => (6, Scales::Bytes { zero: 32 }, 16),
            Self::Iq4Nl => (4, Scales::Half { zero: 0 }, 32),
            // The layout has a scale for each 16 columns, so both halves of a group have the group's scale.
            Self::Iq4Xs => (4, Scales::Bytes { zero: 0 }, 16),
            Self::Mxfp4 => (4, Scales::Single { zero: 0 }, 32),
        };
        let codebook = match self {
            Self::Iq4Nl | Self::Iq4Xs => Some(Codebook::Iq4),
            Self::Mxfp4 => Some(Codebook::E2m1),
            _ => None,
        };
        let format = Format {
            bits,
            group: Some(group),
            scales,
            codebook,
            rounding: Rounding::None,
        };
        Layout::new(format, columns)
    }

    /// Packs one row into `words`, which must be all zero. `blocks` holds the row as blocks of a file.
    pub fn pack(self, layout: Layout, blocks: &[u8], words: &mut [u32]) {
        let mut row = Row { layout, words };
        let mut codes = [0; 256];
        let codes = &mut codes[..self.numbers()];
        for (index, block) in blocks.chunks_exact(self.bytes()).enumerate() {
            for (code, found) in codes.iter_mut().zip(self.codes(block)) {
                *code = found;
            }
            row.codes(index * self.numbers(), codes);
            match self {
                Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl => row.half(index, bits(block)),
                Self::Q4_1 | Self::Q5_1 => row.scales(index, &[word(block)]),
                Self::Q4K | Self::Q5K => {
                    let parts = scales_and_least(&block[4..16]);
                    let factors = parts.map(|(scale, _)| scale);
                    let least = parts.map(|(_, least)| least);
                    let words = [
                        word(block),
                        word(&factors),
                        word(&factors[4..]),
                        word(&least),
                        word(&least[4..]),
                    ];
                    row.scales(index * SUPER_WORDS, &words);
                }
                Self::Q2K => row.super_scales(index, word(&block[80..]), &block[..16]),
                Self::Q3K => {
                    let factors = q3_k_scales(block).map(|factor| factor as u8);
                    row.super_scales(index, u32::from(bits(&block[108..])), &factors);
                }
                Self::Q6K => {
                    let (factors, scale) = block[192..].split_at(16);
                    row.super_scales(index, u32::from(bits(scale)), factors);
                }
                Self::Iq4Xs => {
                    let factors = iq4_xs_scales(block);
                    let factors: [u8; 16] = std::array::from_fn(|at| factors[at / 2] as u8);
                    row.super_scales(index, u32::from(bits(block)), &factors);
                }
                Self::Mxfp4 => row.scales(index, &[mxfp4_scale(block).to_bits()]),
            }
        }
    }

    /// Returns the codes in a block, in the order of the columns.
    fn codes(self, block: &[u8]) -> Box<dyn Iterator<Item = u8> + '_> {
        match self {
            Self::Q4_0 => Box::new(nibbles(&block[2..])),
            Self::Q4_1 => Box::new(nibbles(&block[4..])),
            Self::Q5_0 => Box::new(five_bits(&block[2..6], &block[6..])),
            Self::Q5_1 => Box::new(five_bits(&block[4..8], &block[8..])),
            // Flip the top bit of each byte, which adds 128 to the signed code that the file stores.
            Self::Q8_0 => Box::new(block[2..].iter().map(|byte| byte ^ 128)),
            Self::Q2K => Box::new(q2_k_codes(block)),
            Self::Q3K => Box::new(q3_k_codes(block)),
            Self::Q4K => Box::new(codes(None, &block[16..])),
            Self::Q5K => Box::new(codes(Some(&block[16..48]), &block[48..])),
            Self::Q6K => Box::new((0..256).map(|index| six_bits(block, index))),
            Self::Iq4Nl => Box::new(nibbles(&block[2..])),
            Self::Iq4Xs => Box::new(iq4_xs_codes(block)),
            Self::Mxfp4 => Box::new(mxfp4_codes(block)),
        }
    }
}

/// Reads the 16 bits at the beginning of `bytes`.
fn bits(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// Reads the 32 bits at the beginning of `bytes`.
fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

impl Packed<'_> {
    /// Returns the layout of the matrix's rows, or `None` if the kernels do not support such rows.
    pub fn layout(&self) -> Option<Layout> {
        let format = Format {
            bits: self.scheme.bits,
            group: self.scheme.group,
            scales: match self.zero_points {
                Some(_) => Scales::SingleAndZero,
                None => Scales::Single {
                    zero: 1 << (self.scheme.bits - 1),
                },
            },
            codebook: None,
            rounding: rounding(self.dtype),
        };
        Layout::new(format, self.columns)
    }

    /// Packs a row into `words`, which must be all zero.
    pub fn pack(&self, layout: Layout, row: usize, words: &mut [u32]) {
        let of_row = self.words.len() / self.rows;
        let codes = self.words[row * of_row..][..of_row].as_chunks().0;
        for (word, bytes) in words.iter_mut().zip(codes) {
            *word = u32::from_le_bytes(*bytes);
        }
        let groups = layout.columns / layout.group();
        let mut written = Row { layout, words };
        for group in 0..groups {
            let scale = self.scale(row * groups + group).to_bits();
            match self.zero_points {
                None => written.scales(group, &[scale]),
                Some(_) => {
                    let zero = self.packed_zero_point(row, group, groups);
                    written.scales(2 * group, &[scale, u32::from(zero)]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::DType;
    use safetensors::SafeTensors;

    /// Checks that packed words dequantize to the same bits as the random blocks from which they were packed.
    #[test]
    fn pack_of_blocks_dequantizes_to_same_bits() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let file =
            std::fs::read(format!("{folder}/blocks.safetensors")).expect("the fixture exists");
        let file = SafeTensors::deserialize(&file).expect("the fixture is valid safetensors");
        for (format, name) in BlockFormat::ALL {
            let tensor = file.tensor(&format!("{name}.blocks")).expect(name);
            let blocks = tensor.data();
            let columns = blocks.len() / format.bytes() * format.numbers();
            let layout = format.words(columns).expect(name);
            let mut words = vec![0; layout.words()];
            format.pack(layout, blocks, &mut words);
            let (mut found, mut expected) = (vec![0.0; columns], vec![0.0; columns]);
            layout.dequantize(&words, &mut found);
            format.dequantize(blocks, &mut expected);
            let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits);
            assert!(bits(found).eq(bits(expected)), "{name}");
        }
    }

    #[test]
    fn bits_of_number_for_every_format_are_as_documented() {
        for (format, bits) in [
            (BlockFormat::Q4_0, 4.5),
            (BlockFormat::Q4_1, 5.0),
            (BlockFormat::Q5_0, 5.5),
            (BlockFormat::Q5_1, 6.0),
            (BlockFormat::Q8_0, 8.5),
            (BlockFormat::Q2K, 4.625),
            (BlockFormat::Q3K, 4.625),
            (BlockFormat::Q4K, 4.625),
            (BlockFormat::Q5K, 5.625),
            (BlockFormat::Q6K, 6.625),
            (BlockFormat::Iq4Nl, 4.5),
            (BlockFormat::Iq4Xs, 4.625),
            (BlockFormat::Mxfp4, 5.0),
        ] {
            let layout = format.words(4096).expect("the columns are whole blocks");
            assert_eq!(layout.bits_of_number(), bits, "{format:?}");
        }
        assert_eq!(BlockFormat::Q4_0.words(48), None);
        assert_eq!(BlockFormat::Q4K.words(128), None);
    }

    /// Checks that rows of compressed-tensors dequantize to the same bits before and after packing. The cases cover
    /// both bit widths, groups and whole rows, with and without zero points, and every dtype of scales.
    #[test]
    fn pack_of_packed_rows_dequantizes_to_same_bits() {
        use super::super::packed::Scheme;
        let (rows, columns) = (9, 64);
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            state >> 8
        };
        for bits in [4, 8] {
            for (group, is_symmetric) in [(Some(32), true), (Some(64), false), (None, false)] {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    let scheme = Scheme {
                        bits,
                        group,
                        is_symmetric,
                    };
                    let groups = scheme
                        .groups(columns)
                        .expect("the columns are whole groups");
                    let mut bytes = |words: usize| -> Vec<u8> {
                        (0..words * 4).map(|_| random() as u8).collect()
                    };
                    let words = bytes(rows * scheme.words(columns));
                    let zero_points = bytes(scheme.words(rows) * groups);
                    let scales: Vec<f32> = (0..rows * groups)
                        .map(|at| (at as f32 + 0.3) / 77.0)
                        .collect();
                    let scales = burn::tensor::TensorData::new(scales, [rows * groups]);
                    let scales = scales.convert_dtype(dtype);
                    let packed = Packed {
                        scheme,
                        rows,
                        columns,
                        words: &words,
                        scales: scales.as_bytes(),
                        dtype,
                        zero_points: (!is_symmetric).then_some(&zero_points[..]),
                    };
                    let layout = packed.layout().expect("the columns are whole groups");
                    for row in 0..rows {
                        let mut words = vec![0; layout.words()];
                        packed.pack(layout, row, &mut words);
                        let (mut found, mut expected) = ([0.0; 64], [0.0; 64]);
                        layout.dequantize(&words, &mut found);
                        packed.dequantize(row, &mut expected);
                        assert_eq!(
                            found.map(f32::to_bits),
                            expected.map(f32::to_bits),
                            "{scheme:?}, {dtype:?}"
                        );
                    }
                }
            }
        }
    }
}
