//! A model as Burn's learner takes it.

use super::{
    arguments::{StepArguments, TrainingArguments},
    averaging::Averaging,
    factor,
    gradients::{add, clipping, norm},
    loader::{Batch, Step},
    loss_scale::LossScale,
    recorder,
    skipped::Skipped,
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
use burn_gemma4::{Gemma4Model, GradientRecorder, Lesson};
use std::fmt;

const ONE_SHAPE: &str =
    "the loader makes tokens of the vocabulary, and targets and packing of their shape";

/// A model that learns to predict the next token.
#[derive(Clone, Debug)]
pub struct Trainee {
    /// The model.
    pub model: Gemma4Model,
    /// Of a model in f16.
    scale: Option<LossScale>,
    /// Adds a step's gradients up in f32; else it has one batch.
    in_f32: bool,
    /// Computes each layer anew in the backward.
    by_layer: bool,
    /// Captures the launches of gradients, where a step has one batch, and no other thread the device.
    records: bool,
    /// The largest norm of all gradients together.
    largest_norm: Option<f32>,
    /// What a device's part of a step's loss counts for the learner, which takes the mean of all devices' losses.
    devices: usize,
    /// Where the gradients are added to those of other devices; without, the learner does that.
    averaging: Option<Averaging>,
    /// Counts the steps that are left out.
    skipped: Skipped,
}

/// Whether a step's gradients are added up, and stay, in f32.
pub fn gradients_in_f32(arguments: &TrainingArguments, dtype: DType) -> bool {
    arguments.accumulate > 1 || dtype == DType::F16
}

impl Trainee {
    /// `model`, which is trained as the arguments say.
    pub fn new(
        model: Gemma4Model,
        arguments: &TrainingArguments,
        averaging: Option<Averaging>,
    ) -> Self {
        Self {
            in_f32: gradients_in_f32(arguments, model.dtype()),
            devices: arguments.devices.len().max(1),
            records: !arguments.step.no_graph
                && arguments.devices.len() <= 1
                && averaging.is_none(),
            averaging,
            ..Self::alone(model, &arguments.step)
        }
    }

    /// `model` on one device, with one batch a step.
    pub fn alone(model: Gemma4Model, arguments: &StepArguments) -> Self {
        let is_f16 = model.dtype() == DType::F16;
        Self {
            scale: is_f16.then(|| LossScale::new(&model.device())),
            in_f32: is_f16,
            by_layer: arguments.checkpointing.is_by_layer(),
            records: !arguments.no_graph,
            largest_norm: (arguments.clip > 0.0).then_some(arguments.clip),
            devices: 1,
            averaging: None,
            skipped: Skipped::default(),
            model: model.with_mlp_anew(arguments.checkpointing.is_of_mlp()),
        }
    }

    /// Counts the steps that are left out in `skipped`.
    pub fn counting(self, skipped: &Skipped) -> Self {
        Self {
            skipped: skipped.clone(),
            ..self
        }
    }

    /// This device's part of a step's mean loss, without autodiff, and the gradients of that, times the loss's scale.
    fn gradients(&self, model: &Gemma4Model, step: Step) -> (Tensor<1>, GradientsParams) {
        let scale = self.scale.as_ref().map_or(1.0, LossScale::value);
        let mut loss = Tensor::zeros([1], (&model.device().without_autodiff(), DType::F32));
        let mut sum = GradientsParams::new();
        // The next batch's gradients would be written over those of the one before.
        let records = self.records && step.batches.len() == 1;
        for batch in step.batches {
            let share = batch.counted as f64 / step.targets.max(1) as f64;
            let factor = share * f64::from(scale);
            let (part, gradients) = self.of_batch(model, batch, factor, records);
            loss = loss + part.mul_scalar(share);
            match self.in_f32 {
                true => add(&mut sum, gradients, model),
                // The only batch.
                false => sum = gradients,
            }
        }
        (loss, sum)
    }

    /// The mean loss of a batch, without autodiff, and the gradients of `factor` times that.
    fn of_batch(
        &self,
        model: &Gemma4Model,
        batch: Batch,
        factor: f64,
        records: bool,
    ) -> (Tensor<1>, GradientsParams) {
        let lesson = Lesson {
            tokens: batch.tokens,
            packing: Some(&batch.packing),
            targets: batch.targets,
        };
        let outcome = match records {
            true => recorder::gradients(model, lesson, factor, self.by_layer),
            false => GradientRecorder::new()
                .by_layer(self.by_layer)
                .without_graph_capture()
                .gradients(model, lesson, factor),
        };
        outcome.expect(ONE_SHAPE)
    }
}

/// The mean loss of a batch.
fn loss(model: &Gemma4Model, batch: &Batch) -> Tensor<1> {
    let hidden = model.hidden_packed(batch.tokens.clone(), &batch.packing);
    hidden
        .and_then(|hidden| model.loss(hidden, batch.targets.clone()))
        .expect(ONE_SHAPE)
}

/// A mean loss.
pub struct Loss {
    value: Tensor<1>,
    /// What it counts among others: the tokens that it is the mean of, or 1 for a step.
    weight: usize,
}

impl Adaptor<LossInput> for Loss {
    /// Burn's metric weighs by the length.
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

impl TrainStep for Trainee {
    type Input = Step;
    type Output = Loss;

    fn step(&self, step: Step) -> TrainOutput<Loss> {
        let (value, grads) = match &self.averaging {
            None => {
                let (loss, gradients) = self.gradients(&self.model, step);
                (loss.mul_scalar(self.devices as f64), gradients)
            }
            Some(averaging) => {
                let number = step.number;
                let model = averaging.unmarked(&self.model);
                let (loss, gradients) = self.gradients(&model, step);
                averaging.sum(number, loss, gradients, &model)
            }
        };
        let item = Loss { value, weight: 1 };
        TrainOutput { grads, item }
    }

    /// With the gradients of the whole step, of all devices. One with a gradient that is no number is left out, which costs the host no look at the device
    /// but for a model in f16.
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
        let averaging = self.averaging.clone();
        let Some(world) = averaging.as_ref().and_then(Averaging::in_parts) else {
            return factor::during(factor, || optimizer.step(rate, self, gradients));
        };
        let own = world.own_gradients(gradients, &self);
        let updated = factor::during(factor, || optimizer.step(rate, self, own));
        let device = updated.model.device();
        world.of_owners(updated, &device)
    }
}

impl InferenceStep for Trainee {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        let value = loss(&self.model, &batch);
        Loss {
            value,
            weight: batch.counted,
        }
    }
}

