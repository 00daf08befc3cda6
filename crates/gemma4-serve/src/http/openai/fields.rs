//! Request fields that several of OpenAI's APIs have in common.

use crate::error::RequestError;
use serde::Deserialize;
use serde_json::Value;

/// The field `stop`: one stop string or a list of stop strings.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum Stop {
    One(String),
    Several(Vec<String>),
}

impl Stop {
    pub fn into_strings(self) -> Vec<String> {
        match self {
            Self::One(string) => vec![string],
            Self::Several(strings) => strings,
        }
    }
}

/// The field `stream_options`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    include_usage: Option<bool>,
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

impl StreamOptions {
    pub fn includes_usage(&self) -> bool {
        self.include_usage.unwrap_or(false)
    }
}

/// The field `response_format`: free text, JSON, or text that matches a regular expression or a grammar.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: JsonSchemaField },
    Regex { regex: String },
    Grammar { grammar: String },
}

/// The field `json_schema` of a response format.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JsonSchemaField {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    pub schema: Option<Value>,
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

impl JsonSchemaField {
    /// Wraps a JSON schema. The other fields stay empty, because they have no effect on the answer.
    pub fn new(schema: Option<Value>) -> Self {
        Self {
            _name: String::new(),
            _description: None,
            schema,
            _strict: None,
        }
    }
}

/// An entry of the field `tools`.
#[derive(Debug, Deserialize)]
pub(crate) struct ToolField {
    #[serde(rename = "type")]
    pub kind: String,
    pub function: Option<FunctionField>,
}

/// A function that the model may call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionField {
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Value>,
    #[serde(rename = "strict")]
    pub _strict: Option<bool>,
}

/// The field `tool_choice`: `auto`, `none`, `required`, or a tool that the answer must call.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a word or an object with the type of a tool"
)]
pub(crate) enum ToolChoiceField {
    Word(String),
    Tool(NamedTool),
}

/// A tool that the answer must call.
#[derive(Debug, Deserialize)]
pub(crate) struct NamedTool {
    #[serde(rename = "type")]
    pub kind: String,
    pub function: Option<FunctionName>,
    /// The name of the function. The Responses API gives the name here, and not in `function`.
    pub name: Option<String>,
}

/// The name of the function that the answer must call.
#[derive(Debug, Deserialize)]
pub(crate) struct FunctionName {
    pub name: String,
}

/// Returns an error for the first field that is set. A null field counts as not set.
pub(crate) fn refuse_fields<const N: usize>(
    fields: [(&str, Option<&Value>, &str); N],
) -> Result<(), RequestError> {
    let mut set = fields.into_iter();
    match set.find(|(_, value, _)| value.is_some_and(|value| !value.is_null())) {
        Some((field, _, reason)) => Err(RequestError::field(field, reason)),
        None => Ok(()),
    }
}
