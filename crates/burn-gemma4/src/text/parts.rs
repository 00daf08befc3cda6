//! The division of a generated text into answer, thoughts and tool calls. Special tokens separate these parts.

use crate::error::Gemma4Error;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::stream::TextStream;
use serde::Serialize;

/// The kind of a piece of generated text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TextKind {
    /// Text of the answer. If the tokenizer lacks the special tokens of the other kinds, the whole text is the answer.
    #[default]
    Answer,
    /// Thoughts before the answer: `<|channel>thought … <channel|>`.
    Thought,
    /// A tool call, `<|tool_call>call:name{…}<tool_call|>`. A tool response is also of this kind, if the model writes
    /// the response instead of waiting for the tool.
    ToolCall,
}

/// The special tokens at which the kind of the text changes. Each token is paired with the kind of the text after this
/// token.
const MARKS: [(&str, TextKind); 8] = [
    ("<|channel>", TextKind::Thought),
    ("<channel|>", TextKind::Answer),
    ("<|tool_call>", TextKind::ToolCall),
    ("<tool_call|>", TextKind::Answer),
    ("<|tool_response>", TextKind::ToolCall),
    ("<tool_response|>", TextKind::Answer),
    ("<|turn>", TextKind::Answer),
    ("<turn|>", TextKind::Answer),
];

/// The name of the thought channel. The first line of a channel is the channel's name.
const THOUGHT: &str = "thought";

/// Splits a stream of tokens into answer, thoughts and tool calls.
#[derive(Debug)]
pub struct Parts<'a> {
    tokenizer: &'a Tokenizer,
    stream: TextStream<'a>,
    marks: Vec<(u32, TextKind)>,
    kind: TextKind,
    /// The first line of a channel, as far as it has been generated, or `None` outside the first line of a channel. The
    /// line is held back, because it may be the channel's name.
    name: Option<String>,
    /// The text of the answer so far.
    pub answer: String,
    /// The text of the thoughts so far.
    pub thoughts: String,
    /// The text of each tool call so far.
    pub tool_calls: Vec<String>,
}

impl<'a> Parts<'a> {
    /// Creates a splitter for the text after `prompt`. The prompt may end inside a thought, which the text then
    /// continues.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects a token of the prompt.
    pub fn after(prompt: &[u32], tokenizer: &'a Tokenizer) -> Result<Self, Gemma4Error> {
        let mut parts = Self {
            tokenizer,
            stream: tokenizer.stream(),
            marks: MARKS
                .iter()
                .filter_map(|(mark, kind)| Some((tokenizer.id(mark)?, *kind)))
                .collect(),
            kind: TextKind::Answer,
            name: None,
            answer: String::new(),
            thoughts: String::new(),
            tool_calls: Vec::new(),
        };
        let last = prompt
            .iter()
            .rposition(|token| parts.begins(*token).is_some());
        if let Some(last) = last
            && parts.begins(prompt[last]) != Some(TextKind::Answer)
        {
            for token in &prompt[last..] {
                parts.push(*token)?;
            }
            // Drop the text that has been collected so far, because it is part of the prompt.
            parts.stream = tokenizer.stream();
            parts.thoughts.clear();
            parts.tool_calls.iter_mut().for_each(String::clear);
        }
        Ok(parts)
    }

    /// Adds a token. Returns the text that the token completes, and the kind of that text.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the token.
    pub fn push(&mut self, token: u32) -> Result<(TextKind, String), Gemma4Error> {
        if let Some(kind) = self.begins(token) {
            let end = self.end_part(|name| name == THOUGHT)?;
            self.kind = kind;
            match kind {
                TextKind::Answer => (),
                TextKind::Thought => self.name = Some(String::new()),
                TextKind::ToolCall => self.tool_calls.push(String::new()),
            }
            return Ok(end);
        }
        let text = match self.tokenizer.special(token) {
            // Keep special tokens in the text of a tool call, because they delimit the strings among the call's
            // arguments.
            Some(special) if self.kind == TextKind::ToolCall => self.stream.finish()? + &special,
            _ => self.stream.push(token)?,
        };
        let text = self.without_name(text);
        Ok(self.keep(text))
    }

    /// The kind of the text that the next token continues.
    pub fn kind(&self) -> TextKind {
        self.kind
    }

    /// Ends the current part after the last token. Returns the text that was held back, and the kind of that text. If
    /// the held-back text is a beginning of the channel name `thought`, the text is dropped.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects the tokens.
    pub fn finish(&mut self) -> Result<(TextKind, String), Gemma4Error> {
        self.end_part(|name| THOUGHT.starts_with(name))
    }

    /// Ends the current part, and returns the text that was held back. If a channel's first line was held back,
    /// `is_name` tells whether this line is the channel's name. In this case, the line is dropped and not returned.
    fn end_part(
        &mut self,
        is_name: impl Fn(&str) -> bool,
    ) -> Result<(TextKind, String), Gemma4Error> {
        let mut text = self.stream.finish()?;
        text = self.without_name(text);
        if let Some(name) = self.name.take()
            && !is_name(&name)
        {
            text = name;
        }
        Ok(self.keep(text))
    }

    fn begins(&self, token: u32) -> Option<TextKind> {
        let mark = self.marks.iter().find(|(mark, _)| *mark == token)?;
        Some(mark.1)
    }

    /// Removes the first line from the text of a channel if the line is the channel's name. Otherwise the line stays.
    fn without_name(&mut self, text: String) -> String {
        let Some(mut line) = self.name.take() else {
            return text;
        };
        line += &text;
        match line.split_once('\n') {
            Some((THOUGHT, rest)) => rest.to_owned(),
            Some(_) => line,
            None => {
                self.name = Some(line);
                String::new()
            }
        }
    }

    fn keep(&mut self, text: String) -> (TextKind, String) {
        match self.kind {
            TextKind::Answer => self.answer += &text,
            TextKind::Thought => self.thoughts += &text,
            TextKind::ToolCall => {
                if let Some(call) = self.tool_calls.last_mut() {
                    *call += &text;
                }
            }
        }
        (self.kind, text)
    }
}