/// Burn's derived one but for the record, which has what is trained: a checkpoint of an adapter is as small as the adapter.
impl Module for Trainee {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.model.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self {
            model: self.model.fork(device),
            scale: self.scale.fork(device),
            skipped: self.skipped.to_device(device),
            ..self
        }
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            model: self.model.to_device(device),
            scale: self.scale.to_device(device),
            skipped: self.skipped.to_device(device),
            ..self
        }
    }

    fn train(self) -> Self {
        Self {
            model: self.model.train(),
            ..self
        }
    }

    fn valid(&self) -> Self {
        Self {
            model: self.model.valid(),
            ..self.clone()
        }
    }

    fn materialize(self) -> Self {
        Self {
            model: self.model.materialize(),
            ..self
        }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("model", "Struct:Trainee");
        self.model.visit(visitor);
        visitor.exit_module("model", "Struct:Trainee");
        visitor.enter_module("scale", "Struct:Trainee");
        self.scale.visit(visitor);
        visitor.exit_module("scale", "Struct:Trainee");
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("model", "Struct:Trainee");
        let model = self.model.map(mapper);
        mapper.exit_module("model", "Struct:Trainee");
        mapper.enter_module("scale", "Struct:Trainee");
        let scale = self.scale.map(|scale| scale.map(mapper));
        mapper.exit_module("scale", "Struct:Trainee");
        Self {
            model,
            scale,
            ..self
        }
    }

    fn into_record(self) -> ModuleRecord {
        let mut trained = Trained::default();
        self.visit(&mut trained);
        self.into_record_group(ParamGroup::from_paths(trained.paths))
    }
}

/// The paths of what a checkpoint has: parameters that are trained, and the loss's scale.
#[derive(Default)]
struct Trained {
    path: Vec<String>,
    paths: Vec<String>,
}

impl ModuleVisitor for Trained {
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

impl ModuleDisplayDefault for Trainee {
    fn content(&self, content: Content) -> Option<Content> {
        Some(content.add("model", &self.model))
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.model)
    }
}

impl ModuleDisplay for Trainee {}

impl fmt::Display for Trainee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.model.fmt(f)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::training::{masters::InF32, optimizer::optimizer};
    use burn::{module::Param, optim::SgdConfig};
    use burn_gemma4::LoadOptions;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        arguments: TrainingArguments,
    }

    fn trainee(clip: &str, dtype: DType) -> Trainee {
        let cli = Cli::parse_from(["train", "--clip", clip]);
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dense-ple");
        let device = Device::flex().autodiff();
        let options = LoadOptions::new().dtype(dtype);
        let model = Gemma4Model::load(folder, &device, options).expect("a fixture");
        Trainee::new(model, &cli.arguments, None)
    }

    /// Gradients of one value everywhere.
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

    fn gradients(trainee: &Trainee, value: f32) -> GradientsParams {
        let gradients = GradientsParams::new();
        let mut everywhere = Everywhere { value, gradients };
        trainee.model.visit(&mut everywhere);
        everywhere.gradients
    }

    /// The sum of the squares of the differences of all weights.
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

    /// How far a step of rate 1 moves the weights.
    fn step(trainee: Trainee, value: f32) -> (Trainee, f64) {
        step_by(&mut sgd(), trainee, value)
    }

    fn step_by(optimizer: &mut ModuleOptimizer, trainee: Trainee, value: f32) -> (Trainee, f64) {
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
    fn all_gradients_together_are_clipped() {
        let (_, moved) = step(trainee("0.5", DType::F32), 3.0);
        assert!((moved - 0.5).abs() < 1e-3, "{moved}");
        // A norm that is small enough stays.
        let trainee = trainee("0.5", DType::F32);
        let norm = 1e-5 * (Module::num_params(&trainee.model) as f64).sqrt();
        let (_, moved) = step(trainee, 1e-5);
        assert!((moved / norm - 1.0).abs() < 0.02, "{moved}, not {norm}");
    }

    /// Without a loss scale, and whether gradients are clipped or not.
    #[test]
    fn a_step_whose_gradients_are_no_numbers_is_left_out() {
        for (dtype, clip) in [(DType::F32, "1"), (DType::BF16, "1"), (DType::F32, "0")] {
            for name in ["sgd", "adamw"] {
                let cli = Cli::parse_from(["train", "--optimizer", name]);
                let mut optimizer = optimizer(&cli.arguments.step);
                let skipped = Skipped::default();
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
    fn a_step_that_overflows_is_left_out() {
        let skipped = Skipped::default();
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
