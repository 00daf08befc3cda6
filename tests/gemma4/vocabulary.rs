//! Tests that a token outside the vocabulary gives an error in every function that takes tokens. No function may read memory at
//! the index of such a token.

use crate::devices::devices;
use crate::fixture::Fixture;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_gemma4::{Gemma4Error, Gemma4Model, Logits, Packing};

/// The tested texts. Each pair holds a text of four tokens, and the one token of the text that is not in the
/// vocabulary. The vocabulary has 320 tokens.
const OUTSIDE: [([i32; 4], i32); 5] = [
    ([2, 7, 9, 320], 320),
    ([1_000_000, 7, 9, 8], 1_000_000),
    ([2, i32::MAX, 9, 8], i32::MAX),
    ([2, -1, 9, 8], -1),
    ([2, 7, i32::MIN, 8], i32::MIN),
];

fn tensor(tokens: [i32; 4], device: &Device) -> Tensor<2, Int> {
    // The batch has two sequences. The token outside the vocabulary is in the second sequence.
    let both = [[2, 5, 6, 7], tokens].concat();
    Tensor::from_data(TensorData::new(both, [2, 4]), device)
}

#[track_caller]
fn check<T>(what: &str, token: i32, outcome: Result<T, Gemma4Error>) {
    let Err(error) = outcome else {
        panic!("{what}: {token} should be refused");
    };
    let text = error.to_string();
    let words = [format!("the token {token}"), "320".into()];
    assert!(
        matches!(
            error,
            Gemma4Error::Argument {
                argument: "tokens",
                ..
            }
        ) && words.iter().all(|word| text.contains(word)),
        "{what}: {text}"
    );
}

fn on_every_device(test: impl Fn(&str, &Gemma4Model, &Device)) {
    for device in devices() {
        let gemma = Fixture::open("dense-ple").load(&device.device, DType::F32);
        test(device.name, gemma.model(), &device.device);
    }
}

#[test]
fn token_outside_the_vocabulary_is_refused_by_forward_and_hidden() {
    on_every_device(|name, model, device| {
        for (tokens, token) in OUTSIDE {
            check(name, token, model.forward(tensor(tokens, device)));
            let hidden = model.hidden(tensor(tokens, device), Logits::Last(1));
            check(name, token, hidden);
            let packing = Packing::new(vec![vec![4], vec![1, 3]], 4).expect("the rows fit");
            let packed = model.forward_packed(tensor(tokens, device), &packing);
            check(name, token, packed);
        }
        let within = model.forward(tensor([0, 319, 1, 2], device));
        assert_eq!(
            within.expect("the tokens are in the vocabulary").dims(),
            [2, 4, 320]
        );
    });
}

#[test]
fn token_outside_the_vocabulary_is_refused_by_gradients() {
    let device = Device::flex().autodiff();
    let gemma = Fixture::open("dense-ple").load(&device, DType::F32);
    for (tokens, token) in OUTSIDE {
        let outcome = gemma
            .model()
            .gradients(tensor(tokens, &device), None, Logits::All, |_| {
                panic!("the loss must not be computed")
            });
        check("gradients", token, outcome);
    }
}

/// A step with a token outside the vocabulary is refused and leaves the cache unchanged.
#[test]
fn token_outside_the_vocabulary_is_refused_by_steps() {
    on_every_device(|name, model, device| {
        let mut cache = model.cache(vec![0, 0]);
        let prompt = || tensor([2, 3, 4, 5], device);
        model
            .step(prompt(), &mut cache, Logits::None)
            .expect("the step succeeds");
        for (tokens, token) in OUTSIDE {
            let step = model.step(tensor(tokens, device), &mut cache, Logits::Last(1));
            check(name, token, step);
        }
        let mut decoder = model.decoder(&mut cache);
        for token in [320, i32::MAX] {
            check(name, token, decoder.step(&[2, token as u32]).map(drop));
            let by_parts = decoder.step_by_parts(&[2, token as u32], &mut |_| ());
            check(name, token, by_parts.map(drop));
        }
        decoder
            .step(&[2, 319])
            .expect("the tokens are in the vocabulary");
        assert_eq!(cache.len(), 5);
    });
}
