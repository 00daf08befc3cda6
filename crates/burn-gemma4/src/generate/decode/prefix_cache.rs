//! Reuse of the keys and values of earlier prompts that begin with the same tokens (prefix caching).

use super::prefill::{Prefill, Prefilled};
use crate::generate::encoded::{PlacedMedium, before_media, common_prefix};
use crate::model::Gemma4Model;
use crate::model::adapters::AdapterId;
use crate::model::cache::checkpoint::Checkpoint;
use crate::model::cache::kind::CacheKind;
use crate::model::cache::prefix::Prefix;
use burn::module::{ParamId, list_param_ids};
use std::collections::HashSet;
use std::sync::Arc;

/// The smallest number of shared tokens for which a prompt reuses the keys and values of an earlier prompt. For fewer
/// tokens the copy would not pay off.
const LEAST: usize = 16;

/// The smallest number of tokens between the end of a reused prefix and a new checkpoint. A checkpoint is a copy of the
/// ring buffers at one token, so that later prompts can continue after this token. The checkpoint costs one more
/// prefill chunk and as much memory as all ring buffers. In return, a later prompt saves the prefill of the tokens
/// between the reused prefix and the checkpoint. For fewer tokens, this saving would not be worth the cost.
const LEAST_TO_CHECKPOINT: usize = 64;

/// A prompt waits for a shared prefix if at least one in this number of its tokens that are not yet reusable is in
/// the prefix. A pass over several prompts takes about half the time of a pass for each (H200, 2026-11-30). A short
/// prefix saves less.
const SHARE_TO_WAIT: usize = 4;

/// The largest number of checkpoints of a prompt.
const MOST_CHECKPOINTS: usize = 4;

/// The KV caches of earlier prompts. A later prompt that begins with the same tokens as an earlier prompt continues
/// from a copy of the earlier prompt's KV cache. The model then runs only over the remaining tokens of the later
/// prompt. Keys and values of different adapters are never shared, and neither are those of different images
/// or audio clips.
///
/// Full-attention layers keep the keys and values of all tokens. Sliding layers keep only the last window of tokens, in
/// ring buffers. A checkpoint is a copy of the ring buffers' contents at an earlier token. If a prompt is at least as
/// long as the window, other prompts can continue only from the prompt's end and from its checkpoints. The first prompt
/// that shares a prefix with an earlier prompt takes a checkpoint at the end of the shared prefix. Later prompts with
/// this prefix continue from the checkpoint.
///
/// On a Hopper card, running a whole prompt as one CUDA graph is faster than reusing a prefix. Prompts that can run in
/// this way do not continue from other prompts, and the cache does not keep them.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{CacheKind, Gemma4, LoadOptions, PrefixCache};
///
/// let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new())?;
/// let chunk = 512;
/// let mut prefixes = PrefixCache::new(gemma.model(), 64 << 20, chunk);
/// let instructions: Vec<u32> = (2..40).collect();
/// let mut reused = Vec::new();
/// for question in [50, 60] {
///     let prompt = [&instructions[..], &[question]].concat();
///     let mut prefill = gemma.prefill(prompt, CacheKind::default())?;
///     prefixes.resume(&mut prefill);
///     while prefill.advance(chunk)?.is_none() {}
///     reused.push(prefill.reused());
///     prefixes.keep(prefill);
/// }
/// assert_eq!(reused, [0, 38]);
/// # }
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Debug)]
pub struct PrefixCache {
    /// The ids of the model's parameters. Prompts of other models are neither kept nor continued.
    model: Vec<ParamId>,
    /// The earlier prompts. The least recently used prompt comes first.
    prompts: Vec<Prefilled>,
    /// The size of the prompts' KV caches and checkpoints on the device, in bytes.
    bytes: usize,
    most_bytes: usize,
    chunk: usize,
    /// True if the user has been warned that the keys and values of a prompt exceed `most_bytes`.
    has_warned: bool,
}

