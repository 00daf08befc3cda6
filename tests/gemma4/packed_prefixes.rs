//! Tests prompts that continue from prefixes and run in one forward pass. Each prompt must have the same logits as
//! alone, and its sequence must generate the same tokens.

use crate::devices::devices;
use crate::fixture::{Fixture, assert_close, on_every_device};
use crate::not_numbers::spoiled;
use crate::packed_prompts::{alone, check_logits, logits_alone, prompts, read, step};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Batch, CacheKind, Gemma4, LoadOptions, Prefill, PrefixCache, RowChoice, RowResult,
};

const TOKENS: usize = 5;
const CHUNK: usize = 512;

/// Creates a prefill that replays no graph, so that prefix caches serve it on every device.
fn prefill(gemma: &Gemma4, prompt: &[u32]) -> Prefill {
    let prefill = Prefill::new(gemma.model(), prompt.to_vec(), CacheKind::default());
    prefill.expect("the prompt fits")
}

fn prefix_cache(gemma: &Gemma4) -> PrefixCache {
    PrefixCache::new(gemma.model(), 64 << 20, CHUNK)
}

/// Lets a prompt continue from an earlier one, runs it alone and keeps it.
fn keep(gemma: &Gemma4, prefixes: &mut PrefixCache, prompt: &[u32]) {
    let mut prefill = prefill(gemma, prompt);
    prefixes.resume(&mut prefill);
    run(&mut prefill);
    assert!(prefixes.keep(prefill));
}

/// Runs the rest of a prompt alone. Returns the logits after the prompt.
fn run(prefill: &mut Prefill) -> Vec<f32> {
    loop {
        let Some(logits) = prefill.advance(CHUNK).expect("the device works") else {
            continue;
        };
        let rows = logits.choose(&[RowChoice::Logits]);
        match rows.expect("the device works").remove(0) {
            RowResult::Logits(logits) => return logits,
            RowResult::Token(_) => panic!("the logits were requested"),
        }
    }
}

/// Creates prefills that continue from a prefix cache. Checks the numbers of reused tokens.
fn resumed(
    gemma: &Gemma4,
    prefixes: &mut PrefixCache,
    prompts: &[Vec<u32>],
    reused: &[usize],
) -> Vec<Prefill> {
    let resumed = prompts.iter().zip(reused).map(|(prompt, reused)| {
        let kind = CacheKind::default();
        assert_eq!(
            prefixes.reusable(prompt, kind),
            *reused,
            "{} tokens",
            prompt.len()
        );
        let mut prefill = prefill(gemma, prompt);
        prefixes.resume(&mut prefill);
        assert_eq!(prefill.reused(), *reused, "{} tokens", prompt.len());
        assert_eq!(prefill.remaining(), prompt.len() - reused);
        assert!(prefill.can_pack(), "{} tokens", prompt.len());
        prefill
    });
    resumed.collect()
}

/// Appends different tokens to prefixes, so that no prompt shares more than its prefix with another one. An element of
/// `rests` is the index of a prefix and the number of other tokens.
fn continued(gemma: &Gemma4, prefixes: &[&[u32]], rests: &[(usize, usize)]) -> Vec<Vec<u32>> {
    let lengths: Vec<usize> = rests.iter().map(|(_, length)| *length).collect();
    let mut others = prompts(gemma, &lengths, 21);
    for (index, rest) in others.iter_mut().enumerate() {
        rest[0] = 40 + index as u32;
    }
    let rests = rests.iter().zip(others);
    rests
        .map(|((prefix, _), rest)| [prefixes[*prefix], &rest].concat())
        .collect()
}

