//! Tests packed documents: each document has the same logits and gradients in a packed row as in a row without other
//! documents. In half precision, neither packed documents nor padding make a gradient NaN.

use crate::{
    devices::devices,
    fixture::{Fixture, TOLERANCE, largest, tokens, values},
    gradients::{gradients_of, relative, tracked},
};
use burn::tensor::{DType, Device, Tensor, activation::log_softmax};
use burn_gemma4::{Gemma4Error, Gemma4Model, Packing};

/// The rows of packed documents. Each document is a part of a fixture's text. Padding fills each row to `positions` tokens.
struct Packed {
    rows: Vec<Vec<Vec<u32>>>,
    positions: usize,
}

impl Packed {
    /// Creates documents. Some documents are shorter than the window, and others are longer. One row is full, one row has
    /// padding, and one row has a single document.
    fn new(fixture: &Fixture) -> Self {
        let text = [&fixture.prompt[..], &fixture.generated].concat();
        let part = |start: usize, length: usize| text[start..start + length].to_vec();
        Self {
            rows: vec![
                vec![part(0, 3), part(9, 20), part(2, 1), part(4, 11)],
                vec![part(5, 17), part(1, 9)],
                vec![part(3, 35)],
            ],
            positions: 35,
        }
    }

    fn packing(&self) -> Packing {
        let lengths = |row: &Vec<Vec<u32>>| row.iter().map(Vec::len).collect();
        Packing::new(self.rows.iter().map(lengths).collect(), self.positions).expect("the rows fit")
    }

    /// Returns the tokens of each row, padded to `positions` tokens with the token `padding`.
    fn tokens(&self, padding: u32) -> Vec<Vec<u32>> {
        let fill = |row: &Vec<Vec<u32>>| {
            let mut row = row.concat();
            row.resize(self.positions, padding);
            row
        };
        self.rows.iter().map(fill).collect()
    }

    fn documents(&self) -> impl Iterator<Item = &Vec<u32>> {
        self.rows.iter().flatten()
    }

    /// Returns the sum of the cross entropies of the next tokens in all documents, in f32.
    fn loss(&self, model: &Gemma4Model, device: &Device) -> Tensor<1> {
        let packing = self.packing();
        let rows = self.tokens(model.config().pad_token);
        let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
        let tokens = tokens(&rows, device);
        let logits = model
            .forward_packed(tokens.clone(), &packing)
            .expect("the tokens fit the packing");
        let last = self.positions - 1;
        let next = tokens.narrow(1, 1, last);
        let next = next.reshape([rows.len(), last, 1]);
        let predicts = packing.predicts(device).float().narrow(1, 0, last);
        let losses = log_softmax(logits.narrow(1, 0, last).cast(DType::F32), 2).gather(2, next);
        -(losses.squeeze_dim::<2>(2) * predicts.cast(DType::F32)).sum()
    }
}

/// Returns the same sum as [`Packed::loss`], but runs a separate forward for each document.
fn loss_alone(model: &Gemma4Model, documents: &Packed, device: &Device) -> Tensor<1> {
    let of_one = |document: &Vec<u32>| {
        let count = document.len() - 1;
        let input = tokens(&[&document[..count]], device);
        let next = tokens(&[&document[1..]], device).reshape([1, count, 1]);
        -log_softmax(
            model
                .forward(input)
                .expect("the tokens are in the vocabulary"),
            2,
        )
        .gather(2, next)
        .sum()
    };
    documents
        .documents()
        .filter(|document| document.len() > 1)
        .map(of_one)
        .reduce(|sum, loss| sum + loss)
        .expect("there is at least one document")
}

