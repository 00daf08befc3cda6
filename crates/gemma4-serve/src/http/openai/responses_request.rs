//! The request of `/v1/responses`, and its conversion to a request of the engine.

use super::super::app::App;
use super::super::chat_prompt::{Answers, ChatPrompt};
use super::super::client_state::ClientState;
use super::super::media::{RequestMedia, shown};
use super::super::overrides::Overrides;
use super::fields::{JsonSchemaField, ResponseFormat, ToolChoiceField, refuse_fields};
use super::messages::{Content, arguments};
use super::tools::{SelectedTools, answer_grammar, tool_choice};
use crate::engine::Request;
use crate::error::RequestError;
use crate::text::{ChatMessage, Tool};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;

/// The fields of a request to `/v1/responses`. An unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResponsesRequest {
    model: String,
    input: Input,
    instructions: Option<String>,
    max_output_tokens: Option<u64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    stream: Option<bool>,
    tools: Option<Vec<ToolField>>,
    tool_choice: Option<ToolChoiceField>,
    parallel_tool_calls: Option<bool>,
    text: Option<TextField>,
    reasoning: Option<Reasoning>,
    metadata: Option<Value>,
    #[serde(rename = "user")]
    _user: Option<Value>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Value>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<Value>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<Value>,
    // Fields with one accepted value each. The accepted value describes what the server always does, such as `store: false`.
    store: Option<Value>,
    background: Option<Value>,
    truncation: Option<Value>,
    include: Option<Vec<String>>,
    // Fields that the server refuses unless they are null.
    previous_response_id: Option<Value>,
    conversation: Option<Value>,
    prompt: Option<Value>,
    max_tool_calls: Option<Value>,
    top_logprobs: Option<Value>,
    stream_options: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// An item of the field `input`. One struct has the fields of all item types, so that the error for an unsupported type can
/// name the type.
#[derive(Debug, Deserialize)]
struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolField {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Value>,
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TextField {
    format: Option<Format>,
    verbosity: Option<Value>,
}

/// The field `text.format`: free text, any JSON object, or JSON that follows `schema`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reasoning {
    effort: Option<String>,
    #[serde(rename = "summary")]
    _summary: Option<Value>,
}

/// The request's settings that determine the form of the response.
#[derive(Clone, Debug)]
pub(crate) struct ResponsesContext {
    /// The name of the model that answers, with its adapter.
    pub model: String,
    pub stream: bool,
    /// The fields of the request that the response repeats.
    pub fields: Value,
}

impl ResponsesRequest {
    /// Converts the request to a request of the engine.
    pub fn prepare(
        self,
        app: &App,
        client: &ClientState,
    ) -> Result<(Request, ResponsesContext), RequestError> {
        let adapter = app.select_adapter(&self.model)?;
        self.refuse_unsupported()?;
        let thinking = self.enables_thinking()?;
        let mut messages: Vec<ChatMessage> = Vec::new();
        messages.extend(self.instructions.clone().map(ChatMessage::System));
        let mut media = app.media.request(&app.text, client);
        messages.extend(conversation(self.input, &mut media)?);
        let is_parallel = self.parallel_tool_calls.unwrap_or(true);
        let tools = selected_tools(
            self.tools.unwrap_or_default(),
            self.tool_choice,
            is_parallel,
        )?;
        let format = self.text.and_then(|text| text.format);
        let format = format.map(response_format).transpose()?;
        let prompt = ChatPrompt::new(app, &messages, &tools.tools, thinking, media)?;
        let left = prompt.left();
        let overrides = Overrides {
            max_tokens: self
                .max_output_tokens
                .map(|count| ("max_output_tokens", count)),
            temperature: self.temperature,
            max_temperature: 2.0,
            top_p: self.top_p,
            stop: ("stop", Vec::new()),
            ..Overrides::default()
        };
        let usual = app.text.default_max_tokens(left);
        let vocabulary = app.text.tokenizer.vocab_size();
        let mut options = overrides.apply(app.text.options(true), left, usual, vocabulary)?;
        tools.apply(&app.text.tokenizer, &mut options);
        let constraint = answer_grammar(app, &tools, format, thinking)?;
        let tool_fields: Vec<Value> = tools.tools.iter().map(tool_json).collect();
        let context = ResponsesContext {
            model: self.model,
            stream: self.stream.unwrap_or(false),
            fields: json!({
                "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
                "parallel_tool_calls": is_parallel, "temperature": options.sampling.temperature,
                "top_p": options.sampling.top_p.unwrap_or(1.0), "tools": tool_fields,
                "metadata": self.metadata.unwrap_or_else(|| json!({})),
            }),
        };
        let request = prompt.into_request(Answers {
            adapter,
            choices: 1,
            options,
            has_limit: self.max_output_tokens.is_some(),
            constraint,
        })?;
        Ok((request, context))
    }

