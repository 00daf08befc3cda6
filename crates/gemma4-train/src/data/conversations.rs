//! Conversations and texts for fine-tuning, from files with one JSON object per line.
//!
//! A chat template renders the messages of a conversation to one or more examples. An example is a list of pieces. A piece
//! is either context, or text that the model is trained on.
//!
//! The texts of users, systems and tools must not act as special tokens. A mark, a character that occurs in no text, is
//! therefore inserted into each special token of these texts before rendering. The token is then encoded as plain text.

use crate::data::{
    media::{ExampleMedium, MediaPart, Medium, Origin, take_parts},
    packing::Example,
};
use burn_gemma4::{
    ChatOptions, ChatTemplate, Gemma4, Gemma4Error, Marking, Prompt, PromptEncoder, Tokenizer,
};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// The contents of one line of the file.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    /// `{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`
    Messages(Conversation),
    /// `{"text": "…"}`
    Text(String),
}

/// A conversation from a line of the file. Its images and audio clips are not in the messages, in which each of them is a
/// part like `{"type": "image"}`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Conversation {
    /// The messages, each an object with a role.
    messages: Vec<Value>,
    /// The images and audio clips, in the order of the messages.
    media: Vec<MediaPart>,
    /// The fields of the line besides `messages` and `enable_thinking`, such as `tools`. The chat template gets these fields
    /// as variables.
    variables: Map<String, Value>,
    /// True if the chat template enables the model's thinking before an answer.
    enable_thinking: bool,
}

/// The allowed roles of messages. The model's own messages have the assistant's role.
const ROLES: [&str; 5] = ["system", "developer", "user", ASSISTANT, "tool"];
const ASSISTANT: &str = "assistant";
/// The field of an assistant's message that contains the responses of tools.
const TOOL_RESPONSES: &str = "tool_responses";

/// The fields of a line that are meant for the chat template. If the template does not render such a field, the line is
/// refused. Any other field that the template does not render is ignored.
const MEANT: [&str; 3] = ["tools", "documents", "chat_template_kwargs"];

/// The ignored fields of a file: a map from the name of a field to the number of lines that contain the field.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Ignored(BTreeMap<String, usize>);

impl Ignored {
    fn count(&mut self, column: &str) {
        *self.0.entry(column.to_owned()).or_default() += 1;
    }

    /// Returns a note about the ignored fields, or `None` if no field was ignored.
    pub(super) fn summary(&self) -> Option<String> {
        let named = |(name, count): (&String, &usize)| match count {
            1 => format!("{name:?} (1 line)"),
            _ => format!("{name:?} ({count} lines)"),
        };
        let names: Vec<_> = self.0.iter().map(named).collect();
        (!names.is_empty()).then(|| format!("columns that are ignored: {}", names.join(", ")))
    }
}

/// Parses one line, a JSON object. Fields with the value `null` are counted in `ignored`. If the line has the field
/// `text`, all of its other fields are counted in `ignored` too.
pub(super) fn parse(line: &str, ignored: &mut Ignored) -> Result<Line, String> {
    const EXPECTED: &str = "expected one of \"messages\" and \"text\"";
    // The error message names only the column, because the line number is always 1: the parser gets each line separately.
    let broken = |error: serde_json::Error| format!("is no JSON, column {}", error.column());
    let mut fields = match serde_json::from_str(line).map_err(broken)? {
        Value::Object(fields) => fields,
        Value::Array(_) => return Err("is a JSON array; expected a JSON object".into()),
        _ => return Err(format!("is not a JSON object; {EXPECTED}")),
    };
    fields.retain(|name, value| {
        if value.is_null() {
            ignored.count(name);
        }
        !value.is_null()
    });
    match (fields.shift_remove("messages"), fields.shift_remove("text")) {
        (Some(messages), None) => conversation(messages, fields, line).map(Line::Messages),
        (None, Some(Value::String(text))) if !text.is_empty() => {
            fields.keys().for_each(|name| ignored.count(name));
            Ok(Line::Text(text))
        }
        (None, Some(_)) => Err("\"text\" is empty or not a string; expected a text".into()),
        (Some(_), Some(_)) => Err(format!("has both \"messages\" and \"text\"; {EXPECTED}")),
        (None, None) => {
            let names: Vec<_> = fields.keys().map(|name| format!("{name:?}")).collect();
            Err(format!("has the fields {}; {EXPECTED}", names.join(", ")))
        }
    }
}

fn conversation(
    messages: Value,
    mut variables: Map<String, Value>,
    line: &str,
) -> Result<Conversation, String> {
    let Value::Array(mut messages) = messages else {
        return Err("\"messages\" is not a list; expected a list of messages".into());
    };
    for message in &messages {
        match message.get("role").and_then(Value::as_str) {
            Some(role) if ROLES.contains(&role) => (),
            Some(role) => {
                return Err(format!(
                    "\"messages\": {role:?} is not a known role; expected one of {ROLES:?}"
                ));
            }
            None => return Err("\"messages\": a message has no \"role\" field".into()),
        }
    }
    if !messages.iter().any(is_answer) {
        let reason =
            "\"messages\" has nothing to learn; expected a message of the role \"assistant\"";
        return Err(reason.into());
    }
    let enable_thinking = match variables.shift_remove("enable_thinking") {
        None => false,
        Some(Value::Bool(is_enabled)) => is_enabled,
        Some(_) => return Err("\"enable_thinking\" is not true or false".into()),
    };
    Ok(Conversation {
        media: take_parts(&mut messages, line)?,
        messages,
        variables,
        enable_thinking,
    })
}

