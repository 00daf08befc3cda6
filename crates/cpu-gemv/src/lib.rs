//! Products of few input rows with a matrix of weights on the CPU: `y[r, n] = Σ x[r, k] · w[n, k]`.
//!
//! The weights may be stored in f32, f16, bf16 or a quantized format. The kernels read the stored weights directly, and
//! accumulate in f32. The time of a product of few rows is the time to read the weights from memory. An f32 copy of the
//! weights would have more bytes, so reading the copy would take longer.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the blocks within an unsafe function rest on the contract of that function"
)]

#[cfg(target_endian = "big")]
compile_error!("the kernels read two elements per word, in the order of little-endian CPUs");

#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod fixed;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod fixed_point;
mod formats;
mod input;
mod isa;
mod kernel;
pub mod layout;
mod scales;
mod simd;
mod team;

pub use input::Rows;
pub use isa::Isa;
pub use kernel::CHUNK;
pub use team::{parallel, threads};

use half::{bf16, f16};
use input::Input;
use kernel::{Format, Kernel, Task};
use layout::Layout;
use std::{ops::Range, sync::OnceLock};

/// The number of bytes of weights in one part of a product. Each part is computed by one thread. The parts are small.
/// If another process delays a thread, the other threads therefore wait only for a short time.
const PART_BYTES: usize = 1 << 17;
/// The number of bytes in a part if there are several chunks of input rows. Each chunk reads the part again, so the
/// part fits into a core's L2 cache.
const PART_BYTES_OF_CHUNKS: usize = 1 << 19;

