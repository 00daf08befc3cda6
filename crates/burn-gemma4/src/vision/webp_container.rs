//! Walks the chunks of WebP files without decoding pixels, and refuses files that the decoder would read wrongly.

/// The number of bytes before the chunks of a frame in a chunk `ANMF`.
const FRAME_HEADER: usize = 16;

/// Returns the data of the chunks `ANMF` in a WebP file: a header of 16 bytes, and then the chunks of a frame.
pub(super) fn frames(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let chunks = chunks(bytes.get(12..).unwrap_or_default());
    chunks.filter_map(|(kind, data)| (kind == b"ANMF").then_some(data))
}

/// Returns the types and the data of chunks, up to the first one whose beginning is missing. The last chunk may be
/// incomplete.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = (&[u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let (kind, after) = rest.split_first_chunk::<4>()?;
        let (length, data) = after.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        // A chunk of an odd length has one byte of padding.
        let end = length.saturating_add(length % 2);
        rest = data.get(end..).unwrap_or_default();
        Some((kind, &data[..length.min(data.len())]))
    })
}

/// Refuses a WebP file in which the pixels of a frame, or of the still image, have another size than the file says.
/// image-webp 0.2.4 panics for lossy frames with transparency otherwise, and allocates the pixels of other files before
/// it compares.
pub(super) fn check_sizes(bytes: &[u8]) -> Result<(), String> {
    let mut chunks = chunks(bytes.get(12..).unwrap_or_default());
    // A file without this header has one chunk of pixels, which alone has a size.
    let Some((b"VP8X", header)) = chunks.next() else {
        return Ok(());
    };
    let canvas = header.get(4..).and_then(size_of_header);
    let is_animated = header.first().is_some_and(|flags| flags & 2 != 0);
    if !is_animated {
        // The decoder reads the first chunk of each type.
        for (kind, name) in [(b"VP8 ", "VP8"), (b"VP8L", "VP8L")] {
            let found = chunks_of(bytes, kind).next();
            if let Some(found) = found {
                compare(size_of_pixels(kind, found), canvas, || {
                    format!("the chunk {name}")
                })?;
            }
        }
    }
    for (index, frame) in frames(bytes).enumerate() {
        let name = || format!("frame {index}");
        if frame.len() % 2 != 0 {
            // The decoder would look for the next frame in another place than other programs.
            return Err(failed(format!("{} has an odd length", name())));
        }
        let expected = frame.get(6..).and_then(size_of_header);
        compare(size_of_frame(frame), expected, name)?;
    }
    Ok(())
}

/// Returns the data of the top-level chunks of one type.
fn chunks_of<'a>(bytes: &'a [u8], kind: &[u8; 4]) -> impl Iterator<Item = &'a [u8]> {
    let chunks = chunks(bytes.get(12..).unwrap_or_default());
    chunks.filter_map(move |(found, data)| (found == kind).then_some(data))
}

fn compare(
    found: Option<[u32; 2]>,
    expected: Option<[u32; 2]>,
    name: impl Fn() -> String,
) -> Result<(), String> {
    match (found, expected) {
        (Some(found), Some(expected)) if found == expected => Ok(()),
        (Some([width, height]), Some([expected_width, expected_height])) => Err(failed(format!(
            "{} has {width} x {height} pixels, but its header says {expected_width} x {expected_height}",
            name()
        ))),
        _ => Err(failed(format!("{} has no header of pixels", name()))),
    }
}

fn failed(reason: String) -> String {
    format!("cannot be decoded as a WebP image: {reason}")
}

/// Returns the size in a header of the container, whose sides have 24 bits each and are 1 less.
fn size_of_header(bytes: &[u8]) -> Option<[u32; 2]> {
    let side = |at: usize| {
        let [low, middle, high] = *bytes.get(at..)?.first_chunk()?;
        Some(u32::from_le_bytes([low, middle, high, 0]) + 1)
    };
    Some([side(0)?, side(3)?])
}

/// Returns the size of the pixels in a chunk `ANMF`.
fn size_of_frame(frame: &[u8]) -> Option<[u32; 2]> {
    let mut chunks = chunks(frame.get(FRAME_HEADER..)?);
    match chunks.next()? {
        // Transparency precedes lossy pixels. The decoder does not check the type of the chunk after it.
        (b"ALPH", _) => {
            let (kind, data) = chunks.next()?;
            (kind == b"VP8 ").then(|| size_of_pixels(kind, data))?
        }
        (kind, data) => size_of_pixels(kind, data),
    }
}

