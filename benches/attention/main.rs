//! Times of attention, beside Burn's own and beside plain operators: `cargo bench --bench attention`.
//!
//! Forward: `2 · visible pairs · (head_dim + value_dim)` operations; backward 2.5 times as many;
//! decoding: bytes of keys and values. The backward is timed alone, under the loss `Σ output · g`,
//! less the time of that loss on a leaf. The sustained backward is what a step of forward and backward
//! takes back to back, less the forward and that loss.
//!
//! `cliffs`: what once cost many times its counterpart, beside it.

mod cases;
mod cliffs;
mod peers;
mod report;

use attention_cube::{AttentionProblem, Explanation, engine::Kernel, explain};
use attention_workspace::layers::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    accuracy::{Errors, Oracle, Triple},
    device::{Chosen, DeviceName, choose},
    guarded,
    report::{now, save},
    timing::{Effort, Timer},
    workload::{Inputs, Workload, backward_operations, forward_operations},
};
use burn::{
    module::Param,
    tensor::{Device, Distribution, Tensor},
};
use burn_gemma4::layer::Linear;
use cases::{CASES, Case, Scale};
use clap::Parser;
use cliffs::{CLIFFS, Cliff};
use peers::{Peer, Prepared};
use report::{
    Ceilings, CliffRow, Measured, Outcome, Pass, Report, Row, Unit, print_cliff_header,
    print_header,
};
use std::{path::PathBuf, process::ExitCode};

/// Times attention, and checks it on the way.
#[derive(Parser)]
struct Cli {
    /// Cases whose name contains one of these; all without.
    filters: Vec<String>,
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Of the tensors [default: bf16 or f16 on a GPU that has it, else f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// What to time.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["forward", "backward"])]
    passes: Vec<Pass>,
    /// How large the cases are [default: full on a GPU, small on a processor].
    #[arg(long, value_enum)]
    scale: Option<Scale>,
    /// Fewer launches, and no ceilings.
    #[arg(long)]
    quick: bool,
    /// Single launches to take the median of [default: 20, quick: 5].
    #[arg(long)]
    launches: Option<usize>,
    /// Launches back to back to take the mean of [default: 150, quick: 10].
    #[arg(long)]
    sustained: Option<usize>,
    /// Leave out Burn's own attention and plain operators [default: on a software driver, where Burn
    /// takes minutes to tune them].
    #[arg(long, default_missing_value = "true", num_args = 0..=1)]
    only_ours: Option<bool>,
    /// GB that the scores of one of those may take [default: 40 on a GPU, 4 on a processor].
    #[arg(long)]
    peer_memory: Option<f64>,
    /// Print which kernel serves each case, and why faster ones refuse.
    #[arg(long)]
    explain: bool,
    /// List the cases.
    #[arg(long)]
    list: bool,
    /// Write all rows to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    leave_out_device_selection();
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every row of ours is measured and right.
fn run(cli: &Cli) -> Result<bool, Error> {
    let is_chosen = |name: &str| {
        cli.filters.is_empty() || cli.filters.iter().any(|filter| name.contains(filter))
    };
    let chosen: Vec<&Case> = CASES.iter().filter(|case| is_chosen(case.name)).collect();
    let cliffs: Vec<&Cliff> = CLIFFS
        .iter()
        .filter(|cliff| is_chosen(cliff.name) && cli.passes.contains(&cliff.pass))
        .collect();
    if chosen.is_empty() && cliffs.is_empty() {
        return Err("no case has such a name: --list names them all".into());
    }
    if cli.list {
        let cliffs = cliffs.iter().map(|cliff| cliff.name);
        let mut names: Vec<&str> = chosen.iter().map(|case| case.name).chain(cliffs).collect();
        names.dedup();
        names.iter().for_each(|name| println!("{name}"));
        return Ok(true);
    }
    let mut bench = Bench::new(cli, choose(cli.device)?)?;
    if !chosen.is_empty() {
        print_header();
    }
    for case in chosen {
        bench.case(case)?;
    }
    // They are sized for a GPU.
    if !cliffs.is_empty() && bench.report.scale == Scale::Full {
        print_cliff_header();
        for cliff in cliffs {
            bench.cliff(cliff)?;
        }
    }
    Ok(bench.good)
}

struct Bench<'a> {
    cli: &'a Cli,
    chosen: Chosen,
    timer: Timer,
    report: Report,
    only_ours: bool,
    peer_bytes: f64,
    good: bool,
}

impl<'a> Bench<'a> {
    fn new(cli: &'a Cli, chosen: Chosen) -> Result<Self, Error> {
        let software = chosen.software;
        let dtype = chosen.dtype(cli.dtype)?;
        let effort = Effort {
            launches: cli.launches.unwrap_or(if cli.quick { 5 } else { 20 }),
            sustained: cli.sustained.unwrap_or(if cli.quick { 10 } else { 150 }),
            seconds: match (software, cli.quick) {
                (true, true) => 0.5,
                (true, false) => 2.0,
                (false, _) => 20.0,
            },
        };
        let scale = cli
            .scale
            .unwrap_or(if software { Scale::Small } else { Scale::Full });
        let timer = Timer::new(&chosen.device, software);
        println!("{chosen}, {dtype}, times by {}", timer.clock());

        let ceilings = match cli.quick || !runs_burns_products(&chosen) {
            true => Ceilings::default(),
            false => guarded(|| ceilings(&chosen, dtype, &timer, effort))??,
        };
        let show =
            |unit: Unit, rate: Option<f64>| rate.map_or("–".into(), |rate| unit.show(rate));
        println!(
            "ceilings: matrix product {}, elementwise {}\n",
            show(Unit::Flops, ceilings.flops),
            show(Unit::Bytes, ceilings.bytes),
        );
        let report = Report {
            date: now(),
            device: chosen.to_string(),
            runtime: None,
            dtype,
            scale,
            effort,
            clock: timer.clock().into(),
            ceilings,
            rows: Vec::new(),
            cliffs: Vec::new(),
        };
        let peer_bytes = 1e9 * cli.peer_memory.unwrap_or(if software { 4.0 } else { 40.0 });
        let only_ours = cli
            .only_ours
            .unwrap_or(software && chosen.name != DeviceName::Flex);
        Ok(Self {
            cli,
            chosen,
            timer,
            report,
            only_ours,
            peer_bytes,
            good: true,
        })
    }

