//! The parameters of a row's groups: scales, minimums and zero points, as f32.

use crate::layout::{Layout, SUPER, SUPER_WORDS, Scales};
use crate::simd::{MOST_LANES, Simd};

/// The parameters of one row's groups. A kernel reads the codes in blocks of words. If a block neither consists of
/// whole groups nor lies within one group, each group's parameters are repeated for each word of the group.
///
/// Each buffer ends with as many zeros as the widest vector has lanes. Lanes beyond the end of a row read these zeros.
pub(crate) struct Groups {
    pub scale: Vec<f32>,
    pub least: Vec<f32>,
    pub zero: Vec<f32>,
    /// The number of words or blocks per group, if each parameter is repeated for each of them. Otherwise `None`.
    repeats: Option<usize>,
}

impl Groups {
    /// Creates the buffers for rows of `layout`. A block has `lanes` words with `codes` codes each.
    pub fn new(layout: Layout, lanes: usize, codes: usize) -> Self {
        let words = layout.group() / codes;
        let is_whole = words.is_multiple_of(lanes) || lanes.is_multiple_of(words);
        Self::with(layout, (!is_whole).then_some(words))
    }

    /// Creates the buffers for a kernel that reads parameters for each block of `columns` columns. Each parameter is
    /// repeated for each block of its group. A group that is shorter than a block has its parameters once.
    #[cfg(target_arch = "aarch64")]
    pub fn of_blocks(layout: Layout, columns: usize) -> Self {
        let blocks = layout.group() / columns;
        Self::with(layout, (blocks > 1).then_some(blocks))
    }

    fn with(layout: Layout, repeats: Option<usize>) -> Self {
        let groups = layout.columns / layout.group();
        let length = groups * repeats.unwrap_or(1) + MOST_LANES;
        let buffer = |is_used: bool| vec![0.0; if is_used { length } else { 0 }];
        Self {
            scale: buffer(true),
            least: buffer(layout.format.has_least()),
            zero: buffer(layout.format.scales == Scales::SingleAndZero),
            repeats,
        }
    }

    /// Reads the parameters of a row. The row's scales begin at `words`.
    ///
    /// # Safety
    /// `words` points to all scales of a row of `layout`, and the CPU has the instruction set.
    #[inline(always)]
    pub unsafe fn read<S: Simd>(&mut self, layout: Layout, words: *const u32) {
        let groups = layout.columns / layout.group();
        unsafe { self.read_groups::<S>(layout, words, groups) };
        if let Some(words) = self.repeats {
            repeat(&mut self.scale, groups, words);
            repeat(&mut self.least, groups, words);
            repeat(&mut self.zero, groups, words);
        }
    }

