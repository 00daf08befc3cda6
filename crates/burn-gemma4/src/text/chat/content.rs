//! The content of a message: text, or parts of text, images, videos and audio.

use crate::audio::clip::Audio;
use crate::vision::image::Image;
use crate::vision::video::Video;
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap};

/// The content of a [`Message`](super::Message).
///
/// Text is serialized as a string. Parts are serialized as a list, in the form that chat templates expect:
/// `[{"type": "image"}, {"type": "text", "text": "…"}]`. Pixels and samples are not serialized, so only text can be
/// deserialized.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub enum Content {
    /// A text.
    Text(String),
    /// Texts, images, videos and audio, in the order in which the model reads them.
    Parts(Vec<MessagePart>),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessagePart {
    /// A text.
    Text(String),
    /// An image.
    Image(Image),
    /// A video.
    Video(Video),
    /// An audio clip.
    Audio(Audio),
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
            MessagePart::Image(_) | MessagePart::Video(_) | MessagePart::Audio(_) => None,
        });
        whole.into_iter().chain(texts)
    }

    /// Returns the images of the content, in order.
    pub fn images(&self) -> impl Iterator<Item = &Image> {
        self.parts().iter().filter_map(|part| match part {
            MessagePart::Text(_) | MessagePart::Video(_) | MessagePart::Audio(_) => None,
            MessagePart::Image(image) => Some(image),
        })
    }

    /// Returns the videos of the content, in order.
    pub fn videos(&self) -> impl Iterator<Item = &Video> {
        self.parts().iter().filter_map(|part| match part {
            MessagePart::Text(_) | MessagePart::Image(_) | MessagePart::Audio(_) => None,
            MessagePart::Video(video) => Some(video),
        })
    }

    /// Returns the audio clips of the content, in order.
    pub fn audio(&self) -> impl Iterator<Item = &Audio> {
        self.parts().iter().filter_map(|part| match part {
            MessagePart::Text(_) | MessagePart::Image(_) | MessagePart::Video(_) => None,
            MessagePart::Audio(audio) => Some(audio),
        })
    }

    /// True if the content has images, videos or audio.
    pub(crate) fn has_media(&self) -> bool {
        let is_text = |part: &MessagePart| matches!(part, MessagePart::Text(_));
        !self.parts().iter().all(is_text)
    }

    fn parts(&self) -> &[MessagePart] {
        match self {
            Self::Text(_) => &[],
            Self::Parts(parts) => parts,
        }
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
                    MessagePart::Image(_) | MessagePart::Video(_) | MessagePart::Audio(_) => {
                        Ok(part.clone())
                    }
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

impl From<Video> for MessagePart {
    fn from(video: Video) -> Self {
        Self::Video(video)
    }
}

impl From<Audio> for MessagePart {
    fn from(audio: Audio) -> Self {
        Self::Audio(audio)
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
            Self::Video(_) => map.serialize_entry("type", "video")?,
            Self::Audio(_) => map.serialize_entry("type", "audio")?,
        }
        map.end()
    }
}
