//! Benchmarks generation with random weights: `cargo bench --bench generate`.
//!
//! The prefill time is the time from a prompt on the host to the first token on the host. In decoding, each token
//! reaches the host before the benchmark requests the next token. Before this request, the device may already run the
//! forward of the next token, as in the program `generate`.
//!
//! The floor is a lower bound of a token's time: the time to read weights, keys and values from memory once. The floor
//! assumes the memory bandwidth of an elementwise operation over a large tensor.
//!
//! The parts of a decode step, such as attention, are timed in a separate run that waits for the device after each
//! part. The times show how the work of a step divides among the parts. Because of the waits, the sum of these times is
//! not the token's time.

mod choice;
mod drafted;
mod launches;
mod models;
mod packed;
mod parts;
mod report;

use attention_workspace::mesa_layer::leave_out_device_selection;
use attention_workspace::{
    Dtype, Error,
    device::{Chosen, DeviceName, choose},
    generation::Kv,
    model::{Table, WeightForm},
    random::random_model,
    report::{now, save},
    timing::{Effort, Timer},
};
use burn::{
    module::Module,
    tensor::{Device, DeviceConfig, FloatDType, Int, Tensor, TensorData},
};
use burn_gemma4::{
    Cache, CacheKind, Drafter, Gemma4Model, Logits, Next, PromptGraphs, Sampler, catch_panic,
};
use choice::Choice;
use clap::Parser;
use drafted::{Drafted, Forced, Measuring};
use launches::observe;
use models::{Shape, keys_read, weights_read};
use parts::Parts;
use report::{Measured, Outcome, Report, Row, print_header};
use std::{path::PathBuf, process::ExitCode, time::Instant};

/// Times generation with random weights
#[derive(Parser)]
struct Cli {
    /// The shapes of the models [default: e2b on a GPU, small shapes on a CPU]
    models: Vec<Shape>,
    /// The device to run on
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// The dtype of weights and activations [default: bf16 or f16 on a GPU that supports it, otherwise f32]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Quantize the weights to this form, as `generate` does
    #[arg(long, value_enum, value_name = "FORM")]
    quantize: Option<WeightForm>,
    /// The memory that holds the table of per-layer embeddings; with `host`, the benchmark first saves the whole model
    /// to files and leaves the table in these files
    #[arg(long, value_enum, default_value = "device")]
    per_layer_table: Table,
    /// The number of tokens per prompt [default: 128,2048,8192; 24,96 on a CPU]
    #[arg(long, value_delimiter = ',')]
    contexts: Vec<usize>,
    /// The number of sequences per batch [default: 1,8; 1,2 on a CPU]
    #[arg(long, value_delimiter = ',')]
    batches: Vec<usize>,
    /// The number of tokens to generate [default: 128; 8 on a CPU]
    #[arg(long)]
    tokens: Option<usize>,
    /// The number of prompt tokens that are prefilled at once
    #[arg(long, default_value_t = 8192)]
    prefill_chunk: usize,
    /// The number of prefills; the time of the fastest is reported
    #[arg(long, default_value_t = 3)]
    prefills: usize,
    /// Launch every kernel of a token separately, without graph capture
    #[arg(long)]
    launch_each: bool,
    /// In layers that compute their values from the key projection, store only the rotated (RoPE) channels of keys
    #[arg(long)]
    compact_keys: bool,
    /// Store keys and values in the model's dtype, or in int8
    #[arg(long, value_enum, default_value_t)]
    kv: Kv,
    /// Also measure speculative decoding of one sequence, with up to 8 draft tokens per pass. One run has draft tokens that
    /// cost no time, and one run has a drafter
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=8))]
    draft_tokens: Option<u8>,
    /// The probability that a draft token is accepted if all draft tokens before it are accepted
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.7)]
    acceptance: f64,
    /// Sample tokens with temperature 1, top-k 64 and top-p 0.95 instead of greedy decoding
    #[arg(long)]
    sample: bool,
    /// Give the sequences of a batch different lengths, from half of the prompt length up to the whole prompt length
    #[arg(long)]
    ragged: bool,
    /// Only time this number of prompts of each length in `--contexts`, in one pass and one after another
    #[arg(
        long,
        value_name = "PROMPTS",
        conflicts_with_all = ["json", "draft_tokens", "ragged", "sample", "launch_each"]
    )]
    packed: Option<usize>,
    /// Do not time the parts of a token, such as attention, and do not list the kernel launches
    #[arg(long)]
    no_parts: bool,
    /// Write all results to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Ignored. `cargo bench` passes this flag
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

