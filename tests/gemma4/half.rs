//! Tests half precision. The error of the logits is their distance from the f32 logits of Hugging Face Transformers. In
//! bf16, the error may be at most 1.5 times the error that Transformers has in bf16. In f16, the error may be at most
//! the error that Transformers has in bf16.

use crate::{
    devices::devices,
    fixture::{Fixture, largest, tokens, values},
};
use burn::tensor::{DType, Tensor};
use burn_gemma4::{
    Cache, Gemma4, Logits,
    observe::{LayerSite, Observer, Site},
};

/// Returns the root mean square of `a - b`.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let squares: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (squares / a.len() as f32).sqrt()
}

/// An observer that finds the first position at which rounding makes the router select other experts than in f32. From
/// this position on, the logits differ by arbitrary amounts, so the test does not compare them.
struct Routing<'a> {
    fixture: &'a Fixture,
    probabilities: Vec<f32>,
    /// The first position at which the router selects another expert than in the f32 results.
    first_other: usize,
}

impl Observer for Routing<'_> {
    fn observe<const D: usize>(&mut self, site: Site, tensor: impl FnOnce() -> Tensor<D>) {
        let reference = |name: String| &self.fixture.reference(&name).values;
        match site {
            Site::Layer(_, LayerSite::RouterProbabilities) => self.probabilities = values(tensor()),
            Site::Layer(layer, LayerSite::RouterExperts) => {
                let chosen = values(tensor());
                let positions = self.fixture.prompt.len();
                let top_k = chosen.len() / positions;
                let theirs = reference(format!("router.{layer}.topk_idx"));
                let exact = reference(format!("router.{layer}.probs"));
                let experts = exact.len() / positions;
                for position in 0..positions.min(self.first_other) {
                    let row = |all: &[f32]| all[position * top_k..][..top_k].to_vec();
                    let (ours, theirs) = (row(&chosen), row(theirs));
                    if ours.iter().all(|expert| theirs.contains(expert)) {
                        continue;
                    }
                    // If the smallest selected and the largest unselected probability are close, rounding explains the
                    // selection of another expert. The gap between these probabilities may be at most twice the
                    // rounding error.
                    let exact = &exact[position * experts..][..experts];
                    let found = &self.probabilities[position * experts..][..experts];
                    let moved = largest(exact.iter().zip(found).map(|(a, b)| a - b));
                    let mut sorted = exact.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    let gap = sorted[top_k - 1] - sorted[top_k];
                    assert!(
                        gap <= 2.0 * moved,
                        "{}: gap {gap}, moved {moved}",
                        self.fixture.name
                    );
                    self.first_other = position;
                }
            }
            _ => {}
        }
    }
}

/// The error of half-precision logits is their distance from the f32 logits of Hugging Face Transformers. The limit for
/// bf16 is 1.5 times the error that Transformers has in bf16, because two correct orders of summation differ by
/// rounding. The limit for f16, which is more precise, is the bf16 error of Transformers.
#[test]
fn half_precision_logits_are_as_close_to_f32_as_transformers() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            if !device.computes_in(dtype) {
                continue;
            }
            for fixture in Fixture::all() {
                let gemma = fixture.load(&device.device, dtype);
                assert_eq!(gemma.dtype(), dtype);
                let input = tokens(&[&fixture.prompt], &device.device);
                let mut routing = Routing {
                    fixture: &fixture,
                    probabilities: Vec::new(),
                    first_other: fixture.prompt.len(),
                };
                let found = values(
                    gemma
                        .model()
                        .forward_observed(input, &mut routing)
                        .expect("the tokens are in the vocabulary"),
                );
                let compared = routing.first_other * gemma.config().vocab_size;
                assert!(compared > 0, "{}: no position to compare", fixture.name);
                let exact = &fixture.reference("logits").values[..compared];
                let transformers = &fixture.reference("bf16.logits").values[..compared];
                let theirs = distance(transformers, exact);
                let ours = distance(&found[..compared], exact);
                let allowed = match dtype {
                    DType::F16 => theirs,
                    _ => 1.5 * theirs,
                };
                println!(
                    "{} {} {}: {ours} from f32, transformers in bf16 {theirs}",
                    fixture.name,
                    device.name,
                    dtype.name()
                );
                assert!(
                    ours <= allowed,
                    "{} {}: {ours} > {allowed}",
                    fixture.name,
                    device.name
                );
            }
        }
    }
}

/// The logits with compact keys have at most 1.5 times the error of the logits with separate keys. Rounding differs,
/// because compact keys share columns with the values.
#[test]
fn half_precision_compact_keys_are_as_close_to_f32_as_separate_keys() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            if !device.computes_in(dtype) {
                continue;
            }
            let fixture = Fixture::open("dense-keqv");
            let gemma = fixture.load(&device.device, dtype);
            let exact = &fixture.reference("logits").values;
            let read = |cache: Cache| distance(&by_chunks(&gemma, cache, &fixture.prompt), exact);
            let apart = read(gemma.model().cache(vec![0]));
            let compact = read(gemma.model().compact_cache(vec![0]));
            let what = format!("{} {}", device.name, dtype.name());
            println!("{what}: {compact} from f32, keys apart {apart}");
            assert!(compact <= 1.5 * apart, "{what}: {compact} > 1.5 * {apart}");
        }
    }
}

/// Returns the logits of all positions of `prompt`. The prompt is prefilled in chunks of three tokens.
fn by_chunks(gemma: &Gemma4, mut cache: Cache, prompt: &[u32]) -> Vec<f32> {
    let model = gemma.model();
    prompt
        .chunks(3)
        .flat_map(|chunk| {
            let chunk = tokens(&[chunk], &model.device());
            let logits = model
                .step(chunk, &mut cache, Logits::All)
                .expect("the step succeeds");
            values(logits.expect("logits were requested"))
        })
        .collect()
}