    fn refuse_unsupported(&self) -> Result<(), RequestError> {
        let other = |value: &Option<Value>, usual: Value| {
            let value = value.clone();
            value.filter(|value| *value != usual)
        };
        let (store, background) = (
            other(&self.store, json!(false)),
            other(&self.background, json!(false)),
        );
        let truncation = other(&self.truncation, json!("disabled"));
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_ref());
        refuse_fields([
            (
                "store",
                store.as_ref(),
                "responses are not stored; expected false",
            ),
            (
                "background",
                background.as_ref(),
                "is not supported; expected false",
            ),
            (
                "truncation",
                truncation.as_ref(),
                "is not supported; expected \"disabled\"",
            ),
            (
                "previous_response_id",
                self.previous_response_id.as_ref(),
                "responses are not stored; send the whole conversation in `input`",
            ),
            (
                "conversation",
                self.conversation.as_ref(),
                "conversations are not stored; send the whole conversation in `input`",
            ),
            ("prompt", self.prompt.as_ref(), "is not supported"),
            (
                "max_tool_calls",
                self.max_tool_calls.as_ref(),
                "is not supported",
            ),
            (
                "top_logprobs",
                self.top_logprobs.as_ref(),
                "is not supported; /v1/chat/completions has logprobs",
            ),
            (
                "stream_options",
                self.stream_options.as_ref(),
                "is not supported",
            ),
            ("text.verbosity", verbosity, "is not supported"),
        ])?;
        match self.include.as_ref().and_then(|include| include.first()) {
            Some(first) => {
                let reason = format!("names {first:?}; expected an empty list");
                Err(RequestError::field("include", reason))
            }
            None => Ok(()),
        }
    }

    fn enables_thinking(&self) -> Result<bool, RequestError> {
        let effort = self
            .reasoning
            .as_ref()
            .and_then(|reasoning| reasoning.effort.as_deref());
        match effort {
            None | Some("none") => Ok(false),
            Some("minimal" | "low" | "medium" | "high" | "xhigh") => Ok(true),
            Some(effort) => {
                let reason = format!("is {effort:?}; expected \"none\" to \"xhigh\"");
                Err(RequestError::field("reasoning.effort", reason))
            }
        }
    }
}

fn tool_json(tool: &Tool) -> Value {
    json!({
        "type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
        "strict": false,
    })
}

fn response_format(format: Format) -> Result<ResponseFormat, RequestError> {
    match (format.kind.as_str(), format.schema) {
        ("text", _) => Ok(ResponseFormat::Text),
        ("json_object", _) => Ok(ResponseFormat::JsonObject),
        ("json_schema", schema) => Ok(ResponseFormat::JsonSchema {
            json_schema: JsonSchemaField::new(schema),
        }),
        (kind, _) => {
            let reason =
                format!("is {kind:?}; expected \"text\", \"json_object\" or \"json_schema\"");
            Err(RequestError::field("text.format.type", reason))
        }
    }
}

