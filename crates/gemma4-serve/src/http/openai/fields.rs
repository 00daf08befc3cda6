//! Fields that several of OpenAI's APIs share.

use crate::error::RequestError;
use serde::Deserialize;
use serde_json::Value;

/// One stop string or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
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

/// The options of a stream.
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

/// The form of the answer's text.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: JsonSchemaField },
    Regex { regex: String },
    Grammar { grammar: String },
}

/// A JSON schema with its name.
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
    /// Wraps a schema without a name.
    pub fn new(schema: Option<Value>) -> Self {
        Self {
            _name: String::new(),
            _description: None,
            schema,
            _strict: None,
        }
    }
}

/// A tool.
#[derive(Debug, Deserialize)]
pub(crate) struct ToolField {
    #[serde(rename = "type")]
    pub kind: String,
    pub function: Option<FunctionField>,
}

/// The function of a tool.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionField {
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Value>,
    #[serde(rename = "strict")]
    pub _strict: Option<bool>,
}

/// The choice of a tool: a word or a tool.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
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
    /// The name, which the Responses API has beside the type.
    pub name: Option<String>,
}

/// The name of a function.
#[derive(Debug, Deserialize)]
pub(crate) struct FunctionName {
    pub name: String,
}

/// Refuses fields that the server does not support. A field that is `null` counts as missing.
pub(crate) fn refuse_fields<const N: usize>(
    fields: [(&str, Option<&Value>, &str); N],
) -> Result<(), RequestError> {
    let mut set = fields.into_iter();
    match set.find(|(_, value, _)| value.is_some_and(|value| !value.is_null())) {
        Some((field, _, reason)) => Err(RequestError::field(field, reason)),
        None => Ok(()),
    }
}