/// The state after the first tokens of an earlier prompt. Another prompt can continue from this state.
struct State {
    /// The index of the prompt.
    prompt: usize,
    /// The number of tokens of the earlier prompt that precede this state.
    column: usize,
}

/// What must be equal so that one prompt can continue from the keys and values of another.
struct Prompt<'a> {
    tokens: &'a [u32],
    media: &'a [PlacedMedium],
    adapter: Option<AdapterId>,
    kind: CacheKind,
}

impl<'a> Prompt<'a> {
    fn of(prefill: &'a Prefill) -> Self {
        Self {
            media: prefill.media(),
            adapter: prefill.adapter().map(|adapter| adapter.id()),
            ..Self::of_tokens(prefill.tokens(), prefill.cache().kind())
        }
    }

    /// Returns a prompt without images, audio and adapter.
    fn of_tokens(tokens: &'a [u32], kind: CacheKind) -> Self {
        Self {
            tokens,
            media: &[],
            adapter: None,
            kind,
        }
    }

    /// True if this prompt begins with all tokens of an earlier prompt with the same adapter.
    fn continues(&self, earlier: &Self) -> bool {
        self.kind == earlier.kind
            && self.adapter == earlier.adapter
            && self.tokens.starts_with(earlier.tokens)
            && self.media.starts_with(earlier.media)
    }
}

/// Returns the number of tokens that a prompt must share with a prompt that is being prefilled, so that it waits for
/// that prompt. `reusable` is the number of its tokens that earlier prompts have.
fn least_shared(tokens: &[u32], reusable: usize) -> usize {
    let others = tokens.len().saturating_sub(reusable);
    reusable + LEAST_TO_CHECKPOINT.max(others.div_ceil(SHARE_TO_WAIT))
}

impl PrefixCache {
    /// Creates an empty cache for prompts of one model. The cache keeps at most `most_bytes` bytes of keys and values
    /// on the device, and keeps nothing if `most_bytes` is 0. `chunk` is the largest number of tokens that the caller
    /// passes to [`Prefill::advance`].
    pub fn new(model: &Gemma4Model, most_bytes: usize, chunk: usize) -> Self {
        Self {
            model: list_param_ids(model),
            prompts: Vec::new(),
            bytes: 0,
            most_bytes,
            chunk,
            has_warned: false,
        }
    }

    /// Lets a prefill that has not begun continue from an earlier prompt's keys and values. Ignores prefills that
    /// have begun, also by [`Prefill::read_packed`]. An earlier prompt's usable prefix ends at the last shared token
    /// from which its cache or one of its checkpoints can continue. Selects the earlier prompt with the longest
    /// usable prefix, and none if this prefix has fewer than 16 tokens. [`Prefill::advance`] then continues from a
    /// copy of the prefix.
    ///
    /// The prefill keeps the whole earlier prompt on the device until it has a copy of the prefix. After
    /// [`Prefill::read_packed`], this is until it is dropped. If the earlier prompt leaves this cache meanwhile,
    /// [`bytes`](Self::bytes) no longer counts its memory.
    ///
    /// The prompt may share a longer prefix with one of the earlier prompts. If the longest shared prefix is much
    /// longer than the usable prefix, the prefill will take a checkpoint at the end of the longest shared prefix.
    pub fn resume(&mut self, prefill: &mut Prefill) {
        if prefill.has_begun() || !self.serves(prefill) {
            return;
        }
        let (longest, best) = self.find(&Prompt::of(prefill));
        let column = best.as_ref().map_or(0, |best| best.column);
        let keeps_all = prefill.cache().keeps_all(prefill.tokens().len());
        if !keeps_all && longest >= column + LEAST_TO_CHECKPOINT {
            prefill.take_checkpoint_at(longest);
        }
        if let Some(State { prompt, column }) = best {
            // Move the earlier prompt to the end of the list, because the list is in the order of last use.
            let earlier = self.prompts.remove(prompt);
            let checkpoint = earlier.checkpoint_at(column).cloned();
            let prefix = Prefix::new(earlier.cache.clone(), column, checkpoint);
            let checkpoints = earlier.checkpoints_until(column);
            prefill.continue_from(prefix, checkpoints);
            self.prompts.push(earlier);
        }
    }

