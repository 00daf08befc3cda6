//! The containers of audio files. Metadata is dropped before the readers of `symphonia` see a file, because they take a
//! multiple of the memory of many short tags.

use super::header::failed;
use super::ogg::pages_without_comments;
use std::io::{Cursor, Read};
use symphonia::core::errors::Error;
use symphonia::core::formats::{FormatOptions, FormatReader};
use symphonia::core::io::{MediaSource, MediaSourceStream, ReadOnlySource};
use symphonia::default::formats::{FlacReader, MpaReader, OggReader, WavReader};

/// The largest number of bytes of a WAV chunk that describes the format. Encoders write at most 40 bytes.
const MOST_FORMAT_BYTES: usize = 1 << 12;

/// The length in the header of a WAV file that a program has written to a pipe.
const UNKNOWN_LENGTH: u32 = u32::MAX;

/// The format of an audio file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileFormat {
    Wave,
    Flac,
    Mp3,
    Ogg,
}

/// An audio file without metadata.
pub(super) struct Container<'a> {
    pub format: FileFormat,
    /// The bytes before `rest`.
    header: Vec<u8>,
    /// The samples, which are not copied.
    rest: &'a [u8],
}

impl FileFormat {
    /// Returns the format of a file by its beginning.
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
}

impl<'a> Container<'a> {
    /// Finds the format of a file, and drops its metadata. The error is a reason that follows the file's name.
    pub fn new(bytes: &'a [u8]) -> Result<Self, String> {
        let bytes = without_tags(bytes);
        let format = FileFormat::of(bytes);
        let format = format.ok_or("is not a WAV, FLAC, MP3 or Ogg Vorbis file")?;
        let (header, rest) = match format {
            FileFormat::Wave => without_wave_metadata(bytes)?,
            FileFormat::Flac => without_flac_metadata(bytes)?,
            FileFormat::Mp3 => (Vec::new(), bytes),
            FileFormat::Ogg => (pages_without_comments(bytes)?, &[][..]),
        };
        Ok(Self {
            format,
            header,
            rest,
        })
    }

    /// Opens the reader of the format. The probe of `symphonia` would search for tags at the end of the file, too.
    pub fn into_reader(self) -> Result<Box<dyn FormatReader + 'a>, Error> {
        let source: Box<dyn MediaSource + 'a> = match self.format {
            // The reader finds the length of an Ogg file in its last page.
            FileFormat::Ogg => Box::new(Cursor::new(self.header)),
            // In a seekable MP3 file without a length, `symphonia` estimates the length, and cuts the file there.
            FileFormat::Wave | FileFormat::Flac | FileFormat::Mp3 => {
                let header = Cursor::new(self.header);
                Box::new(ReadOnlySource::new(header.chain(self.rest)))
            }
        };
        let stream = MediaSourceStream::new(source, Default::default());
        let options = FormatOptions::default();
        Ok(match self.format {
            FileFormat::Wave => Box::new(WavReader::try_new(stream, options)?),
            FileFormat::Flac => Box::new(FlacReader::try_new(stream, options)?),
            FileFormat::Mp3 => Box::new(MpaReader::try_new(stream, options)?),
            FileFormat::Ogg => Box::new(OggReader::try_new(stream, options)?),
        })
    }

    /// The size of the bytes that were copied and of the largest packet, which the reader copies.
    pub fn copied_bytes(&self) -> u64 {
        match self.format {
            // A packet may take the whole file, and grows by doubling.
            FileFormat::Ogg => 4 * self.header.len() as u64,
            FileFormat::Wave | FileFormat::Flac | FileFormat::Mp3 => self.header.len() as u64,
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

/// Returns the header of a FLAC file, whose only metadata block is the stream information, and the frames. The reader
/// of `symphonia` 0.6.1 needs quadratic time for an unsorted seek table.
fn without_flac_metadata(bytes: &[u8]) -> Result<(Vec<u8>, &[u8]), String> {
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
            return Ok(([magic, &[0x80, 0, 0, 34], information].concat(), rest));
        }
    }
}

