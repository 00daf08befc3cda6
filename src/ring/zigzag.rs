//! The zigzag division of a causal sequence among the ranks of a ring.
//!
//! For `n` ranks, the sequence has `2n` chunks of equal length. Rank `r` owns the chunks `r` and `2n − 1 − r`, in this
//! order. Under a causal mask, all ranks then have the same number of visible query-key pairs. One attention call per
//! pair of ranks computes these pairs:
//!
//! | Owner of the keys | Queries | Keys | Mask |
//! |---|---|---|---|
//! | the rank itself | both chunks | both chunks | causal |
//! | a lower rank | both chunks | first chunk | none |
//! | a higher rank | second chunk | both chunks | none |

use crate::Error;
use attention_cube::AttentionOptions;
use burn::tensor::Tensor;
use std::{cmp::Ordering, ops::Range};

/// The division of a sequence into two chunks per rank.
#[derive(Clone, Copy, Debug)]
pub struct Zigzag {
    ranks: usize,
    chunk: usize,
}

/// The attention call of one rank over the keys of one rank. The row numbers count within the shards of the two ranks.
#[derive(Clone, Debug)]
pub struct Call {
    /// The query rows that see keys of the owner.
    pub queries: Range<usize>,
    /// The key rows of the owner that these queries see.
    pub keys: Range<usize>,
    /// True for a causal mask, or false if all these queries see all these keys.
    pub causal: bool,
}

impl Call {
    /// Returns the options of the attention call.
    pub fn options(&self) -> AttentionOptions {
        match self.causal {
            true => AttentionOptions::new().causal(),
            false => AttentionOptions::new(),
        }
    }
}

impl Zigzag {
    /// Creates the division of `tokens` positions among `ranks` ranks.
    ///
    /// # Errors
    /// Returns an error if the positions cannot be divided into chunks of equal length.
    pub fn new(ranks: usize, tokens: usize) -> Result<Self, Error> {
        let chunks = 2 * ranks;
        if chunks == 0 || tokens == 0 || !tokens.is_multiple_of(chunks) {
            return Err(format!(
                "tokens: {tokens} positions do not divide among {ranks} ranks; expected a positive multiple of {chunks}"
            )
            .into());
        }
        Ok(Self {
            ranks,
            chunk: tokens / chunks,
        })
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the rank whose keys visit `rank` at the given step. Step 0 has the rank's own keys.
    pub fn owner(&self, rank: usize, step: usize) -> usize {
        (rank + self.ranks - step) % self.ranks
    }

    /// Returns the attention call of `rank` over the keys of `owner`.
    pub fn call(&self, rank: usize, owner: usize) -> Call {
        let (first, second) = (0..self.chunk, self.chunk..2 * self.chunk);
        let both = 0..2 * self.chunk;
        let (queries, keys) = match owner.cmp(&rank) {
            Ordering::Equal => (both.clone(), both),
            Ordering::Less => (both, first),
            Ordering::Greater => (second, both),
        };
        Call {
            queries,
            keys,
            causal: owner == rank,
        }
    }

    /// Divides a tensor into the shards of all ranks.
    ///
    /// # Shapes
    /// `tensor [batch, heads, tokens, dim]`; each shard has the shape `[batch, heads, tokens / ranks, dim]`.
    pub fn divide(&self, tensor: &Tensor<4>) -> Vec<Tensor<4>> {
        let chunk = |index: usize| {
            let rows = index * self.chunk..(index + 1) * self.chunk;
            tensor.clone().slice_dim(2, rows)
        };
        let shard = |rank| Tensor::cat(vec![chunk(rank), chunk(self.mirrored(rank))], 2);
        (0..self.ranks).map(shard).collect()
    }

    /// Joins the shards of all ranks. The function is the inverse of [`divide`](Self::divide).
    pub fn join(&self, shards: &[Tensor<4>]) -> Tensor<4> {
        let chunks = (0..2 * self.ranks).map(|index| {
            let (rank, start) = match index < self.ranks {
                true => (index, 0),
                false => (self.mirrored(index), self.chunk),
            };
            shards[rank].clone().slice_dim(2, start..start + self.chunk)
        });
        Tensor::cat(chunks.collect(), 2)
    }

    /// Returns the number of the second chunk of a rank, or the rank of a second chunk.
    fn mirrored(&self, index: usize) -> usize {
        2 * self.ranks - 1 - index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the position in the sequence of each row of a rank's shard.
    fn positions(zigzag: &Zigzag, rank: usize) -> Vec<usize> {
        let chunk = |index: usize| index * zigzag.chunk..(index + 1) * zigzag.chunk;
        chunk(rank).chain(chunk(zigzag.mirrored(rank))).collect()
    }

    #[test]
    fn zigzag_calls_cover_causal_pairs_once_in_equal_numbers() {
        for ranks in 1..=5 {
            let tokens = 6 * ranks;
            let zigzag = Zigzag::new(ranks, tokens).expect("6 is even");
            let mut visits = vec![0; tokens * tokens];
            let mut pairs = vec![0; ranks];
            for (rank, pairs) in pairs.iter_mut().enumerate() {
                for step in 0..ranks {
                    let owner = zigzag.owner(rank, step);
                    let call = zigzag.call(rank, owner);
                    let (queries, keys) = (positions(&zigzag, rank), positions(&zigzag, owner));
                    for query in call.queries.clone() {
                        for key in call
                            .keys
                            .clone()
                            .filter(|key| !call.causal || *key <= query)
                        {
                            visits[queries[query] * tokens + keys[key]] += 1;
                            *pairs += 1;
                        }
                    }
                }
            }
            for (index, visits) in visits.into_iter().enumerate() {
                let is_visible = index % tokens <= index / tokens;
                assert_eq!(visits, i32::from(is_visible), "{ranks} ranks, pair {index}");
            }
            assert!(pairs.iter().all(|count| *count == pairs[0]), "{pairs:?}");
        }
    }

    #[test]
    fn zigzag_uneven_tokens_are_refused() {
        for (ranks, tokens) in [(0, 4), (2, 0), (2, 6), (3, 16)] {
            assert!(Zigzag::new(ranks, tokens).is_err(), "{ranks}, {tokens}");
        }
    }
}
