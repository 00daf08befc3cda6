//! Tests that sampling kernels draw the same tokens as the host's sampler with the same seeds. The cases cover every
//! cut (top-k, top-p, min-p), every dtype, and difficult logits such as ties and NaN. Other tests check the
//! distribution of the drawn tokens, and compare whole texts.

use crate::devices::devices;
use crate::fixture::{Fixture, greedy};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_gemma4::{Gemma4, GenerateOptions, Next, Prompt, Sampler, Sampling};
use std::{
    collections::BTreeSet,
    time::{SystemTime, UNIX_EPOCH},
};

/// Returns a seed that differs in every run, and prints it.
fn fresh() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seed = now.expect("the clock is after 1970").as_nanos() as u64;
    println!("seed {seed}");
    seed
}

/// Returns the next pseudo-random number, at least 0 and less than 1.
fn uniform(state: &mut u64) -> f32 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 40) as f32 / (1 << 24) as f32
}

fn sampling(temperature: f32) -> Sampling {
    Sampling {
        temperature,
        ..Sampling::greedy()
    }
}

/// Returns `count` samplers with different seeds.
fn samplers(sampling: &Sampling, count: usize, seed: u64) -> Vec<Sampler> {
    (0..count as u64)
        .map(|row| {
            Sampler::new(&Sampling {
                seed: Some(seed.wrapping_add(row)),
                ..sampling.clone()
            })
        })
        .collect()
}

/// Draws a token from each row of logits.
fn draw(rows: &[Vec<f32>], samplers: &mut [Sampler], dtype: DType, device: &Device) -> Vec<u32> {
    let data = TensorData::new(rows.concat(), [rows.len(), 1, rows[0].len()]);
    let logits = Tensor::<3>::from_data(data, (device, DType::F32)).cast(dtype);
    Next::of(logits)
        .sample(samplers)
        .expect("the tokens are valid")
}

/// Rounds the elements of the rows to `dtype`.
fn rounded(rows: &[Vec<f32>], dtype: DType) -> Vec<Vec<f32>> {
    let round = |value: &f32| match dtype {
        DType::F16 => burn::tensor::f16::from_f32(*value).to_f32(),
        _ => *value,
    };
    rows.iter()
        .map(|row| row.iter().map(round).collect())
        .collect()
}

/// Returns sampling options with each cut (top-k, top-p, min-p) alone and with several cuts together.
fn cuts() -> Vec<Sampling> {
    let of = |temperature, top_k, top_p, min_p| Sampling {
        top_k,
        top_p,
        min_p,
        ..sampling(temperature)
    };
    vec![
        of(1.0, None, None, None),
        of(0.7, Some(5), None, None),
        of(1.3, None, Some(0.9), None),
        of(1.0, None, None, Some(0.2)),
        of(2.0, Some(40), Some(0.6), Some(0.05)),
        of(1e-30, None, Some(0.5), None),
        // A device may flush the temperature 1e-40 to 0, because 1e-40 is a subnormal f32.
        of(1e-40, None, Some(0.9), Some(0.1)),
        of(1e30, Some(300), Some(1e-6), None),
    ]
}

/// Returns rows of `columns` logits with hard cases: ties, zeros of both signs, NaN, and infinities.
fn hostile(columns: usize, state: &mut u64) -> Vec<Vec<f32>> {
    let (nothing, infinity) = (f32::NEG_INFINITY, f32::INFINITY);
    let mut any = |make: &dyn Fn(f32) -> f32| -> Vec<f32> {
        (0..columns).map(|_| make(uniform(state))).collect()
    };
    let mut rows = vec![
        any(&|u| 20.0 * u - 10.0),
        any(&|_| 0.0),
        any(&|_| -3.5),
        any(&|u| (u * 4.0).floor()),
        any(&|u| if u < 0.5 { -0.0 } else { 0.0 }),
        any(&|u| if u < 0.3 { f32::NAN } else { u }),
        any(&|u| if u < 0.9 { nothing } else { -u }),
        any(&|u| 6e4 * (u - 0.5)),
        any(&|u| if u < 0.1 { infinity } else { u }),
        vec![nothing; columns],
        vec![-f32::NAN; columns],
    ];
    rows[9][columns / 2] = -7.0;
    rows[10][columns - 1] = 65_504.0;
    rows.into_iter()
        .filter(|row| row.iter().any(|logit| *logit > nothing))
        .collect()
}

