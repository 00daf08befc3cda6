//! Compares the products of every format and instruction set with sums in f64.

use cpu_gemv::layout::{Codebook, Format, Layout, Rounding, Scales};
use cpu_gemv::{CHUNK, Isa, Rows, Weights, multiply, multiply_by};
use half::{bf16, f16};

/// A generator of pseudorandom numbers.
struct Random(u32);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (self.0 >> 16) ^ (self.0 << 11)
    }

    fn number(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

enum Stored {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Words(Vec<u32>, Layout),
}

impl Stored {
    fn weights(&self) -> Weights<'_> {
        match self {
            Self::F32(numbers) => Weights::F32(numbers),
            Self::F16(numbers) => Weights::F16(numbers),
            Self::Bf16(numbers) => Weights::Bf16(numbers),
            Self::Words(words, layout) => Weights::Words(words, *layout),
        }
    }

    fn columns(&self, outputs: usize) -> usize {
        match self {
            Self::F32(numbers) => numbers.len() / outputs,
            Self::F16(numbers) => numbers.len() / outputs,
            Self::Bf16(numbers) => numbers.len() / outputs,
            Self::Words(_, layout) => layout.columns,
        }
    }
}

/// Returns random rows of a layout. All scales are finite and of moderate size.
fn words(layout: Layout, outputs: usize, random: &mut Random) -> Stored {
    let of_row = layout.words();
    let mut words: Vec<u32> = (0..outputs * of_row).map(|_| random.bits()).collect();
    for row in words.chunks_exact_mut(of_row) {
        for (at, word) in row[layout.scales()..].iter_mut().enumerate() {
            *word = match layout.format.scales {
                Scales::Half { .. } | Scales::HalfAndLeast => *word & 0x8fff_8fff | 0x2000_2000,
                Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast
                    if at % 5 == 0 =>
                {
                    *word & 0x8fff_8fff | 0x2000_2000
                }
                Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast => *word,
                Scales::SingleAndZero if at % 2 == 1 => *word & 15,
                Scales::Single { .. } | Scales::SingleAndZero => *word & 0x81ff_ffff | 0x3c00_0000,
            };
        }
    }
    Stored::Words(words, layout)
}

/// Returns layouts of all formats. The rows of many layouts do not fill the last block of a kernel.
fn layouts() -> Vec<Layout> {
    let of = |bits, group, scales, rounding, columns| {
        let format = Format {
            bits,
            group,
            scales,
            codebook: None,
            rounding,
        };
        Layout::new(format, columns).expect("the columns are whole groups")
    };
    let of_book = |codebook, group, scales, rounding, columns| {
        let format = Format {
            bits: 4,
            group: Some(group),
            scales,
            codebook: Some(codebook),
            rounding,
        };
        Layout::new(format, columns).expect("the columns are whole groups")
    };
    let mut layouts = Vec::new();
    for columns in [32, 96, 608] {
        for (codebook, scales) in [
            (Codebook::Iq4, Scales::Half { zero: 0 }),
            (Codebook::E2m1, Scales::Single { zero: 0 }),
        ] {
            layouts.push(of_book(codebook, 32, scales, Rounding::None, columns));
        }
        let scales = Scales::Single { zero: 0 };
        for rounding in [Rounding::F16, Rounding::BF16] {
            layouts.push(of_book(Codebook::E2m1, 16, scales, rounding, columns));
        }
    }
    for columns in [256, 768] {
        let scales = Scales::Bytes { zero: 0 };
        layouts.push(of_book(Codebook::Iq4, 16, scales, Rounding::None, columns));
        for (scales, rounding) in [
            (Scales::Bytes { zero: 4 }, Rounding::None),
            (Scales::NibblesAndLeast, Rounding::None),
        ] {
            layouts.push(of(4, Some(16), scales, rounding, columns));
        }
    }
    for columns in [32, 96, 256, 608, 1536] {
        for (bits, zero) in [(4, 8), (5, 16), (6, 32), (8, 128)] {
            let scales = Scales::Half { zero };
            layouts.push(of(bits, Some(32), scales, Rounding::None, columns));
        }
        for bits in [4, 5] {
            layouts.push(of(
                bits,
                Some(32),
                Scales::HalfAndLeast,
                Rounding::None,
                columns,
            ));
        }
    }
    for columns in [256, 768] {
        for bits in [4, 5] {
            layouts.push(of(
                bits,
                Some(32),
                Scales::BytesAndLeast,
                Rounding::None,
                columns,
            ));
        }
        layouts.push(of(
            6,
            Some(16),
            Scales::Bytes { zero: 32 },
            Rounding::None,
            columns,
        ));
    }
    for bits in [4, 8] {
        let zero = 1 << (bits - 1);
        for scales in [Scales::Single { zero }, Scales::SingleAndZero] {
            for rounding in [Rounding::None, Rounding::F16, Rounding::BF16] {
                for (group, columns) in [
                    (Some(8), 104),
                    (Some(32), 352),
                    (Some(96), 288),
                    (Some(128), 640),
                    (None, 264),
                ] {
                    layouts.push(of(bits, group, scales, rounding, columns));
                }
            }
        }
    }
    layouts
}

