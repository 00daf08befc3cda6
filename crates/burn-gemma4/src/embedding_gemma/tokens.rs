//! The tokens of texts: their prompt, their limit and their truncation.

use super::{EmbedOptions, EmbeddingGemma};
use crate::error::Gemma4Error;

/// The number of characters up to which every text can be truncated. It bounds the time of one encoding, which reads
/// the whole text: the end of a text can change the tokens before it.
const TRUNCATED_CHARS: usize = 1 << 20;

/// The number of characters for each token of the limit, up to which a text can be truncated if that is more than
/// [`TRUNCATED_CHARS`].
const TRUNCATED_CHARS_OF_TOKEN: usize = 64;

impl EmbeddingGemma {
    /// Encodes a text, after the prompt that the options select. Special tokens in the text, such as `<eos>`, become
    /// their ids, as in sentence-transformers. The tokens that the tokenizer adds, such as `<bos>`, are in the result.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the checkpoint lacks the prompt, if the text has too many tokens, or if it
    /// has a placeholder of an image, of audio or of a video. A text to truncate may have 1,048,576 characters, or 64
    /// for each of [`max_tokens`](Self::max_tokens) if that is more. Returns [`Gemma4Error::Tokenizer`] if the tokenizer
    /// rejects the text.
    pub fn tokens(&self, text: &str, options: &EmbedOptions) -> Result<Vec<u32>, Gemma4Error> {
        let prompt = self.prompt(options)?;
        let limit = self.max_tokens();
        let fewest = self.tokenizer.fewest_tokens(text);
        if fewest > limit && !options.truncate {
            // Do not encode a text that is far too long.
            return Err(self.too_long(format!("at least {fewest}")));
        }
        if options.truncate {
            check_truncated(text, limit)?;
        }
        let mut tokens = self.tokenizer.encode(&format!("{prompt}{text}"))?;
        let count = tokens.len() + self.template.len();
        if count > limit {
            if !options.truncate {
                return Err(self.too_long(format!("{count}")));
            }
            let kept = limit.saturating_sub(self.template.len());
            match self.settings.truncates_left {
                true => drop(tokens.drain(..tokens.len() - kept)),
                false => tokens.truncate(kept),
            }
        }
        let tokens = self.template.around(&tokens);
        self.check_tokens(&tokens)?;
        Ok(tokens)
    }

    /// Checks tokens that [`tokens`](Self::tokens) has not encoded.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there are no tokens or too many, if a token is outside the vocabulary, or if
    /// a token is a placeholder of an image, of audio or of a video.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        if tokens.is_empty() {
            return Err(Gemma4Error::Argument {
                argument: "text",
                reason: "has no tokens; expected at least one".into(),
            });
        }
        if tokens.len() > self.max_tokens() {
            return Err(self.too_long(format!("{}", tokens.len())));
        }
        let ids = tokens.iter().map(|token| i64::from(*token));
        self.config().text.check_tokens(ids)?;
        self.placeholders.check(tokens)
    }

    fn prompt(&self, options: &EmbedOptions) -> Result<&str, Gemma4Error> {
        let prompts = &self.settings.prompts;
        let Some(name) = options
            .prompt
            .as_ref()
            .or(self.settings.default_prompt.as_ref())
        else {
            return Ok("");
        };
        prompts.get(name).map(String::as_str).ok_or_else(|| {
            let known: Vec<&String> = prompts.keys().collect();
            let known = match known.is_empty() {
                true => "this checkpoint has no prompts".to_owned(),
                false => format!("expected one of {known:?}"),
            };
            Gemma4Error::Argument {
                argument: "prompt_name",
                reason: format!("is {name:?}; {known}"),
            }
        })
    }

    fn too_long(&self, count: String) -> Gemma4Error {
        Gemma4Error::Argument {
            argument: "text",
            reason: format!(
                "has {count} tokens, but the model reads at most {} of a text",
                self.max_tokens()
            ),
        }
    }
}

/// Refuses a text that is too long to be encoded and truncated.
fn check_truncated(text: &str, limit: usize) -> Result<(), Gemma4Error> {
    let most = TRUNCATED_CHARS.max(limit.saturating_mul(TRUNCATED_CHARS_OF_TOKEN));
    // A text has at most as many characters as bytes.
    if text.len() <= most {
        return Ok(());
    }
    match text.chars().count() {
        count if count > most => Err(Gemma4Error::Argument {
            argument: "text",
            reason: format!(
                "has {count} characters; expected at most {most} of a text to truncate"
            ),
        }),
        _ => Ok(()),
    }
}
