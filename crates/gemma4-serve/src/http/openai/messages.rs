//! The messages of a chat request.

use super::super::media::{Kind, MediaSource, RequestMedia, shown, soft_tokens};
use crate::error::RequestError;
use crate::text::{self, ChatMessage};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// A message in the client's request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageField {
    role: String,
    content: Option<Content>,
    #[serde(rename = "name")]
    _name: Option<String>,
    tool_calls: Option<Vec<CallField>>,
    tool_call_id: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
    // Fields of the server's answers, which clients send back with later requests.
    #[serde(rename = "refusal")]
    _refusal: Option<Value>,
    #[serde(rename = "annotations")]
    _annotations: Option<Value>,
    audio: Option<Value>,
    function_call: Option<Value>,
}

/// The content of a message: a text or a list of parts.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of parts")]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// A part of a message's content: a text, an image or audio. One struct has the fields of all part types, so that the
/// error for an unsupported type can name the type.
#[derive(Debug, Deserialize)]
pub(crate) struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    /// An object with `url` and `detail` in the API of chat completions, or a URL in the API of responses.
    image_url: Option<Value>,
    detail: Option<Value>,
    /// An object with `data` and `format`.
    input_audio: Option<Value>,
    /// An object with `url`. This part is vLLM's.
    audio_url: Option<Value>,
    file_id: Option<Value>,
    source: Option<Value>,
}

/// A tool call in an assistant message, which the client sends back.
#[derive(Debug, Deserialize)]
pub(crate) struct CallField {
    id: String,
    function: CallFunction,
}

#[derive(Debug, Deserialize)]
struct CallFunction {
    name: String,
    arguments: String,
}

impl Content {
    /// Returns the concatenated text of the content. `holder` names the kind of message in the error for other parts.
    pub fn into_text(self, field: &str, holder: &str) -> Result<String, RequestError> {
        let parts = match self {
            Self::Text(text) => return Ok(text),
            Self::Parts(parts) => parts,
        };
        let texts = parts.into_iter().enumerate().map(|(index, part)| {
            let field = format!("{field}[{index}]");
            match part.kind.as_str() {
                "text" | "input_text" | "output_text" => part.into_text(&field),
                kind => {
                    let reason = format!(
                        "is {:?}; expected \"text\", because {holder} has text only",
                        shown(kind)
                    );
                    Err(RequestError::field(format!("{field}.type"), reason))
                }
            }
        });
        texts.collect()
    }

    /// Returns the texts, images and audio of the content. `media` collects the images and audio.
    pub fn into_content(
        self,
        field: &str,
        media: &mut RequestMedia<'_>,
    ) -> Result<text::Content, RequestError> {
        let parts = match self {
            Self::Text(text) => return Ok(text.into()),
            Self::Parts(parts) => parts,
        };
        let parts = parts.into_iter().enumerate().map(|(index, part)| {
            let field = format!("{field}[{index}]");
            Ok(match part.kind.as_str() {
                "text" | "input_text" | "output_text" => text::Part::Text(part.into_text(&field)?),
                "image_url" => text::Part::Image(part.add_image_url(&field, media)?),
                "input_image" => text::Part::Image(part.add_input_image(&field, media)?),
                "input_audio" => text::Part::Audio(part.add_input_audio(&field, media)?),
                "audio_url" => text::Part::Audio(part.add_audio_url(&field, media)?),
                kind => {
                    let reason =
                        format!("is {:?}; expected a text, an image or audio", shown(kind));
                    return Err(RequestError::field(format!("{field}.type"), reason));
                }
            })
        });
        Ok(parts.collect::<Result<Vec<_>, _>>()?.into())
    }
}

impl ContentPart {
    /// Refuses fields of other parts, which the model would not read. `own` is the field of the part's medium.
    fn refuse_others(&self, field: &str, own: Option<&str>) -> Result<(), RequestError> {
        for (name, value, noun) in [
            ("image_url", &self.image_url, "an image"),
            ("input_audio", &self.input_audio, "audio"),
            ("audio_url", &self.audio_url, "audio"),
            ("file_id", &self.file_id, "an image"),
            ("source", &self.source, "an image"),
        ] {
            let is_set = value.as_ref().is_some_and(|value| !value.is_null());
            if is_set && own != Some(name) {
                let reason = format!(
                    "is in a part of the type {:?}; expected only in {noun}",
                    self.kind
                );
                return Err(RequestError::field(format!("{field}.{name}"), reason));
            }
        }
        Ok(())
    }

