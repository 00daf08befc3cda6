//! Decodes audio files within limits on memory. Truncated files are refused, if their format has a length.

use super::clip::{check_length, check_rate};
use std::io::Cursor;
use std::panic::catch_unwind;
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream, ReadOnlySource};
use symphonia::core::meta::MetadataOptions;

/// The largest number of channels. More channels than those of a cinema come from a broken header.
const MOST_CHANNELS: usize = 8;

/// The number of samples of a frame of an MP3 file. Some encoders count one frame too many.
const MP3_FRAME: u64 = 1152;

/// The largest number of packets. FLAC has the shortest packets: 30 seconds at 48 kHz have at most 90,000.
const MOST_PACKETS: usize = 200_000;

/// The largest number of bytes of a Vorbis setup header. Encoders write headers of less than 10,000 bytes.
const MOST_SETUP_BYTES: usize = 1 << 20;

/// The largest number of values in the codebooks of a Vorbis file. The decoder stores four bytes for each.
const MOST_CODEBOOK_VALUES: u64 = 1 << 22;

/// The samples of a file, with its channels averaged.
#[derive(Debug)]
pub(super) struct Decoded {
    pub samples: Vec<f32>,
    pub sample_rate: u32,
}

/// Decodes the contents of an audio file. The error is a reason that follows the file's name.
pub(super) fn decode(bytes: &[u8]) -> Result<Decoded, String> {
    let bytes = without_tags(bytes);
    if !is_known(bytes) {
        return Err("is not a WAV, FLAC, MP3 or Ogg Vorbis file".into());
    }
    if bytes.starts_with(b"OggS") && !has_last_page(bytes) {
        return Err(failed("the file is truncated"));
    }
    // A broken header makes `symphonia` 0.6.1 panic, by its assertions and by overflow checks.
    catch_unwind(|| decode_known(bytes)).unwrap_or_else(|_| Err(failed("the header is broken")))
}

/// Decodes a file in one of the formats.
fn decode_known(bytes: &[u8]) -> Result<Decoded, String> {
    let source: Box<dyn MediaSource> = match is_mp3(bytes) {
        // In a seekable MP3 file without a length, `symphonia` estimates the length, and cuts the file there.
        true => Box::new(ReadOnlySource::new(bytes)),
        false => Box::new(Cursor::new(bytes)),
    };
    let stream = MediaSourceStream::new(source, Default::default());
    let mut reader = symphonia::default::get_probe()
        .probe(
            &Hint::new(),
            stream,
            FormatOptions::default(),
            MetadataOptions::default(),
        )
        .map_err(failed)?;
    let track = reader.default_track(TrackType::Audio);
    let track = track.ok_or_else(|| failed("there is no audio track"))?;
    let (id, frames) = (track.id, track.num_frames);
    let parameters = track.codec_params.as_ref();
    let parameters = parameters.and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or_else(|| failed("the codec is not supported"))?;
    // Check the header before samples are allocated. A header may promise anything.
    if let Some(rate) = parameters.sample_rate {
        check_rate(rate)?;
        let frames = usize::try_from(frames.unwrap_or(0)).unwrap_or(usize::MAX);
        check_length(frames, rate)?;
    }
    if let Some(channels) = &parameters.channels {
        check_channels(channels.count())?;
    }
    if bytes.starts_with(b"OggS") {
        check_setup(parameters.extra_data.as_deref().unwrap_or_default())?;
    }
    let options = AudioDecoderOptions::default().verify(true);
    let mut decoder = symphonia::default::get_codecs()
        .make_audio_decoder(parameters, &options)
        .map_err(failed)?;
    // Programs that write a WAV file to a pipe know no length. Such a file ends where it ends.
    let ends_anywhere = bytes.starts_with(b"RIFF") && frames.is_none();
    let decoded = read(reader.as_mut(), decoder.as_mut(), id, ends_anywhere)?;
    let tolerance = if is_mp3(bytes) { MP3_FRAME } else { 0 };
    if frames.is_some_and(|frames| decoded.samples.len() as u64 + tolerance < frames) {
        return Err(failed("the file is truncated"));
    }
    match decoder.finalize().verify_ok {
        Some(false) => Err(failed("the checksum of the samples is wrong")),
        _ => Ok(decoded),
    }
}

/// Reads all packets of a track. With `ends_anywhere`, the end of the file ends the track.
fn read(
    reader: &mut dyn FormatReader,
    decoder: &mut dyn AudioDecoder,
    track: u32,
    ends_anywhere: bool,
) -> Result<Decoded, String> {
    let mut decoded: Option<Decoded> = None;
    let mut interleaved: Vec<f32> = Vec::new();
    let (mut packets, mut whole, mut cut) = (0, 0u64, 0u64);
    loop {
        let packet = match reader.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            Err(error) if ends_anywhere && is_end(&error) => break,
            Err(error) => return Err(failed(error)),
        };
        packets += 1;
        if packets > MOST_PACKETS {
            return Err(failed("there are too many packets"));
        }
        if packet.track_id != track {
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
        if decoded.sample_rate != rate {
            return Err(failed("the sample rate changes"));
        }
        buffer.copy_to_vec_interleaved(&mut interleaved);
        let frames = interleaved.chunks_exact(channels);
        decoded.samples.extend(frames.map(|frame| {
            let sum: f64 = frame.iter().map(|one| f64::from(*one)).sum();
            (sum / channels as f64) as f32
        }));
        check_length(decoded.samples.len(), rate)?;
    }
    decoded.ok_or_else(|| failed("the file has no samples"))
}

