//! Quantizes a Gemma 4 checkpoint: a folder in f32, f16 or bf16 into one in compressed-tensors' format, or into a GGUF file.
//!
//! ```text
//! cargo run --release --features training --example quantize -- --model gemma-4-E2B-it --to q4 --out gemma-4-E2B-it-q4.gguf
//! cargo run --release --features training --example quantize -- --model gemma-4-E2B-it --to q8 --out gemma-4-E2B-it-w8a16 --data text.txt
//! ```

use attention_workspace::{
    Dtype, Error,
    device::DeviceName,
    hub,
    model::{ModelArguments, Quantize, Table, progress_bar},
    terminal::{Output, WrongArgument, exit_code, note},
    training::{
        documents::documents_or_text,
        evaluation::{Cost, Told, WindowArguments, evaluate, progress},
    },
};
use burn_gemma4::{LoadProgress, quantize_checkpoint};
use clap::Parser;
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Quantizes the weights of a Gemma 4 checkpoint, a matrix at a time, and tells what that costs on a text.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// A checkpoint's folder, as Hugging Face has it, in f32, f16 or bf16. It stays as it is.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// In blocks of 32 numbers of 8 or 4 bits, each with a scale.
    #[arg(long, value_enum, value_name = "FORM")]
    to: Form,
    /// What to write, which is not there yet: a GGUF file with everything quantized but norms and routers, where the name ends with .gguf; else a
    /// folder as compressed-tensors packs it, where embeddings stay as they are.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Tells the cross entropy of it before and after: a file as evaluate reads it (.jsonl, .txt, .md, .rs).
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    #[command(flatten)]
    windows: WindowArguments,
    /// Where the cross entropy is computed.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// In what [default: the checkpoint's].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Prints one JSON object at the end.
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

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    bytes: u64,
    whole: Vec<String>,
    left_out: Vec<String>,
    before: Option<Told>,
    after: Option<Told>,
}

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    exit_code(|| {
        cli.model = hub::resolve(&cli.model)?;
        quantize(&cli)
    })
}

fn quantize(cli: &Cli) -> Result<(), Error> {
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
            Form::Q8 => Quantize::Q8,
            Form::Q4 => Quantize::Q4,
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
            "stay whole, since their rows are no whole blocks of 32 numbers: {}",
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
    // What is compared computes in the same dtype.
    let after = cli.cost(&cli.out, dtype.flatten().or(cli.dtype))?;
    Report {
        bytes: written.bytes,
        whole: written.whole,
        left_out: written.left_out,
        before: before.map(|(told, _)| told),
        after: after.map(|(told, _)| told),
    }
    .print(cli.json)
}

impl Cli {
    /// What the data cost the model at `path`, if there are any, and the dtype that it computes in.
    fn cost(
        &self,
        path: &Path,
        dtype: Option<Dtype>,
    ) -> Result<Option<(Told, Option<Dtype>)>, Error> {
        let Some(data) = &self.data else {
            return Ok(None);
        };
        let arguments = ModelArguments {
            model: Some(path.to_owned()),
            adapter: None,
            device: self.device,
            dtype,
            quantize: None,
            per_layer_table: Table::Auto,
        };
        let gemma = arguments.load()?.gemma;
        let windows = self.windows.windows(gemma.config())?;
        let documents = documents_or_text(data, &gemma)?;
        let costs = evaluate(gemma.model(), &documents, windows, progress())?;
        let all: Cost = costs.into_iter().sum();
        match all.told() {
            Some(told) => Ok(Some((told, Dtype::of(gemma.dtype())))),
            None => Err(format!("{}: has no token that counts", data.display()).into()),
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