#[test]
fn sampling_kernel_draws_the_tokens_of_the_host() {
    let mut state = fresh();
    for device in devices() {
        for dtype in [DType::F32, DType::F16] {
            let (mut drawn, mut others) = (0, 0);
            // With 1 or 300 columns, a row is one chunk, which one cube (thread block) processes. With 9,001 columns, a
            // row has several chunks.
            for columns in [1, 300, 9_001] {
                let rows = rounded(&hostile(columns, &mut state), dtype);
                for sampling in cuts() {
                    let mut by_kernels = samplers(&sampling, rows.len(), state);
                    let mut by_definition = by_kernels.clone();
                    for _ in 0..2 {
                        let found = draw(&rows, &mut by_kernels, dtype, &device.device);
                        for ((row, sampler), found) in
                            rows.iter().zip(&mut by_definition).zip(found)
                        {
                            let expected = sampler.sample(row).expect("there is a token");
                            drawn += 1;
                            others += usize::from(found != expected);
                            let possible = row[found as usize] > f32::NEG_INFINITY;
                            assert!(possible, "{} {sampling:?}", device.name);
                        }
                    }
                }
            }
            // Devices may round exponentials differently. The rounding changes cumulative probabilities by a millionth,
            // so one of the drawn tokens may differ.
            assert!(
                others <= 1,
                "{} {dtype:?}: {others} of {drawn}",
                device.name
            );
        }
    }
}

#[test]
fn sampling_kernel_over_a_whole_vocabulary_draws_the_tokens_of_the_host() {
    let mut state = fresh();
    let rows: Vec<Vec<f32>> = (0..2)
        .map(|_| (0..262_144).map(|_| 30.0 * uniform(&mut state)).collect())
        .collect();
    for device in devices() {
        for (top_k, top_p) in [(Some(64), Some(0.95)), (None, Some(0.5)), (None, None)] {
            let sampling = Sampling {
                top_k,
                top_p,
                ..sampling(1.0)
            };
            let mut by_kernels = samplers(&sampling, 2, state);
            let mut by_definition = by_kernels.clone();
            let found = draw(&rows, &mut by_kernels, DType::F32, &device.device);
            let sample = |(sampler, row): (&mut Sampler, &Vec<f32>)| sampler.sample(row);
            let expected: Vec<u32> = by_definition
                .iter_mut()
                .zip(&rows)
                .map(|pair| sample(pair).expect("there is a token"))
                .collect();
            assert_eq!(found, expected, "{} {sampling:?}", device.name);
        }
    }
}

/// Returns the tokens that remain after top-k, then top-p, then min-p. The function sorts all tokens and computes in f64.
fn kept(logits: &[f32], sampling: &Sampling) -> BTreeSet<u32> {
    let mut order: Vec<usize> = (0..logits.len())
        .filter(|token| logits[*token] > f32::NEG_INFINITY)
        .collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if let Some(top_k) = sampling.top_k
        && top_k < order.len()
    {
        let last = logits[order[top_k - 1]];
        order.retain(|token| logits[*token] >= last);
    }
    let weight = |token: &usize| {
        let below = f64::from(logits[*token]) - f64::from(logits[order[0]]);
        (below / f64::from(sampling.temperature)).exp()
    };
    let enough = f64::from(sampling.top_p.unwrap_or(1.0)) * order.iter().map(weight).sum::<f64>();
    let mut reached = 0.0;
    let nucleus = order.iter().take_while(|token| {
        let is_kept = reached < enough;
        reached += weight(token);
        is_kept
    });
    let least = f64::from(sampling.min_p.unwrap_or(0.0));
    nucleus
        .filter(|token| weight(token) >= least)
        .map(|token| *token as u32)
        .collect()
}

