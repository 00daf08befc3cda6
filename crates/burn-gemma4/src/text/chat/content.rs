//! The content of a message: text, or parts of text and images.

use crate::vision::image::Image;
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap};

/// The content of a [`Message`](super::Message).
///
/// Text is serialized as a string. Parts are serialized as a list, in the form that chat templates expect:
/// `[{"type": "image"}, {"type": "text", "text": "…"}]`. The pixels of images are not serialized, so only text can be
/// deserialized.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum Content {
    /// A text.
    Text(String),
    /// Texts and images, in the order in which the model reads them.
    Parts(Vec<MessagePart>),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessagePart {
    /// A text.
    Text(String),
    /// An image.
    Image(Image),
}

impl Content {
    /// Returns the texts of the content, in order.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (whole, parts) = match self {
            Self::Text(text) => (Some(text.as_str()), &[][..]),
            Self::Parts(parts) => (None, &parts[..]),
        };
        let texts = parts.iter().filter_map(|part| match part {
            MessagePart::Text(text) => Some(text.as_str()),
            MessagePart::Image(_) => None,
        });
        whole.into_iter().chain(texts)
    }

    /// Returns the images of the content, in order.
    pub fn images(&self) -> impl Iterator<Item = &Image> {
        let parts = match self {
            Self::Text(_) => &[][..],
            Self::Parts(parts) => &parts[..],
        };
        parts.iter().filter_map(|part| match part {
            MessagePart::Text(_) => None,
            MessagePart::Image(image) => Some(image),
        })
    }

    /// Returns the content with other texts, which `change` computes.
    pub(crate) fn try_map_texts<E>(
        &self,
        change: impl Fn(&str) -> Result<String, E>,
    ) -> Result<Self, E> {
        Ok(match self {
            Self::Text(text) => Self::Text(change(text)?),
            Self::Parts(parts) => {
                let parts = parts.iter().map(|part| match part {
                    MessagePart::Text(text) => Ok(MessagePart::Text(change(text)?)),
                    MessagePart::Image(image) => Ok(MessagePart::Image(image.clone())),
                });
                Self::Parts(parts.collect::<Result<_, E>>()?)
            }
        })
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&String> for Content {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Vec<MessagePart>> for Content {
    fn from(parts: Vec<MessagePart>) -> Self {
        Self::Parts(parts)
    }
}

impl From<String> for MessagePart {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for MessagePart {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Image> for MessagePart {
    fn from(image: Image) -> Self {
        Self::Image(image)
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Parts(parts) => serializer.collect_seq(parts),
        }
    }
}

impl Serialize for MessagePart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Text(text) => {
                map.serialize_entry("type", "text")?;
                map.serialize_entry("text", text)?;
            }
            Self::Image(_) => map.serialize_entry("type", "image")?,
        }
        map.end()
    }
}
