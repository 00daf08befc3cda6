//! Text to tokens and back, by the checkpoint's `tokenizer.json`.

mod kind;
mod marking;
pub(crate) mod stream;

pub use marking::Marking;

use crate::{Gemma4Error, error::read};
use std::path::Path;
use stream::decodes_token_by_token;
use tokenizers::{AddedVocabulary, Model, OffsetType, PostProcessorWrapper, PreTokenizer};

/// The tokenizer of a checkpoint.
///
/// # Examples
/// ```no_run
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// use burn_gemma4::Tokenizer;
///
/// let tokenizer = Tokenizer::from_file("gemma-4-E2B-it/tokenizer.json")?;
/// let tokens = tokenizer.encode("<bos>The capital of France is")?;
/// assert_eq!(tokenizer.decode(&tokens, true)?, "The capital of France is");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens, of which special ones in a text are taken for text.
    spelled: AddedVocabulary,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Gemma4Error::Io`] where the file cannot be read, [`Gemma4Error::Malformed`] where it holds no
    /// tokenizer, or one whose decoder is not of Gemma's kind.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let bytes = read(path)?;
        parse(&bytes).map_err(|reason| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        })
    }

    /// A tokenizer from the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where they are no tokenizer, or one whose decoder is not of Gemma's kind.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Gemma4Error> {
        parse(bytes).map_err(Gemma4Error::Tokenizer)
    }

    /// The tokens of `text`. Special tokens in the text, such as `<bos>` and `<|turn>`, become their ids;
    /// nothing is added.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where the tokenizer does not take the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Gemma4Error> {
        let encoding = self.inner.encode_fast(text, false).map_err(refused)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of `text`, which has no special tokens: what looks like one, such as `<|turn>`, is text like any other.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where the tokenizer does not take the text, or has no other way to write it than a
    /// special token.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, Gemma4Error> {
        // The steps of `encode`, with other added tokens.
        let mut pieces = self
            .spelled
            .extract_and_normalize(self.inner.get_normalizer(), text);
        if let Some(splitter) = self.inner.get_pre_tokenizer() {
            splitter.pre_tokenize(&mut pieces).map_err(refused)?;
        }
        pieces
            .tokenize(|piece| self.inner.get_model().tokenize(piece.get()))
            .map_err(refused)?;
        let encoding = pieces
            .into_encoding(None, 0, OffsetType::Byte)
            .map_err(refused)?;
        let tokens = encoding.get_ids().to_vec();
        match tokens.iter().find_map(|token| self.special(*token)) {
            Some(token) => Err(Gemma4Error::Tokenizer(format!(
                "{token:?} in a text cannot be told from the special token"
            ))),
            None => Ok(tokens),
        }
    }

    /// The text of `tokens`, with or without special tokens. Bytes that are not UTF-8 become U+FFFD; ids
    /// that the tokenizer does not know have no text.
    ///
    /// # Errors
    /// [`Gemma4Error::Tokenizer`] where the tokenizer does not take the tokens.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, Gemma4Error> {
        self.inner.decode(tokens, skip_special).map_err(refused)
    }

    /// The id of a token, such as `<|turn>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of a special token; none of other tokens.
    pub(crate) fn special(&self, id: u32) -> Option<String> {
        let added = self.inner.get_added_vocabulary();
        let token = added.simple_id_to_token(id)?;
        added.is_special_token(&token).then_some(token)
    }

    /// How many tokens there are, special and other added ones included.
    pub fn vocab_size(&self) -> usize {
        let model = self.inner.get_model();
        let added = self.inner.get_added_vocabulary().get_vocab();
        let beyond = added
            .values()
            .filter(|&&id| model.id_to_token(id).is_none());
        model.get_vocab_size() + beyond.count()
    }
}

fn parse(bytes: &[u8]) -> Result<Tokenizer, String> {
    kind::check(bytes)?;
    let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
        .map_err(|error| format!("no tokenizer: {error}"))?;
    match inner.get_decoder() {
        None => return Err("it has no decoder".into()),
        Some(decoder) if !decodes_token_by_token(decoder) => {
            return Err(
                "its decoder is not of Gemma's kind, which is Replace, ByteFallback, Fuse".into(),
            );
        }
        Some(_) => (),
    }
    // Both serve training; a prompt has to come through whole and alone.
    inner
        .with_truncation(None)
        .map_err(|error| error.to_string())?;
    inner.with_padding(None);
    // It would add the special tokens that nobody asks for.
    inner.with_post_processor(None::<PostProcessorWrapper>);
    let mut spelled = inner.get_added_vocabulary().clone();
    spelled.set_encode_special_tokens(true);
    Ok(Tokenizer { inner, spelled })
}

