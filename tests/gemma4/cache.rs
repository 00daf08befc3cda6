//! Tests that a text in the KV cache gives the same logits whether it is prefilled at once or in portions. A portion is
//! a single token, a chunk, or a padded batch. The texts are longer than the sliding window, and longer than the
//! buffers' first allocation.

use crate::devices::devices;
use crate::fixture::{Fixture, assert_close, on_every_device, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Cache, Gemma4, Gemma4Model, Logits};

/// A function that creates an empty cache for a model. The second argument lists the number of padding tokens of each
/// sequence.
type NewCache = fn(&Gemma4Model, Vec<usize>) -> Cache;

/// The two kinds of cache, each with a name for error messages. If a layer's keys and values come from the same
/// projection, the compact cache stores only the key columns that RoPE rotates.
const CACHES: [(&str, NewCache); 2] = [
    ("cache", Gemma4Model::cache),
    ("compact cache", Gemma4Model::compact_cache),
];

/// Returns both kinds of cache if the model computes values from the key projection. In other models, compact keys save no
/// memory, so only the ordinary cache is returned.
fn caches(gemma: &Gemma4) -> &'static [(&'static str, NewCache)] {
    match gemma.config().attention_k_eq_v {
        true => &CACHES,
        false => &CACHES[..1],
    }
}

/// Returns the logits of all positions of `sequence`, `[positions · vocabulary]`, from one forward pass.
fn at_once(gemma: &Gemma4, sequence: &[u32], device: &Device) -> Vec<f32> {
    values(
        gemma
            .model()
            .forward(tokens(&[sequence], device))
            .expect("the tokens are in the vocabulary"),
    )
}

/// Prefills `cache` with `sequence` in portions, and returns the logits of all positions. The list `portions` holds the
/// number of tokens of each portion. The list is repeated until the sequence ends.
fn by_portions(
    gemma: &Gemma4,
    mut cache: Cache,
    sequence: &[u32],
    portions: &[usize],
    device: &Device,
) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut rest = sequence;
    for portion in portions.iter().cycle() {
        let (now, later) = rest.split_at((*portion).min(rest.len()));
        let now = tokens(&[now], device);
        let step = gemma
            .model()
            .step(now, &mut cache, Logits::All)
            .expect("the step succeeds");
        logits.extend(values(step.expect("logits were requested")));
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    assert_eq!(cache.len(), sequence.len());
    logits
}

#[test]
fn cache_read_by_portions_gives_the_logits_of_one_pass() {
    on_every_device(|fixture, gemma, device| {
        let sequence = [&fixture.prompt[..], &fixture.generated].concat();
        let expected = at_once(gemma, &sequence, &device.device);
        for (kind, cache) in caches(gemma) {
            for portions in [&[1][..], &[3], &[7, 1, 1], &[16], &[24, 1]] {
                let cache = cache(gemma.model(), vec![0]);
                let found = by_portions(gemma, cache, &sequence, portions, &device.device);
                let what = format!("{} {} {kind} by {portions:?}", fixture.name, device.name);
                assert_close(&found, &expected, &what);
            }
        }
    });
}

/// A forward that computes the logits of only the last positions gives the same logits for them as a forward that
/// computes all logits.
#[test]
fn cache_logits_of_last_positions_equal_the_whole() {
    on_every_device(|fixture, gemma, device| {
        let expected = at_once(gemma, &fixture.prompt, &device.device);
        let vocabulary = gemma.config().vocab_size;
        for (count, chunk) in [(1, 24), (5, 24), (1, 10)] {
            let mut cache = gemma.model().cache(vec![0]);
            let (first, last) = fixture
                .prompt
                .split_at(fixture.prompt.len().saturating_sub(chunk));
            if !first.is_empty() {
                let first = tokens(&[first], &device.device);
                let none = gemma
                    .model()
                    .step(first, &mut cache, Logits::None)
                    .expect("the step succeeds");
                assert!(none.is_none());
            }
            let last = tokens(&[last], &device.device);
            let logits = gemma
                .model()
                .step(last, &mut cache, Logits::Last(count))
                .expect("the step succeeds");
            let what = format!("{} {} last {count}", fixture.name, device.name);
            assert_close(
                &values(logits.expect("logits were requested")),
                &expected[expected.len() - count * vocabulary..],
                &what,
            );
        }
    });
}

/// Sequences of different lengths are left-padded to a batch. Each sequence gives the same logits in the batch as
/// alone. The logits stay equal after the ring buffer has overwritten the padding.
#[test]
fn cache_padded_batch_equals_single_sequences() {
    on_every_device(|fixture, gemma, device| {
        for (kind, cache) in caches(gemma) {
            let what = format!("{} {} {kind}", fixture.name, device.name);
            padded_batch(fixture, gemma, *cache, &device.device, &what);
        }
    });
}

