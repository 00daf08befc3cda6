//! Fine-tunes a Gemma 4 checkpoint on conversations or texts.
//!
//! ```text
//! cargo run --release --features training --example finetune -- --model gemma-4-E2B-it --data conversations.jsonl --out adapter
//! cargo run --release --example generate -- --model gemma-4-E2B-it --adapter adapter --chat --prompt "Hello"
//! cargo run --release --features training --example finetune -- --model gemma-4-E2B-it --data conversations.jsonl --out tuned --merge
//! cargo run --release --features training --example finetune -- --model gemma-4-31B-it --quantize q4 --data conversations.jsonl --out adapter
//! ```

use attention_workspace::{
    Dtype, Error, hub,
    model::{Quantize, Table, tell_dtype},
    terminal::{WrongArgument, note},
    training::{
        arguments::TrainingArguments,
        documents,
        loader::Data,
        resume,
        rows::{Example, whole},
        run::Run,
        world::{World, exit_code},
    },
};
use burn::{module::Module, tensor::DType};
use burn_gemma4::{Adapter, Gemma4, Gemma4Model, LoadOptions, PerLayerTable, copy_beside};
use clap::Parser;
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::json;
use std::{path::PathBuf, process::ExitCode, sync::Arc};

/// The share of the examples that the model is validated on.
const VALIDATION: f64 = 0.05;
/// The highest learning rates where nobody says otherwise: of adapters, and of all weights.
const LEARNING_RATES: [f64; 2] = [2e-4, 1e-5];

/// Fine-tunes a checkpoint on a file of conversations or texts: low-rank adapters, or all weights.
#[derive(Parser)]
#[command(version)]
#[command(args_override_self = true)]
struct Cli {
    /// A checkpoint's folder, as Hugging Face has it, or for an adapter a GGUF file. It stays as it is.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// A file with a JSON object in every line: "messages", with roles and contents, of which the assistant's are learned, or
    /// "text", which is learned as a whole.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// The folder to write: an adapter as PEFT has it, or with --merge or --full a checkpoint, with what else the model's has, such
    /// as towers for images and audio.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Trains all weights rather than an adapter.
    #[arg(long, conflicts_with_all = ["rank", "alpha", "merge"])]
    full: bool,
    /// The adapter's rank.
    #[arg(long, default_value_t = 16)]
    rank: usize,
    /// The adapter counts alpha / rank times.
    #[arg(long, default_value_t = 32.0)]
    alpha: f64,
    /// Writes the checkpoint with the adapter in its weights rather than the adapter. What was quantized is whole there: the numbers that
    /// the adapter was trained over, and what it adds.
    #[arg(long)]
    merge: bool,
    /// Quantizes the frozen weights that the checkpoint has whole, beneath an adapter, in blocks of 32 numbers as llama.cpp's Q8_0 or Q4_0; `none`
    /// makes quantized ones whole [default: as the checkpoint has them, and whole with --full].
    #[arg(long, value_enum, value_name = "FORM")]
    quantize: Option<Quantize>,
    /// To train in [default: the checkpoint's; on a processor f32]. Of weights in half precision the optimizer has its own in f32.
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Where the table of per-layer embeddings goes, half of a small model's weights, of which a token takes a row. On the host it is not
    /// trained, so that with `--full` it is on the device.
    #[arg(long, value_enum, value_name = "PLACE", default_value_t)]
    per_layer_table: Table,
    #[command(flatten)]
    training: TrainingArguments,
}

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    exit_code(|world| {
        cli.model = hub::resolve(&cli.model)?;
        finetune(&cli, world)
    })
}

