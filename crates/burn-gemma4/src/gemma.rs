//! A loaded checkpoint: the model, the tokenizer, the chat template and the generation defaults.

use crate::audio::clip::Audio;
use crate::audio::prepared::PreparedAudio;
use crate::cancellation::Cancellation;
use crate::checkpoint::adapter::{AdaptedParts, Placement};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::lazy_encoder::{LazyEncoder, MediumFormat};
use crate::checkpoint::media::{MediaEncoders, MediumInput};
use crate::checkpoint::media_towers::{MediaKinds, MediaTowers};
use crate::checkpoint::{LoadOptions, Quantization};
use crate::config::Gemma4Config;
use crate::config::drafter::DrafterConfig;
use crate::config::generation::GenerationDefaults;
use crate::config::placeholders::Placeholders;
use crate::config::unknown_files::missing;
use crate::error::Gemma4Error;
use crate::error::existing;
use crate::generate;
use crate::generate::decode::Prefill;
use crate::generate::encoded::EncodedPrompt;
use crate::generate::{CapturedPrompts, GenerateOptions, Generation, PromptEncoder, Token};
use crate::model::cache::Cache;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::precision::KvPrecision;
use crate::model::{Gemma4Model, Logits};
use crate::session::Session;
use crate::speculative::drafter::Drafter;
use crate::speculative::drafts::Drafts;
use crate::text::chat::{ChatOptions, ChatTemplate, Message};
use crate::text::tokenizer::Tokenizer;
use crate::vision::image::Image;
use crate::vision::prepared::PreparedImage;
use crate::vision::prepared_video::PreparedVideo;
use crate::vision::video::Video;
use burn::tensor::{DType, Device, Tensor};
use std::{fs, ops::ControlFlow, path::Path};

/// The token that ends a turn of a conversation in Gemma's chat templates.
const END_OF_TURN: &str = "<turn|>";

/// The default maximum number of generated tokens, if neither the caller nor the checkpoint sets a maximum.
const DEFAULT_MAX_TOKENS: usize = 256;

/// A Gemma 4 model with its tokenizer, its chat template and its generation defaults.
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
    /// The parts of the model that see images and hear audio, or the reasons why this model has none.
    encoders: MediaEncoders,
    placeholders: Placeholders,
    /// The CUDA graphs of the model's forward passes over whole prompts.
    graphs: CapturedPrompts,
}

