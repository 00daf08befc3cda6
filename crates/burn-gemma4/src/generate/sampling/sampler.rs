//! Sampling of tokens on the host. The steps are repetition penalty, suppressed tokens, temperature, top-k, top-p and
//! min-p.

use crate::config::sampling::Sampling;
use crate::error::Gemma4Error;
use crate::op::sample::random::random_bits;
use std::cmp::Ordering;
use std::collections::HashSet;

/// A sampler, which draws the tokens of one text with the options of a [`Sampling`]. The random bits of a draw depend
/// only on the seed and on the position of the drawn token.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// The number of tokens that the text has so far. This is also the position of the next token.
    position: usize,
    /// Pairs of a text length and a list of tokens. A pair forbids its tokens while the text has fewer tokens than the
    /// pair's length.
    suppressed: Vec<(usize, Vec<u32>)>,
    /// The tokens that the text contains, if a repetition penalty is set.
    seen: HashSet<u32>,
    /// Scratch memory for the candidates, reused by all draws.
    candidates: Vec<Candidate>,
    /// Scratch memory for the modified logits, reused by all draws.
    changed: Vec<f32>,
}

impl Sampler {
    /// Creates a sampler for a text that has no tokens yet.
    pub fn new(sampling: &Sampling) -> Self {
        Self {
            sampling: sampling.clone(),
            seed: sampling.seed.unwrap_or_else(rand::random),
            position: 0,
            suppressed: Vec::new(),
            seen: HashSet::new(),
            candidates: Vec::new(),
            changed: Vec::new(),
        }
    }

