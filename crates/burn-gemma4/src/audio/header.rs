//! The headers of audio files: their format, their length, and the memory that their decoding needs.

use super::clip::{MOST_SECONDS, RATES, SAMPLE_RATE, check_length, check_rate};
use std::borrow::Cow;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::codecs::audio::AudioCodecParameters;
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream, ReadOnlySource};
use symphonia::core::meta::MetadataOptions;

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

/// The format of an audio file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileFormat {
    Wave,
    Flac,
    Mp3,
    Ogg,
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
    /// The size of the file in bytes.
    bytes: usize,
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
    let bytes = without_tags(bytes);
    let format = FileFormat::of(bytes);
    let format = format.ok_or("is not a WAV, FLAC, MP3 or Ogg Vorbis file")?;
    let bytes = match format {
        FileFormat::Ogg => Cow::Borrowed(pages_of_one_stream(bytes)?),
        FileFormat::Flac => Cow::Owned(without_flac_metadata(bytes)?),
        FileFormat::Wave | FileFormat::Mp3 => Cow::Borrowed(bytes),
    };
    // A broken header makes `symphonia` 0.6.1 panic, by its assertions and by overflow checks. The file is dropped
    // then.
    let outcome = catch_unwind(AssertUnwindSafe(|| work(Opened::new(&bytes, format)?)));
    outcome.unwrap_or_else(|_| Err(failed("the header is broken")))
}

impl<'a> Opened<'a> {
    fn new(bytes: &'a [u8], format: FileFormat) -> Result<Self, String> {
        let source: Box<dyn MediaSource + 'a> = match format {
            // In a seekable MP3 file without a length, `symphonia` estimates the length, and cuts the file there.
            FileFormat::Mp3 => Box::new(ReadOnlySource::new(bytes)),
            _ => Box::new(Cursor::new(bytes)),
        };
        let stream = MediaSourceStream::new(source, Default::default());
        let reader = symphonia::default::get_probe()
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
        if format == FileFormat::Ogg {
            check_setup(parameters.extra_data.as_deref().unwrap_or_default())?;
        }
        Ok(Self {
            parameters: parameters.clone(),
            reader,
            format,
            track: id,
            frames,
            bytes: bytes.len(),
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
            // A FLAC file is copied without its metadata. Readers of other files copy texts and pictures.
            decoding_bytes: 3 * 4 * samples
                + of_clip
                + self.bytes as u64
                + self.format.decoder_bytes(),
        }
    }
}

impl FileFormat {
    /// Returns the format of a file by its beginning. The probe of `symphonia` would search other files for such a
    /// beginning.
    fn of(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [b'R', b'I', b'F', b'F', rest @ ..] if rest.get(4..8) == Some(b"WAVE") => {
                Some(Self::Wave)
            }
            // The header of an MPEG frame.
            [0xFF, second, ..] if second & 0xE0 == 0xE0 => Some(Self::Mp3),
            _ if bytes.starts_with(b"fLaC") => Some(Self::Flac),
            _ if bytes.starts_with(b"OggS") => Some(Self::Ogg),
            _ => None,
        }
    }

    /// The largest number of bytes that the decoder needs besides the file and its samples.
    fn decoder_bytes(self) -> u64 {
        match self {
            // The codebooks have four bytes for each value, and the setup header is copied.
            Self::Ogg => 4 * MOST_CODEBOOK_VALUES + 2 * MOST_SETUP_BYTES as u64,
            Self::Wave | Self::Flac | Self::Mp3 => PACKET_BYTES,
        }
    }
}

/// Returns a file without the ID3v2 tags at its beginning. The reader of `symphonia` 0.6.1 reads nested tags by
/// recursion without a limit.
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

pub(super) fn is_end(error: &Error) -> bool {
    matches!(error, Error::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof)
}

