//! Bicubic resizing with antialiasing, in integers, as `torchvision.transforms.v2.functional.resize` computes it for
//! 8-bit images on a CPU. The results are equal to torchvision's in every bit.

use super::image::Pixels;

const CHANNELS: usize = 3;

/// The parameter of the cubic filter of antialiased resizing in PyTorch and Pillow.
const CUBIC: f64 = -0.5;

/// The half width of the cubic filter in pixels.
const SUPPORT: f64 = 2.0;

/// The largest number of bytes of the weights along one axis, for each pixel of its longer side: five weights of 12
/// bytes while they are rounded, and two windows.
pub(super) const WEIGHT_BYTES: usize = 5 * 12 + 2 * 32;

/// The weights of the source pixels of each target pixel along one axis. The weights are integers with `precision`
/// bits after the point.
struct Weights {
    /// The first source pixel and the weights of this pixel and the following pixels, for each target pixel.
    windows: Vec<(usize, Vec<i32>)>,
    precision: u32,
}

impl Weights {
    fn new(source: usize, target: usize) -> Self {
        let scale = source as f64 / target as f64;
        let (support, inverse) = match scale >= 1.0 {
            true => (SUPPORT * scale, 1.0 / scale),
            false => (SUPPORT, 1.0),
        };
        let mut largest = 0.0f64;
        let floats: Vec<(usize, Vec<f64>)> = (0..target)
            .map(|index| {
                let center = scale * (index as f64 + 0.5);
                let first = (center - support + 0.5).max(0.0) as usize;
                let end = ((center + support + 0.5) as usize).min(source);
                let distance = |pixel: usize| (pixel as f64 - center + 0.5) * inverse;
                let weights: Vec<f64> = (first..end).map(|pixel| cubic(distance(pixel))).collect();
                let sum: f64 = weights.iter().sum();
                let weights: Vec<f64> = weights.iter().map(|weight| weight / sum).collect();
                largest = weights.iter().copied().fold(largest, f64::max);
                (first, weights)
            })
            .collect();
        // The largest precision at which all weights fit in 16 bits.
        let fits =
            |bits: &u32| ((0.5 + largest * f64::from(1u32 << (bits + 1))) as i32) < (1 << 15);
        let precision = (0..22).take_while(fits).count() as u32;
        let rounded = |weight: f64| {
            let half = if weight < 0.0 { -0.5 } else { 0.5 };
            (half + weight * f64::from(1u32 << precision)) as i32
        };
        let windows = floats
            .into_iter()
            .map(|(first, weights)| (first, weights.into_iter().map(rounded).collect()))
            .collect();
        Self { windows, precision }
    }

    /// Rounds a weighted sum to a pixel's channel. The sum starts at [`half`](Self::half).
    fn channel(&self, sum: i32) -> u8 {
        (sum >> self.precision).clamp(0, 255) as u8
    }

    /// One half at the precision of the weights, which rounds a sum to the nearest integer.
    fn half(&self) -> i32 {
        match self.precision {
            0 => 0,
            bits => 1 << (bits - 1),
        }
    }
}

fn cubic(distance: f64) -> f64 {
    let x = distance.abs();
    match x {
        _ if x < 1.0 => ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0,
        _ if x < 2.0 => ((CUBIC * x - 5.0 * CUBIC) * x + 8.0 * CUBIC) * x - 4.0 * CUBIC,
        _ => 0.0,
    }
}

/// Resizes pixels to `width` and `height`. Returns `[height, width, 3]`.
pub(super) fn resize(pixels: &Pixels, width: usize, height: usize) -> Vec<u8> {
    let rows = match pixels.width == width {
        true => None,
        false => Some(resize_rows(&pixels.rgb, pixels.width, width)),
    };
    let rows = rows.as_deref().unwrap_or(&pixels.rgb);
    match pixels.height == height {
        true => rows.to_vec(),
        false => resize_columns(rows, width, pixels.height, height),
    }
}

fn resize_rows(rgb: &[u8], source: usize, target: usize) -> Vec<u8> {
    let weights = Weights::new(source, target);
    let mut resized = Vec::with_capacity(rgb.len() / source * target);
    for row in rgb.chunks_exact(source * CHANNELS) {
        for (first, window) in &weights.windows {
            let mut sums = [weights.half(); CHANNELS];
            let pixels = row[first * CHANNELS..].as_chunks::<CHANNELS>().0;
            for (weight, pixel) in window.iter().zip(pixels) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += weight * i32::from(*value);
                }
            }
            resized.extend(sums.map(|sum| weights.channel(sum)));
        }
    }
    resized
}

fn resize_columns(rgb: &[u8], width: usize, source: usize, target: usize) -> Vec<u8> {
    let weights = Weights::new(source, target);
    let row_bytes = width * CHANNELS;
    let mut resized = Vec::with_capacity(target * row_bytes);
    let mut sums = vec![0; row_bytes];
    for (first, window) in &weights.windows {
        sums.fill(weights.half());
        let rows = rgb[first * row_bytes..].chunks_exact(row_bytes);
        for (weight, row) in window.iter().zip(rows) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += weight * i32::from(*value);
            }
        }
        resized.extend(sums.iter().map(|sum| weights.channel(*sum)));
    }
    resized
}