/// The prompts of a pass continue from two prefixes, or from none. The first prefix is longer than the window of 8 or
/// 16 tokens, and its ring buffers are a checkpoint. The second prefix is a whole earlier prompt, with a block of 256
/// slots. Some prompts have one new token. The sequences join a batch in which another sequence is decoded.
/// Afterwards prompts continue from the packed prompts, in a pass, too.
#[test]
fn read_packed_after_prefixes_equals_prompts_alone() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        let name = format!("{} on {}", fixture.name, device.name);
        let mut prefixes = prefix_cache(gemma);
        let earlier = prompts(gemma, &[90, 256, 12], 20);
        let texts: [&[u32]; 3] = [&earlier[0], &earlier[1], &[]];
        // The second of two prompts with the first prefix takes a checkpoint.
        for last in [1, 2] {
            keep(gemma, &mut prefixes, &[texts[0], &[last; 20]].concat());
        }
        keep(gemma, &mut prefixes, texts[1]);

        let mut batch = Batch::new(gemma.model(), CacheKind::default()).expect("a plain cache");
        let mut running = prefill(gemma, &earlier[2]);
        let first = check_logits(gemma, &earlier[2..], &[run(&mut running)], &name);
        batch.join(&running).expect("all is read");
        let mut answers = vec![first];
        step(&mut batch, &mut answers);

        let rests = [(0, 5), (1, 1), (2, 7), (0, 1), (1, 30), (0, 23), (2, 1)];
        let prompts = continued(gemma, &texts, &rests);
        let reused = rests.map(|(prefix, _)| texts[prefix].len());
        let mut pack = resumed(gemma, &mut prefixes, &prompts, &reused);
        let first = check_logits(gemma, &prompts, &read(&mut pack), &name);
        assert!(pack.iter().all(|prefill| prefill.remaining() == 0));
        let joining: Vec<&Prefill> = pack.iter().rev().collect();
        batch.join_all(&joining).expect("all is read");
        answers.extend(first.into_iter().rev().map(|token| vec![token]));
        for _ in 1..TOKENS {
            step(&mut batch, &mut answers);
        }
        let expected = earlier[2..].iter().chain(prompts.iter().rev());
        for (prompt, found) in expected.zip(&answers) {
            let case = format!("{name}: {} tokens", prompt.len());
            assert_eq!(*found, alone(gemma, prompt, found.len()), "{case}");
        }

        let kept = prefixes.keep_all(pack);
        let expected: Vec<bool> = prompts.iter().map(|prompt| prompt.len() >= 16).collect();
        assert_eq!(kept, expected, "{name}");
        let texts: [&[u32]; 2] = [&prompts[0], &prompts[4]];
        let longer = continued(gemma, &texts, &[(0, 4), (1, 9), (0, 2)]);
        let reused = [0, 1, 0].map(|index| texts[index].len());
        let mut pack = resumed(gemma, &mut prefixes, &longer, &reused);
        check_logits(gemma, &longer, &read(&mut pack), &name);
    });
}

/// An earlier prompt is shorter than the window of 128 tokens. Prompts continue after different tokens of it, and
/// some of them are longer than the window.
#[test]
fn read_packed_after_prefixes_within_the_window_equals_prompts_alone() {
    let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the model loads");
    assert_eq!(gemma.config().sliding_window, 128);
    let mut prefixes = prefix_cache(&gemma);
    let earlier = prompts(&gemma, &[100], 22).remove(0);
    keep(&gemma, &mut prefixes, &earlier);
    let texts: [&[u32]; 3] = [&earlier, &earlier[..64], &earlier[..17]];
    let rests = [(0, 60), (1, 3), (2, 120), (0, 1), (1, 65), (2, 2)];
    let prompts = continued(&gemma, &texts, &rests);
    let reused = rests.map(|(prefix, _)| texts[prefix].len());
    let mut pack = resumed(&gemma, &mut prefixes, &prompts, &reused);
    check_logits(&gemma, &prompts, &read(&mut pack), "within the window");
}

/// Keys and values after a prefix are NaN in the earlier prompt's buffers. The prompts that continue from the prefix
/// must not read them. One prefix ends at a checkpoint, and the other one in the ring buffers.
#[test]
fn read_packed_after_a_prefix_ignores_later_tokens_with_nan() {
    const NAN: u32 = 7;
    let table = "model.embed_tokens_per_layer.weight";
    for device in devices() {
        let (_folder, gemma) = spoiled("dense-ple", table, Some(NAN as usize), &device.device);
        let mut earlier = prompts(&gemma, &[90, 40], 23);
        for token in earlier.iter_mut().flatten() {
            *token = if *token == NAN { NAN + 1 } else { *token };
        }
        let texts: [&[u32]; 2] = [&earlier[0], &earlier[1]];
        let mut prefixes = prefix_cache(&gemma);
        for last in [1, 2] {
            keep(
                &gemma,
                &mut prefixes,
                &[texts[0], &[last; 20], &[NAN; 9]].concat(),
            );
        }
        // Ring buffers without a checkpoint can be continued before the last token. This token runs in a call of its
        // own, because its keys would make other tokens of the call NaN.
        let mut last = prefill(&gemma, &[texts[1], &[NAN]].concat());
        assert!(last.advance(40).expect("the device works").is_none());
        run(&mut last);
        assert!(prefixes.keep(last));
        let mut prompts = continued(&gemma, &texts, &[(0, 4), (1, 6), (1, 1), (0, 12)]);
        for token in prompts.iter_mut().flatten() {
            *token = if *token == NAN { NAN + 1 } else { *token };
        }
        let mut pack = resumed(&gemma, &mut prefixes, &prompts, &[90, 40, 40, 90]);
        for (prompt, found) in prompts.iter().zip(read(&mut pack)) {
            let case = format!("{}: {} tokens", device.name, prompt.len());
            assert_close(&found, &logits_alone(&gemma, prompt), &case);
        }
    }
}