fn padded_batch(fixture: &Fixture, gemma: &Gemma4, cache: NewCache, device: &Device, what: &str) {
    let whole = [&fixture.prompt[..], &fixture.generated].concat();
    let longest = whole.len();
    let padding = [0, 3, longest - 20, longest - 17];
    let pad = gemma.config().pad_token;
    let rows: Vec<Vec<u32>> = padding
        .iter()
        .map(|padding| [vec![pad; *padding], whole[*padding..].to_vec()].concat())
        .collect();
    let mut cache = cache(gemma.model(), padding.to_vec());
    let vocabulary = gemma.config().vocab_size;
    let mut found: Vec<Vec<f32>> = vec![Vec::new(); rows.len()];
    let mut start = 0;
    // In the first portion, one sequence has only padding. A short portion and single tokens follow.
    for portion in [longest - 19, 4].into_iter().chain([1; 15]) {
        let end = start + portion;
        let columns: Vec<&[u32]> = rows.iter().map(|row| &row[start..end]).collect();
        let columns = tokens(&columns, device);
        let step = gemma
            .model()
            .step(columns, &mut cache, Logits::All)
            .expect("the step succeeds");
        let logits = values(step.expect("logits were requested"));
        for (row, logits) in found.iter_mut().zip(logits.chunks(portion * vocabulary)) {
            row.extend(logits);
        }
        start = end;
    }
    for (padding, found) in padding.iter().zip(found) {
        let expected = at_once(gemma, &whole[*padding..], device);
        let what = format!("{what} padded by {padding}");
        assert_close(&found[padding * vocabulary..], &expected, &what);
    }
}

/// Growing the cache's buffers does not change the logits.
#[test]
fn cache_growing_past_its_blocks_keeps_the_logits() {
    for device in devices() {
        for name in ["dense-ple", "dense-keqv"] {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let longest = gemma.config().max_position_embeddings;
            let sequence: Vec<u32> = (0..longest as u32)
                .map(|index| 20 + index * 7 % 290)
                .collect();
            let expected = at_once(&gemma, &sequence, &device.device);
            for (kind, cache) in caches(&gemma) {
                let cache = cache(gemma.model(), vec![0]);
                let portions = &[250, 1, 1, 5, 1];
                let found = by_portions(&gemma, cache, &sequence, portions, &device.device);
                assert_close(&found, &expected, &format!("{name} {} {kind}", device.name));
            }
        }
    }
}

/// Sliding layers store the keys and values of one window. Shared KV layers store no keys and values.
#[test]
fn cache_bytes_equal_window_and_block_sizes() {
    let device = Device::flex();
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&device, DType::F32);
    // The factor 2 counts keys and values, and the factor 4 counts the bytes of an f32. Each of the two sliding layers
    // has 8 slots (token positions) with 32 columns. The one full layer has 256 slots with 64 columns.
    let expected = 2 * 4 * (2 * 8 * 32 + 256 * 64);
    for (_, cache) in CACHES {
        // The model `dense-ple` computes its values separately from its keys, so even the compact cache stores complete keys
        // and values.
        assert_eq!(bytes_after(cache, &fixture, &gemma, &device), expected);
    }

    let fixture = Fixture::open("dense-keqv");
    let gemma = fixture.load(&device, DType::F32);
    // Each of the three sliding layers has two heads, and each head has 8 slots (token positions) with 32 columns. Each
    // of the two full layers has 256 slots with 64 columns. A compact key stores only the 16 columns that RoPE rotates.
    let sliding = 2 * 4 * 3 * 2 * 8 * 32;
    for ((_, cache), columns) in CACHES.into_iter().zip([64 + 64, 64 + 16]) {
        let full = 4 * 2 * 256 * columns;
        let found = bytes_after(cache, &fixture, &gemma, &device);
        assert_eq!(found, sliding + full);
    }
}

/// Returns the size in bytes of a cache that holds a fixture's prompt.
fn bytes_after(cache: NewCache, fixture: &Fixture, gemma: &Gemma4, device: &Device) -> usize {
    let mut cache = cache(gemma.model(), vec![0]);
    assert!(cache.is_empty());
    assert_eq!(cache.bytes(), 0);
    let row = tokens(&[&fixture.prompt], device);
    gemma
        .model()
        .step(row, &mut cache, Logits::None)
        .expect("the step succeeds");
    cache.bytes()
}

/// The ring buffer of a sliding layer has as many slots as the window has keys. If the window has more keys than the model
/// has positions, the buffer has one slot per position.
#[test]
fn cache_window_beyond_the_positions_allocates_the_positions() {
    let device = Device::flex();
    let cache = |window: usize| {
        let mut config = Fixture::open("dense-ple")
            .load(&device, DType::F32)
            .config()
            .clone();
        config.sliding_window = window;
        let model = Gemma4Model::new(&config, &device);
        let mut cache = model.cache(vec![0]);
        let prompt = tokens(&[&[2, 40, 41]], &device);
        model
            .step(prompt, &mut cache, Logits::Last(1))
            .expect("the tokens are in the vocabulary");
        (cache.bytes(), config.max_position_embeddings)
    };
    let (expected, positions) = cache(512);
    assert_eq!(positions, 512);
    assert!(cache(511).0 < expected);
    for window in [513, 1 << 20] {
        assert_eq!(cache(window).0, expected, "{window}");
    }
}
