//! Tests prompts that run in one forward pass (packed prompts). Each prompt must have the same logits as alone, and its
//! sequence must generate the same tokens. Sequences of several packs, and of prompts that ran alone, decode together.

use crate::fixture::{Fixture, assert_close, folder, greedy, on_every_device};
use crate::not_numbers::spoiled;
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Batch, CacheKind, Gemma4, KvPrecision, LoadOptions, PerLayerTable, Prefill, PrefixCache,
    Quantization, RowChoice, RowResult,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::ops::ControlFlow;

const TOKENS: usize = 6;

/// The lengths of the packed prompts: one token, shorter than the window of 8 or 16 tokens, equal to it, and longer.
/// One prompt fills the 256 slots that a buffer of a full-attention layer gets at first.
const LENGTHS: [usize; 9] = [5, 1, 8, 16, 2, 37, 256, 9, 17];

pub fn prompts(gemma: &Gemma4, lengths: &[usize], seed: u64) -> Vec<Vec<u32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let vocabulary = gemma.config().vocab_size as u32;
    let mut prompt = |length| {
        let tokens = (0..length).map(|_| rng.random_range(0..vocabulary));
        tokens.collect()
    };
    lengths.iter().map(|length| prompt(*length)).collect()
}

fn prefills(gemma: &Gemma4, prompts: &[Vec<u32>]) -> Vec<Prefill> {
    let prefill = |prompt: &Vec<u32>| gemma.prefill(prompt.clone(), CacheKind::default());
    let prefills = prompts.iter().map(prefill).collect::<Result<_, _>>();
    prefills.expect("the prompts fit")
}

/// Runs the prompts in one pass. Returns the logits after each prompt.
pub fn read(prefills: &mut [Prefill]) -> Vec<Vec<f32>> {
    let mut pack: Vec<&mut Prefill> = prefills.iter_mut().collect();
    let logits = Prefill::read_packed(&mut pack).expect("the prompts can be packed");
    let rows = logits.choose(&vec![RowChoice::Logits; prefills.len()]);
    let logits = |row| match row {
        RowResult::Logits(logits) => logits,
        RowResult::Token(_) => panic!("the logits were requested"),
    };
    rows.expect("the device works")
        .into_iter()
        .map(logits)
        .collect()
}

/// Returns the logits after a prompt that runs alone.
pub fn logits_alone(gemma: &Gemma4, prompt: &[u32]) -> Vec<f32> {
    let prefill = Prefill::new(gemma.model(), prompt.to_vec(), CacheKind::default());
    let mut prefill = prefill.expect("the prompt fits");
    let logits = prefill.advance(usize::MAX).expect("the device works");
    let rows = logits.expect("all is read").choose(&[RowChoice::Logits]);
    match rows.expect("one row").remove(0) {
        RowResult::Logits(logits) => logits,
        RowResult::Token(_) => panic!("the logits were requested"),
    }
}

/// Returns the tokens that a prompt generates alone.
pub fn alone(gemma: &Gemma4, prompt: &[u32], count: usize) -> Vec<u32> {
    let options = greedy(gemma, count);
    let generation = gemma.generate(prompt.to_vec(), &options, |_| ControlFlow::Continue(()));
    generation.expect("the generation succeeds").tokens
}

fn argmax(logits: &[f32]) -> u32 {
    let best = |best: usize, index: usize| match logits[index] > logits[best] {
        true => index,
        false => best,
    };
    (0..logits.len()).fold(0, best) as u32
}

/// Checks the logits of packed prompts. Returns the first token of each.
pub fn check_logits(
    gemma: &Gemma4,
    prompts: &[Vec<u32>],
    found: &[Vec<f32>],
    name: &str,
) -> Vec<u32> {
    for (prompt, found) in prompts.iter().zip(found) {
        let expected = logits_alone(gemma, prompt);
        let case = format!("{name}: {} tokens", prompt.len());
        assert_close(found, &expected, &case);
        assert_eq!(argmax(found), argmax(&expected), "{case}");
    }
    found.iter().map(|logits| argmax(logits)).collect()
}

