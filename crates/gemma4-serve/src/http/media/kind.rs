//! The kinds of media in requests, with the names by which errors and clients call them.

use super::options::MediaOptions;
use super::source::shown;
use crate::error::RequestError;

/// The media types of images that can be decoded. The contents decide which of these formats a file has.
const IMAGE_TYPES: &[&str] = &["image/png", "image/jpeg", "image/jpg", "image/webp"];

/// The media types of audio that can be decoded. The contents decide which of these formats a file has.
const AUDIO_TYPES: &[&str] = &[
    "audio/wav",
    "audio/x-wav",
    "audio/wave",
    "audio/vnd.wave",
    "audio/mpeg",
    "audio/mp3",
    "audio/flac",
    "audio/x-flac",
    "audio/ogg",
    "audio/vorbis",
];

/// The names of audio formats in OpenAI's field `input_audio.format`. OpenAI has the first two.
const AUDIO_FORMATS: [&str; 4] = ["wav", "mp3", "flac", "ogg"];

/// The number of soft tokens of an image with the detail `low`, which is the smallest number that models support.
const LOW: usize = 70;

/// The number of soft tokens of an image with the detail `high`, which is the largest number that models support.
const HIGH: usize = 1120;

/// A kind of media in requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An image. Its number of soft tokens is limited, unless the checkpoint's limit holds.
    Image { soft_tokens: Option<usize> },
    /// An audio clip.
    Audio,
}

impl Kind {
    /// The noun of the kind for one medium.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Image { .. } => "image",
            Self::Audio => "audio clip",
        }
    }

    /// The noun of the kind after "an", for the contents of a file.
    pub fn contents(self) -> &'static str {
        match self {
            Self::Image { .. } => "image",
            Self::Audio => "audio",
        }
    }

    /// An example of a data URL of the kind.
    pub fn example(self) -> &'static str {
        match self {
            Self::Image { .. } => "data:image/png;base64,DATA",
            Self::Audio => "data:audio/wav;base64,DATA",
        }
    }

    /// The largest number of media of the kind in a request.
    pub fn max_count(self, options: &MediaOptions) -> usize {
        match self {
            Self::Image { .. } => options.images.max_count,
            Self::Audio => options.audio.max_count,
        }
    }

    /// The largest size of a file of the kind in bytes.
    pub fn max_bytes(self, options: &MediaOptions) -> usize {
        match self {
            Self::Image { .. } => options.images.max_bytes,
            Self::Audio => options.audio.max_bytes,
        }
    }

    /// Checks a declared media type.
    pub fn check_media_type(self, field: &str, media_type: &str) -> Result<(), RequestError> {
        let known = match self {
            Self::Image { .. } => IMAGE_TYPES,
            Self::Audio => AUDIO_TYPES,
        };
        let is_known = known
            .iter()
            .any(|known| media_type.eq_ignore_ascii_case(known));
        match is_known {
            true => Ok(()),
            false => {
                let reason = format!(
                    "has the media type {:?}; expected one of {known:?}",
                    shown(media_type)
                );
                Err(RequestError::field(field, reason))
            }
        }
    }
}

/// Checks the field `format` of OpenAI's audio parts.
pub(super) fn check_audio_format(field: &str, format: &str) -> Result<(), RequestError> {
    match AUDIO_FORMATS.contains(&format) {
        true => Ok(()),
        false => {
            let reason = format!("is {:?}; expected one of {AUDIO_FORMATS:?}", shown(format));
            Err(RequestError::field(format!("{field}.format"), reason))
        }
    }
}

/// Returns the largest number of soft tokens of an image with a value of OpenAI's option `detail`, which is in the
/// field `field`. `None` is the checkpoint's number.
pub(crate) fn soft_tokens(
    field: &str,
    detail: Option<&str>,
) -> Result<Option<usize>, RequestError> {
    match detail {
        None | Some("auto") => Ok(None),
        Some("low") => Ok(Some(LOW)),
        Some("high") => Ok(Some(HIGH)),
        Some(detail) => {
            let reason = format!(
                "is {:?}; expected \"auto\", \"low\" or \"high\"",
                shown(detail)
            );
            Err(RequestError::field(field, reason))
        }
    }
}
