//! The command `gemma4 quantize`: writes a checkpoint with quantized weights.

use crate::{
    Dtype, Error,
    device::DeviceName,
    hub,
    model::{self, ModelArguments, Table, progress_bar},
    terminal::{Output, WrongArgument, exit_code, note},
};
use burn_gemma4::{LoadProgress, quantize_checkpoint};
use clap::Parser;
use gemma4_train::{
    data::documents::read_documents_or_text,
    evaluation::{Cost, CostSummary, WindowArguments, evaluate, progress},
};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Quantize a checkpoint to 8 or 4 bits.
///
/// Read a checkpoint folder, and write a GGUF file or a folder in compressed-tensors' format. Only one matrix is in memory at a
/// time.
#[derive(Parser)]
#[command(version)]
pub struct Quantize {
    /// Checkpoint to quantize: a folder in Hugging Face's layout, in f32, f16 or bf16. It is not changed.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Format of the quantized weights: blocks of 32 elements with 8 or 4 bits each, and a scale per block.
    #[arg(long, value_enum, value_name = "FORM")]
    to: Form,
    /// Path to write, which must not exist yet. If the name ends with .gguf, a GGUF file is written, in which all weights except
    /// norms and routers are quantized. For another name, a folder in compressed-tensors' format is written, in which embeddings
    /// are not quantized either.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// File on which to measure the cross entropy before and after quantization. It has the format of evaluate's data: .jsonl,
    /// .txt, .md or .rs.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    #[command(flatten)]
    windows: WindowArguments,
    /// Device that computes the cross entropy.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Compute type for the cross entropy [default: the checkpoint's].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Print one JSON object with the results at the end.
    #[arg(long)]
    json: bool,
}

/// The values of `--to`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Form {
    /// Q8_0 in GGUF, W8A16 in a folder.
    Q8,
    /// Q4_0 in GGUF, W4A16 in a folder.
    Q4,
}

/// The JSON object that `--json` prints.
#[derive(Serialize)]
struct Report {
    bytes: u64,
    whole: Vec<String>,
    left_out: Vec<String>,
    before: Option<CostSummary>,
    after: Option<CostSummary>,
}

impl Quantize {
    /// Executes the command and returns its exit code.
    pub fn execute(mut self) -> ExitCode {
        exit_code(|| {
            self.model = hub::resolve_folder("--model", &self.model)?;
            quantize(&self)
        })
    }
}

fn quantize(cli: &Quantize) -> Result<(), Error> {
    if cli.out.symlink_metadata().is_ok() {
        let reason = format!("--out: {} is there already", cli.out.display());
        return Err(WrongArgument(reason).into());
    }
    let before = cli.cost(&cli.model, cli.dtype)?;
    let dtype = before.map(|(_, dtype)| dtype);

    let bar = progress_bar()?;
    let written = quantize_checkpoint(
        &cli.model,
        &cli.out,
        match cli.to {
            Form::Q8 => model::WeightForm::Q8,
            Form::Q4 => model::WeightForm::Q4,
        }
        .into(),
        |progress: LoadProgress<'_>| {
            bar.set_length(progress.total_bytes as u64);
            bar.set_position(progress.bytes as u64);
            bar.set_message(progress.tensor.to_string());
        },
    );
    bar.finish_and_clear();
    let written = written?;
    if !written.whole.is_empty() {
        note(format_args!(
            "not quantized, because their rows are not whole blocks of 32 numbers: {}",
            written.whole.join(", ")
        ));
    }
    if !written.left_out.is_empty() {
        note(format_args!(
            "not in the file: {}",
            written.left_out.join(", ")
        ));
    }
    note(format_args!(
        "written to {}: {:.3} GB of weights",
        cli.out.display(),
        written.bytes as f64 / 1e9
    ));
    // The quantized model computes in the original model's dtype, so that the comparison shows only the effect of
    // quantization.
    let after = cli.cost(&cli.out, dtype.flatten().or(cli.dtype))?;
    Report {
        bytes: written.bytes,
        whole: written.whole,
        left_out: written.left_out,
        before: before.map(|(summary, _)| summary),
        after: after.map(|(summary, _)| summary),
    }
    .print(cli.json)
}

impl Quantize {
    /// Measures the cross entropy of the model at `path` on the data, if data is given. Returns the cross entropy and the
    /// compute dtype.
    fn cost(
        &self,
        path: &Path,
        dtype: Option<Dtype>,
    ) -> Result<Option<(CostSummary, Option<Dtype>)>, Error> {
        let Some(data) = &self.data else {
            return Ok(None);
        };
        let arguments = ModelArguments {
            model: Some(path.to_owned()),
            device: self.device.into(),
            dtype,
            quantize: None,
            per_layer_table: Table::Auto,
        };
        let gemma = arguments.load(None)?.gemma;
        let windows = self.windows.windows(gemma.config())?;
        let documents = read_documents_or_text(data, &gemma)?;
        let costs = evaluate(&gemma, &documents, windows, progress())?;
        let all: Cost = costs.into_iter().sum();
        match all.summary() {
            Some(summary) => Ok(Some((summary, Dtype::of(gemma.dtype())))),
            None => Err(format!("{}: has no token to score", data.display()).into()),
        }
    }
}

impl Report {
    fn print(&self, as_json: bool) -> Result<(), Error> {
        let mut output = Output::default();
        if as_json {
            let _ = output.write(&format!("{}\n", serde_json::to_string(self)?));
        } else if let (Some(before), Some(after)) = (self.before, self.after) {
            let more = 100.0 * (after.cross_entropy / before.cross_entropy - 1.0);
            let _ = output.write(&format!(
                "before: {before}\nafter:  {after}\nthe cross entropy changes by {more:+.2} %\n"
            ));
        }
        output.finish()
    }
}
