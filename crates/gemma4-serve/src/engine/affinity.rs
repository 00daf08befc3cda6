//! The choice of an engine for a request, by the prefix of its prompt and by the load of the engines.
//!
//! An engine that has read a prompt keeps the prompt's keys and values. Another prompt with the same prefix is therefore
//! cheaper on this engine than on others. The table of an engine holds the hashes of the prefixes that the engine has
//! read most recently.
//!
//! The rule: a request goes to the engine that has read the longest prefix of its prompt, unless this engine is busier
//! than the least busy engine by more than [`MARGIN`]. In that case, and for a prompt whose prefix no engine has read,
//! the request goes to the least busy engine. Of several engines with the same prefix, the least busy one is chosen.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;

/// The number of tokens in a block. The prefix cache reuses prefixes of at least 16 tokens, so a shorter block could
/// match prefixes that no engine reuses.
const BLOCK: usize = 16;

/// The number of blocks in the table of an engine: 1,048,576 tokens. In bf16, the keys and values of so many tokens of E2B
/// take 7.3 GB, which is more than the default of the prefix cache.
const TABLE_BLOCKS: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();

/// The largest difference of occupancy at which a request still follows its prefix: a quarter of an engine.
///
/// Measured with E2B's shapes in bf16 on an H200 (docs/serve.md, 2026-11-29): each answer in the batch slows a decode
/// step by 0.046 ms, so 8 of 32 answers slow an answer of 256 tokens by 94 ms. Reading a prefix of 8,000 tokens takes 27 ms,
/// and one of 32,000 tokens 142 ms. Beyond the margin, the wait therefore costs more than most prefixes save.
const MARGIN: f64 = 0.25;

/// The hashes of the prefixes of a prompt, one for each whole block: element `i` identifies the first `i + 1` blocks.
#[derive(Debug)]
pub(super) struct Prefixes(Vec<u64>);

impl Prefixes {
    /// Hashes the first `most` tokens of a prompt. Prompts with different adapters share no keys and values, so the name
    /// of the adapter is a part of each hash.
    pub fn of(prompt: &[u32], adapter: Option<&str>, most: usize) -> Self {
        let mut hasher = DefaultHasher::new();
        adapter.hash(&mut hasher);
        let blocks = prompt[..prompt.len().min(most)].chunks_exact(BLOCK);
        let hashes = blocks.map(|block| {
            block.hash(&mut hasher);
            hasher.finish()
        });
        Self(hashes.collect())
    }
}

/// The state of an engine at the arrival of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineState {
    /// The share of the engine that is in use. The value exceeds 1 if requests wait.
    pub occupancy: f64,
    /// True if the queue of the engine can take the request.
    pub has_room: bool,
}

/// The reason for the choice of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The engine has read a prefix of the prompt, and no engine has read a longer one.
    Prefix,
    /// The engine is the least busy one.
    Load,
}

impl Reason {
    /// The name of the reason in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Load => "load",
        }
    }
}

/// The recent prefixes of each engine.
#[derive(Debug)]
pub(super) struct Router {
    engines: Vec<Recent>,
    clock: u64,
}

/// The recent prefixes of an engine.
#[derive(Debug)]
struct Recent {
    prefixes: lru::LruCache<u64, ()>,
    /// The time of the engine's last request.
    last: u64,
}

impl Recent {
    /// Returns the number of blocks of the longest prefix that the engine has read.
    fn matched(&self, prefixes: &Prefixes) -> usize {
        let known = |hash: &&u64| self.prefixes.contains(hash);
        prefixes.0.iter().take_while(known).count()
    }
}

impl Router {
    pub fn new(engines: usize) -> Self {
        let recent = || Recent {
            prefixes: lru::LruCache::new(TABLE_BLOCKS),
            last: 0,
        };
        Self {
            engines: (0..engines).map(|_| recent()).collect(),
            clock: 0,
        }
    }

    /// Returns the index of the engine for a prompt. Engines whose queues are full are chosen only if all queues are full.
    ///
    /// # Panics
    /// Panics if `states` is empty.
    pub fn choose(&self, prefixes: &Prefixes, states: &[EngineState]) -> (usize, Reason) {
        let any_has_room = states.iter().any(|state| state.has_room);
        let candidates: Vec<usize> = (0..states.len())
            .filter(|index| states[*index].has_room || !any_has_room)
            .collect();
        // Of equally busy engines, the one that has waited longest for a request comes first.
        let least_busy = |candidates: &mut dyn Iterator<Item = usize>| {
            candidates.min_by(|a, b| {
                let (first, second) = (states[*a].occupancy, states[*b].occupancy);
                let by_time = self.engines[*a].last.cmp(&self.engines[*b].last);
                first.total_cmp(&second).then(by_time)
            })
        };
        let matched = |index: usize| self.engines[index].matched(prefixes);
        let matches: Vec<usize> = candidates.iter().map(|index| matched(*index)).collect();
        let longest = matches.iter().copied().max().unwrap_or(0);
        let mut all = candidates.iter().copied();
        let least = least_busy(&mut all).expect("a pool has at least one engine");
        let mut holders = candidates
            .iter()
            .zip(&matches)
            .filter(|(_, count)| longest > 0 && **count == longest)
            .map(|(index, _)| *index);
        match least_busy(&mut holders) {
            Some(holder) if states[holder].occupancy <= states[least].occupancy + MARGIN => {
                (holder, Reason::Prefix)
            }
            _ => (least, Reason::Load),
        }
    }

