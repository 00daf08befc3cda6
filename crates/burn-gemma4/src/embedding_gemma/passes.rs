//! The division of texts into passes of the model.

use std::ops::Range;

/// The largest number of tokens of several texts in one pass. It bounds the memory: the per-layer embeddings of the
/// published model are 400 MB in f32 for 8,192 tokens.
pub(super) const PASS_TOKENS: usize = 8192;

/// Divides texts into consecutive passes of up to [`PASS_TOKENS`] tokens. A longer text is a pass of its own.
pub(super) fn passes(texts: &[Vec<u32>]) -> Vec<Range<usize>> {
    let mut passes: Vec<Range<usize>> = Vec::new();
    let mut tokens = 0;
    for (index, text) in texts.iter().enumerate() {
        tokens += text.len();
        match passes.last_mut() {
            Some(pass) if tokens <= PASS_TOKENS => pass.end = index + 1,
            _ => {
                passes.push(index..index + 1);
                tokens = text.len();
            }
        }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_hold_texts_up_to_the_limit() {
        let text = |tokens: usize| vec![0; tokens];
        let all = [PASS_TOKENS - 1, 1, 1, PASS_TOKENS + 5, 2, 3].map(text);
        assert_eq!(passes(&all), [0..2, 2..3, 3..4, 4..6]);
        assert!(passes(&[]).is_empty());
    }
}
