//! Conversations: messages and tools in a form that does not depend on the API of the request.

use serde_json::{Map, Value, json};

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatMessage {
    /// The system prompt.
    System(String),
    /// A message of the user.
    User(String),
    /// An answer of the model, from an earlier turn of the conversation.
    Assistant {
        /// The text of the answer.
        text: String,
        /// The model's reasoning before the answer. A chat template may leave the reasoning out of the prompt.
        thoughts: Option<String>,
        /// The tool calls. Each call is a tuple of an id, the tool's name, and the arguments.
        calls: Vec<(String, String, Map<String, Value>)>,
    },
    /// The result of a tool call.
    Tool {
        /// The id of the tool call.
        id: String,
        /// The name of the tool.
        name: String,
        /// The text of the result.
        text: String,
    },
}

impl ChatMessage {
    /// Returns the message in the JSON format that chat templates of Hugging Face Transformers expect.
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
    /// The name of the tool.
    pub name: String,
    /// The description of the tool. The prompt contains this description.
    pub description: Option<String>,
    /// The JSON schema of the arguments.
    pub parameters: Option<Value>,
}

impl Tool {
    /// Returns the tool in the JSON format that chat templates of Hugging Face Transformers expect.
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

/// A rule on the tool calls of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ToolChoice {
    /// The model may call tools.
    #[default]
    Auto,
    /// The answer must not call a tool.
    None,
    /// The answer must call at least one tool.
    Required,
    /// The answer must call the tool with this name.
    Named(String),
}