/// Returns the size in the header of compressed pixels, whose sides have 14 bits each.
fn size_of_pixels(kind: &[u8; 4], data: &[u8]) -> Option<[u32; 2]> {
    let side = |bits: u32| bits & 0x3FFF;
    match (kind, data) {
        // The first bit says that the frame depends on no other, and has a size.
        (b"VP8 ", [flags, _, _, 0x9D, 0x01, 0x2A, sides @ ..]) if flags & 1 == 0 => {
            let bits = u32::from_le_bytes(*sides.first_chunk()?);
            Some([side(bits), side(bits >> 16)])
        }
        (b"VP8L", [0x2F, sides @ ..]) => {
            let bits = u32::from_le_bytes(*sides.first_chunk()?);
            Some([side(bits) + 1, side(bits >> 14) + 1])
        }
        _ => None,
    }
}

/// Refuses a frame that image-webp 0.2.4 would draw wrongly: an opaque lossy frame after a frame that is cleared. The
/// crate counts three bytes for each pixel of its canvas then, which has four.
pub(super) fn refuse_cleared(bytes: &[u8]) -> Result<(), String> {
    let mut is_cleared = false;
    for (index, frame) in frames(bytes).enumerate() {
        if is_cleared && frame.get(FRAME_HEADER..FRAME_HEADER + 4) == Some(b"VP8 ") {
            return Err(format!(
                "cannot be decoded as an animation: frame {index} is lossy after a frame that is cleared; convert the file to GIF or PNG"
            ));
        }
        is_cleared = frame.get(15).is_some_and(|flags| flags & 1 != 0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vision::{animation, decode};
    use std::path::PathBuf;

    const SIZE: [u32; 2] = [61, 43];

    /// Returns the lossy pixels of a photograph of [`SIZE`].
    fn lossy() -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/images");
        let file = std::fs::read(folder.join("photograph.webp")).expect("the fixture is readable");
        let found = chunks_of(&file, b"VP8 ").next();
        found.expect("the photograph is lossy").to_vec()
    }

    fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
        let mut chunk = kind.to_vec();
        chunk.extend((data.len() as u32).to_le_bytes());
        chunk.extend(data);
        chunk.resize(chunk.len().next_multiple_of(2), 0);
        chunk
    }

    fn sides([width, height]: [u32; 2]) -> Vec<u8> {
        let sides = [width - 1, height - 1];
        let bytes = sides.map(|side| side.to_le_bytes());
        [&bytes[0][..3], &bytes[1][..3]].concat()
    }

    /// Returns a frame's transparency and pixels, for pixels of `size`.
    fn transparent(size: [u32; 2]) -> Vec<u8> {
        // Each filter of the transparency reads other neighbours. This is the gradient.
        let mut alpha = vec![0x0C];
        alpha.extend((0..size[0] * size[1]).map(|index| index as u8));
        let mut pixels = lossy();
        pixels[6..8].copy_from_slice(&(size[0] as u16).to_le_bytes());
        pixels[8..10].copy_from_slice(&(size[1] as u16).to_le_bytes());
        [chunk(b"ALPH", &alpha), chunk(b"VP8 ", &pixels)].concat()
    }

    fn frame(size: [u32; 2], contents: &[u8]) -> Vec<u8> {
        let header = [&[0; 6], &sides(size)[..], &[100, 0, 0, 0]].concat();
        chunk(b"ANMF", &[&header, contents].concat())
    }

    fn file(is_animated: bool, contents: &[u8]) -> Vec<u8> {
        let flags = 0x10 | if is_animated { 2 } else { 0 };
        let header = [&[flags, 0, 0, 0], &sides(SIZE)[..]].concat();
        let mut chunks = chunk(b"VP8X", &header);
        if is_animated {
            chunks.extend(chunk(b"ANIM", &[0; 6]));
        }
        chunks.extend(contents);
        chunk(b"RIFF", &[b"WEBP", &chunks[..]].concat())
    }

    /// Returns a still image, and an animation of two frames. Both have transparency and lossy pixels.
    fn whole() -> [Vec<u8>; 2] {
        let contents = transparent(SIZE);
        let frames = frame(SIZE, &contents).repeat(2);
        [file(false, &contents), file(true, &frames)]
    }

    #[test]
    fn decode_of_lossy_pixels_with_transparency_has_their_size() {
        let [still, animated] = whole();
        for file in [&still, &animated] {
            check_sizes(file).expect("the sizes are equal");
            let pixels = decode::decode(file).expect("the file is decodable");
            assert_eq!(
                [pixels.width, pixels.height],
                SIZE.map(|side| side as usize)
            );
            decode::header(file).expect("the header is readable");
        }
        let frames = animation::decode(&animated, 32).expect("the file is decodable");
        assert_eq!(frames.sampled.len(), 2);
    }

    /// The decoder panics for some of these files.
    #[test]
    fn pixels_of_another_size_are_refused_before_they_are_decoded() {
        for size in [[8, 43], [61, 8], [62, 43], [61, 44], [16_383, 16_383]] {
            // A lossy frame without transparency, and one with it.
            let mut opaque = transparent(SIZE);
            let mut other = lossy();
            other[6..8].copy_from_slice(&(size[0] as u16).to_le_bytes());
            other[8..10].copy_from_slice(&(size[1] as u16).to_le_bytes());
            let other = chunk(b"VP8 ", &other);
            let start = opaque.windows(4).position(|kind| kind == b"VP8 ");
            opaque.truncate(start.expect("the pixels are lossy"));
            let with_alpha = [&opaque[..], &other].concat();
            let words = format!(
                "{} x {} pixels, but its header says 61 x 43",
                size[0], size[1]
            );
            for contents in [&other, &with_alpha] {
                let still = file(false, contents);
                let frames = [frame(SIZE, &transparent(SIZE)), frame(SIZE, contents)].concat();
                let animated = file(true, &frames);
                for (file, name) in [(&still, "the chunk VP8 "), (&animated, "frame 1 ")] {
                    for reason in [decode::header(file).err(), decode::decode(file).err()] {
                        let reason = reason.expect("the file is refused");
                        assert!(reason.contains(name) && reason.contains(&words), "{reason}");
                    }
                }
                let reason = animation::decode(&animated, 32).err();
                let reason = reason.expect("the file is refused");
                assert!(reason.contains(&words), "{reason}");
            }
        }
    }

    #[test]
    fn frame_without_a_header_of_pixels_is_refused() {
        let [alpha, pixels] = [chunk(b"ALPH", &[0; 8]), chunk(b"VP8 ", &lossy())];
        let mut dependent = lossy();
        dependent[0] |= 1;
        let dependent = chunk(b"VP8 ", &dependent);
        for contents in [
            alpha.clone(),
            [&alpha[..], &chunk(b"EXIF", &lossy())].concat(),
            [&alpha[..], &dependent].concat(),
            [&chunk(b"EXIF", &[0; 8])[..], &pixels].concat(),
            chunk(b"VP8L", &[0x2E; 16]),
            chunk(b"VP8L", &[0x2F; 3]),
        ] {
            let animated = file(true, &frame(SIZE, &contents));
            let reason = check_sizes(&animated).expect_err("the frame is refused");
            assert!(
                reason.contains("frame 0 has no header of pixels"),
                "{reason}"
            );
        }
        let mut odd = file(true, &frame(SIZE, &transparent(SIZE)));
        let length = odd.windows(4).position(|kind| kind == b"ANMF");
        odd[length.expect("the file has a frame") + 4] -= 1;
        let reason = check_sizes(&odd).expect_err("the frame is refused");
        assert!(reason.contains("frame 0 has an odd length"), "{reason}");
    }

    /// Broken files may be decodable, but must not panic. The seed of the changes is fixed.
    #[test]
    fn decode_of_broken_files_with_transparency_does_not_panic() {
        let mut state = 1u64;
        let mut random = |most: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % most
        };
        for whole in whole() {
            // The headers of chunks, frames and pixels are in these bytes.
            let starts: Vec<usize> = [b"VP8X", b"ANMF", b"ALPH", b"VP8 "]
                .iter()
                .flat_map(|kind| {
                    let places = 0..whole.len() - 4;
                    places
                        .filter(|at| whole[*at..].starts_with(*kind))
                        .collect::<Vec<_>>()
                })
                .collect();
            for _ in 0..1500 {
                let mut broken = whole.clone();
                for _ in 0..=random(3) {
                    let at = match random(4) {
                        0 => random(broken.len()),
                        _ => starts[random(starts.len())] + random(26),
                    };
                    let bit = broken[at] ^ (1 << random(8));
                    broken[at] = [bit, random(256) as u8, 0, 255][random(4)];
                }
                let _ = decode::header(&broken);
                let _ = decode::decode(&broken);
                let _ = animation::decode(&broken, 3);
            }
        }
    }
}
