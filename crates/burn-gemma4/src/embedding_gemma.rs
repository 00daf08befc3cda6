//! A loaded checkpoint of EmbeddingGemma 2: the model, the tokenizer and the settings of sentence-transformers.

mod options;
mod passes;

pub use options::EmbedOptions;

use crate::checkpoint::LoadOptions;
use crate::config::embedding_gemma::EmbeddingGemmaConfig;
use crate::config::placeholders::Placeholders;
use crate::config::sentence_transformers::SentenceTransformers;
use crate::config::unknown_files::missing;
use crate::error::{Gemma4Error, existing};
use crate::model::embedding_gemma::EmbeddingGemmaModel;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::template::TextTemplate;
use burn::tensor::Device;
use passes::{PASS_TOKENS, passes};
use std::{fs, path::Path};

/// The smallest norm by which an embedding is divided, as in PyTorch's `normalize`.
const SMALLEST_NORM: f64 = 1e-12;

/// An EmbeddingGemma 2 model with its tokenizer, its prompts and its pooling.
///
/// ```no_run
/// use burn::tensor::Device;
/// use burn_gemma4::{EmbedOptions, EmbeddingGemma};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let model = EmbeddingGemma::from_pretrained("embeddinggemma-2", &Device::default())?;
/// let query = EmbedOptions::new().prompt("SearchQuery");
/// let document = EmbedOptions::new().prompt("Document");
/// let asked = model.embed(&["Which planet is red?"], &query)?;
/// let read = model.embed(&["Mars is red.", "Venus is bright."], &document)?;
/// // Embeddings have the norm 1, so their dot product is the cosine similarity.
/// let similarity = |text: &[f32]| -> f32 { asked[0].iter().zip(text).map(|(a, b)| a * b).sum() };
/// println!("{} {}", similarity(&read[0]), similarity(&read[1]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EmbeddingGemma {
    model: EmbeddingGemmaModel,
    tokenizer: Tokenizer,
    template: TextTemplate,
    placeholders: Placeholders,
    settings: SentenceTransformers,
}

impl EmbeddingGemma {
    /// The largest number of tokens of several texts in one pass. A longer text is a pass of its own.
    pub const PASS_TOKENS: usize = PASS_TOKENS;

