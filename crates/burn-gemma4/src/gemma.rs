//! A checkpoint, ready to be asked: model, tokenizer, chat template and defaults.

use crate::checkpoint::gguf::Gguf;
use crate::error::existing;
use crate::{
    Cache, Cancellation, ChatOptions, ChatTemplate, Drafter, DrafterConfig, Drafts, Gemma4Config,
    Gemma4Error, Gemma4Model, GenerateOptions, Generation, GenerationDefaults, KvPrecision,
    LoadOptions, Message, Quantization, Session, Token, Tokenizer, generate,
};
use burn::tensor::{DType, Device};
use std::{ops::ControlFlow, path::Path};

/// Tokens that a generation has at most where nobody says otherwise.
const DEFAULT_MAX_TOKENS: usize = 256;

/// A Gemma 4 with all that belongs to its checkpoint.
///
/// ```no_run
/// use burn::tensor::Device;
/// use burn_gemma4::Gemma4;
/// use std::ops::ControlFlow;
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let gemma = Gemma4::from_pretrained("gemma-4-E2B-it", &Device::default())?;
/// gemma.generate("The capital of France is", &gemma.options(), |token| {
///     print!("{}", token.text);
///     ControlFlow::Continue(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Gemma4 {
    model: Gemma4Model,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    defaults: GenerationDefaults,
    drafter: Option<Drafter>,
}

/// What to go on from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text to continue. Special tokens in it are meant; the token that begins every text is put before it, if it does not
    /// begin with that itself.
    Text(String),
    /// A conversation to answer, by the checkpoint's chat template. Special tokens in its messages are text, unless
    /// [`ChatOptions::special_tokens`] says that they are meant.
    Chat(Vec<Message>),
    /// Tokens as they are.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<Message>> for Prompt {
    fn from(messages: Vec<Message>) -> Self {
        Self::Chat(messages)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens)
    }
}

