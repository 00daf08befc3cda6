//! The wrapper that lets Burn's learner train the model, and its training step.

use crate::{
    args::{StepArguments, TrainingArguments},
    data::loader::{Batch, Step},
    distributed::all_reduce::AllReduce,
    graph_capture,
    optim::{
        factor,
        gradients::{add, clipping, norm},
        loss_scale::LossScale,
        skipped_steps::SkippedSteps,
    },
};
use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::{
        Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
        Param, ParamGroup,
    },
    optim::{GradientsParams, ModuleOptimizer},
    store::ModuleRecord,
    tensor::{DType, Device, ExecutionError, Tensor},
    train::{
        InferenceStep, ItemLazy, TrainOutput, TrainStep,
        metric::{Adaptor, LossInput},
    },
};
use burn_gemma4::{Gemma4Model, GradientRecorder, MediaTowers, PlacedMedia, TrainBatch};
use std::fmt;

const ONE_SHAPE: &str =
    "the loader's tokens are in the vocabulary, and targets and packing have the tokens' shape";
const PREPARED: &str = "the loader prepares images and audio for this model, within the rows";

/// A model that is trained to predict the next token.
#[derive(Clone, Debug)]
pub struct TrainableModel {
    /// The model.
    pub model: Gemma4Model,
    /// The towers that compute soft tokens, or `None` if the data set has no images and no audio.
    pub towers: Option<MediaTowers>,
    /// The loss scale for a model in f16, or `None` for other dtypes.
    scale: Option<LossScale>,
    /// True if the gradients of a step are accumulated in f32. If this field is false, each step has exactly one batch.
    in_f32: bool,
    /// True if the backward pass recomputes each layer.
    by_layer: bool,
    /// True if a captured CUDA graph may compute the gradients. In this case, no other thread may use the device.
    records: bool,
    /// The largest allowed global norm of the gradients, or `None` if gradients are not clipped.
    largest_norm: Option<f32>,
    /// The number of devices of this process. The learner reports the mean loss over the devices. Without an
    /// all-reduce, each device multiplies its share of the loss by this number, so that the mean equals the sum of the
    /// shares.
    devices: usize,
    /// The all-reduce of gradients, or `None` if Burn's learner sums the gradients.
    all_reduce: Option<AllReduce>,
    /// The count of skipped steps.
    skipped: SkippedSteps,
}

/// True if the gradients of a step are accumulated and kept in f32 for these arguments and this dtype.
pub fn gradients_in_f32(arguments: &TrainingArguments, dtype: DType) -> bool {
    arguments.accumulate > 1 || dtype == DType::F16
}

impl TrainableModel {
    /// Creates a trainable model from `model` with the settings of the arguments.
    pub fn new(
        model: Gemma4Model,
        arguments: &TrainingArguments,
        all_reduce: Option<AllReduce>,
    ) -> Self {
        Self {
            in_f32: gradients_in_f32(arguments, model.dtype()),
            devices: arguments.devices.len().max(1),
            records: !arguments.step.no_graph
                && arguments.devices.len() <= 1
                && all_reduce.is_none(),
            all_reduce,
            ..Self::alone(model, &arguments.step)
        }
    }

    /// Creates a trainable model for one device and one batch per step.
    pub fn alone(model: Gemma4Model, arguments: &StepArguments) -> Self {
        let is_f16 = model.dtype() == DType::F16;
        Self {
            scale: is_f16.then(|| LossScale::new(&model.device())),
            in_f32: is_f16,
            by_layer: arguments.checkpointing.is_by_layer(),
            records: !arguments.no_graph,
            largest_norm: (arguments.clip > 0.0).then_some(arguments.clip),
            devices: 1,
            all_reduce: None,
            skipped: SkippedSteps::default(),
            towers: None,
            model: model.with_mlp_recompute(arguments.checkpointing.is_of_mlp()),
        }
    }

    /// Returns this model, which now counts skipped steps in `skipped`.
    pub fn counting(self, skipped: &SkippedSteps) -> Self {
        Self {
            skipped: skipped.clone(),
            ..self
        }
    }

    /// Returns this model, which now reads images and audio clips through `towers`. Their trained parameters are trained
    /// with the model.
    pub fn with_towers(self, towers: Option<MediaTowers>) -> Self {
        Self { towers, ..self }
    }

    /// Computes the soft tokens of a batch. Returns `None` if the data set has no images and no audio clips.
    fn placed(&self, model: &Gemma4Model, batch: &Batch) -> Option<PlacedMedia> {
        let (towers, media) = (self.towers.as_ref()?, batch.media.as_ref()?);
        let placed = towers.place(media, model, batch.tokens.dims());
        Some(placed.expect(PREPARED))
    }

