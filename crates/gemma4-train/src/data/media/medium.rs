//! An image or an audio clip of an example.

use super::part::{Kind, MediaPart};
use super::source::{Location, Origin, changed};
use burn_gemma4::{
    Audio, BatchMedia, Image, MediaKinds, PreparedAudio, PreparedImage, PromptEncoder,
};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
    sync::Arc,
};

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Medium {
    kind: Kind,
    location: Location,
    origin: Origin,
    /// The indices of the message and of the part in the line.
    part: [usize; 2],
    /// The number of tokens in a prompt, with a begin token and an end token.
    tokens: usize,
    contents: Fingerprint,
}

/// The length and a hash of the contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Fingerprint {
    bytes: usize,
    hash: u64,
}

impl Fingerprint {
    fn of(contents: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(contents);
        Self {
            bytes: contents.len(),
            hash: hasher.finish(),
        }
    }
}

/// The hash depends on the contents, and not on their place. The same data in another folder have the same hash.
impl Hash for Medium {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.kind, self.tokens, self.contents).hash(state);
    }
}

/// An image or an audio clip in the form in which a model reads it.
pub(super) enum Prepared {
    Image(PreparedImage),
    Audio(PreparedAudio),
}

impl Medium {
    /// Reads the number of tokens of a part's medium. The header of an image suffices, and a clip is decoded. Truncated
    /// images are refused.
    pub(crate) fn read(
        part: &MediaPart,
        origin: &Origin,
        encoder: &PromptEncoder,
    ) -> Result<Self, String> {
        let named = |reason: String| format!("{}: {reason}", part_name([part.message, part.part]));
        check_kind(part.kind, encoder).map_err(named)?;
        let contents = part.location.read(origin).map_err(named)?;
        Ok(Self {
            kind: part.kind,
            location: part.location.clone(),
            origin: origin.clone(),
            part: [part.message, part.part],
            tokens: count_tokens(part.kind, &contents, encoder).map_err(named)?,
            contents: Fingerprint::of(&contents),
        })
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

    /// Reads, decodes and prepares the medium for a batch.
    ///
    /// # Errors
    /// Returns a reason that names the line if the file cannot be decoded, or if it has changed since
    /// [`read`](Self::read).
    pub(super) fn prepare(&self, encoder: &PromptEncoder) -> Result<Prepared, String> {
        let contents = self.location.read(&self.origin);
        let prepared = contents.and_then(|contents| {
            if Fingerprint::of(&contents) != self.contents {
                return Err(changed());
            }
            prepare(self.kind, &contents, encoder)
        });
        prepared.map_err(|reason| {
            let Origin { file, line, .. } = &self.origin;
            let part = part_name(self.part);
            format!("{}: line {line}: {part}: {reason}", file.display())
        })
    }
}

/// Returns the name of the part with these indices of the message and of the part.
fn part_name(part: [usize; 2]) -> String {
    let [message, part] = part.map(|index| index + 1);
    format!("\"content\" of message {message}, part {part}")
}

/// Refuses a kind that the model does not read. This is a better reason than a problem of the file.
fn check_kind(kind: Kind, encoder: &PromptEncoder) -> Result<(), String> {
    let checked = match kind {
        Kind::Image { .. } => encoder.check_vision(),
        Kind::Audio => encoder.check_audio(),
    };
    checked.map_err(|error| error.to_string())
}

fn count_tokens(kind: Kind, contents: &[u8], encoder: &PromptEncoder) -> Result<usize, String> {
    match kind {
        Kind::Image { soft_tokens } => Image::header(contents)
            .and_then(|header| encoder.image_size(&header, soft_tokens))
            .map(|size| size.tokens)
            .map_err(|error| error.to_string()),
        Kind::Audio => Ok(prepare(kind, contents, encoder)?.tokens()),
    }
}

fn prepare(kind: Kind, contents: &[u8], encoder: &PromptEncoder) -> Result<Prepared, String> {
    let prepared = match kind {
        Kind::Image { soft_tokens } => Image::from_bytes(contents)
            .and_then(|image| match soft_tokens {
                Some(count) => image.with_max_soft_tokens(count),
                None => Ok(image),
            })
            .and_then(|image| encoder.prepare(&image))
            .map(Prepared::Image),
        Kind::Audio => Audio::from_bytes(contents)
            .and_then(|clip| encoder.prepare_audio(&clip))
            .map(Prepared::Audio),
    };
    prepared.map_err(|error| error.to_string())
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
