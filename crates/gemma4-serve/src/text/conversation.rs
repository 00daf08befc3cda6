//! Conversations: messages and tools in a form that does not depend on the API of the request.

use serde_json::{Map, Value, json};

/// The content of a message of the user or of a tool: texts, images and audio, in the order in which the model reads
/// them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Content(Vec<Part>);

/// A part of a message's content. An image or an audio clip is the index by which the caller knows it.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A text.
    Text(String),
    /// An image.
    Image(usize),
    /// An audio clip.
    Audio(usize),
}

impl Content {
    /// Returns the indices of the images and audio clips in order.
    pub fn media(&self) -> impl Iterator<Item = usize> {
        self.0.iter().filter_map(|part| match part {
            Part::Image(index) | Part::Audio(index) => Some(*index),
            Part::Text(_) => None,
        })
    }

    /// Returns the content in the JSON format that chat templates of Hugging Face Transformers expect. Content without
    /// images and audio is a text, because some templates accept only texts.
    fn to_json(&self) -> Value {
        let texts = self.0.iter().map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Image(_) | Part::Audio(_) => None,
        });
        match texts.collect::<Option<String>>() {
            Some(text) => Value::String(text),
            None => self.0.iter().map(Part::to_json).collect(),
        }
    }
}

impl Part {
    fn to_json(&self) -> Value {
        match self {
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::Image(_) => json!({"type": "image"}),
            Self::Audio(_) => json!({"type": "audio"}),
        }
    }
}

impl From<Vec<Part>> for Content {
    fn from(parts: Vec<Part>) -> Self {
        Self(parts)
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self(vec![Part::Text(text)])
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatMessage {
    /// The system prompt.
    System(String),
    /// A message of the user.
    User(Content),
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
        /// The texts, images and audio of the result.
        content: Content,
    },
}

impl ChatMessage {
    /// Returns the indices of the message's images and audio clips in order.
    pub fn media(&self) -> impl Iterator<Item = usize> {
        let content = match self {
            Self::User(content) | Self::Tool { content, .. } => Some(content),
            Self::System(_) | Self::Assistant { .. } => None,
        };
        content.into_iter().flat_map(Content::media)
    }

    /// Returns the message in the JSON format that chat templates of Hugging Face Transformers expect.
    pub fn to_json(&self) -> Value {
        match self {
            Self::System(text) => json!({"role": "system", "content": text}),
            Self::User(content) => json!({"role": "user", "content": content.to_json()}),
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
            Self::Tool { id, name, content } => {
                let content = content.to_json();
                json!({"role": "tool", "tool_call_id": id, "name": name, "content": content})
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
