//! Gradients whose launches are captured in a graph once and replayed from then on.
//!
//! A step of a few thousand tokens is thousands of launches, which take the host longer than the device. Captured, they are one.

#[cfg(feature = "cube")]
mod buffers;
#[cfg(feature = "cube")]
mod captured;
mod lesson;

use crate::{Gemma4Error, Gemma4Model};
use burn::{optim::GradientsParams, tensor::Tensor};
#[cfg(feature = "cube")]
use captured::Captured;
pub use lesson::Lesson;
use lesson::Read;
use std::{fmt, marker::PhantomData};

/// Computes the gradients of steps, whose launches it captures in a graph where the device can.
///
/// The first text's launches are captured, if it has at most 4,096 rows and at most 1 GB is trained, and the graph is replayed for every text
/// of the same shape. It keeps all memory that a step takes. With a text of another shape it ends, and where other parameters are trained, and that one and all
/// later ones are computed launch by launch, as where nothing can be captured. So are steps in which the host has a part: of experts that are more than 512,
/// and in half precision on CUDA of experts [by layer](Self::by_layer). Gradients are the same.
///
/// A capture runs the step four times. On CUDA it concerns the whole process: another thread's call that waits for the device or allocates
/// on it ends in an error meanwhile. A program whose threads share a CUDA device goes [`without_graph_capture`](Self::without_graph_capture).
///
/// ```
/// # use burn::tensor::{Device, Tensor};
/// # use burn_gemma4::{Gemma4Model, GradientRecorder, Lesson, LoadOptions};
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
/// let device = Device::flex().autodiff();
/// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
/// let mut recorder = GradientRecorder::new();
/// let lesson = Lesson {
///     tokens: Tensor::from_data([[2, 17, 5, 44]], &device),
///     packing: None,
///     targets: Tensor::from_data([[17, 5, 44, 1]], &device),
/// };
/// let (loss, gradients) = recorder.gradients(&model, lesson, 1.0)?;
/// assert!(loss.into_scalar::<f32>() > 0.0);
/// assert!(gradients.get::<1>(model.norm.weight.id).is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct GradientRecorder {
    by_layer: bool,
    graph: Graph,
    /// A replay is ordered after what the capturing thread has put on the device, and after nothing else.
    _of_one_thread: PhantomData<*const ()>,
}

/// What there is of a graph.
#[derive(Default)]
enum Graph {
    /// Nothing was asked for yet.
    #[default]
    Possible,
    /// Of texts like the first one.
    #[cfg(feature = "cube")]
    Captured(Box<Captured>),
    /// There is none, or no more.
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
    /// Before the first step.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the backward computes each layer anew, as [`Gemma4Model::gradients`] does. It does not by default.
    pub fn by_layer(self, by_layer: bool) -> Self {
        Self { by_layer, ..self }
    }

    /// Puts every launch on the device by itself.
    pub fn without_graph_capture(self) -> Self {
        Self {
            graph: Graph::None,
            ..self
        }
    }

    /// Whether there is a graph, by which the last step was computed.
    pub fn has_graph(&self) -> bool {
        match &self.graph {
            #[cfg(feature = "cube")]
            Graph::Captured(_) => true,
            Graph::Possible | Graph::None => false,
        }
    }

    /// The mean loss of a text, `[1]` in f32 without autodiff, and the gradients of `factor` times that. The next call may write over
    /// gradients that are still there.
    ///
    /// From call to call nothing of the model may change but what is trained, and which parameters that are.
    ///
    /// # Errors
    /// Where the targets are of other rows than the tokens, of none of their positions or of more, or with a packing not of all; and those
    /// of [`Gemma4Model::hidden`], [`Gemma4Model::hidden_packed`] and [`Gemma4Model::loss`].
    ///
    /// # Panics
    /// Without autodiff on the model's device, or where nothing is trained.
    pub fn gradients(
        &mut self,
        model: &Gemma4Model,
        lesson: Lesson<'_>,
        factor: f64,
    ) -> Result<(Tensor<1>, GradientsParams), Gemma4Error> {
        let read = Read::new(model, lesson)?;
        #[cfg(feature = "cube")]
        if let Some(outcome) = self.of_graph(model, &read, factor) {
            return Ok(outcome);
        }
        read.gradients(model, self.by_layer, |loss| loss * factor)
    }

    /// By a graph, which is captured here for the first text; nothing where there is none for this one.
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