    /// Returns this device's share of the step's mean loss, `[1]`, and its share of the gradients. The loss has no autodiff
    /// graph. The gradients are multiplied by the loss scale.
    fn gradients(&self, model: &Gemma4Model, step: Step) -> (Tensor<1>, GradientsParams) {
        let scale = self.scale.as_ref().map_or(1.0, LossScale::value);
        let mut loss = Tensor::zeros([1], (&model.device().without_autodiff(), DType::F32));
        let mut sum = GradientsParams::new();
        // A captured graph writes the gradients to the same memory in every replay, so a second batch would overwrite
        // the gradients of the first. The graph is therefore used only if the step has a single batch.
        let records = self.records && step.batches.len() == 1;
        for batch in step.batches {
            let share = batch.counted as f64 / step.targets.max(1) as f64;
            let factor = share * f64::from(scale);
            let (part, gradients) = self.of_batch(model, batch, factor, records);
            loss = loss + part.mul_scalar(share);
            match self.in_f32 {
                true => add(&mut sum, gradients, &(model.clone(), self.towers.clone())),
                // Without accumulation in f32, a step has only one batch.
                false => sum = gradients,
            }
        }
        (loss, sum)
    }

    /// Returns the mean loss of a batch, `[1]` without autodiff, and the gradients of the loss multiplied by `factor`.
    fn of_batch(
        &self,
        model: &Gemma4Model,
        batch: Batch,
        factor: f64,
        records: bool,
    ) -> (Tensor<1>, GradientsParams) {
        let media = self.placed(model, &batch);
        let lesson = TrainBatch {
            tokens: batch.tokens,
            packing: Some(&batch.packing),
            media: media.as_ref(),
            targets: batch.targets,
        };
        let mut without_graph = GradientRecorder::new()
            .by_layer(self.by_layer)
            .without_graph_capture();
        let trained = self.towers.as_ref().filter(|towers| towers.is_trained());
        let outcome = match trained {
            Some(towers) => without_graph.gradients_with_towers(model, towers, lesson, factor),
            None if records => graph_capture::gradients(model, lesson, factor, self.by_layer),
            None => without_graph.gradients(model, lesson, factor),
        };
        outcome.expect(ONE_SHAPE)
    }
}

/// Returns the mean loss of a batch, `[1]`.
fn loss(model: &Gemma4Model, batch: &Batch, media: Option<&PlacedMedia>) -> Tensor<1> {
    let (tokens, packing) = (batch.tokens.clone(), &batch.packing);
    let hidden = match media {
        Some(media) => model.hidden_packed_with_media(tokens, packing, media),
        None => model.hidden_packed(tokens, packing),
    };
    hidden
        .and_then(|hidden| model.loss(hidden, batch.targets.clone()))
        .expect(ONE_SHAPE)
}

/// A mean loss, and the weight of this loss in Burn's metric.
pub struct Loss {
    value: Tensor<1>,
    /// The weight of the loss. For the loss of a batch, the weight is the number of tokens. For the loss of a step, the
    /// weight is 1.
    weight: usize,
}

impl Adaptor<LossInput> for Loss {
    /// Repeats the loss `weight` times, because Burn's metric weighs a loss by its number of elements.
    fn adapt(&self) -> LossInput {
        LossInput::new(self.value.clone().expand([self.weight]))
    }
}

impl ItemLazy for Loss {
    fn sync(self) -> Result<Self, ExecutionError> {
        self.value.device().flush()?;
        Ok(Self {
            value: self.value.without_autodiff(),
            ..self
        })
    }
}

impl TrainStep for TrainableModel {
    type Input = Step;
    type Output = Loss;

    fn step(&self, step: Step) -> TrainOutput<Loss> {
        let (value, grads) = match &self.all_reduce {
            None => {
                let (loss, gradients) = self.gradients(&self.model, step);
                (loss.mul_scalar(self.devices as f64), gradients)
            }
            Some(all_reduce) => {
                let number = step.number;
                let model = all_reduce.unmarked(&self.model);
                let (loss, gradients) = self.gradients(&model, step);
                all_reduce.sum(number, loss, gradients, &model)
            }
        };
        let item = Loss { value, weight: 1 };
        TrainOutput { grads, item }
    }