impl Line {
    /// True if the line has images or audio clips.
    pub(super) fn has_media(&self) -> bool {
        match self {
            Self::Messages(conversation) => !conversation.media.is_empty(),
            Self::Text(_) => false,
        }
    }
}

fn is_answer(message: &Value) -> bool {
    message["role"] == ASSISTANT
}

/// The model for which a file is read, without the weights.
pub(super) struct Reader<'a> {
    gemma: &'a Gemma4,
    encoder: PromptEncoder,
}

impl<'a> Reader<'a> {
    pub fn new(gemma: &'a Gemma4) -> Self {
        Self {
            encoder: gemma.prompt_encoder(),
            gemma,
        }
    }

    pub fn gemma(&self) -> &Gemma4 {
        self.gemma
    }
}

/// Returns the training examples of one line of the file, which is at `origin`. `ignored` counts the fields that the chat
/// template does not render.
pub(super) fn of_line(
    line: Line,
    origin: &Origin,
    reader: &Reader<'_>,
    ignored: &mut Ignored,
) -> Result<Vec<Example>, String> {
    let gemma = reader.gemma;
    let said = |error: Gemma4Error| error.to_string();
    match line {
        Line::Text(text) => {
            // Add the beginning and end tokens only if the text lacks them. Prompts may already contain the beginning
            // token, and texts from templates may already contain the end token.
            let mut tokens = gemma
                .tokens(&Prompt::Text(text), ChatOptions::default())
                .map_err(said)?
                .into_iter();
            let ends = &gemma.config().eos_tokens;
            let is_ended = |last: &u32| ends.contains(last);
            let end = match tokens.as_slice().last().is_some_and(is_ended) {
                true => None,
                false => ends.first().copied(),
            };
            let mut example = Example::default();
            example.extend(tokens.next(), false);
            example.extend(tokens.chain(end), true);
            Ok(vec![example])
        }
        Line::Messages(conversation) => {
            let marking = conversation.marking(gemma.tokenizer()).map_err(said)?;
            let marked = conversation.marked(marking).map_err(said)?;
            let pieces = marked.examples(gemma.chat_template(), ignored)?;
            let ends = &gemma.config().eos_tokens;
            let media = conversation.read_media(origin, reader)?;
            let answers = conversation.answers_of_examples(pieces.len());
            let of_pieces = |(pieces, answer): (Vec<(String, bool)>, usize)| {
                let before = media.iter().filter(|(message, _)| *message < answer);
                let mut media = MediaQueues::new(before.map(|(_, medium)| medium.clone()));
                let mut example = Example::default();
                for (text, learned) in pieces {
                    let tokens = marking.encode(&text).map_err(said)?;
                    let follows_answer = example.learned.last() == Some(&true);
                    let start = example.tokens.len();
                    // A context piece with a tool's response may begin with the token that ends the model's tool call. The
                    // model is trained on this token.
                    let ends_answer = tokens.first().is_some_and(|token| ends.contains(token));
                    let tokens = match learned {
                        true => {
                            gemma.placeholders().check(&tokens).map_err(said)?;
                            tokens
                        }
                        false => media
                            .place(tokens, &reader.encoder, &mut example)
                            .map_err(said)?,
                    };
                    example.extend(tokens, learned);
                    if follows_answer && ends_answer {
                        example.learned[start] = true;
                    }
                }
                media.finish()?;
                Ok(example)
            };
            pieces.into_iter().zip(answers).map(of_pieces).collect()
        }
    }
}

/// The images and the audio clips of an example that have no place in its tokens yet.
struct MediaQueues {
    images: Vec<Arc<Medium>>,
    audio: Vec<Arc<Medium>>,
}

impl MediaQueues {
    fn new(media: impl Iterator<Item = Arc<Medium>>) -> Self {
        let (images, audio) = media.partition(|medium: &Arc<Medium>| medium.kinds().images);
        Self { images, audio }
    }

    /// Gives the next images and clips the places of the placeholders in `tokens`, which follow the tokens of `example`.
    /// Returns the tokens with one placeholder for each soft token.
    fn place(
        &mut self,
        tokens: Vec<u32>,
        encoder: &PromptEncoder,
        example: &mut Example,
    ) -> Result<Vec<u32>, Gemma4Error> {
        let [images, audio] = encoder.count_placeholders(&tokens);
        let take = |media: &mut Vec<Arc<Medium>>, count: usize| -> Vec<Arc<Medium>> {
            media.drain(..count.min(media.len())).collect()
        };
        let (images, audio) = (take(&mut self.images, images), take(&mut self.audio, audio));
        let counts = |media: &[Arc<Medium>]| -> Vec<usize> {
            media.iter().map(|medium| medium.tokens()).collect()
        };
        let layout = encoder.layout(tokens, &counts(&images), &counts(&audio))?;
        let start = example.tokens.len();
        let places = layout.images.into_iter().chain(layout.audio);
        let placed = places.zip(images.into_iter().chain(audio));
        let placed = placed.map(|(place, medium)| ExampleMedium {
            tokens: start + place.start..start + place.end,
            medium,
        });
        example.media.extend(placed);
        example.media.sort_by_key(|medium| medium.tokens.start);
        Ok(layout.tokens)
    }

