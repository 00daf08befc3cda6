//! Conversations in the form that chat templates read, independent of the API that they came through.

use serde_json::{Map, Value, json};

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatMessage {
    /// Instructions.
    System(String),
    /// A message of the user.
    User(String),
    /// An answer of the model.
    Assistant {
        /// The text of the answer.
        text: String,
        /// The thoughts before the answer, which templates may keep or drop.
        thoughts: Option<String>,
        /// The tool calls: id, name and arguments.
        calls: Vec<(String, String, Map<String, Value>)>,
    },
    /// The result of a tool call.
    Tool {
        /// The id of the call.
        id: String,
        /// The name of the tool.
        name: String,
        /// The result.
        text: String,
    },
}

impl ChatMessage {
    /// Returns the message as transformers' chat templates expect it.
    pub fn to_json(&self) -> Value {
        match self {
            Self::System(text) => json!({"role": "system", "content": text}),
            Self::User(text) => json!({"role": "user", "content": text}),
            Self::Assistant {
                text,
                thoughts,
                calls,
            } => {
                let mut message = json!({"role": "assistant", "content": text});
                if let Some(thoughts) = thoughts {
                    message["reasoning_content"] = json!(thoughts);
                }
                if !calls.is_empty() {
                    let call = |(id, name, arguments): &(String, String, Map<String, Value>)| {
                        let function = json!({"name": name, "arguments": arguments});
                        json!({"id": id, "type": "function", "function": function})
                    };
                    message["tool_calls"] = calls.iter().map(call).collect();
                }
                message
            }
            Self::Tool { id, name, text } => {
                json!({"role": "tool", "tool_call_id": id, "name": name, "content": text})
            }
        }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The name.
    pub name: String,
    /// The description for the model.
    pub description: Option<String>,
    /// The JSON schema of the arguments.
    pub parameters: Option<Value>,
}

impl Tool {
    /// Returns the tool as transformers' chat templates expect it.
    pub fn to_json(&self) -> Value {
        let parameters = self.parameters.clone();
        let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        let description = self.description.clone().unwrap_or_default();
        json!({
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        })
    }
}

/// The tools that an answer may or must call.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// The answer has no tool call.
    None,
    /// The answer is a tool call.
    Required,
    /// The answer is a call of this tool.
    Named(String),
}