fn selected_tools(
    tools: Vec<ToolField>,
    choice: Option<ToolChoiceField>,
    is_parallel: bool,
) -> Result<SelectedTools, RequestError> {
    let tools = tools.into_iter().enumerate().map(|(index, tool)| {
        let field = |name| format!("tools[{index}].{name}");
        match (tool.kind.as_str(), tool.name) {
            ("function", Some(name)) => Ok(Tool {
                name,
                description: tool.description,
                parameters: tool.parameters,
            }),
            ("function", None) => Err(RequestError::field(field("name"), "is missing")),
            (kind, _) => {
                let reason = format!("is {kind:?}; expected \"function\"");
                Err(RequestError::field(field("type"), reason))
            }
        }
    });
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    SelectedTools::new(tools, tool_choice(choice)?, is_parallel)
}

/// Converts the field `input` to a conversation.
fn conversation(
    input: Input,
    media: &mut RequestMedia<'_>,
) -> Result<Vec<ChatMessage>, RequestError> {
    let items = match input {
        Input::Text(text) => return Ok(vec![ChatMessage::User(text.into())]),
        Input::Items(items) if items.is_empty() => {
            return Err(RequestError::field("input", "expected at least 1 item"));
        }
        Input::Items(items) => items,
    };
    let (mut messages, mut names) = (Vec::new(), HashMap::new());
    for (index, item) in items.into_iter().enumerate() {
        convert(index, item, &mut messages, &mut names, media)?;
    }
    Ok(messages)
}

fn convert(
    index: usize,
    item: Item,
    messages: &mut Vec<ChatMessage>,
    names: &mut HashMap<String, String>,
    media: &mut RequestMedia<'_>,
) -> Result<(), RequestError> {
    let field = |name: &str| format!("input[{index}].{name}");
    let missing = |name: &str| RequestError::field(field(name), "is missing");
    match item.kind.as_deref().unwrap_or("message") {
        "message" => {
            let role = item.role.ok_or_else(|| missing("role"))?;
            let content = item.content.ok_or_else(|| missing("content"))?;
            let content_field = field("content");
            let holder = format!("a message of the role {:?}", shown(&role));
            messages.push(match role.as_str() {
                "system" | "developer" => {
                    ChatMessage::System(content.into_text(&content_field, &holder)?)
                }
                "user" => ChatMessage::User(content.into_content(&content_field, media)?),
                "assistant" => ChatMessage::Assistant {
                    text: content.into_text(&content_field, &holder)?,
                    thoughts: None,
                    calls: Vec::new(),
                },
                role => {
                    let reason = format!(
                        "is {:?}; expected \"system\", \"developer\", \"user\" or \"assistant\"",
                        shown(role)
                    );
                    return Err(RequestError::field(field("role"), reason));
                }
            });
        }
        "function_call" => {
            let id = item.call_id.ok_or_else(|| missing("call_id"))?;
            let name = item.name.ok_or_else(|| missing("name"))?;
            let text = item.arguments.ok_or_else(|| missing("arguments"))?;
            let call = (
                id.clone(),
                name.clone(),
                arguments(&field("arguments"), &text)?,
            );
            names.insert(id, name);
            match messages.last_mut() {
                Some(ChatMessage::Assistant { calls, .. }) => calls.push(call),
                _ => messages.push(ChatMessage::Assistant {
                    text: String::new(),
                    thoughts: None,
                    calls: vec![call],
                }),
            }
        }
        "function_call_output" => {
            let id = item.call_id.ok_or_else(|| missing("call_id"))?;
            let output = item.output.ok_or_else(|| missing("output"))?;
            let Some(name) = names.get(&id).cloned() else {
                let reason = "does not belong to an earlier function_call";
                return Err(RequestError::field(field("call_id"), reason));
            };
            let content = output.into_content(&field("output"), media)?;
            messages.push(ChatMessage::Tool { id, name, content });
        }
        // Ignore the reasoning of earlier answers, which clients send back. Chat templates would remove it from the prompt.
        "reasoning" => (),
        kind => {
            let reason = format!(
                "is {:?}; expected \"message\", \"function_call\", \"function_call_output\" or \"reasoning\"",
                shown(kind)
            );
            return Err(RequestError::field(field("type"), reason));
        }
    }
    Ok(())
}
