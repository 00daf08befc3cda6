//! Tests the types of GGUF with codebooks and with 2 or 3 bits. llama.cpp quantizes none of the fixtures to these
//! types, so the tests put random blocks into a fixture.

use super::{changed, load, logits, path, reference};
use crate::fixture::{self, assert_close};
use attention_workspace::testing::devices::devices;
use attention_workspace::testing::gguf::Gguf;
use burn::tensor::DType;
use burn_gemma4::{Gemma4, LoadOptions, Quantization};
use safetensors::SafeTensors;
use std::{fs, ops::ControlFlow};
use tempfile::TempDir;

/// A type: ggml's id, the name, the numbers and bytes of a block, and the offsets of the f16 scales in a block.
type Case = (u32, &'static str, usize, usize, &'static [usize]);

const CASES: [Case; 5] = [
    (10, "Q2_K", 256, 84, &[80, 82]),
    (11, "Q3_K", 256, 110, &[108]),
    (20, "IQ4_NL", 32, 18, &[0]),
    (23, "IQ4_XS", 256, 136, &[0]),
    (39, "MXFP4", 32, 17, &[]),
];

/// The tensor that gets the blocks, by its names in GGUF and in safetensors, and its number of elements.
const NAMES: [&str; 2] = ["blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"];
const NUMBERS: usize = 256 * 256;

fn put(gguf: &mut Gguf, kind: u32, bytes: Vec<u8>) {
    let tensor = gguf.tensors.get_mut(NAMES[0]).expect("the tensor exists");
    assert_eq!(tensor.dimensions, [256, 256]);
    (tensor.kind, tensor.bytes) = (kind, bytes);
}

/// The loaded weights equal bitwise the numbers that the Python package `gguf` gives for the same blocks.
#[test]
fn gguf_small_types_weights_equal_the_gguf_package() {
    let blocks = fs::read(fixture::folder("gguf").join("blocks.safetensors"));
    let blocks = blocks.expect("the fixture is readable");
    let blocks = SafeTensors::deserialize(&blocks).expect("the fixture is safetensors");
    for (kind, name, numbers, bytes, _) in CASES {
        let part = |what| blocks.tensor(&format!("{name}.{what}")).expect(name);
        let count = NUMBERS / numbers;
        let repeated = part("blocks").data().to_vec().repeat(32);
        assert_eq!(repeated.len(), count * bytes, "{name}");
        let copy = changed("wide.Q4_K_M", |gguf| put(gguf, kind, repeated));
        let gemma = copy.load().expect(name);
        let saved = TempDir::new().expect("a temporary folder");
        let save = gemma.model().save(saved.path(), None);
        save.expect("the save succeeds");
        let saved = fs::read(saved.path().join("model.safetensors")).expect("the file is readable");
        let saved = SafeTensors::deserialize(&saved).expect("the file is safetensors");
        let found = saved.tensor(NAMES[1]).expect(name);
        assert_eq!(found.data(), part("numbers").data().repeat(32), "{name}");
    }
}

/// A model that keeps the blocks packed gives the logits and tokens of the model with dequantized weights.
#[test]
fn gguf_small_types_packed_model_equals_the_dequantized_model() {
    let prompt = reference("wide.Q4_K_M").prompt;
    for device in devices() {
        let whole = load(&path("wide.Q4_K_M"), &device.device).expect("the model is valid");
        let without = logits(&whole, &prompt);
        for case in CASES {
            let what = format!("{} {}", case.1, device.name);
            let copy = changed("wide.Q4_K_M", |gguf| put(gguf, case.0, random_blocks(case)));
            let load = |quantization| {
                let options = LoadOptions::new().dtype(DType::F32);
                let options = options.quantization(quantization);
                Gemma4::load(copy.path(), &device.device, options).expect(&what)
            };
            let packed = load(Quantization::Stored);
            assert!(packed.model().is_quantized(), "{what}");
            let whole = load(Quantization::Whole);
            let [found, expected] = [&packed, &whole].map(|gemma| logits(gemma, &prompt));
            assert_close(&found, &expected, &what);
            assert_ne!(found, without, "{what}");
            let tokens = |gemma: &Gemma4| {
                let options = fixture::greedy(gemma, 8);
                let generation =
                    gemma.generate(prompt.clone(), &options, |_| ControlFlow::Continue(()));
                generation.expect("the generation succeeds").tokens
            };
            assert_eq!(tokens(&packed), tokens(&whole), "{what}");
        }
    }
}

/// Returns the blocks of a whole tensor, with random codes and scales that give weights of moderate sizes.
fn random_blocks((kind, _, numbers, bytes, scales): Case) -> Vec<u8> {
    let mut state = kind;
    let mut random = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 16) as u8
    };
    let mut blocks: Vec<u8> = (0..NUMBERS / numbers * bytes).map(|_| random()).collect();
    for block in blocks.chunks_exact_mut(bytes) {
        // Scales of f16 lie between 2^-11 and 2^-9. The exponents of MXFP4 are those of 2^-9 to 2^-6.
        for scale in scales {
            block[scale + 1] = 0x10 | block[scale + 1] & 0x87;
        }
        if scales.is_empty() {
            block[0] = 119 + block[0] % 4;
        }
    }
    blocks
}
