//! Changes of an answer's logits before sampling: logit bias, presence and frequency penalties, and forbidden tokens.

use super::request::AnswerOptions;
use std::collections::HashMap;

/// The changes of an answer's logits, and the counts of the answer's tokens, on which the changes depend.
#[derive(Debug)]
pub(super) struct Adjustments {
    bias: Vec<(u32, f32)>,
    presence: f32,
    frequency: f32,
    /// The number of occurrences of each token in the answer, if a penalty needs the counts.
    counts: HashMap<u32, u32>,
    /// Pairs of a number of tokens and a list of forbidden tokens. The tokens in a list are forbidden until the answer
    /// has at least the paired number of tokens.
    early: Vec<(usize, Vec<u32>)>,
    tokens: usize,
}

impl Adjustments {
    pub fn new(options: &AnswerOptions) -> Self {
        let early = [
            (1, &options.begin_suppress_tokens),
            (options.min_tokens, &options.stop_tokens),
        ];
        let early = early
            .into_iter()
            .filter(|(count, tokens)| *count > 0 && !tokens.is_empty());
        Self {
            bias: options.logit_bias.clone(),
            presence: options.presence_penalty,
            frequency: options.frequency_penalty,
            counts: HashMap::new(),
            early: early
                .map(|(count, tokens)| (count, tokens.clone()))
                .collect(),
            tokens: 0,
        }
    }

    fn has_penalties(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    /// True if [`apply`](Self::apply) changes the logits of the next token.
    pub fn is_active(&self) -> bool {
        !self.bias.is_empty()
            || (self.has_penalties() && !self.counts.is_empty())
            || self.early.iter().any(|(count, _)| self.tokens < *count)
    }

    /// Records a token of the answer.
    pub fn record(&mut self, token: u32) {
        self.tokens += 1;
        if self.has_penalties() {
            *self.counts.entry(token).or_default() += 1;
        }
    }

    /// Changes the logits from which the next token is chosen.
    pub fn apply(&self, logits: &mut [f32]) {
        for (token, count) in &self.counts {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit -= self.presence + self.frequency * *count as f32;
            }
        }
        for (token, bias) in &self.bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        let early = self.early.iter();
        let early = early.filter(|(count, _)| self.tokens < *count);
        for token in early.flat_map(|(_, tokens)| tokens) {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::answer_options;

    #[test]
    fn apply_subtracts_penalties_of_the_answers_tokens() {
        let mut adjustments = Adjustments::new(&AnswerOptions {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(0, 1.0), (9, 1.0)],
            ..answer_options()
        });
        for token in [1, 2, 1] {
            adjustments.record(token);
        }
        let mut logits = [0.0; 4];
        adjustments.apply(&mut logits);
        assert_eq!(logits, [1.0, -1.0, -0.75, 0.0]);
    }

    #[test]
    fn apply_forbids_early_tokens_until_their_count() {
        let mut adjustments = Adjustments::new(&AnswerOptions {
            min_tokens: 2,
            stop_tokens: vec![3],
            begin_suppress_tokens: vec![0],
            ..answer_options()
        });
        let mut forbidden = Vec::new();
        for _ in 0..3 {
            let mut logits = [0.0; 4];
            assert_eq!(adjustments.is_active(), forbidden.len() < 2);
            adjustments.apply(&mut logits);
            let tokens = logits.iter().map(|logit| *logit < 0.0);
            forbidden.push(tokens.collect::<Vec<_>>());
            adjustments.record(1);
        }
        assert_eq!(forbidden[0], [true, false, false, true]);
        assert_eq!(forbidden[1], [false, false, false, true]);
        assert_eq!(forbidden[2], [false; 4]);
    }
}
