//! The report of the benchmark, as a table and as JSON.

use crate::{
    cases::Scale,
    cliffs::{Cliff, Compared},
    peers::Peer,
};
use attention_workspace::{Dtype, accuracy::Errors, timing::Effort, workload::Workload};
use serde::Serialize;

#[derive(Serialize)]
pub struct Report {
    /// The date and time of the run in UTC.
    pub date: String,
    pub device: String,
    /// The names of the CubeCL runtime and of the runtime's compiler, or `None` if the device has no CubeCL runtime.
    pub runtime: Option<String>,
    pub dtype: Dtype,
    pub scale: Scale,
    pub effort: Effort,
    /// The clock that times single launches.
    pub clock: String,
    pub ceilings: Ceilings,
    pub rows: Vec<Row>,
    pub cliffs: Vec<CliffRow>,
}

/// The device's peak rates, measured in the same run.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Ceilings {
    /// The FLOP/s of a large GEMM in the benchmark's dtype.
    pub flops: Option<f64>,
    /// The number of bytes that an elementwise operation over a large tensor reads and writes per second.
    pub bytes: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    Forward,
    Backward,
}

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

#[derive(Serialize)]
pub struct Row {
    pub case: &'static str,
    pub workload: Workload,
    pub pass: Pass,
    pub peer: Peer,
    /// The name of the engine that computes the pass, or of the peer (another implementation of attention).
    pub kernel: String,
    /// The engine's plan with its tile sizes, or `None` for a peer.
    pub plan: Option<String>,
    /// One entry for each engine with a higher priority than the chosen engine: the engine, and the reason why it
    /// refused the case.
    pub refusals: Vec<String>,
    pub note: Option<String>,
    pub outcome: Outcome,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Measured(Measured),
    Skipped(String),
    Failed(String),
}

#[derive(Serialize)]
pub struct Measured {
    pub milliseconds: f64,
    pub launches: usize,
    /// The time per launch when launches follow each other without a pause. `None` if noise makes this time
    /// unmeasurable.
    pub sustained_milliseconds: Option<f64>,
    /// The rate in bytes per second for decoding, and in FLOP/s otherwise.
    pub rate: f64,
    pub sustained_rate: Option<f64>,
    pub unit: Unit,
    pub percent_of_ceiling: Option<f64>,
    pub errors: Option<Errors>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "FLOP/s")]
    Flops,
    #[serde(rename = "B/s")]
    Bytes,
}

impl Unit {
    /// Formats a rate with about three significant digits.
    pub fn show(self, rate: f64) -> String {
        let (scaled, unit) = match self {
            Self::Flops if rate >= 1e12 => (rate / 1e12, "TFLOP/s"),
            Self::Flops => (rate / 1e9, "GFLOP/s"),
            Self::Bytes => (rate / 1e9, "GB/s"),
        };
        let decimals = if scaled < 100.0 { 1 } else { 0 };
        format!("{scaled:.decimals$} {unit}")
    }
}

pub fn print_header() {
    println!(
        "{:<19} {:<23} {:<8} {:<9} {:>10} {:>14} {:>14} {:>7} {:>9} {:>10}",
        "case",
        "shape",
        "pass",
        "kernel",
        "ms",
        "rate",
        "sustained",
        "ceiling",
        "error",
        "same dtype"
    );
}

impl Row {
    pub fn print(&self) {
        let pass = self.pass.name();
        let shape = self.workload.to_string();
        print!(
            "{:<19} {shape:<23} {pass:<8} {:<9} ",
            self.case, self.kernel
        );
        match &self.outcome {
            Outcome::Measured(measured) => {
                let percent = measured
                    .percent_of_ceiling
                    .map_or_else(|| "–".into(), |percent| format!("{percent:.1} %"));
                let [error, same_dtype] = match measured.errors {
                    Some(errors) => [errors.error, errors.same_dtype].map(|e| format!("{e:.1e}")),
                    None => ["–".into(), "–".into()],
                };
                print!(
                    "{:>10.3} {:>14} {:>14} {percent:>7} {error:>9} {same_dtype:>10}",
                    measured.milliseconds,
                    measured.unit.show(measured.rate),
                    measured
                        .sustained_rate
                        .map_or_else(|| "–".into(), |rate| measured.unit.show(rate)),
                );
                if self.peer == Peer::Ours && measured.errors.is_some_and(|e| !e.is_good()) {
                    print!("  WRONG");
                }
                if let Some(note) = &self.note {
                    print!("  ({note})");
                }
                println!();
            }
            Outcome::Skipped(reason) => println!("skipped: {reason}"),
            Outcome::Failed(reason) => println!("FAILED: {reason}"),
        }
    }
}

/// The times of a performance cliff (see the module `cliffs`) and of its counterpart.
#[derive(Serialize)]
pub struct CliffRow {
    pub case: &'static str,
    pub pass: Pass,
    /// The maximum ratio of the cliff's time to the counterpart's time.
    pub limit: f64,
    /// The times of the cliff and of its counterpart, or the reason why they were not measured.
    pub compared: Result<Compared, String>,
}

pub fn print_cliff_header() {
    println!(
        "{:<24} {:<8} {:>10} {:>14} {:>7} {:>7}",
        "case", "pass", "ms", "counterpart ms", "ratio", "limit"
    );
}

impl CliffRow {
    pub fn new(cliff: &Cliff, compared: Result<Compared, String>) -> Self {
        Self {
            case: cliff.name,
            pass: cliff.pass,
            limit: cliff.limit,
            compared,
        }
    }

    pub fn is_good(&self) -> bool {
        self.compared
            .as_ref()
            .is_ok_and(|compared| compared.ratio() <= self.limit)
    }

    pub fn print(&self) {
        print!("{:<24} {:<8} ", self.case, self.pass.name());
        match &self.compared {
            Ok(compared) => println!(
                "{:>10.3} {:>14.3} {:>7.2} {:>7.2}{}",
                compared.case,
                compared.counterpart,
                compared.ratio(),
                self.limit,
                if self.is_good() { "" } else { "  TOO SLOW" }
            ),
            Err(reason) => println!("FAILED: {reason}"),
        }
    }
}