/// A prompt after a prefix must run alone after a pass. It still continues from the prefix.
#[test]
fn run_alone_after_a_pass_continues_from_the_prefix() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let mut prefixes = prefix_cache(&gemma);
    let earlier = prompts(&gemma, &[50], 24).remove(0);
    keep(&gemma, &mut prefixes, &earlier);
    let prompts = continued(&gemma, &[&earlier], &[(0, 8), (0, 3)]);
    let mut pack = resumed(&gemma, &mut prefixes, &prompts, &[50, 50]);
    read(&mut pack);
    for (prefill, prompt) in pack.iter_mut().zip(&prompts) {
        prefill.run_alone();
        assert!(!prefill.can_pack());
        assert_eq!(
            (prefill.reused(), prefill.remaining()),
            (50, prompt.len() - 50)
        );
        assert_close(&run(prefill), &logits_alone(&gemma, prompt), "alone");
    }
}

/// The earlier prompt leaves the prefix cache while a prompt waits to continue from it.
#[test]
fn resume_keeps_a_prefix_that_leaves_the_prefix_cache() {
    let gemma = Fixture::open("dense-keqv").load(&Device::flex(), DType::F32);
    let earlier = prompts(&gemma, &[50], 25).remove(0);
    let mut prefixes = prefix_cache(&gemma);
    keep(&gemma, &mut prefixes, &earlier);
    let prompts = continued(&gemma, &[&earlier], &[(0, 8), (0, 3)]);
    let mut pack = resumed(&gemma, &mut prefixes, &prompts, &[50, 50]);
    drop(prefixes);
    check_logits(&gemma, &prompts, &read(&mut pack), "a dropped prefix cache");
}

/// New tokens count, and those of prefixes do not. A prompt that takes a checkpoint ends the pass.
#[test]
fn count_packable_counts_new_tokens() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let mut prefixes = prefix_cache(&gemma);
    let earlier = prompts(&gemma, &[120], 26).remove(0);
    keep(&gemma, &mut prefixes, &earlier);
    let prompts = continued(&gemma, &[&earlier, &[]], &[(0, 8), (0, 3), (1, 20), (0, 5)]);
    let mut pack = resumed(&gemma, &mut prefixes, &prompts, &[120, 120, 0, 120]);
    let beyond = [&earlier[..80], &[1, 2]].concat();
    let mut stops = prefill(&gemma, &beyond);
    prefixes.resume(&mut stops);
    assert!(!stops.can_pack());
    pack.push(stops);
    let pack: Vec<&Prefill> = pack.iter().collect();
    for (most, expected) in [(7, 0), (8, 1), (30, 2), (31, 3), (35, 3), (36, 4), (999, 4)] {
        assert_eq!(
            Prefill::count_packable(&pack, most),
            expected,
            "{most} tokens"
        );
    }
    assert!(Prefill::is_faster_packed(&pack[..2]));
}

/// A pass has at most 8 distinct prefixes. Prompts with one of these prefixes, or with none, do not end it.
#[test]
fn count_packable_limits_distinct_prefixes() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let mut prefixes = prefix_cache(&gemma);
    let earlier = prompts(&gemma, &[20; 9], 35);
    for prompt in &earlier {
        keep(&gemma, &mut prefixes, prompt);
    }
    let mut texts: Vec<&[u32]> = earlier.iter().map(Vec::as_slice).collect();
    texts.push(&[]);
    let order = [0, 1, 2, 3, 4, 5, 6, 7, 9, 3, 8];
    let prompts = continued(&gemma, &texts, &order.map(|prefix| (prefix, 2)));
    let pack = resumed(
        &gemma,
        &mut prefixes,
        &prompts,
        &order.map(|prefix| texts[prefix].len()),
    );
    let pack: Vec<&Prefill> = pack.iter().collect();
    assert_eq!(Prefill::count_packable(&pack, 999), 10);
    assert_eq!(Prefill::count_packable(&pack[1..], 999), 10);
}

