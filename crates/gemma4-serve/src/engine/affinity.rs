//! The choice of an engine for a request, by the prefix of its prompt and by the load of the engines.
//!
//! An engine keeps the keys and values of prompts in its prefix cache. A prompt with the same prefix is therefore
//! cheaper on this engine than on others. The table of an engine holds the hashes of prefixes that the engine has kept
//! recently.
//!
//! A request goes to the engine on which the request waits least, by the estimate of [`EngineState::wait`]. Of equal
//! engines, the one that has had no request for the longest time is chosen.

use burn_gemma4::EncodedPrompt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of tokens in a block. The prefix cache reuses prefixes of at least 16 tokens, so a shorter block could
/// match prefixes that no engine reuses.
const BLOCK: usize = 16;

/// The number of blocks in the table of an engine: 1,048,576 tokens. In bf16, their keys and values take 7.3 GB for
/// E2B. The default of the prefix cache is less.
const TABLE_BLOCKS: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();

/// The largest number of blocks that one prompt adds to the table, so that a long prompt replaces a sixteenth at most.
/// Only prompts that the engine has read are added. A client that wants to replace the table must therefore send 16
/// prompts of 65,536 tokens, and wait until they are read.
const MOST_BLOCKS: usize = TABLE_BLOCKS.get() / 16;

/// The time that a reused prefix saves, in milliseconds, by the tokens of the prefix. E2B's shapes in bf16 on an H200
/// (docs/serve.md, 2026-11-29): the time of the first request minus the time with the shared prefix.
const SAVED: [(f64, f64); 4] = [
    (0.0, 0.0),
    (4_000.0, 7.0),
    (8_000.0, 27.0),
    (32_000.0, 142.0),
];

/// The time by which an answer in the batch or in the queue delays another answer of 256 tokens, in milliseconds. On
/// the same device, each answer in the batch slows a decode step by 0.046 ms.
const ANSWER: f64 = 0.046 * 256.0;

/// The time for which a request waits on an engine without room, in milliseconds. Room comes with the end of an answer,
/// and an answer of 256 tokens takes 2.1 ms a token on the same device.
const FULL: f64 = 2.1 * 256.0;

/// Returns the time that a reused prefix saves, in milliseconds, by linear interpolation of [`SAVED`].
fn saved(tokens: usize) -> f64 {
    let tokens = tokens as f64;
    // The last segment also continues to longer prefixes.
    let index = SAVED.iter().position(|(end, _)| tokens <= *end);
    let index = index.unwrap_or(SAVED.len() - 1).max(1);
    let [(from, least), (to, most)] = [SAVED[index - 1], SAVED[index]];
    least + (tokens - from) * (most - least) / (to - from)
}

/// The hashes of the prefixes of a prompt, one for each whole block: element `i` identifies the first `i + 1` blocks.
#[derive(Debug)]
pub(super) struct Prefixes {
    hashes: Vec<u64>,
    /// The number of tokens of the prompt.
    tokens: usize,
    has_media: bool,
}

impl Prefixes {
    /// Hashes the first blocks of a prompt. Prompts with different adapters share no keys and values, so the adapter is
    /// a part of each hash. An adapter is identified by its load, because a name can be given to another adapter later.
    /// The hash of an image or audio clip is a part of the block in which the medium begins, because all media of a
    /// kind have the same tokens.
    pub fn of(prompt: &EncodedPrompt, adapter: Option<u64>) -> Self {
        let mut hasher = DefaultHasher::new();
        adapter.hash(&mut hasher);
        let mut media = prompt.media().peekable();
        let has_media = media.peek().is_some();
        let blocks = prompt.tokens().chunks_exact(BLOCK).take(MOST_BLOCKS);
        let hashes = blocks.enumerate().map(|(index, block)| {
            let end = (index + 1) * BLOCK;
            while let Some((_, medium)) = media.next_if(|(tokens, _)| tokens.start < end) {
                medium.hash(&mut hasher);
            }
            block.hash(&mut hasher);
            hasher.finish()
        });
        Self {
            hashes: hashes.collect(),
            tokens: prompt.len(),
            has_media,
        }
    }
}

/// The prefixes that an engine has kept recently. The engine's thread records them, and the pool compares requests.
#[derive(Debug)]
pub(super) struct RecentPrefixes {
    hashes: Mutex<lru::LruCache<u64, ()>>,
    /// The number of tokens of the shortest prompt without media that can reuse a prefix.
    shortest: AtomicUsize,
}

impl RecentPrefixes {
    pub fn new() -> Self {
        Self {
            hashes: Mutex::new(lru::LruCache::new(TABLE_BLOCKS)),
            shortest: AtomicUsize::new(0),
        }
    }

