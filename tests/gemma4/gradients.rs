//! Tests training: the loss and the gradient of every parameter equal the results of Hugging Face Transformers, with
//! and without gradient checkpointing.

use crate::{
    devices::{TestDevice, devices},
    fixture::{Fixture, tokens, values},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, Device, Gradients, Int, Tensor, TensorData, activation::log_softmax},
};
use burn_gemma4::{Gemma4Config, Gemma4Model, Logits};
use std::collections::BTreeMap;

/// The maximum difference between a gradient and the gradient in Hugging Face Transformers, relative to the gradient's
/// norm.
const TOLERANCE: f64 = 1e-3;

/// Returns two autodiff devices, each with a name for error messages. The first device has no gradient checkpointing,
/// and the second device has it.
pub fn tracked(device: &TestDevice) -> [(String, Device); 2] {
    let plain = device.device.clone().autodiff();
    let checkpointed = plain.clone().gradient_checkpointing();
    [("plain", plain), ("checkpointed", checkpointed)]
        .map(|(strategy, tracked)| (format!("{} {strategy}", device.name), tracked))
}

/// Returns the mean cross entropy of predicting each next token.
fn next_token_loss(model: &Gemma4Model, tokens: Tensor<2, Int>) -> Tensor<1> {
    let [batch, positions] = tokens.dims();
    let logits = model
        .forward(tokens.clone())
        .expect("the tokens are in the vocabulary");
    let predicting = logits.narrow(1, 0, positions - 1);
    let next = tokens.narrow(1, 1, positions - 1);
    let next = next.reshape([batch, positions - 1, 1]);
    -log_softmax(predicting, 2).gather(2, next).mean()
}

/// A visitor that collects the gradients of a model's parameters.
struct Collected<'a> {
    gradients: &'a Gradients,
    path: Vec<String>,
    found: BTreeMap<String, Option<Vec<f32>>>,
}

impl ModuleVisitor for Collected<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients);
        self.found.insert(self.path.join("."), gradient.map(values));
    }
}

