//! Writes log-probabilities in the JSON formats of OpenAI's APIs.

use crate::engine::TokenProbability;
use burn_gemma4::Tokenizer;
use serde_json::{Map, Value, json};

/// Returns the bytes of a token's text. The text of a special token is its name.
fn bytes(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    match tokenizer.special(token) {
        Some(special) => special.into_bytes(),
        None => match tokenizer.token_bytes(token) {
            Ok(Some(bytes)) => bytes,
            _ => Vec::new(),
        },
    }
}

fn name(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Replaces −∞ by −9999, because JSON has no infinities. OpenAI's API returns −9999 too.
fn number(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// Returns the field `logprobs` of a chat completion.
pub(crate) fn of_chat(tokenizer: &Tokenizer, tokens: &[TokenProbability]) -> Value {
    let one = |token: u32, logprob: f32| {
        let bytes = bytes(tokenizer, token);
        json!({"token": name(&bytes), "logprob": number(logprob), "bytes": bytes})
    };
    let content = tokens.iter().map(|token| {
        let mut entry = one(token.token, token.logprob);
        let top = token
            .top
            .iter()
            .map(|(token, logprob)| one(*token, *logprob));
        entry["top_logprobs"] = top.collect();
        entry
    });
    json!({"content": content.collect::<Value>(), "refusal": null})
}

/// Returns the field `logprobs` of a text completion. `offset` is the number of characters before the first token. The
/// function advances `offset` past the last token.
pub(crate) fn of_text(
    tokenizer: &Tokenizer,
    tokens: &[TokenProbability],
    offset: &mut usize,
) -> Value {
    let (mut names, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let text = name(&bytes(tokenizer, token.token));
        offsets.push(*offset);
        *offset += text.chars().count();
        names.push(text);
        logprobs.push(number(token.logprob));
        let top: Map<String, Value> = token
            .top
            .iter()
            .map(|(token, logprob)| {
                let name = name(&bytes(tokenizer, *token));
                (name, json!(number(*logprob)))
            })
            .collect();
        tops.push(Value::Object(top));
    }
    json!({"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
}
