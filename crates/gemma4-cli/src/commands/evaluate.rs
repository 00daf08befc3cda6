//! The command `gemma4 evaluate`: cross entropy and perplexity of documents.

use crate::{
    Error,
    loading::Loaded,
    model::AdaptedModelArguments,
    terminal::{Output, exit_code, note},
};
use clap::Parser;
use gemma4_train::{
    data::documents::{Document, read_documents_or_text},
    evaluation::{Cost, CostSummary, WindowArguments, evaluate, progress},
};
use serde::Serialize;
use std::{path::PathBuf, process::ExitCode, time::Instant};

/// Measure the cross entropy and perplexity of texts.
///
/// The loss counts the tokens that finetune trains on. In conversations, these tokens are the assistant's messages, each
/// including the end of its turn. In texts, all tokens and the end token count.
#[derive(Parser)]
#[command(version)]
pub struct Evaluate {
    #[command(flatten)]
    model: AdaptedModelArguments,
    /// File with one JSON object per line, in the format that finetune reads (.jsonl), or file with a single text (.txt, .md,
    /// .rs).
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    #[command(flatten)]
    windows: WindowArguments,
    /// Print one JSON object with the results at the end.
    #[arg(long)]
    json: bool,
}

/// The JSON object that `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    all: CostSummary,
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
    /// The line number of the document in the file.
    line: usize,
    /// The cross entropy and perplexity of the document, or `None` if no token was scored.
    #[serde(flatten)]
    summary: Option<CostSummary>,
}

impl Evaluate {
    /// Executes the command and returns its exit code.
    pub fn execute(&self) -> ExitCode {
        exit_code(|| run(self))
    }
}

fn run(cli: &Evaluate) -> Result<(), Error> {
    let loaded = cli.model.load()?;
    let gemma = &loaded.gemma;
    let windows = cli.windows.windows(gemma.config())?;
    let documents = read_documents_or_text(&cli.data, gemma)?;
    let start = Instant::now();
    let costs = evaluate(gemma, &documents, windows, progress())?;
    let seconds = start.elapsed().as_secs_f64();

    let all: Cost = costs.iter().copied().sum();
    let data = cli.data.display();
    let all = all
        .summary()
        .ok_or_else(|| format!("{data}: has no token to score"))?;
    let of_document = |(document, cost): (&Document, &Cost)| OfDocument {
        line: document.line,
        summary: cost.summary(),
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
        for OfDocument { line, summary } in &self.documents {
            let summary =
                summary.map_or("nothing scored".to_owned(), |summary| summary.to_string());
            if output
                .write(&format!("line {line}: {summary}\n"))
                .is_break()
            {
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
