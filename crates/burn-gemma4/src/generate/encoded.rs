//! An encoded prompt: token ids, and the images, frames of videos and audio clips whose soft tokens stand in the place of
//! some of them.

use super::media_layout::{Around, Replaced, Replacements, replace};
use crate::audio::prepared::PreparedAudio;
use crate::checkpoint::media::{MediaEncoders, MediaFormats, MediumInput};
use crate::error::Gemma4Error;
use crate::media_hash::MediumHash;
use crate::model::soft_tokens::{CallMedia, SoftTokens};
use crate::vision::prepared::PreparedImage;
use crate::vision::prepared_video::PreparedVideo;
use std::ops::Range;

/// An image, a frame of a video or an audio clip in a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlacedMedium {
    /// The tokens of the prompt in whose place the soft tokens stand.
    pub tokens: Range<usize>,
    pub hash: MediumHash,
}

/// A prompt as token ids, with its images, videos and audio clips. [`PromptEncoder::encode`](crate::PromptEncoder::encode)
/// makes one from tokens and media, and [`Gemma4::prefill`](crate::Gemma4::prefill) reads it.
///
/// ```
/// use burn_gemma4::EncodedPrompt;
///
/// let prompt = EncodedPrompt::from(vec![2, 30, 31]);
/// assert_eq!((prompt.tokens(), prompt.media().count()), (&[2, 30, 31][..], 0));
/// ```
#[derive(Clone, Debug, Default)]
pub struct EncodedPrompt {
    pub(crate) tokens: Vec<u32>,
    /// The images, the frames of videos and the audio clips in ascending order.
    pub(crate) media: Vec<PlacedMedium>,
    /// The input of each of `media`, from which the model computes soft tokens.
    pub(crate) inputs: Vec<MediumInput>,
}

/// An image or an audio clip that replaces a placeholder.
struct Replacement {
    hash: MediumHash,
    input: MediumInput,
    /// The number of soft tokens.
    count: usize,
}

impl From<&PreparedImage> for Replacement {
    fn from(image: &PreparedImage) -> Self {
        Self {
            hash: image.hash,
            input: MediumInput::Image(image.patches.clone()),
            count: image.count(),
        }
    }
}

impl From<&PreparedAudio> for Replacement {
    fn from(audio: &PreparedAudio) -> Self {
        Self {
            hash: audio.hash,
            input: MediumInput::Audio(audio.features.clone()),
            count: audio.count(),
        }
    }
}

impl From<Vec<u32>> for EncodedPrompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            ..Self::default()
        }
    }
}

impl EncodedPrompt {
    /// The token ids. An image or an audio clip is a begin token, one placeholder for each soft token, and an end
    /// token.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The number of tokens, including those of images and audio clips.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True if the prompt has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The images, the frames of videos and the audio clips in ascending order: the placeholders of each of them, and
    /// its hash. Two prompts with the same tokens have the same meaning only if their media have the same hashes.
    pub fn media(&self) -> impl Iterator<Item = (Range<usize>, MediumHash)> {
        let media = self.media.iter();
        media.map(|medium| (medium.tokens.clone(), medium.hash))
    }

    /// The size of all resized pixels and features of audio in memory, in bytes.
    pub fn media_bytes(&self) -> usize {
        self.inputs.iter().map(MediumInput::bytes).sum()
    }

    /// Expands each placeholder in `tokens` to the begin token, one placeholder for each soft token, and the end token.
    /// Placeholders of media that the model does not read stay as they are, and so do placeholders beyond the media.
    pub(crate) fn expand(
        tokens: Vec<u32>,
        images: &[PreparedImage],
        videos: &[PreparedVideo],
        audio: &[PreparedAudio],
        formats: &MediaFormats,
    ) -> Self {
        let images = Replacements {
            around: Around::images(formats),
            media: images.iter().map(Replacement::from).collect(),
        };
        let frames = videos.iter().flat_map(|video| &video.frames);
        let frames = Replacements {
            around: Around::frames(formats),
            media: frames.map(|(_, frame)| frame.into()).collect(),
        };
        let audio = Replacements {
            around: Around::audio(formats),
            media: audio.iter().map(Replacement::from).collect(),
        };
        Self::replace(tokens, vec![images, frames, audio])
    }