    fn into_text(self, field: &str) -> Result<String, RequestError> {
        self.refuse_others(field, None)?;
        let missing = || RequestError::field(format!("{field}.text"), "is missing");
        self.text.ok_or_else(missing)
    }

    /// Adds an image in the form of chat completions to the media of the request. Returns its index.
    fn add_image_url(
        self,
        field: &str,
        media: &mut RequestMedia<'_>,
    ) -> Result<usize, RequestError> {
        self.refuse_others(field, Some("image_url"))?;
        let field = format!("{field}.image_url");
        let [url, detail] = fields_of(&field, self.image_url, ["url", "detail"])?;
        let soft_tokens = detail_of(&field, detail)?;
        let field = format!("{field}.url");
        let url = required_text(&field, url)?;
        media.add(&field, Kind::Image { soft_tokens }, MediaSource::Url(url))
    }

    /// Adds an image in the form of responses to the media of the request. Returns its index.
    fn add_input_image(
        self,
        field: &str,
        media: &mut RequestMedia<'_>,
    ) -> Result<usize, RequestError> {
        if self.file_id.as_ref().is_some_and(|id| !id.is_null()) {
            let reason = "is not supported, because this server stores no files; use `image_url`";
            return Err(RequestError::field(format!("{field}.file_id"), reason));
        }
        self.refuse_others(field, Some("image_url"))?;
        let soft_tokens = detail_of(field, self.detail)?;
        let field = format!("{field}.image_url");
        let url = required_text(&field, self.image_url)?;
        media.add(&field, Kind::Image { soft_tokens }, MediaSource::Url(url))
    }

    /// Adds audio with its data to the media of the request. Returns its index.
    fn add_input_audio(
        self,
        field: &str,
        media: &mut RequestMedia<'_>,
    ) -> Result<usize, RequestError> {
        self.refuse_others(field, Some("input_audio"))?;
        let field = format!("{field}.input_audio");
        let [data, format] = fields_of(&field, self.input_audio, ["data", "format"])?;
        let data = required_text(&format!("{field}.data"), data)?;
        let format = required_text(&format!("{field}.format"), format)?;
        media.add(
            &field,
            Kind::Audio,
            MediaSource::InputAudio { format, data },
        )
    }

    /// Adds audio with its URL to the media of the request. Returns its index.
    fn add_audio_url(
        self,
        field: &str,
        media: &mut RequestMedia<'_>,
    ) -> Result<usize, RequestError> {
        self.refuse_others(field, Some("audio_url"))?;
        let field = format!("{field}.audio_url");
        let [url] = fields_of(&field, self.audio_url, ["url"])?;
        let field = format!("{field}.url");
        let url = required_text(&field, url)?;
        media.add(&field, Kind::Audio, MediaSource::Url(url))
    }
}

/// Returns the values of the fields `names` of an object, which has no other fields.
fn fields_of<const N: usize>(
    field: &str,
    value: Option<Value>,
    names: [&str; N],
) -> Result<[Option<Value>; N], RequestError> {
    let mut fields = match value {
        Some(Value::Object(fields)) => fields,
        None | Some(Value::Null) => return Err(RequestError::field(field, "is missing")),
        Some(_) => {
            let reason = format!("expected an object with the field `{}`", names[0]);
            return Err(RequestError::field(field, reason));
        }
    };
    let values = names.map(|name| fields.remove(name));
    match fields.keys().next() {
        Some(name) => {
            let expected = names.map(|name| format!("`{name}`")).join(" and ");
            let reason = format!(
                "has the unknown field {:?}; expected {expected}",
                shown(name)
            );
            Err(RequestError::field(field, reason))
        }
        None => Ok(values),
    }
}

/// Returns a text that must not be missing. The error does not repeat the value.
fn required_text(field: &str, value: Option<Value>) -> Result<String, RequestError> {
    text_of(field, value)?.ok_or_else(|| RequestError::field(field, "is missing"))
}

