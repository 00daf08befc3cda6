//! An image or an audio clip of an example.

use super::part::{Kind, MediaPart};
use super::source::{Location, Origin};
use burn_gemma4::{
    Audio, BatchMedia, Image, MediaKinds, PreparedAudio, PreparedImage, PromptEncoder,
};
use std::{ops::Range, sync::Arc};

/// An image or an audio clip in an example, in the place of its placeholders.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExampleMedium {
    /// The positions of the placeholders in the tokens of the example, one for each soft token.
    pub tokens: Range<usize>,
    /// The image or the audio clip.
    pub medium: Arc<Medium>,
}

/// An image or an audio clip in a file, which is read when a batch needs it. The memory of a data set is therefore
/// independent of the sizes of its images and clips.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Medium {
    kind: Kind,
    location: Location,
    origin: Origin,
    /// The indices of the message and of the part in the line.
    part: [usize; 2],
    /// The number of tokens in a prompt, with a begin token and an end token.
    tokens: usize,
}

/// An image or an audio clip in the form in which a model reads it.
pub(super) enum Prepared {
    Image(PreparedImage),
    Audio(PreparedAudio),
}

impl Medium {
    /// Reads the number of tokens of a part's medium. The header of an image suffices, and a clip is decoded.
    pub(crate) fn read(
        part: &MediaPart,
        origin: &Origin,
        encoder: &PromptEncoder,
    ) -> Result<Self, String> {
        let mut medium = Self {
            kind: part.kind,
            location: part.location.clone(),
            origin: origin.clone(),
            part: [part.message, part.part],
            tokens: 0,
        };
        medium.tokens = medium
            .count_tokens(encoder)
            .map_err(|reason| format!("{}: {reason}", medium.part_name()))?;
        Ok(medium)
    }

    fn count_tokens(&self, encoder: &PromptEncoder) -> Result<usize, String> {
        let said = |error: burn_gemma4::Gemma4Error| error.to_string();
        match self.kind {
            Kind::Image { soft_tokens } => {
                // A model without vision has a better reason than the file.
                encoder.check_vision().map_err(said)?;
                let header = Image::header(&self.contents()?).map_err(said)?;
                let size = encoder.image_size(&header, soft_tokens).map_err(said)?;
                Ok(size.tokens)
            }
            Kind::Audio => {
                encoder.check_audio().map_err(said)?;
                match self.prepared(encoder)? {
                    Prepared::Audio(clip) => Ok(clip.tokens()),
                    Prepared::Image(_) => unreachable!("a clip is prepared as audio"),
                }
            }
        }
    }

    /// The number of tokens in a prompt, with a begin token and an end token.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The kind of the medium.
    pub fn kinds(&self) -> MediaKinds {
        match self.kind {
            Kind::Image { .. } => MediaKinds {
                images: true,
                audio: false,
            },
            Kind::Audio => MediaKinds {
                images: false,
                audio: true,
            },
        }
    }

    fn part_name(&self) -> String {
        let [message, part] = self.part.map(|index| index + 1);
        format!("\"content\" of message {message}, part {part}")
    }

    fn contents(&self) -> Result<Vec<u8>, String> {
        let [message, part] = self.part;
        self.location.read(&self.origin, message, part)
    }

    fn prepared(&self, encoder: &PromptEncoder) -> Result<Prepared, String> {
        let bytes = self.contents()?;
        let prepared = match self.kind {
            Kind::Image { soft_tokens } => Image::from_bytes(&bytes)
                .and_then(|image| match soft_tokens {
                    Some(count) => image.with_max_soft_tokens(count),
                    None => Ok(image),
                })
                .and_then(|image| encoder.prepare(&image))
                .map(Prepared::Image),
            Kind::Audio => Audio::from_bytes(&bytes)
                .and_then(|clip| encoder.prepare_audio(&clip))
                .map(Prepared::Audio),
        };
        prepared.map_err(|error| error.to_string())
    }

    /// Reads, decodes and prepares the medium for a batch.
    ///
    /// # Errors
    /// Returns a reason that names the line if the file cannot be decoded, or if it has changed since
    /// [`read`](Self::read).
    pub(super) fn prepare(&self, encoder: &PromptEncoder) -> Result<Prepared, String> {
        let named = |reason: String| {
            let Origin { file, line, .. } = &self.origin;
            format!(
                "{}: line {line}: {}: {reason}",
                file.display(),
                self.part_name()
            )
        };
        let prepared = self.prepared(encoder).map_err(named)?;
        let (found, expected) = (prepared.tokens(), self.tokens);
        match found == expected {
            true => Ok(prepared),
            false => Err(named(format!(
                "has {found} tokens, but had {expected} when the file was read; expected the same file during the whole run"
            ))),
        }
    }
}

impl Prepared {
    fn tokens(&self) -> usize {
        match self {
            Self::Image(image) => image.tokens(),
            Self::Audio(clip) => clip.tokens(),
        }
    }

    /// Adds the medium to a batch, in whose row it begins at position `start`.
    pub fn add_to(&self, batch: &mut BatchMedia, row: usize, start: usize) {
        match self {
            Self::Image(image) => batch.add_image(row, start, image),
            Self::Audio(clip) => batch.add_audio(row, start, clip),
        }
    }
}
