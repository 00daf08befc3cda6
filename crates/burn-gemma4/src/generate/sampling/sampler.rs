//! Draws tokens: penalty and suppressed tokens, then temperature, top-k, top-p, min-p, each over what the last has left.

use super::Sampling;
use crate::{Gemma4Error, op::sample::random::random_bits};
use std::cmp::Ordering;
use std::collections::HashSet;

/// Draws tokens by a [`Sampling`]. One draws for one text: a draw's random number is its seed's for the token's position.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// Tokens of the text.
    position: usize,
    /// Tokens that are not drawn before the text has so many tokens.
    suppressed: Vec<(usize, Vec<u32>)>,
    /// The tokens that the text has, where they are penalized.
    seen: HashSet<u32>,
    /// Kept from draw to draw, to allocate once.
    candidates: Vec<Candidate>,
    /// Kept likewise.
    changed: Vec<f32>,
}

impl Sampler {
    /// A sampler of a text that has no tokens yet.
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

    /// Tokens that the text has without this sampler having drawn them: its prompt's.
    pub fn read(&mut self, tokens: &[u32]) {
        self.position += tokens.len();
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.extend(tokens);
        }
    }

    /// Draws none of `tokens` as one of the next `count`.
    pub(crate) fn suppress_for(&mut self, count: usize, tokens: &[u32]) {
        if count > 0 && !tokens.is_empty() {
            let end = self.position.saturating_add(count);
            self.suppressed.push((end, tokens.to_vec()));
        }
    }

    /// True if [`suppress_for`](Self::suppress_for) holds for the next token.
    pub(crate) fn suppresses_now(&self) -> bool {
        self.suppressed.iter().any(|(end, _)| self.position < *end)
    }

    /// A token by its logits, one a token of the vocabulary. A logit that is NaN counts as −∞.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where every logit is NaN or −∞, so that there is no token to draw, and those of [`Sampling::validate`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Gemma4Error> {
        self.sampling.validate()?;
        let token = self.choose(logits)?;
        self.read(&[token]);
        Ok(token)
    }

    /// A token by its logits and by options that make sense, which it does not read.
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

    #[cfg(feature = "cube")]
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Of the token that is drawn next.
    #[cfg(feature = "cube")]
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    #[cfg(feature = "cube")]
    pub(crate) fn seen(&self) -> &HashSet<u32> {
        &self.seen
    }

    /// Applies the penalty and the suppressed tokens.
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
        let likeliest = possible(logits)
            .reduce(|best, next| if next.logit > best.logit { next } else { best })
            .ok_or_else(|| Gemma4Error::no_number(logits.len()))?;
        if self.sampling.is_greedy() {
            return Ok(likeliest.token);
        }
        self.candidates.clear();
        self.candidates.extend(possible(logits));
        if let Some(top_k) = self.sampling.top_k {
            self.keep_top_k(top_k);
        }
        for candidate in &mut self.candidates {
            candidate.weigh(likeliest.logit, self.sampling.temperature);
        }
        match self.sampling.top_p {
            Some(top_p) if top_p < 1.0 => self.keep_top_p(f64::from(top_p)),
            _ => (),
        }
        if let Some(min_p) = self.sampling.min_p {
            // The likeliest weighs 1.
            self.candidates
                .retain(|candidate| candidate.weight >= min_p);
        }
        Ok(self.draw().unwrap_or(likeliest.token))
    }

    /// Keeps the `top_k` likeliest, and as transformers does, what ties with the last of them.
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

    /// Keeps the likeliest, until their probabilities reach `top_p`. Few usually do, so the rest of a
    /// vocabulary is not sorted.
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

    /// One of the candidates by their weights, in the tokens' order; none where rounding passes over the last one.
    fn draw(&mut self) -> Option<u32> {
        self.candidates
            .sort_unstable_by_key(|candidate| candidate.token);
        // As many of the bits as the number holds.
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
    /// In proportion to its probability; 1 for the likeliest token.
    weight: f32,
}

impl Candidate {
    /// The likelier first, of equal ones the lower token. No two are equal in it, so what is drawn does not
    /// depend on how sorting treats equals.
    fn order(&self, other: &Self) -> Ordering {
        let by_logit = other.logit.total_cmp(&self.logit);
        by_logit.then(self.token.cmp(&other.token))
    }

    fn weigh(&mut self, largest: f32, temperature: f32) {
        // Apart, because ∞ - ∞ is NaN.
        self.weight = if self.logit == largest {
            1.0
        } else {
            ((self.logit - largest) / temperature).exp()
        };
    }
}

