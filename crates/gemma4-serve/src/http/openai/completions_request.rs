//! The request of `/v1/completions`, and its conversion to requests of the engine.

use super::super::app::App;
use super::super::overrides::{MAX_TOP_LOGPROBS, Overrides};
use super::fields::{ResponseFormat, Stop, StreamOptions, refuse_fields};
use super::tools::{SelectedTools, answer_grammar};
use crate::engine::{Request, ServedAdapter};
use crate::error::RequestError;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The largest number of prompts in a request.
pub(crate) const MAX_PROMPTS: usize = 128;

/// The fields of a request to `/v1/completions`. An unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionRequest {
    model: String,
    prompt: Prompts,
    max_tokens: Option<u64>,
    min_tokens: Option<u64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    n: Option<u64>,
    stop: Option<Stop>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    logit_bias: Option<Map<String, Value>>,
    logprobs: Option<u64>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    response_format: Option<ResponseFormat>,
    #[serde(rename = "user")]
    _user: Option<Value>,
    echo: Option<bool>,
    best_of: Option<u64>,
    suffix: Option<Value>,
}

/// The field `prompt`: one prompt or a list of prompts, as text or as token ids.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, tokens, or a list of texts or tokens"
)]
enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    AllTokens(Vec<Vec<u32>>),
}

/// A prompt as text or as token ids.
#[derive(Clone, Debug)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The settings that all prompts of a request have in common.
#[derive(Clone, Debug)]
pub(crate) struct CompletionContext {
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: Option<usize>,
    /// The fields of the request. [`request`](Self::request) converts the fields once for each prompt.
    fields: std::sync::Arc<CompletionRequest>,
}

impl Prompts {
    fn into_list(self) -> Vec<Prompt> {
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::AllTokens(all) => all.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

impl CompletionRequest {
    /// Splits the request into its prompts and the settings that all prompts have in common.
    pub fn split(mut self) -> Result<(CompletionContext, Vec<Prompt>), RequestError> {
        let refuse = |field, reason: String| Err(RequestError::field(field, reason));
        refuse_fields([("suffix", self.suffix.as_ref(), "is not supported")])?;
        if self.echo == Some(true) {
            return refuse("echo", "is not supported; expected false".into());
        }
        let choices = self.n.unwrap_or(1);
        if self.best_of.is_some_and(|count| count != choices) {
            return refuse(
                "best_of",
                format!("is not supported; expected n, {choices}"),
            );
        }
        let prompts = std::mem::replace(&mut self.prompt, Prompts::Tokens(Vec::new()));
        let prompts = prompts.into_list();
        let stream = self.stream.unwrap_or(false);
        match prompts.len() {
            0 => return refuse("prompt", "is empty; expected at least 1 prompt".into()),
            1 => (),
            count if count > MAX_PROMPTS => {
                let reason = format!("has {count} prompts; expected at most {MAX_PROMPTS}");
                return refuse("prompt", reason);
            }
            _ if stream => {
                return refuse(
                    "stream",
                    "expected one prompt, because several are not streamed".into(),
                );
            }
            _ => (),
        }
        if self.stream_options.is_some() && !stream {
            return refuse("stream_options", "expected `stream: true`".into());
        }
        let logprobs = match self.logprobs {
            Some(count) if count > MAX_TOP_LOGPROBS as u64 => {
                let reason = format!("is {count}; expected at most {MAX_TOP_LOGPROBS}");
                return refuse("logprobs", reason);
            }
            count => count.map(|count| count as usize),
        };
        let options = self.stream_options.as_ref();
        let context = CompletionContext {
            choices: usize::try_from(choices).unwrap_or(usize::MAX),
            stream,
            include_usage: options.is_some_and(StreamOptions::includes_usage),
            logprobs,
            fields: std::sync::Arc::new(self),
        };
        Ok((context, prompts))
    }
}

impl CompletionContext {
    /// The name of the model that answers, with its adapter.
    pub fn model(&self) -> &str {
        &self.fields.model
    }

    /// Returns the engine's request for one of the prompts. All prompts have the same `adapter`.
    pub fn request(
        &self,
        prompt: Prompt,
        adapter: Option<ServedAdapter>,
        app: &App,
    ) -> Result<Request, RequestError> {
        let fields = &self.fields;
        let prompt = match prompt {
            Prompt::Text(text) => app.text.text_prompt(&text)?,
            Prompt::Tokens(tokens) => app.text.token_prompt(tokens)?,
        };
        let left = app.engines.context().saturating_sub(prompt.len());
        let stop = fields.stop.as_ref().map(|stop| match stop {
            Stop::One(string) => vec![string.clone()],
            Stop::Several(strings) => strings.clone(),
        });
        let overrides = Overrides {
            max_tokens: fields.max_tokens.map(|count| ("max_tokens", count)),
            min_tokens: fields.min_tokens,
            temperature: fields.temperature,
            max_temperature: 2.0,
            top_p: fields.top_p,
            top_k: fields.top_k,
            min_p: fields.min_p,
            seed: fields.seed,
            repetition_penalty: fields.repetition_penalty,
            presence_penalty: fields.presence_penalty,
            frequency_penalty: fields.frequency_penalty,
            logit_bias: fields.logit_bias.clone(),
            stop: ("stop", stop.unwrap_or_default()),
            ignore_eos: fields.ignore_eos.unwrap_or(false),
            logprobs: self.logprobs,
        };
        let usual = app.text.default_max_tokens(left);
        let vocabulary = app.text.tokenizer.vocab_size();
        let options = overrides.apply(app.text.options(false), left, usual, vocabulary)?;
        let format = fields.response_format.clone();
        let constraint = answer_grammar(app, &SelectedTools::default(), format, false)?;
        Ok(Request {
            prompt,
            choices: self.choices,
            options,
            constraint,
            adapter,
            media_memory: None,
        })
    }
}
