//! The command `gemma4 finetune`: trains a LoRA adapter for a checkpoint, or all weights of the checkpoint.

use crate::{
    Dtype, Error,
    device::DeviceName,
    hub,
    model::{Table, WeightForm, tell_dtype},
    terminal::{WrongArgument, note},
    training::{choose_devices, end_of_stopped, exit_code, stop_on_signal},
};
use burn::{module::Module, tensor::DType};
use burn_gemma4::{
    Adapter, Gemma4, LoadOptions, MediaKinds, PerLayerTable, TowerTargets, copy_beside,
};
use clap::Parser;
use gemma4_train::{
    args::TrainingArguments,
    checkpoint::resume,
    data::{
        documents::{Document, read_documents},
        loader::Data,
        packing::{Example, pack},
    },
    distributed::ProcessGroup,
    run::{Outcome, Run, check_one_device},
};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::json;
use std::{path::PathBuf, process::ExitCode, sync::Arc};

/// The fraction of the documents that is used for validation.
const VALIDATION: f64 = 0.05;
/// The default peak learning rates: the first one for adapters, the second one for training all weights.
const LEARNING_RATES: [f64; 2] = [2e-4, 1e-5];

/// Fine-tune a checkpoint on conversations or texts.
///
/// Train a low-rank adapter (LoRA), or all weights.
#[derive(Parser)]
#[command(version)]
#[command(args_override_self = true)]
pub struct Finetune {
    /// Checkpoint to start from: a folder in Hugging Face's layout or, for an adapter, also a GGUF file. It is not changed.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// File with one JSON object per line. If an object has the field "messages", with roles and contents, the assistant's
    /// messages are trained on. If it has the field "text", the whole text is trained on.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Folder to write: an adapter in PEFT's format or, with --merge or --full, a checkpoint. The written checkpoint also
    /// contains the untrained weights of the model, such as towers for images and audio.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Train all weights instead of an adapter.
    #[arg(long, conflicts_with_all = ["rank", "alpha", "merge"])]
    full: bool,
    /// Rank of the adapter.
    #[arg(long, default_value_t = 16)]
    rank: usize,
    /// Scale of the adapter: the adapter's output is multiplied by alpha / rank.
    #[arg(long, default_value_t = 32.0)]
    alpha: f64,
    /// Parts of the model that the adapter changes. `projector` is the projection of images and audio to the text model,
    /// and `towers` are the vision and audio towers. Both need images or audio in the data.
    #[arg(
        long,
        value_enum,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "text",
        conflicts_with = "full"
    )]
    targets: Vec<Target>,
    /// Write a checkpoint with the adapter merged into the weights. Quantized weights are dequantized first.
    #[arg(long)]
    merge: bool,
    /// Quantize the frozen weights under an adapter to blocks of 32 elements, as in llama.cpp's Q8_0 or Q4_0; `none` dequantizes
    /// quantized weights [default: the checkpoint's format; with --full, none].
    #[arg(long, value_enum, value_name = "FORM")]
    quantize: Option<WeightForm>,
    /// Compute type [default: the checkpoint's; on a CPU f32]. The optimizer keeps f32 master weights for f16 and
    /// bf16.
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Memory that holds the per-layer embedding table, which is half of a small model's weights. A table in host memory is not
    /// trained, so --full needs it on the device.
    #[arg(long, value_enum, value_name = "PLACE", default_value_t)]
    per_layer_table: Table,
    /// Device to train on.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    training: TrainingArguments,
}

/// The values of `--targets`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Target {
    /// The attention and the dense feed-forward networks of the text model.
    Text,
    /// The projections of images and audio to the text model.
    Projector,
    /// The linear layers of the vision and audio towers.
    Towers,
}

impl Finetune {
    /// Executes the command and returns its exit code.
    pub fn execute(mut self) -> ExitCode {
        exit_code(|group| {
            self.model = hub::resolve_folder("--model", &self.model)?;
            finetune(&self, group)
        })
    }
}

