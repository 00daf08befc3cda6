//! A loaded checkpoint of EmbeddingGemma 2: the model, the tokenizer and the settings of sentence-transformers.

mod options;
mod passes;
mod tokens;

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
use passes::{PASS_TEXTS, PASS_TOKENS, is_finite, passes, rows_of};
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
    max_tokens: usize,
}

impl EmbeddingGemma {
    /// The largest number of tokens of several texts in one pass. A longer text is a pass of its own.
    pub const PASS_TOKENS: usize = PASS_TOKENS;

    /// The largest number of texts in one pass.
    pub const PASS_TEXTS: usize = PASS_TEXTS;

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
        let limit = settings.max_tokens.unwrap_or(usize::MAX);
        let limit = limit.min(config.text.max_position_embeddings);
        if limit <= template.len() {
            return Err(Gemma4Error::Malformed {
                path: folder.to_owned(),
                reason: format!(
                    "max_seq_length, model_max_length or max_position_embeddings is {limit}; expected at least {}, \
                     because the tokenizer adds {} tokens to a text",
                    template.len() + 1,
                    template.len()
                ),
            });
        }
        Ok(Self {
            max_tokens: limit,
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
        self.max_tokens
    }

    /// Lowers [`max_tokens`](Self::max_tokens), which bounds the memory of a text's pass. A larger number has no effect.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if a text of one token would not fit, with the tokens that the tokenizer adds.
    pub fn with_max_tokens(mut self, tokens: usize) -> Result<Self, Gemma4Error> {
        let fewest = self.template.len() + 1;
        if tokens < fewest {
            return Err(Gemma4Error::Argument {
                argument: "context",
                reason: format!("is {tokens}; expected at least {fewest}"),
            });
        }
        self.max_tokens = self.max_tokens.min(tokens);
        Ok(self)
    }

    /// Computes the embeddings of texts. An embedding has [`embedding_dim`](EmbeddingGemmaConfig::embedding_dim)
    /// elements, or as many as the options say. Its norm is 1, unless the checkpoint's `modules.json` has no `Normalize`.
    ///
    /// The texts run in passes of up to 8,192 tokens and 512 texts, without padding. Another text in a pass changes an embedding by
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
            let texts: Vec<&[u32]> = texts[pass].iter().map(Vec::as_slice).collect();
            let pooled = rows_of(&texts, &mut |texts| self.pooled(texts))?;
            embeddings.extend(pooled.into_iter().map(|row| self.embedding(row)));
        }
        Ok(embeddings)
    }

    /// Runs one pass. Returns the pooled row of each text.
    fn pooled(&self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>, Gemma4Error> {
        let pooled = self.model.forward(texts)?.try_into_data();
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
