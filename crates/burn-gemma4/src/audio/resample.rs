//! The conversion of sample rates, by the FFT resampler of the crate `rubato`. The anti-aliasing filter is a sinc with
//! a Blackman-Harris window. Hugging Face Transformers converts with `soxr`, whose filter differs near the cutoff.

use super::clip::{RATES, SAMPLE_RATE};
use rubato::audioadapter_buffers::owned::InterleavedOwned;
use rubato::{Fft, FixedSync, Resampler};

/// The smallest length of a block in samples, at the lower of the two rates. The filter has the block's length, so
/// longer blocks have a sharper cutoff.
const BLOCK: usize = 1024;

/// The memory for each sample of a block, in bytes. An FFT of a length with a large prime factor needs up to four times
/// its length. The most that was measured is 81 bytes, at 383,987 Hz (x86-64, 2026-11-30,
/// `cargo test --test memory audio`).
const BLOCK_BYTES: u64 = 112;

/// Converts the samples of one channel to [`SAMPLE_RATE`]. The filter's delay is removed.
///
/// # Panics
/// Panics if `sample_rate` is 0.
pub(super) fn resampled(samples: &[f32], sample_rate: u32) -> Vec<f32> {
    let rates = [sample_rate, SAMPLE_RATE].map(|rate| rate as usize);
    let block = block(sample_rate);
    let mut resampler = Fft::<f32>::new_custom(
        rates[0],
        rates[1],
        block,
        1,
        1,
        rubato::WindowFunction::BlackmanHarris2,
        FixedSync::Both,
    )
    .expect("the sample rates are not 0");
    let count = samples.len();
    let input = InterleavedOwned::new_from(samples.to_vec(), 1, count)
        .expect("one channel has one sample for each frame");
    let output = resampler
        .process_all(&input, count, None)
        .expect("the output is allocated for this input");
    let mut output = output.take_data();
    // The crate rounds the product of the length and an inexact ratio up.
    output.truncate(
        (count as u64 * u64::from(SAMPLE_RATE)).div_ceil(u64::from(sample_rate)) as usize,
    );
    output
}

/// Returns an upper bound of the memory that the conversion of a sample rate needs besides the samples, in bytes.
/// `None` is an unknown rate.
pub(super) fn resampling_bytes(sample_rate: Option<u32>) -> u64 {
    let of_rate = |rate: u32| {
        let input = block(rate) as u64;
        let output = (input * u64::from(SAMPLE_RATE)).div_ceil(u64::from(rate));
        BLOCK_BYTES * (input + output)
    };
    match sample_rate {
        Some(SAMPLE_RATE) => 0,
        Some(rate) => of_rate(rate),
        // The shortest block is at most the rate, and a block of an odd rate has twice that length.
        None => of_rate(RATES.end() - 1),
    }
}

/// Returns the length of a block in samples of `sample_rate`. The filter delays by half of a block, which is whole in
/// both rates only for an even multiple of the shortest block.
fn block(sample_rate: u32) -> usize {
    let ratio = sample_rate.div_ceil(SAMPLE_RATE) as usize;
    (BLOCK * ratio).next_multiple_of(2 * shortest_block(sample_rate))
}

/// Returns the smallest number of samples that last as long as a whole number of samples of [`SAMPLE_RATE`].
fn shortest_block(sample_rate: u32) -> usize {
    let (mut divisor, mut rest) = (sample_rate, SAMPLE_RATE);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (sample_rate / divisor) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::TAU;

    /// A sine of `frequency` Hz, of one second.
    fn sine(frequency: f64, rate: u32) -> Vec<f32> {
        let phase = |index| TAU * frequency * f64::from(index) / f64::from(rate);
        (0..rate).map(|index| phase(index).sin() as f32).collect()
    }

    /// Compares the inner half of a second, where the filter sees no edge.
    fn error(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let inner = found.len() / 4..3 * found.len() / 4;
        let pairs = found[inner.clone()].iter().zip(&expected[inner]);
        pairs.fold(0.0, |most, (one, other)| most.max((one - other).abs()))
    }

    #[test]
    fn resampled_sine_below_cutoff_is_that_sine() {
        for rate in [
            1000, 8000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000, 384_000,
        ] {
            let frequency = 0.3 * f64::from(rate.min(SAMPLE_RATE));
            let found = resampled(&sine(frequency, rate), rate);
            let error = error(&found, &sine(frequency, SAMPLE_RATE));
            assert!(error < 1e-4, "{rate}: {error}");
        }
    }

    #[test]
    fn resampled_sine_above_cutoff_is_silence() {
        for rate in [22_050, 44_100, 48_000] {
            let found = resampled(&sine(9500.0, rate), rate);
            let error = error(&found, &[0.0; SAMPLE_RATE as usize]);
            assert!(error < 1e-4, "{rate}: {error}");
        }
    }
}
