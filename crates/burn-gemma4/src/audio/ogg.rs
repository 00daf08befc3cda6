//! The pages of an Ogg file, without what takes memory besides the audio.

use super::header::failed;
use std::collections::BTreeSet;
use std::ops::Range;
use symphonia::core::errors::Error;

/// The beginning of the first packet of a Vorbis stream.
const IDENTIFICATION: &[u8; 7] = b"\x01vorbis";

/// The beginning of a packet with Vorbis comments.
const COMMENTS: &[u8; 7] = b"\x03vorbis";

/// The name that follows the type of each header packet of a Vorbis stream.
const HEADER_NAME: &[u8] = b"vorbis";

/// The position of a page's checksum in its header.
const CHECKSUM: Range<usize> = 22..26;

/// The size of a page's header before the sizes of its parts.
const PAGE_HEADER: usize = 27;

/// The checksums of Ogg of all bytes.
const CHECKSUMS: [u32; 256] = checksums();

/// The pages of a stream that have been read.
struct Stream {
    serial: u32,
    /// The number of the next page. The reader drops a packet where the numbers begin again, so they may not wrap.
    next: u64,
    /// True if the last packet continues in the next page.
    is_open: bool,
    /// True if a page is marked as the last one.
    has_end: bool,
}

impl Stream {
    /// Begins a stream with its first page, which has to begin a Vorbis stream.
    fn begin(page: &Page<'_>) -> Result<Self, String> {
        let contents = page.contents();
        let other = [
            ("Opus", &b"OpusHead"[..]),
            ("FLAC", b"\x7FFLAC"),
            ("Speex", b"Speex   "),
        ];
        match other
            .iter()
            .find(|(_, beginning)| contents.starts_with(beginning))
        {
            Some((name, _)) => Err(format!(
                "is an Ogg {name} file; expected WAV, FLAC, MP3 or Ogg Vorbis"
            )),
            None if !contents.starts_with(IDENTIFICATION) => {
                Err("is an Ogg file without Vorbis; expected WAV, FLAC, MP3 or Ogg Vorbis".into())
            }
            None if !page.is_first() => Err(failed("the first page is not marked as one")),
            None => Ok(Self {
                serial: page.serial(),
                next: page.number().into(),
                is_open: false,
                has_end: false,
            }),
        }
    }

    /// Adds a page. Refuses a page that the reader of `symphonia` would skip, or before which it would drop a packet.
    /// The reader and [`empty_comments`] would otherwise join different parts to packets.
    fn add(&mut self, page: &Page<'_>) -> Result<(), String> {
        if page.serial() != self.serial {
            return Err(failed(Error::ResetRequired));
        }
        let (found, expected) = (u64::from(page.number()), self.next);
        if found != expected {
            return Err(failed(&*format!(
                "page {found} follows; expected page {expected}"
            )));
        }
        let fault = match page {
            _ if page.version() != 0 || page.flags() > 7 => "has an unknown version",
            _ if page.is_continuation() != self.is_open => "does not continue the packet before it",
            _ if page.checksum() != page.computed_checksum() => "has a wrong checksum",
            _ => {
                self.next += 1;
                self.is_open = page
                    .sizes()
                    .last()
                    .map_or(self.is_open, |size| *size == 255);
                self.has_end |= page.is_last();
                return Ok(());
            }
        };
        Err(failed(&*format!("page {} {fault}", self.next)))
    }
}

/// Returns the pages of an Ogg Vorbis file, without other bytes that follow the last page, and without comments.
///
/// Refuses a file without a page that is marked as the last one, a file with several streams, and a file with a missing
/// or broken page. The reader allocates memory for each stream.
pub(super) fn pages_without_comments(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut pages = pages_of_one_stream(bytes)?.to_vec();
    empty_comments(&mut pages)?;
    Ok(pages)
}

