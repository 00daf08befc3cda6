//! Checks the gradients of fused attention against the definition of attention in f64, for several head sizes, options and
//! dtypes.
//!
//! ```text
//! cargo run --release --example gradcheck
//! cargo run --release --example gradcheck -- --device wgpu --head-sizes 256,512 --options causal,segments
//! ```

use attention_cube::{CausalAlignment, Selection, explain};
use attention_workspace::mesa_layer::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{Chosen, DeviceName, choose},
    testing::{
        case::{Case, FULL},
        compare::Comparison,
        devices::serves,
        run::Operator,
    },
};
use burn::tensor::{DType, Device};
use burn_gemma4::catch_panic;
use clap::{Parser, ValueEnum};
use std::{collections::BTreeMap, process::ExitCode};

/// Check output, logsumexp and gradients of fused attention. Each number in the table is an error against the definition in
/// f64, as a relative root mean square. The number after the slash is the error of unfused attention. An exclamation mark
/// means that the error is more than twice the error of unfused attention, and that rounding does not explain the
/// difference. Such an error makes the exit code 1.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Device to run on.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Types of the tensors [default: all types that the device supports; f32 on a software driver].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    dtypes: Vec<Dtype>,
    /// Numbers of columns of queries and keys, 1 to 1024 [default: 64,256,512; 64,512 on a software driver].
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = head_size)]
    head_sizes: Vec<usize>,
    /// Attention options to check [default: all of them].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    options: Vec<Feature>,
    /// Seed of the input data.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn head_size(text: &str) -> Result<usize, String> {
    let largest = attention_cube::MAX_HEAD_DIM;
    match text.parse() {
        Ok(size) if (1..=largest).contains(&size) => Ok(size),
        _ => Err(format!("expected a whole number from 1 to {largest}")),
    }
}

/// The attention options that a row of the table checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Feature {
    /// Use no options.
    Full,
    /// Apply a causal mask: no query sees a later key.
    Causal,
    /// Apply a causal window of 20 keys.
    Window,
    /// Bound the scores by a softcap.
    Softcap,
    /// Apply a random mask for every head.
    Mask,
    /// Add a bias to every score, and check the bias's gradient.
    Bias,
    /// Use sequences of different lengths.
    KvLengths,
    /// Use sequences with different numbers of queries.
    QueryLengths,
    /// Pack documents into a sequence.
    Segments,
    /// Give every query two intervals of keys.
    Intervals,
    /// Add a sink for every head, and check the sinks' gradient.
    Sinks,
    /// Drop a quarter of the probabilities.
    Dropout,
    /// Use four query heads per key head.
    Gqa,
    /// Use values with another number of columns than queries and keys.
    ValueDim,
    /// Use Gemma 4's scale of 1, with queries and keys normalized as in Gemma 4.
    Scale,
    /// Compute a loss that depends on output and logsumexp.
    Lse,
    /// Use all options at once.
    All,
}

/// The number of queries and the number of keys per sequence. Neither number is a multiple of the tile size, so that partial
/// tiles are checked too.
const LENGTHS: [usize; 2] = [66, 70];

