//! The command `gemma4 quantize`: writes a checkpoint with quantized weights.

use crate::{
    Dtype, Error,
    device::DeviceName,
    hub,
    model::{ModelArguments, Table, progress_bar},
    terminal::{Output, WrongArgument, exit_code, note},
};
use burn_gemma4::{
    ExportForm, ExportOptions, ImportanceMatrix, LoadProgress, QuantizedCheckpoint,
    quantize_checkpoint,
};
use clap::Parser;
use gemma4_train::{
    data::documents::read_documents_or_text,
    evaluation::{Cost, CostSummary, WindowArguments, evaluate, progress},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Quantize a checkpoint to 8 to 2 bits.
///
/// Read a checkpoint folder, and write a GGUF file or a folder in compressed-tensors' format. Only one matrix is in memory at a
/// time.
#[derive(Parser)]
#[command(version)]
pub struct Quantize {
    /// Checkpoint to quantize: a folder in Hugging Face's layout, in f32, f16 or bf16. It is not changed.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Form of the quantized weights. q8 and q4 have blocks of 32 elements with 8 or 4 bits each, and a scale per block. The
    /// others are llama.cpp's mixtures of K formats, for GGUF files.
    #[arg(long, value_enum, ignore_case = true, value_name = "FORM")]
    to: Form,
    /// Path to write, which must not exist yet. If the name ends with .gguf, a GGUF file is written, in which all weights except
    /// norms and routers are quantized. For another name, a folder in compressed-tensors' format is written, in which embeddings
    /// are not quantized either.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Importance matrix of the model, as llama-imatrix writes it: a GGUF file or a .dat file. It lowers the error of the
    /// channels that matter. For GGUF files in forms other than q8.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    /// Q8_0 in GGUF, W8A16 in a folder.
    Q8,
    /// Q4_0 in GGUF, W4A16 in a folder.
    Q4,
    /// 2 bits, and 3 bits for a few matrices of each layer.
    #[value(name = "q2_k")]
    Q2K,
    /// 3 bits.
    #[value(name = "q3_k_s")]
    Q3KSmall,
    /// 3 bits, and 4 or 5 bits for a few matrices of each layer.
    #[value(name = "q3_k_m")]
    Q3KMedium,
    /// 3 bits, and 5 bits for a few matrices of each layer.
    #[value(name = "q3_k_l")]
    Q3KLarge,
    /// 4 bits, and 5 bits for a few matrices of the first layers.
    #[value(name = "q4_k_s")]
    Q4KSmall,
    /// 4 bits, and 6 bits for a few matrices of half of the layers.
    #[value(name = "q4_k_m")]
    Q4KMedium,
    /// 5 bits.
    #[value(name = "q5_k_s")]
    Q5KSmall,
    /// 5 bits, and 6 bits for a few matrices of half of the layers.
    #[value(name = "q5_k_m")]
    Q5KMedium,
    /// 6 bits.
    #[value(name = "q6_k")]
    Q6K,
}

impl From<Form> for ExportForm {
    fn from(form: Form) -> Self {
        match form {
            Form::Q8 => Self::Q8,
            Form::Q4 => Self::Q4,
            Form::Q2K => Self::Q2K,
            Form::Q3KSmall => Self::Q3KSmall,
            Form::Q3KMedium => Self::Q3KMedium,
            Form::Q3KLarge => Self::Q3KLarge,
            Form::Q4KSmall => Self::Q4KSmall,
            Form::Q4KMedium => Self::Q4KMedium,
            Form::Q5KSmall => Self::Q5KSmall,
            Form::Q5KMedium => Self::Q5KMedium,
            Form::Q6K => Self::Q6K,
        }
    }
}

/// The JSON object that `--json` prints.
#[derive(Serialize)]
struct Report {
    bytes: u64,
    bits_per_weight: Option<f64>,
    types: BTreeMap<String, usize>,
    whole: Vec<String>,
    small_blocks: Vec<String>,
    without_importance: Vec<String>,
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
    cli.refuse_what_only_gguf_stores()?;
    let importance = cli.imatrix.as_deref().map(ImportanceMatrix::from_file);
    let importance = importance.transpose()?;
    let before = cli.cost(&cli.model, cli.dtype)?;
    let dtype = before.map(|(_, dtype)| dtype);

    let bar = progress_bar()?;
    let mut options = ExportOptions::from(ExportForm::from(cli.to));
    if let Some(importance) = &importance {
        options = options.importance(importance);
    }
    let written = quantize_checkpoint(
        &cli.model,
        &cli.out,
        options,
        |progress: LoadProgress<'_>| {
            bar.set_length(progress.total_bytes as u64);
            bar.set_position(progress.bytes as u64);
            bar.set_message(progress.tensor.to_string());
        },
    );
    bar.finish_and_clear();
    let written = written?;
    tell(&written);
    let elements: usize = written.types.values().sum();
    let bits_per_weight =
        (elements > 0).then(|| 8.0 * written.parameter_bytes as f64 / elements as f64);
    let bits =
        bits_per_weight.map_or_else(String::new, |bits| format!(", {bits:.2} bits a weight"));
    note(format_args!(
        "written to {}: {:.3} GB of weights{bits}",
        cli.out.display(),
        written.bytes as f64 / 1e9
    ));
    // The quantized model computes in the original model's dtype, so that the comparison shows only the effect of
    // quantization.
    let after = cli.cost(&cli.out, dtype.flatten().or(cli.dtype))?;
    Report {
        bytes: written.bytes,
        bits_per_weight,
        types: written.types,
        whole: written.whole,
        small_blocks: written.small_blocks,
        without_importance: written.without_importance,
        left_out: written.left_out,
        before: before.map(|(summary, _)| summary),
        after: after.map(|(summary, _)| summary),
    }
    .print(cli.json)
}

/// Prints which weights are not in the form that the user asked for.
fn tell(written: &QuantizedCheckpoint) {
    for (what, names) in [
        (
            "not quantized, because their rows are not whole blocks of 32 numbers",
            &written.whole,
        ),
        (
            "in blocks of 32 numbers, because their rows are not whole blocks of 256",
            &written.small_blocks,
        ),
        (
            "quantized without importance, because the importance matrix lacks them",
            &written.without_importance,
        ),
        ("not in the file", &written.left_out),
    ] {
        if !names.is_empty() {
            note(format_args!("{what}: {}", names.join(", ")));
        }
    }
}

impl Quantize {
    /// Refuses combinations of arguments that only GGUF files support, by the names of the arguments.
    fn refuse_what_only_gguf_stores(&self) -> Result<(), Error> {
        let extension = self.out.extension();
        let is_gguf = extension.is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
        let form = ExportForm::from(self.to);
        let reason = match self.imatrix {
            _ if !is_gguf && !matches!(self.to, Form::Q8 | Form::Q4) => {
                format!("--to: {form} exists in GGUF files only; expected an --out that ends with .gguf")
            }
            Some(_) if !is_gguf => {
                "--imatrix: a folder does not use an importance matrix; expected an --out that ends with .gguf"
                    .into()
            }
            Some(_) if self.to == Form::Q8 => {
                "--imatrix: Q8_0 does not use an importance matrix; expected --to with fewer bits".into()
            }
            _ => return Ok(()),
        };
        Err(WrongArgument(reason).into())
    }

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