/// A prompt waits only for tokens that it cannot reuse yet.
#[test]
fn would_share_needs_tokens_that_are_not_reusable() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let prefixes = prefix_cache(&gemma);
    let other = prompts(&gemma, &[200], 27).remove(0);
    let first = prefill(&gemma, &other);
    let prompt = [&other[..164], &[1 - other[164].min(1); 40]].concat();
    for (reusable, expected) in [(0, true), (100, true), (101, false), (164, false)] {
        let found = prefixes.would_share(&first, &prompt, reusable);
        assert_eq!(found, expected, "{reusable} reusable tokens");
    }
}

/// A prompt takes a checkpoint at the end of the prefix that saves the waiting prompts most tokens. The waiting prompts
/// then reuse the whole prefix after one prompt.
#[test]
fn take_checkpoint_for_waiting_prompts_lets_all_reuse_the_prefix() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let prefix = prompts(&gemma, &[150], 28).remove(0);
    let first = [&prefix[..], &[5; 100]].concat();
    // Two prompts share 150 tokens with the first, one prompt 160 and one 230. Another prompt shares too few tokens.
    let waiting = [
        [&prefix[..], &[6; 8]].concat(),
        [&first[..160], &[7; 8]].concat(),
        [&prefix[..], &[8; 9]].concat(),
        [&first[..230], &[10; 8]].concat(),
        [&prefix[..20], &[9; 9]].concat(),
    ];
    let mut prefixes = prefix_cache(&gemma);
    let mut alone = prefill(&gemma, &first);
    let prompts = || waiting.iter().map(Vec::as_slice);
    prefixes.take_checkpoint_for(&mut alone, prompts());
    assert!(!alone.can_pack());
    assert!(alone.advance(CHUNK).expect("the device works").is_none());
    assert_eq!(alone.remaining(), 100);
    // Two prompts share more tokens than the model has read. The prompt takes another checkpoint for 80 tokens, but
    // none for 10.
    prefixes.take_checkpoint_for(&mut alone, prompts());
    assert!(alone.advance(CHUNK).expect("the device works").is_none());
    assert_eq!(alone.remaining(), 20);
    assert_close(
        &run(&mut alone),
        &logits_alone(&gemma, &first),
        "the first prompt",
    );
    assert!(prefixes.keep(alone));
    let mut pack = resumed(&gemma, &mut prefixes, &waiting[..4], &[150, 150, 150, 230]);
    check_logits(&gemma, &waiting[..4], &read(&mut pack), "waiting prompts");

    let mut single = prefill(&gemma, &first);
    prefix_cache(&gemma).take_checkpoint_for(&mut single, prompts().skip(4));
    assert!(single.can_pack());
}

/// Before each call, prompts arrive that share 1, 64, 65 and 66 tokens more with a prompt than it has read. The prompt
/// takes four checkpoints at most, each after 64 tokens.
#[test]
fn take_checkpoint_for_arriving_prompts_takes_four_at_most() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let first = prompts(&gemma, &[500], 30).remove(0);
    let prefixes = prefix_cache(&gemma);
    let mut alone = prefill(&gemma, &first);
    let mut ends = vec![0];
    loop {
        let read = first.len() - alone.remaining();
        let waiting = [1, 64, 65, 66].map(|more| {
            let shared = read + more;
            [&first[..shared], &[1 - first[shared].min(1); 2]].concat()
        });
        prefixes.take_checkpoint_for(&mut alone, waiting.iter().map(Vec::as_slice));
        if alone.advance(CHUNK).expect("the device works").is_some() {
            break;
        }
        ends.push(first.len() - alone.remaining());
    }
    assert_eq!(ends, [0, 64, 128, 192, 256]);
}

/// The tokens that waiting prompts can reuse already do not count for the choice of a checkpoint. The first prompt
/// continues from 140 tokens, after which one prompt shares 64 tokens with it, and two prompts 99.
#[test]
fn take_checkpoint_for_counts_tokens_that_are_not_reusable() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let first = prompts(&gemma, &[260], 32).remove(0);
    let mut prefixes = prefix_cache(&gemma);
    keep(&gemma, &mut prefixes, &first[..140]);
    let waiting = [204, 239, 239].map(|shared| continued(&gemma, &[&first[..shared]], &[(0, 2)]));
    let mut alone = resumed(&gemma, &mut prefixes, &[first], &[140]).remove(0);
    prefixes.take_checkpoint_for(&mut alone, waiting.iter().flatten().map(Vec::as_slice));
    assert!(alone.advance(CHUNK).expect("the device works").is_none());
    assert_eq!(alone.remaining(), 260 - 239);
}

