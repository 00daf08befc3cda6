//! Log-mel features of samples.

use super::clip::SAMPLE_RATE;
use super::features::{Features, check_rate};
use super::mel::MelFilters;
use crate::json;
use realfft::RealFftPlanner;
use serde::Deserialize;
use serde_json::Value;
use std::f64::consts::TAU;

/// The largest number of features of a frame.
const MOST_FEATURES: usize = 4096;

/// The longest frame or hop in samples, one second.
const LONGEST_FRAME: usize = SAMPLE_RATE as usize;

/// Log-mel features: windowed frames, their spectra, mel filters and logarithms.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LogMel {
    frame_length: usize,
    hop_length: usize,
    fft_length: usize,
    /// A periodic Hann window.
    window: Vec<f64>,
    preemphasis: Preemphasis,
    scale: f64,
    floor: f64,
    filters: MelFilters,
    /// The number of features of a frame.
    pub(super) columns: usize,
    /// The mean and the standard deviation of each column, which normalize the logarithms.
    mean: Option<Vec<f64>>,
    deviation: Option<Vec<f64>>,
}

/// A filter that raises high frequencies, by a share of the sample before.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Preemphasis {
    None,
    /// The first sample of a frame has no sample before.
    Htk(f64),
    /// The sample before the frame precedes the first sample.
    Continuous(f64),
}

/// The fields of a log-mel feature extractor.
#[derive(Deserialize)]
struct Fields {
    feature_size: Option<usize>,
    sampling_rate: Option<u32>,
    frame_length_ms: Option<f64>,
    hop_length_ms: Option<f64>,
    // These lengths follow from the lengths in milliseconds. Hugging Face Transformers writes but does not read them.
    frame_length: Option<usize>,
    hop_length: Option<usize>,
    min_frequency: Option<f64>,
    max_frequency: Option<f64>,
    preemphasis: Option<f64>,
    preemphasis_htk_flavor: Option<bool>,
    fft_overdrive: Option<bool>,
    dither: Option<f64>,
    input_scale_factor: Option<f64>,
    mel_floor: Option<f64>,
    per_bin_mean: Option<Vec<f64>>,
    per_bin_stddev: Option<Vec<f64>>,
}

impl LogMel {
    /// Reads a description. Missing fields have the default values of Hugging Face Transformers. The error is a reason.
    pub fn read(description: &Value) -> Result<Self, String> {
        Self::new(json::from_field("feature_extractor", description)?)
    }

    fn new(fields: Fields) -> Result<Self, String> {
        check_rate(fields.sampling_rate)?;
        let name = |field: &str| format!("feature_extractor.{field}");
        let columns = fields.feature_size.unwrap_or(128);
        if !(1..=MOST_FEATURES).contains(&columns) {
            return Err(format!(
                "{} is {columns}; expected from 1 to {MOST_FEATURES}",
                name("feature_size")
            ));
        }
        let frame_length = length(
            "frame_length",
            fields.frame_length_ms.unwrap_or(20.0),
            fields.frame_length,
        )?;
        let hop_length = length(
            "hop_length",
            fields.hop_length_ms.unwrap_or(10.0),
            fields.hop_length,
        )?;
        if fields.dither.is_some_and(|dither| dither != 0.0) {
            return Err(format!("{}: only 0 is supported", name("dither")));
        }
        let lowest = fields.min_frequency.unwrap_or(0.0);
        let highest = fields.max_frequency.unwrap_or(8000.0);
        if !(0.0 <= lowest && lowest < highest && highest <= f64::from(SAMPLE_RATE / 2)) {
            return Err(format!(
                "{} is {lowest} and max_frequency {highest}; expected 0 ≤ min_frequency < max_frequency ≤ {}",
                name("min_frequency"),
                SAMPLE_RATE / 2
            ));
        }
        let preemphasis = fields.preemphasis.unwrap_or(0.0);
        let scale = fields.input_scale_factor.unwrap_or(1.0);
        let floor = fields.mel_floor.unwrap_or(1e-3);
        for (field, value, is_valid) in [
            (
                "preemphasis",
                preemphasis,
                (0.0..=1.0).contains(&preemphasis),
            ),
            ("input_scale_factor", scale, (1e-6..=1e6).contains(&scale)),
            ("mel_floor", floor, (1e-30..=1e6).contains(&floor)),
        ] {
            if !is_valid {
                return Err(format!("{} is {value}, which is out of range", name(field)));
            }
        }
        for (field, values) in [
            ("per_bin_mean", &fields.per_bin_mean),
            ("per_bin_stddev", &fields.per_bin_stddev),
        ] {
            let is_wrong = |values: &Vec<f64>| {
                let is_number = |one: &f64| match field == "per_bin_stddev" {
                    true => one.is_normal(),
                    false => one.is_finite(),
                };
                values.len() != columns || !values.iter().all(is_number)
            };
            if values.as_ref().is_some_and(is_wrong) {
                return Err(format!(
                    "{}: expected {columns} numbers, which divide in the case of per_bin_stddev",
                    name(field)
                ));
            }
        }
        let overdrive = if fields.fft_overdrive == Some(true) {
            2
        } else {
            1
        };
        let fft_length = frame_length.next_power_of_two() * overdrive;
        let hann = |index: usize| 0.5 - 0.5 * (TAU * index as f64 / frame_length as f64).cos();
        Ok(Self {
            frame_length,
            hop_length,
            fft_length,
            // The window of Hugging Face Transformers is rounded to f32.
            window: (0..frame_length)
                .map(|index| f64::from(hann(index) as f32))
                .collect(),
            preemphasis: match (preemphasis > 0.0, fields.preemphasis_htk_flavor) {
                (false, _) => Preemphasis::None,
                (true, None | Some(true)) => Preemphasis::Htk(preemphasis),
                (true, Some(false)) => Preemphasis::Continuous(preemphasis),
            },
            scale,
            floor,
            filters: MelFilters::new(fft_length / 2 + 1, columns, [lowest, highest], SAMPLE_RATE),
            columns,
            mean: fields.per_bin_mean,
            deviation: fields.per_bin_stddev,
        })
    }

