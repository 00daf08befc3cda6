//! Constrains answers to a JSON schema, a regular expression or a grammar. The crate `llguidance` computes which tokens are
//! allowed next.

use crate::error::{ErrorKind, RequestError};
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

/// The largest number of lines of a Lark grammar or a regular expression. This limit and the next two are necessary
/// because llguidance recurses without a limit, and a stack overflow would end the process. In a build without
/// optimizations, 2,000 rules overflow a stack of 2 MB.
const MOST_LINES: usize = 2_000;
/// The deepest nesting of brackets in a regular expression or a Lark grammar.
const DEEPEST_NESTING: usize = 200;
/// The largest number of references in a JSON schema.
const MOST_REFERENCES: usize = 300;

/// The stack size of the thread that compiles a grammar, in bytes. The system allocates only the part that is used.
const COMPILER_STACK: usize = 64 << 20;

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
        let matcher = self.matcher(source)?;
        let matcher = matcher.map_err(|error| RequestError::field(field, without_state(&error)))?;
        Ok(Constraint {
            field: field.into(),
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

impl Grammars {
    /// Compiles a grammar on a thread with a large stack. The inner error means that the grammar is invalid. The outer
    /// error means that the thread failed.
    fn matcher(&self, source: TopLevelGrammar) -> Result<Result<Matcher, String>, RequestError> {
        let compile = || {
            let mut matcher = Matcher::new(self.factory.create_parser(source));
            // Compute the first token mask here, so that an error refuses the request before its answer begins.
            match matcher.get_error() {
                Some(error) => Err(error),
                None => match matcher.compute_mask_or_eos() {
                    Ok(_) => Ok(matcher),
                    Err(error) => Err(error.to_string()),
                },
            }
        };
        let thread = std::thread::Builder::new().stack_size(COMPILER_STACK);
        let compiled = std::thread::scope(|scope| {
            let compiler = thread.spawn_scoped(scope, compile);
            compiler.map(|compiler| compiler.join())
        });
        let failed = |reason: &str| Err(RequestError::new(ErrorKind::Internal, reason));
        match compiled {
            Ok(Ok(matcher)) => Ok(matcher),
            Ok(Err(_)) => failed("the compiler of grammars panicked"),
            Err(_) => failed("the system cannot start a thread to compile a grammar"),
        }
    }
}

/// Limits the white space between two tokens of JSON. Without a limit, a model can write white space until the answer is full.
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
    /// The next token is part of a thought, which the grammar does not restrict.
    Thought,
    /// The next token is part of the answer, which the grammar restricts.
    Answer,
}

/// The state of a grammar's matcher in one answer.
pub struct Constraint {
    /// The name of the request field that contains the grammar.
    field: Arc<str>,
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
            field: self.field.clone(),
            matcher: self.matcher.deep_clone(),
            ..*self
        }
    }

    /// True if the grammar restricts the next token.
    pub(super) fn is_active(&self) -> bool {
        self.state != State::Thought
    }

    /// Sets the logit of every token that is forbidden by the grammar to −∞. `stop_tokens` are allowed where the text
    /// so far matches the whole grammar.
    pub(super) fn apply(
        &mut self,
        logits: &mut [f32],
        stop_tokens: &[u32],
    ) -> Result<(), RequestError> {
        let failed = |error| failed(&self.field, &error);
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
                let consumed = self.matcher.consume_token(token);
                consumed.map_err(|error| failed(&self.field, &error))?;
            }
        }
        Ok(self.matcher.is_stopped())
    }
}

/// Converts an error of llguidance, which occurred while an answer followed a grammar, to a request error. If the
/// grammar exceeds the limits of llguidance, the error names the request's field. Otherwise the error is internal.
fn failed(field: &str, error: &impl ToString) -> RequestError {
    let error = error.to_string();
    let reason = without_state(&error);
    match error.contains("TooComplex") {
        true => {
            let reason = format!("is too complex; expected a simpler grammar: {reason}");
            RequestError::field(field, reason)
        }
        false => RequestError::new(ErrorKind::Internal, format!("the grammar failed: {reason}")),
    }
}

/// Returns the reason in an error of llguidance, without the parser's state that follows the reason.
fn without_state(error: &str) -> &str {
    error.split("\n<state>").next().unwrap_or_default()
}