    /// Records that the engine reads a prompt.
    pub fn record(&mut self, engine: usize, prefixes: &Prefixes) {
        self.clock += 1;
        let recent = &mut self.engines[engine];
        recent.last = self.clock;
        // The first block is inserted last, so that a full table forgets the ends of prompts before their beginnings.
        for hash in prefixes.0.iter().rev() {
            recent.prefixes.put(*hash, ());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(first: u32, tokens: usize) -> Vec<u32> {
        (first..).take(tokens).collect()
    }

    fn prefixes(prompt: &[u32]) -> Prefixes {
        Prefixes::of(prompt, None, usize::MAX)
    }

    fn states(occupancies: &[f64]) -> Vec<EngineState> {
        let state = |occupancy: &f64| EngineState {
            occupancy: *occupancy,
            has_room: true,
        };
        occupancies.iter().map(state).collect()
    }

    #[test]
    fn prefixes_depend_on_all_earlier_tokens_and_on_the_adapter() {
        let long = prompt(0, 100);
        let whole = prefixes(&long);
        assert_eq!(whole.0.len(), 6);
        assert_eq!(prefixes(&long[..40]).0, whole.0[..2]);
        let mut changed = long.clone();
        changed[20] = 7;
        let changed = prefixes(&changed);
        assert_eq!(changed.0[0], whole.0[0]);
        assert!(
            changed.0[1..]
                .iter()
                .zip(&whole.0[1..])
                .all(|(a, b)| a != b)
        );
        let adapted = Prefixes::of(&long, Some("one"), usize::MAX);
        assert!(adapted.0.iter().zip(&whole.0).all(|(a, b)| a != b));
        assert_eq!(Prefixes::of(&long, None, 50).0, whole.0[..3]);
        assert!(prefixes(&long[..15]).0.is_empty());
    }

    #[test]
    fn choice_follows_the_longest_prefix_within_the_margin() {
        let mut router = Router::new(3);
        let conversation = prompt(0, 100);
        let idle = states(&[0.0; 3]);
        router.record(1, &prefixes(&conversation[..32]));
        router.record(2, &prefixes(&conversation));
        let next = prefixes(&prompt(0, 150));
        assert_eq!(router.choose(&next, &idle), (2, Reason::Prefix));
        assert_eq!(
            router.choose(&next, &states(&[0.5, 0.5, 0.75])),
            (2, Reason::Prefix)
        );
        // Beyond the margin, the least busy engine is chosen, not the engine with the second longest prefix.
        assert_eq!(
            router.choose(&next, &states(&[0.0, 0.1, 0.26])),
            (0, Reason::Load)
        );
        let other = prefixes(&prompt(5000, 40));
        assert_eq!(
            router.choose(&other, &states(&[0.3, 0.2, 0.1])),
            (2, Reason::Load)
        );
    }

    #[test]
    fn choice_of_a_shared_prefix_is_the_least_busy_of_its_engines() {
        let mut router = Router::new(3);
        let shared = prefixes(&prompt(0, 64));
        router.record(0, &shared);
        router.record(2, &shared);
        assert_eq!(
            router.choose(&shared, &states(&[0.2, 0.1, 0.15])),
            (2, Reason::Prefix)
        );
    }

    #[test]
    fn choice_without_a_prefix_takes_equally_busy_engines_in_turn() {
        let mut router = Router::new(3);
        let idle = states(&[0.0; 3]);
        let chosen: Vec<usize> = (0..6)
            .map(|number| {
                let prefixes = prefixes(&prompt(1000 * number, 20));
                let (engine, reason) = router.choose(&prefixes, &idle);
                assert_eq!(reason, Reason::Load);
                router.record(engine, &prefixes);
                engine
            })
            .collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn choice_avoids_full_queues_unless_all_are_full() {
        let mut router = Router::new(2);
        let prompt = prefixes(&prompt(0, 64));
        router.record(0, &prompt);
        let mut full = states(&[0.0, 5.0]);
        full[0].has_room = false;
        assert_eq!(router.choose(&prompt, &full), (1, Reason::Load));
        full[1].has_room = false;
        assert_eq!(router.choose(&prompt, &full), (0, Reason::Prefix));
    }

    #[test]
    fn full_table_forgets_the_ends_of_the_oldest_prompts() {
        let mut router = Router::new(1);
        let all = TABLE_BLOCKS.get();
        let old = prefixes(&prompt(0, 10 * BLOCK));
        router.record(0, &old);
        let new = prefixes(&prompt(1_000_000, (all - 4) * BLOCK));
        router.record(0, &new);
        assert_eq!(router.engines[0].matched(&old), 4);
        assert_eq!(router.engines[0].matched(&new), all - 4);
    }
}
