//! The ways to compute a decode step.

/// The way in which a [`Decoder`](super::Decoder) computes its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeMode {
    /// Runs [`Gemma4Model::step`](crate::Gemma4Model::step).
    Layers,
    /// Launches the decode kernels one by one.
    Kernels,
    /// Replays a CUDA graph of the decode kernels with one launch.
    Graph,
}
