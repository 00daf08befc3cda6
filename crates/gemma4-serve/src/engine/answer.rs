//! An answer in progress: chooses tokens, separates thoughts and tool calls from the text, and detects the end.

use super::adjust::Adjustments;
use super::constraint::Constraint;
use super::load::EventSender;
use super::request::{AnswerOptions, AnswerUsage, EndReason, Event, TokenProbability};
use super::stop::StopText;
use crate::error::{ErrorKind, RequestError};
use burn_gemma4::{
    Gemma4Error, Parts, RowChoice, RowResult, Sampler, Sampling, TextKind, TextStream,
    TokenLogprobs, Tokenizer,
};
use std::sync::Arc;
use std::time::Instant;

/// The special token that ends a thought. A thought is the model's reasoning before its answer.
const END_OF_THOUGHT: &str = "<channel|>";

/// Decodes an answer's tokens to text.
enum Splitter<'a> {
    /// Separates thoughts and tool calls from the text of the answer.
    Parts(Box<Parts<'a>>),
    /// Treats all decoded text as the text of the answer.
    Plain(TextStream<'a>),
}

/// The state of an answer in progress.
pub(super) struct Answer<'a> {
    choice: usize,
    options: Arc<AnswerOptions>,
    sampler: Sampler,
    adjustments: Adjustments,
    constraint: Option<Constraint>,
    splitter: Splitter<'a>,
    stop: StopText,
    end_of_thought: Option<u32>,
    usage: AnswerUsage,
    events: EventSender,
    /// The last chosen token, which is the input of the next decode step.
    pub last: u32,
    /// The time at which the last token was chosen.
    pub last_time: Option<Instant>,
}

impl<'a> Answer<'a> {
    /// Creates an answer to `prompt`. `choice` is the index of the answer among all answers of the request.
    pub fn new(
        choice: usize,
        prompt: &[u32],
        options: &Arc<AnswerOptions>,
        constraint: Option<Constraint>,
        tokenizer: &'a Tokenizer,
        events: EventSender,
    ) -> Result<Self, Gemma4Error> {
        let seed = options.sampling.seed;
        let mut sampler = Sampler::new(&Sampling {
            seed: seed.map(|seed| seed.wrapping_add(choice as u64)),
            ..options.sampling.clone()
        });
        sampler.read(prompt);
        Ok(Self {
            choice,
            sampler,
            adjustments: Adjustments::new(options),
            constraint,
            splitter: match options.has_parts {
                true => Splitter::Parts(Box::new(Parts::after(prompt, tokenizer)?)),
                false => Splitter::Plain(tokenizer.stream()),
            },
            stop: StopText::new(&options.stop_strings),
            end_of_thought: tokenizer.id(END_OF_THOUGHT),
            usage: AnswerUsage::default(),
            options: options.clone(),
            events,
            last: 0,
            last_time: None,
        })
    }

    /// True if the receiver of the events has been dropped, because the client has disconnected.
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// The number of tokens of the answer.
    pub fn tokens(&self) -> usize {
        self.usage.tokens
    }

    /// Records the number of prompt tokens whose keys and values came from an earlier prompt.
    pub fn set_cached_tokens(&mut self, count: usize) {
        self.usage.cached_tokens = count;
    }

    /// The number of tokens that the answer may still get.
    pub fn remaining(&self) -> usize {
        self.options.max_tokens - self.usage.tokens
    }

    /// Sends an error to the client as the last event.
    pub fn fail(&self, error: RequestError) {
        // Ignore a failed send: the client has disconnected.
        let _ = self.events.send(Event::Failed(error));
    }

