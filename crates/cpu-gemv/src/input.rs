//! The input rows in the order in which the kernels read them.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::fixed_point::{self, Fixed};
use crate::simd::MOST_LANES;
use half::bf16;
use std::ops::Range;

/// The input rows of a product, `[rows, columns in]`.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Elements in f32.
    F32(&'a [f32]),
    /// Elements in bf16.
    Bf16(&'a [bf16]),
}

impl<'a> Rows<'a> {
    /// Returns a range of the elements.
    pub(crate) fn slice(self, elements: Range<usize>) -> Rows<'a> {
        match self {
            Self::F32(numbers) => Self::F32(&numbers[elements]),
            Self::Bf16(numbers) => Self::Bf16(&numbers[elements]),
        }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::Bf16(numbers) => numbers.len(),
        }
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Input rows, rearranged as `[blocks, rows, steps, lanes]`. In each step, a kernel reads one vector of `lanes`
/// elements per row. Elements beyond the last column are 0.
#[derive(Default)]
pub(crate) struct Input {
    pub numbers: Vec<f32>,
    /// The elements in bf16, if the kernel reads bf16. In this case, the list `numbers` is empty.
    #[cfg(target_arch = "x86_64")]
    pub halves: Vec<bf16>,
    /// The elements in fixed point, if the kernel reads fixed point. In this case, the other lists are empty.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub fixed: Fixed,
    /// For each word of the weights, the sum of the input elements that are multiplied by the word's codes:
    /// `[blocks, rows, words]`. The list is empty if the format has no minimums.
    pub sums: Vec<f32>,
}

/// The order of a block's columns.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    pub steps: usize,
    pub lanes: usize,
    /// Returns the column, within a block, of the element in a lane of a step.
    pub column: fn(step: usize, lane: usize) -> usize,
}

/// The form in which a kernel reads the input.
#[derive(Clone, Copy)]
pub(crate) enum Reads {
    /// Elements in f32.
    F32(Order),
    /// Elements in bf16.
    #[cfg(target_arch = "x86_64")]
    Bf16(Order),
    /// Fixed point.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Fixed(fixed_point::Form),
}

impl Input {
    /// Rearranges `input`, `[input rows, columns]`, for a kernel that reads `rows` rows. If `input` has fewer rows, the
    /// remaining rows are zero. `has_sums` is true if the format has minimums.
    pub fn new(input: Rows, columns: usize, rows: usize, reads: Reads, has_sums: bool) -> Self {
        let mut made = Self::default();
        match reads {
            Reads::F32(order) => {
                made.numbers = match input {
                    Rows::F32(input) => rearranged(input, columns, rows, order, |number| number),
                    Rows::Bf16(input) => rearranged(input, columns, rows, order, bf16::to_f32),
                };
                if has_sums {
                    made.sums = sums(&made.numbers, order, 1, |number| number);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Reads::Bf16(order) => {
                made.halves = match input {
                    Rows::F32(input) => rearranged(input, columns, rows, order, bf16::from_f32),
                    Rows::Bf16(input) => rearranged(input, columns, rows, order, |number| number),
                };
                if has_sums {
                    made.sums = sums(&made.halves, order, 2, bf16::to_f32);
                }
            }
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Reads::Fixed(form) => made.fixed = Fixed::new(input, columns, rows, form),
        }
        made
    }
}

fn rearranged<T: Copy, N: Copy + Default>(
    input: &[T],
    columns: usize,
    rows: usize,
    order: Order,
    number: impl Fn(T) -> N,
) -> Vec<N> {
    let Order { steps, lanes, .. } = order;
    let width = steps * lanes;
    let mut numbers = vec![N::default(); columns.div_ceil(width) * rows * width];
    let mut places = [0; 8 * MOST_LANES];
    let places = &mut places[..width];
    for (at, place) in places.iter_mut().enumerate() {
        *place = (order.column)(at / lanes, at % lanes);
    }
    for (row, input) in input.chunks_exact(columns).enumerate() {
        for (block, columns) in input.chunks(width).enumerate() {
            let written = &mut numbers[(block * rows + row) * width..][..width];
            for (written, place) in written.iter_mut().zip(places.iter()) {
                if let Some(column) = columns.get(*place) {
                    *written = number(*column);
                }
            }
        }
    }
    numbers
}

/// For each word of the weights, sums the input elements that are multiplied by the word's codes. In each step of a
/// block, these elements are in `of_word` neighboring lanes.
fn sums<T: Copy>(
    numbers: &[T],
    order: Order,
    of_word: usize,
    number: impl Fn(T) -> f32,
) -> Vec<f32> {
    let Order { steps, lanes, .. } = order;
    let width = steps * lanes;
    let mut sums = vec![0.0; numbers.len() / width * (lanes / of_word)];
    let blocks = numbers.chunks_exact(width);
    for (sums, steps) in sums.chunks_exact_mut(lanes / of_word).zip(blocks) {
        for step in steps.chunks_exact(lanes) {
            for (sum, of_word) in sums.iter_mut().zip(step.chunks_exact(of_word)) {
                for element in of_word {
                    *sum += number(*element);
                }
            }
        }
    }
    sums
}