/// Decodes all sequences of a batch for one token more. `answers` has the tokens of each sequence so far.
pub fn step(batch: &mut Batch, answers: &mut [Vec<u32>]) {
    let tokens: Vec<u32> = answers
        .iter()
        .filter_map(|one| one.last().copied())
        .collect();
    let next = batch.step(&tokens).expect("the tokens fit");
    let next = next.choose(&vec![RowChoice::Argmax; tokens.len()]);
    for (answer, next) in answers.iter_mut().zip(next.expect("the device works")) {
        answer.push(next.token().expect("the logits are finite"));
    }
}

/// Packs prompts, decodes them in a batch, and compares everything with the prompts alone.
fn check(gemma: &Gemma4, lengths: &[usize], name: &str) {
    let prompts = prompts(gemma, lengths, 3);
    let mut prefills = prefills(gemma, &prompts);
    let first = check_logits(gemma, &prompts, &read(&mut prefills), name);
    assert!(prefills.iter().all(|prefill| prefill.remaining() == 0));
    let mut batch = Batch::new(gemma.model(), CacheKind::default()).expect("a plain cache");
    let joined = batch.join_all(&prefills.iter().collect::<Vec<_>>());
    assert_eq!(joined.expect("all is read"), 0..lengths.len(), "{name}");
    assert_eq!(batch.lengths(), lengths, "{name}");
    let mut answers: Vec<Vec<u32>> = first.into_iter().map(|token| vec![token]).collect();
    for _ in 1..TOKENS {
        step(&mut batch, &mut answers);
    }
    for (prompt, found) in prompts.iter().zip(&answers) {
        let case = format!("{name}: {} tokens", prompt.len());
        assert_eq!(*found, alone(gemma, prompt, TOKENS), "{case}");
    }
}

#[test]
fn read_packed_equals_prompts_alone() {
    on_every_device(|fixture, gemma, device| {
        // The first lengths fit the decode kernels, which run the last layers and the batch. All lengths do not.
        let counts: &[usize] = match device.is_cube() {
            true if fixture.name == "dense-ple" => &[6, LENGTHS.len()],
            true => &[6],
            false => &[1, 2, LENGTHS.len()],
        };
        for count in counts {
            let name = format!("{} on {}, {count} prompts", fixture.name, device.name);
            check(gemma, &LENGTHS[..*count], &name);
        }
    });
}

#[test]
fn read_packed_of_quantized_weights_and_host_tables_equals_prompts_alone() {
    for name in ["dense-ple", "dense-keqv", "moe"] {
        for form in [Quantization::Q8, Quantization::Q4] {
            let options = LoadOptions::new().dtype(DType::F32).quantization(form);
            let gemma = Gemma4::load(folder(name), &Device::flex(), options);
            check(
                &gemma.expect("the fixture loads"),
                &LENGTHS,
                &format!("{name} in {form:?}"),
            );
        }
    }
    let options = LoadOptions::new().dtype(DType::F32);
    let options = options.per_layer_table(PerLayerTable::Host);
    let gemma = Gemma4::load(folder("dense-ple"), &Device::flex(), options);
    check(
        &gemma.expect("the fixture loads"),
        &LENGTHS,
        "a table on the host",
    );
}

