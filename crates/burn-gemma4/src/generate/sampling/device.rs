//! Sampling on the device. The kernels draw the same tokens as the samplers on the host would draw.

use super::sampler::Sampler;
use crate::config::sampling::Sampling;
use crate::op::{argmax::argmax, in_place::overwrite_integers, sample};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The settings and state of a batch's samplers, as device tensors.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSampler {
    /// The settings of a random draw. `None` means greedy sampling: the argmax after repetition penalty and suppressed tokens.
    draw: Option<sample::Draw>,
    /// The 64-bit seed of each sequence as a low and a high word: `[2 · batch]`.
    seeds: Tensor<1, Int>,
    /// The tokens that each sequence already contains, and the repetition penalty. The tokens are a bit mask of 32-bit
    /// words, `[batch · words]`. `None` if the penalty is 1.
    seen: Option<(Tensor<1, Int>, f32)>,
    /// The set of suppressed tokens as a bit mask of 32-bit words, `[words]`, or `None` if no tokens are suppressed.
    suppressed: Option<Tensor<1, Int>>,
}

impl DeviceSampler {
    /// Uploads the samplers, one per row of logits. `dtype` is the dtype of the logits. Returns `None` if the kernels
    /// do not support the vocabulary, the dtype or the samplers' options.
    pub fn new(
        samplers: &[&Sampler],
        vocabulary: usize,
        dtype: DType,
        device: &Device,
    ) -> Option<Self> {
        let sampling = samplers.first()?.sampling();
        let is_one = samplers
            .iter()
            .all(|sampler| sampler.sampling().is_as(sampling));
        if !is_one || !sample::draws(device, dtype, vocabulary) {
            return None;
        }
        let seeds: Vec<u64> = samplers.iter().map(|sampler| sampler.seed()).collect();
        let penalty = sampling.penalty();
        let seen = || {
            let rows = samplers.iter();
            let rows = rows.flat_map(|sampler| words(sampler.seen(), vocabulary));
            upload(rows, device)
        };
        let suppressed = &sampling.suppress_tokens;
        Some(Self {
            draw: sampling.draw(vocabulary),
            seeds: upload(seeds.iter().flat_map(halves), device),
            seen: (penalty != 1.0).then(|| (seen(), penalty)),
            suppressed: (!suppressed.is_empty())
                .then(|| upload(words(suppressed, vocabulary), device)),
        })
    }

    /// Replaces the seeds of all rows in place. A captured CUDA graph that draws with this sampler stays valid.
    pub fn overwrite_seeds(&self, seeds: &[u64]) {
        let words = upload(seeds.iter().flat_map(halves), &self.seeds.device());
        overwrite_integers(self.seeds.clone(), words.into_dispatch());
    }

    /// Chooses the next token of each row of the logits `[batch, vocabulary]`. Returns token ids `[batch]`, with −1 for
    /// a row without a possible token.
    ///
    /// `positions` holds the position of each sequence's last token. If the bit mask of seen tokens does not include
    /// the last tokens yet, `read` holds the last token of each sequence. Equal arguments give equal tokens.
    pub fn choose(
        &self,
        logits: Tensor<2>,
        read: Option<Tensor<1, Int>>,
        positions: Tensor<1, Int>,
    ) -> Tensor<1, Int> {
        let mut logits = logits;
        if let Some((seen, penalty)) = &self.seen {
            let seen = match read {
                Some(read) => sample::mark(seen.clone(), read),
                None => seen.clone(),
            };
            logits = sample::penalize(logits, seen, *penalty);
        }
        if let Some(suppressed) = &self.suppressed {
            logits = sample::suppress(logits, suppressed.clone());
        }
        match self.draw {
            Some(options) => sample::draw(logits, self.seeds.clone(), positions, options),
            None => argmax(logits),
        }
    }
}

impl Sampling {
    /// True if two [`Sampling`] values have the same options. The seeds may differ.
    fn is_as(&self, other: &Self) -> bool {
        let seed = other.seed;
        *other
            == Self {
                seed,
                ..self.clone()
            }
    }

    /// Returns the settings of the sampling kernel, or `None` if the sampling is [greedy](Self::is_greedy).
    fn draw(&self, vocabulary: usize) -> Option<sample::Draw> {
        let top_k = self.top_k.filter(|top_k| *top_k < vocabulary);
        let top_p = self.top_p.filter(|top_p| *top_p < 1.0);
        (!self.is_greedy()).then(|| sample::Draw {
            // Raise a subnormal temperature to the smallest normal number, because some devices flush subnormal numbers to 0.
            temperature: self.temperature.max(f32::MIN_POSITIVE),
            top_k: top_k.map(|top_k| top_k as u32),
            top_p: top_p.map(|top_p| (f64::from(top_p) * 2f64.powi(32)).ceil() as u32),
            least: least_logarithm(self.min_p.unwrap_or(0.0)),
        })
    }
}

/// Returns the smallest f32 `x` with `exp(x) >= weight`. The weight is from 0 to 1, so `x` is at most 0.
fn least_logarithm(weight: f32) -> f32 {
    // Search by bisection for the bit pattern of `−x`, which is at least 0. Non-negative floats have the same order as their
    // bit patterns.
    let (mut last, mut first_below) = (0, f32::INFINITY.to_bits());
    while first_below - last > 1 {
        let middle = last + (first_below - last) / 2;
        match (-f32::from_bits(middle)).exp() >= weight {
            true => last = middle,
            false => first_below = middle,
        }
    }
    -f32::from_bits(last)
}

/// Returns the set of `tokens` as a bit mask in 32-bit words. Tokens outside the vocabulary are ignored.
fn words<'a>(tokens: impl IntoIterator<Item = &'a u32>, vocabulary: usize) -> Vec<u32> {
    let mut words = vec![0; vocabulary.div_ceil(32)];
    for token in tokens {
        if (*token as usize) < vocabulary {
            words[*token as usize / 32] |= 1 << (token % 32);
        }
    }
    words
}

/// Returns the low and the high word of a seed.
fn halves(seed: &u64) -> [u32; 2] {
    [*seed as u32, (*seed >> 32) as u32]
}

pub(crate) fn upload(words: impl IntoIterator<Item = u32>, device: &Device) -> Tensor<1, Int> {
    let words: Vec<i32> = words.into_iter().map(|word| word as i32).collect();
    let shape = [words.len()];
    Tensor::from_data(TensorData::new(words, shape), (device, DType::I32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_logarithm_is_the_smallest_that_reaches_the_weight() {
        assert_eq!(least_logarithm(0.0), f32::MIN);
        for weight in [1.0f32, 0.999_999_9, 0.5, 0.05, 1e-10, 1e-38, 1e-45] {
            let least = least_logarithm(weight);
            assert!(
                least.exp() >= weight && least.next_down().exp() < weight,
                "{weight}"
            );
        }
    }

    #[test]
    fn words_have_a_bit_for_each_token() {
        assert_eq!(words(&[0, 31, 33, 34, 90], 34), [1 << 31 | 1, 2]);
    }
}