/// Returns the largest number of soft tokens that the option `detail` of the object `field` sets.
fn detail_of(field: &str, detail: Option<Value>) -> Result<Option<usize>, RequestError> {
    let field = format!("{field}.detail");
    let detail = text_of(&field, detail)?;
    soft_tokens(&field, detail.as_deref())
}

/// Returns an optional text. The error does not repeat the value.
fn text_of(field: &str, value: Option<Value>) -> Result<Option<String>, RequestError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(RequestError::field(field, "expected a text")),
    }
}

/// Parses the arguments of a tool call in an assistant message. The arguments are the text of a JSON object.
pub(crate) fn arguments(field: &str, text: &str) -> Result<Map<String, Value>, RequestError> {
    match serde_json::from_str(text) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        // Accept an empty text, which some clients send for a tool call without arguments.
        _ if text.trim().is_empty() => Ok(Map::new()),
        _ => Err(RequestError::field(field, "expected a JSON object as text")),
    }
}

/// Converts the messages of a request to a conversation.
pub(crate) fn conversation(
    messages: Vec<MessageField>,
    media: &mut RequestMedia<'_>,
) -> Result<Vec<ChatMessage>, RequestError> {
    if messages.is_empty() {
        return Err(RequestError::field(
            "messages",
            "expected at least 1 message",
        ));
    }
    let mut names = HashMap::new();
    let converted = messages.into_iter().enumerate();
    converted
        .map(|(index, message)| convert(index, message, &mut names, media))
        .collect()
}

/// Converts a message. `names` maps the ids of earlier tool calls to the names of their tools.
fn convert(
    index: usize,
    message: MessageField,
    names: &mut HashMap<String, String>,
    media: &mut RequestMedia<'_>,
) -> Result<ChatMessage, RequestError> {
    let field = |name: &str| format!("messages[{index}].{name}");
    let refuse = |name: &str, reason: &str| Err(RequestError::field(field(name), reason));
    if message.audio.is_some_and(|audio| !audio.is_null()) {
        return refuse("audio", "is not supported");
    }
    if message.function_call.is_some_and(|call| !call.is_null()) {
        return refuse("function_call", "is not supported; use `tool_calls`");
    }
    let mut content = message.content;
    let mut of_user = None;
    if message.role == "user" {
        let content = content.take();
        let content = content.map(|content| content.into_content(&field("content"), media));
        of_user = content.transpose()?;
    }
    let holder = format!("a message of the role {:?}", shown(&message.role));
    let content = content.map(|content| content.into_text(&field("content"), &holder));
    let content = content.transpose()?;
    let calls = message.tool_calls.unwrap_or_default();
    if message.role != "assistant" && !calls.is_empty() {
        return refuse("tool_calls", "expected only in messages of the assistant");
    }
    match (message.role.as_str(), content) {
        ("assistant", content) => {
            if content.is_none() && calls.is_empty() {
                return refuse("content", "is missing");
            }
            let calls = calls.into_iter().enumerate().map(|(call, value)| {
                let field = field(&format!("tool_calls[{call}].function.arguments"));
                let arguments = arguments(&field, &value.function.arguments)?;
                names.insert(value.id.clone(), value.function.name.clone());
                Ok((value.id, value.function.name, arguments))
            });
            Ok(ChatMessage::Assistant {
                calls: calls.collect::<Result<_, RequestError>>()?,
                text: content.unwrap_or_default(),
                thoughts: message.reasoning_content,
            })
        }
        ("user", _) => match of_user {
            Some(content) => Ok(ChatMessage::User(content)),
            None => refuse("content", "is missing"),
        },
        ("system" | "developer" | "tool", None) => refuse("content", "is missing"),
        ("system" | "developer", Some(text)) => Ok(ChatMessage::System(text)),
        ("tool", Some(text)) => {
            let Some(id) = message.tool_call_id else {
                return refuse("tool_call_id", "is missing");
            };
            match names.get(&id) {
                Some(name) => Ok(ChatMessage::Tool {
                    name: name.clone(),
                    id,
                    content: text.into(),
                }),
                None => refuse("tool_call_id", "does not belong to an earlier tool call"),
            }
        }
        (role, _) => {
            let reason = format!(
                "is {:?}; expected \"system\", \"developer\", \"user\", \"assistant\" or \"tool\"",
                shown(role)
            );
            refuse("role", &reason)
        }
    }
}
