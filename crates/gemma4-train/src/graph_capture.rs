//! Computes the gradients of a step, with a captured CUDA graph if the device supports it.
//!
//! A graph belongs to one thread, but Burn's learner moves the model between threads. So the graph is a thread-local
//! variable.

use burn::{optim::GradientsParams, tensor::Tensor};
use burn_gemma4::{Gemma4Error, Gemma4Model, GradientRecorder, TrainBatch};
use std::cell::RefCell;

thread_local! {
    static RECORDER: RefCell<Option<GradientRecorder>> = const { RefCell::new(None) };
}

/// Frees this thread's graph and the graph's memory. The next model captures a new graph.
pub fn release() {
    RECORDER.set(None);
}

/// Computes gradients with this thread's graph, as [`GradientRecorder::gradients`] does.
///
/// # Errors
/// Passes on the errors of the recorder.
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