    /// Replaces the placeholders of each of some kinds of media.
    fn replace(tokens: Vec<u32>, kinds: Vec<Replacements<Replacement>>) -> Self {
        let Replaced { tokens, placed } = replace(tokens, kinds, |medium| medium.count);
        let placed = placed.into_iter().map(|one| {
            let (tokens, hash) = (one.tokens, one.medium.hash);
            (PlacedMedium { tokens, hash }, one.medium.input)
        });
        let (media, inputs) = placed.unzip();
        Self {
            tokens,
            media,
            inputs,
        }
    }

    /// Returns the length of the common prefix with the tokens and media of another prompt. The prefix contains each of
    /// its media whole.
    pub(crate) fn common(&self, tokens: &[u32], media: &[PlacedMedium]) -> usize {
        common_prefix((&self.tokens, &self.media), (tokens, media))
    }
}

/// Returns the length of the common prefix of the tokens and media of two prompts. The prefix contains each of its
/// media whole.
pub(crate) fn common_prefix(
    (tokens, media): (&[u32], &[PlacedMedium]),
    (other_tokens, other_media): (&[u32], &[PlacedMedium]),
) -> usize {
    let pairs = tokens.iter().zip(other_tokens);
    let common = pairs.take_while(|(one, other)| one == other).count();
    let differ = |one: &[PlacedMedium], other: &[PlacedMedium]| {
        let mut differing = one.iter().filter(|medium| !other.contains(medium));
        differing.next().map(|medium| medium.tokens.start)
    };
    let first = [differ(media, other_media), differ(other_media, media)];
    let common = first.into_iter().flatten().fold(common, usize::min);
    before_media(media, common)
}

/// Returns `end`, or the beginning of the image or audio clip that `end` would divide.
pub(crate) fn before_media(media: &[PlacedMedium], end: usize) -> usize {
    let divided = media
        .iter()
        .find(|medium| medium.tokens.start < end && end < medium.tokens.end);
    divided.map_or(end, |medium| medium.tokens.start)
}

/// Returns `end`, or the end of the last image or audio clip that `end` would divide. `prompts` are the prompts of a
/// batch, which are padded on the left to `longest` columns.
pub(super) fn after_media(prompts: &[&EncodedPrompt], longest: usize, mut end: usize) -> usize {
    loop {
        let divided = columns(prompts, longest)
            .filter(|(_, columns, _)| columns.start < end && end < columns.end)
            .map(|(_, columns, _)| columns.end)
            .max();
        match divided {
            Some(later) => end = later,
            None => return end,
        }
    }
}

/// Computes the soft tokens of the images and audio clips in the columns `call` of a batch. None of them may lie only
/// partly in the call.
pub(super) fn media_in(
    prompts: &[&EncodedPrompt],
    longest: usize,
    call: Range<usize>,
    encoders: &MediaEncoders,
) -> Result<CallMedia, Gemma4Error> {
    let in_call = columns(prompts, longest)
        .filter(|(_, columns, _)| call.start <= columns.start && columns.end <= call.end);
    let media = in_call.map(|(sequence, columns, input)| {
        Ok(SoftTokens {
            sequence,
            columns: columns.start - call.start..columns.end - call.start,
            rows: encoders.soft_tokens(input)?,
            is_bidirectional: encoders.is_bidirectional(input),
        })
    });
    media
        .collect::<Result<_, Gemma4Error>>()
        .map(CallMedia::Each)
}

