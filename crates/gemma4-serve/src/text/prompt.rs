//! Converts texts and conversations to prompt tokens, and holds the checkpoint's default options for answers.

use super::conversation::{ChatMessage, Tool};
use crate::engine::AnswerOptions;
use crate::error::{ErrorKind, RequestError};
use burn_gemma4::{
    Audio, AudioHeader, ChatOptions, ChatTemplate, EncodedPrompt, Gemma4, Gemma4Error,
    GenerateOptions, Image, ImageHeader, Marking, MediumSize, PreparedAudio, PreparedImage,
    PromptEncoder, Tokenizer,
};
use serde_json::{Map, Value};

/// The largest number of tokens of an answer, if neither the request nor the checkpoint sets a limit.
const MAX_TOKENS: usize = 1024;

/// The tokenizer, the chat template and the default options of a checkpoint. This struct holds no weights, because the
/// engine's thread owns the model.
#[derive(Debug)]
pub struct TextModel {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    template: ChatTemplate,
    begin: u32,
    encoder: PromptEncoder,
    plain: GenerateOptions,
    chat: GenerateOptions,
    max_tokens: Option<usize>,
    context: usize,
}

impl TextModel {
    /// Copies the tokenizer, the chat template and the default options from a checkpoint.
    pub fn new(gemma: &Gemma4) -> Self {
        Self {
            tokenizer: gemma.tokenizer().clone(),
            template: gemma.chat_template().clone(),
            begin: gemma.config().bos_token,
            encoder: gemma.prompt_encoder(),
            plain: gemma.options(),
            chat: gemma.chat_options(),
            max_tokens: gemma.defaults().max_new_tokens,
            context: gemma.config().max_position_embeddings,
        }
    }

    /// Sets the largest number of tokens of a prompt together with its answer. The default is the model's number of positions.
    pub fn with_context(self, context: usize) -> Self {
        Self { context, ..self }
    }

    /// Replaces the chat template.
    pub fn with_template(self, template: ChatTemplate) -> Self {
        Self { template, ..self }
    }

    /// Returns the id of a token that ends a text: the checkpoint's first stop token, or otherwise `<eos>`.
    pub fn end_token(&self) -> u32 {
        let stop = self.plain.stop_tokens.first().copied();
        stop.or_else(|| self.tokenizer.id("<eos>")).unwrap_or(0)
    }

    /// Returns the ids of the tokens that begin and end a thought, or `None` if the vocabulary lacks either token.
    pub fn thought_tokens(&self) -> Option<[u32; 2]> {
        let tokenizer = &self.tokenizer;
        Some([tokenizer.id("<|channel>")?, tokenizer.id("<channel|>")?])
    }

    /// Returns the largest number of tokens of an answer if the request does not set this number. `left` is the number
    /// of tokens that fit into the context after the prompt.
    pub fn default_max_tokens(&self, left: usize) -> usize {
        self.max_tokens.unwrap_or(MAX_TOKENS).min(left).max(1)
    }

    /// Returns the checkpoint's default options of an answer. If `is_chat` is true, the model answers a conversation.
    /// Otherwise, the model continues a text.
    pub fn options(&self, is_chat: bool) -> AnswerOptions {
        let options = match is_chat {
            true => &self.chat,
            false => &self.plain,
        };
        AnswerOptions {
            max_tokens: options.max_tokens,
            min_tokens: options.min_new_tokens.unwrap_or(0),
            sampling: options.sampling.clone(),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            begin_suppress_tokens: options.begin_suppress_tokens.clone(),
            stop_tokens: options.stop_tokens.clone(),
            ignore_stop_tokens: false,
            stop_strings: options.stop_strings.clone(),
            logprobs: None,
            has_parts: is_chat,
            max_thinking_tokens: None,
            single_tool_call: false,
        }
    }

    /// Encodes a text that the model continues. The names of special tokens in the text become special tokens.
    ///
    /// # Errors
    /// Returns an error if the text has too many characters for the context, or if the tokenizer rejects the text.
    /// Returns an error if the text has a placeholder of an image, audio or video.
    pub fn text_prompt(&self, text: &str) -> Result<EncodedPrompt, RequestError> {
        self.check_length(self.tokenizer.fewest_tokens(text))?;
        let mut tokens = self.tokenizer.encode(text)?;
        if tokens.first() != Some(&self.begin) {
            tokens.insert(0, self.begin);
        }
        self.token_prompt(tokens)
    }