/// Returns a FLAC file whose only metadata block is the stream information. The reader of `symphonia` 0.6.1 needs
/// quadratic time for an unsorted seek table, and a multiple of the file's memory for many short tags.
fn without_flac_metadata(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (magic, mut rest) = bytes.split_at(4);
    let mut information = None;
    loop {
        let block = rest.split_first_chunk::<4>();
        let ([kind, size @ ..], after) = block.ok_or_else(|| failed("the file is truncated"))?;
        let size = size
            .iter()
            .fold(0, |size, byte| size << 8 | usize::from(*byte));
        let contents = after.split_at_checked(size);
        let (contents, after) = contents.ok_or_else(|| failed("the file is truncated"))?;
        let is_information = kind & 0x7F == 0;
        // The stream information is the first block, and no other block has its kind.
        if is_information != information.is_none() || is_information && size != 34 {
            return Err(failed("the header is broken"));
        }
        let information = *information.get_or_insert(contents);
        rest = after;
        if kind & 0x80 != 0 {
            return Ok([magic, &[0x80, 0, 0, 34], information, rest].concat());
        }
    }
}

/// Returns the pages of an Ogg file, without other bytes that follow the last page. Refuses a file without a page that
/// is marked as the last one, and a file with several streams. The reader allocates memory for each stream.
fn pages_of_one_stream(bytes: &[u8]) -> Result<&[u8], String> {
    let (mut rest, mut begins, mut ends) = (bytes, 0, false);
    while let Some((flags, after)) = ogg_page(rest) {
        begins += flags >> 1 & 1;
        if begins > 1 {
            return Err(failed(Error::ResetRequired));
        }
        ends |= flags & 4 != 0;
        rest = after;
    }
    match ends {
        true => Ok(&bytes[..bytes.len() - rest.len()]),
        false => Err(failed("the file is truncated")),
    }
}

/// Returns the flags of the first page of an Ogg file and the bytes after that page. Returns `None` if the file does
/// not begin with a whole page.
fn ogg_page(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let header = bytes
        .first_chunk::<27>()
        .filter(|header| header.starts_with(b"OggS"))?;
    let segments = usize::from(header[26]);
    let sizes = bytes.get(27..27 + segments)?;
    let size: usize = sizes.iter().map(|size| usize::from(*size)).sum();
    Some((header[5], bytes.get(27 + segments + size..)?))
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
    fn header_has_the_length_and_the_memory_of_decoding() {
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
            assert!(found.decoding_bytes >= 12 * count, "{name}");
            assert!(found.decoding_bytes < 20 << 20, "{name}: {found:?}");
        }
    }

    fn fixture(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/audio");
        std::fs::read(folder.join(name)).expect("the fixture is readable")
    }

    #[test]
    fn without_flac_metadata_drops_a_seek_table() {
        let file = fixture("mono.flac");
        let stripped = without_flac_metadata(&file).expect("the fixture has metadata");
        assert_eq!(stripped[4..8], [0x80, 0, 0, 34]);
        // A seek table whose sample numbers descend.
        let points = (0..60_000u64).rev();
        let table: Vec<u8> = points
            .flat_map(|point| [point.to_be_bytes().as_slice(), &[0; 8], &[16, 0]].concat())
            .collect();
        let size = (table.len() as u32).to_be_bytes();
        let block = [&[0x83], &size[1..], &table].concat();
        let hostile = [b"fLaC\0\0\0\x22", &stripped[8..42], &block, &stripped[42..]].concat();
        let cleaned = without_flac_metadata(&hostile).expect("the blocks are whole");
        assert!(cleaned == stripped);
        assert!(header(&hostile).is_ok());
        let reason = without_flac_metadata(&hostile[..100]).expect_err("the block is cut");
        assert!(reason.contains("truncated"), "{reason}");
        let swapped = [b"fLaC".as_slice(), &block].concat();
        let reason = without_flac_metadata(&swapped).expect_err("no stream information");
        assert!(reason.contains("broken"), "{reason}");
    }

    #[test]
    fn pages_of_one_stream_refuses_a_second_stream() {
        let file = fixture("mono.ogg");
        let pages = pages_of_one_stream(&file).expect("the fixture has one stream");
        assert_eq!(pages.len(), file.len());
        let (_, after) = ogg_page(&file).expect("the fixture has a page");
        let first = &file[..file.len() - after.len()];
        for hostile in [[first, &file].concat(), [&file, first].concat()] {
            let reason = header(&hostile).expect_err("there are two streams");
            assert!(reason.contains("several streams"), "{reason}");
        }
        let followed = [&file[..], b"TAG"].concat();
        assert!(pages_of_one_stream(&followed) == Ok(&file[..]));
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
