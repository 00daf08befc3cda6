//! The prompt of a conversation with images and audio. All checks that need no decoding precede the decoding.

use super::app::App;
use super::media::RequestMedia;
use crate::engine::{AnswerOptions, Constraint, Request, ServedAdapter};
use crate::error::RequestError;
use crate::text::{ChatMessage, Tool};

/// The tokens of a conversation, in which each image and each audio clip is one placeholder, and the images and clips.
pub(crate) struct ChatPrompt<'a> {
    app: &'a App,
    tokens: Vec<u32>,
    media: RequestMedia<'a>,
}

/// The answers that a request asks for.
pub(crate) struct Answers {
    pub adapter: Option<ServedAdapter>,
    pub choices: usize,
    /// The options of each answer. Their `max_tokens` are those of a prompt without images and audio.
    pub options: AnswerOptions,
    /// True if the request sets the largest number of tokens of an answer.
    pub has_limit: bool,
    pub constraint: Option<Constraint>,
}

impl<'a> ChatPrompt<'a> {
    /// Encodes a conversation. `media` are its images and audio clips.
    ///
    /// # Errors
    /// Returns an error if the conversation exceeds the context, or if the chat template does not show all media.
    pub fn new(
        app: &'a App,
        messages: &[ChatMessage],
        tools: &[Tool],
        thinking: bool,
        mut media: RequestMedia<'a>,
    ) -> Result<Self, RequestError> {
        media.arrange(messages.iter().flat_map(ChatMessage::media));
        let tokens = app.text.chat_tokens(messages, tools, thinking)?;
        let [images, audio] = media.counts();
        app.text.check_media(&tokens, images, audio)?;
        Ok(Self { app, tokens, media })
    }

    /// The number of tokens that fit into the context after the prompt, if each image and each clip were one token.
    pub fn left(&self) -> usize {
        let context = self.app.engines.context();
        context.saturating_sub(self.tokens.len())
    }

    /// Returns the number of tokens, of which audio clips have at least this number. Nothing is decoded.
    ///
    /// # Errors
    /// Returns an error if the header of an image or a clip is malformed or exceeds a limit.
    pub fn count(mut self) -> Result<usize, RequestError> {
        let count = self.tokens.len() + self.media.measure()?;
        self.app.text.check_length(count)?;
        Ok(count)
    }

    /// Checks the sizes of the request, and then decodes the images and audio.
    ///
    /// # Errors
    /// Returns an error if the request exceeds a limit, or if an image or a clip is malformed.
    pub fn into_request(mut self, answers: Answers) -> Result<Request, RequestError> {
        let Answers {
            adapter,
            choices,
            mut options,
            has_limit,
            constraint,
        } = answers;
        let (text, engines) = (&self.app.text, &self.app.engines);
        let mut check = |prompt: usize| {
            text.check_length(prompt)?;
            if !has_limit {
                let left = engines.context().saturating_sub(prompt);
                options.max_tokens = text.default_max_tokens(left);
            }
            options.check_min_tokens()?;
            engines.check_size(prompt, choices, options.max_tokens)
        };
        let tokens = self.tokens.len();
        check(tokens)?;
        check(tokens + self.media.measure()?)?;
        let prepared = self.media.prepare(|media| check(tokens + media))?;
        let prompt = text.encode(self.tokens, &prepared.images, &prepared.audio)?;
        check(prompt.len())?;
        Ok(Request {
            prompt,
            choices,
            options,
            constraint,
            adapter,
            media_memory: prepared.memory,
        })
    }
}
