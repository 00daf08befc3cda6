//! A bank of triangular filters on the mel scale.

/// Triangular filters, which overlap by half on the mel scale. The scale is that of HTK:
/// `mel = 2595 · log10(1 + hertz / 700)`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MelFilters(Vec<Filter>);

/// The weights of a filter. The weights of all other frequency bins are 0.
#[derive(Clone, Debug, PartialEq)]
struct Filter {
    first_bin: usize,
    weights: Vec<f64>,
}

impl MelFilters {
    /// Creates `count` filters from `lowest` to `highest` hertz. The bins are equally spaced from 0 to half of
    /// `sample_rate`.
    pub fn new(bins: usize, count: usize, [lowest, highest]: [f64; 2], sample_rate: u32) -> Self {
        let frequency = |bin: usize| f64::from(sample_rate / 2) * bin as f64 / (bins - 1) as f64;
        let (first, last) = (mel(lowest), mel(highest));
        let edge = |index: usize| hertz(first + (last - first) * index as f64 / (count + 1) as f64);
        let filter = |index: usize| {
            let [start, peak, end] = [edge(index), edge(index + 1), edge(index + 2)];
            let weight = |bin: usize| {
                let rising = (frequency(bin) - start) / (peak - start);
                let falling = (end - frequency(bin)) / (end - peak);
                rising.min(falling).max(0.0)
            };
            let first_bin = (0..bins).find(|bin| weight(*bin) > 0.0).unwrap_or(0);
            let weights = (first_bin..bins).map(weight);
            Filter {
                first_bin,
                weights: weights.take_while(|weight| *weight > 0.0).collect(),
            }
        };
        Self((0..count).map(filter).collect())
    }

    /// Returns the output of each filter for the magnitudes of the bins.
    pub fn apply(&self, magnitudes: &[f64]) -> impl Iterator<Item = f64> {
        self.0.iter().map(|filter| {
            let bins = magnitudes[filter.first_bin..].iter();
            let products = bins.zip(&filter.weights);
            products.map(|(magnitude, weight)| magnitude * weight).sum()
        })
    }
}

fn mel(hertz: f64) -> f64 {
    2595.0 * (1.0 + hertz / 700.0).log10()
}

fn hertz(mel: f64) -> f64 {
    700.0 * (10f64.powf(mel / 2595.0) - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A filter between two bins sees nothing. The peak of a filter at a bin has the weight 1.
    #[test]
    fn apply_of_flat_spectrum_sums_weights() {
        let filters = MelFilters::new(257, 128, [0.0, 8000.0], 16_000);
        let sums: Vec<f64> = filters.apply(&[1.0; 257]).collect();
        assert_eq!(sums.len(), 128);
        assert!(sums.iter().all(|sum| (0.0..6.0).contains(sum)), "{sums:?}");
        assert!(sums[127] > sums[40]);
    }
}
