//! Times of generation with random weights: `cargo bench --bench generate`.
//!
//! Prefill: from a prompt on the host to the first token on the host. Decode: greedy or drawn, each token on the host before the
//! next is asked for, though what reads it may be under way by then, as in `generate`. The floor is what weights, keys and values take to come through memory once, at the rate of an
//! elementwise operation over a large tensor.
//!
//! The parts of a token are timed in a second pass that waits for the device after each of them, which takes time itself:
//! they say where a token's time goes, not how much of it there is.

mod choice;
mod drafted;
mod launches;
mod models;
mod parts;
mod report;

use attention_workspace::layers::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{Chosen, DeviceName, choose},
    guarded,
    model::{Kv, Quantize, Table},
    random::random_model,
    report::{now, save},
    timing::{Effort, Timer},
};
use burn::{
    module::Module,
    tensor::{Device, DeviceConfig, FloatDType, Int, Tensor, TensorData},
};
use burn_gemma4::{Cache, CacheKind, Drafter, Gemma4Model, Logits, Next, Sampler};
use choice::Choice;
use clap::Parser;
use drafted::{Drafted, Forced, Measuring};
use launches::observe;
use models::{Shape, keys_read, weights_read};
use parts::Parts;
use report::{Measured, Outcome, Report, Row, print_header};
use std::{path::PathBuf, process::ExitCode, time::Instant};

/// Times generation with random weights.
#[derive(Parser)]
struct Cli {
    /// The shapes of models [default: e2b on a GPU, small ones on a processor].
    models: Vec<Shape>,
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Of weights and activations [default: bf16 or f16 on a GPU that has it, else f32].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Quantizes the weights, as `generate` does.
    #[arg(long, value_enum, value_name = "FORM")]
    quantize: Option<Quantize>,
    /// Where the table of per-layer embeddings is, by `host` in files that are written for it and as large as the model.
    #[arg(long, value_enum, default_value = "device")]
    per_layer_table: Table,
    /// Tokens of the prompt [default: 128,2048,8192; 24,96 on a processor].
    #[arg(long, value_delimiter = ',')]
    contexts: Vec<usize>,
    /// Sequences at once [default: 1,8; 1,2 on a processor].
    #[arg(long, value_delimiter = ',')]
    batches: Vec<usize>,
    /// Tokens to generate [default: 128; 8 on a processor].
    #[arg(long)]
    tokens: Option<usize>,
    /// Tokens of the prompt that are read at a time.
    #[arg(long, default_value_t = 8192)]
    prefill_chunk: usize,
    /// Prompts to take the fastest of.
    #[arg(long, default_value_t = 3)]
    prefills: usize,
    /// Put every token's launches on the device one by one.
    #[arg(long)]
    launch_each: bool,
    /// Keep of keys that values are made of only the rotated channels.
    #[arg(long)]
    compact_keys: bool,
    /// Keep keys and values in the model's dtype, or in int8.
    #[arg(long, value_enum, default_value_t)]
    kv: Kv,
    /// Also with so many guesses a pass, up to 8, for one sequence at a time: once for nothing, as they are looked up, and once by
    /// a drafter.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=8))]
    draft_tokens: Option<u8>,
    /// The probability that a guess is right where those before it are.
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.7)]
    acceptance: f64,
    /// Draw tokens by temperature 1, top-k 64 and top-p 0.95 instead of taking the likeliest.
    #[arg(long)]
    sample: bool,
    /// Give the sequences of a batch different lengths, from half the context up.
    #[arg(long)]
    ragged: bool,
    /// Leave out the times of a token's parts, and what is launched for it and for the prompt.
    #[arg(long)]
    no_parts: bool,
    /// Write all rows to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    leave_out_device_selection();
    match run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every row is measured.
fn run(cli: Cli) -> Result<bool, Error> {
    let chosen = choose(cli.device)?;
    let software = chosen.software;
    let dtype = chosen.dtype(cli.dtype)?;
    let mut device = chosen.device.clone();
    let float = FloatDType::from(dtype.burn());
    device.configure(DeviceConfig::default().float_dtype(float))?;
    let timer = Timer::new(&device, software);
    let effort = Effort {
        launches: 10,
        sustained: 1,
        seconds: 1.0,
    };
    let memory_rate = guarded(|| timer.memory_rate(dtype, effort))??;
    drop(timer);
    println!("{chosen}, {dtype}, memory {:.0} GB/s\n", memory_rate / 1e9);

    let or = |given: Vec<usize>, small: &[usize], full: &[usize]| match (given.is_empty(), software)
    {
        (false, _) => given,
        (true, true) => small.into(),
        (true, false) => full.into(),
    };
    let bench = Bench {
        device,
        chosen,
        dtype,
        quantize: cli.quantize,
        table: cli.per_layer_table,
        memory_rate,
        contexts: or(cli.contexts, &[24, 96], &[128, 2048, 8192]),
        batches: or(cli.batches, &[1, 2], &[1, 8]),
        tokens: cli.tokens.unwrap_or(if software { 8 } else { 128 }).max(1),
        prefill_chunk: cli.prefill_chunk.max(1),
        prefills: cli.prefills.max(1),
        launch_each: cli.launch_each,
        compact_keys: cli.compact_keys,
        kv: cli.kv,
        sample: cli.sample,
        ragged: cli.ragged,
        parts: !cli.no_parts,
        forced: cli.draft_tokens.map(|tokens| Forced {
            tokens: tokens.into(),
            acceptance: cli.acceptance,
        }),
        json: cli.json,
    };
    let models = match (cli.models.is_empty(), software) {
        (false, _) => cli.models,
        (true, true) => vec![Shape::Small, Shape::SmallDense],
        (true, false) => vec![Shape::E2b],
    };
    bench.run(&models)
}