fn pages_of_one_stream(bytes: &[u8]) -> Result<&[u8], String> {
    let (mut rest, mut stream) = (bytes, None);
    while let Some(page) = Page::first(rest) {
        let stream = match &mut stream {
            Some(_) if page.is_first() => return Err(failed(Error::ResetRequired)),
            Some(stream) => stream,
            none => none.insert(Stream::begin(&page)?),
        };
        stream.add(&page)?;
        rest = &rest[page.bytes.len()..];
    }
    match stream {
        Some(Stream { has_end: true, .. }) => Ok(&bytes[..bytes.len() - rest.len()]),
        _ => Err(failed("the file is truncated")),
    }
}

/// Makes all comments one text of the encoder, which the reader of `symphonia` 0.6.1 skips. The reader would allocate a
/// multiple of the memory of many short comments, and whatever size a comment promises. Packets keep their sizes.
///
/// Refuses a second header of one type. The reader would copy all headers before it.
fn empty_comments(pages: &mut [u8]) -> Result<(), String> {
    let (mut start, mut packet) = (0, Vec::new());
    let (mut headers, mut changed) = (BTreeSet::new(), Vec::new());
    let mut finish = |pages: &mut [u8], packet: &[Range<usize>]| {
        let mut beginning = packet
            .iter()
            .cloned()
            .flatten()
            .map(|position| pages[position]);
        let header = beginning.next().filter(|_| {
            beginning
                .take(HEADER_NAME.len())
                .eq(HEADER_NAME.iter().copied())
        });
        match header {
            Some(header) if !headers.insert(header) => Err(failed("the file has a header twice")),
            _ => empty_if_comments(pages, packet, &mut changed),
        }
    };
    while let Some(page) = Page::first(&pages[start..]) {
        let mut position = start + page.header_bytes();
        let sizes = page.sizes().to_vec();
        let length = page.bytes.len();
        for size in sizes {
            packet.push(position..position + usize::from(size));
            position += usize::from(size);
            // A packet ends with the first part of less than 255 bytes.
            if size < 255 {
                finish(pages, &packet)?;
                packet.clear();
            }
        }
        start += length;
    }
    // A packet of comments may end without a part of less than 255 bytes.
    finish(pages, &packet)?;
    update_checksums(pages, &changed);
    Ok(())
}

/// Changes a packet with comments, whose bytes are in `parts` of the pages. Adds the positions of changed bytes to
/// `changed`.
fn empty_if_comments(
    pages: &mut [u8],
    parts: &[Range<usize>],
    changed: &mut Vec<usize>,
) -> Result<(), String> {
    let first = parts.iter().cloned().flatten().take(COMMENTS.len());
    if !first.map(|position| pages[position]).eq(*COMMENTS) {
        return Ok(());
    }
    let length: usize = parts.iter().map(|part| part.len()).sum();
    // The rest has the text of the encoder with its length, the number of comments, and a last byte of 1.
    let text = length.checked_sub(COMMENTS.len() + 4 + 4 + 1);
    let text = text.and_then(|text| u32::try_from(text).ok());
    let text = text.ok_or_else(|| failed("the header is broken"))?;
    let start = text.to_le_bytes().into_iter();
    let start = parts
        .iter()
        .cloned()
        .flatten()
        .skip(COMMENTS.len())
        .zip(start);
    let end = parts.iter().rev().cloned().flat_map(Iterator::rev);
    let end = end.zip([1, 0, 0, 0, 0]);
    for (position, byte) in start.chain(end) {
        pages[position] = byte;
        changed.push(position);
    }
    Ok(())
}

/// Computes the checksums of all pages with changed bytes. A file has at most one packet of comments, so that there
/// are at most nine positions for each page to compare.
fn update_checksums(pages: &mut [u8], changed: &[usize]) {
    let mut start = 0;
    while let Some(page) = Page::first(&pages[start..]) {
        let range = start..start + page.bytes.len();
        start = range.end;
        if changed.iter().any(|position| range.contains(position)) {
            let checksum = page.computed_checksum().to_le_bytes();
            pages[range][CHECKSUM].copy_from_slice(&checksum);
        }
    }
}

