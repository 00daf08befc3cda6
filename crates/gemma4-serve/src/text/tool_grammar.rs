//! The grammar of answers that must call a tool.

use super::conversation::Tool;
use crate::engine::Grammar;
use burn_gemma4::Tokenizer;

/// The special tokens that begin a tool call, end a tool call, and quote a string.
const MARKS: [&str; 3] = ["<|tool_call>", "<tool_call|>", "<|\"|>"];

/// Returns the grammar of an answer that calls one of the tools in `tools`. The answer makes one call, or one or more
/// calls if `is_parallel` is true. Returns `None` if the vocabulary lacks a special token of tool calls.
///
/// The grammar guarantees that the tool's name is in `tools`, and that the syntax of the arguments is valid. The
/// grammar does not enforce the JSON schema of the arguments.
pub fn grammar(tokenizer: &Tokenizer, tools: &[&Tool], is_parallel: bool) -> Option<Grammar> {
    let [begin, end, quote] = MARKS.map(|mark| tokenizer.id(mark));
    let (begin, end, quote) = (begin?, end?, quote?);
    let names: Vec<String> = tools
        .iter()
        .map(|tool| serde_json::Value::from(tool.name.as_str()).to_string())
        .collect();
    let names = names.join(" | ");
    let calls = match is_parallel {
        true => "call+",
        false => "call",
    };
    Some(Grammar::Lark(format!(
        r#"start: {calls}
call: <[{begin}]> "call:" name "{{" members "}}" <[{end}]>
name: {names}
members: (member ("," member)*)?
member: KEY ":" value
value: text | NUMBER | "true" | "false" | "null" | "[" items "]" | "{{" members "}}"
items: (value ("," value)*)?
text: <[{quote}]> TEXT <[{quote}]>
KEY: /[A-Za-z_][A-Za-z0-9_\-]*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/
TEXT: /(.|\n)*/
"#
    )))
}