struct Bench {
    device: Device,
    chosen: Chosen,
    dtype: Dtype,
    quantize: Option<Quantize>,
    table: Table,
    memory_rate: f64,
    contexts: Vec<usize>,
    batches: Vec<usize>,
    tokens: usize,
    prefill_chunk: usize,
    prefills: usize,
    launch_each: bool,
    compact_keys: bool,
    kv: Kv,
    sample: bool,
    ragged: bool,
    parts: bool,
    forced: Option<Forced>,
    json: Option<PathBuf>,
}

impl Bench {
    fn run(&self, models: &[Shape]) -> Result<bool, Error> {
        let mut report = Report {
            date: now(),
            device: self.chosen.to_string(),
            dtype: self.dtype,
            quantize: self.quantize,
            compact_keys: self.compact_keys,
            kv: self.kv,
            sample: self.sample,
            ragged: self.ragged,
            memory_rate: self.memory_rate,
            rows: Vec::new(),
        };
        print_header();
        for &shape in models {
            let files = tempfile::tempdir()?;
            let model = random_model(
                &shape.config(),
                self.quantize,
                self.table,
                files.path(),
                &self.device,
            )?;
            // What weights were before they were quantized.
            self.device.memory_cleanup();
            let drafter = self
                .forced
                .map(|_| Drafter::new(&shape.drafter(), &self.device));
            for &batch in &self.batches {
                for &context in &self.contexts {
                    let outcome =
                        match guarded(|| self.measure(&model, drafter.as_ref(), batch, context)) {
                            Ok(Ok(measured)) => Outcome::Measured(Box::new(measured)),
                            Ok(Err(error)) => Outcome::Failed(error.to_string()),
                            Err(panic) => Outcome::Failed(panic),
                        };
                    let row = Row {
                        model: shape,
                        batch,
                        context,
                        outcome,
                    };
                    row.print();
                    report.rows.push(row);
                    if let Some(path) = &self.json {
                        save(&report, path)?;
                    }
                    self.device.memory_cleanup();
                }
            }
        }
        let measured = |row: &Row| matches!(row.outcome, Outcome::Measured(_));
        Ok(report.rows.iter().all(measured))
    }

