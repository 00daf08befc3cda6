//! The features of audio: log-mel frames for an audio tower, or frames of samples for models without a tower. The
//! method is that of Hugging Face Transformers' `Gemma4AudioFeatureExtractor` and
//! `Gemma4UnifiedAudioFeatureExtractor`.

use super::clip::{Audio, SAMPLE_RATE};
use super::log_mel::LogMel;
use crate::json;
use serde::Deserialize;
use serde_json::Value;

/// Features, `[frames, columns]`.
#[derive(Debug)]
pub(crate) struct Features {
    pub frames: usize,
    pub columns: usize,
    pub numbers: Vec<f32>,
}

impl Features {
    /// The size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.numbers[..])
    }
}

/// Computes the features of clips.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FeatureExtractor {
    /// Log-mel frames. Four frames become one soft token.
    LogMel(Box<LogMel>),
    /// Frames of this many samples. A frame becomes one soft token.
    Samples(usize),
}

/// The fields of a feature extractor of models without a tower.
#[derive(Deserialize)]
struct SampleFields {
    sampling_rate: Option<u32>,
    audio_samples_per_token: Option<usize>,
}

impl FeatureExtractor {
    /// Reads a log-mel feature extractor. Missing fields have the default values of Hugging Face Transformers.
    ///
    /// # Errors
    /// Returns a reason that names the field whose value is impossible or not supported.
    pub fn log_mel(description: &Value) -> Result<Self, String> {
        LogMel::read(description).map(|log_mel| Self::LogMel(Box::new(log_mel)))
    }

    /// Reads the feature extractor of a model without a tower, whose soft tokens have `samples` samples.
    ///
    /// # Errors
    /// Returns a reason if the description has another number of samples or another sample rate.
    pub fn samples(description: &Value, samples: usize) -> Result<Self, String> {
        let fields: SampleFields = json::from_field("feature_extractor", description)?;
        check_rate(fields.sampling_rate)?;
        match fields.audio_samples_per_token {
            Some(other) if other != samples => Err(format!(
                "feature_extractor.audio_samples_per_token is {other}; expected audio_embed_dim of config.json, {samples}"
            )),
            _ => Ok(Self::Samples(samples)),
        }
    }

    /// The number of features of a frame.
    pub fn columns(&self) -> usize {
        match self {
            Self::LogMel(log_mel) => log_mel.columns,
            Self::Samples(samples) => *samples,
        }
    }

    /// Returns the number of soft tokens of a clip with `samples` samples.
    ///
    /// # Errors
    /// Returns a reason if the clip is shorter than one frame.
    pub fn soft_tokens(&self, samples: usize) -> Result<usize, String> {
        match self {
            // Two convolutions with a stride of 2 follow.
            Self::LogMel(log_mel) => Ok(log_mel.frames(samples)?.div_ceil(2).div_ceil(2)),
            Self::Samples(length) => Ok(samples.div_ceil(*length)),
        }
    }

    /// Returns the size of the features of a clip with `samples` samples in memory, in bytes. A clip without a whole
    /// frame has no features.
    pub fn bytes(&self, samples: usize) -> usize {
        let frames = match self {
            Self::LogMel(log_mel) => log_mel.frames(samples).unwrap_or(0),
            Self::Samples(length) => samples.div_ceil(*length),
        };
        frames * self.columns() * size_of::<f32>()
    }

    /// Computes the features of a clip.
    ///
    /// # Errors
    /// Returns a reason if the clip is shorter than one frame.
    pub fn features(&self, audio: &Audio) -> Result<Features, String> {
        match self {
            Self::LogMel(log_mel) => log_mel.features(audio.samples()),
            Self::Samples(length) => {
                let frames = audio.samples().len().div_ceil(*length);
                let mut numbers = audio.samples().to_vec();
                numbers.resize(frames * length, 0.0);
                Ok(Features {
                    frames,
                    columns: *length,
                    numbers,
                })
            }
        }
    }
}