    /// Records tokens that are part of the text but were not drawn by this sampler, such as the tokens of the prompt.
    pub fn read(&mut self, tokens: &[u32]) {
        self.position += tokens.len();
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.extend(tokens);
        }
    }

    /// Forbids `tokens` at the next `count` positions.
    pub(crate) fn suppress_for(&mut self, count: usize, tokens: &[u32]) {
        if count > 0 && !tokens.is_empty() {
            let end = self.position.saturating_add(count);
            self.suppressed.push((end, tokens.to_vec()));
        }
    }

    /// True if [`suppress_for`](Self::suppress_for) forbids tokens at the next position.
    pub(crate) fn suppresses_now(&self) -> bool {
        self.suppressed.iter().any(|(end, _)| self.position < *end)
    }

    /// Draws a token from `logits`, `[vocabulary]`, and records the token. A NaN logit counts as −∞.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if every logit is NaN or −∞. Passes on the errors of [`Sampling::validate`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Gemma4Error> {
        self.sampling.validate()?;
        let token = self.choose(logits)?;
        self.read(&[token]);
        Ok(token)
    }

    /// Draws a token from `logits` without recording it. The sampling options must be valid.
    pub(crate) fn choose(&mut self, logits: &[f32]) -> Result<u32, Gemma4Error> {
        if !self.sampling.changes_logits() && !self.suppresses_now() {
            return self.choose_among(logits);
        }
        let mut changed = std::mem::take(&mut self.changed);
        changed.clear();
        changed.extend_from_slice(logits);
        self.change(&mut changed);
        let token = self.choose_among(&changed);
        self.changed = changed;
        token
    }

    pub(crate) fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// True if both samplers have the same options. The seeds may differ.
    pub(crate) fn draws_like(&self, other: &Self) -> bool {
        let seed = other.sampling.seed;
        let own = Sampling {
            seed,
            ..self.sampling.clone()
        };
        own == other.sampling
    }

    #[cfg(feature = "cube")]
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the position of the next token to draw.
    #[cfg(feature = "cube")]
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    #[cfg(feature = "cube")]
    pub(crate) fn seen(&self) -> &HashSet<u32> {
        &self.seen
    }

    /// Applies the repetition penalty and the suppressed tokens to the logits.
    fn change(&self, logits: &mut [f32]) {
        let penalty = self.sampling.penalty();
        for token in &self.seen {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = match *logit < 0.0 {
                    true => *logit * penalty,
                    false => *logit / penalty,
                };
            }
        }
        let early = self.suppressed.iter();
        let early = early.filter(|(end, _)| self.position < *end);
        let early = early.flat_map(|(_, tokens)| tokens);
        for token in self.sampling.suppress_tokens.iter().chain(early) {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn choose_among(&mut self, logits: &[f32]) -> Result<u32, Gemma4Error> {
        let argmax = possible(logits)
            .reduce(|best, next| if next.logit > best.logit { next } else { best })
            .ok_or_else(|| Gemma4Error::no_number(logits.len()))?;
        if self.sampling.is_greedy() {
            return Ok(argmax.token);
        }
        self.candidates.clear();
        self.candidates.extend(possible(logits));
        if let Some(top_k) = self.sampling.top_k {
            self.keep_top_k(top_k);
        }
        for candidate in &mut self.candidates {
            candidate.weigh(argmax.logit, self.sampling.temperature);
        }
        match self.sampling.top_p {
            Some(top_p) if top_p < 1.0 => self.keep_top_p(f64::from(top_p)),
            _ => (),
        }
        if let Some(min_p) = self.sampling.min_p {
            // Compare the weights with `min_p` without dividing by the largest weight, because the largest weight is 1.
            self.candidates
                .retain(|candidate| candidate.weight >= min_p);
        }
        Ok(self.draw().unwrap_or(argmax.token))
    }

    /// Keeps the `top_k` most likely candidates. As in Hugging Face Transformers, also keeps candidates whose logit
    /// equals the smallest kept logit.
    fn keep_top_k(&mut self, top_k: usize) {
        if top_k >= self.candidates.len() {
            return;
        }
        let (_, last, _) = self
            .candidates
            .select_nth_unstable_by(top_k - 1, Candidate::order);
        let last = last.logit;
        self.candidates.retain(|candidate| candidate.logit >= last);
    }

    /// Keeps the most likely candidates until the sum of their probabilities reaches `top_p`. Sorts only as many
    /// candidates as necessary, because a few candidates are usually enough.
    fn keep_top_p(&mut self, top_p: f64) {
        let enough = top_p * sum(&self.candidates);
        let mut reached = 0.0;
        let mut sorted = 0;
        while sorted < self.candidates.len() {
            let end = (sorted * 8).max(256).min(self.candidates.len());
            let rest = &mut self.candidates[sorted..];
            let next = end - sorted;
            if next < rest.len() {
                rest.select_nth_unstable_by(next, Candidate::order);
            }
            rest[..next].sort_unstable_by(Candidate::order);
            for index in sorted..end {
                if reached >= enough {
                    self.candidates.truncate(index);
                    return;
                }
                reached += f64::from(self.candidates[index].weight);
            }
            sorted = end;
        }
    }

    /// Draws a candidate with a probability proportional to its weight. Returns `None` if rounding errors move the drawn
    /// number past the last candidate.
    fn draw(&mut self) -> Option<u32> {
        self.candidates
            .sort_unstable_by_key(|candidate| candidate.token);
        // Drop the lowest 11 of the 64 random bits, because an f64 holds 53 bits exactly.
        let bits = random_bits(self.seed, self.position as u32) >> 11;
        let mut left = bits as f64 * 2f64.powi(-53) * sum(&self.candidates);
        let drawn = self.candidates.iter().find(|candidate| {
            left -= f64::from(candidate.weight);
            left < 0.0
        });
        drawn.map(|candidate| candidate.token)
    }
}

/// A token that can be drawn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    /// A weight proportional to the probability. The most likely token has the weight 1.
    weight: f32,
}

impl Candidate {
    /// Orders candidates by descending logit, then by ascending token id.
    fn order(&self, other: &Self) -> Ordering {
        let by_logit = other.logit.total_cmp(&self.logit);
        by_logit.then(self.token.cmp(&other.token))
    }

    fn weigh(&mut self, largest: f32, temperature: f32) {
        // Set the weight of the largest logit to 1 without a subtraction, because ∞ − ∞ would be NaN if this logit is
        // ∞.
        self.weight = if self.logit == largest {
            1.0
        } else {
            ((self.logit - largest) / temperature).exp()
        };
    }
}

/// Returns the tokens whose logit is neither NaN nor −∞.
fn possible(logits: &[f32]) -> impl Iterator<Item = Candidate> {
    let candidates = (0u32..).zip(logits).map(|(token, &logit)| Candidate {
        token,
        logit,
        weight: 0.0,
    });
    candidates.filter(|candidate| candidate.logit > f32::NEG_INFINITY)
}