fn finetune(cli: &Finetune, group: &Arc<ProcessGroup>) -> Result<(), Error> {
    let (arguments, rank) = (&cli.training, group.rank());
    refuse_same_folder(cli)?;
    refuse_file(cli)?;
    refuse_quantized(cli)?;
    let history = cli.out.join("run");
    let begun = resume::find_checkpoint(
        &cli.out,
        &history,
        arguments.resume,
        arguments.optimizer_parts(rank),
    )?;
    let (chosen, devices) = choose_devices(cli.device, arguments, rank)?;
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
    let DataSet {
        training,
        validation,
        kinds,
    } = data(cli, &gemma)?;
    refuse_missing_media(cli, kinds)?;
    let towers = match kinds.any() {
        true => {
            // Refuse before the towers are loaded.
            check_one_device(group, &devices)?;
            Some(gemma.media_towers(kinds)?)
        }
        false => None,
    };

    let adapter = (!cli.full).then(|| cli.adapter());
    let model = gemma.model().clone();
    // `gemma` is dropped here, because it would keep the original weights in memory during the training.
    drop(gemma);
    let parameters = model.num_params();
    let base = format!("{:016x}", model.fingerprint()?);
    // The settings record the size of the weights in bytes, which identifies the formats of the weights. The size
    // excludes the per-layer embedding table, because each device may place the table differently.
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
            model.check_trainable()?;
            note(format_args!("{parameters} parameters"));
            model
        }
    };
    let towers = match (towers, &adapter) {
        (Some(towers), Some(adapter)) => {
            let frozen = towers.num_params();
            let towers = adapter.attach_towers(towers)?;
            let added = towers.num_params() - frozen;
            note(format_args!(
                "{added} parameters beside {frozen} of vision and audio"
            ));
            Some(towers)
        }
        (towers, _) => towers,
    };
    let settings = arguments.settings(
        &training.rows,
        rank,
        json!({
            "dtype": format!("{:?}", model.dtype()),
            "full": cli.full,
            "rank": cli.rank,
            "alpha": cli.alpha,
            "targets": format!("{:?}", cli.targets()),
            "quantize": cli.form(),
            "weights in bytes": bytes,
            (resume::BASE): base,
        }),
    );
    group.check_same_settings(&resume::shared_settings(&settings, begun))?;
    resume::keep_settings(
        group,
        &history,
        &settings,
        begun,
        arguments.optimizer_part(rank),
    )?;
    let run = Run {
        arguments,
        learning_rate: arguments
            .learning_rate
            .unwrap_or(LEARNING_RATES[usize::from(cli.full)]),
        devices,
        has_transport: chosen.has_transport(),
        folder: &history,
        resume: begun,
        group,
        towers,
        before_first_step: Some(&stop_on_signal),
    };
    let outcome = run.train(model, training, validation)?;
    if outcome.is_interrupted {
        note("stopped; the weights trained so far are written, and --resume continues");
    }
    if rank.is_first() {
        write(cli, adapter.as_ref(), &outcome)?;
    }
    match outcome.is_interrupted {
        true => end_of_stopped(group),
        false => Ok(()),
    }
}

/// Writes the adapter, or the checkpoint with the trained weights.
fn write(cli: &Finetune, adapter: Option<&Adapter>, outcome: &Outcome) -> Result<(), Error> {
    let (model, towers) = (&outcome.model, outcome.towers.as_ref());
    match adapter {
        Some(adapter) if !cli.merge => {
            let base = cli.model.display().to_string();
            adapter.save_with_towers(model, towers, &cli.out, &base)?;
        }
        _ => {
            if model.is_quantized() {
                note(
                    "the weights were quantized: the checkpoint contains them dequantized, with the trained adapter merged",
                );
            }
            // The written checkpoint keeps the dtype of the original checkpoint unless `--dtype` is given. The compute dtype
            // is not used, because the CPU computes in f32 by default.
            let written = model.written_dtype().filter(|dtype| *dtype != DType::F64);
            let dtype = written.filter(|_| cli.dtype.is_none());
            let saved = model.save_like_with_towers(&cli.model, towers, &cli.out, dtype);
            if saved.is_err() {
                save_trained(cli, adapter, outcome, dtype)?;
            }
            saved?;
            copy_beside(&cli.model, &cli.out)?;
        }
    }
    note(format_args!("written to {}", cli.out.display()));
    Ok(())
}

