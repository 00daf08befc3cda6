//! A step's launches in a graph, and what is written before each replay: tokens, targets, and copies of what is trained, so that the graph
//! does not depend on where an optimizer leaves it.

use super::{
    buffers::{Buffers, Reader, Sources},
    lesson::Read,
};
use crate::{
    Gemma4Model,
    model::{any_rows::Rotations, forward::Text},
    op::{
        self,
        linear::grouped,
        recorded::{Computation, Recorded},
        route,
    },
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Int, Tensor},
};
use std::rc::Rc;

/// Rows of the largest text whose launches are captured. On an H200, an adapter of E2B takes the host as long as the card at 8,192.
const MOST_ROWS: usize = 4096;

/// Bytes of the most that is copied of what is trained: adapters, and models of some hundred million numbers.
const MOST_COPIED: usize = 1 << 30;

/// The steps of texts like one.
pub(super) struct Captured {
    step: Recorded<Step>,
    shape: Shape,
    /// All parameters of the model.
    parameters: Vec<Parameter>,
}

/// What launches depend on.
#[derive(Clone, Copy, PartialEq)]
struct Shape {
    tokens: [usize; 2],
    targets: [usize; 2],
    /// Of tokens and targets.
    integers: [DType; 2],
    has_segments: bool,
}

impl Shape {
    fn of(read: &Read) -> Self {
        Self {
            tokens: read.text.ids.dims(),
            targets: read.targets.dims(),
            integers: [read.text.ids.dtype(), read.targets.dtype()],
            has_segments: read.text.segments.is_some(),
        }
    }
}

impl Captured {
    /// Before the first one is captured; nothing where none should be.
    pub fn of(model: &Gemma4Model, read: &Read, by_layer: bool) -> Option<Self> {
        let shape = Shape::of(read);
        let device = model.device().without_autodiff();
        let mut parameters = Parameters::default();
        model.visit(&mut parameters);
        if shape.tokens.iter().product::<usize>() > MOST_ROWS
            || parameters.trained_bytes > MOST_COPIED
            || !op::runs(&device, model.dtype())
            || needs_host(model, &device, by_layer)
        {
            return None;
        }
        let sources = sources(model, read, 1.0);
        let step = Step {
            by_layer,
            has_host_rows: read.text.from_host.is_some(),
            has_segments: shape.has_segments,
            buffers: Buffers::like(&sources, &device),
            model: model.clone().map(&mut Hollow),
            device,
        };
        Some(Self {
            step: Recorded::new(step),
            shape,
            parameters: parameters.all,
        })
    }

    /// Whether it is for this model's steps over texts like this one.
    pub fn serves(&self, model: &Gemma4Model, read: &Read) -> bool {
        let mut parameters = Parameters::default();
        model.visit(&mut parameters);
        self.shape == Shape::of(read) && self.parameters == parameters.all
    }

    /// Whether the last run was a graph's.
    pub fn is_captured(&self) -> bool {
        self.step.is_captured()
    }

    /// The loss and the gradients of `factor` times that.
    pub fn run(
        &mut self,
        model: &Gemma4Model,
        read: &Read,
        factor: f64,
    ) -> (Tensor<1>, GradientsParams) {
        let buffers = &self.step.computation.buffers;
        buffers.overwrite(sources(model, read, factor));
        let Outputs { loss, gradients } = self.step.run(&mut true);
        let mut handed_out = HandedOut {
            gradients: &gradients,
            to: GradientsParams::new(),
        };
        model.visit(&mut handed_out);
        // A loss may be read after the next step has begun.
        (loss.mul_scalar(1.0), handed_out.to)
    }
}

/// Whether the host has a part in a step: it chooses where experts are very many, and reads the choice where a pass without autodiff is faster by
/// matrix units, an expert at a time.
fn needs_host(model: &Gemma4Model, device: &Device, by_layer: bool) -> bool {
    let config = model.config();
    config.experts.as_ref().is_some_and(|experts| {
        let rows = Tensor::empty([1, config.hidden_size], (device, model.dtype()));
        !route::chooses(experts.num_experts) || by_layer && !grouped::serves(&rows)
    })
}

