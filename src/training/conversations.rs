//! Conversations and texts to fine-tune on, a JSON object a line.

use super::{corpus::read_text, rows::Example};
use crate::Error;
use burn_gemma4::{ChatOptions, ChatTemplate, Gemma4, Gemma4Error, Message, Role, Tokenizer};
use serde_json::Value;
use std::path::Path;

/// What a line holds.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// `{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`
    Messages(Vec<Message>),
    /// `{"text": "…"}`
    Text(String),
}

/// The examples of a file with a JSON object in every line: `messages`, of which the assistant's are learned, or `text`, which
/// is learned as a whole. Other fields are passed over, and so are empty lines.
///
/// # Errors
/// Naming the file, and the line that is not such an object or that the chat template refuses.
pub fn read(path: &Path, gemma: &Gemma4) -> Result<Vec<Example>, Error> {
    let text = read_text(path)?;
    let mut examples = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let example = parse(line)
            .and_then(|line| example(line, gemma).map_err(|error| error.to_string()))
            .and_then(|example| within(example, gemma.config().vocab_size));
        let named = |reason| format!("{}: line {}: {reason}", path.display(), index + 1);
        examples.push(example.map_err(named)?);
    }
    match examples.is_empty() {
        true => Err(format!("{}: has no examples", path.display()).into()),
        false => Ok(examples),
    }
}

fn parse(line: &str) -> Result<Line, String> {
    const EXPECTED: &str = "it should have one of \"messages\" and \"text\"";
    // Only the column says anything: the line is a text of its own to the parser.
    let broken = |error: serde_json::Error| format!("is no JSON, column {}", error.column());
    let Value::Object(mut fields) = serde_json::from_str(line).map_err(broken)? else {
        return Err(format!("is no JSON object; {EXPECTED}"));
    };
    match (fields.remove("messages"), fields.remove("text")) {
        (Some(messages), None) => {
            let messages: Vec<Message> = serde_json::from_value(messages)
                .map_err(|error| format!("\"messages\": {error}"))?;
            match messages
                .iter()
                .any(|message| message.role == Role::Assistant)
            {
                true => Ok(Line::Messages(messages)),
                false => Err(
                    "\"messages\" has nothing to learn: no message of the role \"assistant\""
                        .into(),
                ),
            }
        }
        (None, Some(Value::String(text))) if !text.is_empty() => Ok(Line::Text(text)),
        (None, Some(_)) => Err("\"text\" is no text, or an empty one".into()),
        (Some(_), Some(_)) => Err(format!("has both; {EXPECTED}")),
        (None, None) => {
            let names: Vec<_> = fields.keys().map(|name| format!("{name:?}")).collect();
            Err(format!("has the fields {}; {EXPECTED}", names.join(", ")))
        }
    }
}

fn example(line: Line, gemma: &Gemma4) -> Result<Example, Gemma4Error> {
    let tokenizer = gemma.tokenizer();
    let mut example = Example {
        tokens: Vec::new(),
        learned: Vec::new(),
    };
    match line {
        Line::Text(text) => {
            let config = gemma.config();
            example.extend([config.bos_token], false);
            example.extend(tokenizer.encode(&text)?, true);
            example.extend(config.eos_tokens.first().copied(), true);
        }
        Line::Messages(messages) => {
            for (text, learned) in turns(&messages, gemma.chat_template())? {
                example.extend(encode(tokenizer, &text)?, learned);
            }
        }
    }
    Ok(example)
}

/// A tokenizer may have tokens that the model has no row for.
fn within(example: Example, vocabulary: usize) -> Result<Example, String> {
    let outside = |token: &&u32| **token as usize >= vocabulary;
    match example.tokens.iter().find(outside) {
        Some(token) => Err(format!(
            "has the token {token}, but the model's vocabulary has {vocabulary} tokens"
        )),
        None => Ok(example),
    }
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Gemma4Error> {
    match text.is_empty() {
        true => Ok(Vec::new()),
        false => tokenizer.encode(text),
    }
}

/// A conversation's text in pieces: what is read, and what the model has to say, through the end of its turn. Each is to be
/// encoded alone, as a prompt is when the model goes on from it.
fn turns(
    messages: &[Message],
    template: &ChatTemplate,
) -> Result<Vec<(String, bool)>, Gemma4Error> {
    let options = ChatOptions {
        add_generation_prompt: false,
        ..ChatOptions::default()
    };
    let whole = template.render(messages, options)?;
    let mut pieces = Vec::new();
    let mut done = 0;
    for (index, message) in messages.iter().enumerate() {
        if message.role != Role::Assistant {
            continue;
        }
        let ends = [index, index + 1].map(|count| match count {
            0 => Ok(String::new()),
            _ => template.render(&messages[..count], options),
        });
        let [before, after] = ends;
        let (before, after) = (before?, after?);
        let rest = whole
            .strip_prefix(&after)
            .filter(|_| after.starts_with(&before) && before.len() >= done)
            .map(|_| &after[before.len()..]);
        let Some(turn) = rest else {
            return Err(Gemma4Error::ChatTemplate(
                "it renders a turn otherwise when the conversation goes on".into(),
            ));
        };
        // The turn's first line says whose it is; the line end after the turn is not the model's.
        let header = turn.find('\n').map_or(turn.len(), |end| end + 1);
        let start = before.len() + header;
        let end = before.len() + turn.trim_end_matches('\n').len().max(header);
        pieces.push((whole[done..start].to_owned(), false));
        pieces.push((whole[start..end].to_owned(), true));
        done = end;
    }
    Ok(pieces)
}

impl Example {
    fn extend(&mut self, tokens: impl IntoIterator<Item = u32>, learned: bool) {
        self.tokens.extend(tokens);
        self.learned.resize(self.tokens.len(), learned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_are_learned() {
        let messages = [
            Message::system("Be brief."),
            Message::user("Hi"),
            Message::assistant("Hello!"),
            Message::user("Bye"),
            Message::assistant("See you."),
        ];
        let pieces = turns(&messages, &ChatTemplate::gemma4()).expect("a conversation");
        let expected = [
            (
                "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n",
                false,
            ),
            ("Hello!<turn|>", true),
            ("\n<|turn>user\nBye<turn|>\n<|turn>model\n", false),
            ("See you.<turn|>", true),
        ];
        assert_eq!(
            pieces,
            expected.map(|(text, learned)| (text.to_owned(), learned))
        );
    }

    #[test]
    fn lines_of_other_kinds_are_explained() {
        for (line, word) in [
            (r#"{"text": "a""#, "column 12"),
            (r#"["a"]"#, "no JSON object"),
            (r#"{"mesages": [], "id": 3}"#, "\"id\", \"mesages\""),
            (r#"{"text": ""}"#, "\"text\""),
            (r#"{"text": "a", "messages": []}"#, "both"),
            (
                r#"{"messages": [{"role": "robot", "content": "a"}]}"#,
                "robot",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}]}"#,
                "assistant",
            ),
            (r#"{"messages": "a"}"#, "messages"),
        ] {
            let reason = parse(line).expect_err(line);
            assert!(reason.contains(word), "{line}: {reason}");
        }
        let text = parse(r#"{"id": 1, "text": "a"}"#).expect("a text");
        assert_eq!(text, Line::Text("a".into()));
    }
}
