//! The command `gemma4 train`: trains a model from scratch.

use crate::{
    Dtype, Error,
    device::DeviceName,
    terminal::{WrongArgument, note},
    training::{choose_devices, end_of_stopped, exit_code, stop_on_signal},
};
use burn::module::Module;
use burn_gemma4::{Gemma4Config, Gemma4Model};
use clap::Parser;
use gemma4_train::{
    args::TrainingArguments,
    checkpoint::resume,
    data::{corpus, loader::Data, packing::cut, train_tokenizer},
    distributed::ProcessGroup,
    optim::master_weights::cast,
    presets::Preset,
    run::Run,
};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};
use tokenizers::Tokenizer;

/// The fraction of the rows that is used for validation.
const VALIDATION: f64 = 0.05;

/// Train a Gemma 4 from scratch on text files.
///
/// Also train a tokenizer on the files, and write a checkpoint folder in Hugging Face's layout.
#[derive(Parser)]
#[command(version)]
#[command(args_override_self = true)]
pub struct Train {
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Files to train on, and folders with .md, .rs and .txt files [default: the repository in which this program was built].
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Shape of the model, by its size.
    #[arg(long, value_enum, default_value = "1m")]
    config: Preset,
    /// Largest vocabulary size [default: depends on the model's shape].
    #[arg(long, value_name = "TOKENS")]
    vocabulary: Option<usize>,
    /// Compute type. The optimizer keeps f32 master weights for f16 and bf16.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Type of the weights in the written model.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    save_dtype: Dtype,
    /// Device to train on.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    training: TrainingArguments,
}

impl Train {
    /// Executes the command and returns its exit code.
    pub fn execute(&self) -> ExitCode {
        exit_code(|group| train(self, group))
    }
}

fn train(cli: &Train, group: &Arc<ProcessGroup>) -> Result<(), Error> {
    let (arguments, rank) = (&cli.training, group.rank());
    let history = cli.out.join("run");
    let begun = resume::find_checkpoint(
        &cli.out,
        &history,
        arguments.resume,
        arguments.optimizer_parts(rank),
    )?;
    let (chosen, devices) = choose_devices(cli.device, arguments, rank)?;
    let dtype = chosen.dtype(Some(cli.dtype))?;
    note(&chosen);

    let texts = corpus::read_files(&match cli.data.is_empty() {
        true => vec![repository()?],
        false => cli.data.clone(),
    })?;
    let tokenizer = group.broadcast_text(|| match begun {
        Some(_) => corpus::read_text(&cli.out.join("tokenizer.json")),
        None => {
            let size = vocabulary_size(cli)?;
            train_tokenizer::train(texts.iter().map(|document| document.text.as_str()), size)
        }
    })?;
    let trained = Tokenizer::from_bytes(&tokenizer)?;
    let size = trained.get_vocab_size(true);
    // The vocabulary size is rounded up to a multiple of 64, which is a multiple of the tensor cores' tile sizes.
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
        rank,
        json!({"config": format!("{:?}", cli.config), "dtype": cli.dtype.to_string()}),
    );
    group.check_same_settings(&resume::shared_settings(&settings, begun))?;
    if begun.is_none() && rank.is_first() {
        fs::create_dir_all(&cli.out).map_err(|error| format!("{}: {error}", cli.out.display()))?;
        train_tokenizer::write(&cli.out, &tokenizer, &config)?;
    }
    resume::keep_settings(
        group,
        &history,
        &settings,
        begun,
        arguments.optimizer_part(rank),
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
        has_transport: chosen.has_transport(),
        folder: &history,
        resume: begun,
        group,
        towers: None,
        before_first_step: Some(&stop_on_signal),
    };
    let outcome = run.train(model, training, validation)?;
    if outcome.is_interrupted {
        note("stopped; --resume continues from the last checkpoint");
        return end_of_stopped(group);
    }
    if rank.is_first() {
        outcome.model.save(&cli.out, Some(cli.save_dtype.burn()))?;
        note(format_args!("written to {}", cli.out.display()));
    }
    Ok(())
}

/// Returns the folder of the repository in which this program was built.
fn repository() -> Result<PathBuf, Error> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().nth(2);
    let root = root.filter(|root| root.join("crates/gemma4-cli").is_dir());
    root.map(Path::to_owned).ok_or_else(|| {
        let reason = "--data is missing; expected files or folders, because this machine lacks the repository in which this program was built";
        WrongArgument(reason.into()).into()
    })
}

fn vocabulary_size(cli: &Train) -> Result<usize, Error> {
    let size = cli.vocabulary.unwrap_or(cli.config.vocabulary());
    match size < train_tokenizer::SMALLEST {
        true => {
            let reason = format!(
                "--vocabulary: expected at least {}",
                train_tokenizer::SMALLEST
            );
            Err(WrongArgument(reason).into())
        }
        false => Ok(size),
    }
}

/// Returns the rows of packed files for training, and those for validation.
fn rows(
    cli: &Train,
    texts: &[corpus::CorpusFile],
    mut tokenizer: Tokenizer,
    config: &Gemma4Config,
) -> Result<(Data, Data), Error> {
    // Encode the names of special tokens in the files as plain text.
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
            "the data fill only 1 row of {length} tokens, but training and validation need a row each: give more text or a smaller --length"
        )
        .into());
    }
    let data = |rows| Data {
        rows,
        positions: length,
        batch: cli.training.batch,
        padding: config.pad_token,
        encoder: None,
    };
    let validation = rows.split_off(rows.len() - validation);
    Ok((data(rows), data(validation)))
}