    fn hashes(&self) -> MutexGuard<'_, lru::LruCache<u64, ()>> {
        // Ignore a poisoned lock: a wrong table makes no answer wrong.
        self.hashes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the number of tokens of the shortest prompt without media that can reuse a prefix.
    pub fn set_shortest_prompt(&self, tokens: usize) {
        self.shortest.store(tokens, Ordering::SeqCst);
    }

    /// Records that the engine has read a prompt and kept its keys and values.
    pub fn record(&self, prefixes: &Prefixes) {
        let mut table = self.hashes();
        // The first block is inserted last, so that a full table forgets the ends of prompts before their beginnings.
        for hash in prefixes.hashes.iter().rev() {
            table.put(*hash, ());
        }
    }

    /// Returns the number of tokens of the longest prefix that the engine has kept and that the prompt can reuse.
    pub fn matched(&self, prefixes: &Prefixes) -> usize {
        let is_short = prefixes.tokens < self.shortest.load(Ordering::SeqCst);
        if is_short && !prefixes.has_media {
            return 0;
        }
        let table = self.hashes();
        let known = |hash: &&u64| table.contains(hash);
        BLOCK * prefixes.hashes.iter().take_while(known).count()
    }
}

/// The state of an engine at the arrival of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineState {
    /// The number of answers in the batch and in the queue.
    pub answers: usize,
    /// True if the batch or the KV cache has no room for the request beside these answers.
    pub is_full: bool,
    /// True if the queue of the engine can take the request.
    pub has_queue_room: bool,
    /// The number of tokens of the longest prefix that the request can reuse.
    pub matched: usize,
}

impl EngineState {
    /// Estimates how much longer the request takes than on an idle engine without the prefix, in milliseconds.
    fn wait(&self) -> f64 {
        let full = if self.is_full { FULL } else { 0.0 };
        self.answers as f64 * ANSWER + full - saved(self.matched)
    }
}

/// The reason for the choice of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The engine has kept a prefix of the prompt.
    Prefix,
    /// The engine has kept no prefix of the prompt, and no other engine is better by more than its load.
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

/// The choice of engines, and the order in which the engines have been chosen.
#[derive(Debug)]
pub(super) struct Router {
    /// The time of each engine's last request.
    last: Vec<u64>,
    clock: u64,
}

impl Router {
    pub fn new(engines: usize) -> Self {
        Self {
            last: vec![0; engines],
            clock: 0,
        }
    }

    /// Returns the index of the engine for a request. Engines whose queues are full are chosen only if all queues are
    /// full.
    ///
    /// # Panics
    /// Panics if `states` is empty.
    pub fn choose(&self, states: &[EngineState]) -> (usize, Reason) {
        let any_has_room = states.iter().any(|state| state.has_queue_room);
        let candidates =
            (0..states.len()).filter(|index| states[*index].has_queue_room || !any_has_room);
        let best = candidates.min_by(|a, b| {
            let by_wait = states[*a].wait().total_cmp(&states[*b].wait());
            by_wait.then(self.last[*a].cmp(&self.last[*b]))
        });
        let best = best.expect("a pool has at least one engine");
        match states[best].matched {
            0 => (best, Reason::Load),
            _ => (best, Reason::Prefix),
        }
    }

