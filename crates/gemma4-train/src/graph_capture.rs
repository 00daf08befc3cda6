//! Computes the gradients of a step, with a captured CUDA graph if the device supports it.
//!
//! The thread that captured a graph must also replay it, but Burn's learner moves the model between threads. So each
//! thread keeps its own graph in a thread-local variable.

use burn::{optim::GradientsParams, tensor::Tensor};
use burn_gemma4::{Gemma4Error, Gemma4Model, GradientRecorder, TrainBatch};
use std::cell::RefCell;

thread_local! {
    static RECORDER: RefCell<Option<GradientRecorder>> = const { RefCell::new(None) };
}

/// Frees this thread's CUDA graph and the graph's memory. The next model then captures a new graph.
pub fn release() {
    RECORDER.set(None);
}

/// Computes gradients with this thread's CUDA graph, as [`GradientRecorder::gradients`] does.
///
/// # Errors
/// Returns the errors of [`GradientRecorder::gradients`].
pub fn gradients(
    model: &Gemma4Model,
    lesson: TrainBatch<'_>,
    factor: f64,
    by_layer: bool,
) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
    RECORDER.with_borrow_mut(|recorder| {
        let new = || GradientRecorder::new().by_layer(by_layer);
        recorder
            .get_or_insert_with(new)
            .gradients(model, lesson, factor)
    })
}
