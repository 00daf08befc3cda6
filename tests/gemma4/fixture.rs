//! The fixtures: tiny checkpoints, with the results that Hugging Face Transformers computed for these checkpoints.

use crate::devices::{TestDevice, devices};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_gemma4::{Gemma4, GenerateOptions, LoadOptions, Sampling};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::{collections::HashMap, fs, path::PathBuf};

/// The names of all fixtures. The first is a model like Gemma 4 E2B. The second holds the same model in the form of a
/// multimodal checkpoint in bf16. The next two are models like 31B and 26B, and the last model has head sizes 256 and 512.
pub const ALL: [&str; 5] = [
    "dense-ple",
    "dense-ple-mm-bf16",
    "dense-keqv",
    "moe",
    "realhead-ple",
];

/// The maximum difference between two correct computations in f32, relative to the largest element of the expected result.
pub const TOLERANCE: f32 = 2e-4;

/// A tiny checkpoint with the results of Hugging Face Transformers.
pub struct Fixture {
    pub name: &'static str,
    pub prompt: Vec<u32>,
    pub generated: Vec<u32>,
    tensors: HashMap<String, Reference>,
}

/// A tensor that Hugging Face Transformers computed.
#[derive(Clone)]
pub struct Reference {
    pub values: Vec<f32>,
}

#[derive(Deserialize)]
struct Description {
    prompt: Vec<u32>,
    generated: Vec<u32>,
}

/// Returns the path of a fixture's folder.
pub fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

impl Fixture {
    pub fn open(name: &'static str) -> Self {
        let folder = folder(name);
        let text =
            fs::read_to_string(folder.join("reference.json")).expect("the fixture is readable");
        let Description { prompt, generated } =
            serde_json::from_str(&text).expect("the description parses");
        Self {
            name,
            prompt,
            generated,
            tensors: read(folder.join("reference.safetensors")),
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        ALL.into_iter().map(Self::open)
    }

    pub fn folder(&self) -> PathBuf {
        folder(self.name)
    }

    pub fn load(&self, device: &Device, dtype: DType) -> Gemma4 {
        Gemma4::load(self.folder(), device, LoadOptions::new().dtype(dtype))
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Returns the loss and the gradients that Hugging Face Transformers computed, or `None` if the fixture has no
    /// gradients.
    pub fn gradients(&self) -> Option<HashMap<String, Reference>> {
        let path = self.folder().join("grads.safetensors");
        path.exists().then(|| read(path))
    }

    pub fn get(&self, name: &str) -> Option<&Reference> {
        self.tensors.get(name)
    }

    pub fn reference(&self, name: &str) -> &Reference {
        self.get(name)
            .unwrap_or_else(|| panic!("{} has no {name}", self.name))
    }
}

impl Reference {
    /// Panics if `tensor` differs from the expected tensor `self` by more than f32 rounding explains.
    pub fn assert_close<const D: usize>(&self, tensor: Tensor<D>, what: &str) {
        let (error, largest) = self.error(tensor, what);
        assert!(
            error <= TOLERANCE * largest,
            "{what}: error {error:e}, largest {largest:e}"
        );
    }

    /// Returns the largest absolute error of `tensor`, and the largest magnitude of the expected elements.
    pub fn error<const D: usize>(&self, tensor: Tensor<D>, what: &str) -> (f32, f32) {
        let values = values(tensor);
        assert_eq!(values.len(), self.values.len(), "{what}");
        let error = largest(values.iter().zip(&self.values).map(|(a, b)| a - b));
        (error, largest(self.values.iter().copied()))
    }
}

/// Panics if `found` differs from `expected` by more than f32 rounding explains.
pub fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = largest(found.iter().zip(expected).map(|(a, b)| a - b));
    let scale = largest(expected.iter().copied());
    assert!(error <= TOLERANCE * scale, "{what}: {error:e} of {scale:e}");
}

/// Returns the largest magnitude, or NaN if any value is NaN.
pub fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |largest: f32, value| match value.is_nan() {
        true => f32::NAN,
        false => largest.max(value.abs()),
    })
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().iter::<f32>().collect()
}

pub fn tokens(rows: &[&[u32]], device: &Device) -> Tensor<2, Int> {
    let shape = [rows.len(), rows[0].len()];
    let tokens: Vec<i32> = rows.concat().iter().map(|token| *token as i32).collect();
    Tensor::from_data(TensorData::new(tokens, shape), device)
}

/// Returns options for the greedy generation of `max_tokens` tokens. Stop tokens are ignored.
pub fn greedy(gemma: &Gemma4, max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        sampling: Sampling::greedy(),
        ignore_stop_tokens: true,
        ..gemma.options()
    }
}

/// Returns the CRC-32 checksum of `bytes`, as zlib defines it.
pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    };
    !bytes.iter().fold(u32::MAX, step)
}

/// Reads every tensor of a safetensors file.
pub fn read(path: PathBuf) -> HashMap<String, Reference> {
    let bytes = fs::read(path).expect("the fixture is readable");
    SafeTensors::deserialize(&bytes)
        .expect("the file is safetensors")
        .iter()
        .map(|(name, view)| {
            let values = floats(view.dtype(), view.data());
            (name.to_owned(), Reference { values })
        })
        .collect()
}

/// Calls `test` once for every fixture on every device, with the model in f32.
pub fn on_every_device(test: impl Fn(&Fixture, &Gemma4, &TestDevice)) {
    for device in devices() {
        for fixture in Fixture::all() {
            let gemma = fixture.load(&device.device, DType::F32);
            test(&fixture, &gemma, &device);
        }
    }
}

fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect(),
        Dtype::BF16 => bytes
            .chunks_exact(2)
            .map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16))
            .collect(),
        Dtype::I64 => bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| i64::from_le_bytes(*bytes) as f32)
            .collect(),
        Dtype::BOOL => bytes.iter().map(|byte| f32::from(*byte)).collect(),
        other => panic!("the fixtures have no {other:?}"),
    }
}