/// A whole page.
struct Page<'a> {
    bytes: &'a [u8],
}

impl<'a> Page<'a> {
    /// Returns the first page of `bytes`, or `None` if they do not begin with a whole page.
    fn first(bytes: &'a [u8]) -> Option<Self> {
        let header = bytes.first_chunk::<PAGE_HEADER>();
        let header = header.filter(|header| header.starts_with(b"OggS"))?;
        let sizes = bytes.get(PAGE_HEADER..PAGE_HEADER + usize::from(header[26]))?;
        let size: usize = sizes.iter().map(|size| usize::from(*size)).sum();
        let bytes = bytes.get(..PAGE_HEADER + sizes.len() + size)?;
        Some(Self { bytes })
    }

    fn version(&self) -> u8 {
        self.bytes[4]
    }

    fn flags(&self) -> u8 {
        self.bytes[5]
    }

    fn is_continuation(&self) -> bool {
        self.flags() & 1 != 0
    }

    fn is_first(&self) -> bool {
        self.flags() & 2 != 0
    }

    fn is_last(&self) -> bool {
        self.flags() & 4 != 0
    }

    /// The number of the page's stream.
    fn serial(&self) -> u32 {
        self.word(14)
    }

    /// The number of the page in its stream.
    fn number(&self) -> u32 {
        self.word(18)
    }

    /// The checksum in the header.
    fn checksum(&self) -> u32 {
        self.word(CHECKSUM.start)
    }

    /// The checksum that the header should have.
    fn computed_checksum(&self) -> u32 {
        let parts = [
            &self.bytes[..CHECKSUM.start],
            &[0; 4],
            &self.bytes[CHECKSUM.end..],
        ];
        parts.into_iter().fold(0, add_to_checksum)
    }

    fn word(&self, start: usize) -> u32 {
        (0..4).fold(0, |word, index| {
            word | u32::from(self.bytes[start + index]) << (8 * index)
        })
    }

    /// The bytes of packets.
    fn contents(&self) -> &'a [u8] {
        &self.bytes[self.header_bytes()..]
    }

    /// The sizes of the parts of packets in the page.
    fn sizes(&self) -> &'a [u8] {
        &self.bytes[PAGE_HEADER..self.header_bytes()]
    }

    fn header_bytes(&self) -> usize {
        PAGE_HEADER + usize::from(self.bytes[26])
    }
}

/// Returns the checksum of the bytes before `bytes`, which is `sum`, and of `bytes`.
fn add_to_checksum(sum: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(sum, |sum, byte| {
        sum << 8 ^ CHECKSUMS[usize::from((sum >> 24) as u8 ^ byte)]
    })
}

