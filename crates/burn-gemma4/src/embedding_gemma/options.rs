//! The options of embeddings.

/// The options of embeddings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbedOptions {
    pub(super) prompt: Option<String>,
    pub(super) dimensions: Option<usize>,
    pub(super) truncate: bool,
}

impl EmbedOptions {
    /// Creates the default options: the checkpoint's default prompt, usually none, and whole embeddings. Texts with too
    /// many tokens are errors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the name of the prompt that stands before each text, one of
    /// [`EmbeddingGemma::prompts`](super::EmbeddingGemma::prompts).
    pub fn prompt(mut self, name: impl Into<String>) -> Self {
        self.prompt = Some(name.into());
        self
    }

    /// Truncates embeddings to their first elements (Matryoshka embeddings; Kusupati et al. 2022, arXiv:2205.13147).
    /// Truncated embeddings are normalized again if the checkpoint's `modules.json` has `Normalize`.
    pub fn dimensions(mut self, dimensions: usize) -> Self {
        self.dimensions = Some(dimensions);
        self
    }

    /// Drops the last tokens of a text that has more than
    /// [`EmbeddingGemma::max_tokens`](super::EmbeddingGemma::max_tokens), as sentence-transformers does. A checkpoint
    /// with the `truncation_side` `left` drops the first tokens.
    pub fn truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }
}