/// Packs join a batch in which other sequences stay, between steps and after sequences have left. The batch's buffers
/// have rows that earlier sequences have filled.
#[test]
fn packs_one_after_another_equal_prompts_alone() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        let name = format!("{} on {}", fixture.name, device.name);
        let mut batch = Batch::new(gemma.model(), CacheKind::default()).expect("a plain cache");
        let (mut running, mut answers): (Vec<Vec<u32>>, Vec<Vec<u32>>) = (Vec::new(), Vec::new());
        let packs: [&[usize]; 4] = [&[30, 3], &[12, 1, 40], &[7], &[50, 2, 11, 4]];
        for (round, lengths) in packs.into_iter().enumerate() {
            if let Some(length) = answers.iter().position(|answer| answer.len() > 3) {
                batch.leave(length);
                let (prompt, found) = (running.swap_remove(length), answers.swap_remove(length));
                assert_eq!(
                    found,
                    alone(gemma, &prompt, found.len()),
                    "{name}, round {round}"
                );
            }
            let prompts = prompts(gemma, lengths, round as u64);
            let mut prefills = prefills(gemma, &prompts);
            let first = check_logits(gemma, &prompts, &read(&mut prefills), &name);
            // The order of the sequences differs from the order of the pass. A prompt that runs alone joins with them.
            let mut by_itself = gemma.prefill(prompts[0].clone(), CacheKind::default());
            let by_itself = by_itself.as_mut().expect("the prompt fits");
            while by_itself.advance(5).expect("the device works").is_none() {}
            let mut joining: Vec<(&Prefill, usize)> = prefills.iter().zip(0..).collect();
            joining.reverse();
            joining.insert(1, (by_itself, 0));
            let joined: Vec<&Prefill> = joining.iter().map(|(prefill, _)| *prefill).collect();
            let joined = batch.join_all(&joined).expect("all is read");
            assert_eq!(
                joined,
                answers.len()..answers.len() + joining.len(),
                "{name}"
            );
            for (_, index) in joining {
                running.push(prompts[index].clone());
                answers.push(vec![first[index]]);
            }
            for _ in 0..3 {
                step(&mut batch, &mut answers);
            }
        }
        for (prompt, found) in running.iter().zip(&answers) {
            assert_eq!(*found, alone(gemma, prompt, found.len()), "{name}");
        }
    });
}

/// Two answers to a packed prompt join as separate sequences.
#[test]
fn join_all_of_one_packed_prompt_twice_gives_equal_sequences() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        let prompts = prompts(gemma, &[20, 3], 5);
        let mut prefills = prefills(gemma, &prompts);
        let first = check_logits(gemma, &prompts, &read(&mut prefills), fixture.name);
        let mut batch = Batch::new(gemma.model(), CacheKind::default()).expect("a plain cache");
        let order = [0, 0, 1, 0];
        let joining = order.map(|index| &prefills[index]);
        batch.join_all(&joining).expect("all is read");
        let mut answers = order.map(|index| vec![first[index]]);
        for _ in 1..TOKENS {
            step(&mut batch, &mut answers);
        }
        for (index, found) in order.into_iter().zip(answers) {
            assert_eq!(
                found,
                alone(gemma, &prompts[index], TOKENS),
                "{}",
                fixture.name
            );
        }
    });
}

/// A prompt continues from the keys and values of a packed prompt, after the sequences of the pack were decoded.
#[test]
fn prefix_cache_continues_from_packed_prompts() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        let kind = CacheKind::default();
        let prompts = prompts(gemma, &[6, 40, 21], 8);
        // Prefills of `Prefill::new` replay no graph, so the prefix cache keeps them on every device.
        let prefill = |prompt: &[u32]| {
            Prefill::new(gemma.model(), prompt.to_vec(), kind).expect("the prompt fits")
        };
        let mut prefills: Vec<Prefill> = prompts.iter().map(|prompt| prefill(prompt)).collect();
        let first = check_logits(gemma, &prompts, &read(&mut prefills), fixture.name);
        let mut batch = Batch::new(gemma.model(), kind).expect("a plain cache");
        batch
            .join_all(&prefills.iter().collect::<Vec<_>>())
            .expect("all is read");
        let mut answers: Vec<Vec<u32>> = first.into_iter().map(|token| vec![token]).collect();
        step(&mut batch, &mut answers);
        let mut prefixes = PrefixCache::new(gemma.model(), 64 << 20, 512);
        let kept: Vec<bool> = prefills.into_iter().map(|one| prefixes.keep(one)).collect();
        assert_eq!(kept, [false, true, true], "{}", fixture.name);
        step(&mut batch, &mut answers);
        for prompt in &prompts[1..] {
            let longer = [&prompt[..], &[7, 9, 11]].concat();
            let mut continued = prefill(&longer);
            prefixes.resume(&mut continued);
            assert_eq!(continued.reused(), prompt.len(), "{}", fixture.name);
            assert!(continued.can_pack(), "{}", fixture.name);
            let logits = continued.advance(usize::MAX).expect("the device works");
            let found = logits.expect("all is read").choose(&[RowChoice::Logits]);
            let Ok([RowResult::Logits(found)]) = found.as_deref() else {
                panic!("the logits were requested");
            };
            assert_close(found, &logits_alone(gemma, &longer), fixture.name);
        }
    });
}

