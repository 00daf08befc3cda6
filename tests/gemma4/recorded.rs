//! Tests training steps that are captured as CUDA graphs. A replay gives the same results as separate launches, regardless
//! of what runs between the replays. The cases train whole models and adapters, on packed and plain rows, and with a
//! per-layer table on the host.

use crate::{
    devices::devices,
    fixture::{self, values},
    gradients::relative,
    qlora::adapted,
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Device, Distribution, Int, Tensor, TensorData},
};
use burn_gemma4::{
    Gemma4Model, GradientRecorder, LoadOptions, Packing, PerLayerTable, Quantization, TrainBatch,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The maximum relative difference between a replay and separate launches. The results may differ, because autotuning
/// may have chosen other kernels for the captured step.
const TOLERANCE: f64 = 1e-5;

const POSITIONS: usize = 24;

/// A checkpoint with its load options and the kind of training.
#[derive(Clone, Copy, Debug)]
struct Case {
    checkpoint: &'static str,
    form: Quantization,
    table: PerLayerTable,
    has_adapter: bool,
    by_layer: bool,
    is_packed: bool,
}

const CASES: [Case; 6] = {
    let case = Case {
        checkpoint: "dense-ple",
        form: Quantization::Stored,
        table: PerLayerTable::Device,
        has_adapter: true,
        by_layer: false,
        is_packed: true,
    };
    [
        case,
        Case {
            table: PerLayerTable::Host,
            is_packed: false,
            ..case
        },
        Case {
            has_adapter: false,
            ..case
        },
        Case {
            table: PerLayerTable::Host,
            by_layer: true,
            ..case
        },
        Case {
            form: Quantization::Q4,
            by_layer: true,
            is_packed: false,
            ..case
        },
        Case {
            checkpoint: "moe",
            is_packed: false,
            ..case
        },
    ]
};

impl Case {
    fn load(self, device: &Device) -> Gemma4Model {
        let options = LoadOptions::new()
            .dtype(DType::F32)
            .quantization(self.form)
            .per_layer_table(self.table);
        let model = Gemma4Model::load(fixture::folder(self.checkpoint), device, options);
        let model = model.unwrap_or_else(|error| panic!("{self:?}: {error}"));
        match self.has_adapter {
            true => adapted(model).with_mlp_recompute(!self.by_layer),
            false => model,
        }
    }
}

/// The batch of a training step.
struct Numbers {
    tokens: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    packing: Option<Packing>,
}

impl Numbers {
    /// Draws a batch of two rows. If `is_packed` is true, each row consists of several packed documents, and every
    /// position has a target. Otherwise, only the last third of each row has targets.
    fn draw(random: &mut StdRng, words: i32, is_packed: bool, device: &Device) -> Self {
        let packing = is_packed.then(|| {
            let rows = (0..2).map(|_| {
                let first = random.random_range(1..POSITIONS - 1);
                vec![first, random.random_range(0..POSITIONS - first)]
            });
            Packing::new(rows.collect(), POSITIONS).expect("the rows fit")
        });
        let last = if is_packed { POSITIONS } else { POSITIONS / 3 };
        let mut draw = |columns: usize, first: i32| {
            let numbers = (0..2 * columns).map(|_| random.random_range(first..words));
            let data = TensorData::new(numbers.collect::<Vec<_>>(), [2, columns]);
            Tensor::from_data(data, device)
        };
        Self {
            tokens: draw(POSITIONS, 0),
            targets: draw(last, -words / 2),
            packing,
        }
    }

    fn lesson(&self) -> TrainBatch<'_> {
        TrainBatch {
            tokens: self.tokens.clone(),
            packing: self.packing.as_ref(),
            media: None,
            targets: self.targets.clone(),
        }
    }
}

/// A visitor that collects the gradients of all parameters in the order of the parameters.
struct Collected<'a> {
    gradients: &'a GradientsParams,
    found: Vec<Vec<f32>>,
}

impl ModuleVisitor for Collected<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found
            .extend(self.gradients.get::<D>(param.id).map(values));
    }
}

