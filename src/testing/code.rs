//! Score mods and mask mods of test cases. Loops on the CPU compute the expected results by the same formulas in f64.

use super::case::Case;
use attention_cube::AttentionOptions;
use attention_cube::score_mod::{
    Alibi, LearnedScoreMod, MaskCode, MaskMod, ScoreCode, ScoreMod, ScorePlace, ScoreTable,
};
use burn::tensor::{Device, Tensor};
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// The score mod of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// [`Alibi`] with the slopes of the ALiBi paper.
    Alibi,
    /// [`Bent`] with a table that has one factor per head.
    Bent,
}

/// The mask mod of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hide {
    /// [`Sieve`], which hides different keys from different queries.
    Sieve,
    /// [`KeySieve`], which hides the same keys from all queries.
    Keys,
}

/// A score mod that depends on the score `x`, the head, the query, the key and the sequence. The derivative of the new
/// score with respect to `x` varies. The new score is `factor · x + x / (1 + |x|) − (query + 2 · key + batch) mod 3`.
/// Here `factor` is the entry of `table` for the head.
pub struct Bent;

#[cfg_attr(feature = "cube", cube)]
impl ScoreMod for Bent {
    fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
        let shift = (place.query + 2i32 * place.key + place.batch as i32) % 3i32;
        score * table.at(place.head) + score / (1.0f32 + score.abs()) - shift as f32
    }

    fn derivative(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
        let below = 1.0f32 + score.abs();
        table.at(place.head) + 1.0f32 / (below * below)
    }
}

#[cfg_attr(feature = "cube", cube)]
impl LearnedScoreMod for Bent {
    fn element(place: ScorePlace, _table: &ScoreTable) -> u32 {
        place.head
    }

    fn element_derivative(score: f32, _place: ScorePlace, _table: &ScoreTable) -> f32 {
        score
    }
}

/// A mask mod that hides about a quarter of all keys. A key is hidden if `query + 3 · key + head + batch` modulo 4 equals
/// the number in `table`.
pub struct Sieve;

#[cfg_attr(feature = "cube", cube)]
impl MaskMod for Sieve {
    fn visible(place: ScorePlace, table: &ScoreTable) -> bool {
        let sum = place.query + 3i32 * place.key + (place.head + place.batch) as i32;
        sum % 4i32 != table.at(0u32) as i32
    }
}

/// A mask mod that hides every fourth key from all queries. A key is hidden if `key + batch` modulo 4 equals the number in
/// `table`.
pub struct KeySieve;

#[cfg_attr(feature = "cube", cube)]
impl MaskMod for KeySieve {
    fn visible(place: ScorePlace, table: &ScoreTable) -> bool {
        (place.key + place.batch as i32) % 4i32 != table.at(0u32) as i32
    }
}

/// The remainder modulo 4 for which a key is hidden. The tables of both mask mods hold this number.
const HIDDEN: usize = 1;

/// Returns the factor of a head in the table of [`Bent`].
fn factor(head: usize) -> f32 {
    0.5 + 0.25 * (head % 4) as f32
}

impl Case {
    /// Adds the case's score mod and mask mod to the options.
    pub(super) fn with_code(&self, options: AttentionOptions, device: &Device) -> AttentionOptions {
        let options = match self.score_mod {
            None => options,
            Some(Change::Alibi) => {
                options.score_mod::<Alibi>(Some(Alibi::slopes(self.q_heads, device)))
            }
            Some(Change::Bent) => {
                let factors: Vec<f32> = (0..self.q_heads).map(factor).collect();
                options.score_mod::<Bent>(Some(Tensor::from_floats(factors.as_slice(), device)))
            }
        };
        let hidden = || Some(Tensor::from_floats([HIDDEN as f32], device));
        match self.mask_mod {
            None => options,
            Some(Hide::Sieve) => options.mask_mod::<Sieve>(hidden()),
            Some(Hide::Keys) => options.mask_mod::<KeySieve>(hidden()),
        }
    }

    /// Returns the case's score mod and mask mod as an `AttentionProblem` stores them.
    pub fn code(&self) -> (Option<ScoreCode>, Option<MaskCode>) {
        let score_mod = self.score_mod.map(|change| match change {
            Change::Alibi => ScoreCode::of::<Alibi>(),
            Change::Bent => ScoreCode::of::<Bent>(),
        });
        let mask_mod = self.mask_mod.map(|hide| match hide {
            Hide::Sieve => MaskCode::of::<Sieve>(),
            Hide::Keys => MaskCode::of::<KeySieve>(),
        });
        (score_mod, mask_mod)
    }

    /// Returns the score that the case's score mod makes from `score`, the score of query `i` and key `j`. `offset` is
    /// the position of query 0 on the axis of keys.
    pub fn changed(&self, score: f64, [b, h, i, j]: [usize; 4], offset: i64) -> f64 {
        match self.score_mod {
            None => score,
            Some(Change::Alibi) => {
                let power = -8.0 * (h + 1) as f64 / self.q_heads as f64;
                assert!(self.q_heads.is_power_of_two(), "the formula of the slopes");
                score - power.exp2() * (i as i64 + offset - j as i64).abs() as f64
            }
            Some(Change::Bent) => {
                let shift = ((i + 2 * j + b) % 3) as f64;
                score * f64::from(factor(h)) + score / (1.0 + score.abs()) - shift
            }
        }
    }

    /// True if the case's mask mod shows key `j` to query `i`.
    pub(super) fn is_shown(&self, [b, h, i, j]: [usize; 4]) -> bool {
        match self.mask_mod {
            None => true,
            Some(Hide::Sieve) => (i + 3 * j + h + b) % 4 != HIDDEN,
            Some(Hide::Keys) => (j + b) % 4 != HIDDEN,
        }
    }
}
