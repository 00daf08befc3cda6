//! Tests the mixture of experts (MoE). Kernels must select the same experts as the host, even if probabilities are
//! equal. The logits and the gradients of the kernels must equal those of the host, except for rounding. Some sizes are
//! no multiples of the tile size. If a test computes the gradients twice, they must be bitwise equal.

use crate::{
    devices::devices,
    fixture::{assert_close, tokens, values},
    gradients::{gradients_of, norm},
};
use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{Device, Tensor, TensorData},
};
use burn_gemma4::{
    DecodeMode, ExpertsConfig, Gemma4Config, Gemma4Model, GradientRecorder, LayerType, Logits,
    TrainBatch,
    observe::{LayerSite, Observer, Site},
};
use std::collections::BTreeMap;

/// The number of tokens in the vocabulary.
const VOCABULARY: usize = 320;

/// The sizes of a mixture of experts, and the length of the test's text.
struct Case {
    num_experts: usize,
    top_k_experts: usize,
    moe_intermediate_size: usize,
    positions: usize,
    /// True if all experts are equally probable for all tokens.
    tied: bool,
}

/// A case in which all tokens select the same two experts, because all probabilities are equal. The number of tokens
/// exceeds the rows of a tile, and the experts' width of 7 is no multiple of the tile size.
const TIED: Case = Case {
    num_experts: 9,
    top_k_experts: 2,
    moe_intermediate_size: 7,
    positions: 70,
    tied: true,
};

/// The decode cases, each with its batch size. In the first case, each token selects every expert. In the second case, the
/// batch has 8 sequences, and there are more experts than a cube (thread block) has units (threads).
const DECODED: [(Case, usize); 2] = [
    (
        Case {
            num_experts: 5,
            top_k_experts: 5,
            moe_intermediate_size: 13,
            positions: 9,
            tied: false,
        },
        1,
    ),
    (
        Case {
            num_experts: 130,
            top_k_experts: 8,
            moe_intermediate_size: 8,
            positions: 9,
            tied: false,
        },
        8,
    ),
];

impl Case {
    fn name(&self) -> String {
        let Self {
            num_experts,
            top_k_experts,
            positions,
            ..
        } = self;
        format!("{top_k_experts} of {num_experts}, {positions} positions")
    }

    /// Returns a model that has the same parameters on every device.
    fn model(&self, device: &Device) -> Gemma4Model {
        let config = Gemma4Config {
            // All sizes except those of the experts equal the sizes of the fixture `moe`. So this test reuses the kernels
            // that other tests have compiled.
            vocab_size: VOCABULARY,
            vocab_size_per_layer_input: VOCABULARY,
            hidden_size: 64,
            intermediate_size: 48,
            layer_types: vec![LayerType::Full],
            num_attention_heads: 4,
            num_key_value_heads: 2,
            num_global_key_value_heads: 1,
            sliding_head_dim: 32,
            global_head_dim: 64,
            experts: Some(ExpertsConfig {
                num_experts: self.num_experts,
                top_k_experts: self.top_k_experts,
                moe_intermediate_size: self.moe_intermediate_size,
            }),
            ..Gemma4Config::moe_26b_a4b()
        };
        let mut numbers = Numbers {
            path: Vec::new(),
            tied: self.tied,
        };
        Gemma4Model::new(&config, device).map(&mut numbers)
    }

    fn text(&self) -> Vec<u32> {
        (0..self.positions as u32)
            .map(|position| (position * position * 7 + 3 * position + 2) % VOCABULARY as u32)
            .collect()
    }
}

/// Fills parameters with numbers that depend only on the parameters' paths.
struct Numbers {
    path: Vec<String>,
    tied: bool,
}

impl ModuleMapper for Numbers {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        if path.ends_with("layer_scalar") {
            return param;
        }
        let mut state = path.bytes().fold(17u32, |state, byte| {
            state.wrapping_mul(31).wrapping_add(u32::from(byte))
        });
        let (middle, width) = match D {
            1 => (1.0, 0.2),
            _ if self.tied && path.contains("router.proj") => (0.0, 0.0),
            _ => (0.0, 0.6),
        };
        let mut number = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            middle + width * ((state >> 8) as f32 / (1 << 24) as f32 - 0.5)
        };
        param.map(|tensor| {
            let shape = tensor.dims();
            let count = shape.iter().product();
            let numbers: Vec<f32> = (0..count).map(|_| number()).collect();
            let tracked = tensor.is_require_grad();
            let numbers = Tensor::from_data(TensorData::new(numbers, shape), &tensor.device());
            numbers.set_require_grad(tracked)
        })
    }
}

/// Records the experts that the router of each layer has selected.
#[derive(Default)]
struct Chosen(Vec<Vec<f32>>);

impl Observer for Chosen {
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>) {
        if let Site::Layer(_, LayerSite::RouterExperts) = site {
            self.0.push(values(tensor()));
        }
    }
}