/// True if a file begins like one of the formats. The probe of `symphonia` would search other files for such a
/// beginning.
fn is_known(bytes: &[u8]) -> bool {
    let is_wave = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WAVE");
    is_wave || is_mp3(bytes) || bytes.starts_with(b"fLaC") || bytes.starts_with(b"OggS")
}

/// True if a file begins with the header of an MPEG frame.
fn is_mp3(bytes: &[u8]) -> bool {
    matches!(bytes, [0xFF, second, ..] if second & 0xE0 == 0xE0)
}

/// Returns a file without the ID3v2 tags at its beginning. The reader of `symphonia` 0.6.1 reads nested tags by recursion
/// without a limit.
fn without_tags(mut bytes: &[u8]) -> &[u8] {
    while let Some([b'I', b'D', b'3', _, _, flags, size @ ..]) = bytes.first_chunk::<10>() {
        // The size has seven bits in each byte. A footer repeats the header.
        let size = size
            .iter()
            .fold(0, |size, byte| size << 7 | usize::from(byte & 0x7F));
        let footer = if flags & 0x10 != 0 { 10 } else { 0 };
        bytes = bytes.get(10 + size + footer..).unwrap_or_default();
    }
    bytes
}

/// Refuses a Vorbis setup header whose codebooks would need much memory. Codebooks begin at any bit.
fn check_setup(header: &[u8]) -> Result<(), String> {
    if header.len() > MOST_SETUP_BYTES {
        return Err(failed("the Vorbis header is too large"));
    }
    let mut values = 0;
    for bytes in header.windows(9) {
        let word = bytes
            .iter()
            .rev()
            .fold(0u128, |word, byte| word << 8 | u128::from(*byte));
        for bits in (0..8).map(|shift| word >> shift) {
            // The pattern that begins a codebook, and the numbers of dimensions and entries.
            if bits & 0xFF_FFFF == 0x56_4342 {
                let [dimensions, entries] = [bits >> 24 & 0xFFFF, bits >> 40 & 0xFF_FFFF];
                values += (dimensions * entries) as u64;
            }
        }
    }
    match values > MOST_CODEBOOK_VALUES {
        true => Err(failed("the Vorbis codebooks are too large")),
        false => Ok(()),
    }
}

fn is_end(error: &Error) -> bool {
    matches!(error, Error::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof)
}

/// True if the pages of an Ogg file end with a page that is marked as the last one. The reader accepts files without.
fn has_last_page(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        let Some(header) = rest.first_chunk::<27>() else {
            return false;
        };
        let segments = usize::from(header[26]);
        let Some(sizes) = rest.get(27..27 + segments) else {
            return false;
        };
        let size: usize = sizes.iter().map(|size| usize::from(*size)).sum();
        let is_page = header.starts_with(b"OggS");
        let Some(after) = rest.get(27 + segments + size..).filter(|_| is_page) else {
            return false;
        };
        match header[5] & 4 != 0 {
            true => return true,
            false => rest = after,
        }
    }
}

fn check_channels(channels: usize) -> Result<(), String> {
    match channels {
        1..=MOST_CHANNELS => Ok(()),
        _ => Err(format!(
            "has {channels} channels; expected from 1 to {MOST_CHANNELS}"
        )),
    }
}

fn failed(error: impl ToReason) -> String {
    format!("cannot be decoded as audio: {}", error.reason())
}

/// A cause of a failure.
trait ToReason {
    fn reason(self) -> String;
}

impl ToReason for &str {
    fn reason(self) -> String {
        self.to_owned()
    }
}

impl ToReason for Error {
    fn reason(self) -> String {
        match self {
            error if is_end(&error) => "the file is truncated".to_owned(),
            Self::ResetRequired => "the file has several streams, expected one".to_owned(),
            error => error.to_string(),
        }
    }
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
    fn check_setup_refuses_large_codebooks_at_any_bit() {
        // 31 dimensions of 131,072 entries are about the limit.
        let codebook = 0x56_4342u128 | 31 << 24 | 131_072 << 40;
        for shift in 0..8 {
            let one = (codebook << shift).to_le_bytes()[..9].to_vec();
            assert!(check_setup(&one).is_ok(), "{shift}");
            let two = [one.clone(), one].concat();
            let reason = check_setup(&two).expect_err("the sum is too large");
            assert!(reason.contains("codebooks"), "{reason}");
        }
        assert!(check_setup(&[0; MOST_SETUP_BYTES + 1]).is_err());
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
