//! A captured training step: the graph of its launches and the buffers that the graph reads. The buffers include copies
//! of the trained parameters, so that an optimizer may move the parameters to other memory.

use super::batch::Read;
use super::buffers::{Buffers, Reader, Sources};
use crate::model::Gemma4Model;
use crate::model::forward::Text;
use crate::model::prefill_ops::Rotations;
use crate::model::row_rules::RowRules;
use crate::model::soft_tokens::{CallMedia, SoftTokenGrid};
use crate::op;
use crate::op::graph_capture::{CapturedGraph, Computation};
use crate::op::stream::StreamCheck;
use crate::op::{moe_gemm, moe_router};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Int, Tensor},
};
use std::rc::Rc;

/// The maximum number of tokens in the batch of a captured step. A graph saves no time if the host launches a step as
/// fast as the GPU runs the step. For E2B with an adapter on an H200, this is true at 8,192 tokens.
const CAPTURE_MAX_ROWS: usize = 4096;

/// The maximum size in bytes of all trained parameters together. The limit exists because a captured step keeps a copy
/// of these parameters. All adapters are smaller. The trained parameters of models with a few hundred million
/// parameters are smaller, too.
const MOST_COPIED: usize = 1 << 30;

/// A captured training step, which can run every batch that has the shape of the captured batch.
pub(super) struct Captured {
    step: CapturedGraph<Step>,
    shape: Shape,
    /// The properties of all parameters, trained and frozen, at the time of the capture.
    parameters: Vec<Parameter>,
}

/// The properties of a batch that must not change after the capture, because the launches depend on them.
#[derive(Clone, Copy, PartialEq)]
struct Shape {
    tokens: [usize; 2],
    targets: [usize; 2],
    /// The dtypes of the tokens and of the targets.
    integers: [DType; 2],
    tensors: OptionalTensors,
}

/// The tensors that only some batches have.
#[derive(Clone, Copy, PartialEq)]
struct OptionalTensors {
    segments: bool,
    intervals: bool,
    soft_tokens: bool,
}

impl OptionalTensors {
    fn of(text: &Text) -> Self {
        Self {
            segments: text.rules.segments.is_some(),
            intervals: text.rules.sliding.is_some(),
            soft_tokens: matches!(text.media, CallMedia::Grid(_)),
        }
    }
}

impl Shape {
    fn of(read: &Read) -> Self {
        Self {
            tokens: read.text.ids.dims(),
            targets: read.targets.dims(),
            integers: [read.text.ids.dtype(), read.targets.dtype()],
            tensors: OptionalTensors::of(&read.text),
        }
    }
}

impl Captured {
    /// Prepares the capture of a step. Returns `None` if the step should not be captured.
    pub fn of(model: &Gemma4Model, read: &Read, by_layer: bool) -> Option<Self> {
        let shape = Shape::of(read);
        let device = model.device().without_autodiff();
        let mut parameters = Parameters::default();
        model.visit(&mut parameters);
        if shape.tokens.iter().product::<usize>() > CAPTURE_MAX_ROWS
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
            tensors: shape.tensors,
            buffers: Buffers::like(&sources, &device),
            model: model.clone().map(&mut EmptyModule),
            device,
        };
        Some(Self {
            step: CapturedGraph::new(step),
            shape,
            parameters: parameters.all,
        })
    }

    /// True if the captured step can run for this model and this batch.
    pub fn serves(&self, model: &Gemma4Model, read: &Read) -> bool {
        let mut parameters = Parameters::default();
        model.visit(&mut parameters);
        self.shape == Shape::of(read) && self.parameters == parameters.all
    }

    /// True if the last run was the replay of a graph.
    pub fn is_captured(&self) -> bool {
        self.step.is_captured()
    }

    /// Computes the loss, and the gradients of the loss times `factor`.
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
        // Return a copy of the loss, because the next step overwrites the graph's own loss.
        (loss.mul_scalar(1.0), handed_out.to)
    }
}

/// True if a step needs data on the host. A graph cannot capture such a step.
///
/// There are two reasons. If the model has more experts than the router's kernels support, the host selects the
/// experts. In layer-by-layer mode, the host may read which experts were selected, to run one tensor-core GEMM per
/// expert.
fn needs_host(model: &Gemma4Model, device: &Device, by_layer: bool) -> bool {
    let config = model.config();
    config.experts.as_ref().is_some_and(|experts| {
        let rows = Tensor::empty([1, config.hidden_size], (device, model.dtype()));
        !moe_router::chooses(experts.num_experts) || by_layer && !moe_gemm::serves(&rows)
    })
}

