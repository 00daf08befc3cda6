//! Gradients from a captured graph. The launches of a training step are captured once and replayed for later steps.
//!
//! A step of a few thousand tokens has thousands of kernel launches. The host takes longer to launch the kernels than
//! the device takes to run them. With a graph the host needs only one launch.

mod batch;
#[cfg(feature = "cube")]
mod buffers;
#[cfg(feature = "cube")]
mod captured;

use super::gradients;
use crate::checkpoint::media_towers::MediaTowers;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use batch::Read;
pub use batch::TrainBatch;
use burn::{optim::GradientsParams, tensor::Tensor};
#[cfg(feature = "cube")]
use captured::Captured;
use std::{fmt, marker::PhantomData};

/// Computes the gradients of training steps. Captures the launches of a step in a graph if the device supports graphs.
///
/// The first batch is captured if it has at most 4,096 tokens and the trained parameters take at most 1 GB. Later
/// batches of the same shape replay the graph. The graph keeps all memory that a step needs. A batch of another shape,
/// or a change of the set of trained parameters, drops the graph permanently, and no other graph is captured.
///
/// A step that needs data on the host is not captured. Every step of a model with more than 512 experts needs data on
/// the host. On NVIDIA GPUs before Hopper, so does a step with half-precision experts and [`by_layer`](Self::by_layer).
/// The gradients do not depend on whether a graph is used.
///
/// A capture runs the step four times. During a capture on CUDA, calls of other threads fail if they wait for the
/// device or allocate device memory. Programs whose threads share a CUDA device should use
/// [`without_graph_capture`](Self::without_graph_capture).
///
/// ```
/// # use burn::tensor::{Device, Tensor};
/// # use burn_gemma4::{Gemma4Model, GradientRecorder, LoadOptions, TrainBatch};
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
/// let device = Device::flex().autodiff();
/// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
/// let mut recorder = GradientRecorder::new();
/// let batch = TrainBatch {
///     tokens: Tensor::from_data([[2, 17, 5, 44]], &device),
///     packing: None,
///     media: None,
///     targets: Tensor::from_data([[17, 5, 44, 1]], &device),
/// };
/// let (loss, gradients) = recorder.gradients(&model, batch, 1.0)?;
/// assert!(loss.into_scalar::<f32>() > 0.0);
/// assert!(gradients.get::<1>(model.norm.weight.id).is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct GradientRecorder {
    by_layer: bool,
    graph: Graph,
    /// Makes the type `!Send`. The thread that captured a graph must also replay the graph. The device orders a replay
    /// after the earlier work of this thread, but not after the work of other threads.
    _of_one_thread: PhantomData<*const ()>,
}

/// The state of the recorder's graph.
#[derive(Default)]
enum Graph {
    /// There is no graph yet. The next step may be captured.
    #[default]
    Possible,
    /// The graph has been captured for batches of the first batch's shape.
    #[cfg(feature = "cube")]
    Captured(Box<Captured>),
    /// There is no graph, and no step will be captured.
    None,
}

impl fmt::Debug for GradientRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientRecorder")
            .field("by_layer", &self.by_layer)
            .field("has_graph", &self.has_graph())
            .finish_non_exhaustive()
    }
}

impl GradientRecorder {
    /// Creates a recorder without a graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether the backward recomputes each layer, as in [`Gemma4Model::gradients`]. The default is false.
    pub fn by_layer(self, by_layer: bool) -> Self {
        Self { by_layer, ..self }
    }

    /// Turns graph capture off. Every kernel is then launched separately.
    pub fn without_graph_capture(self) -> Self {
        Self {
            graph: Graph::None,
            ..self
        }
    }

    /// True if the recorder has a graph. In this case the graph has computed the last step.
    pub fn has_graph(&self) -> bool {
        match &self.graph {
            #[cfg(feature = "cube")]
            Graph::Captured(_) => true,
            Graph::Possible | Graph::None => false,
        }
    }

    /// Computes the mean loss of a batch, `[1]` in f32 without autodiff, and the gradients of the loss times `factor`.
    /// The next call may overwrite the returned gradients. There are no gradients if no parameter of the model is trained.
    ///
    /// Between two calls the caller may change the trained parameters, and may freeze or unfreeze parameters. The
    /// caller must change nothing else in the model.
    ///
    /// # Errors
    /// Returns an error if the shape of the targets does not match the tokens. Passes on the errors of
    /// [`Gemma4Model::hidden`], [`Gemma4Model::hidden_packed`] and [`Gemma4Model::loss`].
    ///
    /// # Panics
    /// Panics if the model's device has no autodiff.
    pub fn gradients(
        &mut self,
        model: &Gemma4Model,
        lesson: TrainBatch<'_>,
        factor: f64,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        let read = Read::new(model, lesson)?;
        if !read.is_tracked(model) {
            return Ok((read.loss(model)?, GradientsParams::new()));
        }
        #[cfg(feature = "cube")]
        if let Some(outcome) = self.of_graph(model, &read, factor) {
            return Ok(outcome);
        }
        let found = read.gradients(model, self.by_layer, |loss| loss * factor)?;
        Ok((found.loss, found.parameters))
    }

    /// Computes the loss and the gradients of a batch as [`gradients`](Self::gradients) does, with the gradients of the
    /// parameters of `towers` that are trained. The media of the batch come from [`MediaTowers::place`] of these towers.
    /// No graph is used if a parameter of the towers is trained.
    ///
    /// # Errors
    /// Passes on the errors of [`gradients`](Self::gradients).
    ///
    /// # Panics
    /// Panics in the cases in which [`gradients`](Self::gradients) does.
    pub fn gradients_with_towers(
        &mut self,
        model: &Gemma4Model,
        towers: &MediaTowers,
        lesson: TrainBatch<'_>,
        factor: f64,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        let placed = lesson.media.filter(|media| media.is_tracked());
        let Some(placed) = placed else {
            return self.gradients(model, lesson, factor);
        };
        // The backward of the towers begins from the gradient of the soft tokens, whether or not the backward of the
        // text model recomputes its layers.
        let leaf = placed.leaf();
        let lesson = TrainBatch {
            media: Some(&leaf),
            ..lesson
        };
        let read = Read::new(model, lesson)?;
        let found = read.gradients(model, self.by_layer, |loss| loss * factor)?;
        let mut parameters = found.parameters;
        if let Some(of_rows) = found.soft_tokens {
            let gradients = placed.backward(of_rows);
            gradients::add(&mut parameters, gradients, towers);
        }
        Ok((found.loss, parameters))
    }

    /// Computes the gradients of a batch with the recorder's graph. If no step has been captured yet, first captures
    /// this batch. Returns `None` if no graph can be used for the batch.
    #[cfg(feature = "cube")]
    fn of_graph(
        &mut self,
        model: &Gemma4Model,
        read: &Read,
        factor: f64,
    ) -> Option<(Tensor<1>, GradientsParams)> {
        let mut captured = match std::mem::replace(&mut self.graph, Graph::None) {
            Graph::Possible => Box::new(Captured::of(model, read, self.by_layer)?),
            Graph::Captured(captured) if captured.serves(model, read) => captured,
            Graph::Captured(_) | Graph::None => return None,
        };
        let outcome = captured.run(model, read, factor);
        if captured.is_captured() {
            self.graph = Graph::Captured(captured);
        }
        Some(outcome)
    }
}