/// Refuses all sample rates except that of [`Audio`].
pub(super) fn check_rate(sampling_rate: Option<u32>) -> Result<(), String> {
    match sampling_rate {
        None | Some(SAMPLE_RATE) => Ok(()),
        Some(other) => Err(format!(
            "feature_extractor.sampling_rate is {other}; only {SAMPLE_RATE} is supported"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;
    use serde_json::json;
    use std::{fs, path::PathBuf};

    fn read(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/audio");
        fs::read(folder.join(name)).expect("the fixture is readable")
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        let numbers = bytes.as_chunks::<4>().0.iter();
        numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// Compares with Hugging Face Transformers, whose spectra are rounded to f32. A rounded magnitude moves the
    /// logarithm of a silent bin by at most 4e-5 (2026-11-29).
    #[test]
    fn features_of_every_extractor_equal_transformers() {
        let file = read("features.safetensors");
        let tensors = SafeTensors::deserialize(&file).expect("the fixture parses");
        let tensor = |name: &str| tensors.tensor(name).expect("the fixture has the tensor");
        let audio = Audio::from_samples(&floats(tensor("wave").data()), SAMPLE_RATE);
        let audio = audio.expect("the samples are valid");
        let descriptions: Vec<Value> =
            serde_json::from_slice(&read("features.json")).expect("the fixture parses");
        assert_eq!(descriptions.len(), 5);
        for (index, description) in descriptions.iter().enumerate() {
            let extractor = FeatureExtractor::log_mel(description).expect("the fields are valid");
            let found = extractor.features(&audio).expect("the clip is long enough");
            let expected = tensor(&format!("features.{index}"));
            assert_eq!([found.frames, found.columns], expected.shape(), "{index}");
            let pairs = found.numbers.into_iter().zip(floats(expected.data()));
            let error = pairs.fold(0.0f32, |most, (found, expected)| {
                assert!(found.is_finite());
                most.max((found - expected).abs())
            });
            println!("{description}: {error}");
            assert!(error < 1e-4, "{description}: {error}");
        }
    }

    #[test]
    fn soft_tokens_equal_transformers() {
        let counts: Vec<[usize; 2]> =
            serde_json::from_slice(&read("counts.json")).expect("the fixture parses");
        let extractor = FeatureExtractor::log_mel(&json!({})).expect("the defaults are valid");
        for [samples, expected] in counts {
            let found = extractor
                .soft_tokens(samples)
                .expect("the clip is long enough");
            assert_eq!(found, expected, "{samples}");
        }
    }

    #[test]
    fn features_of_clip_without_a_whole_frame_are_refused() {
        let extractor = FeatureExtractor::log_mel(&json!({})).expect("the defaults are valid");
        let audio = Audio::from_samples(&[0.0; 160], SAMPLE_RATE).expect("the samples are valid");
        for outcome in [
            extractor.features(&audio).map(|_| ()),
            extractor.soft_tokens(audio.samples().len()).map(|_| ()),
        ] {
            let reason = outcome.expect_err("the clip is too short");
            assert!(reason.contains("at least 161"), "{reason}");
        }
    }

    #[test]
    fn features_of_samples_pad_the_last_frame_with_silence() {
        let extractor = FeatureExtractor::samples(&json!({}), 3).expect("the defaults are valid");
        let audio = Audio::from_samples(&[0.5, 0.25, 0.125, 1.0], SAMPLE_RATE);
        let audio = audio.expect("the samples are valid");
        let found = extractor.features(&audio).expect("any clip is long enough");
        assert_eq!(found.numbers, [0.5, 0.25, 0.125, 1.0, 0.0, 0.0]);
        assert_eq!(extractor.soft_tokens(4), Ok(2));
    }

    #[test]
    fn log_mel_with_wrong_field_names_it() {
        for (description, word) in [
            (json!({"feature_size": 0}), "feature_size"),
            (json!({"sampling_rate": 44_100}), "sampling_rate"),
            (json!({"frame_length_ms": 0.0}), "frame_length_ms"),
            (json!({"frame_length": 400}), "frame_length"),
            (json!({"hop_length_ms": 1e9}), "hop_length_ms"),
            (json!({"hop_length": "long"}), "hop_length"),
            (json!({"dither": 0.1}), "dither"),
            (json!({"max_frequency": 9000.0}), "max_frequency"),
            (json!({"min_frequency": 8000.0}), "min_frequency"),
            (json!({"preemphasis": 2.0}), "preemphasis"),
            (json!({"input_scale_factor": 0.0}), "input_scale_factor"),
            (json!({"mel_floor": 0.0}), "mel_floor"),
            (json!({"per_bin_mean": [1.0]}), "per_bin_mean"),
            (
                json!({"feature_size": 1, "per_bin_stddev": [0.0]}),
                "per_bin_stddev",
            ),
        ] {
            let reason = FeatureExtractor::log_mel(&description);
            let reason = reason.expect_err("the value is refused");
            assert!(reason.contains(word), "{description}: {reason}");
        }
        let samples = json!({"audio_samples_per_token": 640});
        let reason = FeatureExtractor::samples(&samples, 320).expect_err("the number differs");
        assert!(reason.contains("audio_samples_per_token"), "{reason}");
    }
}