/// The prefix cache has the beginning of a prompt that was read in one pass. The prefill keeps what the pass computed.
#[test]
fn resume_ignores_a_packed_prompt() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let prompts = prompts(&gemma, &[40, 60], 2);
    let longer = [&prompts[0][..], &[7, 9, 11]].concat();
    let mut prefixes = PrefixCache::new(gemma.model(), 64 << 20, 512);
    let mut earlier = prefills(&gemma, &prompts[..1]).remove(0);
    earlier.advance(usize::MAX).expect("the device works");
    assert!(prefixes.keep(earlier));

    let mut packed = prefills(&gemma, &[longer.clone(), prompts[1].clone()]);
    read(&mut packed);
    let mut packed = packed.remove(0);
    prefixes.resume(&mut packed);
    assert_eq!((packed.reused(), packed.remaining()), (0, 0));
    let mut batch = Batch::new(gemma.model(), CacheKind::default()).expect("a plain cache");
    batch.join(&packed).expect("all is read");
    assert_eq!(batch.lengths(), [longer.len()]);
    assert!(prefixes.keep(packed));
}

/// The per-layer embedding of one token is NaN. A pass over it has a row without a token. Afterwards each prompt runs
/// alone, and only the prompt with this embedding has no token.
#[test]
fn run_alone_after_a_pass_with_nan_gives_the_logits_of_prompts_alone() {
    let table = "model.embed_tokens_per_layer.weight";
    let (_folder, gemma) = spoiled("dense-ple", table, Some(7), &Device::flex());
    let mut prompts = prompts(&gemma, &[20, 12, 9], 6);
    for prompt in &mut prompts {
        let tokens = prompt.iter_mut().filter(|token| **token == 7);
        tokens.for_each(|token| *token = 8);
    }
    prompts[1][4] = 7;
    let mut prefills = prefills(&gemma, &prompts);
    let mut pack: Vec<&mut Prefill> = prefills.iter_mut().collect();
    let logits = Prefill::read_packed(&mut pack).expect("the prompts can be packed");
    let logits = logits.choose(&[RowChoice::Argmax, RowChoice::Argmax, RowChoice::Logits]);
    let rows = logits.expect("the device works");
    assert!(!rows[1].has_token());
    for (index, (prefill, prompt)) in prefills.iter_mut().zip(&prompts).enumerate() {
        prefill.run_alone();
        assert!(!prefill.can_pack());
        assert_eq!(prefill.remaining(), prompt.len());
        let logits = prefill.advance(usize::MAX).expect("the device works");
        let rows = logits.expect("all is read").choose(&[RowChoice::Logits]);
        let rows = rows.expect("the device works");
        assert_eq!(rows[0].has_token(), index != 1);
        if let [RowResult::Logits(found)] = &rows[..]
            && index != 1
        {
            assert_close(found, &logits_alone(&gemma, prompt), "alone");
        }
    }
}

/// A prompt waits only for a long enough prefix, and only if the prefix cache has room for the earlier prompt.
#[test]
fn would_share_needs_a_quarter_of_the_prompt_and_room() {
    for name in ["dense-ple", "dense-keqv"] {
        let gemma = Fixture::open(name).load(&Device::flex(), DType::F32);
        let prompts = prompts(&gemma, &[80, 200], 9);
        let prefills = prefills(&gemma, &prompts);
        let prompt = |shared: usize, length: usize| {
            let other = u32::from(prompts[0][shared] == 0);
            let rest = &prompts[1][..length - shared - 1];
            [&prompts[0][..shared], &[other], rest].concat()
        };
        let all = PrefixCache::new(gemma.model(), 64 << 20, 512);
        for (shared, length, expected) in [
            (64, 65, true),
            (63, 65, false),
            (64, 256, true),
            (64, 257, false),
        ] {
            let found = all.would_share(&prefills[0], &prompt(shared, length), 0);
            assert_eq!(found, expected, "{name}: {shared} of {length}");
        }
        // The cache also needs room for a checkpoint, because the earlier prompt is longer than the window.
        let precisions = [KvPrecision::Model, KvPrecision::Q8];
        let kinds = precisions.map(|precision| {
            [false, true].map(|compact_keys| CacheKind {
                compact_keys,
                precision,
            })
        });
        for kind in kinds.into_iter().flatten() {
            let Ok(mut first) = gemma.prefill(prompts[0].clone(), kind) else {
                continue;
            };
            let other = prompt(64, 65);
            let mut kept = PrefixCache::new(gemma.model(), 64 << 20, 512);
            kept.take_checkpoint_for(&mut first, [&other[..]]);
            let calls = std::iter::from_fn(|| Some(first.advance(512).expect("it runs").is_some()));
            assert_eq!(calls.take_while(|is_last| !is_last).count(), 1);
            assert!(kept.keep(first));
            let bytes = kept.bytes();
            for (most, expected) in [(bytes, true), (bytes - 1, false)] {
                let cache = PrefixCache::new(gemma.model(), most, 512);
                let mut first = gemma.prefill(prompts[0].clone(), kind).expect("it fits");
                let shares = cache.would_share(&first, &other, 0);
                assert_eq!(shares, expected, "{name}: {kind:?}");
                cache.take_checkpoint_for(&mut first, [&other[..]]);
                let reads_all = first.advance(512).expect("it runs").is_some();
                assert_eq!(reads_all, !expected, "{name}: {kind:?}");
            }
        }
    }
}

