//! Draws on the device: the tensors by which kernels draw what samplers would.

use super::{Sampling, sampler::Sampler};
use crate::op::{argmax::argmax, sample};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The samplers of a batch's sequences, on its device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSampler {
    /// Nothing where the likeliest is taken of what penalty and suppressed tokens leave.
    draw: Option<sample::Draw>,
    /// `[2 · batch]`.
    seeds: Tensor<1, Int>,
    /// `[batch · words]`, and what tokens are penalized by.
    seen: Option<(Tensor<1, Int>, f32)>,
    /// `[words]`.
    suppressed: Option<Tensor<1, Int>>,
}

impl DeviceSampler {
    /// Of one sampler a row of logits of `dtype` for so many tokens; `None` where the kernels do not serve, or the samplers' options are
    /// not the same but for their seeds.
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
        let seeds = samplers.iter().flat_map(|sampler| {
            let seed = sampler.seed();
            [seed as u32, (seed >> 32) as u32]
        });
        let penalty = sampling.penalty();
        let seen = || {
            let rows = samplers.iter();
            let rows = rows.flat_map(|sampler| words(sampler.seen(), vocabulary));
            upload(rows, device)
        };
        let suppressed = &sampling.suppress_tokens;
        Some(Self {
            draw: sampling.draw(vocabulary),
            seeds: upload(seeds, device),
            seen: (penalty != 1.0).then(|| (seen(), penalty)),
            suppressed: (!suppressed.is_empty())
                .then(|| upload(words(suppressed, vocabulary), device)),
        })
    }

    /// The next token of each row of `[batch, vocabulary]`: `[batch]`, −1 where a row has none. `read` are the tokens, if any, that the
    /// samplers' texts have got since, at `positions`, or the positions of their last ones. To draw once more changes nothing.
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
    /// Whether it is the same but for the seed.
    fn is_as(&self, other: &Self) -> bool {
        let seed = other.seed;
        *other
            == Self {
                seed,
                ..self.clone()
            }
    }

    /// What the kernels draw by; `None` where it is [greedy](Self::is_greedy).
    fn draw(&self, vocabulary: usize) -> Option<sample::Draw> {
        let top_k = self.top_k.filter(|top_k| *top_k < vocabulary);
        let top_p = self.top_p.filter(|top_p| *top_p < 1.0);
        (!self.is_greedy()).then(|| sample::Draw {
            // A smaller one is 0 on devices without subnormal numbers.
            temperature: self.temperature.max(f32::MIN_POSITIVE),
            top_k: top_k.map(|top_k| top_k as u32),
            top_p: top_p.map(|top_p| (f64::from(top_p) * 2f64.powi(32)).ceil() as u32),
            least: least_logarithm(self.min_p.unwrap_or(0.0)),
        })
    }
}

/// The least number whose power of e is `weight`, from 0 to 1, at least.
fn least_logarithm(weight: f32) -> f32 {
    // Floats from 0 on are in the order of their bits.
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

/// A bit for each of `tokens`, in words of 32; those that the vocabulary lacks have none.
fn words<'a>(tokens: impl IntoIterator<Item = &'a u32>, vocabulary: usize) -> Vec<u32> {
    let mut words = vec![0; vocabulary.div_ceil(32)];
    for token in tokens {
        if (*token as usize) < vocabulary {
            words[*token as usize / 32] |= 1 << (token % 32);
        }
    }
    words
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
    fn the_least_logarithm_is_where_min_p_begins() {
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
    fn tokens_are_bits() {
        assert_eq!(words(&[0, 31, 33, 34, 90], 34), [1 << 31 | 1, 2]);
    }
}
