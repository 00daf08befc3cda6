//! The gradients of fused attention, checked against its definition in f64, over head sizes, options and dtypes.
//!
//! ```text
//! cargo run --release --example gradcheck
//! cargo run --release --example gradcheck -- --device wgpu --head-sizes 256,512 --options causal,segments
//! ```

use attention_cube::{CausalAlignment, explain, select::Selection};
use attention_workspace::layers::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{Chosen, DeviceName, choose},
    guarded,
    testing::{
        case::{Case, FULL},
        compare::Comparison,
        devices::serves,
        run::Operator,
    },
};
use burn::tensor::{DType, Device};
use clap::{Parser, ValueEnum};
use std::{collections::BTreeMap, process::ExitCode};

/// Checks output, logsumexp and gradients of fused attention. Each number of the table is the error against the definition
/// in f64, relative and in root mean square; after the slash is that of the same mathematics done unfused, in the same dtype
/// on the same device. Ends with 1 where an error is more than twice that and rounding does not explain it: such a number
/// has an exclamation mark.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Of the tensors [default: all that the device computes in; f32 on a software driver].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    dtypes: Vec<Dtype>,
    /// Columns of queries and keys, 1 to 1024 [default: 64,256,512; 64,512 on a software driver].
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = head_size)]
    head_sizes: Vec<usize>,
    /// What is asked of attention [default: each of them].
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    options: Vec<Feature>,
    /// Draws other data.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn head_size(text: &str) -> Result<usize, String> {
    let largest = attention_cube::MAX_HEAD_DIM;
    match text.parse() {
        Ok(size) if (1..=largest).contains(&size) => Ok(size),
        _ => Err(format!("it has to be a whole number from 1 to {largest}")),
    }
}

/// What a row asks of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Feature {
    /// Nothing.
    Full,
    /// No query sees a later key.
    Causal,
    /// A causal window of 20 keys.
    Window,
    /// Bounded scores.
    Softcap,
    /// A random mask for every head.
    Mask,
    /// A bias for every score, with its gradient.
    Bias,
    /// Sequences of different lengths.
    KvLengths,
    /// Packed documents.
    Segments,
    /// A sink for every head, with its gradient.
    Sinks,
    /// Four query heads over each key head.
    Gqa,
    /// Values of another size than queries and keys.
    ValueDim,
    /// Gemma 4's scale of 1, over queries and keys as its norms leave them.
    Scale,
    /// A loss of output and logsumexp.
    Lse,
    /// All of it at once.
    All,
}

/// Queries and keys of a row's sequences: more than a tile, and no multiple of one.
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
        // What a causal window of 20 sees of these lies in one document or in two.
        let documents = |length: usize| {
            let of_one = |ends: [usize; 2]| {
                (0..length)
                    .map(move |token| ends.iter().filter(|end| token >= **end).count() as i64)
            };
            of_one([10, 45]).chain(of_one([64, 65])).collect()
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
            Self::Segments => Case {
                segments: Some((documents(q_len), documents(kv_len))),
                ..plain
            },
            Self::Sinks => Case {
                sinks: true,
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
                segments: Some((documents(q_len), documents(kv_len))),
                sinks: true,
                lse_gradient: true,
                ..plain
            },
        }
    }
}

/// The results of a run and the table's names for them.
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
        guarded(|| run(&cli, &chosen)).unwrap_or_else(|panic| Err(panic.into()))
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

/// Whether every row is right.
fn run(cli: &Cli, chosen: &Chosen) -> Result<bool, Error> {
    let features = match cli.options.is_empty() {
        true => Feature::value_variants(),
        false => &cli.options,
    };
    // There, compiling a kernel takes seconds, and every row has others.
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
                let checked = guarded(|| check(&case, cli.seed, &chosen.device, &mut refusals))
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
        println!("{rows} rows, all right");
    }
    for fault in &wrong {
        eprintln!("error: {fault}");
    }
    Ok(wrong.is_empty())
}

/// The dtypes asked for, or all that the device computes in.
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

/// Runs a case fused and unfused on `device`, and compares both with the definition in f64.
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

/// Prints the rest of a row; what is wrong in it.
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

/// Why faster kernels did not serve, and how often.
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