    #[inline(always)]
    unsafe fn read_groups<S: Simd>(&mut self, layout: Layout, words: *const u32, groups: usize) {
        unsafe {
            match layout.format.scales {
                Scales::Half { .. } => {
                    let halves = words.cast::<u16>();
                    let whole = groups / S::LANES * S::LANES;
                    for group in (0..whole).step_by(S::LANES) {
                        let scale = S::load_f16(halves.add(group).cast());
                        S::store(self.scale.as_mut_ptr().add(group), scale);
                    }
                    for group in whole..groups {
                        self.scale[group] = S::half(*halves.add(group));
                    }
                }
                Scales::HalfAndLeast => {
                    for group in 0..groups {
                        let word = *words.add(group);
                        self.scale[group] = S::half(word as u16);
                        self.least[group] = S::half((word >> 16) as u16);
                    }
                }
                Scales::Single { .. } => {
                    let scales = std::slice::from_raw_parts(words.cast::<f32>(), groups);
                    self.scale[..groups].copy_from_slice(scales);
                }
                Scales::SingleAndZero => {
                    for group in 0..groups {
                        self.scale[group] = f32::from_bits(*words.add(2 * group));
                        self.zero[group] = *words.add(2 * group + 1) as f32;
                    }
                }
                Scales::Bytes { .. } => {
                    let scales = self.scale.chunks_exact_mut(16);
                    for (index, scales) in scales.take(layout.columns / SUPER).enumerate() {
                        let words = words.add(index * SUPER_WORDS);
                        let factor = S::half(*words as u16);
                        let bytes = words.add(1).cast::<[i8; 16]>().read_unaligned();
                        for (scale, byte) in scales.iter_mut().zip(bytes) {
                            *scale = factor * f32::from(byte);
                        }
                    }
                }
                Scales::BytesAndLeast => {
                    let parts = self.scale.chunks_exact_mut(8);
                    let parts = parts.zip(self.least.chunks_exact_mut(8));
                    for (index, (scales, least)) in parts.take(layout.columns / SUPER).enumerate() {
                        let words = words.add(index * SUPER_WORDS);
                        let of_scales = S::half(*words as u16);
                        let of_least = S::half((*words >> 16) as u16);
                        let bytes = words.add(1).cast::<[u8; 16]>().read_unaligned();
                        let (first, last) = bytes.split_at(8);
                        for (scale, byte) in scales.iter_mut().zip(first) {
                            *scale = of_scales * f32::from(*byte);
                        }
                        for (least, byte) in least.iter_mut().zip(last) {
                            *least = -(of_least * f32::from(*byte));
                        }
                    }
                }
                Scales::NibblesAndLeast => {
                    let parts = self.scale.chunks_exact_mut(16);
                    let parts = parts.zip(self.least.chunks_exact_mut(16));
                    for (index, (scales, least)) in parts.take(layout.columns / SUPER).enumerate() {
                        let words = words.add(index * SUPER_WORDS);
                        let of_scales = S::half(*words as u16);
                        let of_least = S::half((*words >> 16) as u16);
                        let bytes = words.add(1).cast::<[u8; 16]>().read_unaligned();
                        for ((scale, least), byte) in scales.iter_mut().zip(least).zip(bytes) {
                            *scale = of_scales * f32::from(byte & 15);
                            *least = -(of_least * f32::from(byte >> 4));
                        }
                    }
                }
            }
        }
    }
}

/// Repeats each of the first `groups` parameters `words` times, in place.
fn repeat(parameters: &mut [f32], groups: usize, words: usize) {
    if parameters.is_empty() {
        return;
    }
    for group in (0..groups).rev() {
        let parameter = parameters[group];
        parameters[group * words..][..words].fill(parameter);
    }
}

/// The mapping from the lanes of a block of words to the groups of a row.
#[derive(Clone, Copy)]
pub(crate) enum Lanes<S: Simd> {
    /// A group consists of this number of whole blocks.
    Blocks(u32),
    /// A block consists of whole groups.
    Groups {
        of_block: usize,
        /// The group of each lane, counted from the first group of the block.
        of_lanes: S::Words,
    },
}

impl<S: Simd> Lanes<S> {
    /// Creates the mapping for groups of `words` words.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    #[inline(always)]
    pub unsafe fn new(words: usize) -> Self {
        if words.is_multiple_of(S::LANES) {
            return Self::Blocks((words / S::LANES) as u32);
        }
        let words = match S::LANES % words {
            0 => words,
            // The buffers repeat each parameter for each word, so the mapping treats each word as a group.
            _ => 1,
        };
        let groups: [u32; MOST_LANES] = std::array::from_fn(|lane| (lane / words) as u32);
        Self::Groups {
            of_block: S::LANES / words,
            of_lanes: unsafe { S::load_words(groups.as_ptr().cast()) },
        }
    }

    /// Returns the parameter of each lane of a block.
    ///
    /// # Safety
    /// The block contains at least one word of the row, `parameters` points to a buffer of [`Groups`], and the CPU has
    /// the instruction set.
    #[inline(always)]
    pub unsafe fn spread(self, parameters: *const f32, block: usize) -> S::Floats {
        unsafe {
            match self {
                Self::Blocks(count) => {
                    let group = block as u32 / count;
                    S::splat(*parameters.add(group as usize))
                }
                Self::Groups { of_block, of_lanes } => {
                    let first = parameters.add(block * of_block);
                    S::permute(S::load_first(first, of_block), of_lanes)
                }
            }
        }
    }
}