impl Gemma4 {
    /// Loads a checkpoint's folder as Hugging Face has it, or a GGUF file, in the checkpoint's dtype; in f32 where the device does not
    /// compute in that.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_pretrained(path: impl AsRef<Path>, device: &Device) -> Result<Self, Gemma4Error> {
        Self::load(path, device, LoadOptions::new())
    }

    /// Loads a checkpoint: a folder with `config.json`, safetensors, `tokenizer.json`, and where they are there `chat_template.jinja`
    /// and `generation_config.json`; or a GGUF file, which has all of it.
    ///
    /// # Errors
    /// Where a file is missing or not what it should be, naming it; as [`Gemma4Model::load`].
    pub fn load(
        path: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        match Gguf::at(path)? {
            Some(gguf) => Self::load_gguf(gguf, device, options),
            None => Self::load_folder(path, device, options),
        }
    }

    fn load_gguf(
        gguf: Gguf,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let config = gguf.config()?;
        let tokenizer = gguf.tokenizer()?;
        let chat_template = gguf.chat_template()?;
        let defaults = gguf.generation_defaults()?;
        Ok(Self {
            model: Gemma4Model::load_gguf(gguf, &config, device, options)?,
            tokenizer,
            chat_template,
            defaults: defaults.or_of(&config),
            drafter: None,
        })
    }

    fn load_folder(
        folder: &Path,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        // The small files first: what is wrong with them need not wait for the weights.
        let config = Gemma4Config::from_file(folder.join("config.json"))?;
        let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
        let chat_template = ChatTemplate::from_folder(folder)?;
        let defaults = match existing(folder, "generation_config.json")? {
            Some(path) => GenerationDefaults::from_file(path)?,
            None => GenerationDefaults::default(),
        };
        Ok(Self {
            model: Gemma4Model::load_weights(folder, &config, device, options)?,
            tokenizer,
            chat_template,
            defaults: defaults.or_of(&config),
            drafter: None,
        })
    }

    /// The small model that is part of this crate: 1.4 million parameters, trained on this project's Rust and Markdown, whose
    /// look it has and little of their sense.
    ///
    /// # Errors
    /// Where the device does not compute in the dtype asked for.
    pub fn embedded(device: &Device, options: LoadOptions<'_>) -> Result<Self, Gemma4Error> {
        let config = include_str!("../embedded/config.json");
        let model = Gemma4Model::from_bytes(
            config,
            include_bytes!("../embedded/model.safetensors"),
            device,
            options,
        )?;
        let defaults =
            GenerationDefaults::from_json(include_str!("../embedded/generation_config.json"))?;
        Ok(Self {
            defaults: defaults.or_of(model.config()),
            model,
            tokenizer: Tokenizer::from_bytes(include_bytes!("../embedded/tokenizer.json"))?,
            chat_template: ChatTemplate::gemma4(),
            drafter: None,
        })
    }

    /// With the low-rank adapter in `folder` added to the weights.
    ///
    /// # Errors
    /// As [`Gemma4Model::merge_adapter`].
    pub fn merge_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let model = self.model.merge_adapter(folder)?;
        Ok(Self { model, ..self })
    }

    /// With the low-rank adapter in `folder`, beside the layers' weights where these are quantized, and else added to them.
    ///
    /// # Errors
    /// As [`Gemma4Model::attach_adapter`].
    pub fn attach_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let model = self.model.attach_adapter(folder)?;
        Ok(Self { model, ..self })
    }

    /// With the weights in another form.
    ///
    /// # Errors
    /// As [`Gemma4Model::quantize`].
    pub fn quantize(self, quantization: Quantization) -> Result<Self, Gemma4Error> {
        let model = self.model.quantize(quantization)?;
        Ok(Self { model, ..self })
    }

    /// With the drafter in `folder`, in the model's dtype and on its device, for generations whose options ask for
    /// [`Drafts::Drafter`].
    ///
    /// # Errors
    /// As [`Drafter::load`], and where its sizes are not those of a drafter for this model.
    pub fn with_drafter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let folder = folder.as_ref();
        let options = LoadOptions::new().dtype(self.dtype());
        let fits = |config: &DrafterConfig| config.check_target(self.config());
        let drafter = Drafter::load_for(folder, fits, &self.device(), options)?;
        Ok(Self {
            drafter: Some(drafter),
            ..self
        })
    }

    /// Who can guess tokens for the model.
    pub fn drafter(&self) -> Option<&Drafter> {
        self.drafter.as_ref()
    }

    /// The model's shape.
    pub fn config(&self) -> &Gemma4Config {
        self.model.config()
    }

    /// The model.
    pub fn model(&self) -> &Gemma4Model {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// How conversations become prompts.
    pub fn chat_template(&self) -> &ChatTemplate {
        &self.chat_template
    }

    /// How the checkpoint's authors sample from it.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// Settings of the checkpoint's files that are not computed, one sentence each, for people to read.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        let of_model = self.model.warnings().iter();
        let all = self.defaults.unsupported.iter().chain(of_model);
        all.map(String::as_str)
    }

    /// The dtype that it computes in.
    pub fn dtype(&self) -> DType {
        self.model.dtype()
    }

    /// The device that it is on.
    pub fn device(&self) -> Device {
        self.model.device()
    }

    /// The checkpoint's own sampling, stop tokens and number of tokens, which is 256 where it names none.
    pub fn options(&self) -> GenerateOptions {
        let positions = self.config().max_position_embeddings;
        let (max_tokens, max_length) =
            match (self.defaults.max_new_tokens, self.defaults.max_length) {
                (Some(count), _) => (count, None),
                (None, Some(length)) => (positions, Some(length)),
                (None, None) => (DEFAULT_MAX_TOKENS, None),
            };
        GenerateOptions {
            max_tokens,
            max_length,
            min_new_tokens: self.defaults.min_new_tokens,
            min_length: self.defaults.min_length,
            begin_suppress_tokens: self.defaults.begin_suppress_tokens.clone(),
            sampling: self.defaults.sampling(),
            stop_tokens: self.defaults.stop_tokens.clone(),
            ignore_stop_tokens: false,
            stop_strings: self.defaults.stop_strings.clone(),
            logprobs: None,
            prefill_chunk: None,
            cancellation: None,
            graph_capture: true,
            compact_keys: false,
            kv_precision: KvPrecision::default(),
            drafts: Drafts::None,
            draft_tokens: None,
            chat: ChatOptions::default(),
        }
    }

    /// A prompt's tokens.
    ///
    /// # Errors
    /// Where the chat template refuses the conversation, or the tokenizer the text.
    pub fn tokens(&self, prompt: &Prompt, chat: ChatOptions) -> Result<Vec<u32>, Gemma4Error> {
        self.tokens_until(prompt, chat, None)
    }

    /// As [`tokens`](Self::tokens), until `cancellation` is cancelled, which is an error where a chat template is rendered.
    pub(crate) fn tokens_until(
        &self,
        prompt: &Prompt,
        chat: ChatOptions,
        cancellation: Option<&Cancellation>,
    ) -> Result<Vec<u32>, Gemma4Error> {
        let template = &self.chat_template;
        match prompt {
            Prompt::Text(text) => {
                let bos = self.config().bos_token;
                let mut tokens = self.tokenizer.encode(text)?;
                if tokens.first() != Some(&bos) {
                    tokens.insert(0, bos);
                }
                Ok(tokens)
            }
            // The template writes the token that begins every text.
            Prompt::Chat(messages) if chat.special_tokens => self
                .tokenizer
                .encode(&template.render_until(messages, chat, cancellation)?),
            Prompt::Chat(messages) => {
                let marking = self
                    .tokenizer
                    .marking(messages.iter().map(|message| message.content.as_str()))?;
                let marked: Vec<Message> = messages
                    .iter()
                    .map(|message| {
                        let content = marking.mark(&message.content)?;
                        Ok(Message {
                            role: message.role,
                            content,
                        })
                    })
                    .collect::<Result<_, Gemma4Error>>()?;
                let prompt = template.render_until(&marked, chat, cancellation)?;
                marking.encode(&prompt)
            }
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
        }
    }

    /// Goes on from a prompt. `on_token` gets each token as it comes, and ends the generation by breaking.
    ///
    /// # Errors
    /// Where the prompt or the options do not fit the model, and where the device fails.
    pub fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
        mut on_token: impl FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let tokens =
            self.tokens_until(&prompt.into(), options.chat, options.cancellation.as_ref())?;
        let prompts = std::slice::from_ref(&tokens);
        let max_tokens = generate::check(self.config(), prompts, self.drafter(), options)?;
        let mut cache = options.cache(self.config(), vec![0]);
        self.run(tokens, &mut cache, options, max_tokens, &mut on_token)
    }

    /// Goes on from several prompts at once, of any lengths.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn generate_batch(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<Generation>, Gemma4Error> {
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let prompts: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| self.tokens_until(prompt, options.chat, options.cancellation.as_ref()))
            .collect::<Result<_, _>>()?;
        let max_tokens = generate::check(self.config(), &prompts, self.drafter(), options)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let padding = prompts
            .iter()
            .map(|prompt| longest - prompt.len())
            .collect();
        let mut cache = options.cache(self.config(), padding);
        generate::run(
            self.checkpoint(),
            prompts,
            &mut cache,
            options,
            max_tokens,
            &mut |_, _| ControlFlow::Continue(()),
        )
    }

    /// Goes on from the only prompt, which has been checked, and whose first tokens `cache` may hold.
    pub(crate) fn run(
        &self,
        tokens: Vec<u32>,
        cache: &mut Cache,
        options: &GenerateOptions,
        max_tokens: usize,
        on_token: &mut dyn FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let mut generations = generate::run(
            self.checkpoint(),
            vec![tokens],
            cache,
            options,
            max_tokens,
            &mut |_, token| on_token(token),
        )?;
        Ok(generations.remove(0))
    }

    fn checkpoint(&self) -> generate::Checkpoint<'_> {
        generate::Checkpoint {
            model: &self.model,
            drafter: self.drafter.as_ref(),
            tokenizer: &self.tokenizer,
        }
    }

    /// Generations that share what they have read: a conversation, each turn of which begins with all turns before.
    pub fn session(&self) -> Session<'_> {
        Session::new(self)
    }
}