    /// Returns the number of frames whose samples all lie in the clip or before its start. A frame needs one sample
    /// more than its length.
    pub fn frames(&self, samples: usize) -> Result<usize, String> {
        let padded = samples + self.frame_length / 2;
        let Some(after_first) = padded.checked_sub(self.frame_length + 1) else {
            return Err(format!(
                "has {samples} samples at {SAMPLE_RATE} Hz; expected at least {}",
                self.frame_length + 1 - self.frame_length / 2
            ));
        };
        Ok(after_first / self.hop_length + 1)
    }

    /// Computes the features of samples, which stand between -1 and 1.
    pub fn features(&self, samples: &[f32]) -> Result<Features, String> {
        let frames = self.frames(samples.len())?;
        // Half of a frame of silence stands before the clip, so that the first frame is centered at its start.
        let silence = std::iter::repeat_n(0.0, self.frame_length / 2);
        let scaled = samples.iter().map(|one| f64::from(*one) * self.scale);
        let padded: Vec<f64> = silence.chain(scaled).collect();
        let fft = RealFftPlanner::<f64>::new().plan_fft_forward(self.fft_length);
        let (mut input, mut spectrum) = (fft.make_input_vec(), fft.make_output_vec());
        let mut scratch = fft.make_scratch_vec();
        let mut numbers = Vec::with_capacity(frames * self.columns);
        for frame in 0..frames {
            let start = frame * self.hop_length;
            input.fill(0.0);
            self.fill(&mut input, &padded[start..start + self.frame_length + 1]);
            fft.process_with_scratch(&mut input, &mut spectrum, &mut scratch)
                .expect("the buffers have the lengths of the plan");
            let magnitudes: Vec<f64> = spectrum.iter().map(|one| one.norm()).collect();
            let logarithms = self.filters.apply(&magnitudes).enumerate();
            numbers.extend(logarithms.map(|(column, sum)| {
                let logarithm = (sum + self.floor).ln();
                let mean = self.mean.as_ref().map_or(0.0, |mean| mean[column]);
                let deviation = self.deviation.as_ref();
                let deviation = deviation.map_or(1.0, |deviation| deviation[column]);
                ((logarithm - mean) / deviation) as f32
            }));
        }
        Ok(Features {
            frames,
            columns: self.columns,
            numbers,
        })
    }

    /// Writes the windowed samples of a frame. `samples` has one sample more than the frame.
    fn fill(&self, input: &mut [f64], samples: &[f64]) {
        for (index, (output, window)) in input.iter_mut().zip(&self.window).enumerate() {
            let sample = match self.preemphasis {
                Preemphasis::None => samples[index],
                Preemphasis::Htk(share) if index == 0 => samples[0] * (1.0 - share),
                Preemphasis::Htk(share) => samples[index] - share * samples[index - 1],
                Preemphasis::Continuous(share) => samples[index + 1] - share * samples[index],
            };
            *output = sample * window;
        }
    }
}

/// Converts milliseconds to samples, and checks the number of samples that the file has.
fn length(field: &str, milliseconds: f64, written: Option<usize>) -> Result<usize, String> {
    // Python's `round` rounds a half to even.
    let samples = (f64::from(SAMPLE_RATE) * milliseconds / 1000.0).round_ties_even();
    if !(2.0..=LONGEST_FRAME as f64).contains(&samples) {
        return Err(format!(
            "feature_extractor.{field}_ms is {milliseconds}; expected 2 to {LONGEST_FRAME} samples"
        ));
    }
    match written {
        Some(other) if other != samples as usize => Err(format!(
            "feature_extractor.{field} is {other}; expected {samples}, which {field}_ms gives"
        )),
        _ => Ok(samples as usize),
    }
}
