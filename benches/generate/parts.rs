//! Times the parts of a decode step, such as attention. The decoder reports the end of each part to the benchmark,
//! which then waits for the device.

use crate::choice::Choice;
use attention_workspace::Error;
use burn::tensor::Device;
use burn_gemma4::{Decoder, Part};
use serde::Serialize;
use std::{collections::BTreeMap, time::Instant};

/// The time of each part of a decode step, keyed by the name of the part.
#[derive(Default, Serialize)]
pub struct Parts(BTreeMap<String, Time>);

#[derive(Clone, Copy, Default, Serialize)]
pub struct Time {
    /// The time of all occurrences of the part in a decode step. The benchmark waits for the device after each
    /// occurrence, and subtracts the time that a wait for an idle device takes.
    pub milliseconds: f64,
    /// The number of times that the part occurs in a decode step.
    pub places: usize,
}

/// The number of timed decode steps. The mean of their times is reported. One warm-up step precedes the timed steps.
const TOKENS: usize = 5;

/// Runs a few decode steps, and returns the mean time of each part of a step.
pub fn measure(
    decoder: &mut Decoder<'_>,
    choice: &mut Choice,
    tokens: &mut Vec<u32>,
    device: &Device,
) -> Result<Parts, Error> {
    let wait = idle_wait(device)?;
    let mut parts = Parts::default();
    for token in 0..=TOKENS {
        let mut found: BTreeMap<String, (f64, usize)> = BTreeMap::new();
        let mut fault = None;
        device.sync()?;
        let mut start = Instant::now();
        let mut after = |part: Part| {
            if let Err(error) = device.sync() {
                fault = Some(error);
            }
            let (seconds, places) = found.entry(format!("{part:?}").to_lowercase()).or_default();
            *seconds += start.elapsed().as_secs_f64() - wait;
            *places += 1;
            start = Instant::now();
        };
        *tokens = choice.of(decoder.step_by_parts(tokens, &mut after)?)?;
        if let Some(fault) = fault {
            return Err(fault.into());
        }
        if token == 0 {
            continue;
        }
        for (part, (seconds, places)) in found {
            let time = parts.0.entry(part).or_default();
            time.milliseconds += seconds * 1e3 / TOKENS as f64;
            time.places = places;
        }
    }
    Ok(parts)
}

/// Returns the time in seconds that a wait takes when the device is already idle.
fn idle_wait(device: &Device) -> Result<f64, Error> {
    const WAITS: usize = 100;
    device.sync()?;
    let start = Instant::now();
    for _ in 0..WAITS {
        device.sync()?;
    }
    Ok(start.elapsed().as_secs_f64() / WAITS as f64)
}

impl std::fmt::Display for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts: Vec<_> = self.0.iter().collect();
        parts.sort_by(|a, b| b.1.milliseconds.total_cmp(&a.1.milliseconds));
        let texts = parts
            .iter()
            .map(|(part, time)| format!("{part} {:.3} ms / {}", time.milliseconds, time.places));
        f.write_str(&texts.collect::<Vec<_>>().join(", "))
    }
}

impl Parts {
    /// True if no part was measured.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