    fn case(&mut self, case: &'static Case) -> Result<(), Error> {
        let workload = case.workload(self.report.scale, self.report.dtype);
        let device = self.chosen.device.clone();
        let made = guarded(|| -> Result<_, Error> {
            let inputs = workload.inputs(&device);
            let problem = workload.problem(&inputs)?;
            let explanation = explain(&problem, &device);
            let oracle = Oracle::new(&workload, &inputs)?;
            Ok((inputs, problem, explanation, oracle))
        });
        let (inputs, problem, explanation, oracle) = match made {
            Ok(made) => made?,
            Err(panic) => return Err(format!("{}: {panic}", case.name).into()),
        };
        if self.cli.explain {
            print!("{explanation}");
        }
        self.report.runtime = explanation
            .device
            .as_ref()
            .map(|device| device.name.clone());

        for peer in Peer::ALL {
            if self.only_ours && peer != Peer::Ours {
                continue;
            }
            for pass in [Pass::Forward, Pass::Backward] {
                // Nobody trains on one query.
                let pointless = pass == Pass::Backward && workload.is_decode();
                if pointless || !self.cli.passes.contains(&pass) {
                    continue;
                }
                let entry = Entry {
                    workload: &workload,
                    inputs: &inputs,
                    problem: &problem,
                    oracle: oracle.as_ref(),
                    peer,
                    pass,
                };
                let row = self.row(case, &explanation, &entry);
                row.print();
                if peer == Peer::Ours {
                    self.good &= row.is_good();
                }
                self.report.rows.push(row);
                if let Some(path) = &self.cli.json {
                    save(&self.report, path)?;
                }
                // The next peer should find the memory that this one took.
                device.memory_cleanup();
            }
        }
        Ok(())
    }

    fn cliff(&mut self, cliff: &'static Cliff) -> Result<(), Error> {
        let report = &self.report;
        let device = &self.chosen.device;
        let measured = guarded(|| cliff.measure(device, report.dtype, &self.timer, report.effort));
        let row = CliffRow::new(
            cliff,
            match measured {
                Ok(measured) => measured.map_err(|error| error.to_string()),
                Err(panic) => Err(panic),
            },
        );
        row.print();
        self.good &= row.is_good();
        self.report.cliffs.push(row);
        if let Some(path) = &self.cli.json {
            save(&self.report, path)?;
        }
        self.chosen.device.memory_cleanup();
        Ok(())
    }