/// Writes the trained weights without those of the base checkpoint, which cannot be copied, for example because it was
/// deleted. The text model is a checkpoint. Adapted projections and towers have no weights beside those of the base, so
/// the whole adapter is written in the folder `adapter`.
fn save_trained(
    cli: &Finetune,
    adapter: Option<&Adapter>,
    outcome: &Outcome,
    dtype: Option<DType>,
) -> Result<(), Error> {
    let (model, towers) = (&outcome.model, outcome.towers.as_ref());
    model.save(&cli.out, dtype)?;
    if let Some(adapter) = adapter.filter(|adapter| adapter.towers.any()) {
        let base = cli.model.display().to_string();
        let folder = cli.out.join("adapter");
        adapter.save_with_towers(model, towers, &folder, &base)?;
        note(format_args!(
            "the adapter of the projections and towers is written to {}",
            folder.display()
        ));
    }
    Ok(())
}

/// Refuses `--targets` of vision and audio for a data set without images and audio.
fn refuse_missing_media(cli: &Finetune, kinds: MediaKinds) -> Result<(), Error> {
    match cli.adapter().towers.any() && !kinds.any() {
        true => {
            let reason = "--targets names projector or towers, but the data have no images and no audio; expected text only";
            Err(WrongArgument(reason.into()).into())
        }
        false => Ok(()),
    }
}

fn refuse_same_folder(cli: &Finetune) -> Result<(), Error> {
    let same = match (cli.model.canonicalize(), cli.out.canonicalize()) {
        (Ok(model), Ok(out)) => model == out,
        _ => false,
    };
    match same {
        true => Err(WrongArgument(
            "--out is --model, which is not changed; expected another folder".into(),
        )
        .into()),
        false => Ok(()),
    }
}

/// Returns the placement of the per-layer embedding table.
fn table(cli: &Finetune) -> Result<PerLayerTable, Error> {
    match (cli.full, cli.per_layer_table) {
        (true, Table::Host) => {
            let reason =
                "--per-layer-table host does not train the table, but --full trains all weights";
            Err(WrongArgument(reason.into()).into())
        }
        (true, _) => Ok(PerLayerTable::Device),
        (false, table) => Ok(table.into()),
    }
}

/// Refuses a GGUF file as the model if a checkpoint is to be written, because the written checkpoint copies the layout
/// of the original folder.
fn refuse_file(cli: &Finetune) -> Result<(), Error> {
    match cli.model.is_file() && (cli.full || cli.merge) {
        true => {
            let reason =
                "--model is a file; expected a folder, because --full and --merge copy its layout";
            Err(WrongArgument(reason.into()).into())
        }
        false => Ok(()),
    }
}

/// Refuses quantization with `--full`, because quantized weights are not trained.
fn refuse_quantized(cli: &Finetune) -> Result<(), Error> {
    match cli.quantize {
        Some(form @ (WeightForm::Q8 | WeightForm::Q4)) if cli.full => {
            let form = format!("{form:?}").to_lowercase();
            let reason = format!(
                "--quantize {form} with --full: quantized weights are not trained; without --full an adapter over them is trained"
            );
            Err(WrongArgument(reason).into())
        }
        _ => Ok(()),
    }
}

impl Finetune {
    /// Returns the parts that the adapter changes, each once.
    fn targets(&self) -> Vec<Target> {
        let all = [Target::Text, Target::Projector, Target::Towers];
        let chosen = all.into_iter().filter(|one| self.targets.contains(one));
        chosen.collect()
    }

    /// Returns the adapter of the requested parts.
    fn adapter(&self) -> Adapter {
        let mut adapter = Adapter::new(self.rank, self.alpha);
        if !self.targets.contains(&Target::Text) {
            adapter.modules.clear();
        }
        adapter.towers = TowerTargets {
            projectors: self.targets.contains(&Target::Projector),
            towers: self.targets.contains(&Target::Towers),
        };
        adapter
    }