#[test]
fn read_packed_refuses_prompts_that_cannot_be_packed() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let other = Fixture::open("moe").load(&Device::flex(), DType::F32);
    let prefill = |gemma: &Gemma4, kind| gemma.prefill(vec![2, 5, 9], kind).expect("it fits");
    let plain = || prefill(&gemma, CacheKind::default());
    let error = |prefills: &mut [&mut Prefill]| match Prefill::read_packed(prefills) {
        Ok(_) => panic!("the prompts cannot be packed"),
        Err(error) => error.to_string(),
    };
    let none = error(&mut []);
    assert!(none.contains("prefills: are none"), "{none}");

    let mut begun = plain();
    assert!(begun.can_pack());
    begun.advance(2).expect("the device works");
    assert!(!begun.can_pack());
    let found = error(&mut [&mut plain(), &mut begun]);
    assert!(found.contains("has read a part of number 1,"), "{found}");

    let mut ended = plain();
    Prefill::read_packed(&mut [&mut ended]).expect("one prompt is a pack");
    assert!(!ended.can_pack());
    let found = error(&mut [&mut ended]);
    assert!(found.contains("has read a part of number 0,"), "{found}");
    let found = ended
        .advance(1)
        .expect_err("the prefill has ended")
        .to_string();
    assert!(found.contains("tokens: are none"), "{found}");

    let kinds = [(false, KvPrecision::Q8), (true, KvPrecision::Model)];
    for (compact_keys, precision) in kinds {
        let mut other = prefill(
            &gemma,
            CacheKind {
                compact_keys,
                precision,
            },
        );
        let found = error(&mut [&mut other]);
        assert!(found.contains("in another format"), "{found}");
    }
    let found = error(&mut [&mut plain(), &mut prefill(&other, CacheKind::default())]);
    assert!(found.contains("different models"), "{found}");
}

/// The limit is the largest number of tokens whose keys and values fit, summed over all layers.
#[test]
fn most_packed_tokens_keep_512_mib() {
    let gemma = Fixture::open("dense-keqv").load(&Device::flex(), DType::F32);
    let config = gemma.config();
    let elements = (0..config.num_layers())
        .map(|layer| 2 * config.key_value_heads(layer) * config.head_dim(layer));
    let bytes = 4 * elements.sum::<usize>();
    let most = Prefill::most_packed_tokens(gemma.model(), usize::MAX);
    assert!(most * bytes <= 512 << 20 && (most + 1) * bytes > 512 << 20);
    assert_eq!(Prefill::most_packed_tokens(gemma.model(), 256), 256);
}

/// Prompts without graphs are faster in one pass, and one prompt is not.
#[test]
fn is_faster_packed_needs_two_prompts() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let prefills = prefills(&gemma, &prompts(&gemma, &[3, 4], 1));
    assert!(!Prefill::is_faster_packed(&[&prefills[0]]));
    assert!(Prefill::is_faster_packed(&[&prefills[0], &prefills[1]]));
}
