//! Constrains answers to a JSON schema, a regular expression or a grammar. The crate `llguidance` computes which tokens are
//! allowed next.

use crate::error::RequestError;
use burn_gemma4::{Gemma4Error, Tokenizer};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::Value;
use std::sync::Arc;

/// The largest size of a grammar's source, in bytes.
const LONGEST_GRAMMAR: usize = 256 << 10;

/// The limits on the lines of a Lark grammar, on the depth of nested brackets, and on the references in a JSON schema.
/// llguidance recurses without a limit, and a stack overflow would end the process. On a stack of 2 MB, 15,000 rules,
/// 100,000 brackets and 3,000 references overflow.
const MOST_LINES: usize = 2_000;
const DEEPEST_NESTING: usize = 200;
const MOST_REFERENCES: usize = 300;

/// The source of a grammar.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// A JSON schema.
    JsonSchema(Value),
    /// A regular expression.
    Regex(String),
    /// A grammar in the Lark format of llguidance.
    Lark(String),
}

impl Grammar {
    /// The grammar of any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(serde_json::json!({"type": "object"}))
    }

    fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) => text.len(),
        }
    }

    /// Checks the limits that keep llguidance's recursion from overflowing the stack.
    fn check_depth(&self) -> Result<(), String> {
        let too_many = |count: usize, what: &str, most: usize| match count > most {
            true => Err(format!("has {count} {what}; expected at most {most}")),
            false => Ok(()),
        };
        match self {
            Self::JsonSchema(schema) => {
                let references = schema.to_string().matches("$ref").count();
                too_many(references, "references", MOST_REFERENCES)
            }
            Self::Regex(text) | Self::Lark(text) => {
                let mut depth = 0usize;
                let mut deepest = 0;
                for character in text.chars() {
                    match character {
                        '(' | '[' | '{' => depth += 1,
                        ')' | ']' | '}' => depth = depth.saturating_sub(1),
                        _ => (),
                    }
                    deepest = deepest.max(depth);
                }
                too_many(deepest, "nested brackets", DEEPEST_NESTING)?;
                too_many(text.lines().count(), "lines", MOST_LINES)
            }
        }
    }
}

/// A compiler of grammars for the vocabulary of one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
    vocabulary: usize,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// Builds llguidance's vocabulary from the tokens of `tokenizer`. `end` is a token that ends a text.
    ///
    /// # Errors
    /// Returns an error if the tokenizer rejects one of its own tokens, or if llguidance rejects the vocabulary.
    pub fn new(tokenizer: &Tokenizer, end: u32) -> Result<Self, Gemma4Error> {
        let vocabulary = tokenizer.vocab_size().max(end as usize + 1);
        let mut token_bytes = Vec::with_capacity(vocabulary);
        for token in 0..vocabulary as u32 {
            let bytes = match (tokenizer.special(token), tokenizer.token_bytes(token)?) {
                (Some(special), _) => {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER][..], special.as_bytes()].concat()
                }
                (None, Some(bytes)) => bytes,
                (None, None) => Vec::new(),
            };
            token_bytes.push(bytes);
        }
        let info = TokRxInfo::new(vocabulary as u32, end);
        let trie = TokTrie::from(&info, &token_bytes);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let failed = |error| Gemma4Error::Tokenizer(format!("grammar vocabulary: {error}"));
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &[])
            .map_err(failed)?;
        factory.quiet();
        Ok(Self {
            factory,
            vocabulary,
        })
    }

    /// Compiles a grammar. If the answer may begin with a thought, `thought` holds the tokens that begin and end a thought.
    ///
    /// # Errors
    /// Returns an error that names `field` if the grammar is malformed or too large, or uses an unsupported feature.
    pub fn compile(
        &self,
        field: &str,
        grammar: &Grammar,
        thought: Option<[u32; 2]>,
    ) -> Result<Constraint, RequestError> {
        let bytes = grammar.bytes();
        if bytes > LONGEST_GRAMMAR {
            let reason = format!("has {bytes} bytes; expected at most {LONGEST_GRAMMAR}");
            return Err(RequestError::field(field, reason));
        }
        grammar
            .check_depth()
            .map_err(|reason| RequestError::field(field, reason))?;
        let source = match grammar.clone() {
            Grammar::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(with_bounded_space(schema))
            }
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(&regex),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark),
        };
        let refuse = |error: String| RequestError::field(field, error);
        let parser = self.factory.create_parser(source);
        let mut matcher = Matcher::new(parser);
        if let Some(error) = matcher.get_error() {
            return Err(refuse(error));
        }
        // Compute the first token mask now, so that an error of the grammar refuses the request instead of failing its
        // answer.
        matcher
            .compute_mask_or_eos()
            .map_err(|error| refuse(error.to_string()))?;
        Ok(Constraint {
            matcher,
            vocabulary: self.vocabulary,
            thought,
            state: match thought {
                Some(_) => State::MayThink,
                None => State::Answer,
            },
        })
    }
}

/// Limits the white space between two tokens of JSON. Without a limit, a model can write white space until `max_tokens` ends
/// the answer.
fn with_bounded_space(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        let guidance = serde_json::json!({"whitespace_pattern": "[ \\n\\r\\t]{0,16}"});
        fields.entry("x-guidance").or_insert(guidance);
    }
    schema
}

/// The position of the next token relative to a thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No token has been generated, and the next token may begin a thought.
    MayThink,
    /// The next token belongs to a thought, which the grammar does not restrict.
    Thought,
    /// The next token belongs to the answer, which the grammar restricts.
    Answer,
}

/// The state of a grammar's matcher in one answer.
pub struct Constraint {
    matcher: Matcher,
    vocabulary: usize,
    thought: Option<[u32; 2]>,
    state: State,
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constraint")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Constraint {
    /// Copies the state for another answer to the same prompt.
    pub(super) fn copy(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
            ..*self
        }
    }

    /// True if the grammar restricts the next token.
    pub(super) fn is_active(&self) -> bool {
        self.state != State::Thought
    }

    /// Sets the logits of tokens that the grammar does not allow to −∞. `stop_tokens` are allowed where the text so far
    /// matches the whole grammar.
    pub(super) fn apply(
        &mut self,
        logits: &mut [f32],
        stop_tokens: &[u32],
    ) -> Result<(), RequestError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(failed)?;
        let is_accepting =
            self.matcher.is_stopped() || self.matcher.is_accepting().map_err(failed)?;
        let begins_thought = match (self.state, self.thought) {
            (State::MayThink, Some([begin, _])) => Some(begin),
            _ => None,
        };
        for (token, logit) in (0u32..).zip(logits.iter_mut()) {
            let is_allowed = (token as usize) < self.vocabulary && mask.is_allowed(token)
                || is_accepting && stop_tokens.contains(&token)
                || begins_thought == Some(token);
            if !is_allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Advances the grammar by a token of the answer. Returns true if the grammar allows no further token.
    pub(super) fn record(&mut self, token: u32) -> Result<bool, RequestError> {
        match (self.state, self.thought) {
            (State::MayThink, Some([begin, _])) if token == begin => self.state = State::Thought,
            (State::Thought, Some([_, end])) => {
                if token == end {
                    self.state = State::Answer;
                }
            }
            _ => {
                self.state = State::Answer;
                self.matcher.consume_token(token).map_err(failed)?;
            }
        }
        Ok(self.matcher.is_stopped())
    }
}

fn failed(error: impl std::fmt::Display) -> RequestError {
    RequestError::new(
        crate::error::ErrorKind::Internal,
        format!("the grammar failed: {error}"),
    )
}