fn sum(candidates: &[Candidate]) -> f64 {
    let weights = candidates.iter().map(|candidate| candidate.weight);
    weights.map(f64::from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            seed: Some(1),
            ..Sampling::greedy()
        }
    }

    /// Draws many times, and returns the relative frequency of each token.
    fn frequencies(sampling: &Sampling, logits: &[f32]) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut sampler = Sampler::new(sampling);
        let mut counts = vec![0usize; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(logits).expect("a logit is finite") as usize] += 1;
        }
        let share = |count| count as f64 / DRAWS as f64;
        counts.into_iter().map(share).collect()
    }

    #[track_caller]
    fn assert_frequencies(sampling: &Sampling, logits: &[f32], expected: &[f64]) {
        let found = frequencies(sampling, logits);
        for (found_one, expected_one) in found.iter().zip(expected) {
            let close = (found_one - expected_one).abs() < 0.015;
            let never = *expected_one > 0.0 || *found_one == 0.0;
            assert!(close && never, "found {found:?}, expected {expected:?}");
        }
    }

    /// Returns logits whose softmax is the given list of probabilities.
    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    /// Returns unsorted logits of a vocabulary of Gemma's size, with many equal values.
    fn vocabulary() -> Vec<f32> {
        let scatter = |i: u32| i.wrapping_mul(2_654_435_761) >> 18;
        (0..262_144).map(|i| scatter(i) as f32 / 1000.0).collect()
    }

    #[test]
    fn sample_greedy_gives_the_first_argmax() {
        let logits = [f32::NAN, 1.0, 3.0, 3.0, f32::NEG_INFINITY];
        for sampling in [
            Sampling::greedy(),
            sampling(0.0, Some(3), None),
            sampling(1.0, Some(1), None),
        ] {
            assert!(sampling.is_greedy());
            assert_eq!(
                Sampler::new(&sampling)
                    .sample(&logits)
                    .expect("a logit is finite"),
                2
            );
        }
    }

    #[test]
    fn sample_with_temperature_scales_probabilities() {
        let logits = logits(&[0.5, 0.25, 0.25]);
        assert_frequencies(&sampling(1.0, None, None), &logits, &[0.5, 0.25, 0.25]);
        // A temperature of 0.5 squares the probabilities and normalizes the squares: 1/4, 1/16 and 1/16 become 2/3, 1/6 and
        // 1/6.
        assert_frequencies(
            &sampling(0.5, None, None),
            &logits,
            &[2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0],
        );
        assert_frequencies(&sampling(1e-30, None, None), &logits, &[1.0, 0.0, 0.0]);
        assert_frequencies(&sampling(1e30, None, None), &logits, &[1.0 / 3.0; 3]);
    }

    #[test]
    fn sample_with_top_k_keeps_the_largest_and_ties() {
        let logits = logits(&[0.1, 0.4, 0.2, 0.1, 0.2]);
        assert_frequencies(
            &sampling(1.0, Some(2), None),
            &logits,
            &[0.0, 0.5, 0.25, 0.0, 0.25],
        );
        assert_frequencies(
            &sampling(1.0, Some(9), None),
            &logits,
            &[0.1, 0.4, 0.2, 0.1, 0.2],
        );
    }

    #[test]
    fn sample_with_top_p_keeps_the_token_that_reaches_it() {
        let logits = logits(&[0.1, 0.5, 0.15, 0.25]);
        for (top_p, expected) in [
            (0.4, [0.0, 1.0, 0.0, 0.0]),
            (0.6, [0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]),
            (0.8, [0.0, 5.0 / 9.0, 1.5 / 9.0, 2.5 / 9.0]),
            (1.0, [0.1, 0.5, 0.15, 0.25]),
        ] {
            assert_frequencies(&sampling(1.0, None, Some(top_p)), &logits, &expected);
        }
    }

    #[test]
    fn sample_with_top_p_counts_after_temperature_and_top_k() {
        let logits = logits(&[0.1, 0.3, 0.2, 0.4]);
        // Top-k keeps the probabilities 0.4, 0.3 and 0.2. The first two make up 7/9 of the kept sum, which exceeds the
        // `top_p` of 0.75, so the third token is dropped.
        let expected = [0.0, 3.0 / 7.0, 0.0, 4.0 / 7.0];
        assert_frequencies(&sampling(1.0, Some(3), Some(0.75)), &logits, &expected);
        // The temperature of 0.5 squares the probabilities to 0.16, 0.09, 0.04 and 0.01. The first token alone has 0.53
        // of the sum of the squares, which reaches the `top_p` of 0.5.
        assert_frequencies(
            &sampling(0.5, None, Some(0.5)),
            &logits,
            &[0.0, 0.0, 0.0, 1.0],
        );
    }

    /// Checks that top-p keeps exactly the first candidates of a full sort.
    #[test]
    fn sample_with_large_top_p_keeps_the_prefix_of_a_full_sort() {
        let logits = vocabulary();
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| {
            let by_logit = logits[b as usize].total_cmp(&logits[a as usize]);
            by_logit.then(a.cmp(&b))
        });
        for (temperature, top_p) in [(0.2, 0.3), (1.0, 0.5), (5.0, 0.9), (5.0, 0.999)] {
            let mut sampler = Sampler::new(&sampling(temperature, None, Some(top_p)));
            sampler.sample(&logits).expect("a logit is finite");
            sampler.candidates.sort_by(Candidate::order);
            let kept: Vec<u32> = sampler.candidates.iter().map(|kept| kept.token).collect();
            assert!(
                kept.len() > 8 && kept.len() < logits.len(),
                "{}",
                kept.len()
            );
            assert_eq!(kept, order[..kept.len()]);
            let weight = |token: &u32| {
                let above = logits[*token as usize] - logits[order[0] as usize];
                f64::from(above / temperature).exp()
            };
            let all: f64 = order.iter().map(weight).sum();
            let mass: f64 = kept.iter().map(weight).sum::<f64>() / all;
            let last = weight(&kept[kept.len() - 1]) / all;
            let top_p = f64::from(top_p);
            assert!(
                mass >= top_p - 1e-5 && mass - last < top_p + 1e-5,
                "{mass}, {last}"
            );
        }
    }

    #[test]
    fn sample_with_the_same_seed_repeats_tokens() {
        let logits = vocabulary();
        let drawn = |seed| {
            let sampling = Sampling {
                temperature: 2.0,
                top_k: Some(64),
                top_p: Some(0.95),
                seed,
                ..Sampling::greedy()
            };
            let mut sampler = Sampler::new(&sampling);
            let draw = |_| sampler.sample(&logits).expect("a logit is finite");
            (0..20).map(draw).collect::<Vec<_>>()
        };
        assert_eq!(drawn(Some(3)), drawn(Some(3)));
        assert_ne!(drawn(Some(3)), drawn(Some(4)));
        assert_ne!(drawn(None), drawn(None));
    }

    #[test]
    fn sample_with_nan_never_draws_it() {
        let logits = [f32::NAN, 0.0, f32::NEG_INFINITY, f32::NAN, 0.0];
        for sampling in [
            sampling(1.0, None, None),
            sampling(1.0, Some(4), None),
            sampling(1.0, None, Some(0.9)),
        ] {
            assert_frequencies(&sampling, &logits, &[0.0, 0.5, 0.0, 0.0, 0.5]);
        }
    }

    #[test]
    fn sample_with_infinite_logits_draws_only_those() {
        let logits = [f32::INFINITY, 0.0, f32::INFINITY];
        for sampling in [sampling(1.0, None, None), sampling(1.0, Some(2), Some(0.9))] {
            assert_frequencies(&sampling, &logits, &[0.5, 0.0, 0.5]);
        }
    }

    #[test]
    fn sample_without_finite_logits_is_an_error() {
        for sampling in [Sampling::greedy(), sampling(1.0, Some(2), Some(0.5))] {
            for logits in [&[f32::NAN, f32::NEG_INFINITY][..], &[]] {
                let error = Sampler::new(&sampling)
                    .sample(logits)
                    .expect_err("no token can be drawn");
                assert!(error.to_string().starts_with("logits: "), "{error}");
            }
        }
    }
}
