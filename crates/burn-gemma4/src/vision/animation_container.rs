//! Reads the delays of frames in animated GIF, PNG and WebP files, without decoding pixels.

use super::decode::{png_chunks, refuse_truncated};
use super::frame_times::Delay;
use super::webp_container;
use ::image::{ImageFormat, guess_format};

/// The reason why a still image is not a video.
pub(super) fn still() -> String {
    "is a still image, not an animation; show the file as an image".into()
}

/// The reason why a file is not decoded whose end is missing.
const TRUNCATED: &str = "cannot be decoded as an animation: the file is truncated";

/// Returns the delays of all frames, without decoding pixels. Refuses truncated files and still images.
pub(super) fn delays(bytes: &[u8], format: ImageFormat) -> Result<Vec<Delay>, String> {
    let delays = match format {
        ImageFormat::Gif => gif_delays(bytes)?,
        ImageFormat::Png => {
            refuse_truncated(bytes, format)?;
            png_delays(bytes).ok_or(TRUNCATED)?
        }
        _ => {
            refuse_truncated(bytes, format)?;
            webp_delays(bytes).ok_or(TRUNCATED)?
        }
    };
    match delays.is_empty() {
        true => Err(still()),
        false => Ok(delays),
    }
}

/// True if a PNG or WebP file has several frames.
pub(super) fn is_animated(bytes: &[u8]) -> bool {
    let frames = match guess_format(bytes) {
        Ok(ImageFormat::Png) => png_chunks(bytes)
            .filter(|(kind, _)| *kind == b"fcTL")
            .count(),
        Ok(ImageFormat::WebP) => webp_container::frames(bytes).count(),
        _ => 0,
    };
    frames > 1
}

/// Returns the delays in a GIF file. Refuses frames beyond the canvas, which some programs clip and others do not.
fn gif_delays(bytes: &[u8]) -> Result<Vec<Delay>, String> {
    // The size of a color table follows from flags in the block before it.
    let table = |flags: u8| match flags & 0x80 {
        0 => 0,
        _ => 3 << ((flags & 7) + 1),
    };
    let sides = |bytes: &[u8], at: usize| {
        let side = |at: usize| Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        side(at).zip(side(at + 2)).ok_or(TRUNCATED)
    };
    let canvas = sides(bytes, 6)?;
    let colors = table(*bytes.get(10).ok_or(TRUNCATED)?);
    let mut rest = bytes.get(13 + colors..).ok_or(TRUNCATED)?;
    let (mut delays, mut hundredths) = (Vec::new(), 0);
    loop {
        let Some((kind, after)) = rest.split_first() else {
            return Err(format!("{TRUNCATED}, or its trailer is missing"));
        };
        rest = match kind {
            // An extension. The graphic control extension precedes its frame.
            0x21 => {
                let (label, blocks) = after.split_first().ok_or(TRUNCATED)?;
                if *label == 0xF9 {
                    let delay = blocks.get(2..).and_then(|delay| delay.first_chunk());
                    hundredths = u16::from_le_bytes(*delay.ok_or(TRUNCATED)?);
                }
                after_blocks(blocks).ok_or(TRUNCATED)?
            }
            // A frame: its descriptor, its color table, and its compressed pixels.
            0x2C => {
                let (left, top) = sides(after, 0)?;
                let (width, height) = sides(after, 4)?;
                let is_inside = |start: u16, length: u16, most: u16| {
                    start.checked_add(length).is_some_and(|end| end <= most)
                };
                if !is_inside(left, width, canvas.0) || !is_inside(top, height, canvas.1) {
                    return Err(format!(
                        "cannot be decoded as an animation: frame {} has {width} x {height} pixels at {left}, {top}, beyond the canvas of {} x {}",
                        delays.len(),
                        canvas.0,
                        canvas.1
                    ));
                }
                delays.push(Delay {
                    numerator: u32::from(std::mem::take(&mut hundredths)),
                    denominator: 100,
                });
                let colors = table(*after.get(8).ok_or(TRUNCATED)?);
                let blocks = after.get(9 + colors + 1..);
                blocks.and_then(after_blocks).ok_or(TRUNCATED)?
            }
            0x3B => return Ok(delays),
            // Some programs write zeros before the trailer.
            0 if before_trailer(after).is_some() => before_trailer(after).unwrap_or_default(),
            _ => {
                return Err(format!(
                    "cannot be decoded as an animation: a block begins with the byte {kind:#04X}"
                ));
            }
        };
    }
}

/// Returns the bytes of a GIF file after zeros, if they begin with the trailer or are none.
fn before_trailer(bytes: &[u8]) -> Option<&[u8]> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    let rest = &bytes[zeros..];
    matches!(rest, [] | [0x3B, ..]).then_some(rest)
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
    let delays = webp_container::frames(bytes).map(|frame| {
        let [low, middle, high] = *frame.get(12..)?.first_chunk()?;
        Some(Delay {
            numerator: u32::from_le_bytes([low, middle, high, 0]),
            denominator: 1000,
        })
    });
    delays.collect()
}

/// Refuses frames that the crate `image` 0.25.10 would draw wrongly: those after a frame that is removed again, which
/// follows a frame that is cleared. The crate restores pixels from before the clearing then.
pub(super) fn refuse_restored_png(bytes: &[u8]) -> Result<(), String> {
    const CLEAR: u8 = 1;
    const RESTORE: u8 = 2;
    let controls = png_chunks(bytes).filter(|(kind, _)| *kind == b"fcTL");
    let disposals: Vec<u8> = controls
        .filter_map(|(_, data)| data.get(24).copied())
        .collect();
    let found = disposals
        .windows(3)
        .position(|of| of[..2] == [CLEAR, RESTORE]);
    match found {
        None => Ok(()),
        Some(index) => Err(format!(
            "cannot be decoded as an animation: frame {} is removed after a frame that is cleared (dispose PREVIOUS after BACKGROUND); convert the file to GIF or WebP",
            index + 1
        )),
    }
}
