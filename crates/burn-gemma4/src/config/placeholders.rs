//! The tokens that stand for images, audio and video in the prompts of a multimodal model.

use crate::error::Gemma4Error;
use crate::json;
use serde::Deserialize;
use serde_json::Value;
use std::ops::Range;

/// The tokens that stand for images, audio and video in the prompts of a multimodal model. Each of them must be replaced
/// before the model reads the prompt. A model without such tokens has no placeholders.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Gemma4, LoadOptions};
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// gemma.placeholders().check(&[1, 2, 3])?;
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placeholders(Vec<Placeholder>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placeholder {
    token: u32,
    medium: &'static str,
}

/// The fields of a `config.json` that name placeholders.
#[derive(Deserialize)]
struct Fields {
    text_config: Option<Value>,
    image_token_id: Option<u32>,
    audio_token_id: Option<u32>,
    video_token_id: Option<u32>,
}

/// The medium of the placeholders that images replace.
pub(crate) const IMAGE: &str = "image";

/// The medium of the placeholders that audio clips replace.
pub(crate) const AUDIO: &str = "audio";

/// The medium of the placeholders that the frames of videos replace.
pub(crate) const VIDEO: &str = "video";

impl Placeholders {
    /// Reads the placeholders from the text of a `config.json`. A missing field has the default value of Hugging Face
    /// Transformers. A text model has no placeholders, and neither has a vocabulary without the tokens.
    pub(crate) fn from_json(json: &str, vocab_size: usize) -> Result<Self, Gemma4Error> {
        let fields: Fields = json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?;
        if fields.text_config.is_none() {
            return Ok(Self::default());
        }
        let tokens = [
            (IMAGE, fields.image_token_id.unwrap_or(258_880)),
            (AUDIO, fields.audio_token_id.unwrap_or(258_881)),
            (VIDEO, fields.video_token_id.unwrap_or(258_884)),
        ];
        let in_vocabulary = tokens
            .into_iter()
            .filter(|(_, token)| (*token as usize) < vocab_size);
        Ok(Self(
            in_vocabulary
                .map(|(medium, token)| Placeholder { token, medium })
                .collect(),
        ))
    }

    /// Checks that tokens contain no placeholder.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`], which names the first placeholder and its medium.
    pub fn check(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        Self::refuse(self.0.iter(), tokens)
    }

    /// Checks that tokens contain no placeholder, except those of `media`.
    pub(crate) fn check_except(&self, tokens: &[u32], media: &[&str]) -> Result<(), Gemma4Error> {
        let others = self.0.iter();
        Self::refuse(others.filter(|one| !media.contains(&one.medium)), tokens)
    }

    /// Checks that tokens contain placeholders only in `media`, the places of images and audio clips in ascending
    /// order.
    pub(crate) fn check_outside(
        &self,
        tokens: &[u32],
        media: impl Iterator<Item = Range<usize>>,
    ) -> Result<(), Gemma4Error> {
        let mut start = 0;
        for medium in media {
            self.check(tokens.get(start..medium.start).unwrap_or_default())?;
            start = medium.end;
        }
        self.check(tokens.get(start..).unwrap_or_default())
    }

    fn refuse<'a>(
        mut placeholders: impl Iterator<Item = &'a Placeholder>,
        tokens: &[u32],
    ) -> Result<(), Gemma4Error> {
        match placeholders.find(|one| tokens.contains(&one.token)) {
            Some(Placeholder { token, medium }) => Err(Gemma4Error::Argument {
                argument: "prompt",
                reason: format!(
                    "has token {token}, a placeholder of {medium}, but no {medium} for it; expected a prompt without such tokens"
                ),
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_of_multimodal_model_refuses_each_medium_by_name() {
        let json = r#"{"text_config": {}, "image_token_id": 5, "video_token_id": 7}"#;
        let placeholders = Placeholders::from_json(json, 262_144).expect("the file parses");
        for (token, medium) in [(5, "image"), (258_881, "audio"), (7, "video")] {
            let error = placeholders
                .check(&[1, token])
                .expect_err("the token is refused")
                .to_string();
            assert!(error.contains(medium), "{error}");
            for other in [IMAGE, AUDIO] {
                let outcome = placeholders.check_except(&[token], &[other]);
                assert_eq!(outcome.is_ok(), medium == other);
            }
        }
        placeholders.check(&[1, 6, 8]).expect("no placeholders");
    }

    #[test]
    fn check_outside_of_media_refuses_placeholders_between_them() {
        let json = r#"{"text_config": {}, "image_token_id": 5}"#;
        let placeholders = Placeholders::from_json(json, 262_144).expect("the file parses");
        let check = |tokens: &[u32]| placeholders.check_outside(tokens, [1..3, 4..5].into_iter());
        check(&[1, 5, 5, 2, 5, 2]).expect("all placeholders are in media");
        for tokens in [[5, 5, 5, 2, 5, 2], [1, 5, 5, 5, 5, 2], [1, 5, 5, 2, 5, 5]] {
            assert!(check(&tokens).is_err(), "{tokens:?}");
        }
    }

    #[test]
    fn check_of_text_model_refuses_nothing() {
        for (json, vocab_size) in [("{}", 262_144), (r#"{"text_config": {}}"#, 320)] {
            let placeholders = Placeholders::from_json(json, vocab_size).expect("the file parses");
            placeholders
                .check(&[258_880, 258_881, 258_884])
                .expect("there are no placeholders");
        }
    }
}
