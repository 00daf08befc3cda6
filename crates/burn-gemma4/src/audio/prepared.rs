//! An audio clip in the form in which a model reads it: features, and a hash of them.

use super::clip::Audio;
use super::features::{FeatureExtractor, Features};
use crate::media_hash::MediumHash;
use std::fmt;
use std::sync::Arc;

/// The features of an audio clip that a model hears, without the samples. Two prepared clips are equal if their hashes
/// are. Clones share the features.
#[derive(Clone)]
pub struct PreparedAudio {
    pub(crate) hash: MediumHash,
    pub(crate) features: Arc<Features>,
    /// The number of soft tokens.
    count: usize,
}

impl PreparedAudio {
    /// Computes the features of a clip, and hashes them. The features depend on all samples and on the extractor.
    ///
    /// # Errors
    /// Returns a reason if the clip is shorter than one frame.
    pub(super) fn new(audio: &Audio, extractor: &FeatureExtractor) -> Result<Self, String> {
        let count = extractor.soft_tokens(audio.samples().len())?;
        let features = extractor.features(audio)?;
        let numbers = features.numbers.iter();
        let bytes: Vec<u8> = numbers.flat_map(|number| number.to_le_bytes()).collect();
        let sizes = [features.frames, features.columns, count, 0];
        Ok(Self {
            hash: MediumHash::of("audio", sizes, &bytes),
            features: Arc::new(features),
            count,
        })
    }

    /// The number of soft tokens.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The number of tokens that the clip takes in a prompt: its soft tokens, a begin token and an end token.
    pub fn tokens(&self) -> usize {
        self.count + 2
    }

    /// The size of the features in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.features.bytes()
    }
}

impl PartialEq for PreparedAudio {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl Eq for PreparedAudio {}

impl fmt::Debug for PreparedAudio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedAudio")
            .field("hash", &self.hash)
            .field("soft_tokens", &self.count)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn clip(samples: usize, value: f32) -> Audio {
        let mut wave = vec![0.25; samples];
        wave[samples / 2] = value;
        Audio::from_samples(&wave, 16_000).expect("the samples are valid")
    }

    fn extractors() -> [Arc<FeatureExtractor>; 3] {
        let log_mel = |fields| FeatureExtractor::log_mel(&fields).expect("the fields are valid");
        let samples = FeatureExtractor::samples(&json!({}), 640).expect("the fields are valid");
        [
            log_mel(json!({})),
            log_mel(json!({"mel_floor": 0.5})),
            samples,
        ]
        .map(Arc::new)
    }

    #[test]
    fn hash_depends_on_samples_length_and_extractor() {
        let extractors = extractors();
        for extractor in &extractors {
            let prepared = |clip: Audio| clip.prepared(extractor).expect("the clip is long enough");
            let same = prepared(clip(3200, 0.5));
            assert_eq!(prepared(clip(3200, 0.5)), same);
            for other in [clip(3200, 0.625), clip(3840, 0.5)] {
                assert_ne!(prepared(other), same);
            }
        }
        let all = extractors.map(|extractor| {
            let prepared = clip(3200, 0.5).prepared(&extractor);
            prepared.expect("the clip is long enough")
        });
        assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
    }

    #[test]
    fn prepared_clip_of_another_extractor_is_not_reused() {
        let audio = clip(3200, 0.5);
        let extractors = extractors();
        let found = [0, 2, 0].map(|index| {
            let prepared = audio.prepared(&extractors[index]);
            prepared.expect("the clip is long enough").tokens()
        });
        assert_eq!(found, [7, 7, 7]);
        let bytes = [0, 2].map(|index| {
            let prepared = audio.prepared(&extractors[index]);
            prepared.expect("the clip is long enough").bytes()
        });
        assert_eq!(bytes[1], 3200 * 4);
        assert_ne!(bytes[0], bytes[1]);
    }
}