    /// Returns how the batch must choose the next token: by argmax, by a draw of the sampler, or not at all. In the
    /// last case, the batch returns the logits, and [`choose`](Self::choose) chooses the token.
    pub fn row_choice(&self) -> RowChoice<'_> {
        let sampling = &self.options.sampling;
        let is_constrained = self.constraint.as_ref().is_some_and(Constraint::is_active);
        if self.options.logprobs.is_some() || is_constrained || self.adjustments.is_active() {
            return RowChoice::Logits;
        }
        let changes = sampling.repetition_penalty != 1.0 || !sampling.suppress_tokens.is_empty();
        match sampling.is_greedy() && !changes {
            true => RowChoice::Argmax,
            false => RowChoice::Draw(&self.sampler),
        }
    }

    /// Adds the next token. `result` holds either this token, or the logits from which this function chooses the token.
    /// Returns true if the answer has ended.
    pub fn take(&mut self, result: RowResult) -> Result<bool, RequestError> {
        let (token, logprobs) = match result {
            RowResult::Token(token) => {
                let token = token.ok_or_else(no_token)?;
                let token = self.forced_token().unwrap_or(token);
                self.sampler.read(&[token]);
                (token, Vec::new())
            }
            RowResult::Logits(logits) => self.choose(logits)?,
        };
        self.adjustments.record(token);
        let is_complete = match &mut self.constraint {
            Some(constraint) if !self.options.stop_tokens.contains(&token) => {
                constraint.record(token)?
            }
            _ => false,
        };
        self.last = token;
        self.usage.tokens += 1;
        if self.kind() == TextKind::Thought {
            self.usage.thinking_tokens += 1;
        }
        if !self.options.ignore_stop_tokens && self.options.stop_tokens.contains(&token) {
            return self.end(EndReason::Stop);
        }
        if let Some(string) = self.push(token, logprobs)? {
            self.send_end(EndReason::StopString(string));
            return Ok(true);
        }
        if is_complete || self.has_single_call() {
            return self.end(EndReason::Stop);
        }
        match self.usage.tokens >= self.options.max_tokens {
            true => self.end(EndReason::Length),
            false => Ok(false),
        }
    }

    /// Chooses the next token on the host from the model's logits. Also returns log-probabilities, if the request asks for
    /// them.
    fn choose(&mut self, logits: Vec<f32>) -> Result<(u32, Vec<TokenProbability>), RequestError> {
        let forced = self.forced_token();
        let mut changed = logits.clone();
        self.adjustments.apply(&mut changed);
        if let Some(constraint) = &mut self.constraint
            && constraint.is_active()
        {
            constraint.apply(&mut changed, &self.options.stop_tokens)?;
        }
        let token = match forced {
            Some(token) => {
                self.sampler.read(&[token]);
                token
            }
            None => self.sampler.sample(&changed).map_err(|error| match error {
                Gemma4Error::Argument { .. } => no_token(),
                error => error.into(),
            })?,
        };
        let probability = |count| {
            let found = TokenLogprobs::of(&logits, token, count);
            TokenProbability {
                token,
                logprob: found.logprob,
                top: found.top,
            }
        };
        let logprobs = self.options.logprobs.map(probability);
        Ok((token, logprobs.into_iter().collect()))
    }

    /// Returns the token that ends a thought if the answer is in a thought that has reached `max_thinking_tokens`.
    fn forced_token(&self) -> Option<u32> {
        let most = self.options.max_thinking_tokens?;
        let is_over = self.kind() == TextKind::Thought && self.usage.thinking_tokens >= most.max(1);
        self.end_of_thought.filter(|_| is_over)
    }

    fn kind(&self) -> TextKind {
        match &self.splitter {
            Splitter::Parts(parts) => parts.kind(),
            Splitter::Plain(_) => TextKind::Answer,
        }
    }

    /// True if the options allow one tool call only, and the answer has a complete tool call.
    fn has_single_call(&self) -> bool {
        let Splitter::Parts(parts) = &self.splitter else {
            return false;
        };
        self.options.single_tool_call
            && !parts.tool_calls.is_empty()
            && parts.kind() != TextKind::ToolCall
    }

    /// Decodes a token and sends the decoded text. The end of the text is held back if it may begin a stop string.
    /// Returns the stop string that the text contains, if any.
    fn push(
        &mut self,
        token: u32,
        logprobs: Vec<TokenProbability>,
    ) -> Result<Option<Arc<str>>, RequestError> {
        let (kind, text) = match &mut self.splitter {
            Splitter::Plain(stream) => (TextKind::Answer, stream.push(token)?),
            Splitter::Parts(parts) => {
                let (before, calls) = (parts.kind(), parts.tool_calls.len());
                let (kind, text) = parts.push(token)?;
                let has_ended = before == TextKind::ToolCall
                    && (parts.kind() != TextKind::ToolCall || parts.tool_calls.len() > calls);
                if has_ended && let Some(call) = parts.tool_calls.get(calls.wrapping_sub(1)) {
                    let call = call.clone();
                    self.send_tool_call(call);
                    return Ok(None);
                }
                (kind, text)
            }
        };
        match kind {
            TextKind::Answer => {
                let (mut text, found) = self.stop.push(&text);
                // A stop string does not span a thought or a tool call. The text that is held back before a thought or
                // tool call can therefore be sent.
                if found.is_none() && self.kind() != TextKind::Answer {
                    text += &self.stop.finish();
                }
                self.send_text(TextKind::Answer, text, logprobs);
                Ok(found)
            }
            TextKind::Thought => {
                self.send_text(TextKind::Thought, text, Vec::new());
                Ok(None)
            }
            TextKind::ToolCall => Ok(None),
        }
    }

    /// Sends the text that is still held back because it could begin a stop string. Then sends the end of the answer.
    fn end(&mut self, reason: EndReason) -> Result<bool, RequestError> {
        let (kind, text, call) = match &mut self.splitter {
            Splitter::Plain(stream) => (TextKind::Answer, stream.finish()?, None),
            Splitter::Parts(parts) => {
                let (kind, text) = parts.finish()?;
                let call = (kind == TextKind::ToolCall).then(|| parts.tool_calls.last().cloned());
                (kind, text, call.flatten())
            }
        };
        match (kind, call) {
            (TextKind::Thought, _) => self.send_text(kind, text, Vec::new()),
            (TextKind::ToolCall, Some(call)) => self.send_tool_call(call),
            (TextKind::ToolCall, None) => (),
            (TextKind::Answer, _) => {
                let (text, found) = self.stop.push(&text);
                self.send_text(TextKind::Answer, text, Vec::new());
                if let Some(string) = found {
                    self.send_end(EndReason::StopString(string));
                    return Ok(true);
                }
            }
        }
        let rest = self.stop.finish();
        self.send_text(TextKind::Answer, rest, Vec::new());
        self.send_end(reason);
        Ok(true)
    }

    fn send_text(&self, kind: TextKind, text: String, logprobs: Vec<TokenProbability>) {
        if !text.is_empty() || !logprobs.is_empty() {
            let choice = self.choice;
            let _ = self.events.send(Event::Text {
                choice,
                kind,
                text,
                logprobs,
            });
        }
    }

    fn send_tool_call(&self, text: String) {
        let choice = self.choice;
        let _ = self.events.send(Event::ToolCall { choice, text });
    }

    fn send_end(&self, reason: EndReason) {
        let (choice, usage) = (self.choice, self.usage);
        let _ = self.events.send(Event::End {
            choice,
            reason,
            usage,
        });
    }
}

fn no_token() -> RequestError {
    RequestError::new(
        ErrorKind::Internal,
        "no token can be chosen: each logit is NaN or -inf after the request's options",
    )
}
