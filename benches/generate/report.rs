//! The table, and the same as JSON.

use crate::{drafted::Drafted, launches::Launches, models::Shape, parts::Parts};
use attention_workspace::{
    Dtype,
    model::{Kv, Quantize},
};
use serde::Serialize;

#[derive(Serialize)]
pub struct Report {
    /// UTC.
    pub date: String,
    pub device: String,
    pub dtype: Dtype,
    pub quantize: Option<Quantize>,
    /// Whether keys that values are made of were kept in part.
    pub compact_keys: bool,
    /// In what keys and values were kept.
    pub kv: Kv,
    /// Whether tokens were drawn.
    pub sample: bool,
    /// Whether the sequences of a batch had different lengths.
    pub ragged: bool,
    /// Bytes a second that an elementwise operation over a large tensor moves.
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
    /// Prompt tokens a second, of all sequences.
    pub prefill_rate: f64,
    /// From the prompt to the first token, on the host.
    pub first_token_milliseconds: f64,
    /// Generated tokens a second, of all sequences.
    pub decode_rate: f64,
    /// From one token to the next.
    pub token_milliseconds: f64,
    /// Of the fastest: what remains where nothing else disturbs.
    pub fastest_token_milliseconds: f64,
    /// Weights, keys and values once through memory, at its rate.
    pub floor_milliseconds: f64,
    /// How the decoder computed.
    pub mode: String,
    /// Of the tokens before those that count: compiling, tuning, capturing.
    pub first_tokens_milliseconds: Vec<f64>,
    /// Where a token's time goes.
    pub parts: Parts,
    /// Of one token, and the device's time for them.
    pub token_launches: Option<Launches>,
    /// Of the whole prompt.
    pub prefill_launches: Option<Launches>,
    /// Of the model's parameters.
    pub weight_bytes: usize,
    /// Of the device's allocations at the end, if it tells.
    pub memory_bytes: Option<u64>,
    /// Of the cache at the end.
    pub cache_bytes: usize,
    /// With guesses, if that was asked for.
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