/// What a step reads, in the order in which it does.
fn sources(model: &Gemma4Model, read: &Read, factor: f64) -> Sources {
    let Read { text, targets } = read;
    let device = text.ids.device();
    let mut sources = Sources::default();
    sources.integers(text.ids.clone());
    sources.integers(targets.clone());
    if let Some(segments) = &text.segments {
        sources.integers(segments.clone());
    }
    for table in text.rotations.tables() {
        sources.floats(table);
    }
    if let Some(rows) = &text.from_host {
        sources.floats(rows.clone());
    }
    sources.floats(Tensor::<1>::from_data([factor], (&device, DType::F32)));
    let mut trained = TrainedSources(sources);
    model.visit(&mut trained);
    trained.0
}

struct TrainedSources(Sources);

impl ModuleVisitor for TrainedSources {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        if tensor.is_require_grad() {
            self.0.floats(tensor.clone().inner());
        }
    }
}

/// One of the model.
#[derive(PartialEq)]
struct Parameter {
    id: ParamId,
    /// Of one that is trained, whose numbers are copied for each step.
    trained: Option<(Vec<usize>, DType)>,
}

/// All parameters, and how much of them is trained.
#[derive(Default)]
struct Parameters {
    all: Vec<Parameter>,
    trained_bytes: usize,
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.base();
        let trained = tensor.is_require_grad().then(|| {
            let count = tensor.dims().iter().product::<usize>();
            self.trained_bytes += count * tensor.dtype().size();
            (tensor.dims().to_vec(), tensor.dtype())
        });
        self.all.push(Parameter {
            id: param.id,
            trained,
        });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.all.push(Parameter {
            id: param.id,
            trained: None,
        });
    }
}

/// Everything that the launches read and write.
struct Step {
    by_layer: bool,
    has_host_rows: bool,
    has_segments: bool,
    buffers: Buffers,
    /// What is trained is elsewhere.
    model: Gemma4Model,
    /// Without autodiff.
    device: Device,
}

#[derive(Clone)]
struct Outputs {
    loss: Tensor<1>,
    gradients: Rc<GradientsParams>,
}

impl Computation for Step {
    /// Whoever trains has other threads soon, which read losses and write checkpoints.
    const BEFORE_CAPTURE: usize = 0;
    type Outputs = Outputs;

    fn compute(&self) -> Outputs {
        let mut buffers = self.buffers.read();
        let ids = buffers.integers();
        let targets = buffers.integers();
        let segments = self.has_segments.then(|| buffers.integers());
        let tables = [(); 4].map(|()| buffers.floats());
        let from_host = self.has_host_rows.then(|| buffers.floats());
        let factor: Tensor<1> = buffers.floats();
        let model = self.model.clone().map(&mut Filled(buffers));
        let text = Text {
            ids,
            from_host,
            rotations: Rotations::of_tables(tables),
            segments,
        };
        let read = Read { text, targets };
        let scaled = |loss: Tensor<1>| loss * factor.autodiff();
        let outcome = read.gradients(&model, self.by_layer, scaled);
        let (loss, gradients) = outcome.expect("a lesson that was checked");
        Outputs {
            loss,
            gradients: Rc::new(gradients),
        }
    }

    fn device(&self) -> Device {
        self.device.clone()
    }
}

/// Leaves nothing of what is trained but what it is.
struct Hollow;

impl ModuleMapper for Hollow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        replaced(param, |tensor| {
            Tensor::zeros([1; D], (&tensor.device(), tensor.dtype()))
        })
    }
}

/// Puts the copies of what is trained in its place.
struct Filled<'a>(Reader<'a>);

impl ModuleMapper for Filled<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        replaced(param, |_| self.0.floats())
    }
}

/// The parameter with another tensor without autodiff, if it is trained.
fn replaced<const D: usize>(
    param: Param<Tensor<D>>,
    by: impl FnOnce(&Tensor<D>) -> Tensor<D>,
) -> Param<Tensor<D>> {
    let (id, tensor, mapper) = param.consume();
    let strategy = match tensor.is_require_grad() {
        true => tensor.gradient_checkpointing_strategy(),
        false => None,
    };
    let tensor = match strategy {
        Some(strategy) => by(&tensor.inner())
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy)
            .require_grad(),
        None => tensor,
    };
    Param::from_mapped_value(id, tensor, mapper)
}

/// Handles to the gradients of a graph.
struct HandedOut<'a> {
    gradients: &'a GradientsParams,
    to: GradientsParams,
}

impl ModuleVisitor for HandedOut<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.to.register(param.id, gradient);
        }
    }
}