/// Returns the gradients of all parameters, keyed by the parameter's path. A parameter without a gradient has `None`.
pub fn gradients_of(
    model: &Gemma4Model,
    gradients: &Gradients,
) -> BTreeMap<String, Option<Vec<f32>>> {
    let mut collected = Collected {
        gradients,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    model.visit(&mut collected);
    collected.found
}

/// Returns the square root of the sum of squares of `values`.
pub fn norm(values: impl Iterator<Item = f32>) -> f64 {
    let squares: f64 = values.map(|value| f64::from(value).powi(2)).sum();
    squares.sqrt()
}

/// Returns the distance of `found` from `expected`, relative to the norm of `expected`.
pub fn relative(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let distance = norm(found.iter().zip(expected).map(|(a, b)| a - b));
    distance / norm(expected.iter().copied())
}

#[test]
fn gradients_equal_transformers() {
    for device in devices() {
        for fixture in Fixture::all() {
            let Some(expected) = fixture.gradients() else {
                continue;
            };
            for (name, tracked) in tracked(&device) {
                let what = format!("{} {name}", fixture.name);
                let gemma = fixture.load(&tracked, DType::F32);
                let loss = next_token_loss(gemma.model(), tokens(&[&fixture.prompt], &tracked));
                let gradients = loss.backward();
                let error = relative(&values(loss), &expected["loss"].values);
                assert!(error <= TOLERANCE, "{what}: the loss is off by {error:e}");

                let mut worst = (0.0, String::new());
                let mut compared = 1;
                for (path, found) in gradients_of(gemma.model(), &gradients) {
                    match (found, expected.get(&format!("grad.model.{path}"))) {
                        (Some(found), Some(expected)) => {
                            let error = relative(&found, &expected.values);
                            assert!(error <= TOLERANCE, "{what}: {path} is off by {error:e}");
                            compared += 1;
                            if error > worst.0 {
                                worst = (error, path);
                            }
                        }
                        // Only the layer scalar may have no gradient, because it is not trained.
                        (None, None) => assert!(path.ends_with("layer_scalar"), "{what}: {path}"),
                        (found, _) => panic!("{what}: {path} has a gradient: {}", found.is_some()),
                    }
                }
                assert_eq!(compared, expected.len(), "{what}");
                println!(
                    "{what}: loss off by {error:.1e}, gradients by {:.1e} in {}",
                    worst.0, worst.1
                );
            }
        }
    }
}

#[test]
fn gradients_of_the_chunked_loss_equal_transformers() {
    let device = Device::flex().autodiff();
    for fixture in Fixture::all() {
        let Some(expected) = fixture.gradients() else {
            continue;
        };
        let gemma = fixture.load(&device, DType::F32);
        let count = fixture.prompt.len();
        let next = [&fixture.prompt[1..], &[0]].concat();
        let last = Tensor::<2, Int>::from_data([[-1]], &device);
        let targets = tokens(&[&next], &device).slice_assign([0..1, count - 1..count], last);
        let hidden = gemma
            .model()
            .hidden(tokens(&[&fixture.prompt], &device), Logits::All)
            .expect("the tokens are in the vocabulary");
        let loss = gemma
            .model()
            .loss(hidden, targets)
            .expect("the targets fit");
        let gradients = loss.backward();
        let error = relative(&values(loss), &expected["loss"].values);
        assert!(
            error <= TOLERANCE,
            "{}: the loss is off by {error:e}",
            fixture.name
        );
        for (path, found) in gradients_of(gemma.model(), &gradients) {
            if let (Some(found), Some(expected)) =
                (found, expected.get(&format!("grad.model.{path}")))
            {
                let error = relative(&found, &expected.values);
                assert!(
                    error <= TOLERANCE,
                    "{}: {path} is off by {error:e}",
                    fixture.name
                );
            }
        }
    }
}

/// The loss and the gradients of the output head are equal on every device. The head and the loss together are one operator,
/// which each backend implements separately.
#[test]
fn gradients_of_the_head_are_equal_on_every_device() {
    let fixture = Fixture::open("dense-ple");
    let outcome = |tracked: &Device| {
        let gemma = fixture.load(tracked, DType::F32);
        let columns = gemma.config().hidden_size;
        let states = (0..5 * columns).map(|index| ((7 * index * index) as f32).sin());
        let states = TensorData::new(states.collect::<Vec<f32>>(), [1, 5, columns]);
        let states = Tensor::<3>::from_data(states, tracked).require_grad();
        let targets = Tensor::<2, Int>::from_data([[3, -1, 300, 7, 0]], tracked);
        let loss = gemma.model().loss(states.clone(), targets);
        let loss = loss.expect("the targets fit") * 2.0;
        let gradients = loss.backward();
        let of_states = states.grad(&gradients).expect("the tensor has a gradient");
        let of_head = gemma.model().embed_tokens.weight.val().grad(&gradients);
        let of_head = of_head.expect("the tensor has a gradient");
        [values(loss), values(of_states), values(of_head)]
    };
    let expected = outcome(&Device::flex().autodiff());
    for device in devices() {
        for (what, tracked) in tracked(&device) {
            for (found, expected) in outcome(&tracked).iter().zip(&expected) {
                let error = relative(found, expected);
                assert!(error <= 1e-4, "{what} is off by {error:e}");
            }
        }
    }
}

#[test]
fn gradients_of_the_last_positions_equal_those_of_a_whole_pass() {
    let device = Device::flex().autodiff();
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&device, DType::F32);
    let model = gemma.model();
    let row = tokens(&[&fixture.prompt], &device);
    let count = fixture.prompt.len();
    let of_last = |hidden: Tensor<3>| {
        let targets = row.clone().narrow(1, count - 4, 4);
        let loss = model.loss(hidden, targets).expect("the targets fit");
        gradients_of(model, &loss.backward())
    };
    let all = model
        .hidden(row.clone(), Logits::All)
        .expect("the tokens are in the vocabulary")
        .narrow(1, count - 4, 4);
    let expected = of_last(all);
    let last = || {
        model
            .hidden(row.clone(), Logits::Last(4))
            .expect("the tokens are in the vocabulary")
    };
    for (path, found) in of_last(last()) {
        if let (Some(found), Some(expected)) = (found, &expected[&path]) {
            let error = relative(&found, expected);
            assert!(error <= TOLERANCE, "{path} is off by {error:e}");
        }
    }
    assert!(model.loss(last(), row.clone()).is_err());
}

