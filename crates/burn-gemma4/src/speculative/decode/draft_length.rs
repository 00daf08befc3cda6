//! The number of draft tokens in each forward pass of the target model. The number adapts to the acceptance rate so
//! far.

use crate::speculative::drafts::MAX_DRAFT_TOKENS;

/// The cost of one more draft token in a forward pass, as a fraction of the cost of the pass. An additional draft token
/// is cheap, because a pass reads the weights once for all its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost(pub f64);

impl Cost {
    /// The cost of a draft token from prompt lookup, as a fraction of the cost of a forward pass.
    pub const LOOKUP: Self = Self(0.05);
    /// The cost of a draft token from the drafter, as a fraction of the cost of a forward pass.
    pub const DRAFTER: Self = Self(0.12);
}

/// The running counts give less weight to older forward passes. After this number of further passes, the weight of a
/// pass has fallen to 1/e.
const MEMORY: f64 = 16.0;
/// The acceptance rate that is assumed at the beginning. The assumption counts as much as a measurement of
/// `FIRST_DRAFTS` draft tokens.
const FIRST_ACCEPTANCE: f64 = 0.6;
const FIRST_DRAFTS: f64 = 4.0;

/// The maximum number of tokens in a forward pass, summed over all sequences. The decode kernels support this number of
/// tokens on every device. The limit does not apply if the caller has fixed the number of draft tokens.
const ROWS: usize = 8;

/// The adaptive number of draft tokens per forward pass, for one sequence.
#[derive(Clone, Debug)]
pub(super) struct DraftLength {
    fixed: Option<usize>,
    /// The maximum number of draft tokens if the caller has not fixed the number. The [`ROWS`] tokens of a forward pass
    /// are divided equally among the sequences. One of a sequence's tokens is the last token of its text, and the
    /// others are draft tokens.
    most: usize,
    cost: Cost,
    /// The running counts of tested draft tokens (`seen`) and of accepted draft tokens (`right`). Older forward passes
    /// have smaller weights.
    seen: f64,
    right: f64,
}

impl DraftLength {
    /// Creates the state of one sequence in a batch of `sequences` sequences.
    pub fn new(fixed: Option<usize>, cost: Cost, sequences: usize) -> Self {
        Self {
            fixed,
            most: (ROWS / sequences).saturating_sub(1),
            cost,
            seen: FIRST_DRAFTS,
            right: FIRST_DRAFTS * FIRST_ACCEPTANCE,
        }
    }

    /// Returns the number of draft tokens for which a forward pass has the largest ratio of expected generated tokens
    /// to cost. If each draft token is accepted with probability `a`, a pass with `k` draft tokens generates on average
    /// `1 + a + … + aᵏ` tokens.
    pub fn next(&self) -> usize {
        if let Some(fixed) = self.fixed {
            return fixed.min(MAX_DRAFT_TOKENS);
        }
        let acceptance = self.right / self.seen;
        let (mut best, mut most) = (self.most.min(1), 0.0);
        let (mut tokens, mut power) = (1.0, 1.0);
        for count in 1..=self.most {
            power *= acceptance;
            tokens += power;
            let rate = tokens / (1.0 + self.cost.0 * count as f64);
            if rate > most {
                (best, most) = (count, rate);
            }
        }
        best
    }

    /// Records the result of a forward pass. Draft tokens after the first rejected draft token do not count, because
    /// the model has not tested them.
    pub fn learn(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        let keep = (-1.0 / MEMORY).exp();
        self.seen = self.seen * keep + (accepted + 1).min(drafted) as f64;
        self.right = self.right * keep + accepted as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of draft tokens that is chosen after 100 forward passes. In each of these passes the first
    /// `accepted` draft tokens were accepted, or all draft tokens if the pass had fewer.
    fn after(accepted: usize) -> usize {
        let mut pace = DraftLength::new(None, Cost::LOOKUP, 1);
        for _ in 0..100 {
            let drafted = pace.next();
            pace.learn(drafted, accepted.min(drafted));
        }
        pace.next()
    }

    #[test]
    fn next_with_more_accepted_tokens_is_larger() {
        assert_eq!(after(0), 1);
        assert_eq!(after(7), 7);
        let between = after(2);
        assert!((2..7).contains(&between), "{between}");
        let counts: Vec<usize> = (0..=7).map(after).collect();
        assert!(counts.is_sorted(), "{counts:?}");
    }

    #[test]
    fn learn_forgets_old_passes() {
        let mut pace = DraftLength::new(None, Cost::DRAFTER, 1);
        for _ in 0..1000 {
            pace.learn(4, 0);
        }
        assert_eq!(pace.next(), 1);
        for _ in 0..100 {
            pace.learn(4, 4);
        }
        assert_eq!(pace.next(), 7);
    }

    #[test]
    fn next_with_several_sequences_shares_the_rows() {
        for (sequences, most) in [(1, 7), (2, 3), (3, 1), (4, 1), (5, 0), (100, 0)] {
            let mut pace = DraftLength::new(None, Cost::LOOKUP, sequences);
            for _ in 0..100 {
                let drafted = pace.next();
                assert!(drafted <= most);
                pace.learn(drafted, drafted);
            }
            assert_eq!(pace.next(), most, "{sequences}");
        }
    }

    #[test]
    fn next_with_a_fixed_number_returns_it() {
        let mut pace = DraftLength::new(Some(3), Cost::LOOKUP, 1);
        pace.learn(3, 0);
        assert_eq!(pace.next(), 3);
    }
}