fn finetune(cli: &Cli, world: &Arc<World>) -> Result<(), Error> {
    let (arguments, place) = (&cli.training, world.place());
    refuse_same_folder(cli)?;
    refuse_file(cli)?;
    refuse_quantized(cli)?;
    let history = cli.out.join("run");
    let begun = resume::begun(
        &cli.out,
        &history,
        arguments.resume,
        arguments.optimizer_parts(place),
    )?;
    let (chosen, devices) = arguments.choose(place)?;
    note(&chosen);
    let mut options = LoadOptions::new();
    if let Some(dtype) = cli.dtype {
        options = options.dtype(chosen.dtype(Some(dtype))?.burn());
    }
    if let Some(form) = cli.form() {
        options = options.quantization(form.into());
    }
    options = options.per_layer_table(table(cli)?);
    chosen.device.seed(arguments.seed);
    let gemma = Gemma4::load(&cli.model, &devices[0], options)?;
    cli.per_layer_table.tell(gemma.model());
    if cli.dtype.is_none() {
        tell_dtype(gemma.model());
    }
    let (training, validation) = data(cli, &gemma)?;

    let adapter = (!cli.full).then(|| Adapter::new(cli.rank, cli.alpha));
    let model = gemma.model().clone();
    // It would hold the weights as they were.
    drop(gemma);
    let parameters = model.num_params();
    let base = format!("{:016x}", model.fingerprint()?);
    // Which weights are quantized, and how, tells their size, but for a table that may be on another device's host.
    let table = model.per_layer_table();
    let bytes = table.map_or_else(|| model.parameter_bytes(), |table| table.other_bytes);
    let model = match &adapter {
        Some(adapter) => {
            let is_quantized = model.is_quantized();
            let model = adapter.attach(model)?;
            let added = model.num_params() - parameters;
            match is_quantized {
                true => note(format_args!(
                    "{added} parameters beside {:.3} GB of quantized weights",
                    bytes as f64 / 1e9
                )),
                false => note(format_args!("{added} parameters beside {parameters}")),
            }
            model
        }
        None => {
            note(format_args!("{parameters} parameters"));
            model
        }
    };
    let settings = arguments.settings(
        &training.rows,
        place,
        json!({
            "dtype": format!("{:?}", model.dtype()),
            "full": cli.full,
            "rank": cli.rank,
            "alpha": cli.alpha,
            "quantize": cli.form(),
            "weights in bytes": bytes,
            (resume::BASE): base,
        }),
    );
    world.agree(&resume::of_all(&settings, begun))?;
    resume::keep_settings(
        world,
        &history,
        &settings,
        begun,
        arguments.optimizer_part(place),
    )?;
    let run = Run {
        arguments,
        learning_rate: arguments
            .learning_rate
            .unwrap_or(LEARNING_RATES[usize::from(cli.full)]),
        devices,
        averages: chosen.has_transport(),
        folder: &history,
        resume: begun,
        world,
    };
    let outcome = run.train(model, training, validation)?;
    if outcome.is_interrupted {
        note("stopped; what it has learned so far is written, and --resume goes on");
    }
    if place.is_first() {
        write(cli, adapter.as_ref(), &outcome.model)?;
    }
    match outcome.is_interrupted {
        true => world.end_of_stopped(),
        false => Ok(()),
    }
}

/// Writes the adapter, or the checkpoint with what was learned.
fn write(cli: &Cli, adapter: Option<&Adapter>, model: &Gemma4Model) -> Result<(), Error> {
    match adapter {
        Some(adapter) if !cli.merge => {
            adapter.save(model, &cli.out, &cli.model.display().to_string())?;
        }
        _ => {
            if model.is_quantized() {
                note(
                    "the weights were quantized: the checkpoint has the numbers that they stood for, whole, with what was learned",
                );
            }
            // A processor computes in f32 whatever the checkpoint is written in, which stays as it was.
            let written = model.written_dtype().filter(|dtype| *dtype != DType::F64);
            let dtype = written.filter(|_| cli.dtype.is_none());
            let saved = model.save_like(&cli.model, &cli.out, dtype);
            if saved.is_err() {
                // What was learned is not to be lost with what has become of the base.
                model.save(&cli.out, dtype)?;
            }
            saved?;
            copy_beside(&cli.model, &cli.out)?;
        }
    }
    note(format_args!("written to {}", cli.out.display()));
    Ok(())
}