#[test]
fn gradients_of_an_untied_head_equal_those_of_plain_operations() {
    let device = Device::flex().autodiff();
    let config = Gemma4Config {
        tie_word_embeddings: false,
        ..Fixture::open("dense-ple")
            .load(&device, DType::F32)
            .config()
            .clone()
    };
    let model = Gemma4Model::new(&config, &device);
    let row = tokens(&[&[2, 17, 5, 44, 300, 9]], &device);
    let plain = next_token_loss(&model, row.clone());
    let hidden = model
        .hidden(row.clone(), Logits::All)
        .expect("the tokens are in the vocabulary")
        .narrow(1, 0, 5);
    let chunked = model
        .loss(hidden, row.narrow(1, 1, 5))
        .expect("the targets fit");
    let error = relative(&values(chunked.clone()), &values(plain.clone()));
    assert!(error <= TOLERANCE, "the loss is off by {error:e}");
    let expected = gradients_of(&model, &plain.backward());
    let found = gradients_of(&model, &chunked.backward());
    assert!(found["lm_head.weight"].is_some());
    for (path, found) in found {
        if let (Some(found), Some(expected)) = (found, &expected[&path]) {
            let error = relative(&found, expected);
            assert!(error <= TOLERANCE, "{path} is off by {error:e}");
        }
    }
}

/// Gradients that are computed layer by layer equal the gradients of one backward through the whole model.
#[test]
fn gradients_by_layer_equal_those_of_one_backward() {
    let plain = Device::flex().autodiff();
    let checkpointed = plain.clone().gradient_checkpointing();
    compare_by_layer("dense-ple", &plain, Logits::All);
    compare_by_layer("dense-ple", &checkpointed, Logits::Last(3));
    compare_by_layer("dense-keqv", &checkpointed, Logits::All);
    compare_by_layer("moe", &plain, Logits::Last(3));
}

fn compare_by_layer(name: &'static str, tracked: &Device, asked: Logits) {
    let what = format!("{name} {asked:?}");
    let fixture = Fixture::open(name);
    let gemma = fixture.load(tracked, DType::F32);
    let model = gemma.model();
    let row = tokens(&[&fixture.prompt], tracked);
    let [_, count] = row.dims();
    let positions = if asked == Logits::All { count } else { 3 };
    let targets = row.clone().narrow(1, count - positions, positions);
    let loss = |hidden| model.loss(hidden, targets.clone());
    let whole = loss(
        model
            .hidden(row.clone(), asked)
            .expect("the tokens are in the vocabulary"),
    )
    .expect("the targets fit");
    let expected = gradients_of(model, &whole.backward());
    let (by_layer, mut found) = model
        .gradients(row, None, asked, loss)
        .expect("the targets fit");
    let error = relative(&values(by_layer), &values(whole));
    assert!(error <= 1e-5, "{what}: the loss is off by {error:e}");
    model.visit(&mut Compared {
        what,
        expected: &expected,
        found: &mut found,
        path: Vec::new(),
    });
}

struct Compared<'a> {
    what: String,
    expected: &'a BTreeMap<String, Option<Vec<f32>>>,
    found: &'a mut GradientsParams,
    path: Vec<String>,
}

impl ModuleVisitor for Compared<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let what = format!("{}: {path}", self.what);
        match (self.found.remove::<D>(param.id), &self.expected[&path]) {
            (Some(found), Some(expected)) => {
                let error = relative(&values(found), expected);
                assert!(error <= 1e-4, "{what} is off by {error:e}");
            }
            (found, expected) => assert_eq!(found.is_some(), expected.is_some(), "{what}"),
        }
    }
}