/// Runs the benchmark. Returns true if every result was measured.
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
    let memory_rate = catch_panic(|| timer.memory_rate(dtype, effort))??;
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
        packed: cli.packed,
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
    quantize: Option<WeightForm>,
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
    packed: Option<usize>,
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
        if self.packed.is_none() {
            print_header();
        }
        for &shape in models {
            let files = tempfile::tempdir()?;
            let model = random_model(
                &shape.config(),
                self.quantize,
                self.table,
                files.path(),
                &self.device,
            )?;
            // The cleanup frees the memory of the unquantized weights.
            self.device.memory_cleanup();
            if let Some(prompts) = self.packed {
                self.print_packed(shape, &model, prompts)?;
                continue;
            }
            let drafter = self
                .forced
                .map(|_| Drafter::new(&shape.drafter(), &self.device));
            for &batch in &self.batches {
                for &context in &self.contexts {
                    let outcome = match catch_panic(|| {
                        self.measure(&model, drafter.as_ref(), batch, context)
                    }) {
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

    /// Measures and prints packed prompts of each length.
    fn print_packed(&self, shape: Shape, model: &Gemma4Model, prompts: usize) -> Result<(), Error> {
        for &length in &self.contexts {
            let kind = self.cache_kind();
            let times = packed::measure(model, kind, prompts.max(1), length, self.prefills)?;
            println!("{}, {times}", format!("{shape:?}").to_lowercase());
            self.device.memory_cleanup();
        }
        Ok(())
    }

    fn measure(
        &self,
        model: &Gemma4Model,
        drafter: Option<&Drafter>,
        batch: usize,
        context: usize,
    ) -> Result<Measured, Error> {
        let prompt = prompt(model, batch, context);
        let graphs = PromptGraphs::new(model.clone());
        let mut fastest = f64::INFINITY;
        let mut last = None;
        // One more prefill runs than requested, because the first prefill also compiles and tunes kernels. The fastest time
        // is reported.
        for _ in 0..=self.prefills {
            drop(last.take());
            self.device.sync()?;
            let start = Instant::now();
            let (cache, tokens) = match batch {
                1 if !self.launch_each && context <= self.prefill_chunk => {
                    self.replayed(&graphs, model, &prompt)?
                }
                _ => self.prefill(model, &prompt, batch, 0)?,
            };
            fastest = fastest.min(start.elapsed().as_secs_f64());
            last = Some((cache, tokens));
        }
        let (mut cache, mut tokens) = last.ok_or("no prefill was run")?;
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
        // The warm-up tokens compile and tune kernels and capture the CUDA graph, so they are not timed.
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
            Some(WeightForm::Q8) => 8.5,
            Some(WeightForm::Q4) => 4.5,
            Some(WeightForm::None) | None => bits,
        };
        let weights = weights_read(config, Gemma4Model::new(config, &self.device).num_params());
        let keys: usize = padding(batch, context, self.ragged)
            .into_iter()
            .map(|padding| keys_read(config, context - padding, self.compact_keys))
            .sum();
        let bits_of_key = match self.kv {
            Kv::Model => bits,
            // The int8 elements of one token and one head share a 32-bit scale. With 256 columns per head, the scale
            // adds 32 / 256 = 0.125 bits per element.
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

    /// Measures speculative decoding twice: with draft tokens that cost nothing, and with draft tokens from the drafter.
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

    fn cache_kind(&self) -> CacheKind {
        CacheKind {
            compact_keys: self.compact_keys,
            precision: self.kv.into(),
        }
    }

    /// Prefills one whole prompt in one run of the model. From the second prefill of a short prompt on, the prefill
    /// replays a captured CUDA graph.
    fn replayed(
        &self,
        graphs: &PromptGraphs,
        model: &Gemma4Model,
        prompt: &[i32],
    ) -> Result<(Cache, Vec<u32>), Error> {
        let mut cache = model.cache_of(self.cache_kind(), vec![0])?;
        let prompt: Vec<u32> = prompt.iter().map(|token| *token as u32).collect();
        let tokens = graphs.read(&prompt, &mut cache)?.argmax()?;
        Ok((cache, tokens))
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
        let mut cache = model
            .cache_of(self.cache_kind(), padding)?
            .forgetting(forgettable);
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
                let logits = logits.ok_or("the logits of the last position were requested")?;
                return Ok((cache, Next::of(logits).argmax()?));
            }
        }
    }
}

/// Returns the number of padding tokens of each sequence. If `ragged`, the number grows from 0 for the first sequence
/// to at most half the context. Otherwise all numbers are 0.
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

/// Returns pseudo-random prompt tokens, `[batch · context]`.
fn prompt(model: &Gemma4Model, batch: usize, context: usize) -> Vec<i32> {
    let vocabulary = model.config().vocab_size;
    (0..batch * context)
        .map(|index| (index * 7919 % vocabulary) as i32)
        .collect()
}