    /// Checks a prompt that consists of tokens.
    ///
    /// # Errors
    /// Returns an error if the prompt has a placeholder of an image, audio or video.
    pub(crate) fn token_prompt(&self, tokens: Vec<u32>) -> Result<EncodedPrompt, RequestError> {
        Ok(self.encoder.encode(tokens, &[], &[])?)
    }

    /// Checks that the model sees images. `field` is the field of the request with an image.
    ///
    /// # Errors
    /// Returns the reason why the model sees no images.
    pub(crate) fn check_vision(&self, field: &str) -> Result<(), RequestError> {
        let checked = self.encoder.check_vision();
        checked.map_err(|error| of_field(field, error))
    }

    /// Checks that the model hears audio. `field` is the field of the request with an audio clip.
    ///
    /// # Errors
    /// Returns the reason why the model hears no audio.
    pub(crate) fn check_audio(&self, field: &str) -> Result<(), RequestError> {
        let checked = self.encoder.check_audio();
        checked.map_err(|error| of_field(field, error))
    }

    /// Returns the size that an image will have, from the header of its file. `field` is the field of the request with
    /// the image, and `soft_tokens` is their largest number if it is not the checkpoint's.
    pub(crate) fn image_size(
        &self,
        field: &str,
        header: &ImageHeader,
        soft_tokens: Option<usize>,
    ) -> Result<MediumSize, RequestError> {
        let size = self.encoder.image_size(header, soft_tokens);
        size.map_err(|error| of_field(field, error))
    }

    /// Returns the size that an audio clip will have, from the header of its file. `field` is the field of the request
    /// with the clip.
    pub(crate) fn audio_size(
        &self,
        field: &str,
        header: &AudioHeader,
    ) -> Result<MediumSize, RequestError> {
        let size = self.encoder.audio_size(header);
        size.map_err(|error| of_field(field, error))
    }

    /// Resizes an image for the model. `field` is the field of the request with the image.
    ///
    /// # Errors
    /// Returns an error if the model sees no images, or if the image is too narrow.
    pub fn prepare(&self, field: &str, image: &Image) -> Result<PreparedImage, RequestError> {
        let prepared = self.encoder.prepare(image);
        prepared.map_err(|error| of_field(field, error))
    }

    /// Computes the features of an audio clip for the model. `field` is the field of the request with the clip.
    ///
    /// # Errors
    /// Returns an error if the model hears no audio, or if the clip is too short.
    pub fn prepare_audio(&self, field: &str, audio: &Audio) -> Result<PreparedAudio, RequestError> {
        let prepared = self.encoder.prepare_audio(audio);
        prepared.map_err(|error| of_field(field, error))
    }

    /// Encodes a conversation by the chat template. Each image and each audio clip is one placeholder, which
    /// [`encode`](Self::encode) replaces. The names of special tokens in messages and tools are encoded as plain text,
    /// so that a message cannot end its own turn.
    ///
    /// # Errors
    /// Returns an error if the template rejects the conversation or does not support the tools, or if the conversation
    /// has too many characters for the context.
    pub fn chat_tokens(
        &self,
        messages: &[ChatMessage],
        tools: &[Tool],
        enable_thinking: bool,
    ) -> Result<Vec<u32>, RequestError> {
        let messages: Vec<Value> = merged(messages).iter().map(ChatMessage::to_json).collect();
        let tools: Vec<Value> = tools.iter().map(Tool::to_json).collect();
        let mut texts = Vec::new();
        messages
            .iter()
            .chain(&tools)
            .for_each(|value| collect(value, &mut texts));
        let marking = self.tokenizer.marking(texts)?;
        let marked = |values: &[Value]| {
            let values = values.iter().map(|value| mark(value, &marking));
            values.collect::<Result<Vec<_>, RequestError>>()
        };
        let (messages, tools) = (marked(&messages)?, marked(&tools)?);
        let options = ChatOptions {
            enable_thinking,
            ..ChatOptions::default()
        };
        let mut variables = Map::new();
        let prompt = match tools.is_empty() {
            true => self.template.render_json(&messages, &variables, options)?,
            false => {
                let without = self.template.render_json(&messages, &variables, options)?;
                variables.insert("tools".into(), Value::Array(tools));
                let with = self.template.render_json(&messages, &variables, options)?;
                if with == without {
                    return Err(RequestError::field(
                        "tools",
                        "are not supported by the model's chat template; expected none",
                    ));
                }
                with
            }
        };
        self.check_length(marking.fewest_tokens(&prompt))?;
        Ok(marking.encode(&prompt)?)
    }

