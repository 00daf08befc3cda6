//! The rows of the prompts of a pass, and the prefixes from which the prompts continue.

use crate::config::LayerType;
use crate::model::cache::prefix::Prefix;
use std::ops::Range;

/// The prompts of one forward pass. The rows of their new tokens lie one after another. In the keys and values of a
/// layer, the rows of all prefixes come before them.
#[derive(Clone, Debug)]
pub(crate) struct PackedLayout {
    /// The distinct prefixes from which prompts continue.
    prefixes: Vec<Prefix>,
    prompts: Vec<PromptRows>,
}

/// The rows of a prompt.
#[derive(Clone, Debug)]
struct PromptRows {
    /// The index of the prompt's prefix, or `None` if all of its tokens are new.
    prefix: Option<usize>,
    /// The rows of the new tokens.
    new: Range<usize>,
}

impl PackedLayout {
    /// Returns the layout of prompts with these prefixes and numbers of new tokens.
    pub fn new<'a>(prompts: impl IntoIterator<Item = (Option<&'a Prefix>, usize)>) -> Self {
        let mut prefixes: Vec<Prefix> = Vec::new();
        let mut end = 0;
        let prompts = prompts.into_iter().map(|(prefix, count)| {
            let prefix = prefix.map(|prefix| {
                let known = prefixes.iter().position(|other| other.is_same(prefix));
                known.unwrap_or_else(|| {
                    prefixes.push(prefix.clone());
                    prefixes.len() - 1
                })
            });
            let start = end;
            end += count;
            let new = start..end;
            PromptRows { prefix, new }
        });
        let prompts = prompts.collect();
        Self { prefixes, prompts }
    }

    /// The distinct prefixes.
    pub fn prefixes(&self) -> &[Prefix] {
        &self.prefixes
    }

    /// The index of the prefix of a prompt.
    pub fn prefix_index(&self, prompt: usize) -> Option<usize> {
        self.prompts[prompt].prefix
    }

    /// The prefix of a prompt.
    pub fn prefix(&self, prompt: usize) -> Option<&Prefix> {
        let prefix = self.prefix_index(prompt);
        prefix.map(|prefix| &self.prefixes[prefix])
    }

    /// The rows of a prompt's new tokens, without those of the prefixes.
    pub fn new_rows(&self, prompt: usize) -> Range<usize> {
        self.prompts[prompt].new.clone()
    }

    /// The number of tokens in a prompt's prefix.
    pub fn reused(&self, prompt: usize) -> usize {
        self.prefix(prompt).map_or(0, Prefix::len)
    }

    /// The number of tokens of a prompt, those of its prefix included.
    pub fn tokens(&self, prompt: usize) -> usize {
        self.reused(prompt) + self.prompts[prompt].new.len()
    }

    /// Returns the rows of each prefix in the keys and values of a layer of type `kind`.
    pub fn prefix_rows(&self, kind: LayerType) -> Vec<Range<usize>> {
        let mut end = 0;
        let rows = self.prefixes.iter().map(|prefix| {
            let start = end;
            end += prefix.visible(kind);
            start..end
        });
        rows.collect()
    }
}
