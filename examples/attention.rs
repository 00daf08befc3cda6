//! Runs fused attention on the best device of this machine, checks its results, and measures its time.
//!
//! ```text
//! cargo run --release --example attention
//! cargo run --release --example attention -- --device wgpu --head-dim 256 --window 64
//! ```

use attention_cube::{explain, try_fused_attention};
use attention_workspace::mesa_layer::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    accuracy::{Errors, Oracle},
    device::{Chosen, DeviceName, choose},
    timing::{Effort, Timer},
    workload::{Inputs, Workload, backward_operations, forward_operations},
};
use burn::tensor::Tensor;
use burn_gemma4::catch_panic;
use clap::{ArgAction, Parser};
use std::process::ExitCode;

/// Run fused attention, check it against its definition in f64, and measure its time. The default sizes are the sizes of a
/// global layer of Gemma 4: eight query heads of 512 columns, which share one key head.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Device to run on.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Number of sequences.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Number of query heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Number of key and value heads. It must divide the number of query heads.
    #[arg(long, default_value_t = 1)]
    kv_heads: usize,
    /// Queries per sequence [default: 1024 on a GPU, 256 on a CPU].
    #[arg(long)]
    q_len: Option<usize>,
    /// Keys per sequence [default: as many as queries].
    #[arg(long)]
    kv_len: Option<usize>,
    /// Number of columns of queries, keys and values, 1 to 1024.
    #[arg(long, default_value_t = 512)]
    head_dim: usize,
    /// Type of the tensors [default: bf16 or f16 on a GPU that supports it, otherwise f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Scale of the scores q·k.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Apply a causal mask: no query sees a later key.
    #[arg(long, default_value_t = true, default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set)]
    causal: bool,
    /// Number of keys that a query sees, including its own key.
    #[arg(long)]
    window: Option<usize>,
    /// Also compute the gradients.
    #[arg(long, default_value_t = true, default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set)]
    backward: bool,
}

fn main() -> ExitCode {
    leave_out_device_selection();
    let cli = Cli::parse();
    let outcome = choose(cli.device).and_then(|chosen| {
        catch_panic(|| run(&cli, &chosen)).unwrap_or_else(|panic| Err(panic.into()))
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!(
                "error: the errors of the results are larger than the rounding of their dtype"
            );
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns true if every result is within its tolerance.
fn run(cli: &Cli, chosen: &Chosen) -> Result<bool, Error> {
    let q_len = cli
        .q_len
        .unwrap_or(if chosen.software { 256 } else { 1024 });
    let workload = Workload {
        batch: cli.batch,
        q_heads: cli.heads,
        kv_heads: cli.kv_heads,
        q_len,
        kv_len: cli.kv_len.unwrap_or(q_len),
        head_dim: cli.head_dim,
        dtype: chosen.dtype(cli.dtype)?,
        causal: cli.causal,
        window: cli.window,
        scale: Some(cli.scale),
        softcap: None,
        mask: false,
        bias: false,
        codes: None,
        kv_length: None,
    };
    println!("{chosen}");
    println!(
        "{workload} {}{}",
        workload.dtype,
        if cli.causal { " causal" } else { "" }
    );

    let inputs = workload.inputs(&chosen.device)?;
    let problem = workload.problem(&inputs)?;
    print!("{}", explain(&problem, &chosen.device));

    let oracle = Oracle::new(&workload, &inputs)?;
    let timer = Timer::new(&chosen.device, chosen.software);
    let effort = match chosen.software {
        true => Effort {
            launches: 5,
            sustained: 0,
            seconds: 2.0,
        },
        false => Effort {
            launches: 20,
            sustained: 0,
            seconds: 5.0,
        },
    };

    let output = attention(&workload, &inputs)?;
    let errors = oracle
        .as_ref()
        .map(|oracle| oracle.output(&output))
        .transpose()?;
    let launch = || attention(&workload, &inputs);
    let singles = timer.singles(effort, || (), |()| launch().map(drop).is_ok())?;
    let mut good = report(
        "forward",
        singles.median,
        forward_operations(&problem),
        errors,
    );

    if cli.backward {
        let errors = match &oracle {
            Some(oracle) => {
                let mask = oracle.gradient_mask(&inputs.gradient);
                let loss = Loss::new(&workload, &inputs, inputs.gradient.clone() * mask)?;
                Some(oracle.gradients(&loss.gradients()?)?)
            }
            None => None,
        };
        let prepare = || Loss::new(&workload, &inputs, inputs.gradient.clone());
        let singles = timer.singles(effort, prepare, |loss| {
            loss.and_then(|loss| loss.gradients()).map(drop).is_ok()
        })?;
        good &= report(
            "backward",
            singles.median,
            backward_operations(&problem),
            errors,
        );
    }
    println!("times by {}", timer.clock());
    Ok(good)
}

fn attention(workload: &Workload, inputs: &Inputs) -> Result<Tensor<4>, Error> {
    let Inputs {
        query, key, value, ..
    } = inputs.clone();
    Ok(try_fused_attention(
        query,
        key,
        value,
        workload.options(inputs),
    )?)
}

/// Prints the result line of a pass (forward or backward). Returns true if the errors of the pass are within their tolerance.
fn report(pass: &str, seconds: f64, operations: f64, errors: Option<Errors>) -> bool {
    let rate = operations / seconds / 1e9;
    print!("{pass:8} {:10.3} ms {rate:10.1} GFLOP/s   ", seconds * 1e3);
    match errors {
        Some(errors) => {
            let verdict = if errors.is_good() { "right" } else { "WRONG" };
            println!(
                "{verdict}: error {:.1e} against f64, and {:.1e} for the definition in this dtype",
                errors.error, errors.same_dtype
            );
            errors.is_good()
        }
        None => {
            println!("not checked: the check needs the feature `flex`");
            true
        }
    }
}

/// The results of a training step's forward pass.
struct Loss {
    inputs: [Tensor<4>; 3],
    /// The loss per element, `[batch, heads, queries, columns]`. Burn's `backward` differentiates the sum of all elements.
    loss: Tensor<4>,
}

impl Loss {
    fn new(workload: &Workload, inputs: &Inputs, gradient: Tensor<4>) -> Result<Self, Error> {
        let tracked = |tensor: &Tensor<4>| tensor.clone().autodiff().require_grad();
        let [query, key, value] = [&inputs.query, &inputs.key, &inputs.value].map(tracked);
        let output = try_fused_attention(
            query.clone(),
            key.clone(),
            value.clone(),
            workload.options(inputs),
        )?;
        Ok(Self {
            inputs: [query, key, value],
            loss: output * gradient.autodiff(),
        })
    }

    fn gradients(self) -> Result<[Tensor<4>; 3], Error> {
        let mut gradients = self.loss.backward();
        let mut take = |tensor: &Tensor<4>| {
            tensor
                .grad_remove(&mut gradients)
                .ok_or("an input got no gradient")
        };
        let [query, key, value] = &self.inputs;
        Ok([take(query)?, take(key)?, take(value)?])
    }
}
