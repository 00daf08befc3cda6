//! The headers of audio files: their format, their length, and the memory that their decoding needs.

use super::clip::{MOST_SECONDS, RATES, SAMPLE_RATE, check_length, check_rate};
use super::container::{Container, FileFormat};
use super::resample::resampling_bytes;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::codecs::audio::AudioCodecParameters;
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatReader, TrackType};

/// The largest number of channels. More channels than those of a cinema come from a broken header.
const MOST_CHANNELS: usize = 8;

/// The largest number of bytes of a Vorbis setup header. Encoders write headers of less than 10,000 bytes.
const MOST_SETUP_BYTES: usize = 1 << 20;

/// The largest number of values in the codebooks of a Vorbis file. The decoder stores four bytes for each.
const MOST_CODEBOOK_VALUES: u64 = 1 << 22;

/// The number of samples of a frame of an MP3 file. Some encoders count one frame too many.
pub(super) const MP3_FRAME: u64 = 1152;

/// The largest number of bytes of a decoded packet, twice. A packet of FLAC has up to 65,535 samples of 8 channels.
const PACKET_BYTES: u64 = 2 * 4 * 8 * 65_535;

/// The number of bytes of a reader's buffers and of a packet before it is decoded.
const READER_BYTES: u64 = 1 << 20;

/// The size of an audio file's samples, which its header promises.
///
/// ```
/// use burn_gemma4::Audio;
///
/// let error = Audio::header(b"#!AMR").unwrap_err();
/// assert!(error.to_string().contains("WAV, FLAC, MP3 or Ogg Vorbis"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioHeader {
    /// The number of samples of each channel in a second, if the header has it.
    pub sample_rate: Option<u32>,
    /// A lower bound of the number of samples of each channel, if the header has a length. Only in an MP3 file it is
    /// not the number itself, because some encoders count one frame too many.
    pub samples: Option<u64>,
    /// An upper bound of the memory that [`Audio::from_bytes`](crate::Audio::from_bytes) needs for this clip, in bytes.
    /// The file itself does not count.
    pub decoding_bytes: u64,
}

/// An audio file whose header has been read and checked.
pub(super) struct Opened<'a> {
    pub reader: Box<dyn FormatReader + 'a>,
    pub format: FileFormat,
    /// The id of the audio track.
    pub track: u32,
    pub parameters: AudioCodecParameters,
    /// The number of samples of each channel, if the header has it.
    pub frames: Option<u64>,
    /// The memory for bytes of the file that are copied.
    copied_bytes: u64,
}

impl AudioHeader {
    /// The lower bound of the number of samples after their conversion to [`SAMPLE_RATE`].
    pub(crate) fn converted_samples(&self) -> Option<usize> {
        let (samples, rate) = (self.samples?, u64::from(self.sample_rate?));
        let converted = samples.saturating_mul(u64::from(SAMPLE_RATE));
        usize::try_from(converted.div_ceil(rate.max(1))).ok()
    }
}

/// Reads the header of an audio file. The error is a reason that follows the file's name.
pub(super) fn header(bytes: &[u8]) -> Result<AudioHeader, String> {
    opened(bytes, |file| Ok(file.header()))
}

/// Reads the header of an audio file, checks it, and passes the file to `work`. The error is a reason that follows the
/// file's name.
pub(super) fn opened<T>(
    bytes: &[u8],
    work: impl FnOnce(Opened<'_>) -> Result<T, String>,
) -> Result<T, String> {
    let container = Container::new(bytes)?;
    // A broken header makes `symphonia` 0.6.1 panic, by its assertions and by overflow checks. The file is dropped
    // then.
    let outcome = catch_unwind(AssertUnwindSafe(|| work(Opened::new(container)?)));
    outcome.unwrap_or_else(|_| Err(failed("the header is broken")))
}

impl<'a> Opened<'a> {
    fn new(container: Container<'a>) -> Result<Self, String> {
        let (format, copied_bytes) = (container.format, container.copied_bytes());
        let reader = container.into_reader().map_err(failed)?;
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
        if format == FileFormat::Ogg {
            check_setup(parameters.extra_data.as_deref().unwrap_or_default())?;
        }
        Ok(Self {
            parameters: parameters.clone(),
            reader,
            format,
            track: id,
            frames,
            copied_bytes,
        })
    }

    fn header(&self) -> AudioHeader {
        let sample_rate = self.parameters.sample_rate;
        // The decoder refuses more samples than the header says, and one further second.
        let rate = u64::from(sample_rate.unwrap_or(*RATES.end()));
        let longest = (MOST_SECONDS as u64 + 1) * rate;
        let samples = self
            .frames
            .map_or(longest, |frames| longest.min(frames.saturating_add(rate)));
        // The samples grow by doubling, so that both buffers may exist: three times four bytes. The conversion of the
        // rate has two copies of the samples. The result has 16,000 samples in a second, and is copied twice.
        let of_clip = 3 * 4 * u64::from(SAMPLE_RATE) * samples.div_ceil(rate.max(1));
        AudioHeader {
            sample_rate,
            samples: match self.format {
                FileFormat::Mp3 => self.frames.map(|frames| frames.saturating_sub(MP3_FRAME)),
                _ => self.frames,
            },
            decoding_bytes: 3 * 4 * samples
                + of_clip
                + self.copied_bytes
                + self.decoder_bytes()
                + resampling_bytes(sample_rate),
        }
    }

    /// The largest number of bytes that the reader and the decoder need besides the file and its samples.
    fn decoder_bytes(&self) -> u64 {
        let decoder = match self.format {
            // The codebooks have four bytes for each value, and the setup header is copied.
            FileFormat::Ogg => 4 * MOST_CODEBOOK_VALUES + 2 * MOST_SETUP_BYTES as u64,
            FileFormat::Wave | FileFormat::Flac | FileFormat::Mp3 => PACKET_BYTES,
        };
        READER_BYTES + decoder
    }
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

pub(super) fn is_end(error: &Error) -> bool {
    matches!(error, Error::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof)
}

pub(super) fn check_channels(channels: usize) -> Result<(), String> {
    match channels {
        1..=MOST_CHANNELS => Ok(()),
        _ => Err(format!(
            "has {channels} channels; expected from 1 to {MOST_CHANNELS}"
        )),
    }
}

pub(super) fn failed(error: impl ToReason) -> String {
    format!("cannot be decoded as audio: {}", error.reason())
}

/// A cause of a failure.
pub(super) trait ToReason {
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
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn header_has_the_length() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/audio");
        for name in [
            "mono.wav",
            "stereo.wav",
            "float.wav",
            "mono.flac",
            "mono.mp3",
            "mono.ogg",
        ] {
            let file = std::fs::read(folder.join(name)).expect("the fixture is readable");
            let found = header(&file).expect("the header is readable");
            let decoded = super::super::decode::decode(&file).expect("the file is decodable");
            assert_eq!(found.sample_rate, Some(decoded.sample_rate), "{name}");
            let count = decoded.samples.len() as u64;
            let promised = found.samples.expect("the header has a length");
            let tolerance = if name.ends_with("mp3") { MP3_FRAME } else { 0 };
            let range = promised..=promised + tolerance;
            assert!(range.contains(&count), "{name}: {promised}, {count}");
        }
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
}