/// Returns the sequence, the columns and the input of each image and audio clip in a batch.
fn columns<'a>(
    prompts: &'a [&EncodedPrompt],
    longest: usize,
) -> impl Iterator<Item = (usize, Range<usize>, &'a MediumInput)> {
    prompts
        .iter()
        .enumerate()
        .flat_map(move |(sequence, prompt)| {
            let padding = longest - prompt.tokens.len();
            let media = prompt.media.iter().zip(&prompt.inputs);
            media.map(move |(PlacedMedium { tokens, .. }, input)| {
                (
                    sequence,
                    tokens.start + padding..tokens.end + padding,
                    input,
                )
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audio::clip::Audio;
    use crate::audio::features::FeatureExtractor;
    use crate::vision::image::Image;
    use crate::vision::patches::ImageProcessor;
    use serde_json::json;
    use std::sync::Arc;

    /// Returns an image for an even value, and an audio clip for an odd one.
    fn medium(value: u8) -> Replacement {
        match value.is_multiple_of(2) {
            true => {
                let image = Image::from_rgb(1, 1, vec![value; 3]);
                let image = image.expect("one pixel has three bytes");
                let prepared = image.prepared(ImageProcessor::new(16, 3));
                (&prepared.expect("the image has soft tokens")).into()
            }
            false => {
                let extractor = FeatureExtractor::samples(&json!({}), 2);
                let extractor = Arc::new(extractor.expect("the defaults are valid"));
                let audio = Audio::from_samples(&[f32::from(value) / 256.0; 5], 16_000);
                let audio = audio.expect("the samples are valid");
                let prepared = audio.prepared(&extractor);
                (&prepared.expect("any clip is long enough")).into()
            }
        }
    }

    fn prompt(tokens: &[u32], media: &[(Range<usize>, u8)]) -> EncodedPrompt {
        let placed = media.iter().map(|(tokens, value)| PlacedMedium {
            tokens: tokens.clone(),
            hash: medium(*value).hash,
        });
        EncodedPrompt {
            tokens: tokens.to_vec(),
            media: placed.collect(),
            inputs: media
                .iter()
                .map(|(_, value)| medium(*value).input)
                .collect(),
        }
    }

    #[test]
    fn common_of_prompts_with_media_ends_before_the_first_other_medium() {
        let tokens = [1, 5, 5, 2, 5, 5, 3];
        let one = prompt(&tokens, &[(1..3, 7), (4..6, 8)]);
        for (other, expected) in [
            (prompt(&tokens, &[(1..3, 7), (4..6, 8)]), 7),
            (prompt(&tokens, &[(1..3, 7), (4..6, 10)]), 4),
            (prompt(&tokens, &[(1..3, 7), (4..6, 9)]), 4),
            (prompt(&tokens, &[(1..3, 9), (4..6, 8)]), 1),
            (prompt(&tokens, &[(1..3, 7)]), 4),
            (prompt(&tokens[..5], &[(1..3, 7)]), 4),
            (prompt(&[1, 5, 2], &[(1..2, 7)]), 1),
            (prompt(&[9], &[]), 0),
        ] {
            assert_eq!(
                one.common(&other.tokens, &other.media),
                expected,
                "{other:?}"
            );
            assert_eq!(other.common(&one.tokens, &one.media), expected, "{other:?}");
        }
    }

    #[test]
    fn after_media_of_batch_divides_no_medium() {
        let short = prompt(&[1, 5, 5, 5, 2], &[(1..4, 7)]);
        let long = prompt(&[1, 1, 5, 5, 5, 5, 2], &[(2..6, 8)]);
        let prompts = [&short, &long];
        let found: Vec<usize> = (0..=7).map(|end| after_media(&prompts, 7, end)).collect();
        assert_eq!(found, [0, 1, 2, 6, 6, 6, 6, 7]);
    }

    fn kinds(images: &[u8], audio: &[u8]) -> Vec<Replacements<Replacement>> {
        let media = |values: &[u8], count| {
            let media = values.iter().map(|value| Replacement {
                count,
                ..medium(*value)
            });
            media.collect()
        };
        let of_kind = |placeholder, begin, end, media| Replacements {
            around: Some(Around {
                placeholder,
                begin,
                end,
            }),
            media,
        };
        vec![
            of_kind(5, 3, 4, media(images, 2)),
            of_kind(8, 6, 7, media(audio, 3)),
        ]
    }

    #[test]
    fn replace_of_two_kinds_keeps_the_order_of_each() {
        let found = EncodedPrompt::replace(vec![1, 8, 5, 8], kinds(&[2], &[7, 9]));
        assert_eq!(found.tokens, [1, 6, 8, 8, 8, 7, 3, 5, 5, 4, 6, 8, 8, 8, 7]);
        let places: Vec<Range<usize>> = found.media().map(|(tokens, _)| tokens).collect();
        assert_eq!(places, [2..5, 7..9, 11..14]);
        let hashes: Vec<MediumHash> = found.media().map(|(_, hash)| hash).collect();
        assert_eq!(hashes, [7, 2, 9].map(|value| medium(value).hash));
        assert!(matches!(found.inputs[1], MediumInput::Image(_)));
        assert!(matches!(found.inputs[2], MediumInput::Audio(_)));
    }
}
