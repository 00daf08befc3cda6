//! The tokens that a `tokenizer.json` adds before and after a text.

use crate::error::{Gemma4Error, read};
use crate::json;
use serde::Deserialize;
use std::path::Path;
use tokenizers::{Encoding, PostProcessor, PostProcessorWrapper, Token};

/// The tokens that stand before and after the tokens of every text, such as `<bos>` and `<eos>`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TextTemplate {
    pub before: Vec<u32>,
    pub after: Vec<u32>,
}

#[derive(Deserialize)]
struct File {
    post_processor: Option<PostProcessorWrapper>,
}

/// A token id that no vocabulary has.
const PROBE: u32 = u32::MAX;

impl TextTemplate {
    /// Reads the template in a `tokenizer.json`. As in Hugging Face Transformers, the file's post-processor alone decides
    /// which tokens are added.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Malformed`] if the post-processor is not supported.
    pub fn from_file(path: &Path) -> Result<Self, Gemma4Error> {
        Self::from_bytes(&read(path)?).map_err(|reason| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        })
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let File { post_processor } = json::from_slice(bytes)?;
        let Some(processor) = post_processor else {
            return Ok(Self::default());
        };
        // Run the post-processor over a text of one token. The tokens around this token are those that it adds.
        let probe = Token::new(PROBE, String::new(), (0, 0));
        let processed = processor
            .process(Encoding::from_tokens(vec![probe], 0), None, true)
            .map_err(|error| format!("post_processor: {error}"))?;
        let ids = processed.get_ids();
        match ids.split(|id| *id == PROBE).collect::<Vec<_>>().as_slice() {
            [before, after] => Ok(Self {
                before: before.to_vec(),
                after: after.to_vec(),
            }),
            _ => Err("post_processor: does not place a text once among its tokens".into()),
        }
    }

    /// Returns the number of tokens around a text.
    pub fn len(&self) -> usize {
        self.before.len() + self.after.len()
    }

    /// Returns the tokens of a text between those of the template.
    pub fn around(&self, text: &[u32]) -> Vec<u32> {
        [&self.before, text, &self.after].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn template(post_processor: Value) -> Result<TextTemplate, String> {
        let file = json!({ "model": {}, "post_processor": post_processor });
        TextTemplate::from_bytes(file.to_string().as_bytes())
    }

    fn processing(single: Value) -> Value {
        let special = |id: u32, token: &str| json!({"id": token, "ids": [id], "tokens": [token]});
        json!({
            "type": "TemplateProcessing", "single": single, "pair": single,
            "special_tokens": {"<bos>": special(2, "<bos>"), "<eos>": special(1, "<eos>")},
        })
    }

    #[test]
    fn template_of_post_processor_adds_its_tokens_around_a_text() {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let token = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
        for (single, expected) in [
            (json!([text]), vec![7, 8]),
            (json!([token("<bos>"), text]), vec![2, 7, 8]),
            (
                json!([token("<bos>"), text, token("<eos>")]),
                vec![2, 7, 8, 1],
            ),
        ] {
            let template = template(processing(single)).expect("the template is supported");
            assert_eq!(template.around(&[7, 8]), expected);
            assert_eq!(template.len(), expected.len() - 2);
        }
        let none = template(Value::Null).expect("a file may have no post-processor");
        assert_eq!(none, TextTemplate::default());
    }

    #[test]
    fn template_without_the_text_is_refused() {
        let single = json!([{"SpecialToken": {"id": "<bos>", "type_id": 0}}]);
        let error = template(processing(single)).expect_err("the text is missing");
        assert!(error.contains("post_processor"), "{error}");
    }
}