    /// Updates the model with the step's gradients, summed over all devices. A step with a NaN or infinite gradient is
    /// skipped.
    fn optimize(
        mut self,
        optimizer: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        gradients: GradientsParams,
    ) -> Self {
        let mut factor = Tensor::ones([1], (&self.model.device().inner(), DType::F32));
        if let Some(mut norm) = norm(&gradients, &self) {
            if let Some(loss_scale) = self.scale.take() {
                let scale = loss_scale.value();
                let are_numbers = norm.clone().into_scalar::<f32>().is_finite();
                self.scale = Some(loss_scale.after(are_numbers));
                if !are_numbers {
                    self.skipped.count_one(&norm.device());
                    return self;
                }
                norm = norm.div_scalar(scale);
                factor = factor.div_scalar(scale);
            }
            let is_skipped = norm.clone().is_finite().bool_not().float();
            self.skipped.count(is_skipped.cast(DType::F32));
            factor = factor * clipping(norm, self.largest_norm);
        }
        let all_reduce = self.all_reduce.clone();
        let Some(group) = all_reduce.as_ref().and_then(AllReduce::in_parts) else {
            return factor::during(factor, || optimizer.step(rate, self, gradients));
        };
        let own = group.own_gradients(gradients, &self);
        let updated = factor::during(factor, || optimizer.step(rate, self, own));
        let device = updated.model.device();
        group.gather_updated(updated, &device)
    }
}

impl InferenceStep for TrainableModel {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        let media = self.placed(&self.model, &batch);
        let value = loss(&self.model, &batch, media.as_ref());
        Loss {
            value,
            weight: batch.counted,
        }
    }
}

/// This implementation differs from the one that Burn derives: the record contains only the trained parameters and the
/// loss scale. So a checkpoint of an adapter is about as small as the adapter.
impl Module for TrainableModel {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.towers
            .collect_devices(self.model.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        Self {
            model: self.model.fork(device),
            towers: self.towers.fork(device),
            scale: self.scale.fork(device),
            skipped: self.skipped.to_device(device),
            ..self
        }
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            model: self.model.to_device(device),
            towers: self.towers.to_device(device),
            scale: self.scale.to_device(device),
            skipped: self.skipped.to_device(device),
            ..self
        }
    }

    fn train(self) -> Self {
        Self {
            model: self.model.train(),
            towers: self.towers.train(),
            ..self
        }
    }

    fn valid(&self) -> Self {
        Self {
            model: self.model.valid(),
            towers: self.towers.valid(),
            ..self.clone()
        }
    }

    fn materialize(self) -> Self {
        Self {
            model: self.model.materialize(),
            towers: self.towers.materialize(),
            ..self
        }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("model", "Struct:TrainableModel");
        self.model.visit(visitor);
        visitor.exit_module("model", "Struct:TrainableModel");
        visitor.enter_module("towers", "Struct:TrainableModel");
        self.towers.visit(visitor);
        visitor.exit_module("towers", "Struct:TrainableModel");
        visitor.enter_module("scale", "Struct:TrainableModel");
        self.scale.visit(visitor);
        visitor.exit_module("scale", "Struct:TrainableModel");
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("model", "Struct:TrainableModel");
        let model = self.model.map(mapper);
        mapper.exit_module("model", "Struct:TrainableModel");
        mapper.enter_module("towers", "Struct:TrainableModel");
        let towers = self.towers.map(|towers| towers.map(mapper));
        mapper.exit_module("towers", "Struct:TrainableModel");
        mapper.enter_module("scale", "Struct:TrainableModel");
        let scale = self.scale.map(|scale| scale.map(mapper));
        mapper.exit_module("scale", "Struct:TrainableModel");
        Self {
            model,
            towers,
            scale,
            ..self
        }
    }

    fn into_record(self) -> ModuleRecord {
        let mut trained = TrainedPaths::default();
        self.visit(&mut trained);
        self.into_record_group(ParamGroup::from_paths(trained.paths))
    }
}

/// A visitor that collects the paths of the parameters in a checkpoint: trained parameters, and the loss scale.
#[derive(Default)]
struct TrainedPaths {
    path: Vec<String>,
    paths: Vec<String>,
}

impl ModuleVisitor for TrainedPaths {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let is_scale = self.path.first().is_some_and(|name| name == "scale");
        if is_scale || param.base().is_require_grad() {
            self.paths.push(self.path.join("."));
        }
    }
}

impl ModuleDisplayDefault for TrainableModel {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content.add("model", &self.model))
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.model)
    }
}

impl ModuleDisplay for TrainableModel {}

