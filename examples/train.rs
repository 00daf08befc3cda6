//! Trains a Gemma 4 from scratch on text files.
//!
//! ```text
//! cargo run --release --features training --example train -- --out trained
//! cargo run --release --features training --example train -- --out trained --data texts --config 55m --steps 20000
//! cargo run --release --features training --example train -- --out trained --resume
//! torchrun --no-python --nproc-per-node 8 target/release/examples/train --out trained
//! cargo run --release --example generate -- --model trained --prompt "fn main"
//! ```

use attention_workspace::{
    Dtype, Error,
    terminal::{WrongArgument, note},
    training::{
        arguments::TrainingArguments,
        corpus,
        loader::Data,
        masters::cast,
        presets::Preset,
        resume,
        rows::cut,
        run::Run,
        vocabulary,
        world::{World, exit_code},
    },
};
use burn::module::Module;
use burn_gemma4::{Gemma4Config, Gemma4Model};
use clap::Parser;
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::json;
use std::{fs, path::PathBuf, process::ExitCode, sync::Arc};
use tokenizers::Tokenizer;

/// The share of the rows that the model is validated on.
const VALIDATION: f64 = 0.05;

/// Trains a Gemma 4 from scratch on text files, with a tokenizer trained on them, and writes a checkpoint's folder as Hugging
/// Face has it.
#[derive(Parser)]
#[command(version)]
#[command(args_override_self = true)]
struct Cli {
    /// The folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Files, and folders with .md, .rs and .txt files [default: this repository].
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// The model's shape.
    #[arg(long, value_enum, default_value = "1m")]
    config: Preset,
    /// Tokens of the vocabulary at most [default: what suits the shape].
    #[arg(long, value_name = "TOKENS")]
    vocabulary: Option<usize>,
    /// To train in. Of weights in half precision the optimizer has its own in f32.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// To write the model in.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    save_dtype: Dtype,
    #[command(flatten)]
    training: TrainingArguments,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    exit_code(|world| train(&cli, world))
}

fn train(cli: &Cli, world: &Arc<World>) -> Result<(), Error> {
    let (arguments, place) = (&cli.training, world.place());
    let history = cli.out.join("run");
    let begun = resume::begun(
        &cli.out,
        &history,
        arguments.resume,
        arguments.optimizer_parts(place),
    )?;
    let (chosen, devices) = arguments.choose(place)?;
    let dtype = chosen.dtype(Some(cli.dtype))?;
    note(&chosen);

    let texts = corpus::read(&match cli.data.is_empty() {
        true => vec![PathBuf::from(env!("CARGO_MANIFEST_DIR"))],
        false => cli.data.clone(),
    })?;
    let tokenizer = world.text_of_first(|| match begun {
        Some(_) => corpus::read_text(&cli.out.join("tokenizer.json")),
        None => {
            let size = vocabulary_size(cli)?;
            vocabulary::train(texts.iter().map(|document| document.text.as_str()), size)
        }
    })?;
    let trained = Tokenizer::from_bytes(&tokenizer)?;
    let size = trained.get_vocab_size(true);
    // A multiple that matrix units like.
    let config = cli.config.config(size.next_multiple_of(64));
    if size > config.vocab_size {
        let reason = format!(
            "--vocabulary: {size} tokens are more than the {} of --config",
            config.vocab_size
        );
        return Err(WrongArgument(reason).into());
    }
    let (training, validation) = rows(cli, &texts, trained, &config)?;
    note(format_args!(
        "{} files; a vocabulary of {size}; {} rows of {} tokens to train on, {} to validate on",
        texts.len(),
        training.rows.len(),
        arguments.length,
        validation.rows.len(),
    ));

    let settings = arguments.settings(
        &training.rows,
        place,
        json!({"config": format!("{:?}", cli.config), "dtype": cli.dtype.to_string()}),
    );
    world.agree(&resume::of_all(&settings, begun))?;
    if begun.is_none() && place.is_first() {
        fs::create_dir_all(&cli.out).map_err(|error| format!("{}: {error}", cli.out.display()))?;
        vocabulary::write(&cli.out, &tokenizer, &config)?;
    }
    resume::keep_settings(
        world,
        &history,
        &settings,
        begun,
        arguments.optimizer_part(place),
    )?;

    chosen.device.seed(arguments.seed);
    let model = cast(Gemma4Model::new(&config, &devices[0]), dtype.burn());
    note(format_args!("{} parameters", model.num_params()));
    let run = Run {
        arguments,
        learning_rate: arguments
            .learning_rate
            .unwrap_or(cli.config.learning_rate()),
        devices,
        averages: chosen.has_transport(),
        folder: &history,
        resume: begun,
        world,
    };
    let outcome = run.train(model, training, validation)?;
    if outcome.is_interrupted {
        note("stopped; --resume goes on from the last checkpoint");
        return world.end_of_stopped();
    }
    if place.is_first() {
        outcome.model.save(&cli.out, Some(cli.save_dtype.burn()))?;
        note(format_args!("written to {}", cli.out.display()));
    }
    Ok(())
}

fn vocabulary_size(cli: &Cli) -> Result<usize, Error> {
    let size = cli.vocabulary.unwrap_or(cli.config.vocabulary());
    match size < vocabulary::SMALLEST {
        true => {
            let reason = format!("--vocabulary has to be at least {}", vocabulary::SMALLEST);
            Err(WrongArgument(reason).into())
        }
        false => Ok(size),
    }
}

/// The rows to train on, and those to validate on.
fn rows(
    cli: &Cli,
    texts: &[corpus::Document],
    mut tokenizer: Tokenizer,
    config: &Gemma4Config,
) -> Result<(Data, Data), Error> {
    // What looks like a special token in a file is text.
    tokenizer.set_encode_special_tokens(true);
    let mut documents = Vec::with_capacity(texts.len());
    for document in texts {
        let text = tokenizer.encode_fast(document.text.as_str(), false)?;
        let mut tokens = vec![config.bos_token];
        tokens.extend(text.get_ids());
        tokens.extend(config.eos_tokens.first());
        documents.push(tokens);
    }
    documents.shuffle(&mut StdRng::seed_from_u64(cli.training.seed));
    let length = cli.training.length;
    let mut rows = cut(documents, length);
    let validation = ((rows.len() as f64 * VALIDATION).round() as usize).max(1);
    if rows.len() < 2 {
        return Err(format!(
            "the data fill 1 row of {length} tokens, and there have to be rows to train and to validate on: give more text or a smaller --length"
        )
        .into());
    }
    let data = |rows| Data {
        rows,
        positions: length,
        batch: cli.training.batch,
        padding: config.pad_token,
    };
    let validation = rows.split_off(rows.len() - validation);
    Ok((data(rows), data(validation)))
}
