//! Tests `Prefill` and `PrefixCache` with audio and an image. The tokens equal those of Hugging Face Transformers for
//! any chunk, in a batch, and after a prefix of an earlier prompt.

use super::{ALL, audio, on_every_device};
use crate::fixture::{Fixture, folder};
use crate::media::{collapsed, decoded, first_token};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Audio, Batch, CacheKind, EncodedPrompt, Gemma4, Image, KvPrecision, PrefixCache,
};

/// Encodes the prompt of a fixture, whose second clip is `last`.
fn encoded(fixture: &Fixture, gemma: &Gemma4, last: &Audio) -> EncodedPrompt {
    let encoder = gemma.prompt_encoder();
    let wide = Image::open(folder(fixture.name).join("wide.png")).expect("the image is decodable");
    let wide = encoder.prepare(&wide).expect("the model sees images");
    let clips = [&audio(fixture.name, "long.wav"), last].map(|clip| {
        let prepared = encoder.prepare_audio(clip);
        prepared.expect("the model hears audio")
    });
    let tokens = collapsed(gemma, &fixture.prompt);
    let prompt = encoder.encode(tokens, &[wide], &clips);
    prompt.expect("the placeholders fit")
}

fn short(fixture: &Fixture) -> Audio {
    audio(fixture.name, "short.wav")
}

#[test]
fn prefill_with_audio_equals_transformers_for_any_chunk_and_in_a_batch() {
    on_every_device(|fixture, gemma, what| {
        let kind = CacheKind::default();
        let prompt = encoded(fixture, gemma, &short(fixture));
        assert_eq!(prompt.tokens(), fixture.prompt, "{what}");
        assert_eq!(prompt.media().count(), 3, "{what}");
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let mut first = Vec::new();
        for chunk in [1, 7, 60, 100, 1000] {
            let prefill = gemma.prefill(prompt.clone(), kind);
            let mut prefill = prefill.expect("the prompt fits");
            assert!(!prefill.can_pack(), "{what}");
            first.push(first_token(&mut prefill, chunk));
            batch.join(&prefill).expect("all is read");
        }
        // A prompt without audio is decoded in the same batch.
        let plain = gemma.prefill(vec![2, 40, 41, 42], kind);
        let mut plain = plain.expect("the prompt fits");
        assert!(plain.can_pack(), "{what}");
        first.push(first_token(&mut plain, 3));
        batch.join(&plain).expect("all is read");
        let answers = decoded(&mut batch, first, fixture.generated.len());
        for answer in &answers[..5] {
            assert_eq!(*answer, fixture.generated, "{what}");
        }
    });
}

/// The keys and values of a clip are shared only with a prompt that has the same clip in the same place.
#[test]
fn prefix_cache_shares_prompts_up_to_the_first_other_clip() {
    for precision in [KvPrecision::Model, KvPrecision::Q8] {
        for name in ALL {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&Device::flex(), DType::F32);
            let kind = CacheKind {
                precision,
                ..CacheKind::default()
            };
            let same = short(&fixture);
            // Another clip of the same length has the same tokens.
            let mut samples = same.samples().to_vec();
            samples.iter_mut().for_each(|sample| *sample *= 0.5);
            let other = Audio::from_samples(&samples, 16_000).expect("the samples are valid");
            let prompts = [&same, &other, &same].map(|clip| encoded(&fixture, &gemma, clip));
            assert_eq!(prompts[0].tokens(), prompts[1].tokens());
            let last = prompts[0].media().nth(2).expect("three media").0;
            let mut prefixes = PrefixCache::new(gemma.model(), 256 << 20, 50);
            for (index, prompt) in prompts.iter().cycle().take(9).enumerate() {
                let what = format!("{name} {precision:?} {index}");
                let read = |prefixes: Option<&mut PrefixCache>| {
                    let prefill = gemma.prefill(prompt.clone(), kind);
                    let mut prefill = prefill.expect("the prompt fits");
                    let reused = prefixes.map_or(0, |prefixes| {
                        prefixes.resume(&mut prefill);
                        prefill.reused()
                    });
                    let first = first_token(&mut prefill, 50);
                    let mut batch = Batch::new(gemma.model(), kind).expect("supported");
                    batch.join(&prefill).expect("all is read");
                    let answer = decoded(&mut batch, vec![first], 6).remove(0);
                    (answer, reused, prefill)
                };
                let (expected, _, _) = read(None);
                let (answer, reused, prefill) = read(Some(&mut prefixes));
                assert_eq!(answer, expected, "{what}");
                match index {
                    0 => assert_eq!(reused, 0, "{what}"),
                    // The second prompt shares the first clip and the image only.
                    1 => assert!(reused <= last.start, "{what}: {reused}"),
                    _ => (),
                }
                if index >= 6 {
                    assert!(reused >= last.start - 1, "{what}: {reused}");
                }
                prefixes.keep(prefill);
            }
        }
    }
}

#[test]
fn prefill_with_audio_of_a_model_without_audio_is_refused() {
    let fixture = Fixture::open("audio-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let prompt = encoded(&fixture, &gemma, &short(&fixture));
    let deaf = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    let error = deaf.prefill(prompt, CacheKind::default());
    let error = error.expect_err("no audio").to_string();
    assert!(error.contains("hears no audio"), "{error}");
}

#[test]
fn encoder_refuses_other_numbers_of_clips() {
    let fixture = Fixture::open("audio-unified");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let encoder = gemma.prompt_encoder();
    let placeholder = gemma.tokenizer().id("<|audio|>").expect("a special token");
    let clip = encoder.prepare_audio(&short(&fixture));
    let clip = clip.expect("the model hears audio");
    for clips in [vec![], vec![clip.clone()], vec![clip; 3]] {
        let error = encoder.encode(vec![2, placeholder, 7, placeholder], &[], &clips);
        let error = error.expect_err("two placeholders").to_string();
        let expected = format!("2 audio placeholders, but {} audio clips", clips.len());
        assert!(error.contains(&expected), "{error}");
    }
}

/// The numbers of tokens in headers are lower bounds, and exact except in MP3 files.
#[test]
fn size_of_clip_from_its_header_bounds_that_of_the_prepared_clip() {
    for name in ALL {
        let gemma = Fixture::open(name).load(&Device::flex(), DType::F32);
        let encoder = gemma.prompt_encoder();
        for file in [
            "stereo.wav",
            "deep.wav",
            "stereo.flac",
            "stereo.mp3",
            "stereo.ogg",
        ] {
            let bytes = std::fs::read(folder("audio").join(file)).expect("a fixture");
            let header = Audio::header(&bytes).expect("the header is readable");
            let clip = Audio::from_bytes(&bytes).expect("the clip is decodable");
            let size = encoder.audio_size(&header).expect("the model hears audio");
            let prepared = encoder.prepare_audio(&clip).expect("the model hears audio");
            let missing = prepared.tokens().checked_sub(size.tokens);
            let tolerance = if file.ends_with("mp3") { 4 } else { 0 };
            let is_close = missing.is_some_and(|missing| missing <= tolerance);
            assert!(is_close, "{name} {file}: {size:?}, {prepared:?}");
            assert!(size.bytes >= prepared.bytes(), "{name} {file}");
            let samples = 4 * clip.samples().len() as u64;
            assert!(header.decoding_bytes > samples, "{name} {file}");
        }
    }
}
