//! Tests truncated, bit-flipped and made-up GGUF files. Each malformed file gives an error with a clear text,
//! regardless of what the file's header claims.

use super::{Copy, parts, path};
use attention_workspace::testing::gguf::text_bytes;
use burn_gemma4::Gemma4Error;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::fs;

#[track_caller]
fn error(bytes: &[u8]) -> String {
    let copy = Copy::of(bytes);
    match copy.load() {
        Err(error @ (Gemma4Error::Malformed { .. } | Gemma4Error::Unsupported { .. })) => {
            let text = error.to_string();
            assert!(text.contains("model.gguf"), "{text}");
            text
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("loading should fail"),
    }
}

#[test]
fn gguf_truncated_file_is_refused() {
    let whole = fs::read(path("dense-ple.Q8_0")).expect("the fixture is readable");
    let many = (8..whole.len()).step_by(whole.len() / 60);
    for length in [4, 5, 7, 8, 12, 20, 24, 31].into_iter().chain(many) {
        let text = error(&whole[..length]);
        let is_told =
            text.contains("is not a whole GGUF file") || text.contains("is not within the file");
        assert!(is_told, "{length} bytes: {text}");
    }
    error(&whole[..whole.len() - 1]);
}

/// Returns the bytes of a header that claims `tensors` tensors and `keys` metadata keys, followed by `rest`.
fn header(tensors: u64, keys: u64, rest: &[u8]) -> Vec<u8> {
    let counts = [tensors, keys].map(u64::to_le_bytes).concat();
    [b"GGUF", &3u32.to_le_bytes()[..], &counts, rest].concat()
}

/// Returns the bytes with which a metadata entry begins: the key `a`, followed by the type id `kind` of its value.
fn key(kind: u32) -> Vec<u8> {
    [text_bytes("a"), kind.to_le_bytes().into()].concat()
}

#[test]
fn gguf_huge_counts_are_refused() {
    const HUGE: [u64; 4] = [u64::MAX, u64::MAX / 2 + 1, 1 << 61, 1 << 40];
    for huge in HUGE {
        error(&header(huge, 0, &[]));
        error(&header(0, huge, &[]));
        let length = huge.to_le_bytes();
        // Each file claims a huge length for one item. The item is a key, a text, a list (of bytes, of numbers or of texts),
        // or the name of a tensor.
        error(&header(0, 1, &length));
        error(&header(0, 1, &[key(8), length.into()].concat()));
        for kind in [0u32, 4, 8, 12] {
            let list = [key(9), kind.to_le_bytes().into(), length.into()].concat();
            error(&header(0, 1, &list));
        }
        error(&header(1, 0, &length));
        // Three files have a tensor with a huge dimension or a huge offset. Three more files have a tensor without
        // elements or with a wrong number of dimensions.
        let tensor = |dimensions: &[u64], offset: u64| {
            let name = text_bytes("token_embd.weight");
            let count = (dimensions.len() as u32).to_le_bytes();
            let dimensions: Vec<u8> = dimensions
                .iter()
                .flat_map(|size| size.to_le_bytes())
                .collect();
            let rest = [
                &name[..],
                &count,
                &dimensions,
                &0u32.to_le_bytes(),
                &offset.to_le_bytes(),
            ];
            header(1, 0, &rest.concat())
        };
        error(&tensor(&[huge], 0));
        error(&tensor(&[huge, huge, huge, huge], 0));
        error(&tensor(&[8], huge & !31));
        error(&tensor(&[8; 5], 0));
        error(&tensor(&[], 0));
        error(&tensor(&[0, 8], 0));
    }
}

#[test]
fn gguf_unsupported_format_is_refused_by_name() {
    for (bytes, word) in [
        (
            [b"GGUF", &1u32.to_le_bytes()[..], &[0; 24]].concat(),
            "version 1",
        ),
        (
            [b"GGUF", &3u32.to_be_bytes()[..], &[0; 24]].concat(),
            "big-endian",
        ),
        (header(0, 1, &key(13)), "type 13"),
        (
            header(0, 1, &[key(7), vec![2]].concat()),
            "neither true nor false",
        ),
        (
            header(
                0,
                1,
                &[key(9), 9u32.to_le_bytes().into(), vec![0; 8]].concat(),
            ),
            "list of lists",
        ),
        (
            header(0, 2, &[key(0), vec![1], key(0), vec![1]].concat()),
            "twice",
        ),
    ] {
        let text = error(&bytes);
        assert!(text.contains(word), "{word:?} is missing from {text}");
    }
}

/// Random bits of the header are flipped. A file that is still valid must load, and any other file must give an error.
#[test]
fn gguf_flipped_bits_give_a_model_or_an_error() {
    let whole = fs::read(path("dense-ple.Q8_0")).expect("the fixture is readable");
    let numbers: usize = parts("dense-ple.Q8_0")
        .tensors
        .values()
        .map(|tensor| tensor.bytes.len())
        .sum();
    let header = whole.len() - numbers;
    let mut random = StdRng::seed_from_u64(0);
    let mut refused = 0;
    for _ in 0..150 {
        let mut bytes = whole.clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(4..header);
            bytes[at] ^= 1 << random.random_range(0..8);
        }
        if let Err(error) = Copy::of(&bytes).load() {
            refused += 1;
            assert!(error.to_string().contains("model.gguf"), "{error}");
        }
    }
    assert!(refused > 20, "{refused}");
}