    fn row(&self, case: &'static Case, explanation: &Explanation, entry: &Entry) -> Row {
        let selection = match entry.pass {
            Pass::Forward => &explanation.forward,
            Pass::Backward => &explanation.backward,
        };
        let ours = entry.peer == Peer::Ours;
        let kernel = match entry.peer {
            Peer::Ours => selection.kernel.engine().to_string(),
            Peer::Burn => "burn".into(),
            Peer::Composed => "composed".into(),
        };
        let keeps_scores = !ours || selection.kernel == Kernel::Reference;
        let memory = Prepared::memory(entry.workload, entry.pass == Pass::Backward);
        let mut note = None;
        let outcome = if keeps_scores && memory > self.peer_bytes {
            Outcome::Skipped(format!("needs {:.0} GB", memory / 1e9))
        } else if !ours && !runs_burns_products(&self.chosen) {
            Outcome::Skipped("Burn's matrix product crashes this software driver".into())
        } else {
            match guarded(|| self.measure(entry)) {
                Ok(Ok((measured, about))) => {
                    note = about;
                    Outcome::Measured(measured)
                }
                Ok(Err(error)) => Outcome::Failed(error.to_string()),
                Err(panic) => Outcome::Failed(panic),
            }
        };
        Row {
            case: case.name,
            workload: entry.workload.clone(),
            pass: entry.pass,
            peer: entry.peer,
            kernel,
            plan: ours.then(|| format!("{:?}", selection.kernel)),
            refusals: match ours {
                true => selection
                    .refusals
                    .iter()
                    .map(|(e, r)| format!("{e:?}: {r}"))
                    .collect(),
                false => Vec::new(),
            },
            note,
            outcome,
        }
    }

    fn measure(&self, entry: &Entry) -> Result<(Measured, Option<String>), Error> {
        let prepared = Prepared::new(entry.peer, entry.workload, entry.inputs, entry.problem);
        let times = match entry.pass {
            Pass::Forward => self.forward(entry, &prepared)?,
            Pass::Backward => self.backward(entry, &prepared)?,
        };
        let (work, unit, ceiling) = match (entry.workload.is_decode(), entry.pass) {
            (true, _) => (
                entry.workload.key_value_bytes(),
                Unit::Bytes,
                self.report.ceilings.bytes,
            ),
            (false, Pass::Forward) => (
                forward_operations(entry.problem),
                Unit::Flops,
                self.report.ceilings.flops,
            ),
            (false, Pass::Backward) => (
                backward_operations(entry.problem),
                Unit::Flops,
                self.report.ceilings.flops,
            ),
        };
        let rate = work / times.single;
        let measured = Measured {
            milliseconds: times.single * 1e3,
            launches: times.launches,
            sustained_milliseconds: times.sustained.map(|seconds| seconds * 1e3),
            rate,
            sustained_rate: times.sustained.map(|seconds| work / seconds),
            unit,
            percent_of_ceiling: ceiling.map(|ceiling| 100.0 * rate / ceiling),
            errors: times.errors,
        };
        Ok((measured, prepared.note))
    }

    fn forward(&self, entry: &Entry, prepared: &Prepared) -> Result<Times, Error> {
        // First, because a launch that fails shows where its output is read, and nowhere else.
        let output = prepared.forward(prepared.plain())?;
        let errors = entry
            .oracle
            .map(|oracle| oracle.output(&output))
            .transpose()?;
        drop(output);

        let effort = self.report.effort;
        let run = |inputs| prepared.forward(inputs);
        let singles = self
            .timer
            .singles(effort, || prepared.plain(), |i| run(i).map_err(drop))?;
        let sustained = self.timer.sustained(effort, singles.median, || {
            run(prepared.plain()).map_err(drop)
        })?;
        Ok(Times {
            single: singles.median,
            launches: singles.launches,
            sustained: Some(sustained),
            errors,
        })
    }

