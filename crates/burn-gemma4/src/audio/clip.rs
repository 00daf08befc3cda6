//! An audio clip of a prompt.

use super::decode::decode;
use super::features::FeatureExtractor;
use super::header::{AudioHeader, header};
use super::prepared::PreparedAudio;
use super::resample::resampled;
use crate::error::Gemma4Error;
use crate::media_file;
use std::sync::{Arc, OnceLock};
use std::{fmt, path::Path, time::Duration};

/// The number of samples in a second of a clip, which all Gemma 4 models expect.
pub(crate) const SAMPLE_RATE: u32 = 16_000;

/// The longest clip in seconds. A longer clip has more soft tokens than the models were trained with.
pub(crate) const MOST_SECONDS: usize = 30;

/// The sample rates that can be converted. The rate of a file sets the memory of the conversion.
pub(super) const RATES: std::ops::RangeInclusive<u32> = 1000..=384_000;

/// The largest magnitude of a sample. Full scale is 1, and lossy codecs exceed full scale by little. A larger sample
/// comes from integers that were not scaled.
const LARGEST_SAMPLE: f32 = 8.0;

/// The noun of an audio file in messages.
const MEDIUM: &str = "audio";

/// An audio clip for a prompt: one channel with 16,000 samples in a second, and at most 30 seconds. Clones share the
/// samples.
///
/// ```no_run
/// use burn_gemma4::{Audio, Message};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let question = Audio::open("question.wav")?;
/// let message = Message::user(vec![question.into(), "Transcribe this.".into()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Audio {
    samples: Arc<[f32]>,
    /// The features, for the first extractor that has asked. A session encodes the same clips again at each turn.
    prepared: Arc<OnceLock<(Arc<FeatureExtractor>, PreparedAudio)>>,
}

impl PartialEq for Audio {
    fn eq(&self, other: &Self) -> bool {
        self.samples == other.samples
    }
}

/// Samples are finite, so that a clip equals itself.
impl Eq for Audio {}

impl Audio {
    /// Reads a WAV, FLAC, MP3 or Ogg Vorbis file. Channels are averaged, and other sample rates than 16 kHz are
    /// converted.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] in the cases in which
    /// [`from_bytes`](Self::from_bytes) fails.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        media_file::open(path.as_ref(), MEDIUM, Self::decoded)
    }

    /// Decodes the contents of a WAV, FLAC, MP3 or Ogg Vorbis file, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the contents are malformed, truncated or in another format. Returns the
    /// same error for more than 64 MiB, more than 30 seconds, more than 8 channels, or a sample that is not finite.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Gemma4Error> {
        media_file::check_size(bytes.len() as u64, MEDIUM)
            .and_then(|()| Self::decoded(bytes))
            .map_err(refused)
    }

    /// Reads the header of a WAV, FLAC, MP3 or Ogg Vorbis file, without decoding the samples. A program can check
    /// limits before [`from_bytes`](Self::from_bytes) allocates memory.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the contents have another format, or if the header is malformed. Returns
    /// the same error if the header promises more than [`from_bytes`](Self::from_bytes) accepts.
    pub fn header(bytes: &[u8]) -> Result<AudioHeader, Gemma4Error> {
        media_file::check_size(bytes.len() as u64, MEDIUM)
            .and_then(|()| header(bytes))
            .map_err(refused)
    }

    /// Creates a clip from the samples of one channel. Full scale is from -1 to 1. `sample_rate` is the number of
    /// samples in a second, from 1,000 to 384,000. Other rates than 16,000 are converted.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there are no samples or more than 30 seconds, if a sample is not finite or
    /// exceeds 8 in magnitude, or for any other sample rate.
    ///
    /// ```
    /// use burn_gemma4::Audio;
    ///
    /// let silence = Audio::from_samples(&[0.0; 48_000], 48_000)?;
    /// assert_eq!(silence.duration().as_secs(), 1);
    /// # Ok::<(), burn_gemma4::Gemma4Error>(())
    /// ```
    pub fn from_samples(samples: &[f32], sample_rate: u32) -> Result<Self, Gemma4Error> {
        Self::of_rate(samples, sample_rate).map_err(refused)
    }

    fn decoded(bytes: &[u8]) -> Result<Self, String> {
        let decoded = decode(bytes)?;
        Self::of_rate(&decoded.samples, decoded.sample_rate)
    }

    fn of_rate(samples: &[f32], sample_rate: u32) -> Result<Self, String> {
        check_rate(sample_rate)?;
        if samples.is_empty() {
            return Err("has no samples; expected at least one".into());
        }
        check_length(samples.len(), sample_rate)?;
        if let Some(wrong) = samples
            .iter()
            .find(|one| !one.is_finite() || one.abs() > LARGEST_SAMPLE)
        {
            return Err(format!(
                "has the sample {wrong}; expected finite samples from -1 to 1"
            ));
        }
        let samples = match sample_rate {
            SAMPLE_RATE => samples.into(),
            _ => resampled(samples, sample_rate).into(),
        };
        Ok(Self {
            samples,
            prepared: Arc::default(),
        })
    }

    /// The length of the clip in time.
    pub fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.samples.len() as f64 / f64::from(SAMPLE_RATE))
    }

    /// The samples, 16,000 in a second.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// Computes the features of the clip for a model.
    ///
    /// # Errors
    /// Returns a reason if the clip is shorter than one frame.
    pub(crate) fn prepared(
        &self,
        extractor: &Arc<FeatureExtractor>,
    ) -> Result<PreparedAudio, String> {
        if let Some((_, prepared)) = self.prepared.get().filter(|(of, _)| of == extractor) {
            return Ok(prepared.clone());
        }
        let prepared = PreparedAudio::new(self, extractor)?;
        // Another thread may have been faster, with the same result or for another extractor.
        let _ = self.prepared.set((extractor.clone(), prepared.clone()));
        Ok(prepared)
    }
}

