//! Tests `Prefill` and `PrefixCache` with images. The tokens equal those of Hugging Face Transformers for any chunk, in
//! a batch, and after a prefix of an earlier prompt.

use super::{ALL, image, on_every_device};
use crate::fixture::{Fixture, folder};
use crate::media::{collapsed, decoded, first_token};
use burn::tensor::{DType, Device};
use burn_gemma4::{Batch, CacheKind, EncodedPrompt, Gemma4, Image, KvPrecision, PrefixCache};

/// Encodes the prompt of a fixture with images.
fn encoded(fixture: &Fixture, gemma: &Gemma4, images: &[Image]) -> EncodedPrompt {
    let encoder = gemma.prompt_encoder();
    let images = images.iter().map(|image| {
        let prepared = encoder.prepare(image);
        prepared.expect("the model sees images")
    });
    let images: Vec<_> = images.collect();
    let tokens = collapsed(gemma, &fixture.prompt);
    encoder
        .encode(tokens, &images, &[])
        .expect("the placeholders fit")
}

fn images(fixture: &Fixture) -> Vec<Image> {
    ["wide.png", "tall.png"]
        .map(|name| image(fixture.name, name))
        .into()
}

#[test]
fn prefill_with_images_equals_transformers_for_any_chunk_and_in_a_batch() {
    on_every_device(|fixture, gemma, what| {
        let kind = CacheKind::default();
        let images = images(fixture);
        let prompt = encoded(fixture, gemma, &images);
        assert_eq!(prompt.tokens(), fixture.prompt, "{what}");
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let mut first = Vec::new();
        for chunk in [1, 7, 60, 100, 1000] {
            let mut prefill = gemma
                .prefill(prompt.clone(), kind)
                .expect("the prompt fits");
            if chunk == 60 {
                prefill = prefill.without_graph_capture();
            }
            first.push(first_token(&mut prefill, chunk));
            batch.join(&prefill).expect("all is read");
        }
        // A prompt without images is decoded in the same batch.
        let mut plain = gemma
            .prefill(vec![2, 40, 41, 42], kind)
            .expect("the prompt fits");
        first.push(first_token(&mut plain, 3));
        batch.join(&plain).expect("all is read");
        let answers = decoded(&mut batch, first, fixture.generated.len());
        for answer in &answers[..5] {
            assert_eq!(*answer, fixture.generated, "{what}");
        }
    });
}

/// The keys and values of an image are shared only with a prompt that has the same image in the same place.
#[test]
fn prefix_cache_shares_prompts_up_to_the_first_other_image() {
    for precision in [KvPrecision::Model, KvPrecision::Q8] {
        for name in ALL {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&Device::flex(), DType::F32);
            let kind = CacheKind {
                precision,
                ..CacheKind::default()
            };
            let same = images(&fixture);
            let mut rgb = vec![90; 3 * 53 * 97];
            let [gray, other] = [0, 1].map(|value| {
                rgb[7000] ^= value;
                Image::from_rgb(53, 97, rgb.clone()).expect("the number of bytes is right")
            });
            let prompts = [
                encoded(&fixture, &gemma, &same),
                encoded(&fixture, &gemma, &[same[0].clone(), gray]),
                encoded(&fixture, &gemma, &[same[0].clone(), other]),
                encoded(&fixture, &gemma, &same),
            ];
            let second = prompts[0].media().nth(1).expect("two images").0;
            let mut prefixes = PrefixCache::new(gemma.model(), 256 << 20, 50);
            for (index, prompt) in prompts.iter().cycle().take(12).enumerate() {
                let what = format!("{name} {precision:?} {index}");
                let read = |prefixes: Option<&mut PrefixCache>| {
                    let mut prefill = gemma
                        .prefill(prompt.clone(), kind)
                        .expect("the prompt fits");
                    let reused = prefixes.map_or(0, |prefixes| {
                        prefixes.resume(&mut prefill);
                        prefill.reused()
                    });
                    let first = first_token(&mut prefill, 50);
                    let mut batch = Batch::new(gemma.model(), kind).expect("supported");
                    batch.join(&prefill).expect("all is read");
                    let answer = decoded(&mut batch, vec![first], 8).remove(0);
                    (answer, reused, prefill)
                };
                let (expected, _, _) = read(None);
                let (answer, reused, prefill) = read(Some(&mut prefixes));
                assert_eq!(answer, expected, "{what}");
                match index {
                    0 => assert_eq!(reused, 0, "{what}"),
                    // The prompt has been read before. The prompts after the first share the first image only.
                    1 | 2 => assert!(reused <= second.start, "{what}: {reused}"),
                    _ => (),
                }
                if index >= 8 {
                    assert!(reused >= second.start - 1, "{what}: {reused}");
                }
                prefixes.keep(prefill);
            }
        }
    }
}

#[test]
fn prefill_with_images_of_a_model_without_vision_is_refused() {
    let fixture = Fixture::open("vision-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let prompt = encoded(&fixture, &gemma, &images(&fixture));
    let blind = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let error = blind
        .prefill(prompt, CacheKind::default())
        .expect_err("no vision");
    assert!(error.to_string().contains("sees no images"), "{error}");
}

#[test]
fn encoder_refuses_other_numbers_of_images() {
    let fixture = Fixture::open("vision-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let encoder = gemma.prompt_encoder();
    let tokens = collapsed(&gemma, &fixture.prompt);
    let one = encoder
        .prepare(&images(&fixture)[0])
        .expect("the model sees images");
    for images in [vec![], vec![one.clone()], vec![one; 3]] {
        let error = encoder
            .encode(tokens.clone(), &images, &[])
            .expect_err("two placeholders");
        let expected = format!("2 image placeholders, but {} images", images.len());
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

/// A file that is turned by its orientation has the size of the upright image.
#[test]
fn size_of_image_from_its_header_equals_that_of_the_prepared_image() {
    for name in ALL {
        let gemma = Fixture::open(name).load(&Device::flex(), DType::F32);
        let encoder = gemma.prompt_encoder();
        for file in ["photograph.png", "turned.jpg", "lossless.webp", "cmyk.jpg"] {
            let bytes = std::fs::read(folder("images").join(file)).expect("a fixture");
            let header = Image::header(&bytes).expect("the header is readable");
            let image = Image::from_bytes(&bytes).expect("the image is decodable");
            for count in [None, Some(70), Some(140)] {
                let size = encoder.image_size(&header, count);
                let size = size.expect("the model sees images");
                let image = match count {
                    Some(count) => image.clone().with_max_soft_tokens(count),
                    None => Ok(image.clone()),
                };
                let prepared = encoder.prepare(&image.expect("the number is supported"));
                let prepared = prepared.expect("the model sees images");
                let what = format!("{name} {file} {count:?}");
                assert_eq!(size.tokens, prepared.tokens(), "{what}");
                assert_eq!(size.bytes, prepared.bytes(), "{what}");
                assert!(size.preparing_bytes > size.bytes, "{what}");
            }
        }
    }
}