    /// Loads a checkpoint from a Hugging Face folder. The model computes in the checkpoint's dtype, or in f32 on a CPU
    /// and on devices that do not support that dtype.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn from_pretrained(path: impl AsRef<Path>, device: &Device) -> Result<Self, Gemma4Error> {
        Self::load(path, device, LoadOptions::new())
    }

    /// Loads a checkpoint from a folder. The folder contains `config.json`, safetensors files and `tokenizer.json`, and
    /// optionally the files of sentence-transformers: `modules.json`, the folder of its `Pooling` module,
    /// `sentence_bert_config.json` and `config_sentence_transformers.json`.
    ///
    /// # Errors
    /// Returns an error that names the file if a file is missing or malformed, or has a setting that is not supported.
    /// Returns the errors of [`EmbeddingGemmaModel::load`].
    pub fn load(
        path: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        // Read the small files first. An error in them is then reported before the long loading of the weights.
        let folder = path.as_ref();
        let path = folder.join("config.json");
        let config = EmbeddingGemmaConfig::from_file(&path)?;
        let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
        let placeholders = Placeholders::from_json(&json, config.text.vocab_size)?;
        let path = folder.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path)?;
        let template = TextTemplate::from_file(&path)?;
        let settings = SentenceTransformers::from_folder(folder, config.embedding_dim)?;
        Ok(Self {
            model: EmbeddingGemmaModel::load(folder, device, options)?,
            tokenizer,
            template,
            placeholders,
            settings,
        })
    }

    /// True if `path` is a folder with the configuration of an embedding model.
    ///
    /// # Errors
    /// Returns an error if the folder's `config.json` cannot be read or is not JSON.
    pub fn is_at(path: impl AsRef<Path>) -> Result<bool, Gemma4Error> {
        let folder = path.as_ref();
        if !folder.is_dir() {
            return Ok(false);
        }
        let Some(path) = existing(folder, "config.json")? else {
            return Ok(false);
        };
        let json = fs::read_to_string(&path).map_err(|source| missing(path.clone(), source))?;
        EmbeddingGemmaConfig::is_in(&json).map_err(|error| match error {
            Gemma4Error::Config(reason) => Gemma4Error::Malformed { path, reason },
            other => other,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &EmbeddingGemmaConfig {
        self.model.config()
    }

    /// The model.
    pub fn model(&self) -> &EmbeddingGemmaModel {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the names of the prompts and their texts, in alphabetical order.
    pub fn prompts(&self) -> impl Iterator<Item = (&str, &str)> {
        let prompts = self.settings.prompts.iter();
        prompts.map(|(name, text)| (name.as_str(), text.as_str()))
    }

    /// Returns the largest number of tokens of a text, with its prompt and the tokens that the tokenizer adds.
    pub fn max_tokens(&self) -> usize {
        let positions = self.config().text.max_position_embeddings;
        let limit = self.settings.max_tokens;
        limit.map_or(positions, |limit| limit.min(positions))
    }

    /// Encodes a text, after the prompt that the options select. Special tokens in the text, such as `<eos>`, become
    /// their ids, as in sentence-transformers. The tokens that the tokenizer adds, such as `<bos>`, are in the result.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the checkpoint lacks the prompt, if the text has too many tokens, or if it
    /// has a placeholder of an image, of audio or of a video. Returns [`Gemma4Error::Tokenizer`] if the tokenizer rejects
    /// the text.
    pub fn tokens(&self, text: &str, options: &EmbedOptions) -> Result<Vec<u32>, Gemma4Error> {
        let prompt = self.prompt(options)?;
        let limit = self.max_tokens();
        let fewest = self.tokenizer.fewest_tokens(text);
        if fewest > limit && !options.truncate {
            // Do not encode a text that is far too long.
            return Err(self.too_long(format!("at least {fewest}")));
        }
        let mut tokens = self.tokenizer.encode(&format!("{prompt}{text}"))?;
        let count = tokens.len() + self.template.len();
        if count > limit {
            if !options.truncate {
                return Err(self.too_long(format!("{count}")));
            }
            tokens.truncate(limit.saturating_sub(self.template.len()));
        }
        let tokens = self.template.around(&tokens);
        self.check_tokens(&tokens)?;
        Ok(tokens)
    }

    /// Checks tokens that [`tokens`](Self::tokens) has not encoded.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there are no tokens or too many, if a token is outside the vocabulary, or if
    /// a token is a placeholder of an image, of audio or of a video.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), Gemma4Error> {
        if tokens.is_empty() {
            return Err(Gemma4Error::Argument {
                argument: "text",
                reason: "has no tokens; expected at least one".into(),
            });
        }
        if tokens.len() > self.max_tokens() {
            return Err(self.too_long(format!("{}", tokens.len())));
        }
        let ids = tokens.iter().map(|token| i64::from(*token));
        self.config().text.check_tokens(ids)?;
        self.placeholders.check(tokens)
    }

    /// Computes the embeddings of texts. An embedding has [`embedding_dim`](EmbeddingGemmaConfig::embedding_dim)
    /// elements, or as many as the options say. Its norm is 1, unless the checkpoint's `modules.json` has no `Normalize`.
    ///
    /// The texts run in passes of up to 8,192 tokens, without padding. Another text in a pass changes an embedding by
    /// rounding at most.
    ///
    /// # Errors
    /// Returns the errors of [`tokens`](Self::tokens) and [`embed_tokens`](Self::embed_tokens).
    pub fn embed<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: &EmbedOptions,
    ) -> Result<Vec<Vec<f32>>, Gemma4Error> {
        let tokens = texts.iter().enumerate().map(|(index, text)| {
            let tokens = self.tokens(text.as_ref(), options);
            tokens.map_err(|error| at_text(index, error))
        });
        let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
        self.embed_tokens(&tokens, options.dimensions)
    }

    /// Computes the embeddings of texts that are already tokens, as [`embed`](Self::embed) does. No prompt and no tokens
    /// are added.
    ///
    /// # Errors
    /// Returns the errors of [`try_embed_tokens`](Self::try_embed_tokens), and those of its embeddings. Returns
    /// [`Gemma4Error::Argument`] if `dimensions` is not a number of elements that the model has.
    pub fn embed_tokens(
        &self,
        texts: &[Vec<u32>],
        dimensions: Option<usize>,
    ) -> Result<Vec<Vec<f32>>, Gemma4Error> {
        if let Some(dimensions) = dimensions {
            self.config().check_dimensions(dimensions)?;
        }
        let embeddings = self.try_embed_tokens(texts)?.into_iter().enumerate();
        let embeddings = embeddings.map(|(index, embedding)| {
            let embedding = embedding.map_err(|error| at_text(index, error))?;
            Ok(match dimensions {
                Some(dimensions) => self.truncated(embedding, dimensions),
                None => embedding,
            })
        });
        embeddings.collect()
    }

    /// Computes the whole embeddings of texts that are already tokens. The embedding of one text may fail alone.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] for the reasons of [`check_tokens`](Self::check_tokens), and
    /// [`Gemma4Error::Device`] if the device fails. An embedding is [`Gemma4Error::Argument`] if it is not finite, as
    /// happens in f16.
    pub fn try_embed_tokens(
        &self,
        texts: &[Vec<u32>],
    ) -> Result<Vec<Result<Vec<f32>, Gemma4Error>>, Gemma4Error> {
        for (index, text) in texts.iter().enumerate() {
            self.check_tokens(text)
                .map_err(|error| at_text(index, error))?;
        }
        let mut embeddings = Vec::with_capacity(texts.len());
        for pass in passes(texts) {
            let texts = &texts[pass];
            let pooled = self.pooled(texts)?;
            for (text, pooled) in texts.iter().zip(pooled) {
                // An activation that is not finite can reach the other texts of a pass: a hidden key has the probability
                // 0, and 0 · NaN is NaN. Alone, a text has its own result.
                let pooled = match is_finite(&pooled) || texts.len() == 1 {
                    true => pooled,
                    false => self.pooled(std::slice::from_ref(text))?.concat(),
                };
                embeddings.push(self.embedding(pooled));
            }
        }
        Ok(embeddings)
    }

    /// Runs one pass. Returns the pooled row of each text.
    fn pooled(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Gemma4Error> {
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let pooled = self.model.forward(&texts)?.try_into_data();
        let pooled = pooled.map_err(|error| {
            Gemma4Error::Device(format!("computing the embeddings failed: {error}"))
        })?;
        let pooled: Vec<f32> = pooled.iter::<f32>().collect();
        let rows = pooled.chunks_exact(self.config().embedding_dim);
        Ok(rows.map(<[f32]>::to_vec).collect())
    }

    /// Truncates an embedding to its first elements, and normalizes the result if the checkpoint says so.
    ///
    /// # Panics
    /// Panics if the embedding has fewer elements.
    pub fn truncated(&self, mut embedding: Vec<f32>, dimensions: usize) -> Vec<f32> {
        assert!(
            dimensions <= embedding.len(),
            "an embedding has at least as many elements as it is truncated to"
        );
        embedding.truncate(dimensions);
        self.normalized(embedding)
    }

    /// Returns the embedding of a pooled row.
    fn embedding(&self, pooled: Vec<f32>) -> Result<Vec<f32>, Gemma4Error> {
        match is_finite(&pooled) {
            true => Ok(self.normalized(pooled)),
            false => Err(Gemma4Error::Argument {
                argument: "text",
                reason: format!(
                    "has an embedding in {} that is not finite; load the model in bf16 or f32",
                    self.model.dtype().name()
                ),
            }),
        }
    }

    /// Divides a row by its norm, if the checkpoint says so.
    fn normalized(&self, row: Vec<f32>) -> Vec<f32> {
        if !self.settings.is_normalized {
            return row;
        }
        let squares: f64 = row.iter().map(|element| f64::from(*element).powi(2)).sum();
        let norm = squares.sqrt().max(SMALLEST_NORM);
        let normalized = row
            .into_iter()
            .map(|element| (f64::from(element) / norm) as f32);
        normalized.collect()
    }

    /// Runs `work` on the device stream on which the weights were loaded. While `work` runs, no other thread may use
    /// the stream: see [`Gemma4::on_stream_of_weights`](crate::Gemma4::on_stream_of_weights).
    pub fn on_stream_of_weights<T>(&self, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "cube")]
        if let Some(stream) = crate::op::stream::stream_of(self.model.norm.weight.val()) {
            return stream.executes(work);
        }
        work()
    }

    fn prompt(&self, options: &EmbedOptions) -> Result<&str, Gemma4Error> {
        let prompts = &self.settings.prompts;
        let Some(name) = options
            .prompt
            .as_ref()
            .or(self.settings.default_prompt.as_ref())
        else {
            return Ok("");
        };
        prompts.get(name).map(String::as_str).ok_or_else(|| {
            let known: Vec<&String> = prompts.keys().collect();
            let known = match known.is_empty() {
                true => "this checkpoint has no prompts".to_owned(),
                false => format!("expected one of {known:?}"),
            };
            Gemma4Error::Argument {
                argument: "prompt_name",
                reason: format!("is {name:?}; {known}"),
            }
        })
    }

    fn too_long(&self, count: String) -> Gemma4Error {
        Gemma4Error::Argument {
            argument: "text",
            reason: format!(
                "has {count} tokens, but the model reads at most {} of a text",
                self.max_tokens()
            ),
        }
    }
}

fn is_finite(row: &[f32]) -> bool {
    row.iter().all(|element| element.is_finite())
}

/// Adds the number of a text to an error about its tokens or its embedding.
fn at_text(index: usize, error: Gemma4Error) -> Gemma4Error {
    match error {
        Gemma4Error::Argument {
            argument: "text" | "tokens" | "prompt",
            reason,
        } => Gemma4Error::Argument {
            argument: "texts",
            reason: format!("text {index} {reason}"),
        },
        other => other,
    }
}
