//! Runs the benchmark's cases and collects the results in a report. Each case also runs with the peers, which are other
//! implementations of attention.

use crate::cases::{Case, Scale};
use crate::ceilings::ceilings;
use crate::cliffs::Cliff;
use crate::measure::Entry;
use crate::peers::{Peer, Prepared};
use crate::report::{Ceilings, CliffRow, Outcome, Pass, Report, Row, Unit};
use crate::{Cli, restriction};
use attention_cube::{Explanation, explain};
use attention_workspace::{
    Error,
    accuracy::Oracle,
    device::{Chosen, DeviceName},
    report::{now, save},
    timing::{Effort, Timer},
};
use burn_gemma4::catch_panic;

/// A run of the benchmark, with the results that it has collected so far.
pub struct Bench<'a> {
    cli: &'a Cli,
    chosen: Chosen,
    pub timer: Timer,
    pub report: Report,
    only_ours: bool,
    peer_bytes: f64,
    /// True if every run of this project's attention was measured and gave accurate results.
    pub good: bool,
}

impl<'a> Bench<'a> {
    pub fn new(cli: &'a Cli, chosen: Chosen) -> Result<Self, Error> {
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
        let restriction = restriction();
        println!("{chosen}, {dtype}{restriction}, times by {}", timer.clock());

        let ceilings = match cli.quick || !runs_burns_products(&chosen) {
            true => Ceilings::default(),
            false => catch_panic(|| ceilings(&chosen, dtype, &timer, effort))??,
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
            device: format!("{chosen}{restriction}"),
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

    pub fn case(&mut self, case: &'static Case) -> Result<(), Error> {
        let workload = case.workload(self.report.scale, self.report.dtype);
        let device = self.chosen.device.clone();
        let made = catch_panic(|| -> Result<_, Error> {
            let inputs = workload.inputs(&device)?;
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
            // A case with quantized keys or with `kv_length` (a limit on the number of valid keys) runs without peers. No other
            // implementation supports quantized keys, and Burn's attention does not support `kv_length`.
            let only_ours =
                self.only_ours || workload.codes.is_some() || workload.kv_length.is_some();
            if only_ours && peer != Peer::Ours {
                continue;
            }
            for pass in [Pass::Forward, Pass::Backward] {
                // The backward of a decode case is skipped, because no training step has only a single query.
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
                // The cleanup frees the memory of this peer before the next peer runs.
                device.memory_cleanup();
            }
        }
        Ok(())
    }

    pub fn cliff(&mut self, cliff: &'static Cliff) -> Result<(), Error> {
        let report = &self.report;
        let device = &self.chosen.device;
        let measured =
            catch_panic(|| cliff.measure(device, report.dtype, &self.timer, report.effort));
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
        let memory = Prepared::memory(entry.workload, entry.pass == Pass::Backward);
        let mut note = None;
        let outcome = if !ours && memory > self.peer_bytes {
            Outcome::Skipped(format!("needs {:.0} GB", memory / 1e9))
        } else if !ours && !runs_burns_products(&self.chosen) {
            Outcome::Skipped("Burn's matrix product crashes this software driver".into())
        } else {
            match catch_panic(|| self.measure(entry)) {
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

/// Returns true if Burn's GEMM runs on the device. Mesa's lavapipe (Vulkan) crashes when it compiles that GEMM from SPIR-V.
fn runs_burns_products(chosen: &Chosen) -> bool {
    !(chosen.software && chosen.name == DeviceName::Vulkan)
}
