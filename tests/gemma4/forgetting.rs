//! Caches that forget, where forgetting meets something else: padding, the end of a block of the growing buffers, passes of more tokens
//! than a cache has spare slots for, and texts of which nothing is left.

use crate::devices::devices;
use crate::fixture::{Fixture, assert_close, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Decoder, Gemma4, Logits};

/// The logits of all of `text`, `[positions · vocabulary]`.
fn at_once(gemma: &Gemma4, text: &[u32], device: &Device) -> Vec<f32> {
    let logits = gemma.model().forward(tokens(&[text], device));
    values(logits.expect("tokens within"))
}

fn read(decoder: &mut Decoder<'_>, tokens: &[u32]) -> Vec<f32> {
    let next = decoder.read(tokens).expect("a pass");
    next.logits().expect("logits")
}

/// A buffer keeps the block that forgotten columns made it grow by, and padding is told of its slots, too.
#[test]
fn padded_batches_forget_a_block() {
    let device = Device::flex();
    for name in ["dense-ple", "dense-keqv"] {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&device, DType::F32);
        let (model, vocabulary) = (gemma.model(), gemma.config().vocab_size);
        for compact in [false, gemma.config().attention_k_eq_v] {
            const PADDING: usize = 3;
            let padding = vec![0, PADDING];
            let cache = match compact {
                true => model.compact_cache(padding),
                false => model.cache(padding),
            };
            let mut cache = cache.forgetting(8);
            let text: Vec<u32> = (0..258).map(|index| 20 + index * 7 % 290).collect();
            let mut step = |first: usize, end: usize| {
                let now = tokens(&[&text[first..end], &text[first..end]], &device);
                let logits = model.step(now, &mut cache, Logits::All).expect("a step");
                if end == 258 {
                    cache.forget(8).expect("few enough");
                }
                values(logits.expect("logits"))
            };
            step(0, 250);
            step(250, 258);
            let found = step(250, 252);
            for (row, padding) in [0, PADDING].into_iter().enumerate() {
                let expected = at_once(&gemma, &text[padding..252], &device);
                assert_close(
                    &found[row * 2 * vocabulary..][..2 * vocabulary],
                    &expected[expected.len() - 2 * vocabulary..],
                    &format!("{name} compact {compact} row {row}"),
                );
            }
        }
    }
}

/// A ring without as many spare slots cannot take a pass's tokens before its first query has seen what they overwrite.
#[test]
fn passes_may_be_longer_than_what_may_be_forgotten() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let text = [&fixture.prompt[..], &fixture.generated].concat();
        let expected = at_once(&gemma, &text, &device.device);
        for spare in [0, 2, 4] {
            let mut cache = gemma.model().cache(vec![0]).forgetting(spare);
            let mut decoder = gemma.model().decoder(&mut cache);
            let mut found = Vec::new();
            let mut rest = &text[..];
            // By kernels and not, in turn.
            for portion in [4, 1, 5, 3, 1].into_iter().cycle() {
                let (now, later) = rest.split_at(portion.min(rest.len()));
                found.extend(read(&mut decoder, now));
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            let what = format!("{} spare {spare}", device.name);
            assert_close(&found, &expected, &what);
        }
    }
}

/// A decoder whose cache has forgotten all begins anew, and kernels go on from what it reads then.
#[test]
fn all_may_be_forgotten() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let text = &fixture.prompt;
        let expected = at_once(&gemma, text, &device.device);
        let mut cache = gemma.model().cache(vec![0]).forgetting(8);
        let mut decoder = gemma.model().decoder(&mut cache);
        read(&mut decoder, &[60]);
        read(&mut decoder, &[61]);
        read(&mut decoder, &[62]);
        decoder.forget(3).expect("few enough");
        assert!(decoder.cache().is_empty());
        let found: Vec<f32> = text
            .iter()
            .flat_map(|token| read(&mut decoder, &[*token]))
            .collect();
        assert_close(&found, &expected, device.name);
    }
}