/// A matrix of weights, `[columns out, columns in]`, row by row.
#[derive(Clone, Copy, Debug)]
pub enum Weights<'a> {
    /// Elements in f32.
    F32(&'a [f32]),
    /// Elements in f16.
    F16(&'a [f16]),
    /// Elements in bf16.
    Bf16(&'a [bf16]),
    /// Quantized rows, of [`Layout::words`] words each.
    Words(&'a [u32], Layout),
}

impl Weights<'_> {
    /// Returns the number of rows of a matrix whose rows have `columns` elements.
    ///
    /// # Panics
    /// Panics if the elements do not form whole rows.
    pub fn outputs(&self, columns: usize) -> usize {
        let (length, of_row) = match self {
            Self::F32(numbers) => (numbers.len(), columns),
            Self::F16(numbers) => (numbers.len(), columns),
            Self::Bf16(numbers) => (numbers.len(), columns),
            Self::Words(words, layout) => {
                assert_eq!(
                    layout.columns, columns,
                    "weights: expected rows of {columns} columns"
                );
                (words.len(), layout.words())
            }
        };
        assert!(
            of_row > 0 && length.is_multiple_of(of_row),
            "weights: {length} elements; expected whole rows of {of_row}"
        );
        length / of_row
    }

    /// Converts the rows with the indices `rows` to f32, and writes them to `numbers`, `[rows, columns]`.
    ///
    /// # Panics
    /// Panics if the length of `numbers` differs from the number of elements in these rows.
    pub fn dequantize(&self, rows: Range<usize>, columns: usize, numbers: &mut [f32]) {
        assert_eq!(
            numbers.len(),
            rows.len() * columns,
            "numbers: expected all rows"
        );
        let elements = rows.start * columns..rows.end * columns;
        match self {
            Self::F32(weights) => numbers.copy_from_slice(&weights[elements]),
            Self::F16(weights) => {
                use half::slice::HalfFloatSliceExt;
                weights[elements].convert_to_f32_slice(numbers);
            }
            Self::Bf16(weights) => {
                for (number, weight) in numbers.iter_mut().zip(&weights[elements]) {
                    *number = f32::from_bits(u32::from(weight.to_bits()) << 16);
                }
            }
            Self::Words(words, layout) => {
                let words = words[rows.start * layout.words()..].chunks_exact(layout.words());
                for (words, numbers) in words.zip(numbers.chunks_exact_mut(columns)) {
                    layout.dequantize(words, numbers);
                }
            }
        }
    }

    fn format(&self) -> Format {
        match self {
            Self::F32(_) => Format::F32,
            Self::F16(_) => Format::F16,
            Self::Bf16(_) => Format::Bf16,
            Self::Words(_, layout) => Format::Words(*layout),
        }
    }

    fn first_byte(&self) -> *const u8 {
        match self {
            Self::F32(numbers) => numbers.as_ptr().cast(),
            Self::F16(numbers) => numbers.as_ptr().cast(),
            Self::Bf16(numbers) => numbers.as_ptr().cast(),
            Self::Words(words, _) => words.as_ptr().cast(),
        }
    }

    fn row_bytes(&self, columns: usize) -> usize {
        match self {
            Self::F32(_) => 4 * columns,
            Self::F16(_) | Self::Bf16(_) => 2 * columns,
            Self::Words(_, layout) => 4 * layout.words(),
        }
    }
}

/// Returns the largest number of input rows for which [`multiply`] is faster than a GEMM in f32 over dequantized weights.
/// `has_halves` is true if the input is in bf16.
///
/// Only kernels whose instruction multiplies more weights than an instruction on f32 are faster with many rows. On one
/// core of an AMD EPYC with AVX-512 (2026-11-30), 8 rows by Q4_0 take 47 billion products a second with int8 dot
/// products and 74 billion with dot products of bf16. The GEMM of the crate `gemm` takes 35 billion, and the conversion
/// of the weights is included.
pub fn max_rows(weights: &Weights, has_halves: bool) -> usize {
    let format = weights.format();
    match format {
        Format::Words(_) if Isa::best().has_fast_chunks(format, has_halves) => usize::MAX,
        _ => CHUNK,
    }
}

/// Multiplies `input` by the transpose of `weights`, on all CPU cores.
///
/// # Shapes
/// - `input`: `[rows, columns in]`, with at least one row.
/// - `weights`: `[columns out, columns in]`.
/// - `output`: `[rows, columns out]`.
///
/// # Panics
/// Panics if the lengths of the slices do not match these shapes.
pub fn multiply(input: Rows, columns: usize, weights: Weights, output: &mut [f32]) {
    multiply_by(Isa::best(), input, columns, weights, output);
}

/// Computes [`multiply`] with the kernels of a given instruction set.
///
/// # Panics
/// Panics in the same cases as [`multiply`], and if this CPU lacks the instruction set.
pub fn multiply_by(isa: Isa, input: Rows, columns: usize, weights: Weights, output: &mut [f32]) {
    assert!(
        isa == Isa::best() || Isa::available().contains(&isa),
        "isa: this CPU has no {isa:?}; expected one of `available`"
    );
    let outputs = weights.outputs(columns);
    let rows = input.len() / columns;
    assert!(
        input.len().is_multiple_of(columns) && rows > 0,
        "input: {} elements; expected one or more rows of {columns}",
        input.len()
    );
    assert_eq!(
        output.len(),
        rows * outputs,
        "output: expected {rows} rows of {outputs}"
    );
    let layout = match weights {
        Weights::Words(_, layout) => Some(layout),
        _ => None,
    };
    if let Some(layout) = layout {
        // The kernels rely on the layout for the number of bytes to read. The layout's fields are public, so check that
        // they form a valid layout.
        assert!(
            Layout::new(layout.format, layout.columns) == Some(layout),
            "weights: expected a layout of `Layout::new`"
        );
    }
    if outputs == 0 {
        return;
    }
    let (format, row_bytes) = (weights.format(), weights.row_bytes(columns));
    let has_halves = matches!(input, Rows::Bf16(_));
    let has_sums = layout.is_some_and(|layout| layout.format.has_least());
    let chunks = rows.div_ceil(CHUNK);
    let inputs: Vec<OnceLock<(Kernel, Input)>> = (0..chunks).map(|_| OnceLock::new()).collect();
    parallel(chunks, |chunk| {
        let first = chunk * CHUNK;
        let rows = CHUNK.min(rows - first);
        let kernel = isa.kernel(format, rows, has_halves);
        let input = input.slice(first * columns..(first + rows) * columns);
        let input = Input::new(input, columns, kernel.rows, kernel.reads, has_sums);
        let _ = inputs[chunk].set((kernel, input));
    });
    let output = output.as_mut_ptr();
    let tasks: Vec<(Kernel, Input)> = inputs
        .into_iter()
        .filter_map(OnceLock::into_inner)
        .collect();
    let tasks: Vec<(&Kernel, Task)> = (tasks.iter().enumerate())
        .map(|(chunk, (kernel, input))| {
            let task = Task {
                input,
                weights: weights.first_byte(),
                row_bytes,
                layout,
                columns,
                rows: CHUNK.min(rows - chunk * CHUNK),
                outputs,
                // SAFETY: the output has all rows of all chunks.
                output: unsafe { output.add(chunk * CHUNK * outputs) },
            };
            (kernel, task)
        })
        .collect();
    let part_bytes = match chunks {
        1 => PART_BYTES,
        _ => PART_BYTES_OF_CHUNKS,
    };
    let of_part = (part_bytes / row_bytes.max(1)).clamp(4, outputs.max(4));
    parallel(outputs.div_ceil(of_part), |part| {
        let first = part * of_part;
        for (kernel, task) in &tasks {
            // SAFETY: the lengths were checked above, the parts are disjoint, and this CPU has the instruction set.
            unsafe { (kernel.run)(task, first..(first + of_part).min(outputs)) };
        }
    });
}