    /// Returns the length of the longest prefix that a prompt shares with an earlier prompt, and the longest usable
    /// one.
    fn find(&self, prompt: &Prompt<'_>) -> (usize, Option<State>) {
        let (mut longest, mut best) = (0, None::<State>);
        for (index, earlier) in self.prompts.iter().enumerate() {
            let shared = earlier.shared_with(prompt);
            let column = earlier.last_state(shared);
            longest = longest.max(shared);
            if column >= LEAST && best.as_ref().is_none_or(|best| best.column <= column) {
                best = Some(State {
                    prompt: index,
                    column,
                });
            }
        }
        (longest, best)
    }

    /// Returns the number of tokens of a prompt that [`resume`](Self::resume) would reuse. The prompt has no images,
    /// audio and adapter, and its KV cache has the storage format `kind`. `resume` reuses nothing for a prompt that a
    /// graph may run [as a whole](crate::Gemma4::longest_whole_prompt). The caller must check this, because the cache
    /// does not know the graphs.
    pub fn reusable(&self, tokens: &[u32], kind: CacheKind) -> usize {
        let (_, best) = self.find(&Prompt::of_tokens(tokens, kind));
        best.map_or(0, |best| best.column)
    }

    /// True if a prompt of `tokens` should wait until the cache has kept a prompt that is being prefilled. The cache
    /// must have room for the earlier prompt, and for a checkpoint if other prompts need one to continue. Both must
    /// begin with at least 64 equal tokens more than the `reusable` ones, which are at least a quarter of the others.
    /// If the prompts were [read in one pass](Prefill::read_packed), these tokens could not be reused.
    ///
    /// Both prompts must run without an adapter, and no graph may run `tokens` [as a
    /// whole](crate::Gemma4::longest_whole_prompt).
    pub fn would_share(&self, prefill: &Prefill, tokens: &[u32], reusable: usize) -> bool {
        let least = least_shared(tokens, reusable);
        // Most prompts that share the reusable tokens differ after them, so compare the later tokens first.
        let (earlier, media) = (prefill.tokens(), prefill.media());
        [reusable..least, 0..reusable].into_iter().all(|range| {
            let both = (earlier.get(range.clone()), tokens.get(range));
            matches!(both, (Some(one), Some(other)) if one == other)
        }) && common_prefix((&earlier[..least], media), (&tokens[..least], &[])) == least
            && self.has_room_to_share(prefill)
            && self.serves(prefill)
    }

