//! How many tokens are drafted for a pass: by how many were right so far.

use super::MOST_DRAFT_TOKENS;

/// A token more in a pass costs this share of the pass: the same weights serve all, but the drafts must be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost(pub f64);

impl Cost {
    /// Drafts that are looked up.
    pub const LOOKUP: Self = Self(0.05);
    /// Drafts of a small model.
    pub const DRAFTER: Self = Self(0.12);
}

/// Passes that count: after so many more, a pass counts 1/e as much.
const MEMORY: f64 = 16.0;
/// What is assumed before anything was measured, and how many drafts it counts for.
const FIRST_ACCEPTANCE: f64 = 0.6;
const FIRST_DRAFTS: f64 = 4.0;

/// Rows of a pass where nobody says how many tokens are drafted: as many as decoding's kernels take, of all sequences together.
const ROWS: usize = 8;

/// Chooses how many tokens are drafted.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    fixed: Option<usize>,
    /// Where it is not fixed, at most so many: with the token before them, each sequence's part of [`ROWS`].
    most: usize,
    cost: Cost,
    /// Drafts that were looked at, and those of them that were right; older ones count less.
    seen: f64,
    right: f64,
}

impl Pace {
    /// Of one of so many sequences.
    pub fn new(fixed: Option<usize>, cost: Cost, sequences: usize) -> Self {
        Self {
            fixed,
            most: (ROWS / sequences).saturating_sub(1),
            cost,
            seen: FIRST_DRAFTS,
            right: FIRST_DRAFTS * FIRST_ACCEPTANCE,
        }
    }

    /// How many to draft: where a pass gives the most tokens for what it costs. If each draft is right with the same
    /// probability `a`, `k` of them give `1 + a + … + aᵏ` tokens.
    pub fn next(&self) -> usize {
        if let Some(fixed) = self.fixed {
            return fixed.min(MOST_DRAFT_TOKENS);
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

    /// Takes note of a pass. Drafts after the first wrong one say nothing.
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

    /// After passes each of which accepts `accepted` of what it drafts.
    fn after(accepted: usize) -> usize {
        let mut pace = Pace::new(None, Cost::LOOKUP, 1);
        for _ in 0..100 {
            let drafted = pace.next();
            pace.learn(drafted, accepted.min(drafted));
        }
        pace.next()
    }

    #[test]
    fn who_is_right_drafts_more() {
        assert_eq!(after(0), 1);
        assert_eq!(after(7), 7);
        let between = after(2);
        assert!((2..7).contains(&between), "{between}");
        let counts: Vec<usize> = (0..=7).map(after).collect();
        assert!(counts.is_sorted(), "{counts:?}");
    }

    #[test]
    fn it_forgets() {
        let mut pace = Pace::new(None, Cost::DRAFTER, 1);
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
    fn sequences_share_the_rows() {
        for (sequences, most) in [(1, 7), (2, 3), (3, 1), (4, 1), (5, 0), (100, 0)] {
            let mut pace = Pace::new(None, Cost::LOOKUP, sequences);
            for _ in 0..100 {
                let drafted = pace.next();
                assert!(drafted <= most);
                pace.learn(drafted, drafted);
            }
            assert_eq!(pace.next(), most, "{sequences}");
        }
    }

    #[test]
    fn a_fixed_number_stays() {
        let mut pace = Pace::new(Some(3), Cost::LOOKUP, 1);
        pace.learn(3, 0);
        assert_eq!(pace.next(), 3);
    }
}
