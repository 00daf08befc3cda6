//! Who computes the gradients of a step, by a graph where there can be one.
//!
//! A graph is one thread's, and Burn's learner moves what it trains between threads as it likes. So it waits here, in the thread that makes
//! the steps.

use burn::{optim::GradientsParams, tensor::Tensor};
use burn_gemma4::{Gemma4Error, Gemma4Model, GradientRecorder, Lesson};
use std::cell::RefCell;

thread_local! {
    static RECORDER: RefCell<Option<GradientRecorder>> = const { RefCell::new(None) };
}

/// Lets go of this thread's graph, and of its memory. Another model's begins anew.
pub fn release() {
    RECORDER.set(None);
}

/// [`GradientRecorder::gradients`] by this thread's graph.
///
/// # Errors
/// Those of the recorder.
pub fn gradients(
    model: &Gemma4Model,
    lesson: Lesson<'_>,
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