fn collected(model: &Gemma4Model, gradients: &GradientsParams) -> Vec<Vec<f32>> {
    let mut collected = Collected {
        gradients,
        found: Vec::new(),
    };
    model.visit(&mut collected);
    collected.found
}

/// A mapper that applies a step of gradient descent. Each updated parameter lies in new memory, and the next replay
/// must compute with the new values.
struct Descent<'a> {
    gradients: &'a GradientsParams,
    rate: f64,
}

impl ModuleMapper for Descent<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = self.gradients.get::<D>(param.id) else {
            return param;
        };
        param.map(|tensor| {
            let moved = tensor.clone().inner() - gradient * self.rate;
            moved.autodiff().set_require_grad(tensor.is_require_grad())
        })
    }
}

/// Allocates memory, fills it with NaN and frees it again. If a replay reads memory that was freed before, it may find
/// this NaN, and the comparison then fails.
fn dirty(device: &Device) {
    let sizes = [1 << 8, 1 << 12, 1 << 16, 1 << 20];
    let noise = sizes.map(|size| Tensor::<1>::random([size], Distribution::Default, device));
    for noise in noise {
        let sum = (noise * f32::NAN).sum().into_scalar::<f32>();
        assert!(sum.is_nan());
    }
}

#[test]
fn captured_training_steps_equal_separate_launches() {
    for device in devices() {
        for case in CASES {
            let tracked = device.device.clone().autodiff();
            let what = format!("{case:?} on {}", device.name);
            let mut model = case.load(&tracked);
            let words = model.config().vocab_size as i32;
            let mut random = StdRng::seed_from_u64(5);
            let recorder = || GradientRecorder::new().by_layer(case.by_layer);
            let (mut recorded, mut one_by_one) = (recorder(), recorder().without_graph_capture());
            let mut losses = Vec::new();
            for step in 0..5 {
                let numbers = Numbers::draw(&mut random, words, case.is_packed, &device.device);
                let factor = 1.0 + f64::from(step / 2);
                let learn = |recorder: &mut GradientRecorder| {
                    let outcome = recorder.gradients(&model, numbers.lesson(), factor);
                    let (loss, gradients) =
                        outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
                    (loss, collected(&model, &gradients), gradients)
                };
                let (expected_loss, expected, _) = learn(&mut one_by_one);
                dirty(&device.device);
                let (loss, found, gradients) = learn(&mut recorded);
                assert_eq!(recorded.has_graph(), device.name != "flex", "{what}");
                assert!(!one_by_one.has_graph());
                assert!(!found.is_empty() && found.len() == expected.len(), "{what}");
                for (found, expected) in found.iter().zip(&expected) {
                    let error = relative(found, expected);
                    let is_zero = found == expected;
                    assert!(is_zero || error <= TOLERANCE, "{what}, {step}: {error:e}");
                }
                losses.push((loss, expected_loss));
                let rate = 0.01;
                let mut descent = Descent {
                    gradients: &gradients,
                    rate,
                };
                model = model.map(&mut descent);
            }
            // The losses can still be read after later steps have replayed the graph.
            let losses: Vec<[f32; 2]> = losses
                .into_iter()
                .map(|(found, expected)| [found, expected].map(Tensor::into_scalar))
                .collect();
            for [found, expected] in &losses {
                let error = (found - expected).abs();
                assert!(error <= 1e-6 * expected, "{what}: {losses:?}");
            }
            assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "{what}");
        }
    }
}