    /// Lets the prefill of a prompt take a checkpoint for the prompts that wait for its prefix. Chooses the end of the
    /// prefix that saves the waiting prompts most of the tokens that they cannot reuse yet. A checkpoint that the
    /// prefill will take already, for example after [`resume`](Self::resume), counts as one waiting prompt.
    ///
    /// Does nothing if the prompt can be continued there without a checkpoint, or if the model has already read these
    /// tokens. Also does nothing if this cache has no room for the prompt and a checkpoint.
    ///
    /// A prefill takes at most 4 checkpoints, because this cache counts their memory only when it keeps the prompt. A
    /// checkpoint is at least 64 tokens after the last one and after the reused tokens. Many waiting prompts with
    /// prefixes of almost the same length therefore cost few passes.
    ///
    /// The `waiting` prompts must have neither images nor audio nor an adapter, and no graph may run one of them [as a
    /// whole](crate::Gemma4::longest_whole_prompt).
    pub fn take_checkpoint_for<'a>(
        &self,
        prefill: &mut Prefill,
        waiting: impl IntoIterator<Item = &'a [u32]>,
    ) {
        let length = prefill.tokens().len();
        let is_plain = prefill.adapter().is_none() && self.serves(prefill);
        if !is_plain || prefill.remaining() == 0 || prefill.cache().keeps_all(length) {
            return;
        }
        let has_all = prefill.count_own_checkpoints() >= MOST_CHECKPOINTS;
        if has_all || !self.has_room_to_share(prefill) {
            return;
        }
        let (read, last) = (length - prefill.remaining(), prefill.last_state());
        let (earlier, kind) = ((prefill.tokens(), prefill.media()), prefill.cache().kind());
        // A shared prefix that is long enough has this token. Most other prompts differ there, so compare it first.
        let least = read.max(last + LEAST_TO_CHECKPOINT - 1);
        let Some(token) = prefill.tokens().get(least) else {
            return;
        };
        let waiting = waiting.into_iter();
        let alike = waiting.filter(|tokens| tokens.get(least) == Some(token));
        let shared = alike.filter_map(|tokens| {
            let others = &tokens[..tokens.len().saturating_sub(1)];
            let shared = common_prefix(earlier, (others, &[]));
            // The cache can be continued at its end, and before its last token.
            if shared <= read || shared + 1 >= length {
                return None;
            }
            // The waiting prompt will be able to continue from the last checkpoint without another one.
            let reusable = self.reusable(tokens, kind).max(last);
            (shared >= least_shared(tokens, reusable)).then_some((shared, reusable))
        });
        // A checkpoint that the prefill will take already serves at least one prompt.
        let planned = prefill.boundary().filter(|boundary| *boundary > read);
        let planned = planned.map(|boundary| (boundary, last));
        let mut shared: Vec<(usize, usize)> = shared.chain(planned).collect();
        shared.sort_unstable();
        let saved = |index: &usize| -> usize {
            let (boundary, _) = shared[*index];
            let prompts = shared[*index..].iter();
            let saved = prompts.map(|(_, reusable)| boundary.saturating_sub(*reusable));
            saved.sum()
        };
        if let Some(best) = (0..shared.len()).max_by_key(saved) {
            prefill.take_checkpoint_at(shared[best].0);
        }
    }

    /// Keeps the keys and values of several finished prefills, as [`keep`](Self::keep) does. Does not copy prompts that
    /// the later ones would displace at once, because not all fit. Prompts that exceed the whole memory displace no
    /// others, and a prompt that begins with an earlier one takes its place. Returns true for each prompt that was
    /// kept.
    pub fn keep_all(&mut self, prefills: Vec<Prefill>) -> Vec<bool> {
        let mut bytes = 0usize;
        let mut counted: Vec<&Prefill> = Vec::new();
        let displaced = prefills.iter().rev().map(|prefill| {
            let size = prefill.cache_bytes();
            if !self.is_useful(prefill) || size > self.most_bytes {
                return false;
            }
            if !counted
                .iter()
                .any(|later| Prompt::of(later).continues(&Prompt::of(prefill)))
            {
                bytes = bytes.saturating_add(size);
                counted.push(prefill);
            }
            bytes > self.most_bytes
        });
        let mut displaced: Vec<bool> = displaced.collect();
        displaced.reverse();
        let prefills = prefills.into_iter().zip(displaced);
        let kept = prefills.map(|(prefill, is_displaced)| !is_displaced && self.keep(prefill));
        kept.collect()
    }

    /// Keeps the keys and values of a finished prefill for later prompts. If the memory is full, drops the least
    /// recently used prompts until the remaining prompts fit. Ignores unfinished prefills, prompts of fewer than 16
    /// tokens and prompts of other models. Also ignores prompts that exceed the whole memory, and prompts that run
    /// faster as one CUDA graph than with a reused prefix. Returns true if the prompt was kept.
    pub fn keep(&mut self, prefill: Prefill) -> bool {
        if !self.is_useful(&prefill) {
            return false;
        }
        let bytes = prefill.cache_bytes();
        if bytes > self.most_bytes {
            if !self.has_warned {
                self.has_warned = true;
                log::warn!(
                    "the prefix cache of {} MiB cannot hold a prompt of {} tokens, which takes {} MiB; increase its limit",
                    self.most_bytes >> 20,
                    prefill.tokens().len(),
                    bytes.div_ceil(1 << 20)
                );
            }
            return false;
        }
        // Replace the earlier prompts that the new prompt begins with, because the new prompt's cache also holds their
        // keys and values.
        let prompt = Prompt::of(&prefill);
        let (replaced, others) = std::mem::take(&mut self.prompts)
            .into_iter()
            .partition::<Vec<_>, _>(|earlier| prompt.continues(&earlier.prompt()));
        self.prompts = others;
        let shared = self.checkpoint_at(&prompt, prefill.reused());
        // Make room before `into_prefilled` copies the keys and values of a packed prompt.
        self.limit_bytes(self.most_bytes - bytes);
        let mut new = prefill.into_prefilled();
        for earlier in replaced {
            new.replace(earlier);
        }
        let shared = shared.filter(|shared| !new.cache.can_fork(shared.column));
        new.add_checkpoints(shared);
        new.limit_checkpoints(self.most_bytes - bytes);
        self.prompts.push(new);
        self.limit_bytes(self.most_bytes);
        true
    }

    /// Drops the least recently used prompts until the others have at most `most_bytes` bytes.
    fn limit_bytes(&mut self, most_bytes: usize) {
        self.bytes = self.count_bytes();
        while self.bytes > most_bytes {
            self.prompts.remove(0);
            self.bytes = self.count_bytes();
        }
    }

    /// Returns a checkpoint of an earlier prompt after the first `column` tokens of `prompt`. Several prompts may
    /// continue from the end of one earlier prompt, and only the first of them [replaces](Prefilled::replace) it.
    fn checkpoint_at(&self, prompt: &Prompt<'_>, column: usize) -> Option<Arc<Checkpoint>> {
        let mut alike = self
            .prompts
            .iter()
            .filter(|earlier| earlier.shared_with(prompt) >= column);
        let checkpoint = alike.find_map(|earlier| earlier.checkpoint_at(column));
        checkpoint.cloned()
    }

    /// The size of the kept keys and values on the device, in bytes. Does not count dropped prompts from which prefills
    /// still [continue](Self::resume).
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Drops the keys and values that were computed with an adapter.
    pub fn forget_adapter(&mut self, adapter: AdapterId) {
        self.prompts
            .retain(|prompt| prompt.adapter != Some(adapter));
        self.bytes = self.count_bytes();
    }

    /// True if later prompts may continue from the prefill.
    fn is_useful(&self, prefill: &Prefill) -> bool {
        let is_long = prefill.tokens().len() >= LEAST;
        is_long && prefill.remaining() == 0 && self.serves(prefill)
    }

    /// True if the prefill can benefit from this cache. The prefill must belong to this cache's model, and the cache's
    /// memory limit must not be 0. Also, reusing a prefix must be faster than running the whole prompt as one CUDA
    /// graph.
    fn serves(&self, prefill: &Prefill) -> bool {
        let runs_whole = prefill.is_fastest_whole() && prefill.tokens().len() <= self.chunk;
        self.most_bytes > 0 && !runs_whole && prefill.parameters() == self.model
    }

    /// True if the memory has room for the prompt, and for a checkpoint if other prompts cannot continue without one.
    fn has_room_to_share(&self, prefill: &Prefill) -> bool {
        let checkpoint = match prefill.cache().keeps_all(prefill.tokens().len()) {
            true => 0,
            false => prefill.checkpoint_bytes(),
        };
        prefill.cache_bytes() + checkpoint <= self.most_bytes
    }

    fn count_bytes(&self) -> usize {
        // Count each checkpoint once. If several prompts have continued from one earlier prompt, they share its
        // checkpoints.
        let mut counted = HashSet::new();
        let checkpoints = self.prompts.iter().flat_map(|prompt| &prompt.checkpoints);
        let checkpoints: usize = checkpoints
            .filter(|checkpoint| counted.insert(Arc::as_ptr(checkpoint)))
            .map(|checkpoint| checkpoint.bytes())
            .sum();
        let caches = self.prompts.iter().map(|prompt| prompt.cache.bytes());
        checkpoints + caches.sum::<usize>()
    }
}

