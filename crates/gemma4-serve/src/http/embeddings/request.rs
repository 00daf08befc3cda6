//! The request of `/v1/embeddings`.

use crate::engine::at_input;
use crate::error::RequestError;
use burn_gemma4::{EmbedOptions, EmbeddingGemma};
use serde::Deserialize;
use serde_json::Value;

/// The largest number of texts in a request, as in OpenAI's API.
const MAX_TEXTS: usize = 2048;

/// The fields of a request to `/v1/embeddings`. An unknown field is an error. `prompt_name` and `truncate` are not in
/// OpenAI's API.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EmbeddingsRequest {
    pub model: String,
    input: Input,
    encoding_format: Option<Encoding>,
    dimensions: Option<u64>,
    prompt_name: Option<String>,
    truncate: Option<bool>,
    #[serde(rename = "user")]
    _user: Option<Value>,
}

/// The field `input`: one text or a list of texts, as text or as token ids.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, tokens, or a list of texts or tokens"
)]
enum Input {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    AllTokens(Vec<Vec<u32>>),
}

/// The form of embeddings in the response.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(super) enum Encoding {
    /// A list of numbers.
    #[default]
    Float,
    /// Base64 of little-endian f32.
    Base64,
}

/// A request whose texts are encoded.
#[derive(Debug)]
pub(super) struct EncodedRequest {
    pub texts: Vec<Vec<u32>>,
    pub dimensions: Option<usize>,
    pub encoding: Encoding,
}

impl EmbeddingsRequest {
    /// Encodes the texts. `check` runs between two texts, and may end the work.
    ///
    /// # Errors
    /// Returns an error that names the field at fault, and passes on the errors of `check`.
    pub fn encode(
        self,
        model: &EmbeddingGemma,
        mut check: impl FnMut() -> Result<(), RequestError>,
    ) -> Result<EncodedRequest, RequestError> {
        let dimensions = match self.dimensions {
            Some(dimensions) => {
                let dimensions = usize::try_from(dimensions).unwrap_or(usize::MAX);
                model.config().check_dimensions(dimensions)?;
                Some(dimensions)
            }
            None => None,
        };
        let mut options = EmbedOptions::new().truncate(self.truncate.unwrap_or(false));
        if let Some(name) = self.prompt_name {
            if !model.prompts().any(|(known, _)| known == name) {
                let known: Vec<&str> = model.prompts().map(|(name, _)| name).collect();
                let reason = format!("is {name:?}; expected one of {known:?}");
                return Err(RequestError::field("prompt_name", reason));
            }
            if let Input::Tokens(_) | Input::AllTokens(_) = self.input {
                let reason = "is set beside tokens; expected texts, before which the prompt stands";
                return Err(RequestError::field("prompt_name", reason));
            }
            options = options.prompt(name);
        }
        let texts = match self.input {
            Input::Text(text) => encode(model, &[text], &options, &mut check)?,
            Input::Texts(texts) => encode(model, &texts, &options, &mut check)?,
            Input::Tokens(tokens) => vec![tokens],
            Input::AllTokens(all) => all,
        };
        // An empty list parses as a list of texts.
        check_count(texts.len())?;
        Ok(EncodedRequest {
            texts,
            dimensions,
            encoding: self.encoding_format.unwrap_or_default(),
        })
    }
}

fn check_count(count: usize) -> Result<(), RequestError> {
    match count {
        0 => Err(RequestError::field(
            "input",
            "is empty; expected at least 1 text",
        )),
        _ if count > MAX_TEXTS => {
            let reason = format!("has {count} texts; expected at most {MAX_TEXTS}");
            Err(RequestError::field("input", reason))
        }
        _ => Ok(()),
    }
}

fn encode(
    model: &EmbeddingGemma,
    texts: &[String],
    options: &EmbedOptions,
    check: &mut impl FnMut() -> Result<(), RequestError>,
) -> Result<Vec<Vec<u32>>, RequestError> {
    check_count(texts.len())?;
    let texts = texts.iter().enumerate().map(|(index, text)| {
        check()?;
        if text.is_empty() {
            let error = RequestError::field(format!("input[{index}]"), "is empty; expected a text");
            return Err(RequestError {
                field: Some("input".into()),
                ..error
            });
        }
        let tokens = model.tokens(text, options);
        tokens.map_err(|error| at_input(index, error))
    });
    texts.collect()
}