    /// Refuses images and clips for which the chat template has written no placeholder.
    fn finish(self) -> Result<(), String> {
        for (media, noun) in [(self.images, "images"), (self.audio, "audio clips")] {
            if !media.is_empty() {
                return Err(format!(
                    "the chat template has no place for {} of the conversation's {noun}; expected a placeholder for each of them",
                    media.len()
                ));
            }
        }
        Ok(())
    }
}

/// Returns the JSON value with a mark inserted wherever one of its texts spells out a special token.
fn marked(value: &Value, marking: Marking<'_>) -> Result<Value, Gemma4Error> {
    Ok(match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        Value::String(text) => Value::String(marking.mark(text)?),
        Value::Array(values) => values
            .iter()
            .map(|value| marked(value, marking))
            .collect::<Result<_, _>>()?,
        Value::Object(fields) => {
            let marked = |(name, value): (&String, &Value)| {
                Ok((marking.mark(name)?, marked(value, marking)?))
            };
            Value::Object(
                fields
                    .iter()
                    .map(marked)
                    .collect::<Result<_, Gemma4Error>>()?,
            )
        }
    })
}

/// One turn of the model, as a template renders it.
struct Turn {
    /// The rendered text before the turn.
    before: String,
    /// The opening of the turn, which is context. The opening is the turn's header, such as `<|turn>model`, and any
    /// text that a generation prompt adds after the header.
    opening: String,
    /// The text of the turn after the opening, split into pieces. Each piece has a flag. The flag is true for text of
    /// the model, which is trained on. The flag is false for a tool's response, which is context.
    answer: Vec<(String, bool)>,
    /// True if two conditions hold. The turn begins with `opening`. The rendering of the whole conversation begins with
    /// `before`, followed by this turn.
    stays: bool,
}