/// The tokens whose probability is not 0 or unknown.
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

    /// How often each token is drawn.
    fn frequencies(sampling: &Sampling, logits: &[f32]) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut sampler = Sampler::new(sampling);
        let mut counts = vec![0usize; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(logits).expect("a token") as usize] += 1;
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
            assert!(close && never, "{found:?} is not {expected:?}");
        }
    }

    /// Logits of the given probabilities.
    fn logits(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    /// A vocabulary of Gemma's size in no order, with many ties.
    fn vocabulary() -> Vec<f32> {
        let scatter = |i: u32| i.wrapping_mul(2_654_435_761) >> 18;
        (0..262_144).map(|i| scatter(i) as f32 / 1000.0).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let logits = [f32::NAN, 1.0, 3.0, 3.0, f32::NEG_INFINITY];
        for sampling in [
            Sampling::greedy(),
            sampling(0.0, Some(3), None),
            sampling(1.0, Some(1), None),
        ] {
            assert!(sampling.is_greedy());
            assert_eq!(Sampler::new(&sampling).sample(&logits).expect("a token"), 2);
        }
    }

    #[test]
    fn temperature_changes_probabilities() {
        let logits = logits(&[0.5, 0.25, 0.25]);
        assert_frequencies(&sampling(1.0, None, None), &logits, &[0.5, 0.25, 0.25]);
        // Squared and summed up to 1.
        assert_frequencies(
            &sampling(0.5, None, None),
            &logits,
            &[2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0],
        );
        assert_frequencies(&sampling(1e-30, None, None), &logits, &[1.0, 0.0, 0.0]);
        assert_frequencies(&sampling(1e30, None, None), &logits, &[1.0 / 3.0; 3]);
    }

    #[test]
    fn top_k_keeps_the_largest_and_their_ties() {
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
    fn top_p_keeps_the_token_that_reaches_it() {
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
    fn top_p_counts_what_temperature_and_top_k_leave() {
        let logits = logits(&[0.1, 0.3, 0.2, 0.4]);
        // Of 0.4, 0.3, 0.2 the first two are 7/9, which reaches 0.75, though of all they are only 0.7.
        let expected = [0.0, 3.0 / 7.0, 0.0, 4.0 / 7.0];
        assert_frequencies(&sampling(1.0, Some(3), Some(0.75)), &logits, &expected);
        // Squared: 0.16, 0.09, 0.04, 0.01; the first is 0.53 of their sum.
        assert_frequencies(
            &sampling(0.5, None, Some(0.5)),
            &logits,
            &[0.0, 0.0, 0.0, 1.0],
        );
    }

    /// What is not sorted in full must be what a full sort gives.
    #[test]
    fn a_large_nucleus_is_the_one_of_a_full_sort() {
        let logits = vocabulary();
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| {
            let by_logit = logits[b as usize].total_cmp(&logits[a as usize]);
            by_logit.then(a.cmp(&b))
        });
        for (temperature, top_p) in [(0.2, 0.3), (1.0, 0.5), (5.0, 0.9), (5.0, 0.999)] {
            let mut sampler = Sampler::new(&sampling(temperature, None, Some(top_p)));
            sampler.sample(&logits).expect("a token");
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
    fn the_same_seed_draws_the_same_tokens() {
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
            let draw = |_| sampler.sample(&logits).expect("a token");
            (0..20).map(draw).collect::<Vec<_>>()
        };
        assert_eq!(drawn(Some(3)), drawn(Some(3)));
        assert_ne!(drawn(Some(3)), drawn(Some(4)));
        assert_ne!(drawn(None), drawn(None));
    }

    #[test]
    fn what_is_not_a_number_is_never_drawn() {
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
    fn infinity_beats_everything() {
        let logits = [f32::INFINITY, 0.0, f32::INFINITY];
        for sampling in [sampling(1.0, None, None), sampling(1.0, Some(2), Some(0.9))] {
            assert_frequencies(&sampling, &logits, &[0.5, 0.0, 0.5]);
        }
    }

    #[test]
    fn no_number_is_an_error() {
        for sampling in [Sampling::greedy(), sampling(1.0, Some(2), Some(0.5))] {
            for logits in [&[f32::NAN, f32::NEG_INFINITY][..], &[]] {
                let error = Sampler::new(&sampling).sample(logits).expect_err("nothing");
                assert!(error.to_string().starts_with("logits: "), "{error}");
            }
        }
    }
}