fn refuse_same_folder(cli: &Cli) -> Result<(), Error> {
    let same = match (cli.model.canonicalize(), cli.out.canonicalize()) {
        (Ok(model), Ok(out)) => model == out,
        _ => false,
    };
    match same {
        true => Err(WrongArgument("--out is --model, which is to stay as it is".into()).into()),
        false => Ok(()),
    }
}

/// Where the table of per-layer embeddings goes.
fn table(cli: &Cli) -> Result<PerLayerTable, Error> {
    match (cli.full, cli.per_layer_table) {
        (true, Table::Host) => {
            let reason =
                "--per-layer-table host leaves the table as it is, but --full trains all weights";
            Err(WrongArgument(reason.into()).into())
        }
        (true, _) => Ok(PerLayerTable::Device),
        (false, table) => Ok(table.into()),
    }
}

/// A checkpoint is written like the one that it comes from, which has to be a folder.
fn refuse_file(cli: &Cli) -> Result<(), Error> {
    match cli.model.is_file() && (cli.full || cli.merge) {
        true => {
            let reason = "--model is a file; --full and --merge write a checkpoint like the folder that they began with";
            Err(WrongArgument(reason.into()).into())
        }
        false => Ok(()),
    }
}

/// Quantized weights are not trained.
fn refuse_quantized(cli: &Cli) -> Result<(), Error> {
    match cli.quantize {
        Some(form @ (Quantize::Q8 | Quantize::Q4)) if cli.full => {
            let form = format!("{form:?}").to_lowercase();
            let reason = format!(
                "--quantize {form} with --full: quantized weights stay as they are; without --full an adapter over them is trained"
            );
            Err(WrongArgument(reason).into())
        }
        _ => Ok(()),
    }
}

impl Cli {
    /// In what form the weights are, if not as the checkpoint has them.
    fn form(&self) -> Option<Quantize> {
        match self.full {
            true => Some(Quantize::None),
            false => self.quantize,
        }
    }
}

/// The rows to train on, and those to validate on.
fn data(cli: &Cli, gemma: &Gemma4) -> Result<(Data, Data), Error> {
    let length = cli.training.length;
    let mut documents = documents::documents(&cli.data, gemma)?;
    documents.shuffle(&mut StdRng::seed_from_u64(cli.training.seed));
    let all = documents.iter().flat_map(|document| &document.examples);
    let (count, cut) = (
        all.clone().count(),
        all.filter(|example| example.tokens.len() > length).count(),
    );
    // The examples of a conversation have parts of each other, so they stay on one side.
    let fitting = documents.into_iter().map(|document| {
        let examples = document.examples.into_iter();
        let examples = examples.filter_map(|example| example.within(length));
        examples.collect::<Vec<_>>()
    });
    let mut training: Vec<_> = fitting.filter(|examples| !examples.is_empty()).collect();
    let left_out = count - training.iter().map(Vec::len).sum::<usize>();
    if training.is_empty() {
        let path = cli.data.display();
        return Err(format!("{path}: nothing to learn within --length {length}").into());
    }
    let validation = ((training.len() as f64 * VALIDATION).round() as usize).max(1);
    // A single one is both.
    let validation = match training.len() {
        1 => training.clone(),
        documents => training.split_off(documents - validation),
    };
    let pack = |documents: Vec<Vec<Example>>| {
        let (rows, _) = whole(documents.concat(), length);
        Data {
            rows,
            positions: length,
            batch: cli.training.batch,
            padding: gemma.config().pad_token,
        }
    };
    let (training, validation) = (pack(training), pack(validation));
    if cut > 0 {
        note(format_args!(
            "{cut} of {count} examples are longer than --length {length}, and cut"
        ));
    }
    if left_out > 0 {
        note(format_args!(
            "{left_out} of {count} examples have nothing to learn within it, and are left out"
        ));
    }
    note(format_args!(
        "{count} examples: {} rows of {length} tokens to train on, {} to validate on",
        training.rows.len(),
        validation.rows.len(),
    ));
    Ok((training, validation))
}
