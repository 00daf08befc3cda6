//! Overrides the checkpoint's default options of an answer with the options in a request.

use crate::engine::AnswerOptions;
use crate::error::RequestError;
use serde_json::{Map, Value};

/// The limits of a request's stop strings: their number is at most `MAX_STOP_STRINGS`, and each has at most
/// `MAX_STOP_LENGTH` bytes.
const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_LENGTH: usize = 1024;
/// The largest number of most likely tokens that a request can ask for at each position of an answer.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;

/// The options that a request sets. If a field is `None`, the checkpoint's option stays in effect.
#[derive(Debug, Default)]
pub(crate) struct Overrides {
    /// A pair of the request field's name, which differs between the APIs, and the field's value.
    pub max_tokens: Option<(&'static str, u64)>,
    pub min_tokens: Option<u64>,
    pub temperature: Option<f64>,
    pub max_temperature: f64,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub seed: Option<i64>,
    pub repetition_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub logit_bias: Option<Map<String, Value>>,
    pub stop: (&'static str, Vec<String>),
    pub ignore_eos: bool,
    pub logprobs: Option<usize>,
}

fn in_range(field: &str, value: f64, least: f64, most: f64) -> Result<f32, RequestError> {
    match value >= least && value <= most {
        true => Ok(value as f32),
        false => Err(RequestError::field(
            field,
            format!("is {value}; expected a number from {least} to {most}"),
        )),
    }
}

impl Overrides {
    /// Applies the overrides to the checkpoint's options. `left` is the number of tokens that fit into the context
    /// after the prompt. `usual` is the largest number of tokens of an answer if the request gives no limit.
    pub fn apply(
        self,
        mut options: AnswerOptions,
        left: usize,
        usual: usize,
        vocabulary: usize,
    ) -> Result<AnswerOptions, RequestError> {
        options.max_tokens = match self.max_tokens {
            Some((field, 0)) => {
                return Err(RequestError::field(field, "is 0; expected at least 1"));
            }
            Some((_, count)) => usize::try_from(count).unwrap_or(usize::MAX),
            None => usual.min(left).max(1),
        };
        if let Some(count) = self.min_tokens {
            options.min_tokens = usize::try_from(count).unwrap_or(usize::MAX);
            options.check_min_tokens()?;
        }
        let sampling = &mut options.sampling;
        let draws = self.top_p.is_some() || self.top_k.is_some() || self.min_p.is_some();
        if let Some(temperature) = self.temperature {
            sampling.temperature = in_range("temperature", temperature, 0.0, self.max_temperature)?;
        } else if draws && sampling.temperature == 0.0 {
            // Draw tokens if the request sets top-p, top-k or min-p, even if the checkpoint's default is greedy decoding.
            sampling.temperature = 1.0;
        }
        if let Some(top_p) = self.top_p {
            sampling.top_p = match in_range("top_p", top_p, 0.0, 1.0)? {
                // OpenAI's API allows a top-p of 0, which keeps only the most likely token.
                0.0 => Some(f32::MIN_POSITIVE),
                top_p => Some(top_p),
            };
        }
        if let Some(top_k) = self.top_k {
            sampling.top_k = match top_k {
                -1 | 0 => None,
                1.. => Some(usize::try_from(top_k).unwrap_or(usize::MAX)),
                _ => {
                    let reason = format!("is {top_k}; expected -1 or a number from 0");
                    return Err(RequestError::field("top_k", reason));
                }
            };
        }
        if let Some(min_p) = self.min_p {
            sampling.min_p = Some(in_range("min_p", min_p, 0.0, 1.0)?);
        }
        if let Some(seed) = self.seed {
            sampling.seed = Some(seed as u64);
        }
        if let Some(penalty) = self.repetition_penalty {
            sampling.repetition_penalty = in_range("repetition_penalty", penalty, 0.01, 10.0)?;
        }
        sampling.validate()?;
        let penalty = |field, value: Option<f64>| match value {
            Some(value) => in_range(field, value, -2.0, 2.0),
            None => Ok(0.0),
        };
        options.presence_penalty = penalty("presence_penalty", self.presence_penalty)?;
        options.frequency_penalty = penalty("frequency_penalty", self.frequency_penalty)?;
        options.logit_bias = logit_bias(self.logit_bias.unwrap_or_default(), vocabulary)?;
        let (field, stop) = self.stop;
        check_stop(field, &stop)?;
        if !stop.is_empty() {
            options.stop_strings = stop;
        }
        options.ignore_stop_tokens = self.ignore_eos;
        options.logprobs = self.logprobs;
        Ok(options)
    }
}

fn check_stop(field: &str, stop: &[String]) -> Result<(), RequestError> {
    if stop.len() > MAX_STOP_STRINGS {
        let reason = format!(
            "has {} strings; expected at most {MAX_STOP_STRINGS}",
            stop.len()
        );
        return Err(RequestError::field(field, reason));
    }
    let is_wrong = |string: &&String| string.is_empty() || string.len() > MAX_STOP_LENGTH;
    match stop.iter().find(is_wrong) {
        Some(string) => {
            let reason = format!(
                "has a string of {} bytes; expected 1 to {MAX_STOP_LENGTH}",
                string.len()
            );
            Err(RequestError::field(field, reason))
        }
        None => Ok(()),
    }
}

fn logit_bias(map: Map<String, Value>, vocabulary: usize) -> Result<Vec<(u32, f32)>, RequestError> {
    let entries = map.into_iter().map(|(token, bias)| {
        let field = || format!("logit_bias.{token}");
        let id = token.parse::<u32>().ok();
        let id = id.filter(|id| (*id as usize) < vocabulary).ok_or_else(|| {
            let reason = format!("is not a token id; expected a number below {vocabulary}");
            RequestError::field(field(), reason)
        })?;
        let bias = bias
            .as_f64()
            .ok_or_else(|| RequestError::field(field(), "expected a number"))?;
        Ok((id, in_range(&field(), bias, -100.0, 100.0)?))
    });
    entries.collect()
}