    /// Returns the requested format of the weights, or `None` for the checkpoint's format.
    fn form(&self) -> Option<WeightForm> {
        match self.full {
            true => Some(WeightForm::None),
            false => self.quantize,
        }
    }
}

/// The rows of packed documents.
struct DataSet {
    training: Data,
    validation: Data,
    kinds: MediaKinds,
}

/// Returns the rows of packed documents for training, and those for validation.
fn data(cli: &Finetune, gemma: &Gemma4) -> Result<DataSet, Error> {
    let length = cli.training.length;
    let mut documents = read_documents(&cli.data, gemma)?;
    let kinds = Document::media_kinds(&documents);
    let encoder = kinds.any().then(|| Arc::new(gemma.prompt_encoder()));
    documents.shuffle(&mut StdRng::seed_from_u64(cli.training.seed));
    let all = documents.iter().flat_map(|document| &document.examples);
    let (count, cut) = (
        all.clone().count(),
        all.filter(|example| example.tokens.len() > length).count(),
    );
    // Divide whole documents between training and validation. The examples of one conversation overlap, so examples of
    // one conversation must not be in both sets.
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
    // If there is a single document, it is used both for training and for validation.
    let validation = match training.len() {
        1 => training.clone(),
        documents => training.split_off(documents - validation),
    };
    let packed = |documents: Vec<Vec<Example>>| {
        let (rows, _) = pack(documents.concat(), length);
        Data {
            rows,
            positions: length,
            batch: cli.training.batch,
            padding: gemma.config().pad_token,
            encoder: encoder.clone(),
        }
    };
    let (training, validation) = (packed(training), packed(validation));
    if cut > 0 {
        note(format_args!(
            "{cut} of {count} examples are longer than --length {length}, and cut"
        ));
    }
    if left_out > 0 {
        note(format_args!(
            "{left_out} of {count} examples have nothing to learn within --length {length}, and are left out"
        ));
    }
    note(format_args!(
        "{count} examples: {} rows of {length} tokens to train on, {} to validate on",
        training.rows.len(),
        validation.rows.len(),
    ));
    Ok(DataSet {
        training,
        validation,
        kinds,
    })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use std::path::Path;

    /// A base that is gone cannot be copied. The trained weights of every part are written nevertheless.
    #[test]
    fn write_without_base_writes_the_weights_and_the_adapter_of_towers() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/vision-ple");
        let gemma = Gemma4::from_pretrained(&fixture, &Device::flex().autodiff());
        let gemma = gemma.expect("the fixture is loadable");
        let kinds = MediaKinds {
            images: true,
            audio: false,
        };
        for targets in ["text", "text,projector,towers"] {
            let written = tempfile::tempdir().expect("a folder");
            let base = written.path().join("base");
            std::fs::create_dir(&base).expect("the folder is created");
            let out = written.path().join("out");
            let [model, folder] = [&base, &out].map(|path| path.display().to_string());
            let cli = Finetune::parse_from([
                "finetune",
                "--model",
                &model,
                "--data",
                "a.jsonl",
                "--out",
                &folder,
                "--merge",
                "--targets",
                targets,
            ]);
            let adapter = cli.adapter();
            let model = adapter.attach(gemma.model().clone()).expect("attached");
            let towers = gemma.media_towers(kinds).expect("the towers are valid");
            let towers = match adapter.towers.any() {
                true => adapter.attach_towers(towers).expect("attached"),
                false => towers,
            };
            let outcome = Outcome {
                model: model.valid(),
                towers: Some(towers.valid()),
                is_interrupted: false,
            };
            write(&cli, Some(&adapter), &outcome).expect_err("the base is gone");
            assert!(out.join("model.safetensors").is_file(), "{targets}");
            let loaded = Gemma4::from_pretrained(&fixture, &Device::flex()).expect("the fixture");
            let folder = out.join("adapter");
            assert_eq!(folder.exists(), adapter.towers.any(), "{targets}");
            if folder.exists() {
                let loaded = loaded.attach_adapter(&folder).expect("the adapter fits");
                assert_eq!(loaded.warnings().count(), 0, "{targets}");
            }
        }
    }
}