/// The kernel draws exactly the tokens that remain after the cuts (top-k, top-p, min-p). The remaining tokens have nearly
/// equal probabilities, so 1,000 draws contain each of them.
#[test]
fn sampling_kernel_keeps_the_tokens_of_the_host() {
    const DRAWS: usize = 1_000;
    let mut state = fresh();
    let nothing = f32::NEG_INFINITY;
    let spread: Vec<f32> = (0..90).map(|_| uniform(&mut state) - 0.5).collect();
    let tied = [
        vec![0.25; 20],
        vec![0.5; 9],
        vec![0.0; 30],
        vec![nothing; 5],
    ]
    .concat();
    let zeros = [vec![-0.0; 15], vec![0.0; 15], vec![f32::NAN; 4]].concat();
    let alone = [vec![nothing; 70], vec![1.0]].concat();
    let of = |top_k, top_p, min_p| Sampling {
        top_k,
        top_p,
        min_p,
        ..sampling(2.0)
    };
    for device in devices() {
        for logits in [&spread, &tied, &zeros, &alone] {
            for sampling in [
                of(Some(12), None, None),
                of(None, Some(0.3), None),
                of(Some(30), Some(0.55), None),
                of(Some(40), None, Some(0.8)),
                of(None, Some(0.45), Some(0.85)),
            ] {
                let mut samplers = samplers(&sampling, DRAWS, state);
                let rows = vec![logits.clone(); DRAWS];
                let found = draw(&rows, &mut samplers, DType::F32, &device.device);
                let found: BTreeSet<u32> = found.into_iter().collect();
                let what = format!("{} {sampling:?} {logits:?}", device.name);
                assert_eq!(found, kept(logits, &sampling), "{what}");
            }
        }
    }
}

/// The drawn tokens have the distribution that the logits define. By chance, Pearson's chi-square statistic exceeds the
/// limit in one of a million runs.
#[test]
fn sampling_draws_have_the_right_distribution() {
    const ROWS: usize = 2_500;
    let mut state = fresh();
    let logits: Vec<f32> = (0..48).map(|_| 4.0 * uniform(&mut state)).collect();
    let plain = Sampling {
        min_p: Some(0.05),
        ..sampling(1.2)
    };
    let cut = Sampling {
        top_k: Some(40),
        top_p: Some(0.9),
        ..plain.clone()
    };
    let weight = |token: &u32| (f64::from(logits[*token as usize]) / 1.2).exp();
    for device in devices() {
        for (sampling, launches) in [(&plain, 40), (&cut, 4)] {
            let mut counts = vec![0u32; logits.len()];
            let mut samplers = samplers(sampling, ROWS, state);
            let rows = vec![logits.clone(); ROWS];
            for _ in 0..launches {
                for token in draw(&rows, &mut samplers, DType::F32, &device.device) {
                    counts[token as usize] += 1;
                }
            }
            let kept = kept(&logits, sampling);
            let all: f64 = kept.iter().map(weight).sum();
            let draws = (ROWS * launches) as f64;
            let mut drawn = (0u32..).zip(&counts).filter(|(_, count)| **count > 0);
            assert!(drawn.all(|(token, _)| kept.contains(&token)));
            let terms = kept.iter().map(|token| {
                let expected = draws * weight(token) / all;
                (f64::from(counts[*token as usize]) - expected).powi(2) / expected
            });
            let statistic: f64 = terms.sum();
            // The limit is the quantile of the chi-square distribution at 4.75 standard deviations, by Wilson's and Hilferty's
            // approximation.
            let freedom = (kept.len() - 1) as f64;
            let spread = 2.0 / (9.0 * freedom);
            let limit = freedom * (1.0 - spread + 4.75 * spread.sqrt()).powi(3);
            assert!(statistic < limit, "{}: {statistic} of {limit}", device.name);
        }
    }
}

#[test]
fn sampling_row_without_finite_logits_is_an_error() {
    for device in devices() {
        for logit in [f32::NAN, f32::NEG_INFINITY] {
            for sampling in cuts() {
                let logits = Tensor::<3>::full([2, 1, 40], logit, &device.device);
                let mut samplers = samplers(&sampling, 2, 1);
                let error = Next::of(logits)
                    .sample(&mut samplers)
                    .expect_err("no token can be drawn");
                let told = error.to_string();
                assert!(told.starts_with("logits: "), "{} {told}", device.name);
            }
        }
    }
}

/// With a subnormal repetition penalty, a token that the sampler has read before becomes the most probable token. A device may
/// flush the penalty to 0, and a logit of 0 divided by 0 would be NaN.
#[test]
fn sampling_subnormal_penalty_is_applied() {
    for device in devices() {
        for repetition_penalty in [f32::from_bits(1), 1e-40, f32::MIN_POSITIVE] {
            for logits in [[-1.0, 0.0, -2.0], [-1.0, 1.0, 0.5], [-1.0, -2.0, -1.5]] {
                let sampling = Sampling {
                    repetition_penalty,
                    ..Sampling::greedy()
                };
                let mut samplers = [Sampler::new(&sampling)];
                samplers[0].read(&[1]);
                let found = draw(
                    &[logits.to_vec()],
                    &mut samplers,
                    DType::F32,
                    &device.device,
                );
                assert_eq!(
                    found,
                    [1],
                    "{} {repetition_penalty} {logits:?}",
                    device.name
                );
            }
        }
    }
}

