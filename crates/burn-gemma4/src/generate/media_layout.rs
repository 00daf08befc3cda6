//! The places of images and audio clips in the tokens of a prompt, without the images and clips.

use crate::checkpoint::media::MediaFormats;
use std::ops::Range;

/// Tokens in which images and audio clips have their places, as [`PromptEncoder::layout`](crate::PromptEncoder::layout)
/// computes them. The images and clips themselves need not be in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MediaLayout {
    /// The tokens. An image or a clip is a begin token, one placeholder for each soft token, and an end token.
    pub tokens: Vec<u32>,
    /// The placeholders of each image, in ascending order.
    pub images: Vec<Range<usize>>,
    /// The placeholders of each audio clip, in ascending order.
    pub audio: Vec<Range<usize>>,
}

impl MediaLayout {
    /// Gives each image and each clip in `tokens` its place. `images` and `audio` are their numbers of tokens, with the
    /// begin tokens and the end tokens.
    pub(crate) fn new(
        tokens: Vec<u32>,
        images: &[usize],
        audio: &[usize],
        formats: &MediaFormats,
    ) -> Self {
        let of_kind = |around: Option<Around>, tokens: &[usize]| Replacements {
            around,
            media: tokens.iter().map(|tokens| tokens - 2).collect(),
        };
        let kinds = vec![
            of_kind(Around::images(formats), images),
            of_kind(Around::audio(formats), audio),
        ];
        let Replaced { tokens, placed } = replace(tokens, kinds, |count| *count);
        let of_kind = |kind: usize| {
            let places = placed.iter().filter(|one| one.kind == kind);
            places.map(|one| one.tokens.clone()).collect()
        };
        Self {
            images: of_kind(0),
            audio: of_kind(1),
            tokens,
        }
    }
}

/// The tokens around the soft tokens of one kind of media.
#[derive(Clone, Copy)]
pub(super) struct Around {
    pub placeholder: u32,
    pub begin: u32,
    pub end: u32,
}

/// The media that replace the placeholders of one kind in order. The kind has no tokens if the model does not read it.
pub(super) struct Replacements<T> {
    pub around: Option<Around>,
    pub media: Vec<T>,
}

impl Around {
    pub fn images(formats: &MediaFormats) -> Option<Self> {
        let config = &formats.vision.as_ref().ok()?.config;
        Some(Self {
            placeholder: config.image_token,
            begin: config.begin_token,
            end: config.end_token,
        })
    }

    /// Returns the tokens around the frames of videos.
    pub fn frames(formats: &MediaFormats) -> Option<Self> {
        let format = formats.vision.as_ref().ok()?;
        format.video().ok()?;
        Some(Self {
            placeholder: format.config.video_token,
            ..Self::images(formats)?
        })
    }

    pub fn audio(formats: &MediaFormats) -> Option<Self> {
        let config = &formats.audio.as_ref().ok()?.config;
        Some(Self {
            placeholder: config.audio_token,
            begin: config.begin_token,
            end: config.end_token,
        })
    }
}

/// Tokens whose placeholders have been replaced.
pub(super) struct Replaced<T> {
    pub tokens: Vec<u32>,
    pub placed: Vec<Placed<T>>,
}

/// A medium in the place of its placeholders.
#[derive(Debug, PartialEq)]
pub(super) struct Placed<T> {
    /// The index of the kind.
    kind: usize,
    /// The placeholders.
    pub tokens: Range<usize>,
    pub medium: T,
}

/// Replaces the placeholders of each of some kinds of media. `count` returns the number of soft tokens of a medium.
pub(super) fn replace<T>(
    tokens: Vec<u32>,
    kinds: Vec<Replacements<T>>,
    count: impl Fn(&T) -> usize,
) -> Replaced<T> {
    let kinds = kinds.into_iter().enumerate();
    let mut kinds: Vec<_> = kinds
        .filter_map(|(index, kind)| Some((index, kind.around?, kind.media.into_iter())))
        .collect();
    let (mut expanded, mut placed) = (Vec::with_capacity(tokens.len()), Vec::new());
    for token in tokens {
        let mut kinds = kinds.iter_mut();
        let kind = kinds.find(|(_, around, _)| around.placeholder == token);
        let Some((index, around, medium)) =
            kind.and_then(|(index, around, media)| Some((*index, *around, media.next()?)))
        else {
            expanded.push(token);
            continue;
        };
        expanded.push(around.begin);
        let start = expanded.len();
        let end = start + count(&medium);
        expanded.resize(end, token);
        expanded.push(around.end);
        placed.push(Placed {
            kind: index,
            tokens: start..end,
            medium,
        });
    }
    Replaced {
        tokens: expanded,
        placed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replace_of_two_kinds_keeps_tokens_beyond_the_media() {
        let around = |placeholder| {
            Some(Around {
                placeholder,
                begin: 1,
                end: 2,
            })
        };
        let kinds = vec![
            Replacements {
                around: around(5),
                media: vec![2],
            },
            Replacements {
                around: around(8),
                media: vec![1],
            },
        ];
        let Replaced { tokens, placed } = replace(vec![8, 7, 5, 5], kinds, |count| *count);
        assert_eq!(tokens, [1, 8, 2, 7, 1, 5, 5, 2, 5]);
        let placed = placed.into_iter();
        let placed = placed.map(|one| (one.kind, one.tokens, one.medium));
        assert_eq!(placed.collect::<Vec<_>>(), [(1, 1..2, 1), (0, 5..7, 2)]);
    }
}