/// Returns the tensors that a step reads, in the order in which the step reads their copies from the buffers.
fn sources(model: &Gemma4Model, read: &Read, factor: f64) -> Sources {
    let Read { text, targets } = read;
    let device = text.ids.device();
    let mut sources = Sources::default();
    sources.integers(text.ids.clone());
    sources.integers(targets.clone());
    if let Some(segments) = &text.rules.segments {
        sources.integers(segments.clone());
    }
    for bound in text.rules.sliding.iter().flatten() {
        sources.integers(bound.clone());
    }
    if let CallMedia::Grid(grid) = &text.media {
        sources.integers(grid.is_soft.clone());
        sources.floats(grid.rows.clone().inner());
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

/// The properties of a model parameter that must not change after a capture.
#[derive(PartialEq)]
struct Parameter {
    id: ParamId,
    /// The shape and dtype of a trained parameter, or `None` if the parameter is frozen.
    trained: Option<(Vec<usize>, DType)>,
}

/// A visitor that collects all parameters, and counts the bytes of the trained parameters.
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

/// The captured computation, with all tensors that its launches read and write.
struct Step {
    by_layer: bool,
    has_host_rows: bool,
    tensors: OptionalTensors,
    buffers: Buffers,
    /// The model with a tensor of one element in place of each trained parameter. A step takes the trained parameters
    /// from the buffers.
    model: Gemma4Model,
    /// The model's device, without autodiff.
    device: Device,
}

#[derive(Clone)]
struct Outputs {
    loss: Tensor<1>,
    gradients: Rc<GradientsParams>,
}

impl Computation for Step {
    type Outputs = Outputs;

    /// Returns 0, so the first step is captured. The reason is that no other thread may use the device during a
    /// capture. In later steps, other threads of the trainer read losses and write checkpoints.
    fn before_capture(&self) -> usize {
        0
    }

    fn compute(&self) -> Outputs {
        let mut buffers = self.buffers.read();
        let ids = buffers.integers();
        let targets = buffers.integers();
        let rules = RowRules {
            segments: self.tensors.segments.then(|| buffers.integers()),
            sliding: (self.tensors.intervals).then(|| [(); 2].map(|()| buffers.integers())),
        };
        let media = match self.tensors.soft_tokens {
            true => CallMedia::Grid(Box::new(SoftTokenGrid {
                is_soft: buffers.integers(),
                rows: buffers.floats(),
            })),
            false => CallMedia::default(),
        };
        let tables = [(); 4].map(|()| buffers.floats());
        let from_host = self.has_host_rows.then(|| buffers.floats());
        let factor: Tensor<1> = buffers.floats();
        let model = self.model.clone().map(&mut Filled(buffers));
        let text = Text {
            ids,
            from_host,
            rotations: Rotations::of_tables(tables),
            rules,
            adapters: None,
            media,
        };
        let read = Read { text, targets };
        let scaled = |loss: Tensor<1>| loss * factor.autodiff();
        let outcome = read.gradients(&model, self.by_layer, scaled);
        let found = outcome.expect("the batch was checked when it was read");
        Outputs {
            loss: found.loss,
            gradients: Rc::new(found.parameters),
        }
    }

    fn is_local(&self) -> bool {
        StreamCheck::new().module(&self.model).are_local
    }

    fn device(&self) -> Device {
        self.device.clone()
    }
}

/// A mapper that replaces each trained parameter by a tensor of one element, to free the parameter's memory.
struct EmptyModule;

impl ModuleMapper for EmptyModule {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        replaced(param, |tensor| {
            Tensor::zeros([1; D], (&tensor.device(), tensor.dtype()))
        })
    }
}

/// A mapper that replaces each trained parameter by its copy in the buffers.
struct Filled<'a>(Reader<'a>);

impl ModuleMapper for Filled<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        replaced(param, |_| self.0.floats())
    }
}

/// Replaces the tensor of a trained parameter. `by` maps a tensor without autodiff to the new tensor, also without
/// autodiff.
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

/// A visitor that collects a handle to each gradient that the graph computes.
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
