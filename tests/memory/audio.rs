//! Tests that the decoding of audio takes no more memory than the header of the file says.

use super::ONE_AT_A_TIME;
use super::counted::peak_of;
use burn_gemma4::Audio;
use std::path::PathBuf;
use std::sync::PoisonError;

/// Returns a WAV file of one channel with 16 bits per sample, and with a chunk before its samples.
fn wave(rate: u32, samples: usize, chunk: &[u8]) -> Vec<u8> {
    let data: Vec<u8> = (0..samples)
        .flat_map(|index| (index as i16).to_le_bytes())
        .collect();
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + chunk.len() as u32 + data.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    bytes.extend(rate.to_le_bytes());
    bytes.extend((2 * rate).to_le_bytes());
    bytes.extend(b"\x02\0\x10\0");
    bytes.extend(chunk);
    bytes.extend(b"data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}

/// Checks that the memory of decoding is within that of the header, and returns both.
fn check(name: &str, file: &[u8]) -> [u64; 2] {
    let header = Audio::header(file).expect("the header is valid");
    let peak = peak_of(|| drop(Audio::from_bytes(file).expect("the file is decodable"))) as u64;
    let bytes = header.decoding_bytes;
    println!("{name}: {peak} of {bytes} bytes");
    assert!(peak <= bytes, "{name}: {peak} of {bytes} bytes");
    [peak, bytes]
}

#[test]
fn audio_of_every_format_is_decoded_within_the_memory_of_its_header() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/audio");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is readable") {
        let path = entry.expect("the folder is readable").path();
        let end = path.extension().and_then(|end| end.to_str());
        if matches!(end, Some("wav" | "flac" | "mp3" | "ogg")) {
            let file = std::fs::read(&path).expect("the fixture is readable");
            check(&path.display().to_string(), &file);
            count += 1;
        }
    }
    assert!(count >= 12, "{count}");
}

/// The FFT of a rate without common factors with 16,000 is as long as the rate. Primes take the most memory.
#[test]
fn audio_of_every_rate_is_decoded_within_the_memory_of_its_header() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for rate in [
        1000, 1009, 8000, 11_025, 15_991, 15_999, 16_001, 22_050, 44_100, 44_101, 48_000, 65_537,
        131_071, 131_101, 192_001, 262_147, 262_139, 383_987, 383_983, 383_999, 384_000,
    ] {
        let [peak, bytes] = check(&format!("{rate} Hz"), &wave(rate, rate as usize / 10, &[]));
        // The bound is of use only if it is not many times too large.
        assert!(
            bytes < 40 << 20 || bytes < 6 * peak,
            "{rate} Hz: {peak} of {bytes} bytes"
        );
    }
    check("30 s of 48 kHz", &wave(48_000, 30 * 48_000, &[]));
    check("30 s of 383,987 Hz", &wave(383_987, 30 * 383_987, &[]));
}

#[test]
fn audio_with_many_tags_takes_no_memory_for_them() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let tags = [b"INFO".as_slice(), &b"IART\x02\0\0\0ab".repeat(400_000)].concat();
    let chunk = [b"LIST", &(tags.len() as u32).to_le_bytes()[..], &tags].concat();
    let file = wave(16_000, 16_000, &chunk);
    let [_, bytes] = check("tags", &file);
    assert!(bytes < 10 << 20, "{bytes}");
    let peak = peak_of(|| drop(Audio::header(&file)));
    assert!(peak < 1 << 20, "{peak}");
}