/// Returns weights of all formats with their number of outputs.
fn all_weights(random: &mut Random) -> Vec<(Stored, usize)> {
    let mut all = Vec::new();
    for (outputs, columns) in [(1, 1), (1, 300), (5, 31), (37, 257), (13, 2048), (700, 129)] {
        let mut numbers = |_| random.number();
        let numbers: Vec<f32> = (0..outputs * columns).map(&mut numbers).collect();
        let halves = numbers
            .iter()
            .map(|number| f16::from_f32(*number))
            .collect();
        let brains = numbers
            .iter()
            .map(|number| bf16::from_f32(*number))
            .collect();
        all.push((Stored::F16(halves), outputs));
        all.push((Stored::Bf16(brains), outputs));
        all.push((Stored::F32(numbers), outputs));
    }
    for (index, layout) in layouts().into_iter().enumerate() {
        let outputs = [1, 3, 18, 333][index % 4];
        all.push((words(layout, outputs, random), outputs));
    }
    all
}

/// Compares a product with sums in f64. An error is relative to the sum of the products' absolute values.
fn check(isa: Isa, stored: &Stored, outputs: usize, input: Rows, what: &str) {
    let columns = stored.columns(outputs);
    let rows = input.len() / columns;
    let numbers: Vec<f64> = match input {
        Rows::F32(input) => input.iter().map(|x| f64::from(*x)).collect(),
        Rows::Bf16(input) => input.iter().map(|x| x.to_f64()).collect(),
    };
    let mut output = vec![f32::NAN; rows * outputs];
    multiply_by(isa, input, columns, stored.weights(), &mut output);
    let mut weights = vec![0.0; columns];
    for index in 0..outputs {
        stored
            .weights()
            .dequantize(index..index + 1, columns, &mut weights);
        for (row, input) in numbers.chunks_exact(columns).enumerate() {
            let products = weights.iter().zip(input).map(|(w, x)| f64::from(*w) * x);
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
            let found = f64::from(output[row * outputs + index]);
            assert!(
                (found - sum).abs() <= 1e-6 * size,
                "{what}: {isa:?}, row {row}, output {index}: found {found}, expected {sum}"
            );
        }
    }
}

#[test]
fn multiply_by_every_isa_matches_sums_in_f64() {
    let mut random = Random(1);
    for (stored, outputs) in all_weights(&mut random) {
        let columns = stored.columns(outputs);
        let what = match &stored {
            Stored::Words(_, layout) => format!("{layout:?}"),
            other => format!("{:?} of {columns} columns", std::mem::discriminant(other)),
        };
        for rows in 1..=CHUNK {
            let input: Vec<f32> = (0..rows * columns).map(|_| random.number()).collect();
            let halves: Vec<bf16> = input.iter().map(|number| bf16::from_f32(*number)).collect();
            for isa in Isa::available() {
                check(isa, &stored, outputs, Rows::F32(&input), &what);
                check(isa, &stored, outputs, Rows::Bf16(&halves), &what);
            }
        }
    }
}

#[test]
fn best_isa_is_the_expected_one() {
    if let Ok(expected) = std::env::var("CPU_GEMV_TEST_ISA") {
        assert_eq!(format!("{:?}", Isa::best()), expected);
    }
}

/// The kernels that multiply in integers subtract the zero point exactly, and the others multiply by 0.
#[test]
fn multiply_by_codes_that_equal_the_zero_point_gives_zero() {
    let (outputs, rows) = (5, CHUNK);
    let mut random = Random(4);
    for (bits, code) in [(4, 0x8888_8888), (5, 0), (8, 0x8080_8080)] {
        let scales = Scales::Half {
            zero: 1 << (bits - 1),
        };
        let format = Format {
            bits,
            group: Some(32),
            scales,
            codebook: None,
            rounding: Rounding::None,
        };
        let layout = Layout::new(format, 288).expect("the columns are whole groups");
        let Stored::Words(mut words, _) = words(layout, outputs, &mut random) else {
            panic!("quantized weights are words")
        };
        for row in words.chunks_exact_mut(layout.words()) {
            row[..layout.top()].fill(code);
            row[layout.top()..layout.scales()].fill(u32::MAX);
        }
        let input: Vec<f32> = (0..rows * layout.columns)
            .map(|_| random.number() * 1e3)
            .collect();
        for isa in Isa::available() {
            for rows in 1..=rows {
                let mut output = vec![1.0; rows * outputs];
                let input = Rows::F32(&input[..rows * layout.columns]);
                multiply_by(
                    isa,
                    input,
                    layout.columns,
                    Weights::Words(&words, layout),
                    &mut output,
                );
                assert!(
                    output.iter().all(|number| *number == 0.0),
                    "{isa:?}, {bits} bits: {output:?}"
                );
            }
        }
    }
}