impl Conversation {
    /// Chooses a mark, a character that does not occur in any text that a template may render. The search reads the texts as
    /// JSON, which is safe because JSON escapes no character that can be a mark.
    fn marking<'a>(&self, tokenizer: &'a Tokenizer) -> Result<Marking<'a>, Gemma4Error> {
        let rendered = self.messages.iter().chain(self.variables.values());
        let texts: Vec<String> = rendered.map(Value::to_string).collect();
        tokenizer.marking(texts.iter().map(String::as_str))
    }

    /// Inserts marks into the special tokens in the texts of users, systems and tools, so that these tokens are encoded as
    /// plain text. The model's own text stays unmarked, and may contain special tokens.
    fn marked(&self, marking: Marking<'_>) -> Result<Self, Gemma4Error> {
        let of_message = |message: &Value| {
            if !is_answer(message) {
                return marked(message, marking);
            }
            let mut answer = message.clone();
            if let Some(said) = answer.get_mut(TOOL_RESPONSES) {
                *said = marked(said, marking)?;
            }
            Ok(answer)
        };
        // A top-level string field such as `bos_token` stays unmarked, because its value may be the name of a special
        // token.
        let of_variable = |(name, value): (&String, &Value)| match value {
            Value::String(_) => Ok((name.clone(), value.clone())),
            value => Ok((name.clone(), marked(value, marking)?)),
        };
        Ok(Self {
            media: self.media.clone(),
            messages: self
                .messages
                .iter()
                .map(of_message)
                .collect::<Result<_, _>>()?,
            variables: self
                .variables
                .iter()
                .map(of_variable)
                .collect::<Result<_, Gemma4Error>>()?,
            enable_thinking: self.enable_thinking,
        })
    }

    fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, Gemma4Error> {
        if messages.is_empty() {
            return Ok(String::new());
        }
        let options = ChatOptions {
            add_generation_prompt,
            enable_thinking: self.enable_thinking,
            ..ChatOptions::default()
        };
        template.render_json(messages, &self.variables, options)
    }

    /// Returns the text of each example as a list of pieces: context, or text to train on. Each piece is tokenized
    /// separately, because generation also tokenizes the prompt without the answer.
    fn examples(
        &self,
        template: &ChatTemplate,
        ignored: &mut Ignored,
    ) -> Result<Vec<Vec<(String, bool)>>, String> {
        let said = |error: Gemma4Error| error.to_string();
        let until = self.beginnings(template).map_err(said)?;
        self.refuse_unrendered(template, &until, ignored)?;
        self.pieces(template, &until).map_err(said)
    }

    /// Reads the sizes of the images and audio clips. Returns them with the indices of their messages.
    fn read_media(
        &self,
        origin: &Origin,
        reader: &Reader<'_>,
    ) -> Result<Vec<(usize, Arc<Medium>)>, String> {
        let read = |part: &MediaPart| {
            let medium = Medium::read(part, origin, &reader.encoder)?;
            Ok((part.message, Arc::new(medium)))
        };
        self.media.iter().map(read).collect()
    }

    /// Returns the index of the last answer in each of `count` examples. A conversation is one example, or each of its
    /// answers is.
    fn answers_of_examples(&self, count: usize) -> Vec<usize> {
        let messages = self.messages.iter().enumerate();
        let answers = messages.filter(|(_, message)| is_answer(message));
        let answers: Vec<usize> = answers.map(|(index, _)| index).collect();
        answers[answers.len() - count..].to_vec()
    }

    /// Renders each beginning of the conversation: its first 0, 1, 2, … messages, up to the whole conversation.
    fn beginnings(&self, template: &ChatTemplate) -> Result<Vec<String>, Gemma4Error> {
        (0..=self.messages.len())
            .map(|count| self.render(template, &self.messages[..count], false))
            .collect()
    }

    /// Splits the conversation into examples. A template may render the text before a turn of the model differently in
    /// training than in generation. For example, a template may drop an empty thought from an earlier answer. If this
    /// text differs for any turn, each turn becomes its own example. Otherwise, the whole conversation is a single
    /// example.
    fn pieces(
        &self,
        template: &ChatTemplate,
        until: &[String],
    ) -> Result<Vec<Vec<(String, bool)>>, Gemma4Error> {
        let whole = &until[self.messages.len()];
        let answers = self.messages.iter().enumerate();
        let turns = answers
            .filter(|(_, message)| is_answer(message))
            .map(|(index, _)| self.turn(template, index, until))
            .collect::<Result<Vec<_>, _>>()?;
        if !turns.iter().all(|turn| turn.stays) {
            let apart = |turn: Turn| {
                let read = (turn.before + &turn.opening, false);
                [read].into_iter().chain(turn.answer).collect()
            };
            return Ok(turns.into_iter().map(apart).collect());
        }
        let mut pieces = Vec::new();
        let mut done = 0;
        for turn in turns {
            let start = turn.before.len() + turn.opening.len();
            pieces.push((whole[done..start].to_owned(), false));
            done = start
                + turn
                    .answer
                    .iter()
                    .map(|(text, _)| text.len())
                    .sum::<usize>();
            pieces.extend(turn.answer);
        }
        Ok(vec![pieces])
    }

    fn turn(
        &self,
        template: &ChatTemplate,
        index: usize,
        until: &[String],
    ) -> Result<Turn, Gemma4Error> {
        let (before, after) = (&until[index], &until[index + 1]);
        let whole = &until[self.messages.len()];
        let prompt = self.render(template, &self.messages[..index], true)?;
        let Some(turn) = after.strip_prefix(before.as_str()) else {
            return Err(Gemma4Error::ChatTemplate(
                "the template renders a message differently when an answer follows; expected the same text".into(),
            ));
        };
        let header = &turn[..turn.find('\n').map_or(turn.len(), |end| end + 1)];
        let asked = prompt.strip_prefix(before.as_str()).unwrap_or(header);
        // If the answer has its own thought, the opening omits the empty thought that a generation prompt adds.
        let added = asked.strip_prefix(header).unwrap_or_default();
        let (opening, read) = match turn.starts_with(asked) {
            true => (asked, asked.len()),
            false if added.is_empty() || has_own_thought(&turn[header.len()..], added) => {
                (header, header.len())
            }
            false => (asked, header.len()),
        };
        // The line breaks after the turn are left out, because the model does not generate them.
        let end = turn.trim_end_matches('\n').len().max(read);
        Ok(Turn {
            stays: opening.len() == read && whole.starts_with(after.as_str()),
            opening: opening.to_owned(),
            answer: self.without_responses(
                template,
                index,
                &after[..before.len() + read],
                &turn[read..end],
            )?,
            before: before.clone(),
        })
    }

    /// Splits an answer into pieces, so that tools' responses are context. If special tokens mark the beginning and end
    /// of a response, the split is at these tokens. Otherwise, the message is rendered once more without
    /// `tool_responses`. The response is the text that this second rendering lacks.
    fn without_responses(
        &self,
        template: &ChatTemplate,
        index: usize,
        before: &str,
        answer: &str,
    ) -> Result<Vec<(String, bool)>, Gemma4Error> {
        let message = &self.messages[index];
        if message.get(TOOL_RESPONSES).is_none_or(is_empty) {
            return Ok(vec![(answer.to_owned(), true)]);
        }
        if answer.contains(RESPONSE[0]) {
            return Ok(apart(answer, responses(answer)));
        }
        let mut without = self.messages[..=index].to_vec();
        if let Some(fields) = without[index].as_object_mut() {
            fields.shift_remove(TOOL_RESPONSES);
        }
        let without = self.render(template, &without, false)?;
        let without = without.strip_prefix(before).unwrap_or_default();
        match inserted(without.trim_end_matches('\n'), answer) {
            Some(added) => Ok(apart(answer, vec![added])),
            None => Err(Gemma4Error::ChatTemplate(format!(
                "{TOOL_RESPONSES:?} of message {}: the chat template renders the responses without a boundary to the answer; expected <|tool_response> before them",
                index + 1
            ))),
        }
    }

    /// Refuses a message if the template does not render it completely. Also refuses a line with a field of [`MEANT`]
    /// that the template does not render. Any other field that is not rendered is counted in `ignored`.
    fn refuse_unrendered(
        &self,
        template: &ChatTemplate,
        until: &[String],
        ignored: &mut Ignored,
    ) -> Result<(), String> {
        let whole = &until[self.messages.len()];
        for name in self.variables.keys() {
            let mut without = self.clone();
            without.variables.shift_remove(name);
            // The field is unused if the rendering without it is unchanged. A template that fails without the field uses the
            // field.
            if matches!(without.render(template, &self.messages, false), Ok(text) if text == *whole)
            {
                if MEANT.contains(&name.as_str()) {
                    return Err(format!("{name:?} is not rendered by the chat template"));
                }
                ignored.count(name);
            }
        }
        for (index, message) in self.messages.iter().enumerate() {
            let fields = message.as_object().into_iter().flatten();
            // Look for each field in the rendering of the conversation up to this message, because a template may drop
            // earlier thoughts when the conversation continues.
            let until = &until[index + 1];
            for (name, value) in fields.filter(|(name, value)| *name != "role" && !is_empty(value))
            {
                if name == "content" && value.is_array() && prints_parts(value, until) {
                    let number = index + 1;
                    return Err(format!(
                        "\"content\" of message {number}: the chat template prints the list of its parts; expected a text"
                    ));
                }
                let is_rendered = match value.as_str().filter(|_| name == "content") {
                    Some(content) => until.contains(content.trim()),
                    None => {
                        let mut without = self.messages[..=index].to_vec();
                        if let Some(fields) = without[index].as_object_mut() {
                            fields.shift_remove(name);
                        }
                        let without = self.render(template, &without, false);
                        !matches!(without, Ok(text) if text == *until)
                    }
                };
                if !is_rendered {
                    let number = index + 1;
                    return Err(format!(
                        "{name:?} of message {number} is not rendered by the chat template, or not all of it"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// True if an answer begins with its own thought, that is, with the opening tag of `empty_thought`. The tag is, for
/// example, `<|channel>` or `<think>`. Tool calls and HTML begin with other tags.
fn has_own_thought(answer: &str, empty_thought: &str) -> bool {
    let text = empty_thought.trim_start();
    let end = match text.starts_with('<') {
        true => text.find('>').map(|end| end + 1),
        false => text.find(char::is_whitespace),
    };
    let mark = &text[..end.unwrap_or(text.len())];
    !mark.is_empty() && answer.trim_start().starts_with(mark)
}

/// The special tokens before and after a tool's response.
const RESPONSE: [&str; 2] = ["<|tool_response>", "<tool_response|>"];

/// Returns the byte ranges of an answer that are responses of tools.
fn responses(answer: &str) -> Vec<Range<usize>> {
    let [begin, end] = RESPONSE;
    let mut found = Vec::new();
    let mut done = 0;
    while let Some(start) = answer[done..].find(begin).map(|start| done + start) {
        let after = answer[start..].find(end);
        done = after.map_or(answer.len(), |after| start + after + end.len());
        found.push(start..done);
    }
    found
}

/// Returns the byte range of `whole` whose removal gives `without`, or `None` if no range does. If several ranges do, a
/// range that starts at a `<` is preferred.
fn inserted(without: &str, whole: &str) -> Option<Range<usize>> {
    let count = whole.len().checked_sub(without.len())?;
    let alike = |(a, b): &(char, char)| a == b;
    let same = whole.chars().zip(without.chars()).take_while(alike);
    let last: usize = same.map(|(char, _)| char.len_utf8()).sum();
    if whole.get(last + count..) != without.get(last..) {
        return None;
    }
    // A range of the same length that starts earlier may also give `without`, if the removed text repeats characters
    // around it.
    let is_start = |start: &usize| whole.get(start + count..) == without.get(*start..);
    let starts = (0..=last)
        .rev()
        .filter(|start| whole.is_char_boundary(*start));
    let mut starts = starts.take_while(is_start);
    let start = starts.find(|start| whole[*start..].starts_with('<'));
    let start = start.unwrap_or(last);
    Some(start..start + count)
}

/// Splits a text into pieces. The text in the ranges `read` becomes context. The remaining text becomes text to train
/// on.
fn apart(text: &str, read: Vec<Range<usize>>) -> Vec<(String, bool)> {
    let mut pieces = Vec::new();
    let mut done = 0;
    for range in read {
        pieces.push((text[done..range.start].to_owned(), true));
        done = range.end;
        pieces.push((text[range].to_owned(), false));
    }
    pieces.push((text[done..].to_owned(), true));
    pieces.retain(|(text, _)| !text.is_empty());
    pieces
}

/// True if a rendering contains the list of a message's content parts, printed as JSON or Python, instead of the parts'
/// texts.
fn prints_parts(parts: &Value, rendered: &str) -> bool {
    let parts = parts.as_array().into_iter().flatten();
    let mut kinds = parts.filter_map(|part| part["type"].as_str());
    kinds.any(|kind| {
        let printed = [
            format!("\"type\": \"{kind}\""),
            format!("\"type\":\"{kind}\""),
            format!("'type': '{kind}'"),
        ];
        printed.iter().any(|printed| rendered.contains(printed))
    })
}

/// True if the value has no content to render.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.trim().is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
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

    /// Returns the place of a line without files.
    #[cfg(feature = "flex")]
    fn origin() -> Origin {
        Origin {
            file: std::path::Path::new("a.jsonl").into(),
            line: 1,
            start: 0,
        }
    }

    fn read_line(line: &str) -> Conversation {
        match parse(line, &mut Ignored::default()).expect("a line") {
            Line::Messages(conversation) => conversation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn conversation_examples_train_on_answers_only() {
        let conversation = read_line(
            r#"{"messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
                {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you."}
            ]}"#,
        );
        let template = ChatTemplate::gemma4();
        let pieces = conversation
            .examples(&template, &mut Ignored::default())
            .expect("all is rendered");
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
            [expected.map(|(text, learned)| (text.to_owned(), learned))]
        );
    }

    /// A template like those of the larger Gemma models. The template renders tools, calls, answers and thoughts, and an
    /// empty thought before an answer without a thought.
    const THINKING: &str = "{% if tools %}[{{ tools | length }}]{% endif %}\
        {% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n\
        {% if m.reasoning and loop.last %}<|channel>{{ m.reasoning }}<channel|>{% endif %}\
        {{ m.content }}{% for call in m.tool_calls or [] %}<|call>{{ call.function.name }}<call|>{% endfor %}\
        <turn|>\n{% endfor %}\
        {% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking %}<|channel><channel|>{% endif %}{% endif %}";

    fn learned(line: &str) -> Result<Vec<Vec<(String, bool)>>, String> {
        let template = ChatTemplate::from_source(THINKING).expect("a template");
        read_line(line).examples(&template, &mut Ignored::default())
    }

    #[test]
    fn conversation_with_empty_thoughts_has_them_as_context() {
        let found = learned(
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#,
        );
        let first = "<|turn>user\na<turn|>\n<|turn>model\n";
        let expected = [
            [
                (format!("{first}<|channel><channel|>"), false),
                ("b<turn|>".into(), true),
            ],
            [
                (
                    format!(
                        "{first}b<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\n<|channel><channel|>"
                    ),
                    false,
                ),
                ("d<turn|>".into(), true),
            ],
        ];
        assert_eq!(found.expect("pieces"), expected.map(Vec::from));
    }

    #[test]
    fn conversation_with_thoughts_and_calls_trains_on_both() {
        let found = learned(
            r#"{"tools": [{}], "enable_thinking": true, "messages": [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "content": "7"}, {"role": "assistant", "content": "b"}]}"#,
        );
        let first = "[1]<|turn>user\na<turn|>\n<|turn>model\n";
        let expected = [
            [
                (first.to_owned(), false),
                ("<|channel>hm<channel|><|call>f<call|><turn|>".into(), true),
            ],
            [
                (
                    format!("{first}<|call>f<call|><turn|>\n<|turn>tool\n7<turn|>\n<|turn>model\n"),
                    false,
                ),
                ("b<turn|>".into(), true),
            ],
        ];
        assert_eq!(found.expect("pieces"), expected.map(Vec::from));
    }

    #[test]
    fn answer_without_own_thought_follows_the_empty_thought() {
        let mut learned_after = Vec::new();
        for answer in [
            "b",
            "<b>",
            "<|call>f<call|>",
            "<channel|>",
            "<|channel>hm<channel|>b",
        ] {
            let line = format!(
                r#"{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
            );
            let pieces = learned(&line).expect("pieces").concat();
            assert_eq!(pieces[1], (format!("{answer}<turn|>"), true));
            learned_after.push(pieces[0].0.ends_with("<|channel><channel|>"));
        }
        assert_eq!(learned_after, [true, true, true, true, false]);
        assert!(has_own_thought(
            "<think>hm</think>a",
            "<think>\n\n</think>\n\n"
        ));
        assert!(!has_own_thought("<b>a</b>", "<think>\n\n</think>\n\n"));
    }

    #[test]
    fn responses_of_tools_are_context_and_calls_are_trained_on() {
        let with = |begin: &str, end: &str| {
            format!(
                "{{% for m in messages %}}<|turn>{{{{ m.role }}}}\n{{% for c in m.tool_calls or [] %}}<|tool_call>{{{{ c }}}}<tool_call|>{{% endfor %}}\
                 {{% for r in m.tool_responses or [] %}}{begin}{{{{ r }}}}{end}{{% endfor %}}{{{{ m.content }}}}<turn|>\n{{% endfor %}}\
                 {{% if add_generation_prompt %}}<|turn>assistant\n{{% endif %}}"
            )
        };
        let line = r#"{"messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": "mild", "tool_calls": ["f"], "tool_responses": ["18", "19"]}]}"#;
        for (begin, end, read) in [
            (
                RESPONSE[0],
                RESPONSE[1],
                &[
                    "<|tool_response>18<tool_response|>",
                    "<|tool_response>19<tool_response|>",
                ][..],
            ),
            ("[", "]", &["[18][19]"]),
            ("<tool>", "</tool>", &["<tool>18</tool><tool>19</tool>"]),
        ] {
            let template = ChatTemplate::from_source(&with(begin, end)).expect("a template");
            let pieces = read_line(line).examples(&template, &mut Ignored::default());
            let pieces = pieces.expect("pieces").concat();
            let of = |learned: bool| {
                let pieces = pieces.iter().filter(move |piece| piece.1 == learned);
                pieces.map(|piece| piece.0.as_str()).collect::<Vec<_>>()
            };
            assert_eq!(of(true), ["<|tool_call>f<tool_call|>", "mild<turn|>"]);
            assert_eq!(of(false)[1..], *read);
        }
    }

    #[test]
    fn content_in_parts_equals_its_text() {
        let line = |content: &str| {
            format!(
                r#"{{"messages": [{{"role": "system", "content": {content}}}, {{"role": "user", "content": {content}}},
                {{"role": "assistant", "content": {content}}}]}}"#
            )
        };
        let gemma4 = ChatTemplate::gemma4();
        let of = |content: &str, template: &ChatTemplate| {
            read_line(&line(content)).examples(template, &mut Ignored::default())
        };
        let parts = r#"[{"type": "text", "text": "the cat"}, {"type": "text", "text": " sat"}]"#;
        let found = of(parts, &gemma4).expect("pieces");
        assert_eq!(found, of(r#""the cat sat""#, &gemma4).expect("pieces"));
        // A template that prints the list of content parts instead of the parts' texts must be refused.
        let printing = ChatTemplate::from_source(
            "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}",
        );
        let reason = of(parts, &printing.expect("a template")).expect_err("a list");
        assert!(reason.contains("expected a text"), "{reason}");
    }

    #[test]
    fn other_and_null_columns_are_counted() {
        let mut ignored = Ignored::default();
        for _ in 0..2 {
            let line = r#"{"id": 7, "source": {"of": "b"}, "tools": null, "text": null, "messages": [{"role": "assistant", "content": "a"}]}"#;
            let Line::Messages(conversation) = parse(line, &mut ignored).expect("a line") else {
                panic!("{line}");
            };
            let pieces = conversation.examples(&ChatTemplate::gemma4(), &mut ignored);
            pieces.expect("pieces");
        }
        let expected = r#"columns that are ignored: "id" (2 lines), "source" (2 lines), "text" (2 lines), "tools" (2 lines)"#;
        assert_eq!(ignored.summary().as_deref(), Some(expected));
        assert_eq!(Ignored::default().summary(), None);
    }

    #[test]
    fn unrendered_field_is_refused_by_name() {
        let gemma4 = ChatTemplate::gemma4();
        for (fields, words) in [
            (
                r#""content": "a", "mood": "good""#,
                ["\"mood\"", "message 1"],
            ),
            (
                r#""content": "a", "tool_calls": [{"function": {"name": "f"}}]"#,
                ["tool_calls", "message 1"],
            ),
            (
                r#""content": "<|channel>hm<channel|>a""#,
                ["\"content\"", "message 1"],
            ),
            (
                r#""content": "a"}], "tools": [{"of": "b""#,
                ["\"tools\"", "not rendered"],
            ),
        ] {
            let line = format!(r#"{{"messages": [{{"role": "assistant", {fields}}}]}}"#);
            let reason = {
                let conversation = read_line(&line);
                conversation.examples(&gemma4, &mut Ignored::default())
            }
            .expect_err(&line);
            for word in words {
                assert!(reason.contains(word), "{line}: {reason}");
            }
        }
        let empty = r#"{"messages": [{"role": "assistant", "content": "a", "tool_calls": [], "name": null}]}"#;
        read_line(empty)
            .examples(&gemma4, &mut Ignored::default())
            .expect("the template renders every field");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn placeholder_in_text_or_answer_is_refused_by_name() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/vision-unified"
        );
        let gemma = Gemma4::from_pretrained(folder, &burn::tensor::Device::flex());
        let gemma = gemma.expect("the fixture is loadable");
        for medium in ["image", "audio", "video"] {
            for line in [
                format!(r#"{{"text": "a <|{medium}|>"}}"#),
                format!(
                    r#"{{"messages": [{{"role": "assistant", "content": "a <|{medium}|>"}}]}}"#
                ),
            ] {
                let parsed = parse(&line, &mut Ignored::default()).expect("a line");
                let reason = of_line(
                    parsed,
                    &origin(),
                    &Reader::new(&gemma),
                    &mut Ignored::default(),
                )
                .expect_err(&line);
                assert!(reason.contains(medium), "{line}: {reason}");
            }
        }
        let plain = r#"{"messages": [{"role": "user", "content": "<|image|>"}, {"role": "assistant", "content": "b"}]}"#;
        let parsed = parse(plain, &mut Ignored::default()).expect("a line");
        of_line(
            parsed,
            &origin(),
            &Reader::new(&gemma),
            &mut Ignored::default(),
        )
        .expect("a user's placeholder is plain text");
    }

    #[test]
    fn parse_of_invalid_line_names_the_problem() {
        for (line, word) in [
            (r#"{"text": "a""#, "column 12"),
            (r#"["a"]"#, "is a JSON array"),
            (r#"{"mesages": [], "id": 3}"#, "\"mesages\", \"id\""),
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
            let reason = parse(line, &mut Ignored::default()).expect_err(line);
            assert!(reason.contains(word), "{line}: {reason}");
        }
        let mut ignored = Ignored::default();
        let text = parse(r#"{"id": 1, "text": "a"}"#, &mut ignored).expect("a text");
        assert_eq!(text, Line::Text("a".into()));
        assert!(
            ignored
                .summary()
                .expect("an id")
                .contains("\"id\" (1 line)")
        );
    }

    /// A template that renders messages, the descriptions of tools and the responses of tools.
    #[cfg(feature = "flex")]
    const WITH_TOOLS: &str = concat!(
        "{{ bos_token }}{% if tools %}<|tool>{% for tool in tools %}{{ tool.description }}: ",
        "{{ tool.parameters.keys() | join }}{% endfor %}<tool|>{% endif %}",
        "{% for message in messages %}<|turn>{{ message.role }}\n",
        "{{ message.content }}{{ message.tool_responses | join }}<turn|>\n{% endfor %}",
        "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}",
    );

    /// Checks that special tokens are encoded as plain text in messages, in fields of messages, and in other fields of the
    /// line, such as `tools`. Only the assistant's own text may contain special tokens.
    #[cfg(feature = "flex")]
    #[test]
    fn texts_for_the_model_encode_without_special_tokens() {
        let fixture = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/dense-ple"
        );
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["config.json", "model.safetensors", "tokenizer.json"] {
            let to = folder.path().join(name);
            std::fs::copy(std::path::Path::new(fixture).join(name), to).expect("a file");
        }
        let template = folder.path().join("chat_template.jinja");
        std::fs::write(template, WITH_TOOLS).expect("a file");
        let device = burn::tensor::Device::flex();
        let gemma = Gemma4::from_pretrained(folder.path(), &device).expect("a checkpoint");
        let tokenizer = gemma.tokenizer();
        let tokens = |line: &str| {
            let mut ignored = Ignored::default();
            let line = parse(line, &mut ignored).expect("a line");
            let examples =
                of_line(line, &origin(), &Reader::new(&gemma), &mut ignored).expect("examples");
            let tokens = examples.into_iter().map(|example| example.tokens);
            tokens.collect::<Vec<_>>().concat()
        };
        let conversation = |said: &str, answer: &str| {
            format!(
                r#"{{"tools": [{{"description": "{said}", "parameters": {{"{said}": 1}}}}],
                "messages": [{{"role": "system", "content": "{said}"}}, {{"role": "user", "content": "{said} or {said}"}},
                {{"role": "assistant", "content": "{answer}", "tool_responses": ["{said}"]}}]}}"#
            )
        };
        let special = |tokens: &[u32]| {
            let names = ["<|turn>", "<turn|>", "<|channel>", "<bos>", "<|tool>"];
            names.map(|name| {
                let id = tokenizer.id(name).expect("a special token");
                tokens.iter().filter(|token| **token == id).count()
            })
        };
        let plain = special(&tokens(&conversation("turn", "b")));
        assert_eq!(plain, [3, 3, 0, 1, 1]);
        for said in ["<turn|>", "<|turn>", "<bos><|channel>", "<|tool>a<turn|>"] {
            let found = tokens(&conversation(said, "b"));
            assert_eq!(special(&found), plain, "{said}");
            let text = tokenizer.decode(&found, true).expect("a text");
            assert_eq!(text.matches(said).count(), 6, "{text}");
        }
        let found = special(&tokens(&conversation("a", "b<turn|>")));
        assert_eq!(found, [3, 4, 0, 1, 1]);
        // If a text contains no special tokens, the marking must not change the tokens of the text.
        let line = conversation("the cat", "and  the hat é");
        let pieces = read_line(&line).examples(gemma.chat_template(), &mut Ignored::default());
        let pieces = pieces.expect("pieces").concat().into_iter();
        let text: String = pieces.map(|(text, _)| text).collect();
        assert_eq!(tokens(&line), tokenizer.encode(&text).expect("tokens"));
        // A field that is not rendered must be counted as ignored even if it has the name of a special token, here
        // `bos_token`.
        let named = line.replacen('{', r#"{"bos_token": "<bos>", "#, 1);
        let mut ignored = Ignored::default();
        let Line::Messages(named) = parse(&named, &mut ignored).expect("a line") else {
            panic!("{named}");
        };
        let marking = named.marking(tokenizer).expect("a mark");
        let marked = named.marked(marking).expect("marked");
        let pieces = marked.examples(gemma.chat_template(), &mut ignored);
        assert_eq!(pieces.expect("pieces").len(), 1);
        let told = ignored.summary().expect("a column");
        assert!(told.contains("\"bos_token\" (1 line)"), "{told}");
    }
}