impl fmt::Display for TrainableModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.model.fmt(f)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::optim::{master_weights::InF32, optimizer::optimizer};
    use burn::{module::Param, optim::SgdConfig};
    use burn_gemma4::LoadOptions;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        arguments: TrainingArguments,
    }

    fn trainee(clip: &str, dtype: DType) -> TrainableModel {
        let cli = Cli::parse_from(["train", "--clip", clip]);
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/dense-ple"
        );
        let device = Device::flex().autodiff();
        let options = LoadOptions::new().dtype(dtype);
        let model = Gemma4Model::load(folder, &device, options).expect("a fixture");
        TrainableModel::new(model, &cli.arguments, None)
    }

    /// A visitor that registers a gradient for each float parameter. Every element of the gradient is `value`.
    struct Everywhere {
        value: f32,
        gradients: GradientsParams,
    }

    impl ModuleVisitor for Everywhere {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let like = param.val().inner().cast(DType::F32);
            let gradient = like.zeros_like().add_scalar(self.value);
            self.gradients.register(param.id, gradient);
        }
    }

    fn gradients(trainee: &TrainableModel, value: f32) -> GradientsParams {
        let gradients = GradientsParams::new();
        let mut everywhere = Everywhere { value, gradients };
        trainee.model.visit(&mut everywhere);
        everywhere.gradients
    }

    /// A visitor that sums the squared differences between the weights after a step and the weights before it.
    struct Moved<'a> {
        before: &'a GradientsParams,
        squares: f64,
    }

    impl ModuleVisitor for Moved<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let before = self.before.get::<D>(param.id).expect("a weight");
            let after = param.val().inner().cast(DType::F32);
            let squares = (after - before).square().sum();
            self.squares += f64::from(squares.into_scalar::<f32>());
        }
    }

    struct Weights(GradientsParams);

    impl ModuleVisitor for Weights {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let weight = param.val().inner().cast(DType::F32);
            self.0.register(param.id, weight);
        }
    }

    fn sgd() -> ModuleOptimizer {
        ModuleOptimizer::from(InF32(SgdConfig::new().build()))
    }

    /// Runs a step of gradient descent with the learning rate 1. Every element of the gradients is `value`. Returns the
    /// updated model, and the Euclidean distance between the weights before and after the step.
    fn step(trainee: TrainableModel, value: f32) -> (TrainableModel, f64) {
        step_by(&mut sgd(), trainee, value)
    }

    fn step_by(
        optimizer: &mut ModuleOptimizer,
        trainee: TrainableModel,
        value: f32,
    ) -> (TrainableModel, f64) {
        let mut weights = Weights(GradientsParams::new());
        trainee.model.visit(&mut weights);
        let gradients = gradients(&trainee, value);
        let trainee = trainee.optimize(optimizer, 1.0.into(), gradients);
        let before = &weights.0;
        let mut moved = Moved {
            before,
            squares: 0.0,
        };
        trainee.model.visit(&mut moved);
        (trainee, moved.squares.sqrt())
    }

    #[test]
    fn gradients_are_clipped_by_their_global_norm() {
        let (_, moved) = step(trainee("0.5", DType::F32), 3.0);
        assert!((moved - 0.5).abs() < 1e-3, "{moved}");
        // Every element of these gradients is 1e-5, which gives a norm below the limit, so the gradients must not be clipped.
        let trainee = trainee("0.5", DType::F32);
        let norm = 1e-5 * (Module::num_params(&trainee.model) as f64).sqrt();
        let (_, moved) = step(trainee, 1e-5);
        assert!((moved / norm - 1.0).abs() < 0.02, "{moved}, not {norm}");
    }

    /// Checks that a step with NaN or infinite gradients changes no weight and is counted. The clip limit 0 turns
    /// clipping off.
    #[test]
    fn step_with_nan_or_infinite_gradients_is_skipped() {
        for (dtype, clip) in [(DType::F32, "1"), (DType::BF16, "1"), (DType::F32, "0")] {
            for name in ["sgd", "adamw"] {
                let cli = Cli::parse_from(["train", "--optimizer", name]);
                let mut optimizer = optimizer(&cli.arguments.step);
                let skipped = SkippedSteps::default();
                let mut trainee = trainee(clip, dtype).counting(&skipped);
                for (value, moves) in [
                    (f32::NAN, false),
                    (1.0, true),
                    (f32::INFINITY, false),
                    (1.0, true),
                ] {
                    let moved;
                    (trainee, moved) = step_by(&mut optimizer, trainee, value);
                    assert_eq!(
                        moved > 0.0,
                        moves,
                        "{dtype:?}, {name}, {clip}, {value}: {moved}"
                    );
                    assert!(moved.is_finite(), "{moved}");
                }
                assert_eq!(skipped.value(), 2, "{dtype:?}, {name}, {clip}");
            }
        }
    }

    #[test]
    fn step_in_f16_with_overflow_is_skipped_and_halves_the_scale() {
        let skipped = SkippedSteps::default();
        let trainee = trainee("1", DType::F16).counting(&skipped);
        let (trainee, moved) = step(trainee, f32::INFINITY);
        assert_eq!(moved, 0.0);
        let scale = trainee.scale.as_ref().map(LossScale::value);
        assert_eq!(scale, Some(32768.0));
        let (trainee, moved) = step(trainee, 32768.0);
        assert!(moved > 0.5, "{moved}");
        let scale = trainee.scale.as_ref().map(LossScale::value);
        assert_eq!(scale, Some(32768.0));
        assert_eq!(skipped.value(), 1);
    }
}
