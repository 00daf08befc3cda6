//! The request of `/v1/messages`, and its conversion to a request of the engine.

use super::super::app::App;
use super::super::chat_prompt::{Answers, ChatPrompt};
use super::super::client_state::ClientState;
use super::super::openai::fields::{JsonSchemaField, ResponseFormat};
use super::super::openai::tools::{SelectedTools, answer_grammar};
use super::super::overrides::Overrides;
use super::blocks::{Blocks, MessageField, conversation};
use crate::engine::{Request, ServedAdapter};
use crate::error::RequestError;
use crate::text::{ChatMessage, Tool, ToolChoice};
use serde::Deserialize;
use serde_json::Value;

/// The fields of a request to `/v1/messages`. An unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessagesRequest {
    model: String,
    messages: Vec<MessageField>,
    max_tokens: Option<u64>,
    system: Option<Blocks>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<ToolChoiceField>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    // Accepted fields without an effect. They concern Anthropic's platform, such as billing and caching.
    #[serde(rename = "metadata")]
    _metadata: Option<Value>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Value>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Value>,
    #[serde(rename = "user_profile_id")]
    _user_profile_id: Option<Value>,
    #[serde(rename = "workspace_id")]
    _workspace_id: Option<Value>,
    // Fields that the server refuses unless they are null.
    container: Option<Value>,
    mcp_servers: Option<Value>,
    context_management: Option<Value>,
    output_format: Option<Value>,
}

/// A tool that the client defines. The server refuses all other tools, because they would run on Anthropic's platform.
#[derive(Debug, Deserialize)]
struct ToolField {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
}

/// The field `tool_choice`: whether the model may, must or must not call a tool.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolChoiceField {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

/// The field `thinking`: whether the model writes a thought before its answer, and the thought's largest number of tokens.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<u64>,
    #[serde(rename = "display")]
    _display: Option<Value>,
}

/// The field `output_config`. `format` is the JSON schema of the answer. `effort` has no effect, because Gemma 4 has no
/// levels of effort.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputConfig {
    format: Option<OutputFormat>,
    #[serde(rename = "effort")]
    _effort: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum OutputFormat {
    JsonSchema { schema: Value },
}

/// The settings that determine the form of the response.
pub(crate) struct MessagesContext {
    /// The name of the model that answers, with its adapter.
    pub model: String,
    pub stream: bool,
}

/// The parts of a request's conversation: the selected adapter, the prompt, the tools, and the largest number of tokens
/// of a thought.
struct Prepared<'a> {
    adapter: Option<ServedAdapter>,
    prompt: ChatPrompt<'a>,
    tools: SelectedTools,
    thinking: Option<usize>,
}

impl MessagesRequest {
    /// Converts the request to a request of the engine.
    pub fn prepare(
        mut self,
        app: &App,
        client: &ClientState,
    ) -> Result<(Request, MessagesContext), RequestError> {
        let max_tokens = self
            .max_tokens
            .ok_or_else(|| RequestError::field("max_tokens", "is missing"))?;
        let prepared = self.prompt(app, client)?;
        if let Some(budget) = prepared.thinking.filter(|budget| *budget < usize::MAX)
            && budget as u64 >= max_tokens
        {
            let reason = format!("is {budget}; expected less than max_tokens, {max_tokens}");
            return Err(RequestError::field("thinking.budget_tokens", reason));
        }
        let overrides = Overrides {
            max_tokens: Some(("max_tokens", max_tokens)),
            temperature: self.temperature,
            max_temperature: 1.0,
            top_p: self.top_p,
            top_k: self.top_k,
            stop: ("stop_sequences", self.stop_sequences.unwrap_or_default()),
            ..Overrides::default()
        };
        let left = prepared.prompt.left();
        let vocabulary = app.text.tokenizer.vocab_size();
        let mut options = overrides.apply(app.text.options(true), left, 1, vocabulary)?;
        options.max_thinking_tokens = prepared.thinking.filter(|budget| *budget < usize::MAX);
        prepared.tools.apply(&app.text.tokenizer, &mut options);
        let may_think = prepared.thinking.is_some();
        let format = self.output_config.and_then(|config| config.format);
        let format = format.map(
            |OutputFormat::JsonSchema { schema }| ResponseFormat::JsonSchema {
                json_schema: JsonSchemaField::new(Some(schema)),
            },
        );
        let constraint = answer_grammar(app, &prepared.tools, format, may_think)?;
        let request = prepared.prompt.into_request(Answers {
            adapter: prepared.adapter,
            choices: 1,
            options,
            has_limit: true,
            constraint,
        })?;
        let context = MessagesContext {
            model: self.model,
            stream: self.stream.unwrap_or(false),
        };
        Ok((request, context))
    }