#[test]
fn multiply_with_numbers_that_are_not_finite_changes_only_their_outputs() {
    let mut random = Random(2);
    let (outputs, columns, rows) = (9, 320, 3);
    let bad = 4;
    let scales = Scales::Half { zero: 8 };
    let format = Format {
        bits: 4,
        group: Some(32),
        scales,
        codebook: None,
        rounding: Rounding::None,
    };
    let layout = Layout::new(format, columns).expect("the columns are whole groups");
    let Stored::Words(mut words, _) = words(layout, outputs, &mut random) else {
        panic!("quantized weights are words")
    };
    words[bad * layout.words() + layout.scales()] = 0x7e00_7c00;
    let numbers: Vec<f32> = (0..outputs * columns).map(|_| random.number()).collect();
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut floats = numbers.clone();
        floats[bad * columns + columns - 1] = number;
        let all = [
            Stored::F16(floats.iter().map(|number| f16::from_f32(*number)).collect()),
            Stored::Bf16(
                floats
                    .iter()
                    .map(|number| bf16::from_f32(*number))
                    .collect(),
            ),
            Stored::F32(floats),
            Stored::Words(words.clone(), layout),
        ];
        let input: Vec<f32> = (0..rows * columns).map(|_| random.number()).collect();
        let halves: Vec<bf16> = input.iter().map(|number| bf16::from_f32(*number)).collect();
        let mut bad_input = halves.clone();
        bad_input[columns + 3] = bf16::from_f32(number);
        for stored in &all {
            for isa in Isa::available() {
                let mut output = vec![0.0; rows * outputs];
                let mut product = |input: Rows| {
                    multiply_by(isa, input, columns, stored.weights(), &mut output);
                    output
                        .iter()
                        .map(|number| number.is_finite())
                        .collect::<Vec<_>>()
                };
                for input in [Rows::F32(&input), Rows::Bf16(&halves)] {
                    for (at, is_finite) in product(input).into_iter().enumerate() {
                        assert_eq!(is_finite, at % outputs != bad, "{isa:?}, output {at}");
                    }
                }
                for (at, is_finite) in product(Rows::Bf16(&bad_input)).into_iter().enumerate() {
                    let expected = at % outputs != bad && at / outputs != 1;
                    assert_eq!(is_finite, expected, "{isa:?}, output {at}");
                }
            }
        }
    }
}

#[test]
fn multiply_on_several_threads_gives_equal_bits() {
    let mut random = Random(3);
    let (outputs, columns) = (3000, 256);
    let weights: Vec<f32> = (0..outputs * columns).map(|_| random.number()).collect();
    let input: Vec<f32> = (0..columns).map(|_| random.number()).collect();
    let product = || {
        let mut output = vec![0.0; outputs];
        multiply(
            Rows::F32(&input),
            columns,
            Weights::F32(&weights),
            &mut output,
        );
        output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected = product();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(product(), expected);
                }
            });
        }
    });
}

/// Each row of a product of many rows has the bits that it has in a chunk of its own.
#[test]
fn multiply_of_many_rows_equals_its_chunks() {
    let mut random = Random(5);
    for (bits, zero, columns, outputs) in [(4, 8, 1536, 700), (6, 32, 608, 41), (8, 128, 96, 3)] {
        let format = Format {
            bits,
            group: Some(32),
            scales: Scales::Half { zero },
            codebook: None,
            rounding: Rounding::None,
        };
        let layout = Layout::new(format, columns).expect("the columns are whole groups");
        let stored = words(layout, outputs, &mut random);
        for rows in [CHUNK + 1, 3 * CHUNK, 67] {
            let input: Vec<f32> = (0..rows * columns).map(|_| random.number()).collect();
            let halves: Vec<bf16> = input.iter().map(|number| bf16::from_f32(*number)).collect();
            for isa in Isa::available() {
                let product = |first: usize, rows: usize| {
                    let elements = first * columns..(first + rows) * columns;
                    let inputs = [
                        Rows::F32(&input[elements.clone()]),
                        Rows::Bf16(&halves[elements]),
                    ];
                    inputs.map(|input| {
                        let mut output = vec![f32::NAN; rows * outputs];
                        multiply_by(isa, input, columns, stored.weights(), &mut output);
                        output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    })
                };
                let all = product(0, rows);
                for first in (0..rows).step_by(CHUNK) {
                    let rows = CHUNK.min(rows - first);
                    let elements = first * outputs..(first + rows) * outputs;
                    for (all, chunk) in all.iter().zip(product(first, rows)) {
                        assert_eq!(all[elements.clone()], chunk, "{isa:?}, {bits} bits");
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "input: 3 elements; expected one or more rows of 2")]
fn multiply_with_part_of_a_row_panics() {
    let weights = Weights::F32(&[0.0; 2]);
    multiply(Rows::F32(&[0.0; 3]), 2, weights, &mut [0.0; 1]);
}
