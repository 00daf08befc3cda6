//! The size of an image or an audio clip in a prompt.

/// The size that an image or an audio clip has in a prompt and in memory. The header of its file is enough to compute
/// the size, so a program can check limits before the file is decoded. [`PromptEncoder`](crate::PromptEncoder) returns
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumSize {
    /// The number of tokens in a prompt, with a begin token and an end token.
    pub tokens: usize,
    /// The size of the resized pixels or of the features in memory, in bytes.
    pub bytes: usize,
    /// An upper bound of the memory that the preparation needs besides the decoded image or clip, in bytes. It contains
    /// `bytes`.
    pub preparing_bytes: usize,
}
