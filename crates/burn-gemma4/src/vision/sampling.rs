//! The choice of the frames of a video that a model sees, as Hugging Face Transformers makes it.

/// The number of frames that Gemma 4's video processor samples.
pub(crate) const DEFAULT_FRAMES: usize = 32;

/// The largest number of frames that a model can be shown of one video.
pub(crate) const MOST_SAMPLED: usize = 1024;

/// The largest number of pixels of all sampled frames. They take 768 MiB in memory: 32 frames of 3,840 x 2,160 pixels.
const MOST_PIXELS: u64 = 1 << 28;

/// Returns the indices of the sampled frames: all of them, or `most` frames at equal distances that begin with the
/// first one.
pub(super) fn sampled_indices(frames: usize, most: usize) -> Vec<usize> {
    let count = frames.min(most);
    (0..count).map(|index| index * frames / count).collect()
}

/// Refuses frames whose pixels would take too much memory.
pub(super) fn check_pixels_of_frames(
    [width, height]: [usize; 2],
    frames: usize,
) -> Result<(), String> {
    match (width * height) as u64 * frames as u64 <= MOST_PIXELS {
        true => Ok(()),
        false => Err(format!(
            "has {width} x {height} pixels, in {frames} sampled frames; expected at most {MOST_PIXELS} pixels in all, so sample fewer frames or make them smaller"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampled_indices_of_more_frames_are_those_of_transformers() {
        // `np.arange(num_frames) * total_num_frames // num_frames`
        assert_eq!(sampled_indices(11, 4), [0, 2, 5, 8]);
        assert_eq!(sampled_indices(100, 3), [0, 33, 66]);
        assert_eq!(sampled_indices(4, 4), [0, 1, 2, 3]);
        assert_eq!(sampled_indices(3, 32), [0, 1, 2]);
        assert_eq!(sampled_indices(5, 1), [0]);
        assert!(sampled_indices(0, 32).is_empty());
    }

    #[test]
    fn check_pixels_of_frames_accepts_32_frames_in_4k_only() {
        check_pixels_of_frames([3840, 2160], 32).expect("they fit");
        let reason = check_pixels_of_frames([3840, 2160], 33).expect_err("one more");
        assert!(reason.contains("33 sampled frames"), "{reason}");
    }
}