    fn measure(
        &self,
        model: &Gemma4Model,
        drafter: Option<&Drafter>,
        batch: usize,
        context: usize,
    ) -> Result<Measured, Error> {
        let prompt = prompt(model, batch, context);
        let mut fastest = f64::INFINITY;
        let mut last = None;
        // The first also compiles and tunes.
        for _ in 0..=self.prefills {
            drop(last.take());
            self.device.sync()?;
            let start = Instant::now();
            let (cache, tokens) = self.prefill(model, &prompt, batch, 0)?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
            last = Some((cache, tokens));
        }
        let (mut cache, mut tokens) = last.ok_or("no prompt was read")?;
        let prefill_launches = match self.parts {
            true => {
                let (read, launches) = observe(|| self.prefill(model, &prompt, batch, 0));
                (cache, tokens) = read?;
                launches
            }
            false => None,
        };

        let mut choice = Choice::new(self.sample, batch);
        let samplers: Vec<&Sampler> = choice.samplers.iter().collect();
        let mut decoder = model.decoder(&mut cache);
        if self.sample {
            decoder = decoder.with_samplers(&samplers)?;
        }
        if self.launch_each {
            decoder = decoder.without_graph_capture();
        }
        // Some go to compiling, tuning and capturing.
        let warm_up = self.tokens.div_ceil(8).max(6);
        let mut times = Vec::with_capacity(warm_up + self.tokens);
        for index in 1..=warm_up + self.tokens {
            let start = Instant::now();
            let goes_on = index < warm_up + self.tokens;
            tokens = choice.after(&mut decoder, &tokens, goes_on)?;
            times.push(start.elapsed().as_secs_f64());
        }
        let mode = decoder.mode();
        let first_tokens = times[..warm_up].iter().map(|time| time * 1e3).collect();
        let times = &times[warm_up..];
        let (mut parts, mut token_launches) = (Parts::default(), None);
        if self.parts {
            parts = parts::measure(&mut decoder, &mut choice, &mut tokens, &self.device)?;
            let by_parts = || -> Result<Vec<u32>, Error> {
                choice.of(decoder.step_by_parts(&tokens, &mut |_| ())?)
            };
            let (read, launches) = observe(by_parts);
            read?;
            token_launches = launches;
        }
        let memory_bytes = self.device.memory_pool_usage();
        let cache_bytes = cache.bytes();
        let drafted = match (self.forced, batch) {
            (Some(forced), 1) => {
                drop(cache);
                self.drafted(model, drafter, forced, &prompt)?
            }
            _ => Vec::new(),
        };
        let token = times.iter().sum::<f64>() / times.len() as f64;
        let config = model.config();
        let bits = 8.0 * self.dtype.burn().size() as f64;
        let bits_of_weight = match self.quantize {
            Some(Quantize::Q8) => 8.5,
            Some(Quantize::Q4) => 4.5,
            Some(Quantize::None) | None => bits,
        };
        let weights = weights_read(config, Gemma4Model::new(config, &self.device).num_params());
        let keys: usize = padding(batch, context, self.ragged)
            .into_iter()
            .map(|padding| keys_read(config, context - padding, self.compact_keys))
            .sum();
        let bits_of_key = match self.kv {
            Kv::Model => bits,
            // With a scale of 32 bits for 256 of them.
            Kv::Q8 => 8.125,
        };
        let read = weights as f64 * bits_of_weight + keys as f64 * bits_of_key;
        let floor = read / 8.0 / self.memory_rate;
        Ok(Measured {
            prefill_rate: (batch * context) as f64 / fastest,
            first_token_milliseconds: fastest * 1e3,
            decode_rate: batch as f64 / token,
            token_milliseconds: token * 1e3,
            fastest_token_milliseconds: times.iter().copied().fold(f64::INFINITY, f64::min) * 1e3,
            floor_milliseconds: floor * 1e3,
            mode: format!("{mode:?}").to_lowercase(),
            first_tokens_milliseconds: first_tokens,
            parts,
            token_launches,
            prefill_launches,
            weight_bytes: model.parameter_bytes(),
            memory_bytes: memory_bytes.map(|usage| usage.bytes_in_use),
            cache_bytes,
            drafted,
        })
    }

    /// With guesses for nothing, and by the drafter.
    fn drafted(
        &self,
        model: &Gemma4Model,
        drafter: Option<&Drafter>,
        forced: Forced,
        prompt: &[i32],
    ) -> Result<Vec<Drafted>, Error> {
        [None, drafter]
            .into_iter()
            .map(|drafter| {
                let (mut cache, tokens) = self.prefill(model, prompt, 1, forced.tokens)?;
                let measuring = Measuring {
                    passes: self.tokens,
                    launch_each: self.launch_each,
                    launches: self.parts,
                };
                drafted::measure(model, drafter, &mut cache, tokens[0], forced, measuring)
            })
            .collect()
    }

    fn prefill(
        &self,
        model: &Gemma4Model,
        prompt: &[i32],
        batch: usize,
        forgettable: usize,
    ) -> Result<(Cache, Vec<u32>), Error> {
        let context = prompt.len() / batch;
        let padding = padding(batch, context, self.ragged);
        let kind = CacheKind {
            compact_keys: self.compact_keys,
            precision: self.kv.into(),
        };
        let mut cache = model.cache_of(kind, padding)?.forgetting(forgettable);
        loop {
            let columns = cache.len()..(cache.len() + self.prefill_chunk).min(context);
            let last = columns.end == context;
            let tokens: Vec<i32> = prompt
                .chunks(context)
                .flat_map(|row| &row[columns.clone()])
                .copied()
                .collect();
            let tokens = TensorData::new(tokens, [batch, columns.len()]);
            let tokens = Tensor::<2, Int>::from_data(tokens, &self.device);
            let asked = if last { Logits::Last(1) } else { Logits::None };
            let logits = model.step(tokens, &mut cache, asked)?;
            if last {
                let logits = logits.ok_or("logits were asked for")?;
                return Ok((cache, Next::of(logits).argmax()?));
            }
        }
    }
}

/// The padding of each sequence: none, or up to half the context.
fn padding(batch: usize, context: usize, ragged: bool) -> Vec<usize> {
    let of_row = |row| {
        if ragged {
            row * context / (2 * batch)
        } else {
            0
        }
    };
    (0..batch).map(of_row).collect()
}

/// Tokens in no order, `[batch · context]`.
fn prompt(model: &Gemma4Model, batch: usize, context: usize) -> Vec<i32> {
    let vocabulary = model.config().vocab_size;
    (0..batch * context)
        .map(|index| (index * 7919 % vocabulary) as i32)
        .collect()
}
