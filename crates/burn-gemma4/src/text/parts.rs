//! What a model writes, told apart by its special tokens: answer, thoughts, calls of tools.

use crate::{Gemma4Error, TextStream, Tokenizer};
use serde::Serialize;

/// What a piece of generated text is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TextKind {
    /// What the model says; all text of a model that has no special tokens for the others.
    #[default]
    Answer,
    /// What it thinks before, `<|channel>thought … <channel|>`.
    Thought,
    /// A tool that it calls, `<|tool_call>call:name{…}<tool_call|>`, or what it makes up as a tool's response.
    ToolCall,
}

/// The special tokens that begin a kind of text.
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

/// The name of the channel of thoughts, which is the channel's first line.
const THOUGHT: &str = "thought";

/// The parts of a text whose tokens come one by one.
pub(crate) struct Parts<'a> {
    tokenizer: &'a Tokenizer,
    stream: TextStream<'a>,
    marks: Vec<(u32, TextKind)>,
    kind: TextKind,
    /// A channel's first line, as long as it may be its name.
    name: Option<String>,
    pub answer: String,
    pub thoughts: String,
    pub tool_calls: Vec<String>,
}

impl<'a> Parts<'a> {
    /// What comes after `prompt`, which may end within a thought.
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
            // What has been read is not what is written.
            parts.stream = tokenizer.stream();
            parts.thoughts.clear();
            parts.tool_calls.iter_mut().for_each(String::clear);
        }
        Ok(parts)
    }

    /// The text that becomes complete with `token`, and what it is.
    pub fn push(&mut self, token: u32) -> Result<(TextKind, String), Gemma4Error> {
        if let Some(kind) = self.begins(token) {
            let end = self.finish()?;
            self.kind = kind;
            match kind {
                TextKind::Answer => (),
                TextKind::Thought => self.name = Some(String::new()),
                TextKind::ToolCall => self.tool_calls.push(String::new()),
            }
            return Ok(end);
        }
        let text = match self.tokenizer.special(token) {
            // Special tokens delimit a call's texts.
            Some(special) if self.kind == TextKind::ToolCall => self.stream.finish()? + &special,
            _ => self.stream.push(token)?,
        };
        let text = self.without_name(text);
        Ok(self.keep(text))
    }

    /// The text that was held back, and what it is.
    pub fn finish(&mut self) -> Result<(TextKind, String), Gemma4Error> {
        let mut text = self.stream.finish()?;
        text = self.without_name(text);
        if let Some(name) = self.name.take()
            && name != THOUGHT
        {
            text = name;
        }
        Ok(self.keep(text))
    }

    fn begins(&self, token: u32) -> Option<TextKind> {
        let mark = self.marks.iter().find(|(mark, _)| *mark == token)?;
        Some(mark.1)
    }

    /// What is left of a channel's text without the line that names it. Lines of other words are no names.
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
