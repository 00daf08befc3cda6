//! The pages of an Ogg file, without what takes memory besides the audio.

use super::header::failed;
use symphonia::core::errors::Error;

/// The beginning of a packet with Vorbis comments.
const COMMENTS: &[u8; 7] = b"\x03vorbis";

/// The position of a page's checksum in its header.
const CHECKSUM: std::ops::Range<usize> = 22..26;

/// The size of a page's header before the sizes of its parts.
const PAGE_HEADER: usize = 27;

/// The checksums of Ogg of all bytes.
const CHECKSUMS: [u32; 256] = checksums();

/// Returns the pages of an Ogg file, without other bytes that follow the last page, and without comments. Refuses a
/// file without a page that is marked as the last one, and a file with several streams. The reader allocates memory for
/// each stream.
pub(super) fn pages_without_comments(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut pages = pages_of_one_stream(bytes)?.to_vec();
    empty_comments(&mut pages)?;
    Ok(pages)
}

fn pages_of_one_stream(bytes: &[u8]) -> Result<&[u8], String> {
    let (mut rest, mut begins, mut ends) = (bytes, 0, false);
    while let Some(page) = Page::first(rest) {
        begins += page.flags() >> 1 & 1;
        if begins > 1 {
            return Err(failed(Error::ResetRequired));
        }
        ends |= page.flags() & 4 != 0;
        rest = &rest[page.bytes.len()..];
    }
    match ends {
        true => Ok(&bytes[..bytes.len() - rest.len()]),
        false => Err(failed("the file is truncated")),
    }
}

/// Makes all comments one text of the encoder, which the reader of `symphonia` 0.6.1 skips. The reader would allocate a
/// multiple of the memory of many short comments, and whatever size a comment promises. Packets keep their sizes.
fn empty_comments(pages: &mut [u8]) -> Result<(), String> {
    let (mut start, mut packet) = (0, Vec::new());
    let mut changed = Vec::new();
    while let Some(page) = Page::first(&pages[start..]) {
        let mut position = start + page.header_bytes();
        let sizes = page.sizes().to_vec();
        let length = page.bytes.len();
        for size in sizes {
            packet.push(position..position + usize::from(size));
            position += usize::from(size);
            // A packet ends with the first part of less than 255 bytes.
            if size < 255 {
                empty_if_comments(pages, &packet, &mut changed)?;
                packet.clear();
            }
        }
        start += length;
    }
    // A packet of comments may end without a part of less than 255 bytes.
    empty_if_comments(pages, &packet, &mut changed)?;
    update_checksums(pages, &changed);
    Ok(())
}

/// Changes a packet with comments, whose bytes are in `parts` of the pages. Adds the positions of changed bytes to
/// `changed`.
fn empty_if_comments(
    pages: &mut [u8],
    parts: &[std::ops::Range<usize>],
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

/// Computes the checksums of all pages with changed bytes.
fn update_checksums(pages: &mut [u8], changed: &[usize]) {
    let mut start = 0;
    while let Some(page) = Page::first(&pages[start..]) {
        let range = start..start + page.bytes.len();
        start = range.end;
        if changed.iter().any(|position| range.contains(position)) {
            let page = &mut pages[range];
            page[CHECKSUM].fill(0);
            let checksum = checksum(page).to_le_bytes();
            page[CHECKSUM].copy_from_slice(&checksum);
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

    fn flags(&self) -> u8 {
        self.bytes[5]
    }

    /// The sizes of the parts of packets in the page.
    fn sizes(&self) -> &'a [u8] {
        &self.bytes[PAGE_HEADER..self.header_bytes()]
    }

    fn header_bytes(&self) -> usize {
        PAGE_HEADER + usize::from(self.bytes[26])
    }
}

/// Returns the checksum of a page whose own checksum is 0.
fn checksum(page: &[u8]) -> u32 {
    page.iter().fold(0, |sum, byte| {
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
        file[CHECKSUM].fill(0);
        assert_eq!(checksum(&file[..page]).to_le_bytes(), expected[..]);
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
            let checksum = checksum(&page).to_le_bytes();
            page[CHECKSUM].copy_from_slice(&checksum);
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
            page[CHECKSUM].fill(0);
            let checksum = checksum(page).to_le_bytes();
            page[CHECKSUM].copy_from_slice(&checksum);
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
