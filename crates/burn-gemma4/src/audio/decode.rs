//! Decodes audio files within limits on memory. Truncated files are refused, if their format has a length.

use super::clip::{check_length, check_rate};
use super::container::FileFormat;
use super::header::{MP3_FRAME, Opened, check_channels, failed, is_end, opened};
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::formats::FormatReader;

/// The largest number of packets. FLAC has the shortest packets: 30 seconds at 48 kHz have at most 90,000.
const MOST_PACKETS: usize = 200_000;

/// The samples of a file, with its channels averaged.
#[derive(Debug)]
pub(super) struct Decoded {
    pub samples: Vec<f32>,
    pub sample_rate: u32,
}

/// Decodes the contents of an audio file. The error is a reason that follows the file's name.
pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, String> {
    opened(bytes, decode_opened)
}

fn decode_opened(file: Opened<'_>) -> Result<Decoded, String> {
    let Opened {
        mut reader,
        track,
        parameters,
        frames,
        format,
        ..
    } = file;
    let options = AudioDecoderOptions::default().verify(true);
    let mut decoder = symphonia::default::get_codecs()
        .make_audio_decoder(&parameters, &options)
        .map_err(failed)?;
    // Programs that write a WAV file to a pipe know no length. Such a file ends where it ends.
    let ends_anywhere = format == FileFormat::Wave && frames.is_none();
    let promised = Promised {
        track,
        sample_rate: parameters.sample_rate,
        frames,
        ends_anywhere,
    };
    let decoded = read(reader.as_mut(), decoder.as_mut(), &promised)?;
    let tolerance = if format == FileFormat::Mp3 {
        MP3_FRAME
    } else {
        0
    };
    if frames.is_some_and(|frames| decoded.samples.len() as u64 + tolerance < frames) {
        return Err(failed("the file is truncated"));
    }
    match decoder.finalize().verify_ok {
        Some(false) => Err(failed("the checksum of the samples is wrong")),
        _ => Ok(decoded),
    }
}

/// The properties of a track that a header promises.
struct Promised {
    track: u32,
    sample_rate: Option<u32>,
    frames: Option<u64>,
    /// True if the end of the file ends the track.
    ends_anywhere: bool,
}

/// Reads all packets of a track.
fn read(
    reader: &mut dyn FormatReader,
    decoder: &mut dyn AudioDecoder,
    promised: &Promised,
) -> Result<Decoded, String> {
    let mut decoded: Option<Decoded> = None;
    let mut interleaved: Vec<f32> = Vec::new();
    let (mut packets, mut whole, mut cut) = (0, 0u64, 0u64);
    loop {
        let packet = match reader.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            Err(error) if promised.ends_anywhere && is_end(&error) => break,
            Err(error) => return Err(failed(error)),
        };
        packets += 1;
        if packets > MOST_PACKETS {
            return Err(failed("there are too many packets"));
        }
        if packet.track_id != promised.track {
            continue;
        }
        // Samples that the reader cuts from the packets take time, too. A header may let it cut all of them.
        let trimmed = packet
            .trim_start
            .get()
            .saturating_add(packet.trim_end.get());
        whole = whole.saturating_add(packet.dur.get().saturating_add(trimmed));
        cut = cut.saturating_add(packet.trim_end.get());
        if let Some(decoded) = &decoded {
            // Encoders pad a file by less than a second.
            let rate = decoded.sample_rate;
            let beyond = whole.saturating_sub(u64::from(rate));
            check_length(usize::try_from(beyond).unwrap_or(usize::MAX), rate)?;
            if cut > 3 * MP3_FRAME.max(u64::from(rate) / 8) {
                return Err(failed("the file has more samples than its header says"));
            }
        }
        let buffer = decoder.decode(&packet).map_err(failed)?;
        let (rate, channels) = (buffer.spec().rate(), buffer.spec().channels().count());
        check_rate(rate)?;
        check_channels(channels)?;
        let decoded = decoded.get_or_insert_with(|| Decoded {
            samples: Vec::new(),
            sample_rate: rate,
        });
        // The memory for decoding follows from the rate and the length in the header.
        if decoded.sample_rate != rate || promised.sample_rate.is_some_and(|other| other != rate) {
            return Err(failed("the sample rate changes"));
        }
        buffer.copy_to_vec_interleaved(&mut interleaved);
        let frames = interleaved.chunks_exact(channels);
        decoded.samples.extend(frames.map(|frame| {
            let sum: f64 = frame.iter().map(|one| f64::from(*one)).sum();
            (sum / channels as f64) as f32
        }));
        check_length(decoded.samples.len(), rate)?;
        let beyond = decoded.samples.len().saturating_sub(rate as usize) as u64;
        if promised.frames.is_some_and(|frames| beyond > frames) {
            return Err(failed("the file has more samples than its header says"));
        }
    }
    decoded.ok_or_else(|| failed("the file has no samples"))
}