#[test]
fn sampling_with_too_few_samplers_is_refused() {
    let device = Device::flex();
    let logits = Tensor::<3>::zeros([2, 1, 40], &device);
    let mut one = samplers(&sampling(1.0), 1, 1);
    let error = Next::of(logits)
        .sample(&mut one)
        .expect_err("there are too few samplers");
    assert!(error.to_string().starts_with("samplers"), "{error}");
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&device, DType::F32);
    let mut cache = gemma.model().cache(vec![0, 0]);
    let error = gemma.model().decoder(&mut cache).with_samplers(&[&one[0]]);
    assert!(error.is_err());
}

/// Returns the generated texts of two runs. In the first run, kernels sample the tokens. The second run requests
/// logprobs, which makes the decoder sample on the host.
fn texts(gemma: &Gemma4, prompts: &[Prompt], options: &GenerateOptions) -> [Vec<Vec<u32>>; 2] {
    [None, Some(0)].map(|logprobs| {
        let options = GenerateOptions {
            logprobs,
            ..options.clone()
        };
        let texts = gemma
            .generate_batch(prompts, &options)
            .expect("the generations succeed");
        texts.into_iter().map(|text| text.tokens).collect()
    })
}

#[test]
fn sampling_kernel_texts_equal_those_of_the_host() {
    for device in devices() {
        for (name, batch, graph_capture) in [
            ("dense-ple", 3, true),
            ("dense-keqv", 1, false),
            ("moe", 2, true),
        ] {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let options = |repetition_penalty, suppress_tokens| GenerateOptions {
                sampling: Sampling {
                    top_k: Some(50),
                    top_p: Some(0.95),
                    seed: Some(11),
                    repetition_penalty,
                    suppress_tokens,
                    ..sampling(1.5)
                },
                graph_capture,
                ..greedy(&gemma, 7)
            };
            let prompts: Vec<Prompt> = vec![fixture.prompt.clone().into(); batch];
            let first = fixture.generated[0];
            for options in [
                options(1.0, vec![]),
                options(1.4, vec![first, 17, 320_000]),
                GenerateOptions {
                    sampling: Sampling {
                        repetition_penalty: 1.4,
                        ..Sampling::greedy()
                    },
                    ..options(1.0, vec![])
                },
            ] {
                let [by_kernels, by_host] = texts(&gemma, &prompts, &options);
                assert_eq!(by_kernels, by_host, "{name} {} {options:?}", device.name);
            }
        }
    }
}

/// A sampler is created without checking its options, so the draw itself must refuse invalid options.
#[test]
fn sampling_invalid_options_are_refused() {
    for device in devices() {
        for (argument, top_k, top_p) in [("top_k", Some(0), None), ("top_p", None, Some(0.0))] {
            let wrong = Sampling {
                top_k,
                top_p,
                ..sampling(1.0)
            };
            let logits = Tensor::<3>::ones([1, 1, 1000], &device.device);
            let outcome = Next::of(logits).sample(&mut [Sampler::new(&wrong)]);
            let Err(error) = outcome else {
                panic!("{}: {argument} draws {outcome:?}", device.name)
            };
            assert!(error.to_string().starts_with(argument), "{error}");
        }
    }
}

/// If one row of a batch has no token that can be drawn, no sampler of the batch changes its state.
#[test]
fn sampling_failed_draw_leaves_samplers_unchanged() {
    let seed = fresh();
    let good = vec![vec![0.5, 0.25, 0.0, 0.125]; 2];
    let mut bad = good.clone();
    bad[1] = vec![f32::NAN; 4];
    let sampling = Sampling {
        repetition_penalty: 1.5,
        ..sampling(1.0)
    };
    for device in devices() {
        let mut after = samplers(&sampling, 2, seed);
        let data = TensorData::new(bad.concat(), [2, 1, 4]);
        let logits = Tensor::<3>::from_data(data, &device.device);
        assert!(Next::of(logits).sample(&mut after).is_err());
        let mut fresh = samplers(&sampling, 2, seed);
        for _ in 0..8 {
            let [found, expected] = [&mut after, &mut fresh]
                .map(|samplers| draw(&good, samplers, DType::F32, &device.device));
            assert_eq!(found, expected, "{}", device.name);
        }
    }
}
