//! The settings of a checkpoint's video processor.

use super::patches::ImageProcessor;
use super::sampling::{DEFAULT_FRAMES, MOST_SAMPLED};
use crate::json;
use serde::Deserialize;
use serde_json::Value;

/// The name of the description in `processor_config.json`.
pub(crate) const FIELD: &str = "video_processor";

/// The number of soft tokens to which a frame is limited unless the checkpoint says otherwise.
const FRAME_SOFT_TOKENS: usize = 70;

/// The settings of a checkpoint's video processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VideoProcessor {
    /// The settings for a frame, which is resized as an image.
    pub frame: ImageProcessor,
    /// The number of frames that are sampled from a longer video.
    pub frames: usize,
}

/// The fields of a video processor that an image processor lacks, and those of its normalization.
#[derive(Deserialize)]
struct Fields {
    num_frames: Option<usize>,
    fps: Option<f64>,
    do_sample_frames: Option<bool>,
    image_mean: Option<[f64; 3]>,
    image_std: Option<[f64; 3]>,
}

impl VideoProcessor {
    /// Returns the processor that a checkpoint with patches of these sizes has if no file describes it.
    pub fn new(patch_size: usize, pooling_kernel_size: usize) -> Self {
        Self {
            frame: ImageProcessor {
                max_soft_tokens: FRAME_SOFT_TOKENS,
                ..ImageProcessor::new(patch_size, pooling_kernel_size)
            },
            frames: DEFAULT_FRAMES,
        }
    }

    /// Reads the description of a video processor. A missing field keeps its value in `self`. The error is a reason that
    /// names the field.
    pub fn read(self, description: &Value) -> Result<Self, String> {
        let fields: Fields = json::from_field(FIELD, description)?;
        let refuse = |field: &str, value: String, expected: &str| {
            Err(format!(
                "{FIELD}: {field} is {value}; only {expected} is supported"
            ))
        };
        if fields.do_sample_frames == Some(false) {
            return refuse("do_sample_frames", "false".into(), "true");
        }
        if let Some(fps) = fields.fps {
            return refuse("fps", fps.to_string(), "null");
        }
        // A mean of 0 and a deviation of 1 normalize nothing. Gemma 4's video processors ask for it.
        if let Some(mean) = fields.image_mean.filter(|mean| *mean != [0.0; 3]) {
            return refuse("image_mean", format!("{mean:?}"), "0");
        }
        if let Some(deviation) = fields.image_std.filter(|deviation| *deviation != [1.0; 3]) {
            return refuse("image_std", format!("{deviation:?}"), "1");
        }
        let frames = fields.num_frames.unwrap_or(self.frames);
        if !(1..=MOST_SAMPLED).contains(&frames) {
            let expected = format!("a number from 1 to {MOST_SAMPLED}");
            return refuse("num_frames", frames.to_string(), &expected);
        }
        let mut of_frame = description.clone();
        if let Some(fields) = of_frame.as_object_mut() {
            fields.remove("do_normalize");
        }
        Ok(Self {
            frame: self.frame.read(FIELD, &of_frame)?,
            frames,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn read_of_gemma_4s_description_samples_32_frames_of_70_soft_tokens() {
        let description = json!({
            "do_convert_rgb": true, "do_normalize": true, "do_rescale": true, "do_resize": true,
            "do_sample_frames": true, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": 70, "num_frames": 32, "patch_size": 16, "pooling_kernel_size": 3,
            "resample": 3, "rescale_factor": 1.0 / 255.0, "return_metadata": false,
        });
        let default = VideoProcessor::new(16, 3);
        assert_eq!(default.read(&description), Ok(default));
        assert_eq!((default.frame.max_soft_tokens, default.frames), (70, 32));
        let other = json!({"max_soft_tokens": 140, "num_frames": 8});
        let other = default.read(&other).expect("the numbers are supported");
        assert_eq!((other.frame.max_soft_tokens, other.frames), (140, 8));
    }

    #[test]
    fn read_of_unsupported_field_names_it() {
        for (field, value) in [
            ("do_sample_frames", json!(false)),
            ("fps", json!(2)),
            ("image_mean", json!([0.5, 0.5, 0.5])),
            ("image_std", json!([0.5, 0.5, 0.5])),
            ("num_frames", json!(0)),
            ("num_frames", json!(1025)),
            ("max_soft_tokens", json!(71)),
            ("patch_size", json!(14)),
            ("do_resize", json!(false)),
        ] {
            let reason = VideoProcessor::new(16, 3).read(&json!({field: value}));
            let reason = reason.expect_err(field);
            assert!(reason.contains(field) && reason.contains(FIELD), "{reason}");
        }
    }
}
