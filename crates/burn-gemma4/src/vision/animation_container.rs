//! Reads the delays of frames in animated GIF, PNG and WebP files, without decoding pixels.

use super::decode::{png_chunks, refuse_truncated};
use super::frame_times::Delay;
use ::image::ImageFormat;

/// The reason why a still image is not a video.
pub(super) fn still() -> String {
    "is a still image, not an animation; show the file as an image".into()
}

/// Returns the delays of all frames, without decoding pixels. Refuses truncated files and still images.
pub(super) fn delays(bytes: &[u8], format: ImageFormat) -> Result<Vec<Delay>, String> {
    let delays = match format {
        ImageFormat::Gif => gif_delays(bytes),
        ImageFormat::Png => {
            refuse_truncated(bytes, format)?;
            png_delays(bytes)
        }
        _ => {
            refuse_truncated(bytes, format)?;
            webp_delays(bytes)
        }
    };
    let delays = delays.ok_or("cannot be decoded as an animation: the file is truncated")?;
    match delays.is_empty() {
        true => Err(still()),
        false => Ok(delays),
    }
}

/// Returns the delays in a GIF file, or `None` if the file is truncated.
fn gif_delays(bytes: &[u8]) -> Option<Vec<Delay>> {
    // The size of a color table follows from flags in the block before it.
    let table = |flags: u8| match flags & 0x80 {
        0 => 0,
        _ => 3 << ((flags & 7) + 1),
    };
    let mut rest = bytes.get(13 + table(*bytes.get(10)?)..)?;
    let (mut delays, mut hundredths) = (Vec::new(), 0);
    loop {
        let (kind, after) = rest.split_first()?;
        rest = match kind {
            // An extension. The graphic control extension precedes its frame.
            0x21 => {
                let (label, blocks) = after.split_first()?;
                if *label == 0xF9 {
                    hundredths = u16::from_le_bytes(*blocks.get(2..)?.first_chunk()?);
                }
                after_blocks(blocks)?
            }
            // A frame: its descriptor, its color table, and its compressed pixels.
            0x2C => {
                delays.push(Delay {
                    numerator: u32::from(std::mem::take(&mut hundredths)),
                    denominator: 100,
                });
                after_blocks(after.get(9 + table(*after.get(8)?) + 1..)?)?
            }
            0x3B => return Some(delays),
            _ => return None,
        };
    }
}

/// Returns the bytes after a chain of data blocks in a GIF file. An empty block ends the chain.
fn after_blocks(mut rest: &[u8]) -> Option<&[u8]> {
    loop {
        let (length, after) = rest.split_first()?;
        rest = after.get(usize::from(*length)..)?;
        if *length == 0 {
            return Some(rest);
        }
    }
}

/// Returns the delays in a PNG file.
fn png_delays(bytes: &[u8]) -> Option<Vec<Delay>> {
    let controls = png_chunks(bytes).filter(|(kind, _)| *kind == b"fcTL");
    let delays = controls.map(|(_, data)| {
        let number = |at: usize| Some(u16::from_be_bytes(*data.get(at..)?.first_chunk()?));
        // The specification gives a denominator of 0 the meaning of 100.
        let denominator = match number(22)? {
            0 => 100,
            denominator => u32::from(denominator),
        };
        Some(Delay {
            numerator: u32::from(number(20)?),
            denominator,
        })
    });
    delays.collect()
}

/// Returns the delays in a WebP file.
fn webp_delays(bytes: &[u8]) -> Option<Vec<Delay>> {
    let delays = webp_frames(bytes).map(|frame| {
        let [low, middle, high] = *frame.get(12..)?.first_chunk()?;
        Some(Delay {
            numerator: u32::from_le_bytes([low, middle, high, 0]),
            denominator: 1000,
        })
    });
    delays.collect()
}

/// Returns the data of the chunks `ANMF` in a WebP file: a header of 16 bytes, and then the chunks of a frame.
fn webp_frames(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes.get(12..).unwrap_or_default();
    let chunks = std::iter::from_fn(move || {
        let (kind, after) = rest.split_first_chunk::<4>()?;
        let (length, data) = after.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        // A chunk of an odd length has one byte of padding.
        let end = length.saturating_add(length % 2);
        rest = data.get(end..).unwrap_or_default();
        Some((kind, &data[..length.min(data.len())]))
    });
    chunks.filter_map(|(kind, data)| (kind == b"ANMF").then_some(data))
}

/// Refuses a frame that image-webp 0.2.4 would draw wrongly: an opaque lossy frame after a frame that is cleared. The
/// crate counts three bytes for each pixel of its canvas then, which has four.
pub(super) fn refuse_cleared_webp(bytes: &[u8]) -> Result<(), String> {
    let mut is_cleared = false;
    for (index, frame) in webp_frames(bytes).enumerate() {
        if is_cleared && frame.get(16..20) == Some(b"VP8 ") {
            return Err(format!(
                "cannot be decoded as an animation: frame {index} is lossy after a frame that is cleared; convert the file to GIF or PNG"
            ));
        }
        is_cleared = frame.get(15).is_some_and(|flags| flags & 1 != 0);
    }
    Ok(())
}