impl Feature {
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn case(self, head_dim: usize, dtype: DType) -> Case {
        let [q_len, kv_len] = LENGTHS;
        let other_dim = match head_dim {
            1..=8 => head_dim + 8,
            _ => head_dim / 2,
        };
        // Returns the segment ids of two sequences. The documents are so long that some causal windows of 20 keys lie
        // within one document, and others span two.
        let documents = |length: usize| {
            let of_one = |ends: [usize; 2]| {
                (0..length)
                    .map(move |token| ends.iter().filter(|end| token >= **end).count() as i64)
            };
            of_one([10, 45]).chain(of_one([64, 65])).collect()
        };
        // Returns the first visible keys and the ends (one past the last visible key) for all queries of two sequences. Query
        // `i` of a sequence sees the keys from `first + i / 4` to `first + i + 19`.
        let intervals = |q_len: usize, first: usize| {
            let queries = (0..2 * q_len).map(|query| query % q_len);
            queries
                .map(|query| ((first + query / 4) as i64, (first + query + 20) as i64))
                .unzip()
        };
        let causal = Some(CausalAlignment::BottomRight);
        let plain = Case {
            dtype,
            lse_gradient: false,
            ..Case::new([2, 2, 2, q_len, kv_len, head_dim, head_dim])
        };
        match self {
            Self::Full => plain,
            Self::Causal => Case { causal, ..plain },
            Self::Window => Case {
                causal,
                window: (Some(19), Some(0)),
                ..plain
            },
            Self::Softcap => Case {
                softcap: Some(2.0),
                ..plain
            },
            Self::Mask => Case {
                mask: Some(FULL),
                ..plain
            },
            Self::Bias => Case {
                bias: Some(FULL),
                ..plain
            },
            Self::KvLengths => Case {
                kv_lengths: Some(vec![kv_len as i64, 23]),
                ..plain
            },
            Self::QueryLengths => Case {
                causal,
                query_lengths: Some(vec![q_len as i64, 13]),
                ..plain
            },
            Self::Segments => Case {
                segments: Some((documents(q_len), documents(kv_len))),
                ..plain
            },
            Self::Intervals => Case {
                intervals: vec![intervals(q_len, 0), intervals(q_len, kv_len / 2)],
                ..plain
            },
            Self::Sinks => Case {
                sinks: true,
                ..plain
            },
            Self::Dropout => Case {
                dropout: Some((0.25, 3)),
                ..plain
            },
            Self::Gqa => Case {
                q_heads: 8,
                ..plain
            },
            Self::ValueDim => Case {
                value_dim: other_dim,
                ..plain
            },
            Self::Scale => Case {
                scale: Some(1.0),
                amplitude: (head_dim as f64).powf(-0.25),
                ..plain
            },
            Self::Lse => Case {
                lse_gradient: true,
                ..plain
            },
            Self::All => Case {
                q_heads: 8,
                value_dim: other_dim,
                scale: Some(0.7 / (head_dim as f64).sqrt()),
                softcap: Some(4.0),
                causal,
                window: (Some(39), Some(0)),
                mask: Some([true, false, true, true]),
                bias: Some([false, true, true, true]),
                kv_lengths: Some(vec![kv_len as i64, 51]),
                query_lengths: Some(vec![q_len as i64 - 3, q_len as i64]),
                segments: Some((documents(q_len), documents(kv_len))),
                intervals: vec![intervals(q_len, 0)],
                sinks: true,
                dropout: Some((0.1, 5)),
                lse_gradient: true,
                ..plain
            },
        }
    }
}

/// The columns of the table. In each pair, the first text is the name of a result, as in `Comparison::name`. The second
/// text is the title of the result's column.
const RESULTS: [(&str, &str); 7] = [
    ("output", "output"),
    ("logsumexp", "logsumexp"),
    ("query gradient", "dq"),
    ("key gradient", "dk"),
    ("value gradient", "dv"),
    ("bias gradient", "dbias"),
    ("sinks gradient", "dsinks"),
];

