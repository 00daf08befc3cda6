//! The report of the benchmark, as a table and as JSON.

use crate::{drafted::Drafted, launches::Launches, models::Shape, parts::Parts};
use attention_workspace::{Dtype, generation::Kv, model::WeightForm};
use serde::Serialize;

#[derive(Serialize)]
pub struct Report {
    /// The date and time of the run in UTC.
    pub date: String,
    pub device: String,
    pub dtype: Dtype,
    pub quantize: Option<WeightForm>,
    /// True if the cache stored only the rotated (RoPE) channels of keys in some layers. These are the layers that
    /// compute their values from the key projection.
    pub compact_keys: bool,
    /// The storage format of keys and values.
    pub kv: Kv,
    /// True if tokens were sampled.
    pub sample: bool,
    /// True if the sequences of a batch had different lengths.
    pub ragged: bool,
    /// The bandwidth of an elementwise operation over a large tensor, in bytes per second.
    pub memory_rate: f64,
    pub rows: Vec<Row>,
}

#[derive(Serialize)]
pub struct Row {
    pub model: Shape,
    pub batch: usize,
    pub context: usize,
    pub outcome: Outcome,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Measured(Box<Measured>),
    Failed(String),
}

#[derive(Serialize)]
pub struct Measured {
    /// The number of prompt tokens per second, over all sequences.
    pub prefill_rate: f64,
    /// The time from the prompt on the host to the first token on the host.
    pub first_token_milliseconds: f64,
    /// The number of generated tokens per second, over all sequences.
    pub decode_rate: f64,
    /// The mean time between two consecutive tokens of a sequence.
    pub token_milliseconds: f64,
    /// The time of the fastest token. Disturbances affect the fastest token least.
    pub fastest_token_milliseconds: f64,
    /// The lower bound of a token's time: the time to read weights, keys and values from memory once.
    pub floor_milliseconds: f64,
    /// The decoder's execution mode: `graph` (CUDA graph), `kernels` (one launch per kernel) or `layers`
    /// (`Gemma4Model::step`).
    pub mode: String,
    /// The time of each warm-up token. The warm-up tokens compile and tune kernels and capture the CUDA graph.
    pub first_tokens_milliseconds: Vec<f64>,
    /// The time of each part of a decode step.
    pub parts: Parts,
    /// The kernel launches of one token, or `None` if they were not recorded.
    pub token_launches: Option<Launches>,
    /// The kernel launches of the prefill of the whole prompt, or `None` if they were not recorded.
    pub prefill_launches: Option<Launches>,
    /// The size of the model's parameters in bytes.
    pub weight_bytes: usize,
    /// The number of bytes in use on the device at the end, or `None` if the device does not report this number.
    pub memory_bytes: Option<u64>,
    /// The size of the KV cache in bytes at the end.
    pub cache_bytes: usize,
    /// The results of speculative decoding. The list is empty if speculative decoding was not requested.
    pub drafted: Vec<Drafted>,
}

pub fn print_header() {
    println!(
        "{:<10} {:>5} {:>7} {:>12} {:>12} {:>12} {:>10} {:>9} {:>9} {:>7} {:>8} {:>9} mode",
        "model",
        "batch",
        "context",
        "prefill t/s",
        "first ms",
        "decode t/s",
        "token ms",
        "fastest",
        "floor ms",
        "floor",
        "GB used",
        "cache MB"
    );
}

impl Row {
    pub fn print(&self) {
        let name = format!("{:?}", self.model).to_lowercase();
        print!("{name:<10} {:>5} {:>7} ", self.batch, self.context);
        match &self.outcome {
            Outcome::Measured(measured) => measured.print(),
            Outcome::Failed(reason) => println!("FAILED: {reason}"),
        }
    }
}

impl Measured {
    fn print(&self) {
        println!(
            "{:>12.0} {:>12.2} {:>12.1} {:>10.3} {:>9.3} {:>9.3} {:>5.1} % {:>8} {:>9.1} {}",
            self.prefill_rate,
            self.first_token_milliseconds,
            self.decode_rate,
            self.token_milliseconds,
            self.fastest_token_milliseconds,
            self.floor_milliseconds,
            100.0 * self.floor_milliseconds / self.token_milliseconds,
            self.memory_bytes
                .map_or_else(|| "–".into(), |bytes| format!("{:.2}", bytes as f64 / 1e9)),
            self.cache_bytes as f64 / 1e6,
            self.mode,
        );
        for drafted in &self.drafted {
            let times = drafted.decode_rate / self.decode_rate;
            println!("    {drafted}: {times:.2} × as fast");
        }
        if !self.parts.is_empty() {
            println!("    {}", self.parts);
        }
        if let Some(launches) = &self.token_launches {
            println!("    token: {launches}");
        }
        if let Some(launches) = &self.prefill_launches {
            println!("    prefill: {launches}");
        }
    }
}