/// The prompt of a generation: a text, a conversation or tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A text to continue. Special tokens in the text are encoded as special tokens. The BOS token is prepended if it is
    /// missing.
    Text(String),
    /// A conversation, which the checkpoint's chat template renders. Special tokens in the messages are encoded as plain
    /// text, unless [`ChatOptions::special_tokens`] is set.
    Chat(Vec<Message>),
    /// Token ids to continue. The ids are passed to the model unchanged.
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
    /// Loads a checkpoint from a Hugging Face folder or from a GGUF file. The model computes in the checkpoint's dtype, or in
    /// f32 if the device does not support that dtype.
    ///
    /// # Errors
    /// Passes on the errors of [`load`](Self::load).
    pub fn from_pretrained(path: impl AsRef<Path>, device: &Device) -> Result<Self, Gemma4Error> {
        Self::load(path, device, LoadOptions::new())
    }

    /// Loads a checkpoint from a folder or from a GGUF file. A folder contains `config.json`, safetensors files and
    /// `tokenizer.json`, and optionally `chat_template.jinja` and `generation_config.json`. A GGUF file contains the data of
    /// all these files.
    ///
    /// # Errors
    /// Returns an error that names the file if a file is missing or malformed. Passes on the errors of [`Gemma4Model::load`].
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
            encoders: MediaEncoders::none("GGUF files contain", "load the checkpoint's folder"),
            placeholders: Placeholders::default(),
            graphs: CapturedPrompts::default(),
        })
    }

    fn load_folder(
        folder: &Path,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        // Read the small files first. An error in them is then reported before the long loading of the weights.
        let path = folder.join("config.json");
        let config = Gemma4Config::from_file(&path)?;
        let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
        let placeholders = Placeholders::from_json(&json, config.vocab_size)?;
        let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
        let chat_template = ChatTemplate::from_folder(folder)?;
        let defaults = match existing(folder, "generation_config.json")? {
            Some(path) => GenerationDefaults::from_file(path)?,
            None => GenerationDefaults::default(),
        };
        let model = Gemma4Model::load_weights(folder, &config, device, options)?;
        let encoders = MediaEncoders::open(folder, &json, &config, model.dtype(), device);
        Ok(Self {
            model,
            tokenizer,
            chat_template,
            defaults: defaults.or_of(&config),
            drafter: None,
            encoders,
            placeholders,
            graphs: CapturedPrompts::default(),
        })
    }

    /// Loads the small model that is embedded in this crate. The model has 1.4 million parameters and was trained on this
    /// project's Rust and Markdown files.
    ///
    /// # Errors
    /// Returns an error if the device does not support the requested dtype.
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
            encoders: MediaEncoders::none("the embedded model has", "load a multimodal checkpoint"),
            placeholders: Placeholders::default(),
            graphs: CapturedPrompts::default(),
        })
    }

    /// Merges the LoRA adapter in `folder` into the weights, with its factors for the vision and the audio. If these do
    /// not fit, the result sees no images or hears no audio.
    ///
    /// # Errors
    /// Passes on the errors of [`Gemma4Model::merge_adapter`].
    pub fn merge_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Placement::Merged)
    }

    /// Adds the LoRA adapter in `folder` to the model. For weights that are not quantized, the adapter is merged into
    /// the weights. For quantized weights, each forward pass adds the adapter's output. Factors for the vision and the
    /// audio are merged. If they do not fit, the result sees no images or hears no audio.
    ///
    /// # Errors
    /// Passes on the errors of [`Gemma4Model::attach_adapter`].
    pub fn attach_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Placement::Beside)
    }

    fn with_adapter(self, folder: &Path, placement: Placement) -> Result<Self, Gemma4Error> {
        self.model.refuse_if_mobile("an adapter")?;
        let MediaEncoders { vision, audio } = &self.encoders;
        let has_towers = vision.is_ok() || audio.is_ok();
        let parts = AdaptedParts::of(folder)?;
        // An adapter of towers only leaves the text model as it is.
        let mut adapted = match parts.text || !has_towers {
            true => self.with_model(|model| model.with_adapter(folder, placement, !has_towers))?,
            false => self,
        };
        let MediaEncoders { vision, audio } = &mut adapted.encoders;
        let mut warnings = Vec::new();
        if parts.vision && has_towers {
            adapt_encoder(vision, (folder, "vision", "images are"), &mut warnings);
        }
        if parts.audio && has_towers {
            adapt_encoder(audio, (folder, "audio", "audio is"), &mut warnings);
        }
        adapted.model.warnings.extend(warnings);
        Ok(adapted)
    }

    /// Quantizes the weights.
    ///
    /// # Errors
    /// Passes on the errors of [`Gemma4Model::quantize`].
    pub fn quantize(self, quantization: Quantization) -> Result<Self, Gemma4Error> {
        self.with_model(|model| model.quantize(quantization))
    }

    /// Loads the drafter in `folder`. A generation uses the drafter if the options select [`Drafts::Drafter`].
    ///
    /// # Errors
    /// Passes on the errors of [`Drafter::load`]. Returns an error if the drafter's sizes do not fit this model.
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

    /// The drafter for speculative decoding, or `None` if no drafter has been loaded.
    pub fn drafter(&self) -> Option<&Drafter> {
        self.drafter.as_ref()
    }

    /// The model's configuration, which holds its sizes and hyperparameters.
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

    /// The chat template, which renders a conversation to a prompt.
    pub fn chat_template(&self) -> &ChatTemplate {
        &self.chat_template
    }

    /// The generation settings that the checkpoint recommends.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// Warnings about settings in the checkpoint's files that this crate ignores. Each warning is one sentence for the user.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        let of_model = self.model.warnings().iter();
        let all = self.defaults.unsupported.iter().chain(of_model);
        all.map(String::as_str)
    }

    /// Checks that the model sees images. The weights of the vision are loaded when the first image needs them.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_gemma4::{Gemma4, Image, LoadOptions, Message};
    /// use std::ops::ControlFlow;
    ///
    /// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
    /// let image = Image::from_rgb(1, 1, vec![200, 150, 90])?;
    /// let message = Message::user(vec![image.into(), "What is this?".into()]);
    /// let answer = gemma.generate(vec![message], &gemma.chat_options(), |_| ControlFlow::Continue(()));
    /// assert!(gemma.check_vision().is_err() && answer.is_err());
    /// # }
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no images.
    pub fn check_vision(&self) -> Result<(), Gemma4Error> {
        self.encoders.vision().map(|_| ())
    }

    /// Checks that the model sees videos, which need the weights of the vision too.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model sees no videos.
    pub fn check_video(&self) -> Result<(), Gemma4Error> {
        self.encoders.vision()?.format().video().map(|_| ())
    }

    /// Checks that the model hears audio. The weights of the audio are loaded when the first audio clip needs them.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_gemma4::{Audio, Gemma4, LoadOptions, Message};
    /// use std::ops::ControlFlow;
    ///
    /// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
    /// let silence = Audio::from_samples(&[0.0; 16_000], 16_000)?;
    /// let message = Message::user(vec![silence.into(), "What is said?".into()]);
    /// let answer = gemma.generate(vec![message], &gemma.chat_options(), |_| ControlFlow::Continue(()));
    /// assert!(gemma.check_audio().is_err() && answer.is_err());
    /// # }
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] with the reason why the model hears no audio.
    pub fn check_audio(&self) -> Result<(), Gemma4Error> {
        self.encoders.audio().map(|_| ())
    }

    /// The tokens that stand for images, audio and video. Check tokens with them that [`tokens`](Self::tokens) has not
    /// encoded.
    pub fn placeholders(&self) -> &Placeholders {
        &self.placeholders
    }

    /// Computes the soft tokens that stand for an image in a prompt.
    ///
    /// # Shapes
    /// The result is `[soft tokens, hidden]`, in reading order.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model sees no images, or if the image is too narrow. Returns an error if
    /// the weights of the vision cannot be loaded.
    pub fn soft_tokens(&self, image: &Image) -> Result<Tensor<2>, Gemma4Error> {
        let prepared = self.encoders.vision()?.format().prepared(image)?;
        let input = MediumInput::Image(prepared.patches);
        self.encoders.soft_tokens(&input)
    }

    /// Computes the soft tokens that stand for each frame of a video in a prompt.
    ///
    /// # Shapes
    /// Each tensor is `[soft tokens, hidden]`, in reading order.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in the cases in which [`PromptEncoder::prepare_video`] fails. Returns an error
    /// if the weights of the vision cannot be loaded.
    pub fn video_soft_tokens(&self, video: &Video) -> Result<Vec<Tensor<2>>, Gemma4Error> {
        let prepared = self.encoders.vision()?.format().prepared_video(video)?;
        let frames = prepared.frames.into_iter().map(|(_, frame)| {
            let input = MediumInput::Image(frame.patches);
            self.encoders.soft_tokens(&input)
        });
        frames.collect()
    }

    /// Computes the soft tokens that stand for an audio clip in a prompt.
    ///
    /// # Shapes
    /// The result is `[soft tokens, hidden]`, in the order of time. A soft token stands for 40 ms in published models.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model hears no audio, or if the clip is too short. Returns an error if
    /// the weights of the audio cannot be loaded.
    pub fn audio_soft_tokens(&self, audio: &Audio) -> Result<Tensor<2>, Gemma4Error> {
        let prepared = self.encoders.audio()?.format().prepared(audio)?;
        let input = MediumInput::Audio(prepared.features);
        self.encoders.soft_tokens(&input)
    }

    /// Loads the weights of the vision, unless an image has loaded them before. Does nothing if the model sees no
    /// images.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn load_vision(&self) -> Result<(), Gemma4Error> {
        self.encoders.load_vision()
    }

    /// Loads the weights of the audio, unless an audio clip has loaded them before. Does nothing if the model hears no
    /// audio.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be loaded.
    pub fn load_audio(&self) -> Result<(), Gemma4Error> {
        self.encoders.load_audio()
    }

    /// Loads the towers that compute the soft tokens of training batches. `kinds` are the kinds of media in the batches.
    /// The weights are loaded again if prompts have loaded them before.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the model does not read media of a kind. Returns an error if the weights
    /// cannot be loaded.
    pub fn media_towers(&self, kinds: MediaKinds) -> Result<MediaTowers, Gemma4Error> {
        MediaTowers::load(&self.encoders, kinds)
    }

    /// Returns the part of the model that puts images and audio clips in the place of placeholders. It holds no
    /// weights.
    pub fn prompt_encoder(&self) -> PromptEncoder {
        PromptEncoder::new(self.encoders.formats(), self.placeholders.clone())
    }

    /// Computes the logits of the prompt's positions that `asked` selects, in one call of the model.
    ///
    /// # Shapes
    /// The result is `[1, selected positions, vocabulary]`, or `None` for [`Logits::None`].
    ///
    /// # Errors
    /// Returns the errors of [`tokens`](Self::tokens). Returns [`Gemma4Error::Argument`] if the prompt has no tokens, a
    /// token outside of the vocabulary, or more tokens than the model has positions.
    pub fn logits(
        &self,
        prompt: impl Into<Prompt>,
        chat: ChatOptions,
        asked: Logits,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let prompt = self.encode(&prompt.into(), chat, None)?;
        generate::check_prompts(self.config(), std::slice::from_ref(&prompt))?;
        let hidden = generate::hidden_of_prompt(&self.model, &self.encoders, &prompt, asked)?;
        Ok(hidden.map(|hidden| self.model.logits(hidden)))
    }

    /// The dtype in which the model computes.
    pub fn dtype(&self) -> DType {
        self.model.dtype()
    }

    /// The device that holds the model.
    pub fn device(&self) -> Device {
        self.model.device()
    }

    /// Returns options with the checkpoint's sampling settings, stop tokens and token limit. If the checkpoint sets no
    /// token limit, the limit is 256 tokens.
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

    /// Returns [`options`](Self::options) for answers in a conversation. `<turn|>` stops an answer, even if the
    /// checkpoint does not list this token among its stop tokens.
    pub fn chat_options(&self) -> GenerateOptions {
        let mut options = self.options();
        let end_of_turn = self.tokenizer.id(END_OF_TURN);
        let end_of_turn = end_of_turn.filter(|token| !options.stop_tokens.contains(token));
        options.stop_tokens.extend(end_of_turn);
        options
    }

    /// Encodes a prompt to token ids. Each image and each audio clip becomes a begin token, one placeholder token for
    /// each of its soft tokens, and an end token. So does each frame of a video, after its timestamp.
    ///
    /// # Errors
    /// Returns an error if the chat template rejects the conversation, or the tokenizer rejects the text. Returns
    /// [`Gemma4Error::Argument`] if the prompt has images and the model sees none, or audio and the model hears none.
    /// Returns the same error if the chat template does not write one placeholder for each of them, and for videos in
    /// the cases in which [`PromptEncoder::prepare_video`] fails.
    pub fn tokens(&self, prompt: &Prompt, chat: ChatOptions) -> Result<Vec<u32>, Gemma4Error> {
        Ok(self.encode(prompt, chat, None)?.tokens)
    }

    /// Encodes a prompt like [`tokens`](Self::tokens), with its images and audio. Returns an error if `cancellation`
    /// is cancelled while the chat template renders.
    pub(crate) fn encode(
        &self,
        prompt: &Prompt,
        chat: ChatOptions,
        cancellation: Option<&Cancellation>,
    ) -> Result<EncodedPrompt, Gemma4Error> {
        let messages = match prompt {
            Prompt::Chat(messages) => &messages[..],
            Prompt::Text(_) | Prompt::Tokens(_) => &[],
        };
        let contents = || messages.iter().map(|message| &message.content);
        let images: Vec<&Image> = contents().flat_map(|content| content.images()).collect();
        let videos: Vec<&Video> = contents().flat_map(|content| content.videos()).collect();
        let audio: Vec<&Audio> = contents().flat_map(|content| content.audio()).collect();
        // Check the model before the chat template, which may reject images or audio without a reason.
        if !images.is_empty() {
            self.encoders.vision()?;
        }
        if !videos.is_empty() {
            self.check_video()?;
        }
        if !audio.is_empty() {
            self.encoders.audio()?;
        }
        let encoder = self.prompt_encoder();
        let videos = videos.into_iter().map(|video| encoder.prepare_video(video));
        let videos: Vec<PreparedVideo> = videos.collect::<Result<_, _>>()?;
        let expand = |text: String| match videos.is_empty() {
            true => Ok(text),
            false => encoder.expand_videos(&text, &videos),
        };
        let tokens = self.rendered(prompt, chat, expand, cancellation)?;
        let images = images.into_iter().map(|image| encoder.prepare(image));
        let images: Vec<PreparedImage> = images.collect::<Result<_, _>>()?;
        let audio = audio.into_iter().map(|clip| encoder.prepare_audio(clip));
        let audio: Vec<PreparedAudio> = audio.collect::<Result<_, _>>()?;
        encoder.encode_with_videos(tokens, &images, &videos, &audio)
    }

    /// Encodes a prompt to token ids, in which each image, each frame and each audio clip is one placeholder.
    /// `expand_videos` replaces the placeholders of videos in a rendered conversation.
    fn rendered(
        &self,
        prompt: &Prompt,
        chat: ChatOptions,
        expand_videos: impl Fn(String) -> Result<String, Gemma4Error>,
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
            // Encode the rendered text without adding a BOS token, because the chat template has written one.
            Prompt::Chat(messages) if chat.special_tokens => self.tokenizer.encode(&expand_videos(
                template.render_until(messages, chat, cancellation)?,
            )?),
            Prompt::Chat(messages) => {
                let marking = self
                    .tokenizer
                    .marking(messages.iter().flat_map(|message| message.content.texts()))?;
                let marked: Vec<Message> = messages
                    .iter()
                    .map(|message| {
                        let mark = |text: &str| marking.mark(text);
                        Ok(Message {
                            role: message.role,
                            content: message.content.try_map_texts(mark)?,
                        })
                    })
                    .collect::<Result<_, Gemma4Error>>()?;
                let prompt = template.render_until(&marked, chat, cancellation)?;
                marking.encode(&expand_videos(prompt)?)
            }
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
        }
    }

    /// Generates a continuation of a prompt. `on_token` receives each generated token, and can return `Break` to stop the
    /// generation.
    ///
    /// # Errors
    /// Returns an error if the prompt or the options do not fit the model, or if the device fails.
    pub fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
        mut on_token: impl FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let prompt = self.encode(&prompt.into(), options.chat, options.cancellation.as_ref())?;
        let prompts = std::slice::from_ref(&prompt);
        let max_tokens = generate::check(self.config(), prompts, self.drafter(), options)?;
        let mut cache = options.cache(self.config(), vec![0]);
        self.run(prompt, &mut cache, options, max_tokens, &mut on_token)
    }

    /// Generates a continuation of each prompt, in one batch. The prompts may differ in length.
    ///
    /// # Errors
    /// Passes on the errors of [`generate`](Self::generate).
    pub fn generate_batch(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<Generation>, Gemma4Error> {
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let prompts: Vec<EncodedPrompt> = prompts
            .iter()
            .map(|prompt| self.encode(prompt, options.chat, options.cancellation.as_ref()))
            .collect::<Result<_, _>>()?;
        let max_tokens = generate::check(self.config(), &prompts, self.drafter(), options)?;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let longest = lengths.clone().max().unwrap_or(0);
        let padding = lengths.map(|length| longest - length).collect();
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

    /// Generates a continuation of a single prompt, which the caller must have checked. `cache` may already hold the
    /// first tokens of the prompt.
    pub(crate) fn run(
        &self,
        prompt: EncodedPrompt,
        cache: &mut Cache,
        options: &GenerateOptions,
        max_tokens: usize,
        on_token: &mut dyn FnMut(&Token<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, Gemma4Error> {
        let mut generations = generate::run(
            self.checkpoint(),
            vec![prompt],
            cache,
            options,
            max_tokens,
            &mut |_, token| on_token(token),
        )?;
        Ok(generations.remove(0))
    }

    /// Prefills only the first `end` tokens of a prompt. `end` must not divide an image or an audio clip.
    pub(crate) fn read_beginning(
        &self,
        prompt: &EncodedPrompt,
        end: usize,
        cache: &mut Cache,
        options: &GenerateOptions,
    ) -> Result<(), Gemma4Error> {
        generate::read_beginning(&self.model, &self.encoders, prompt, end, cache, options)
    }

    fn checkpoint(&self) -> generate::Checkpoint<'_> {
        generate::Checkpoint {
            model: &self.model,
            encoders: &self.encoders,
            drafter: self.drafter.as_ref(),
            tokenizer: &self.tokenizer,
            graphs: &self.graphs,
        }
    }

    /// Replaces the model by the result of `change`.
    fn with_model(
        self,
        change: impl FnOnce(Gemma4Model) -> Result<Gemma4Model, Gemma4Error>,
    ) -> Result<Self, Gemma4Error> {
        // Drop the graphs, because they compute with the old weights and keep these weights in memory.
        drop(self.graphs);
        Ok(Self {
            model: change(self.model)?,
            graphs: CapturedPrompts::default(),
            ..self
        })
    }

    /// Creates the prefill of a prompt, which can join a [`Batch`](crate::Batch). In contrast to a prefill from
    /// [`Prefill::new`], this prefill can replay a CUDA graph in each call of [`Prefill::advance`] over up to 2,048
    /// tokens.
    ///
    /// A prompt with images or audio must come from an encoder of this checkpoint.
    ///
    /// # Errors
    /// Passes on the errors of [`Prefill::new`]. Returns [`Gemma4Error::Argument`] if the prompt has images, and the
    /// model sees none, or if the prompt has audio, and the model hears none. Returns the same error for a placeholder
    /// without an image or audio clip.
    pub fn prefill(
        &self,
        prompt: impl Into<EncodedPrompt>,
        kind: CacheKind,
    ) -> Result<Prefill, Gemma4Error> {
        let EncodedPrompt {
            tokens,
            media,
            inputs,
        } = prompt.into();
        let places = media.iter().map(|medium| medium.tokens.clone());
        self.placeholders.check_outside(&tokens, places)?;
        let prefill = Prefill::new(&self.model, tokens, kind)?.with_graphs(&self.graphs);
        if media.is_empty() {
            return Ok(prefill);
        }
        self.encoders.check(&inputs)?;
        Ok(prefill.with_media(media, inputs, &self.encoders))
    }

    /// Returns the number of tokens of the longest prompt that runs faster as one CUDA graph than with a reused prefix.
    /// Returns 0 if there are no such prompts, or on another [stream](Self::on_stream_of_weights) than that of the
    /// weights. `kind` is the storage format of the KV cache.
    ///
    /// [`PrefixCache`](crate::PrefixCache) neither keeps nor continues such a prompt if the prompt also fits into one
    /// chunk.
    pub fn longest_whole_prompt(&self, kind: CacheKind) -> usize {
        match crate::op::is_hopper(&self.device()) {
            true => self.graphs.longest_whole(&self.model, kind),
            false => 0,
        }
    }

    /// Runs `work` on the device stream on which the weights were loaded.
    ///
    /// CubeCL gives each thread a stream of its own, and a CUDA graph can only use weights that were loaded on the
    /// thread's stream. A thread that did not load the weights launches its kernels one by one, unless it generates
    /// within this method. While `work` runs, no other thread may use the weights' stream. The thread that loaded the
    /// weights must therefore not use the device.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_gemma4::{Gemma4, LoadOptions};
    /// use std::ops::ControlFlow;
    ///
    /// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
    /// let worker = std::thread::spawn(move || {
    ///     gemma.on_stream_of_weights(|| {
    ///         gemma.generate("fn main", &gemma.options(), |_| ControlFlow::Break(()))
    ///     })
    /// });
    /// assert_eq!(worker.join().unwrap()?.tokens.len(), 1);
    /// # }
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    pub fn on_stream_of_weights<T>(&self, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "cube")]
        if let Some(stream) = crate::op::stream::stream_of(self.model.norm.weight.val()) {
            return stream.executes(work);
        }
        work()
    }

    /// Starts a session, which keeps its KV cache between generations. If a prompt begins with the tokens of the
    /// previous prompt, the session reuses the keys and values of these tokens.
    pub fn session(&self) -> Session<'_> {
        Session::new(self)
    }
}

/// Adds the adapter in `folder` to an encoder. If the adapter does not fit, the encoder becomes the reason. `part` is the
/// noun of the encoder, and `refused` names its media with a verb.
fn adapt_encoder<F: MediumFormat>(
    encoder: &mut Result<LazyEncoder<F>, String>,
    (folder, part, refused): (&Path, &str, &str),
    warnings: &mut Vec<String>,
) {
    let name = folder.display();
    match encoder {
        Ok(own) => match own.with_adapter(folder) {
            Ok(adapted) => *own = adapted,
            Err(error) => {
                let reason =
                    format!("the adapter {name} changes the {part}, but does not fit: {error}");
                warnings.push(format!("{reason}; {refused} refused"));
                *encoder = Err(reason);
            }
        },
        Err(reason) => warnings.push(format!(
            "the adapter {name} has factors for the {part}, which are not used: {reason}"
        )),
    }
}