/// Returns the header of a WAV file, whose only chunks are the format and the number of samples, and the bytes from the
/// chunk of samples on.
fn without_wave_metadata(bytes: &[u8]) -> Result<(Vec<u8>, &[u8]), String> {
    let truncated = || failed("the file is truncated");
    let broken = || failed("the header is broken");
    let (start, mut rest) = bytes.split_at(12);
    let mut header = start.to_vec();
    let mut dropped = 0usize;
    loop {
        let (head, after) = rest.split_first_chunk::<8>().ok_or_else(truncated)?;
        let [kind, size] = [0, 4].map(|index| [0, 1, 2, 3].map(|byte| head[index + byte]));
        if &kind == b"data" {
            let length = u32::from_le_bytes([4, 5, 6, 7].map(|byte| bytes[byte]));
            if length != UNKNOWN_LENGTH {
                let dropped = u32::try_from(dropped).map_err(|_| broken())?;
                let length = length.checked_sub(dropped).ok_or_else(broken)?;
                header[4..8].copy_from_slice(&length.to_le_bytes());
            }
            return Ok((header, rest));
        }
        // A chunk of an odd size has one more byte.
        let size = u32::from_le_bytes(size) as usize;
        let padded = size.saturating_add(size % 2);
        let after = after.get(padded..).ok_or_else(truncated)?;
        match &kind {
            b"fmt " | b"fact" if size <= MOST_FORMAT_BYTES && header.len() <= MOST_FORMAT_BYTES => {
                header.extend(&rest[..8 + padded]);
            }
            b"fmt " | b"fact" => return Err(broken()),
            _ => dropped += 8 + padded,
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::super::decode::decode;
    use super::super::header::header;
    use super::*;
    use std::path::PathBuf;

    fn fixture(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/audio");
        std::fs::read(folder.join(name)).expect("the fixture is readable")
    }

    #[test]
    fn without_flac_metadata_drops_a_seek_table() {
        let file = fixture("mono.flac");
        let (stripped, frames) = without_flac_metadata(&file).expect("the fixture has metadata");
        assert_eq!(stripped[4..8], [0x80, 0, 0, 34]);
        // A seek table whose sample numbers descend.
        let points = (0..60_000u64).rev();
        let table: Vec<u8> = points
            .flat_map(|point| [point.to_be_bytes().as_slice(), &[0; 8], &[16, 0]].concat())
            .collect();
        let size = (table.len() as u32).to_be_bytes();
        let block = [&[0x83], &size[1..], &table].concat();
        let hostile = [b"fLaC\0\0\0\x22", &stripped[8..42], &block, frames].concat();
        let cleaned = without_flac_metadata(&hostile).expect("the blocks are whole");
        assert!(cleaned == (stripped, frames));
        assert!(header(&hostile).is_ok());
        let reason = without_flac_metadata(&hostile[..100]).expect_err("the block is cut");
        assert!(reason.contains("truncated"), "{reason}");
        let swapped = [b"fLaC".as_slice(), &block].concat();
        let reason = without_flac_metadata(&swapped).expect_err("no stream information");
        assert!(reason.contains("broken"), "{reason}");
    }

    /// Returns the fixture with a chunk between the format and the samples.
    fn with_chunk(kind: &[u8; 4], contents: &[u8]) -> Vec<u8> {
        let file = fixture("mono.wav");
        let data = file.windows(4).position(|bytes| bytes == b"data");
        let (before, data) = file.split_at(data.expect("the fixture has samples"));
        let size = (contents.len() as u32).to_le_bytes();
        let chunk = [kind, &size[..], contents, &[0][..contents.len() % 2]].concat();
        let mut whole = [before, &chunk, data].concat();
        let length = (whole.len() as u32 - 8).to_le_bytes();
        whole[4..8].copy_from_slice(&length);
        whole
    }

    #[test]
    fn without_wave_metadata_drops_tags() {
        let expected = decode(&fixture("mono.wav")).expect("the fixture is decodable");
        let tags = [b"INFO".as_slice(), &b"IART\x02\0\0\0ab".repeat(10_000)].concat();
        for (kind, contents) in [(b"LIST", &tags[..]), (b"id3 ", b"odd"), (b"JUNK", b"")] {
            let file = with_chunk(kind, contents);
            let (header, rest) = without_wave_metadata(&file).expect("the chunks are whole");
            assert!(header.len() < 100 && rest.starts_with(b"data"));
            let found = decode(&file).expect("the file is decodable");
            assert_eq!(found.samples, expected.samples);
            let cut = &file[..file.len() - rest.len() - 1];
            let reason = without_wave_metadata(cut).expect_err("the chunk is cut");
            assert!(reason.contains("truncated"), "{reason}");
            // A program that writes to a pipe does not know the length.
            let mut piped = file;
            piped[4..8].fill(0xFF);
            let found = decode(&piped).expect("the file is decodable");
            assert_eq!(found.samples, expected.samples);
        }
    }

    #[test]
    fn without_wave_metadata_refuses_many_formats() {
        let chunk = b"fmt \x02\0\0\0ab".repeat(1000);
        for file in [
            [&fixture("mono.wav")[..12], &chunk[..]].concat(),
            with_chunk(b"fact", &[0; MOST_FORMAT_BYTES + 1]),
        ] {
            let reason = header(&file).expect_err("the format is too large");
            assert!(reason.contains("broken"), "{reason}");
        }
        // The length of the file is less than that of the dropped chunks.
        let mut file = with_chunk(b"LIST", &[0; 100]);
        file[4..8].copy_from_slice(&50u32.to_le_bytes());
        let reason = header(&file).expect_err("the length is wrong");
        assert!(reason.contains("broken"), "{reason}");
    }
}
