//! The request of `/v1/chat/completions`, and its conversion to a request of the engine.

use super::super::app::App;
use super::super::chat_prompt::{Answers, ChatPrompt};
use super::super::client_state::ClientState;
use super::super::overrides::{MAX_TOP_LOGPROBS, Overrides};
use super::fields::{
    ResponseFormat, Stop, StreamOptions, ToolChoiceField, ToolField, refuse_fields,
};
use super::messages::{MessageField, conversation};
use super::tools::{answer_grammar, select_tools};
use crate::engine::Request;
use crate::error::RequestError;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The fields of a request to `/v1/chat/completions`. An unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatRequest {
    model: String,
    messages: Vec<MessageField>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
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
    logprobs: Option<bool>,
    top_logprobs: Option<u64>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    response_format: Option<ResponseFormat>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<ToolChoiceField>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    chat_template_kwargs: Option<TemplateVariables>,
    // Accepted fields without an effect. They concern OpenAI's platform, such as billing and caching.
    #[serde(rename = "user")]
    _user: Option<Value>,
    #[serde(rename = "metadata")]
    _metadata: Option<Value>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Value>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<Value>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<Value>,
    // Fields that the server refuses unless they are null. `store: false` and `modalities: ["text"]` are also accepted.
    store: Option<Value>,
    modalities: Option<Value>,
    audio: Option<Value>,
    prediction: Option<Value>,
    functions: Option<Value>,
    function_call: Option<Value>,
    web_search_options: Option<Value>,
    verbosity: Option<Value>,
}

/// The variables of the chat template that a request may set.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TemplateVariables {
    enable_thinking: Option<bool>,
}

/// The request's settings that determine the form of the response.
#[derive(Clone, Debug)]
pub(crate) struct ChatContext {
    /// The name of the model that answers, with its adapter.
    pub model: String,
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
    pub has_logprobs: bool,
    pub top_logprobs: usize,
}

impl ChatRequest {
    /// Converts the request to a request of the engine.
    pub fn prepare(
        self,
        app: &App,
        client: &ClientState,
    ) -> Result<(Request, ChatContext), RequestError> {
        let adapter = app.select_adapter(&self.model)?;
        self.refuse_unsupported()?;
        let thinking = self.enables_thinking()?;
        let context = self.context()?;
        let mut media = app.media.request(&app.text, client);
        let messages = conversation(self.messages, &mut media)?;
        let tools = select_tools(
            self.tools.unwrap_or_default(),
            self.tool_choice,
            self.parallel_tool_calls.unwrap_or(true),
        )?;
        let prompt = ChatPrompt::new(app, &messages, &tools.tools, thinking, media)?;
        let left = prompt.left();
        let max_tokens = match (self.max_completion_tokens, self.max_tokens) {
            (Some(count), _) => Some(("max_completion_tokens", count)),
            (None, count) => count.map(|count| ("max_tokens", count)),
        };
        let has_limit = max_tokens.is_some();
        let overrides = Overrides {
            max_tokens,
            min_tokens: self.min_tokens,
            temperature: self.temperature,
            max_temperature: 2.0,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias,
            stop: (
                "stop",
                self.stop.map(Stop::into_strings).unwrap_or_default(),
            ),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            logprobs: context.has_logprobs.then_some(context.top_logprobs),
        };
        let vocabulary = app.text.tokenizer.vocab_size();
        let usual = app.text.default_max_tokens(left);
        let mut options = overrides.apply(app.text.options(true), left, usual, vocabulary)?;
        tools.apply(&app.text.tokenizer, &mut options);
        let constraint = answer_grammar(app, &tools, self.response_format, thinking)?;
        let request = prompt.into_request(Answers {
            adapter,
            choices: context.choices,
            options,
            has_limit,
            constraint,
        })?;
        Ok((request, context))
    }

    fn refuse_unsupported(&self) -> Result<(), RequestError> {
        // Accept `store: false` and `modalities: ["text"]`, because the server never stores responses and returns text only.
        let store = self.store.as_ref().filter(|value| **value != false);
        let text = serde_json::json!(["text"]);
        let modalities = self.modalities.as_ref().filter(|value| **value != text);
        refuse_fields([
            ("store", store, "responses are not stored; expected false"),
            ("modalities", modalities, "expected [\"text\"]"),
            ("audio", self.audio.as_ref(), "is not supported"),
            ("prediction", self.prediction.as_ref(), "is not supported"),
            (
                "functions",
                self.functions.as_ref(),
                "is not supported; use `tools`",
            ),
            (
                "function_call",
                self.function_call.as_ref(),
                "is not supported; use `tool_choice`",
            ),
            (
                "web_search_options",
                self.web_search_options.as_ref(),
                "is not supported",
            ),
            ("verbosity", self.verbosity.as_ref(), "is not supported"),
        ])
    }

    fn enables_thinking(&self) -> Result<bool, RequestError> {
        let variables = self.chat_template_kwargs.as_ref();
        let by_variable = variables.and_then(|variables| variables.enable_thinking);
        let by_effort = match self.reasoning_effort.as_deref() {
            None => None,
            Some("none") => Some(false),
            Some("minimal" | "low" | "medium" | "high" | "xhigh") => Some(true),
            Some(effort) => {
                let reason = format!(
                    "is {effort:?}; expected \"none\", \"minimal\", \"low\", \"medium\", \"high\" or \"xhigh\""
                );
                return Err(RequestError::field("reasoning_effort", reason));
            }
        };
        Ok(by_variable.or(by_effort).unwrap_or(false))
    }

    fn context(&self) -> Result<ChatContext, RequestError> {
        let has_logprobs = self.logprobs.unwrap_or(false);
        let top_logprobs = match self.top_logprobs {
            Some(_) if !has_logprobs => {
                let reason = "needs `logprobs`; expected `logprobs: true`";
                return Err(RequestError::field("top_logprobs", reason));
            }
            Some(count) if count > MAX_TOP_LOGPROBS as u64 => {
                let reason = format!("is {count}; expected at most {MAX_TOP_LOGPROBS}");
                return Err(RequestError::field("top_logprobs", reason));
            }
            count => count.unwrap_or(0) as usize,
        };
        let stream = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !stream {
            let reason = "needs `stream`; expected `stream: true`";
            return Err(RequestError::field("stream_options", reason));
        }
        let options = self.stream_options.as_ref();
        Ok(ChatContext {
            model: self.model.clone(),
            choices: usize::try_from(self.n.unwrap_or(1)).unwrap_or(usize::MAX),
            stream,
            include_usage: options.is_some_and(StreamOptions::includes_usage),
            has_logprobs,
            top_logprobs,
        })
    }
}
