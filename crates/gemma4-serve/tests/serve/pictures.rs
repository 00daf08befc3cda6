//! Images and audio for tests: PNG and WAV files, and the fixtures of models that read them.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use burn::tensor::{DType, Device};
use burn_gemma4::{Gemma4, LoadOptions};
use image::{ImageFormat, RgbImage};
use serde_json::{Value, json};
use std::io::Cursor;
use std::path::PathBuf;

/// The fixtures of models that see images: models like E2B, 31B and 12B.
pub const ALL: [&str; 3] = ["vision-ple", "vision-keqv", "vision-unified"];

/// The fixtures of models that hear audio and see images: models like E2B and 12B.
pub const HEARING: [&str; 2] = ["audio-ple", "audio-unified"];

/// Returns the path of a fixture.
pub fn folder(name: &str) -> PathBuf {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");
    PathBuf::from(fixtures).join(name)
}

/// Returns the model of a fixture, in f32 on the CPU.
pub fn model(name: &str) -> Gemma4 {
    let options = LoadOptions::new().dtype(DType::F32);
    Gemma4::load(folder(name), &Device::flex(), options).expect("the fixture is loadable")
}

/// Returns a PNG file with a pattern that depends on `seed`, whose pixel at `changed` has another color.
pub fn png(width: u32, height: u32, seed: u32, changed: Option<(u32, u32)>) -> Vec<u8> {
    let channel =
        |x: u32, y: u32, c: u32| (x * 7 + y * 13 + c * 101 + seed * (x / 9 + y / 6) * 31) as u8;
    let image = RgbImage::from_fn(width, height, |x, y| {
        let mut pixel = [0, 1, 2].map(|c| channel(x, y, c));
        if changed == Some((x, y)) {
            pixel[0] ^= 0x80;
        }
        image::Rgb(pixel)
    });
    let mut bytes = Cursor::new(Vec::new());
    image
        .write_to(&mut bytes, ImageFormat::Png)
        .expect("the image is encodable");
    bytes.into_inner()
}

/// Returns the data of a WAV file with `samples` samples at 16 kHz: a tone whose pitch depends on `seed`.
pub fn wav(samples: usize, seed: usize) -> Vec<u8> {
    let bytes = 2 * samples as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + bytes).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(16_000u32.to_le_bytes());
    file.extend(32_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend(bytes.to_le_bytes());
    let tone = |index: usize| (index * (seed + 3) % 97 * 300) as i16 - 14_000;
    file.extend((0..samples).flat_map(|index| tone(index).to_le_bytes()));
    file
}

/// Returns an audio file of the fixtures.
pub fn clip(name: &str) -> Vec<u8> {
    std::fs::read(folder("audio").join(name)).expect("the fixture is readable")
}

/// A part with audio, as in OpenAI's chat completions and responses.
pub fn input_audio(bytes: &[u8]) -> Value {
    json!({"type": "input_audio", "input_audio": {"data": base64(bytes), "format": "wav"}})
}

/// Encodes a file in base64.
pub fn base64(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// Returns a data URL of a PNG file.
pub fn data_url(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", base64(bytes))
}

/// A part with an image, as in OpenAI's chat completions.
pub fn image_url(bytes: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": data_url(bytes)}})
}

/// A part with a text, as in the APIs of chat completions and of Anthropic.
pub fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}