/// The recorder drops its CUDA graph in two cases: the shape of a batch differs from the shape at the capture, or
/// another model is trained. From then on, the recorder launches the kernels of each step separately.
#[test]
fn captured_training_step_of_another_shape_or_model_is_computed_directly() {
    for device in devices() {
        let tracked = device.device.clone().autodiff();
        let [first, other] = [CASES[0], CASES[0]].map(|case| case.load(&tracked));
        let words = first.config().vocab_size as i32;
        let mut random = StdRng::seed_from_u64(6);
        for change in ["shape", "model"] {
            let mut recorder = GradientRecorder::new();
            let packed = Numbers::draw(&mut random, words, true, &device.device);
            let last = Numbers::draw(&mut random, words, false, &device.device);
            let mut learn = |model: &Gemma4Model, numbers: &Numbers| {
                let outcome = recorder.gradients(model, numbers.lesson(), 1.0);
                let (loss, gradients) = outcome.expect("the batch is valid");
                let has_graph = recorder.has_graph();
                (loss, collected(model, &gradients), has_graph)
            };
            let (_, _, has_graph) = learn(&first, &packed);
            assert_eq!(has_graph, device.name != "flex");
            let (model, numbers) = match change {
                "shape" => (&first, &last),
                _ => (&other, &packed),
            };
            let (loss, found, has_graph) = learn(model, numbers);
            assert!(!has_graph, "another {change}");
            let mut plain = GradientRecorder::new().without_graph_capture();
            let (expected_loss, expected) = plain
                .gradients(model, numbers.lesson(), 1.0)
                .expect("the batch is valid");
            let expected = collected(model, &expected);
            let [loss, expected_loss] = [loss, expected_loss].map(Tensor::into_scalar::<f32>);
            assert!(
                (loss - expected_loss).abs() <= 1e-6 * loss,
                "another {change}"
            );
            for (found, expected) in found.iter().zip(&expected) {
                assert!(relative(found, expected) <= TOLERANCE, "another {change}");
            }
            // A recorder that has dropped its graph never captures a graph again, not even for the shape and the model
            // of the dropped graph.
            let (_, _, has_graph) = learn(&first, &packed);
            assert!(!has_graph);
        }
    }
}

/// A mapper that makes exactly the listed parameters require gradients.
struct TrainsOnly(Vec<ParamId>);

impl ModuleMapper for TrainsOnly {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_trained = self.0.contains(&param.id);
        param.map(|tensor| tensor.set_require_grad(is_trained))
    }
}

/// A visitor that collects the one-dimensional parameters, each with its size.
#[derive(Default)]
struct Vectors(Vec<(ParamId, usize)>);

impl ModuleVisitor for Vectors {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if D == 1 {
            self.0.push((param.id, param.val().dims()[0]));
        }
    }
}

/// If a step trains another parameter than the captured step, the recorder drops its CUDA graph and launches the
/// kernels separately. The test trains two parameters of one model, one after the other. Both parameters have the same
/// size.
#[test]
fn captured_training_step_with_other_trained_parameter_is_computed_directly() {
    for device in devices() {
        let case = CASES[2];
        let model = case.load(&device.device.clone().autodiff());
        let mut vectors = Vectors::default();
        model.visit(&mut vectors);
        let of_equal_sizes = vectors.0.windows(2).find(|pair| pair[0].1 == pair[1].1);
        let [(first, _), (other, _)] = of_equal_sizes.expect("two norms in a row have equal sizes")
        else {
            unreachable!("a window has two elements");
        };
        let (first, other) = (*first, *other);
        let words = model.config().vocab_size as i32;
        let mut random = StdRng::seed_from_u64(7);
        let numbers = Numbers::draw(&mut random, words, case.is_packed, &device.device);
        let mut recorder = GradientRecorder::new();
        for trained in [first, other] {
            let model = model.clone().map(&mut TrainsOnly(vec![trained]));
            let mut plain = GradientRecorder::new().without_graph_capture();
            let [found, expected] = [&mut recorder, &mut plain].map(|recorder| {
                let outcome = recorder.gradients(&model, numbers.lesson(), 1.0);
                let (_, gradients) = outcome.expect("the batch is valid");
                assert!(gradients.get::<1>(trained).is_some(), "{}", device.name);
                collected(&model, &gradients)
            });
            assert_eq!(found.len(), 1);
            let error = relative(&found[0], &expected[0]);
            assert!(error <= TOLERANCE, "{}: {error:e}", device.name);
            let has_graph = device.name != "flex" && trained == first;
            assert_eq!(recorder.has_graph(), has_graph, "{}", device.name);
        }
    }
}