    /// Returns the number of tokens of the prompt.
    pub fn count_tokens(mut self, app: &App, client: &ClientState) -> Result<usize, RequestError> {
        self.prompt(app, client)?.prompt.count()
    }

    fn prompt<'a>(
        &mut self,
        app: &'a App,
        client: &'a ClientState,
    ) -> Result<Prepared<'a>, RequestError> {
        let adapter = app.select_adapter(&self.model)?;
        for (field, value) in [
            ("container", &self.container),
            ("mcp_servers", &self.mcp_servers),
            ("context_management", &self.context_management),
            ("output_format", &self.output_format),
        ] {
            if value.as_ref().is_some_and(|value| !value.is_null()) {
                return Err(RequestError::field(field, "is not supported"));
            }
        }
        let thinking = self.thinking_budget()?;
        let mut messages = Vec::new();
        if let Some(system) = self.system.take() {
            messages.push(ChatMessage::System(system.into_text("system")?));
        }
        let mut media = app.media.request(&app.text, client);
        let of_request = std::mem::take(&mut self.messages);
        messages.extend(conversation(of_request, &mut media)?);
        let tools = self.selected_tools()?;
        let has_thoughts = thinking.is_some();
        let prompt = ChatPrompt::new(app, &messages, &tools.tools, has_thoughts, media)?;
        Ok(Prepared {
            adapter,
            prompt,
            tools,
            thinking,
        })
    }

    /// Returns the largest number of tokens of a thought, or `None` if thinking is off. If thinking is on without a
    /// limit, the number is `usize::MAX`.
    fn thinking_budget(&self) -> Result<Option<usize>, RequestError> {
        let Some(thinking) = &self.thinking else {
            return Ok(None);
        };
        match (thinking.kind.as_str(), thinking.budget_tokens) {
            ("disabled", _) => Ok(None),
            ("adaptive", None) => Ok(Some(usize::MAX)),
            ("enabled", Some(0)) => {
                let field = "thinking.budget_tokens";
                Err(RequestError::field(field, "is 0; expected at least 1"))
            }
            ("enabled", Some(count)) => Ok(Some(usize::try_from(count).unwrap_or(usize::MAX))),
            ("enabled", None) => Err(RequestError::field("thinking.budget_tokens", "is missing")),
            ("adaptive", Some(_)) => {
                let reason = "expected only with the type \"enabled\"";
                Err(RequestError::field("thinking.budget_tokens", reason))
            }
            (kind, _) => {
                let reason =
                    format!("is {kind:?}; expected \"enabled\", \"adaptive\" or \"disabled\"");
                Err(RequestError::field("thinking.type", reason))
            }
        }
    }

    fn selected_tools(&mut self) -> Result<SelectedTools, RequestError> {
        let tools = self.tools.take().unwrap_or_default().into_iter();
        let tools = tools.enumerate().map(|(index, tool)| {
            if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
                let reason = format!("is {kind:?}; expected \"custom\"");
                return Err(RequestError::field(format!("tools[{index}].type"), reason));
            }
            let Some(parameters) = tool.input_schema else {
                let field = format!("tools[{index}].input_schema");
                return Err(RequestError::field(field, "is missing"));
            };
            Ok(Tool {
                name: tool.name,
                description: tool.description,
                parameters: Some(parameters),
            })
        });
        let tools = tools.collect::<Result<Vec<_>, _>>()?;
        let mut is_parallel = true;
        let choice = match &self.tool_choice {
            None => ToolChoice::Auto,
            Some(choice) => {
                is_parallel = !choice.disable_parallel_tool_use.unwrap_or(false);
                match (choice.kind.as_str(), &choice.name) {
                    ("auto", None) => ToolChoice::Auto,
                    ("none", None) => ToolChoice::None,
                    ("any", None) => ToolChoice::Required,
                    ("tool", Some(name)) => ToolChoice::Named(name.clone()),
                    ("tool", None) => {
                        return Err(RequestError::field("tool_choice.name", "is missing"));
                    }
                    (kind, _) => {
                        let reason = format!(
                            "is {kind:?}; expected \"auto\", \"any\", \"none\", or \"tool\" with a name"
                        );
                        return Err(RequestError::field("tool_choice.type", reason));
                    }
                }
            }
        };
        SelectedTools::new(tools, choice, is_parallel)
    }
}