fn main() -> ExitCode {
    leave_out_device_selection();
    let cli = Cli::parse();
    let outcome = choose(cli.device).and_then(|chosen| {
        catch_panic(|| run(&cli, &chosen)).unwrap_or_else(|panic| Err(panic.into()))
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Checks all cases, and prints one row of the table per case. Returns true if every row is within its tolerance.
fn run(cli: &Cli, chosen: &Chosen) -> Result<bool, Error> {
    let features = match cli.options.is_empty() {
        true => Feature::value_variants(),
        false => &cli.options,
    };
    // A software driver takes seconds to compile a kernel, so fewer cases are checked by default.
    let compiles_slowly = chosen.software && chosen.name != DeviceName::Flex;
    let asked = match cli.dtypes.is_empty() && compiles_slowly {
        true => &[Dtype::F32],
        false => cli.dtypes.as_slice(),
    };
    let dtypes = dtypes(asked, &chosen.device)?;
    let head_sizes: &[usize] = match (cli.head_sizes.as_slice(), compiles_slowly) {
        ([], true) => &[64, 512],
        ([], false) => &[64, 256, 512],
        (asked, _) => asked,
    };
    println!("{chosen}");
    print!(
        "{:>4} {:10} {:5} {:15}",
        "size", "options", "dtype", "kernels"
    );
    for (_, title) in RESULTS {
        print!(" {title:>16}");
    }
    println!();

    let mut refusals = Refusals::default();
    let (mut rows, mut wrong) = (0, Vec::new());
    for dtype in dtypes {
        for head_dim in head_sizes {
            for feature in features {
                let case = feature.case(*head_dim, dtype.burn());
                let name = feature.name();
                print!("{head_dim:4} {name:10} {dtype:5} ");
                let checked = catch_panic(|| check(&case, cli.seed, &chosen.device, &mut refusals))
                    .unwrap_or_else(|panic| Err(panic.into()));
                let faults = match checked {
                    Ok(comparisons) => print_row(&comparisons),
                    Err(error) => {
                        println!("failed");
                        vec![error.to_string()]
                    }
                };
                rows += 1;
                let row = format!("{head_dim} {name} {dtype}");
                wrong.extend(faults.into_iter().map(|fault| format!("{row}: {fault}")));
            }
        }
    }
    print!("{refusals}");
    if wrong.is_empty() {
        println!("{rows} rows, all within tolerance");
    }
    for fault in &wrong {
        eprintln!("error: {fault}");
    }
    Ok(wrong.is_empty())
}

/// Returns the requested dtypes, or all dtypes that the device supports if none is requested.
fn dtypes(asked: &[Dtype], device: &Device) -> Result<Vec<Dtype>, Error> {
    let computes =
        |dtype: &Dtype| device.supports_dtype(dtype.burn()) && serves(device, dtype.burn());
    if let Some(dtype) = asked.iter().find(|dtype| !computes(dtype)) {
        return Err(format!("this device does not compute in {dtype}").into());
    }
    Ok(match asked.is_empty() {
        true => Dtype::value_variants()
            .iter()
            .copied()
            .filter(computes)
            .collect(),
        false => asked.to_vec(),
    })
}

/// Runs a case with fused and with unfused attention on `device`, and compares both results with the definition in f64.
fn check(
    case: &Case,
    seed: u64,
    device: &Device,
    refusals: &mut Refusals,
) -> Result<Vec<Comparison>, Error> {
    let inputs = case.seeded(seed);
    let explanation = explain(&case.problem(&inputs, device)?, device);
    let engine = |selection: &Selection| selection.kernel.engine().to_string();
    let (forward, backward) = (engine(&explanation.forward), engine(&explanation.backward));
    let kernels = match forward == backward {
        true => forward,
        false => format!("{forward}, {backward}"),
    };
    print!("{kernels:15}");
    refusals.count("forward", &explanation.forward);
    refusals.count("backward", &explanation.backward);

    let fused = case.run(&inputs, device, case.dtype, Operator::Fused);
    let unfused = case.run(&inputs, device, case.dtype, Operator::Reference);
    let exact = case.run(&inputs, &Device::flex(), DType::F64, Operator::Reference);
    Ok(fused
        .iter()
        .zip(&exact)
        .zip(&unfused)
        .map(|((fused, exact), unfused)| Comparison::new(fused, exact, unfused, case.precision()))
        .collect())
}

/// Prints the errors in a row of the table, and returns the comparisons that are out of tolerance.
fn print_row(comparisons: &[Comparison]) -> Vec<String> {
    for (name, _) in RESULTS {
        match comparisons.iter().find(|found| found.name == name) {
            Some(found) => {
                let size = found.size.max(f64::MIN_POSITIVE);
                let (error, unfused) = (found.error.mean / size, found.baseline.mean / size);
                let mark = if found.is_close() { " " } else { "!" };
                print!(" {:>16}", format!("{error:.1e} / {unfused:.1e}{mark}"));
            }
            None => print!(" {:>16}", "- "),
        }
    }
    println!();
    let wrong = comparisons.iter().filter(|found| !found.is_close());
    wrong.map(ToString::to_string).collect()
}

/// The reasons why faster kernels were not used. Each reason comes with the number of table rows to which it applies.
#[derive(Default)]
struct Refusals(BTreeMap<String, usize>);

impl Refusals {
    fn count(&mut self, pass: &str, selection: &Selection) {
        for (engine, reason) in &selection.refusals {
            let engine = format!("{engine:?}").to_lowercase();
            *self
                .0
                .entry(format!("{engine} refused the {pass}: {reason}"))
                .or_default() += 1;
        }
    }
}

impl std::fmt::Display for Refusals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (refusal, rows) in &self.0 {
            writeln!(f, "{rows} rows: {refusal}")?;
        }
        Ok(())
    }
}