/// The results of a case: the logits of the whole text, the selected experts, and the gradients of all parameters. The
/// loss of these gradients depends on the logits.
struct Outcome {
    logits: Vec<f32>,
    chosen: Vec<Vec<f32>>,
    gradients: BTreeMap<String, Option<Vec<f32>>>,
}

fn outcome(case: &Case, device: &Device) -> Outcome {
    let tracked = device.clone().autodiff();
    let model = case.model(&tracked);
    let text = case.text();
    let mut chosen = Chosen::default();
    let logits = model
        .forward_observed(tokens(&[&text], &tracked), &mut chosen)
        .expect("the tokens are in the vocabulary");
    let loss = (logits.clone() * logits.clone().detach().sin()).mean();
    Outcome {
        logits: values(logits),
        chosen: chosen.0,
        gradients: gradients_of(&model, &loss.backward()),
    }
}

#[test]
fn moe_logits_experts_and_gradients_equal_the_host() {
    let case = TIED;
    let expected = outcome(&case, &Device::flex());
    for chosen in &expected.chosen {
        assert_eq!(*chosen, [0.0, 1.0].repeat(case.positions));
    }
    for device in devices() {
        let what = format!("{} {}", case.name(), device.name);
        let found = outcome(&case, &device.device);
        assert_eq!(found.chosen, expected.chosen, "{what}");
        assert_close(&found.logits, &expected.logits, &what);
        let again = outcome(&case, &device.device);
        assert!(found.gradients == again.gradients, "{what}");
        let norms = expected.gradients.values().flatten();
        let most = norms.map(|gradient| norm(gradient.iter().copied()));
        let most = most.fold(0f64, f64::max);
        for (path, found) in found.gradients {
            let (found, expected) = match (found, &expected.gradients[&path]) {
                (Some(found), Some(expected)) => (found, expected),
                (found, expected) => {
                    assert_eq!(found.is_some(), expected.is_some(), "{what} {path}");
                    continue;
                }
            };
            // A softmax over a single element has a gradient of 0 except for rounding errors, so the bound has an absolute
            // term.
            let error = norm(found.iter().zip(expected).map(|(a, b)| a - b));
            let bound = 1e-4 * norm(expected.iter().copied()) + 1e-6 * most;
            assert!(
                error <= bound,
                "{what}: {path} is off by {error:e}, not {bound:e}"
            );
            if path.contains("experts.") {
                let idle = found.len() / case.num_experts * case.top_k_experts;
                assert!(found[idle..].iter().all(|gradient| *gradient == 0.0));
                assert!(found[..idle].iter().any(|gradient| *gradient != 0.0));
            }
        }
    }
}

#[test]
fn moe_decode_step_by_step_equals_one_pass() {
    for device in devices() {
        for (case, batch) in DECODED {
            let what = format!("{} batch {batch} {}", case.name(), device.name);
            let model = case.model(&device.device);
            let text = case.text();
            let at_once = model.forward(tokens(&[&text], &device.device));
            let at_once = values(at_once.expect("the tokens are in the vocabulary"));
            let mut cache = model.cache(vec![0; batch]);
            let prefix = vec![&text[..3]; batch];
            let read = model.step(tokens(&prefix, &device.device), &mut cache, Logits::None);
            read.expect("the step succeeds");
            let mut decoder = model.decoder(&mut cache);
            for (position, token) in text.iter().enumerate().skip(3) {
                let next = decoder
                    .step(&vec![*token; batch])
                    .expect("the step succeeds");
                let logits = next.logits().expect("the logits are readable");
                for logits in logits.chunks(VOCABULARY) {
                    assert_close(
                        logits,
                        &at_once[position * VOCABULARY..][..VOCABULARY],
                        &what,
                    );
                }
            }
            let expected = match device.device == Device::flex() {
                true => DecodeMode::Layers,
                false => DecodeMode::Graph,
            };
            assert_eq!(decoder.mode(), expected, "{what}");
        }
    }
}

/// If the model has more experts than the router kernel supports, the host computes a part of a training step. The step is
/// then not captured as a CUDA graph.
#[test]
fn moe_with_too_many_experts_is_not_captured() {
    let case = Case {
        num_experts: 520,
        top_k_experts: 2,
        moe_intermediate_size: 8,
        positions: 9,
        tied: false,
    };
    for device in devices() {
        let tracked = device.device.clone().autodiff();
        let model = case.model(&tracked);
        let text = case.text();
        for by_layer in [false, true] {
            let recorder = || GradientRecorder::new().by_layer(by_layer);
            let losses = [recorder(), recorder().without_graph_capture()].map(|mut recorder| {
                let lesson = TrainBatch {
                    tokens: tokens(&[&text[..8]], &tracked),
                    packing: None,
                    media: None,
                    targets: tokens(&[&text[1..]], &tracked),
                };
                let outcome = recorder.gradients(&model, lesson, 1.0);
                assert!(!recorder.has_graph());
                let (loss, _) = outcome.expect("the batch is valid");
                loss.into_scalar::<f32>()
            });
            assert!(losses[0] > 0.0 && losses[0] == losses[1], "{losses:?}");
        }
    }
}