/// Computes the table of the checksum of Ogg, a CRC with the polynomial 0x04C11DB7.
const fn checksums() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = (byte as u32) << 24;
        let mut bit = 0;
        while bit < 8 {
            sum = sum << 1 ^ if sum >> 31 == 1 { 0x04C1_1DB7 } else { 0 };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::decode::decode;
    use super::super::header::header;
    use super::*;
    use std::path::PathBuf;

    fn fixture() -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/audio");
        std::fs::read(folder.join("mono.ogg")).expect("the fixture is readable")
    }

    #[test]
    fn pages_of_one_stream_refuses_a_second_stream() {
        let file = fixture();
        let pages = pages_of_one_stream(&file).expect("the fixture has one stream");
        assert_eq!(pages.len(), file.len());
        let first = Page::first(&file).expect("the fixture has a page").bytes;
        for hostile in [[first, &file].concat(), [&file, first].concat()] {
            let reason = header(&hostile).expect_err("there are two streams");
            assert!(reason.contains("several streams"), "{reason}");
        }
        let followed = [&file[..], b"TAG"].concat();
        assert!(pages_of_one_stream(&followed) == Ok(&file[..]));
    }

    #[test]
    fn checksum_equals_that_of_the_fixture() {
        let mut file = fixture();
        let page = Page::first(&file)
            .expect("the fixture has a page")
            .bytes
            .len();
        let expected = file[CHECKSUM].to_vec();
        file[CHECKSUM].fill(0xFF);
        let page = Page {
            bytes: &file[..page],
        };
        assert_eq!(page.computed_checksum().to_le_bytes(), expected[..]);
    }

    /// Gives a page its checksum.
    fn sign(page: &mut [u8]) {
        let checksum = Page { bytes: page }.computed_checksum().to_le_bytes();
        page[CHECKSUM].copy_from_slice(&checksum);
    }

    /// Returns a page of one packet of the fixture's stream, with a checksum.
    fn page_of(first: &[u8], flags: u8, number: u32, packet: &[u8]) -> Vec<u8> {
        let mut page = [b"OggS\0", &[flags][..], &[0xFF; 8], &first[14..18]].concat();
        page.extend(number.to_le_bytes());
        page.extend([0; 4]);
        page.extend([1, packet.len() as u8]);
        page.extend(packet);
        sign(&mut page);
        page
    }

    #[test]
    fn pages_that_the_reader_would_skip_are_refused() {
        let file = with_comments(&[&COMMENTS[..], &[0; 70_000]].concat());
        let first = Page::first(&file)
            .expect("the fixture has a page")
            .bytes
            .len();
        let second = Page::first(&file[first..])
            .expect("there are two pages")
            .bytes
            .len();
        // The second page ends inside the packet of comments.
        let (begin, end) = (first, first + second);
        for (position, value, words) in [
            (end + 5, 0, "page 2 does not continue the packet"),
            (begin + 5, 1, "page 1 does not continue the packet"),
            (begin + 4, 1, "page 1 has an unknown version"),
            (begin + 5, 8, "page 1 has an unknown version"),
            (begin + 14, file[14] ^ 1, "several streams"),
            (end + 18, 1, "page 1 follows; expected page 2"),
            (end + 18, 3, "page 3 follows; expected page 2"),
        ] {
            let mut changed = file.clone();
            changed[position] = value;
            let start = if position < end { begin } else { end };
            let length = Page::first(&changed[start..]).expect("a page").bytes.len();
            sign(&mut changed[start..start + length]);
            let reason = header(&changed).expect_err(words);
            assert!(reason.contains(words), "{words}: {reason}");
        }
        let mut changed = file.clone();
        changed[end - 1] ^= 1;
        let reason = header(&changed).expect_err("the checksum is wrong");
        assert!(reason.contains("page 1 has a wrong checksum"), "{reason}");
        // A page between two pages of the packet.
        let between = page_of(&file[..first], 0, 2, b"a");
        let changed = [&file[..end], &between, &file[end..]].concat();
        let reason = header(&changed).expect_err("the packet is not continued");
        assert!(
            reason.contains("page 2 does not continue the packet"),
            "{reason}"
        );
    }

    #[test]
    fn other_codecs_are_refused_by_name() {
        let file = fixture();
        for (packet, words) in [
            (&b"OpusHead\x01"[..], "is an Ogg Opus file"),
            (b"\x7FFLAC\x01", "is an Ogg FLAC file"),
            (b"Speex   1", "is an Ogg Speex file"),
            (b"\x80theora", "without Vorbis"),
            (b"", "without Vorbis"),
        ] {
            let reason = header(&page_of(&file, 2, 0, packet)).expect_err(words);
            assert!(reason.contains(words), "{words}: {reason}");
            assert!(
                reason.contains("expected WAV, FLAC, MP3 or Ogg Vorbis"),
                "{reason}"
            );
        }
        let reason = header(&page_of(&file, 0, 0, IDENTIFICATION)).expect_err("no first page");
        assert!(reason.contains("first page"), "{reason}");
    }

    /// A file of many small pages may have many comments, too.
    #[test]
    fn second_header_of_one_type_is_refused() {
        let file = fixture();
        let first = Page::first(&file).expect("the fixture has a page").bytes;
        for packet in [
            &b"\x03vorbis\0\0\0\0\0\0\0\0\x01"[..],
            b"\x05vorbis",
            b"\x01vorbis",
        ] {
            let pages = (1..100_000).map(|number| page_of(first, 4, number, packet));
            let pages: Vec<Vec<u8>> = pages.collect();
            let reason = header(&[first, &pages.concat()].concat()).expect_err("there are many");
            assert!(reason.contains("has a header twice"), "{reason}");
        }
    }

    /// Returns the fixture with another packet of comments in pages of their own.
    fn with_comments(comments: &[u8]) -> Vec<u8> {
        let file = fixture();
        let first = Page::first(&file).expect("the fixture has a page").bytes;
        let second = Page::first(&file[first.len()..]).expect("the fixture has two pages");
        // The second page has the comments and the setup header.
        let own: usize = 1 + second
            .sizes()
            .iter()
            .position(|size| *size < 255)
            .expect("a packet");
        let setup_start = second.sizes()[..own].iter().map(|size| usize::from(*size));
        let setup_start = second.header_bytes() + setup_start.sum::<usize>();
        let page = |flags: u8, number: u32, sizes: &[u8], contents: &[u8]| {
            let mut page = [b"OggS\0", &[flags][..], &[0xFF; 8], &first[14..18]].concat();
            page.extend(number.to_le_bytes());
            page.extend([0; 4]);
            page.push(sizes.len() as u8);
            page.extend(sizes);
            page.extend(contents);
            sign(&mut page);
            page
        };
        let mut made = first.to_vec();
        let mut number = 1;
        let mut rest = comments;
        loop {
            let (piece, after) = rest.split_at(rest.len().min(255 * 255));
            let mut sizes = vec![255; piece.len() / 255];
            if after.is_empty() && piece.len() < 255 * 255 {
                sizes.push((piece.len() % 255) as u8);
            }
            made.extend(page(u8::from(number > 1), number, &sizes, piece));
            number += 1;
            rest = after;
            if after.is_empty() && piece.len() < 255 * 255 {
                break;
            }
        }
        made.extend(page(
            0,
            number,
            &second.sizes()[own..],
            &second.bytes[setup_start..],
        ));
        let mut tail = file[first.len() + second.bytes.len()..].to_vec();
        let mut start = 0;
        while let Some(length) = Page::first(&tail[start..]).map(|page| page.bytes.len()) {
            number += 1;
            let page = &mut tail[start..start + length];
            page[18..22].copy_from_slice(&number.to_le_bytes());
            sign(page);
            start += length;
        }
        [made, tail].concat()
    }

    #[test]
    fn pages_without_comments_decode_to_the_same_samples() {
        let expected = decode(&fixture())
            .expect("the fixture is decodable")
            .samples;
        let comment = |text: &[u8]| [&(text.len() as u32).to_le_bytes(), text].concat();
        let many = [
            &comment(b"")[..],
            &150_000u32.to_le_bytes(),
            &comment(b"a=b").repeat(150_000),
            b"\x01",
        ];
        // The second comment promises more bytes than there are.
        let lying = [
            &comment(b"x")[..],
            &2u32.to_le_bytes(),
            &comment(b"a=b"),
            &[0xFF; 4],
            b"\x01",
        ];
        for contents in [many.concat(), lying.concat()] {
            let comments = [&COMMENTS[..], &contents].concat();
            let file = with_comments(&comments);
            let pages = pages_without_comments(&file).expect("the pages are whole");
            assert_eq!(pages.len(), file.len());
            assert!(pages != file);
            let found = decode(&file).expect("the file is decodable");
            assert!(found.samples == expected);
        }
    }

    #[test]
    fn pages_with_short_comments_are_refused() {
        let reason = header(&with_comments(b"\x03vorbis\0\0\0\0")).expect_err("the packet is cut");
        assert!(reason.contains("broken"), "{reason}");
    }
}
