//! Determines which keys each query sees, according to the operator's contract.

use super::case::Case;
use super::dense::Dense;
use super::inputs::Inputs;
use attention_cube::CausalAlignment::BottomRight;

/// The queries that see no key, and the keys that no query sees. The data of these queries and keys does not affect any
/// result.
pub struct Unused {
    /// True for each query that sees no key, indexed as `[batch, q_heads, q_len]`.
    pub queries: Vec<bool>,
    /// True for each key that no query sees, indexed as `[batch, kv_heads, kv_len]`.
    pub keys: Vec<bool>,
}

impl Case {
    /// Returns the position of query 0 of sequence `b` on the axis of keys.
    pub fn offset(&self, inputs: &Inputs, b: usize) -> i64 {
        match self.causal.unwrap_or_default() == BottomRight {
            true => self.length(inputs, b) - self.queries(inputs, b),
            false => 0,
        }
    }

    /// Returns the number of keys of sequence `b`.
    fn length(&self, inputs: &Inputs, b: usize) -> i64 {
        own(&inputs.kv_lengths, b, self.kv_len)
    }

    /// Returns the number of queries of sequence `b`.
    fn queries(&self, inputs: &Inputs, b: usize) -> i64 {
        own(&inputs.query_lengths, b, self.q_len)
    }

    /// True if query `i` of head `h` in sequence `b` sees key `j`.
    pub fn sees(&self, inputs: &Inputs, [b, h, i, j]: [usize; 4]) -> bool {
        let (length, queries) = (self.length(inputs, b), self.queries(inputs, b));
        let offset = self.offset(inputs, b);
        let (position, key) = (i as i64 + offset, j as i64);
        let reach = |side: usize| i64::try_from(side).unwrap_or(i64::MAX);
        let (left, right) = self.window;
        let at = |dense: &Dense| dense.at([b, h, i, j]);
        key < length
            && (i as i64) < queries
            && (self.causal.is_none() || key <= position)
            && left.is_none_or(|left| key >= position.saturating_sub(reach(left)))
            && right.is_none_or(|right| key <= position.saturating_add(reach(right)))
            && inputs.mask.as_ref().is_none_or(|mask| at(mask) != 0.0)
            && (inputs.bias.as_ref()).is_none_or(|bias| at(bias) != f64::NEG_INFINITY)
            && inputs.segments.as_ref().is_none_or(|(queries, keys)| {
                let query = (b * self.q_len + i) % queries.len();
                queries[query] == keys[(b * self.kv_len + j) % keys.len()]
            })
            && self.is_shown([b, h, i, j])
            && (inputs.intervals.is_empty()
                || inputs.intervals.iter().any(|(start, end)| {
                    let query = (b * self.q_len + i) % start.len();
                    (start[query]..end[query]).contains(&key)
                }))
    }

    /// Returns the queries that see no key, and the keys that no query sees.
    pub fn unused(&self, inputs: &Inputs) -> Unused {
        let group = self.q_heads / self.kv_heads;
        let mut unused = Unused {
            queries: vec![true; self.batch * self.q_heads * self.q_len],
            keys: vec![true; self.batch * self.kv_heads * self.kv_len],
        };
        for (row, blind) in unused.queries.iter_mut().enumerate() {
            let plane = row / self.q_len;
            let (b, h) = (plane / self.q_heads, plane % self.q_heads);
            let first_key = (b * self.kv_heads + h / group) * self.kv_len;
            let unseen = &mut unused.keys[first_key..][..self.kv_len];
            for (j, unseen) in unseen.iter_mut().enumerate() {
                if self.sees(inputs, [b, h, row % self.q_len, j]) {
                    *blind = false;
                    *unseen = false;
                }
            }
        }
        unused
    }

    /// Replaces the keys that no query sees, and their values, by NaN. The results must not change. The rows of keys and
    /// values must not be shared between sequences or heads.
    pub fn poison_unused_keys(&self, inputs: &mut Inputs) {
        let unused = self.unused(inputs);
        for (row, _) in (unused.keys.iter().enumerate()).filter(|(_, unused)| **unused) {
            inputs.key.values[row * self.head_dim..][..self.head_dim].fill(f64::NAN);
            inputs.value.values[row * self.value_dim..][..self.value_dim].fill(f64::NAN);
        }
    }
}

/// Returns the length of sequence `b`, clamped to `0..=most`. If `lengths` is `None`, returns `most`.
fn own(lengths: &Option<Vec<i64>>, b: usize, most: usize) -> i64 {
    let most = most as i64;
    // If the case expands its lengths tensor, `lengths` has a single entry. The modulo then selects this entry for
    // every `b`.
    let own = lengths.as_ref().map(|lengths| lengths[b % lengths.len()]);
    own.map_or(most, |own| own.clamp(0, most))
}