/// The recorder returns the loss of a model without trained parameters, and no gradients.
#[test]
fn recorder_without_trained_parameters_returns_the_loss() {
    for device in devices() {
        let model = CASES[0].load(&device.device.clone().autodiff());
        let words = model.config().vocab_size as i32;
        let mut random = StdRng::seed_from_u64(9);
        let numbers = Numbers::draw(&mut random, words, true, &device.device);
        let frozen = model.clone().map(&mut TrainsOnly(Vec::new()));
        let [(found, none), (expected, _)] = [&frozen, &model].map(|model| {
            let outcome = GradientRecorder::new().gradients(model, numbers.lesson(), 1.0);
            let (loss, gradients) = outcome.expect("the batch is valid");
            (loss.into_scalar::<f32>(), gradients)
        });
        assert!(none.is_empty(), "{}", device.name);
        let error = f64::from((found - expected).abs() / expected);
        assert!(error <= TOLERANCE, "{}: {error:e}", device.name);
    }
}

/// A mapper that doubles the size of all one-dimensional parameters.
struct DoublesVectors;

impl ModuleMapper for DoublesVectors {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match D {
            1 => param.map(|tensor| {
                let tensor = tensor.detach();
                Tensor::cat(vec![tensor.clone(), tensor], 0).require_grad()
            }),
            _ => param,
        }
    }
}

/// A recorder that panics releases the device, so that another recorder can capture a graph.
#[test]
fn capture_after_a_panic_still_works() {
    for device in devices() {
        let model = CASES[0].load(&device.device.clone().autodiff());
        let words = model.config().vocab_size as i32;
        let mut random = StdRng::seed_from_u64(8);
        let numbers = Numbers::draw(&mut random, words, true, &device.device);
        let misshapen = model.clone().map(&mut DoublesVectors);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _ = GradientRecorder::new().gradients(&misshapen, numbers.lesson(), 1.0);
        }));
        assert!(panicked.is_err(), "norms of twice their size should panic");
        let sum = Tensor::<1>::ones([4], &device.device).sum();
        assert_eq!(sum.into_scalar::<f32>(), 4.0, "{}", device.name);
        let mut recorder = GradientRecorder::new();
        let outcome = recorder.gradients(&model, numbers.lesson(), 1.0);
        assert!(outcome.expect("the batch is valid").0.into_scalar::<f32>() > 0.0);
        assert_eq!(recorder.has_graph(), device.name != "flex");
    }
}

#[test]
fn training_batch_of_wrong_shape_is_refused() {
    let device = Device::flex().autodiff();
    let model = CASES[0].load(&device);
    let tensor = |shape: [usize; 2]| Tensor::<2, Int>::zeros(shape, &device);
    let packing = Packing::new(vec![vec![3]; 2], 8).expect("the rows fit");
    let other = Packing::new(vec![vec![3]; 2], 9).expect("the rows fit");
    let empty = TrainBatch {
        tokens: tensor([0, 8]),
        packing: None,
        media: None,
        targets: tensor([0, 8]),
    };
    let outcome = GradientRecorder::new().gradients(&model, empty, 1.0);
    let error = outcome
        .map(|_| ())
        .expect_err("the batch is empty")
        .to_string();
    assert!(error.starts_with("tokens"), "{error}");
    let cases = [
        ([2, 9], None, "targets"),
        ([1, 8], None, "targets"),
        ([2, 0], None, "targets"),
        ([2, 7], Some(&packing), "targets"),
        ([2, 8], Some(&other), "tokens"),
    ];
    for (targets, packing, argument) in cases {
        let lesson = TrainBatch {
            tokens: tensor([2, 8]),
            packing,
            media: None,
            targets: tensor(targets),
        };
        let outcome = GradientRecorder::new().gradients(&model, lesson, 1.0);
        let Err(error) = outcome else {
            panic!("{targets:?} should be refused")
        };
        let error = error.to_string();
        assert!(error.contains(argument), "{targets:?}: {error}");
    }
}