#[cfg(test)]
mod tests {
    use super::super::resample::resampled;
    use super::*;
    use safetensors::SafeTensors;
    use std::path::PathBuf;

    fn read(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/audio");
        std::fs::read(folder.join(name)).expect("the fixture is readable")
    }

    fn refused(bytes: &[u8]) -> String {
        decode(bytes).expect_err("the file is refused")
    }

    /// Returns the root mean square of the difference, and of `expected`.
    fn difference(found: &[f32], expected: &[f32]) -> [f64; 2] {
        let square = |values: &mut dyn Iterator<Item = f32>| {
            let sum: f64 = values.map(|value| f64::from(value).powi(2)).sum();
            (sum / expected.len() as f64).sqrt()
        };
        let pairs = found.iter().zip(expected);
        [
            square(&mut pairs.map(|(one, other)| one - other)),
            square(&mut expected.iter().copied()),
        ]
    }

    /// Compares with libsndfile and soxr. Decoders of lossy formats may differ in rounding, and resamplers in their
    /// filters.
    #[test]
    fn decode_of_every_format_equals_libsndfile() {
        let file = read("decoded.safetensors");
        let tensors = SafeTensors::deserialize(&file).expect("the fixture parses");
        let tensor = |name: String| -> Vec<f32> {
            let view = tensors.tensor(&name).expect("the fixture has the tensor");
            let numbers = view.data().as_chunks::<4>().0.iter();
            numbers.map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let names = tensors.names().into_iter();
        let names: Vec<&str> = names
            .filter_map(|name| name.strip_prefix("decoded."))
            .collect();
        assert_eq!(names.len(), 12);
        for name in names {
            let found = decode(&read(name)).unwrap_or_else(|reason| panic!("{name}: {reason}"));
            let expected = tensor(format!("decoded.{name}"));
            assert_eq!(found.samples.len(), expected.len(), "{name}");
            let [error, scale] = difference(&found.samples, &expected);
            println!("{name}: {}", error / scale);
            let is_lossy = name.ends_with(".mp3") || name.ends_with(".ogg");
            let allowed = if is_lossy { 1e-5 } else { 1e-7 };
            assert!(error <= allowed * scale, "{name}: {error} of {scale}");

            let expected = tensor(format!("resampled.{name}"));
            let found = match found.sample_rate {
                16_000 => found.samples,
                rate => resampled(&found.samples, rate),
            };
            assert!(found.len().abs_diff(expected.len()) <= 1, "{name}");
            let [error, scale] = difference(&found, &expected);
            println!("{name} resampled: {}", error / scale);
            assert!(error <= 0.02 * scale, "{name}: {error} of {scale}");
        }
    }

    #[test]
    fn decode_of_truncated_file_is_refused() {
        for name in [
            "unsigned.wav",
            "stereo.wav",
            "deep.wav",
            "float.wav",
            "mono.flac",
            "stereo.flac",
            "stereo.mp3",
            "mono.ogg",
        ] {
            let whole = read(name);
            // The number of samples in an MP3 file may be wrong by one frame.
            let end = whole.len() - if name.ends_with(".mp3") { 900 } else { 1 };
            for length in (0..end).step_by(1 + end / 700).chain([end]) {
                let outcome = decode(&whole[..length]);
                assert!(
                    outcome.is_err(),
                    "{name}: {length} of {} bytes",
                    whole.len()
                );
            }
        }
    }

    #[test]
    fn decode_of_mp3_with_tags_ignores_them() {
        let whole = read("mono.mp3");
        let expected = decode(&whole).expect("the file is decodable");
        let mut tags = b"ID3\x03\0\0\0\0\0\x0a".to_vec();
        tags.extend([0; 10]);
        tags.extend(&whole);
        tags.extend(b"TAG");
        tags.extend([b' '; 125]);
        let found = decode(&tags).expect("the file is decodable");
        assert_eq!(found.samples, expected.samples);
    }

    /// Without its first frame, which has the number of samples, a file still plays to its end.
    #[test]
    fn decode_of_mp3_without_length_reads_all_frames() {
        let whole = read("stereo.mp3");
        let mark = whole
            .windows(4)
            .position(|bytes| matches!(bytes, b"Xing" | b"Info"));
        let mark = mark.expect("the first frame has a length");
        let mut unmarked = whole.clone();
        unmarked[mark..mark + 4].copy_from_slice(b"----");
        let expected = decode(&whole).expect("the file is decodable");
        let found = decode(&unmarked).expect("the file is decodable");
        assert!(found.samples.len() >= expected.samples.len());
    }

    /// A changed byte may decode to other samples, or be refused. No byte makes the decoder panic or allocate much.
    #[test]
    fn decode_of_changed_bytes_does_not_panic() {
        for name in [
            "stereo.wav",
            "float.wav",
            "mono.flac",
            "mono.mp3",
            "mono.ogg",
        ] {
            let whole = read(name);
            for index in (0..whole.len().min(300)).chain((300..whole.len()).step_by(97)) {
                for change in [0x01, 0x80, 0xFF] {
                    let mut bytes = whole.clone();
                    bytes[index] ^= change;
                    if let Ok(decoded) = decode(&bytes) {
                        assert!(decoded.samples.len() <= 30 * decoded.sample_rate as usize);
                    }
                }
            }
        }
    }

    /// Returns a WAV file with 16 bits per sample, whose header promises `promised` bytes.
    fn wave(rate: u32, channels: u16, data: &[u8], promised: u32) -> Vec<u8> {
        let mut bytes = b"RIFF".to_vec();
        bytes.extend((promised.saturating_add(36)).to_le_bytes());
        bytes.extend(b"WAVEfmt \x10\0\0\0\x01\0");
        bytes.extend(channels.to_le_bytes());
        bytes.extend(rate.to_le_bytes());
        bytes.extend((rate.wrapping_mul(2 * u32::from(channels))).to_le_bytes());
        bytes.extend((2 * channels).to_le_bytes());
        bytes.extend(b"\x10\0data");
        bytes.extend(promised.to_le_bytes());
        bytes.extend(data);
        bytes
    }

    #[test]
    fn decode_of_lying_header_is_refused() {
        let data = [0; 64];
        for (bytes, words) in [
            (wave(16_000, 1, &data, 1 << 20), "longer than 30 seconds"),
            (wave(16_000, 1, &data, 640), "truncated"),
            (wave(3, 1, &data, 64), "3 samples in a second"),
            (wave(4_000_000_000, 1, &data, 64), "samples in a second"),
            (wave(16_000, 32, &data, 64), "channel"),
            (wave(16_000, 1, &[], 0), "no samples"),
        ] {
            let reason = refused(&bytes);
            assert!(reason.contains(words), "{words}: {reason}");
        }
        let whole = decode(&wave(16_000, 1, &data, 64)).expect("the header is right");
        assert_eq!(whole.samples.len(), 32);
    }

    #[test]
    fn decode_of_longer_file_is_refused() {
        let data = vec![0; 2 * 8000 * 30 + 2];
        let length = data.len() as u32;
        let reason = refused(&wave(8000, 1, &data, length));
        assert!(reason.contains("longer than 30 seconds"), "{reason}");
        let whole = decode(&wave(8000, 1, &data[2..], length - 2)).expect("30 seconds are valid");
        assert_eq!(whole.samples.len(), 240_000);
    }

    /// A program that writes to a pipe promises all bytes that a header can promise.
    #[test]
    fn decode_of_wave_without_length_reads_to_its_end() {
        let data: Vec<u8> = (0..64).collect();
        let whole = decode(&wave(16_000, 1, &data, 64)).expect("the header is right");
        let piped = decode(&wave(16_000, 1, &data, u32::MAX)).expect("the length is unknown");
        assert_eq!(piped.samples, whole.samples);
    }

    #[test]
    fn decode_of_nested_tags_skips_them() {
        let frame = |inner: &[u8]| {
            let mut frame = b"CHAP".to_vec();
            frame.extend((inner.len() as u32 + 18).to_be_bytes());
            frame.extend(b"\0\0a\0");
            frame.extend([0; 16]);
            frame.extend(inner);
            frame
        };
        let nested = (0..3000).fold(Vec::new(), |inner, _| frame(&inner));
        let size = nested.len();
        let mut file = b"ID3\x03\0\0".to_vec();
        file.extend([21, 14, 7, 0].map(|shift| (size >> shift & 0x7F) as u8));
        file.extend(nested);
        file.extend(read("mono.mp3"));
        let expected = decode(&read("mono.mp3")).expect("the file is decodable");
        let found = decode(&file).expect("the tag is skipped");
        assert_eq!(found.samples, expected.samples);
    }

    #[test]
    fn decode_of_two_mp3_files_in_a_row_is_refused() {
        let both = [read("mono.mp3"), read("mono.mp3")].concat();
        let reason = refused(&both);
        assert!(reason.contains("more samples than its header"), "{reason}");
    }

    #[test]
    fn decode_of_other_formats_is_refused() {
        for bytes in [
            &b""[..],
            b"RIFF",
            b"RIFF\x04\0\0\0AVI ",
            b"\x89PNG\r\n\x1a\n",
            b"#!AMR\n",
            b"FORM\0\0\0\0AIFF",
            b"\xff\xff\xff\xff\xff\xff\xff\xff",
            b"ID3",
            b"OggS",
        ] {
            let reason = refused(bytes);
            let is_named = reason.contains("WAV, FLAC, MP3 or Ogg") || reason.contains("decoded");
            assert!(is_named, "{reason}");
        }
    }
}