impl fmt::Debug for Audio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Audio")
            .field("duration", &self.duration())
            .finish_non_exhaustive()
    }
}

fn refused(reason: String) -> Gemma4Error {
    let argument = "audio";
    Gemma4Error::Argument { argument, reason }
}

/// Refuses sample rates that cannot be converted.
pub(super) fn check_rate(sample_rate: u32) -> Result<(), String> {
    match RATES.contains(&sample_rate) {
        true => Ok(()),
        false => Err(format!(
            "has {sample_rate} samples in a second; expected from {} to {}",
            RATES.start(),
            RATES.end()
        )),
    }
}

/// Refuses clips of more than [`MOST_SECONDS`].
pub(super) fn check_length(samples: usize, sample_rate: u32) -> Result<(), String> {
    match samples > MOST_SECONDS * sample_rate as usize {
        true => Err(format!(
            "is longer than {MOST_SECONDS} seconds; expected a shorter clip, so divide the audio into several"
        )),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_samples_of_wrong_samples_is_refused() {
        for (samples, rate, words) in [
            (&[][..], 16_000, "no samples"),
            (&[0.0, f32::NAN], 16_000, "NaN"),
            (&[f32::INFINITY], 48_000, "inf"),
            (&[1200.0], 16_000, "from -1 to 1"),
            (&[0.0], 999, "999 samples in a second"),
            (&[0.0], 400_000, "384000"),
            (&[0.0; 30_001], 1000, "30 seconds"),
        ] {
            let error = Audio::from_samples(samples, rate)
                .expect_err("the samples are refused")
                .to_string();
            assert!(error.contains(words), "{error}");
        }
        let longest = Audio::from_samples(&[0.0; 30_000], 1000).expect("30 seconds are valid");
        assert_eq!(longest.samples().len(), 480_000);
    }

    #[test]
    fn eq_of_clips_compares_samples() {
        let clip = |value| Audio::from_samples(&[value; 100], 16_000).expect("the clip is valid");
        assert_eq!(clip(0.5), clip(0.5));
        assert_ne!(clip(0.5), clip(0.25));
    }
}