#[test]
fn packed_logits_equal_single_documents() {
    let flex = Device::flex();
    for fixture in Fixture::all() {
        let packed = Packed::new(&fixture);
        let on_flex = fixture.load(&flex, DType::F32);
        let alone = |document: &Vec<u32>| {
            on_flex
                .model()
                .forward(tokens(&[document], &flex))
                .expect("the tokens are in the vocabulary")
        };
        let expected: Vec<Vec<f32>> = packed.documents().map(|row| values(alone(row))).collect();
        for device in devices() {
            let gemma = fixture.load(&device.device, DType::F32);
            let rows = packed.tokens(7);
            let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
            let logits = gemma
                .model()
                .forward_packed(tokens(&rows, &device.device), &packed.packing())
                .expect("the tokens fit the packing");
            let logits = values(logits);
            let vocabulary = gemma.config().vocab_size;
            let mut expected = expected.iter();
            let mut worst = 0f32;
            for (row, documents) in packed.rows.iter().enumerate() {
                let mut start = row * packed.positions * vocabulary;
                for document in documents {
                    let alone = expected.next().expect("logits of each document");
                    let found = &logits[start..start + alone.len()];
                    let error = largest(found.iter().zip(alone).map(|(a, b)| a - b));
                    let error = error / largest(alone.iter().copied());
                    let length = document.len();
                    assert!(
                        error <= TOLERANCE,
                        "{} {}: {length} tokens in row {row} are off by {error:e}",
                        fixture.name,
                        device.name
                    );
                    worst = worst.max(error);
                    start += alone.len();
                }
            }
            println!("{} {}: off by {worst:.1e}", fixture.name, device.name);
        }
    }
}

#[test]
fn packed_gradients_equal_single_documents() {
    let flex = Device::flex().autodiff();
    for name in ["dense-ple", "moe"] {
        let fixture = Fixture::open(name);
        let packed = Packed::new(&fixture);
        let on_flex = fixture.load(&flex, DType::F32);
        let alone = loss_alone(on_flex.model(), &packed, &flex).backward();
        let alone = gradients_of(on_flex.model(), &alone);
        for device in devices() {
            for (device, tracked) in tracked(&device) {
                let gemma = fixture.load(&tracked, DType::F32);
                let together = packed.loss(gemma.model(), &tracked).backward();
                for (path, found) in gradients_of(gemma.model(), &together) {
                    let what = format!("{name} {device}: {path}");
                    match (found, &alone[&path]) {
                        (Some(found), Some(alone)) => {
                            let error = relative(&found, alone);
                            assert!(error <= f64::from(TOLERANCE), "{what} is off by {error:e}");
                        }
                        (found, alone) => assert_eq!(found.is_some(), alone.is_some(), "{what}"),
                    }
                }
            }
        }
    }
}

#[test]
fn packed_half_precision_gradients_are_finite() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            if !device.computes_in(dtype) {
                continue;
            }
            for name in ["dense-ple", "moe", "realhead-ple"] {
                let fixture = Fixture::open(name);
                for (device, tracked) in tracked(&device) {
                    let gemma = fixture.load(&tracked, dtype);
                    let loss = Packed::new(&fixture).loss(gemma.model(), &tracked);
                    let gradients = loss.backward();
                    let what = format!("{name} {device} {}", dtype.name());
                    assert!(values(loss)[0].is_finite(), "{what}");
                    for (path, gradient) in gradients_of(gemma.model(), &gradients) {
                        match gradient {
                            Some(gradient) => {
                                let largest = largest(gradient.into_iter());
                                let is_sane = largest.is_finite() && largest > 0.0;
                                assert!(is_sane, "{what}: {path} has {largest}");
                            }
                            None => assert!(path.ends_with("layer_scalar"), "{what}: {path}"),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn packed_tokens_of_wrong_shape_are_refused() {
    let device = Device::flex();
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&device, DType::F32);
    let packing = Packing::new(vec![vec![2, 3]], 5).expect("a row that fits");
    let row = tokens(&[&fixture.prompt[..6]], &device);
    match gemma.model().forward_packed(row, &packing) {
        Err(Gemma4Error::Argument { argument, reason }) => {
            assert_eq!(argument, "tokens");
            assert!(
                reason.contains("[1, 6]") && reason.contains("[1, 5]"),
                "{reason}"
            );
        }
        other => panic!("{other:?}"),
    }
}
