//! What a text or conversations cost a Gemma 4 model: cross entropy and perplexity, by document and over all.
//!
//! ```text
//! cargo run --release --features training --example evaluate -- --model gemma-4-E2B --data text.txt
//! cargo run --release --features training --example evaluate -- --model gemma-4-E2B-it --adapter adapter --data conversations.jsonl
//! ```

use attention_workspace::{
    Error,
    model::{Loaded, ModelArguments},
    terminal::{Output, exit_code, note},
    training::{
        documents::{self, Document},
        evaluation::{Cost, Told, WindowArguments, evaluate, progress},
    },
};
use clap::Parser;
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode, time::Instant};

/// Tells the cross entropy and the perplexity of documents under a Gemma 4 model. Of conversations the assistant's messages count,
/// each through the end of its turn, and of texts all tokens and the end: what finetune learns.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    model: ModelArguments,
    /// A file with a JSON object in every line, as finetune reads it (.jsonl), or one text (.txt, .md, .rs).
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    #[command(flatten)]
    windows: WindowArguments,
    /// Prints one JSON object at the end.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    all: Told,
    documents: Vec<OfDocument>,
    length: usize,
    stride: usize,
    seconds: f64,
    device: &'a str,
    device_name: &'a str,
    dtype: String,
}

#[derive(Serialize)]
struct OfDocument {
    /// Where it is in the file.
    line: usize,
    /// Nothing where no token counts.
    #[serde(flatten)]
    told: Option<Told>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    exit_code(|| run(&cli))
}

fn run(cli: &Cli) -> Result<(), Error> {
    let loaded = cli.model.load()?;
    let gemma = &loaded.gemma;
    let windows = cli.windows.windows(gemma.config())?;
    let documents = documents::documents_or_text(&cli.data, gemma)?;
    let start = Instant::now();
    let costs = evaluate(gemma.model(), &documents, windows, progress())?;
    let seconds = start.elapsed().as_secs_f64();

    let all: Cost = costs.iter().copied().sum();
    let data = cli.data.display();
    let all = all
        .told()
        .ok_or_else(|| format!("{data}: has no token that counts"))?;
    let of_document = |(document, cost): (&Document, &Cost)| OfDocument {
        line: document.line,
        told: cost.told(),
    };
    let documents = documents.iter().zip(&costs).map(of_document).collect();
    let report = Report {
        all,
        documents,
        length: windows.length,
        stride: windows.stride,
        seconds,
        device: loaded.chosen.name.as_str(),
        device_name: &loaded.chosen.description,
        dtype: loaded.dtype(),
    };
    report.print(cli.json, &loaded)
}

impl Report<'_> {
    fn print(&self, as_json: bool, loaded: &Loaded) -> Result<(), Error> {
        let mut output = Output::default();
        if as_json {
            let _ = output.write(&format!("{}\n", serde_json::to_string(self)?));
            return output.finish();
        }
        for OfDocument { line, told } in &self.documents {
            let told = told.map_or("no token counts".to_owned(), |told| told.to_string());
            if output.write(&format!("line {line}: {told}\n")).is_break() {
                return output.finish();
            }
        }
        let _ = output.write(&format!("all: {}\n", self.all));
        note(format_args!(
            "loaded in {:.2} s as {}; {:.2} s in windows of {} tokens, {} apart",
            loaded.time.as_secs_f64(),
            self.dtype,
            self.seconds,
            self.length,
            self.stride,
        ));
        output.finish()
    }
}