/// A prompt shares 200 tokens with an earlier one. The checkpoint at their end is not given up for one waiting prompt
/// that shares fewer tokens, but for two.
#[test]
fn take_checkpoint_for_counts_the_checkpoint_of_resume() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let prefix = prompts(&gemma, &[200], 33).remove(0);
    let mut prefixes = prefix_cache(&gemma);
    keep(&gemma, &mut prefixes, &[&prefix[..], &[1; 20]].concat());
    for (count, boundary) in [(1, 200), (2, 90)] {
        let mut alone = prefill(&gemma, &[&prefix[..], &[2; 20]].concat());
        prefixes.resume(&mut alone);
        let waiting = continued(&gemma, &[&prefix[..90]], &vec![(0, 5); count]);
        prefixes.take_checkpoint_for(&mut alone, waiting.iter().map(Vec::as_slice));
        assert!(alone.advance(CHUNK).expect("the device works").is_none());
        assert_eq!(alone.remaining(), 220 - boundary, "{count} waiting");
    }
}

/// The memory has space for two of three prompts. The first one is dropped, and is not copied before.
#[test]
fn keep_all_keeps_the_last_prompts_that_fit() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let prompts = prompts(&gemma, &[60, 61, 10, 62], 29);
    let pack = || {
        let mut pack: Vec<Prefill> = prompts.iter().map(|one| prefill(&gemma, one)).collect();
        read(&mut pack);
        pack
    };
    let mut all = prefix_cache(&gemma);
    assert_eq!(all.keep_all(pack()), [true, true, false, true]);
    let mut two = PrefixCache::new(gemma.model(), all.bytes() * 5 / 6, CHUNK);
    assert_eq!(two.keep_all(pack()), [false, true, false, true]);
    assert!(two.bytes() < all.bytes());
    let kind = CacheKind::default();
    let longer = |index: usize| [&prompts[index][..], &[3]].concat();
    assert_eq!(
        [0, 1, 3].map(|index| two.reusable(&longer(index), kind)),
        [0, 61, 62]
    );
    let mut none = PrefixCache::new(gemma.model(), all.bytes() / 6, CHUNK);
    assert_eq!(none.keep_all(pack()), [false; 4]);
}

/// Some prompts of a pass take no space of their own: the second is too large, the third begins with the first one, and
/// the last is equal to the fourth. The others fit.
#[test]
fn keep_all_counts_only_prompts_that_take_space() {
    let gemma = Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the model loads");
    let mut prompts = prompts(&gemma, &[200, 1500, 3, 202], 31);
    prompts[2] = [&prompts[0][..], &prompts[2]].concat();
    prompts.push(prompts[3].clone());
    let mut pack: Vec<Prefill> = prompts.iter().map(|one| prefill(&gemma, one)).collect();
    read(&mut pack);
    let mut two = prefix_cache(&gemma);
    for index in [2, 3] {
        keep(&gemma, &mut two, &prompts[index]);
    }
    // The third prompt keeps a checkpoint at the end of the first one, which takes less than another prompt.
    let most = two.bytes() * 4 / 3;
    let mut prefixes = PrefixCache::new(gemma.model(), most, CHUNK);
    assert_eq!(prefixes.keep_all(pack), [true, false, true, true, true]);
    let longer = |index: usize| [&prompts[index][..], &[3]].concat();
    assert_eq!(
        [0, 2, 3].map(|index| prefixes.reusable(&longer(index), CacheKind::default())),
        [200, 203, 202]
    );
    assert!((two.bytes()..=most).contains(&prefixes.bytes()));
}

/// Two prompts continue from the end of an earlier one. The first of them replaces it, and both keep the checkpoint at
/// its end. Another prompt can therefore continue there after the first one has left the prefix cache.
#[test]
fn prompts_of_a_pass_share_the_checkpoint_of_the_replaced_prompt() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let earlier = prompts(&gemma, &[90, 80], 34);
    let pack = continued(&gemma, &[&earlier[0]], &[(0, 5), (0, 7)]);
    let mut most = 64 << 20;
    for _ in 0..2 {
        let mut prefixes = PrefixCache::new(gemma.model(), most, CHUNK);
        keep(&gemma, &mut prefixes, &earlier[0]);
        let mut pack = resumed(&gemma, &mut prefixes, &pack, &[90, 90]);
        read(&mut pack);
        assert_eq!(prefixes.keep_all(pack), [true, true]);
        // The second time, the memory has space for two prompts and one checkpoint.
        most = prefixes.bytes();
        keep(&gemma, &mut prefixes, &earlier[1]);
        let next = [&earlier[0][..], &[3, 4]].concat();
        resumed(&gemma, &mut prefixes, &[next], &[90]);
    }
}