fn refused(error: tokenizers::Error) -> Gemma4Error {
    Gemma4Error::Tokenizer(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    pub(super) const EOS: u32 = 0;
    const BOS: u32 = 1;
    pub(super) const SPACE: u32 = 3;
    pub(super) const H: u32 = 4;
    pub(super) const HI: u32 = 6;
    const FIRST_BYTE: u32 = 8;
    /// Not special: an added token that the model's vocabulary lacks.
    const ADDED: u32 = FIRST_BYTE + 256;

    pub(super) fn byte(byte: u8) -> u32 {
        FIRST_BYTE + u32::from(byte)
    }

    /// Gemma's kind of tokenizer, of a few tokens.
    fn description() -> Value {
        let words = ["<eos>", "<bos>", "<unk>", "▁", "h", "i", "hi", "▁hi"];
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let vocab: serde_json::Map<String, Value> = words
            .into_iter()
            .map(String::from)
            .chain(bytes)
            .zip(0u32..)
            .map(|(token, id)| (token, id.into()))
            .collect();
        let added = |id: u32, content: &str, special: bool| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            })
        };
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [added(EOS, "<eos>", true), added(BOS, "<bos>", true), added(ADDED, "<tag>", false)],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": {
                "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
            },
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ]},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": [["h", "i"], ["▁", "hi"]],
            },
        })
    }

    fn build(description: &Value) -> Result<Tokenizer, Gemma4Error> {
        Tokenizer::from_bytes(description.to_string().as_bytes())
    }

    pub(super) fn tokenizer() -> Tokenizer {
        build(&description()).expect("a well-formed tokenizer")
    }

    #[test]
    fn special_tokens_are_recognised_and_none_is_added() {
        let tokens = tokenizer().encode("<bos>hi hié<tag>").expect("tokens");
        assert_eq!(tokens, [BOS, HI, 7, byte(0xC3), byte(0xA9), ADDED]);
        assert!(tokenizer().encode("").expect("tokens").is_empty());
    }

    #[test]
    fn special_tokens_are_skipped_on_request() {
        let tokens = [BOS, HI, EOS, ADDED];
        assert_eq!(tokenizer().decode(&tokens, true).expect("text"), "hi<tag>");
        assert_eq!(
            tokenizer().decode(&tokens, false).expect("text"),
            "<bos>hi<eos><tag>"
        );
    }

    #[test]
    fn ids_and_size() {
        assert_eq!(tokenizer().id("<bos>"), Some(BOS));
        assert_eq!(tokenizer().id("<tag>"), Some(ADDED));
        assert_eq!(tokenizer().id("absent"), None);
        assert_eq!(tokenizer().vocab_size(), ADDED as usize + 1);
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_off() {
        let mut description = description();
        description["truncation"] =
            json!({"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        description["padding"] = json!({
            "strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<eos>",
        });
        let tokenizer = build(&description).expect("a tokenizer");
        assert_eq!(tokenizer.encode("hi hi").expect("tokens"), [HI, 7]);
    }

    #[test]
    fn decoders_that_look_at_neighbours_are_refused() {
        for decoder in [
            Value::Null,
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}),
            json!({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
        ] {
            let mut description = description();
            description["decoder"] = decoder;
            let error = build(&description).expect_err("refused").to_string();
            assert!(error.contains("decoder"), "{error}");
        }
    }

    #[test]
    fn errors_name_the_file() {
        let absent = Tokenizer::from_file("no/such/tokenizer.json").expect_err("absent");
        assert!(matches!(&absent, Gemma4Error::Io { .. }), "{absent}");
        assert!(absent.to_string().contains("tokenizer.json"), "{absent}");
        let corrupt = Tokenizer::from_bytes(b"{\"version\": ").expect_err("corrupt");
        assert!(matches!(&corrupt, Gemma4Error::Tokenizer(_)), "{corrupt}");
    }
}