impl Prefilled {
    fn prompt(&self) -> Prompt<'_> {
        Prompt {
            tokens: &self.tokens,
            media: &self.media,
            adapter: self.adapter,
            kind: self.cache.kind(),
        }
    }

    /// Returns the length of the longest common prefix of this prompt and a new prompt. The new prompt's last token
    /// does not count, because the model must run over this token to compute the logits after the prompt.
    fn shared_with(&self, prompt: &Prompt<'_>) -> usize {
        if self.cache.kind() != prompt.kind || self.adapter != prompt.adapter {
            return 0;
        }
        let (tokens, media) = (prompt.tokens, prompt.media);
        let common = common_prefix((&self.tokens, &self.media), (tokens, media));
        before_media(media, common.min(tokens.len().saturating_sub(1)))
    }

    /// Returns the largest number of tokens, up to `shared`, after which another prompt can continue. The other prompt
    /// continues from this prompt's cache, or from one of this prompt's checkpoints. Returns 0 if there is no such
    /// number.
    fn last_state(&self, shared: usize) -> usize {
        if self.cache.can_fork(shared) {
            return shared;
        }
        let columns = self.checkpoints.iter().map(|checkpoint| checkpoint.column);
        columns
            .filter(|column| *column <= shared)
            .max()
            .unwrap_or(0)
    }

    fn checkpoint_at(&self, column: usize) -> Option<&Arc<Checkpoint>> {
        let mut checkpoints = self.checkpoints.iter();
        checkpoints.find(|checkpoint| checkpoint.column == column)
    }

    fn checkpoints_until(&self, column: usize) -> Vec<Arc<Checkpoint>> {
        let checkpoints = self.checkpoints.iter();
        let earlier = checkpoints.filter(|checkpoint| checkpoint.column <= column);
        earlier.cloned().collect()
    }

    /// Takes over the checkpoints of `earlier`. This prompt begins with all tokens of `earlier`. If another prompt
    /// cannot continue from this prompt's cache at the end of `earlier`, also keeps a checkpoint of the ring buffers at
    /// that end.
    fn replace(&mut self, earlier: Self) {
        let end = earlier.tokens.len();
        let mut checkpoints = earlier.checkpoints;
        // Take a checkpoint at the end of the earlier prompt, because other prompts may continue from there too.
        if end < self.tokens.len() && !self.cache.can_fork(end) {
            checkpoints.push(Arc::new(earlier.cache.checkpoint()));
        }
        self.add_checkpoints(checkpoints);
    }

    /// Adds checkpoints at tokens where this prompt has none.
    fn add_checkpoints(&mut self, checkpoints: impl IntoIterator<Item = Arc<Checkpoint>>) {
        for checkpoint in checkpoints {
            if self.checkpoint_at(checkpoint.column).is_none() {
                self.checkpoints.push(checkpoint);
            }
        }
        self.checkpoints
            .sort_unstable_by_key(|checkpoint| checkpoint.column);
    }

    /// Drops checkpoints until at most [`MOST_CHECKPOINTS`] are left, with at most `most_bytes` bytes in total. Drops
    /// the second checkpoint first, because the first and the last checkpoints are more useful. Other conversations may
    /// share the first checkpoint, and this conversation goes on from the last checkpoints.
    fn limit_checkpoints(&mut self, most_bytes: usize) {
        let bytes = |checkpoints: &[Arc<Checkpoint>]| -> usize {
            checkpoints
                .iter()
                .map(|checkpoint| checkpoint.bytes())
                .sum()
        };
        while self.checkpoints.len() > MOST_CHECKPOINTS || bytes(&self.checkpoints) > most_bytes {
            let second = usize::from(self.checkpoints.len() > 1);
            self.checkpoints.remove(second);
        }
    }
}