    fn backward(&self, entry: &Entry, prepared: &Prepared) -> Result<Times, Error> {
        let gradient = &prepared.inputs.gradient;
        let errors = match entry.oracle {
            Some(oracle) => {
                let masked = gradient.clone() * oracle.gradient_mask(gradient);
                let step = Step::new(prepared, masked)?;
                Some(oracle.gradients(&prepared.folded(step.gradients()?))?)
            }
            None => None,
        };

        let effort = self.report.effort;
        let step = || Step::new(prepared, gradient.clone());
        let gradients = |step: Result<Step, Error>| step.and_then(Step::gradients).map_err(drop);
        let singles = self.timer.singles(effort, step, gradients)?;

        // The loss and its gradient, on a leaf in the output's place.
        let loss = || {
            let leaf = gradient.clone().autodiff().require_grad();
            (leaf.clone(), leaf * gradient.clone().autodiff())
        };
        let backward = |(leaf, loss): (Tensor<4>, Tensor<4>)| leaf.grad(&loss.backward());
        let loss_single = self.timer.singles(effort, loss, backward)?.median;
        let single = (singles.median - loss_single).max(0.0);

        let both = self
            .timer
            .sustained(effort, 2.0 * singles.median, || gradients(step()))?;
        let forward = self.timer.sustained(effort, singles.median, || {
            prepared.forward(prepared.tracked()).map_err(drop)
        })?;
        let loss = self
            .timer
            .sustained(effort, loss_single, || backward(loss()))?;
        let sustained = Some(both - forward - loss).filter(|difference| *difference > 0.0);
        Ok(Times {
            single,
            launches: singles.launches,
            sustained,
            errors,
        })
    }
}

/// What one row measures.
struct Entry<'a> {
    workload: &'a Workload,
    inputs: &'a Inputs,
    problem: &'a AttentionProblem,
    oracle: Option<&'a Oracle>,
    peer: Peer,
    pass: Pass,
}

struct Times {
    single: f64,
    launches: usize,
    /// `None` where noise is larger than what it is the difference of.
    sustained: Option<f64>,
    errors: Option<Errors>,
}

impl Row {
    fn is_good(&self) -> bool {
        match &self.outcome {
            Outcome::Measured(measured) => measured.errors.is_none_or(|errors| errors.is_good()),
            Outcome::Skipped(_) => true,
            Outcome::Failed(_) => false,
        }
    }
}

/// A step of training that has come as far as the loss.
struct Step {
    inputs: Triple,
    /// Burn differentiates a tensor's sum, so the loss need not be summed up.
    loss: Tensor<4>,
}

impl Step {
    fn new(prepared: &Prepared, gradient: Tensor<4>) -> Result<Self, Error> {
        let inputs = prepared.tracked();
        let output = prepared.forward(inputs.clone())?;
        Ok(Self {
            inputs,
            loss: output * gradient.autodiff(),
        })
    }

    fn gradients(self) -> Result<Triple, Error> {
        let mut gradients = self.loss.backward();
        let [query, key, value] = self.inputs.map(|input| input.grad_remove(&mut gradients));
        let missing = "an input got no gradient";
        Ok([
            query.ok_or(missing)?,
            key.ok_or(missing)?,
            value.ok_or(missing)?,
        ])
    }
}

/// Whether Burn's matrix product can be run. Mesa's lavapipe crashes the whole process where it compiles
/// it from SPIR-V.
fn runs_burns_products(chosen: &Chosen) -> bool {
    !(chosen.software && chosen.name == DeviceName::Vulkan)
}

fn ceilings(
    chosen: &Chosen,
    dtype: Dtype,
    timer: &Timer,
    effort: Effort,
) -> Result<Ceilings, Error> {
    let side = if chosen.software { 1024 } else { 8192 };
    let device: &Device = &chosen.device;
    let random = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(dtype.burn())
    };
    let left = random([side, side]);
    let layer = Linear {
        weight: Param::from_tensor(random([side, side])),
    };
    // The model's product of halves is Burn's but on Hopper, where Burn's is a tenth as fast until it is tuned. In f32 on NVIDIA
    // GPUs the model's is several, since it does not round to tf32.
    let product = timer.singles(
        effort,
        || left.clone(),
        |left| match dtype {
            Dtype::F32 => left.matmul(layer.weight.val()),
            Dtype::F16 | Dtype::Bf16 => layer.forward(left.unsqueeze()).squeeze(),
        },
    )?;
    Ok(Ceilings {
        flops: Some(2.0 * (side as f64).powi(3) / product.median),
        bytes: Some(timer.memory_rate(dtype, effort)?),
    })
}
