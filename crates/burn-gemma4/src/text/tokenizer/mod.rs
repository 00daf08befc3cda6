//! The tokenizer of a checkpoint, read from `tokenizer.json`.

mod kind;
mod longest;
mod marking;
pub(crate) mod stream;
pub(crate) mod template;

pub use marking::Marking;

use crate::error::{Gemma4Error, read};
use std::num::NonZeroUsize;
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
    /// The added tokens of `inner`, with the setting that encodes a special token's name in a text as plain text.
    spelled: AddedVocabulary,
    /// The largest number of characters that one token can stand for, or `None` if no such number is known.
    longest: Option<NonZeroUsize>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] if the file is not a
    /// tokenizer with Gemma's type of decoder.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let bytes = read(path)?;
        parse(&bytes).map_err(|reason| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        })
    }

    /// Parses the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the bytes are not a tokenizer with Gemma's type of decoder.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Gemma4Error> {
        parse(bytes).map_err(Gemma4Error::Tokenizer)
    }

    /// Encodes `text`. Special tokens in the text, such as `<bos>`, become their ids. No further tokens are added.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Gemma4Error> {
        let encoding = self.inner.encode_fast(text, false).map_err(refused)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns a lower bound of the number of tokens in the encoded text, without encoding the text. The bound is 0 if
    /// the tokenizer can shorten a text without bound.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        self.fewest_tokens_of(text.chars().count())
    }

    fn fewest_tokens_of(&self, chars: usize) -> usize {
        self.longest
            .map_or(0, |longest| chars.div_ceil(longest.get()))
    }

    /// Encodes `text` as plain text. Ordinary tokens encode the characters of a special token, such as `<|turn>`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the text, or can encode some characters only as a
    /// special token.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, Gemma4Error> {
        // Run the same steps as `encode`, but with `spelled`, so that special tokens are encoded as plain text.
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
                "{token:?} in a text can only be encoded as the special token"
            ))),
            None => Ok(tokens),
        }
    }

    /// Decodes `tokens` to text, without special tokens if `skip_special` is true. Bytes that are not UTF-8 become
    /// U+FFFD. Unknown ids give no text.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the tokens.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, Gemma4Error> {
        self.inner.decode(tokens, skip_special).map_err(refused)
    }

    /// Returns the id of a token, such as `<|turn>`, or `None` if the tokenizer does not have the token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the text of a special token, or `None` if the token is not special.
    pub fn special(&self, id: u32) -> Option<String> {
        let added = self.inner.get_added_vocabulary();
        let token = added.simple_id_to_token(id)?;
        added.is_special_token(&token).then_some(token)
    }

    /// The number of tokens, including special tokens and other added tokens.
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
    // Turn off truncation and padding, which are useful in training. A prompt must be neither shortened nor padded.
    inner
        .with_truncation(None)
        .map_err(|error| error.to_string())?;
    inner.with_padding(None);
    // Remove the post-processor, which would add special tokens that the caller did not write.
    inner.with_post_processor(None::<PostProcessorWrapper>);
    // Turn off the cache of encoded pieces. Gemma's tokenizers do not divide a text into words, so each piece is a whole
    // text. A server would keep the first 10,000 short texts in memory, and would rarely encode one of them again.
    let mut model = inner.get_model().clone();
    model.resize_cache(0);
    inner.with_model(model);
    let mut spelled = inner.get_added_vocabulary().clone();
    spelled.set_encode_special_tokens(true);
    Ok(Tokenizer {
        longest: longest::longest_token(bytes, &inner),
        inner,
        spelled,
    })
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
    /// The id of an added token that is neither special nor in the vocabulary of the tokenizer's model.
    const ADDED: u32 = FIRST_BYTE + 256;

    pub(super) fn byte(byte: u8) -> u32 {
        FIRST_BYTE + u32::from(byte)
    }

    /// Returns a small `tokenizer.json`. Its components have the same types as the components of Gemma's tokenizer.
    pub(super) fn description() -> Value {
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

    pub(super) fn build(description: &Value) -> Result<Tokenizer, Gemma4Error> {
        Tokenizer::from_bytes(description.to_string().as_bytes())
    }

    pub(super) fn tokenizer() -> Tokenizer {
        build(&description()).expect("the description is a valid tokenizer")
    }

    #[test]
    fn encode_recognises_special_tokens_and_adds_none() {
        let tokens = tokenizer()
            .encode("<bos>hi hié<tag>")
            .expect("the text encodes");
        assert_eq!(tokens, [BOS, HI, 7, byte(0xC3), byte(0xA9), ADDED]);
        assert!(tokenizer().encode("").expect("the text encodes").is_empty());
    }

    #[test]
    fn decode_with_skip_special_omits_special_tokens() {
        let tokens = [BOS, HI, EOS, ADDED];
        assert_eq!(
            tokenizer()
                .decode(&tokens, true)
                .expect("the tokens decode"),
            "hi<tag>"
        );
        assert_eq!(
            tokenizer()
                .decode(&tokens, false)
                .expect("the tokens decode"),
            "<bos>hi<eos><tag>"
        );
    }

    #[test]
    fn id_and_vocab_size_count_added_tokens() {
        assert_eq!(tokenizer().id("<bos>"), Some(BOS));
        assert_eq!(tokenizer().id("<tag>"), Some(ADDED));
        assert_eq!(tokenizer().id("absent"), None);
        assert_eq!(tokenizer().vocab_size(), ADDED as usize + 1);
    }

    #[test]
    fn encode_ignores_truncation_and_padding_of_the_file() {
        let mut description = description();
        description["truncation"] =
            json!({"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
        description["padding"] = json!({
            "strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<eos>",
        });
        let tokenizer = build(&description).expect("the description is a valid tokenizer");
        assert_eq!(
            tokenizer.encode("hi hi").expect("the text encodes"),
            [HI, 7]
        );
    }

    #[test]
    fn from_bytes_with_another_decoder_is_refused() {
        for decoder in [
            Value::Null,
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}),
            json!({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
        ] {
            let mut description = description();
            description["decoder"] = decoder;
            let error = build(&description)
                .expect_err("the decoder is not of Gemma's kind")
                .to_string();
            assert!(error.contains("decoder"), "{error}");
        }
    }

    #[test]
    fn from_file_errors_name_the_file() {
        let absent =
            Tokenizer::from_file("no/such/tokenizer.json").expect_err("the file is missing");
        assert!(matches!(&absent, Gemma4Error::Io { .. }), "{absent}");
        assert!(absent.to_string().contains("tokenizer.json"), "{absent}");
        let corrupt = Tokenizer::from_bytes(b"{\"version\": ").expect_err("the JSON is incomplete");
        assert!(matches!(&corrupt, Gemma4Error::Tokenizer(_)), "{corrupt}");
    }
}