    /// Records that the engine has got a request.
    pub fn record(&mut self, engine: usize) {
        self.clock += 1;
        self.last[engine] = self.clock;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(first: u32, tokens: usize) -> Vec<u32> {
        (first..).take(tokens).collect()
    }

    fn prefixes(prompt: &[u32]) -> Prefixes {
        Prefixes::of(&prompt.to_vec().into(), None)
    }

    /// Returns the state of an engine with room, by its answers and the matched tokens.
    fn state((answers, matched): (usize, usize)) -> EngineState {
        EngineState {
            answers,
            is_full: false,
            has_queue_room: true,
            matched,
        }
    }

    fn choose(states: &[(usize, usize)]) -> (usize, Reason) {
        let states: Vec<_> = states.iter().copied().map(state).collect();
        Router::new(states.len()).choose(&states)
    }

    #[test]
    fn prefixes_depend_on_all_earlier_tokens_and_on_the_load_of_the_adapter() {
        let long = prompt(0, 100);
        let whole = prefixes(&long);
        assert_eq!((whole.hashes.len(), whole.tokens), (6, 100));
        assert_eq!(prefixes(&long[..40]).hashes, whole.hashes[..2]);
        let mut changed = long.clone();
        changed[20] = 7;
        let changed = prefixes(&changed);
        assert_eq!(changed.hashes[0], whole.hashes[0]);
        let differ = |one: &[u64], other: &[u64]| one.iter().zip(other).all(|(a, b)| a != b);
        assert!(differ(&changed.hashes[1..], &whole.hashes[1..]));
        let adapted = [1, 2].map(|load| Prefixes::of(&long.clone().into(), Some(load)).hashes);
        assert!(differ(&adapted[0], &whole.hashes) && differ(&adapted[0], &adapted[1]));
        assert!(prefixes(&long[..15]).hashes.is_empty());
    }

    #[test]
    fn saved_time_is_the_measured_one_and_grows_with_the_prefix() {
        for (tokens, time) in SAVED {
            assert_eq!(saved(tokens as usize), time);
        }
        assert_eq!(saved(2_000), 3.5);
        assert_eq!(saved(56_000), 142.0 + 115.0);
        let times: Vec<f64> = (0..70).map(|number| saved(number * 1000)).collect();
        assert!(times.is_sorted());
    }

    #[test]
    fn choice_weighs_the_saved_prefill_against_the_load() {
        // An answer costs 12 ms. A prefix of 8,000 tokens saves 27 ms, which is more than two answers cost.
        assert_eq!(choose(&[(0, 0), (2, 8_000)]), (1, Reason::Prefix));
        assert_eq!(choose(&[(0, 0), (3, 8_000)]), (0, Reason::Load));
        assert_eq!(choose(&[(5, 0), (7, 8_000)]), (1, Reason::Prefix));
        assert_eq!(choose(&[(0, 0), (1, 16)]), (0, Reason::Load));
        assert_eq!(choose(&[(0, 0), (0, 16)]), (1, Reason::Prefix));
        // The engine in the middle has neither the longest prefix nor the smallest load.
        let middle = [(0, 0), (1, 8_000), (20, 32_000)];
        assert_eq!(choose(&middle), (1, Reason::Prefix));
        assert_eq!(choose(&[middle[0], middle[2]]), (0, Reason::Load));
    }

    #[test]
    fn choice_of_a_shared_prefix_is_the_least_busy_of_its_engines() {
        assert_eq!(choose(&[(3, 64), (1, 0), (1, 64)]), (2, Reason::Prefix));
    }

    #[test]
    fn choice_avoids_engines_without_room_unless_the_prefix_is_worth_the_wait() {
        let mut states = [state((1, 0)), state((0, 8_000))];
        states[1].is_full = true;
        let router = Router::new(2);
        assert_eq!(router.choose(&states), (0, Reason::Load));
        states[1].matched = 128_000;
        assert_eq!(router.choose(&states), (1, Reason::Prefix));
    }

    #[test]
    fn choice_without_a_prefix_takes_equal_engines_in_turn() {
        let mut router = Router::new(3);
        let idle = [state((0, 0)); 3];
        let chosen: Vec<usize> = (0..6)
            .map(|_| {
                let (engine, reason) = router.choose(&idle);
                assert_eq!(reason, Reason::Load);
                router.record(engine);
                engine
            })
            .collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn choice_avoids_full_queues_unless_all_are_full() {
        let router = Router::new(2);
        let mut states = [state((0, 64)), state((50, 0))];
        states[0].has_queue_room = false;
        assert_eq!(router.choose(&states), (1, Reason::Load));
        states[1].has_queue_room = false;
        assert_eq!(router.choose(&states), (0, Reason::Prefix));
    }

    #[test]
    fn match_is_the_longest_recorded_prefix_of_a_prompt_that_can_reuse_it() {
        let recent = RecentPrefixes::new();
        let conversation = prompt(0, 150);
        recent.record(&prefixes(&conversation[..40]));
        assert_eq!(recent.matched(&prefixes(&conversation)), 32);
        recent.record(&prefixes(&conversation[..100]));
        assert_eq!(recent.matched(&prefixes(&conversation)), 96);
        assert_eq!(recent.matched(&prefixes(&prompt(1, 150))), 0);
        // On Hopper cards, short prompts run whole as one graph.
        recent.set_shortest_prompt(101);
        assert_eq!(recent.matched(&prefixes(&conversation[..100])), 0);
        assert_eq!(recent.matched(&prefixes(&conversation[..101])), 96);
    }

    #[test]
    fn full_table_forgets_the_ends_of_the_oldest_prompts() {
        let recent = RecentPrefixes::new();
        let old = prefixes(&prompt(0, 10 * BLOCK));
        recent.record(&old);
        for number in 1..16 {
            recent.record(&prefixes(&prompt(number << 20, MOST_BLOCKS * BLOCK)));
        }
        assert_eq!(recent.matched(&old), 10 * BLOCK);
        recent.record(&prefixes(&prompt(1 << 30, (MOST_BLOCKS - 4) * BLOCK)));
        assert_eq!(recent.matched(&old), 4 * BLOCK);
    }

    #[test]
    fn long_prompt_replaces_a_sixteenth_of_the_table_at_most() {
        let long = prefixes(&prompt(0, 2 * TABLE_BLOCKS.get() * BLOCK));
        assert_eq!(long.hashes.len(), TABLE_BLOCKS.get() / 16);
    }
}
