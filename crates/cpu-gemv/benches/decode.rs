//! Measures the products of one decoded token of Gemma 4 E2B, with the formats of llama.cpp's Q4_0 file: Q4_0, the
//! output table in Q6_K, and the projection of the per-layer inputs in bf16.
//!
//! `cargo bench -p cpu-gemv --bench decode -- [tokens] [f32|bf16] [--rows rows]` prints the fastest and the median token,
//! by the dtype of the input. With `--rows 512` the products are those of a prompt of 512 tokens, and the times are
//! those of one token of it. The weights take 1.4 GB. A whole token also has attention, norms and activations, which are
//! not part of this benchmark. `benches/peers/llama_cpp.py` runs llama.cpp and this benchmark in turn.

use cpu_gemv::layout::{Format, Layout, Rounding, Scales};
use cpu_gemv::{Rows, Weights, multiply, threads};
use half::bf16;
use std::{hint::black_box, time::Instant};

const HIDDEN: usize = 1536;
const LAYERS: usize = 35;
/// The number of layers that have their own keys and values. The feed-forward networks of the other layers are twice as
/// wide.
const OWN_KEYS: usize = 15;
const HEADS: usize = 8;
/// The number of elements of a layer's per-layer input.
const PER_LAYER: usize = 256;
const VOCABULARY: usize = 262_144;

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let rows = match arguments.iter().position(|text| text == "--rows") {
        Some(at) => {
            let rows = arguments.drain(at..).nth(1);
            rows.and_then(|text| text.parse().ok())
                .expect("--rows needs a number")
        }
        None => 1,
    };
    let tokens = arguments
        .iter()
        .find_map(|text| text.parse().ok())
        .unwrap_or(20);
    let is_left_out = |dtype: &str| {
        let has_dtype = arguments.iter().any(|text| text == "f32" || text == "bf16");
        has_dtype && arguments.iter().all(|text| text != dtype)
    };
    let matrices = matrices();
    let bytes: usize = matrices.iter().map(Matrix::bytes).sum();
    println!(
        "{} threads, {:.2} GB of weights",
        threads(),
        bytes as f64 / 1e9
    );
    println!(
        "\n| input | fastest token, ms | median, ms | GB/s | tokens/s |\n|---|---|---|---|---|"
    );
    for dtype in ["f32", "bf16"] {
        if is_left_out(dtype) {
            continue;
        }
        let is_half = dtype == "bf16";
        let mut times: Vec<f64> = (0..tokens)
            .map(|_| token(&matrices, is_half, rows) / rows as f64)
            .collect();
        times.sort_by(f64::total_cmp);
        let (fastest, median) = (times[0], times[times.len() / 2]);
        println!(
            "| {dtype} | {:.1} | {:.1} | {:.1} | {:.2} |",
            fastest * 1e3,
            median * 1e3,
            bytes as f64 / median / 1e9,
            1.0 / median
        );
    }
}

/// Multiplies `rows` rows by all matrices, and returns the seconds. The output table multiplies only the last row.
fn token(matrices: &[Matrix], is_half: bool, rows: usize) -> f64 {
    let numbers: Vec<f32> = (0..rows * 2 * 6144)
        .map(|at| (at % 97) as f32 / 48.0 - 1.0)
        .collect();
    let halves: Vec<bf16> = numbers
        .iter()
        .map(|number| bf16::from_f32(*number))
        .collect();
    let mut output = vec![0.0; VOCABULARY.max(rows * 2 * 6144)];
    let started = Instant::now();
    for matrix in matrices {
        let rows = if matrix.outputs == VOCABULARY {
            1
        } else {
            rows
        };
        let input = match is_half {
            true => Rows::Bf16(&halves[..rows * matrix.columns]),
            false => Rows::F32(&numbers[..rows * matrix.columns]),
        };
        let output = black_box(&mut output[..rows * matrix.outputs]);
        multiply(input, matrix.columns, matrix.weights(), output);
    }
    started.elapsed().as_secs_f64()
}

struct Matrix {
    outputs: usize,
    columns: usize,
    stored: Stored,
}

enum Stored {
    Bf16(Vec<bf16>),
    Words(Vec<u32>, Layout),
}

impl Matrix {
    fn q4_0(outputs: usize, columns: usize) -> Self {
        Self::quantized(outputs, columns, 4, 32, Scales::Half { zero: 8 })
    }

    /// Creates a matrix whose codes are pseudorandom and whose scales are small numbers.
    fn quantized(
        outputs: usize,
        columns: usize,
        bits: usize,
        group: usize,
        scales: Scales,
    ) -> Self {
        let (group, rounding) = (Some(group), Rounding::None);
        let format = Format {
            bits,
            group,
            scales,
            codebook: None,
            rounding,
        };
        let layout = Layout::new(format, columns).expect("the columns are whole groups");
        let mut words: Vec<u32> = (0..(outputs * layout.words()) as u32)
            .map(|at| at.wrapping_mul(2_654_435_761))
            .collect();
        for row in words.chunks_exact_mut(layout.words()) {
            row[layout.scales()..].fill(0x2222_2222);
        }
        let stored = Stored::Words(words, layout);
        Self {
            outputs,
            columns,
            stored,
        }
    }

    fn bf16(outputs: usize, columns: usize) -> Self {
        let numbers =
            (0..outputs * columns).map(|at| bf16::from_f32((at % 101) as f32 / 50.0 - 1.0));
        Self {
            outputs,
            columns,
            stored: Stored::Bf16(numbers.collect()),
        }
    }

    fn weights(&self) -> Weights<'_> {
        match &self.stored {
            Stored::Bf16(numbers) => Weights::Bf16(numbers),
            Stored::Words(words, layout) => Weights::Words(words, *layout),
        }
    }

    fn bytes(&self) -> usize {
        match &self.stored {
            Stored::Bf16(numbers) => size_of_val(&numbers[..]),
            Stored::Words(words, _) => size_of_val(&words[..]),
        }
    }
}

/// Returns the matrices of a token in the order of their products.
fn matrices() -> Vec<Matrix> {
    let mut matrices = vec![Matrix::bf16(LAYERS * PER_LAYER, HIDDEN)];
    for layer in 0..LAYERS {
        let head = if layer % 5 == 4 { 512 } else { 256 };
        let ffn = if layer < OWN_KEYS { 6144 } else { 2 * 6144 };
        matrices.push(Matrix::q4_0(HEADS * head, HIDDEN));
        if layer < OWN_KEYS {
            matrices.push(Matrix::q4_0(head, HIDDEN));
            matrices.push(Matrix::q4_0(head, HIDDEN));
        }
        matrices.push(Matrix::q4_0(HIDDEN, HEADS * head));
        matrices.push(Matrix::q4_0(ffn, HIDDEN));
        matrices.push(Matrix::q4_0(ffn, HIDDEN));
        matrices.push(Matrix::q4_0(HIDDEN, ffn));
        matrices.push(Matrix::q4_0(PER_LAYER, HIDDEN));
        matrices.push(Matrix::q4_0(HIDDEN, PER_LAYER));
    }
    let scales = Scales::Bytes { zero: 32 };
    matrices.push(Matrix::quantized(VOCABULARY, HIDDEN, 6, 16, scales));
    matrices
}