    /// Checks that a conversation has one placeholder for each of its images and audio clips. The numbers differ if the
    /// chat template does not show the images of some messages, such as tool results.
    ///
    /// # Errors
    /// Returns an error that names the numbers.
    pub(crate) fn check_media(
        &self,
        tokens: &[u32],
        images: usize,
        audio: usize,
    ) -> Result<(), RequestError> {
        let checked = self.encoder.check(tokens, images, audio);
        checked.map_err(|error| of_field("messages", error))
    }

    /// Replaces the placeholders of a conversation by its images and audio clips, in order.
    ///
    /// # Errors
    /// Returns an error if there is not one image or clip for each placeholder, or if the model does not read them.
    pub fn encode(
        &self,
        tokens: Vec<u32>,
        images: &[PreparedImage],
        audio: &[PreparedAudio],
    ) -> Result<EncodedPrompt, RequestError> {
        let encoded = self.encoder.encode(tokens, images, audio);
        encoded.map_err(|error| of_field("messages", error))
    }

    /// Refuses a prompt if the context has no place for the prompt and one further token. `fewest` is a lower bound of
    /// the prompt's number of tokens. The check precedes encoding, because the tokenizer may need seconds for a prompt
    /// that is many times too long.
    pub(crate) fn check_length(&self, fewest: usize) -> Result<(), RequestError> {
        match fewest < self.context {
            true => Ok(()),
            false => {
                let message = format!(
                    "the context has {} tokens, but the prompt has at least {fewest}; shorten the prompt",
                    self.context
                );
                Err(RequestError::new(ErrorKind::ContextLength, message))
            }
        }
    }
}

/// Converts an error about an image or an audio clip to an error about a field of the request.
pub(crate) fn of_field(field: &str, error: Gemma4Error) -> RequestError {
    match error {
        Gemma4Error::Argument { reason, .. } => RequestError::field(field, reason),
        error => error.into(),
    }
}

/// Joins all system messages at the beginning of a conversation, because chat templates expect at most one system message.
fn merged(messages: &[ChatMessage]) -> Vec<ChatMessage> {
    let system: Vec<&str> = messages
        .iter()
        .map_while(|message| match message {
            ChatMessage::System(text) => Some(text.as_str()),
            _ => None,
        })
        .collect();
    match system.len() {
        0 | 1 => messages.to_vec(),
        count => {
            let first = ChatMessage::System(system.join("\n\n"));
            let rest = messages[count..].iter().cloned();
            std::iter::once(first).chain(rest).collect()
        }
    }
}

/// Collects all strings in a JSON value, including the names of fields.
fn collect<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(values) => values.iter().for_each(|value| collect(value, texts)),
        Value::Object(fields) => {
            for (name, value) in fields {
                texts.push(name);
                collect(value, texts);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => (),
    }
}

/// Inserts a mark into each special token's name in the strings of a JSON value, so that the tokenizer encodes the name
/// as plain text.
fn mark(value: &Value, marking: &Marking<'_>) -> Result<Value, RequestError> {
    Ok(match value {
        Value::String(text) => Value::String(marking.mark(text)?),
        Value::Array(values) => {
            let values = values.iter().map(|value| mark(value, marking));
            Value::Array(values.collect::<Result<_, _>>()?)
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| {
                Ok::<_, RequestError>((marking.mark(name)?, mark(value, marking)?))
            });
            Value::Object(fields.collect::<Result<_, _>>()?)
        }
        other => other.clone(),
    })
}
