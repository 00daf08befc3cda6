//! Measures the rate at which each format's kernel reads weights, and compares this rate with the rate of a plain read
//! of the same bytes.
//!
//! `cargo bench -p cpu-gemv -- [columns] [megabytes]` prints a Markdown table. The matrices are meant to exceed the
//! CPU's caches, so that a product reads them from memory. Each number in the table is the best of several runs.

use cpu_gemv::layout::{Format, Layout, Rounding, Scales};
use cpu_gemv::{Isa, Rows, Weights, multiply_by, parallel, threads};
use half::{bf16, f16};
use std::{hint::black_box, time::Instant};

/// The number of runs of each measurement. The table contains the fastest run.
const RUNS: usize = 9;

fn main() {
    let mut sizes = std::env::args()
        .skip(1)
        .filter_map(|text| text.parse().ok());
    let columns: usize = sizes.next().unwrap_or(1536);
    let megabytes: usize = sizes.next().unwrap_or(256);
    let isas = Isa::available();
    println!(
        "{} threads, {columns} columns, {megabytes} MB of weights",
        threads()
    );
    print!("\n| weights | bits | read, GB/s | ISA | error |");
    let _ = [1, 2, 4, 8].map(|rows| print!(" {rows} rows, GB/s | of the read |"));
    println!("\n|---|---|---|---|---|{}", "---|".repeat(8));
    for name in [
        "f32",
        "bf16",
        "f16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "int4 bf16",
    ] {
        let stored = Stored::new(name, columns, megabytes << 20);
        let bytes = stored.bytes();
        let read = bytes.len() as f64 / best(|| plain_read(bytes)) / 1e9;
        for isa in &isas {
            let (weights, outputs) = (stored.weights(), stored.weights().outputs(columns));
            let error = error(*isa, weights, columns);
            let bits = bytes.len() as f64 * 8.0 / (outputs * columns) as f64;
            print!("| {name} | {bits:.3} | {read:.1} | {isa:?} | {error:.1e} |");
            for rows in [1, 2, 4, 8] {
                let input = halves(rows * columns);
                let mut output = vec![0.0; rows * outputs];
                let seconds = best(|| {
                    multiply_by(
                        *isa,
                        Rows::Bf16(&input),
                        columns,
                        weights,
                        black_box(&mut output),
                    );
                });
                let rate = bytes.len() as f64 / seconds / 1e9;
                print!(" {rate:.1} | {:.2} |", rate / read);
            }
            println!();
        }
    }
}

fn best(mut run: impl FnMut()) -> f64 {
    let time = |_| {
        let started = Instant::now();
        run();
        started.elapsed().as_secs_f64()
    };
    (0..RUNS).map(time).fold(f64::INFINITY, f64::min)
}

/// Reads all bytes on all threads.
fn plain_read(bytes: &[u8]) {
    const PART: usize = 1 << 17;
    let parts = bytes.len().div_ceil(PART);
    parallel(parts, |part| {
        let bytes = &bytes[part * PART..(part * PART + PART).min(bytes.len())];
        let mut sums = [0u64; 16];
        for chunk in bytes.as_chunks::<128>().0 {
            for (sum, bytes) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *sum ^= u64::from_le_bytes(*bytes);
            }
        }
        black_box(sums);
    });
}

/// Returns pseudorandom numbers between -1 and 1.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let next = |_| {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// Returns pseudorandom numbers between -1 and 1 in bf16.
fn halves(count: usize) -> Vec<bf16> {
    numbers(count).into_iter().map(bf16::from_f32).collect()
}

enum Stored {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    Words(Vec<u32>, Layout),
}

impl Stored {
    fn new(name: &str, columns: usize, bytes: usize) -> Self {
        let rows = |row_bytes: usize| bytes / row_bytes;
        match name {
            "f32" => return Self::F32(numbers(rows(4 * columns) * columns)),
            "bf16" => {
                let numbers = numbers(rows(2 * columns) * columns).into_iter();
                return Self::Bf16(numbers.map(bf16::from_f32).collect());
            }
            "f16" => {
                let numbers = numbers(rows(2 * columns) * columns).into_iter();
                return Self::F16(numbers.map(f16::from_f32).collect());
            }
            _ => {}
        }
        let (bits, group, scales, rounding) = match name {
            "Q8_0" => (8, 32, Scales::Half { zero: 128 }, Rounding::None),
            "Q4_0" => (4, 32, Scales::Half { zero: 8 }, Rounding::None),
            "Q4_1" => (4, 32, Scales::HalfAndLeast, Rounding::None),
            "Q5_0" => (5, 32, Scales::Half { zero: 16 }, Rounding::None),
            "Q4_K" => (4, 32, Scales::BytesAndLeast, Rounding::None),
            "Q5_K" => (5, 32, Scales::BytesAndLeast, Rounding::None),
            "Q6_K" => (6, 16, Scales::Bytes { zero: 32 }, Rounding::None),
            _ => (4, 32, Scales::Single { zero: 8 }, Rounding::BF16),
        };
        let format = Format {
            bits,
            group: Some(group),
            scales,
            codebook: None,
            rounding,
        };
        let layout = Layout::new(format, columns).expect("the columns are whole groups");
        let count = rows(4 * layout.words()) * layout.words();
        let mut words: Vec<u32> = numbers(count).into_iter().map(f32::to_bits).collect();
        for row in words.chunks_exact_mut(layout.words()) {
            for word in &mut row[..layout.scales()] {
                *word = word.wrapping_mul(2_654_435_761);
            }
            for word in &mut row[layout.scales()..] {
                *word = match scales {
                    Scales::Single { .. } => 0.01f32.to_bits(),
                    _ => 0x2222_2222,
                };
            }
        }
        Self::Words(words, layout)
    }

    fn weights(&self) -> Weights<'_> {
        match self {
            Self::F32(numbers) => Weights::F32(numbers),
            Self::Bf16(numbers) => Weights::Bf16(numbers),
            Self::F16(numbers) => Weights::F16(numbers),
            Self::Words(words, layout) => Weights::Words(words, *layout),
        }
    }

    fn bytes(&self) -> &[u8] {
        fn of<T>(elements: &[T]) -> &[u8] {
            let bytes = size_of_val(elements);
            // SAFETY: the elements are floats and integers, which have no padding, and the bytes live as long as the
            // elements.
            unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), bytes) }
        }
        match self {
            Self::F32(numbers) => of(numbers),
            Self::Bf16(numbers) => of(numbers),
            Self::F16(numbers) => of(numbers),
            Self::Words(words, _) => of(words),
        }
    }
}

/// Returns the largest error among the first 2,000 outputs. Each error is divided by the sum of the absolute values of
/// the products that form the output.
fn error(isa: Isa, weights: Weights, columns: usize) -> f64 {
    let input = halves(columns);
    let mut output = vec![0.0; weights.outputs(columns)];
    multiply_by(isa, Rows::Bf16(&input), columns, weights, &mut output);
    let mut row = vec![0.0; columns];
    let error = |output: &f32, index: usize, row: &mut [f32]| {
        weights.dequantize(index..index + 1, columns, row);
        let products = row
            .iter()
            .zip(&input)
            .map(|(w, x)| f64::from(*w) * f64::from(x.to_f32()));
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
        (f64::from(*output) - sum).abs() / size
    };
    let errors = output.iter().enumerate().take(2000);
    errors.fold(0.0, |most: f64, (index, output)| {
        most.max(error(output, index, &mut row))
    })
}
