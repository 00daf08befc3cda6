//! Decodes the sampled frames of animated GIF, PNG and WebP files within limits on memory and work.

use super::animation_container::{delays, refuse_restored_png, still};
use super::decode::{METADATA_BYTES, failed, rgb};
use super::frame_times::seconds;
use super::image::{Pixels, check_pixels};
use super::sampling::{check_pixels_of_frames, sampled_indices};
use super::webp_container;
use ::image::codecs::{gif::GifDecoder, png::PngDecoder, webp::WebPDecoder};
use ::image::{
    AnimationDecoder, DynamicImage, Frames, ImageDecoder, ImageFormat, Limits, Rgba, guess_format,
};
use std::io::Cursor;

/// The largest number of frames in a file.
const MOST_FRAMES: usize = 100_000;

/// The largest number of pixels of all frames up to the last sampled one. Each frame is drawn on the frame before it,
/// so frames that are not sampled are decoded too.
const MOST_DECODED_PIXELS: u64 = 1 << 32;

/// The buffers of a decoder that have the size of the canvas, with 4 bytes for each pixel: the canvas, the frame before
/// it, the new frame as stored, and the new frame in RGBA.
const CANVASES: u64 = 4;

/// The sampled frames of an animation.
pub(super) struct Animation {
    /// The second at which each frame begins, rounded down, and its pixels.
    pub sampled: Vec<(u64, Pixels)>,
    /// The number of frames before sampling.
    pub total: usize,
}

/// Decodes up to `most_frames` frames of an animation, which are sampled uniformly. The error is a reason that follows
/// the file's name.
pub(super) fn decode(bytes: &[u8], most_frames: usize) -> Result<Animation, String> {
    let format = format_of(bytes)?;
    let delays = delays(bytes, format)?;
    if delays.len() > MOST_FRAMES {
        return Err(format!(
            "has {} frames; expected at most {MOST_FRAMES}",
            delays.len()
        ));
    }
    let sampled = sampled_indices(delays.len(), most_frames);
    let seconds = seconds(&delays);
    let (frames, [width, height]) = open(bytes, format)?;
    check_pixels_of_frames([width, height], sampled.len())?;
    let last = sampled.last().copied().unwrap_or(0);
    let pixels = (width * height) as u64 * (last as u64 + 1);
    if pixels > MOST_DECODED_PIXELS {
        return Err(format!(
            "has {pixels} pixels in the first {} frames; expected at most {MOST_DECODED_PIXELS}",
            last + 1
        ));
    }
    let mut decoded = Vec::with_capacity(sampled.len());
    let mut next = sampled.into_iter().peekable();
    for (index, frame) in frames.take(last + 1).enumerate() {
        let frame = frame.map_err(failed)?;
        if next.next_if_eq(&index).is_some() {
            let rgb = rgb(DynamicImage::from(frame.into_buffer()));
            decoded.push((seconds[index], Pixels { width, height, rgb }));
        }
    }
    match next.next() {
        None => Ok(Animation {
            sampled: decoded,
            total: delays.len(),
        }),
        Some(index) => Err(format!(
            "cannot be decoded as an animation: frame {index} is missing"
        )),
    }
}

/// Returns the format of an animated file.
fn format_of(bytes: &[u8]) -> Result<ImageFormat, String> {
    match guess_format(bytes) {
        Ok(format @ (ImageFormat::Gif | ImageFormat::Png | ImageFormat::WebP)) => Ok(format),
        Ok(ImageFormat::Jpeg) => Err(still()),
        _ => Err("is not an animated GIF, PNG or WebP file".into()),
    }
}

/// Begins to decode the frames of a file, and returns the size of the canvas. The header may promise any size, so the
/// check precedes the allocation of pixels.
fn open(bytes: &[u8], format: ImageFormat) -> Result<(Frames<'_>, [usize; 2]), String> {
    let size = |(width, height): (u32, u32)| -> Result<[usize; 2], String> {
        check_pixels(width as usize, height as usize)?;
        Ok([width as usize, height as usize])
    };
    let limits = |[width, height]: [usize; 2]| {
        let mut limits = Limits::no_limits();
        let canvases = CANVASES * 4 * (width * height) as u64;
        limits.max_alloc = Some(METADATA_BYTES + canvases);
        limits
    };
    let reader = || Cursor::new(bytes);
    Ok(match format {
        ImageFormat::Gif => {
            let mut decoder = GifDecoder::new(reader()).map_err(failed)?;
            let size = size(decoder.dimensions())?;
            decoder.set_limits(limits(size)).map_err(failed)?;
            (decoder.into_frames(), size)
        }
        ImageFormat::Png => {
            refuse_restored_png(bytes)?;
            let decoder = PngDecoder::with_limits(reader(), limits([0, 0])).map_err(failed)?;
            let size = size(decoder.dimensions())?;
            let decoder = PngDecoder::with_limits(reader(), limits(size)).map_err(failed)?;
            (decoder.apng().map_err(failed)?.into_frames(), size)
        }
        _ => {
            webp_container::check_sizes(bytes)?;
            webp_container::refuse_cleared(bytes)?;
            let mut decoder = WebPDecoder::new(reader()).map_err(failed)?;
            let size = size(decoder.dimensions())?;
            // Without a color, the decoder clears no frames.
            let clear = Rgba([0; 4]);
            decoder.set_background_color(clear).map_err(failed)?;
            (decoder.into_frames(), size)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;
    use std::path::PathBuf;

    const CLIPS: [&str; 3] = ["clip.gif", "clip.png", "clip.webp"];

    fn read(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/videos");
        std::fs::read(folder.join(name)).expect("the fixture is readable")
    }

    fn decoded(bytes: &[u8], most_frames: usize) -> Vec<(u64, Pixels)> {
        let animation = decode(bytes, most_frames);
        animation.expect("the file is decodable").sampled
    }

    fn refused(bytes: &[u8]) -> String {
        decode(bytes, 32).err().expect("the file is refused")
    }

    /// Opaque pixels of a WebP file that are drawn on an earlier frame may be darker by 1. The decoder rounds their product
    /// with the transparency down.
    #[test]
    fn decode_of_every_format_equals_pillow() {
        let fixture = read("decoded.safetensors");
        let fixture = SafeTensors::deserialize(&fixture).expect("the fixture parses");
        for name in CLIPS {
            let expected = fixture.tensor(name).expect("the fixture has the file");
            let found = decoded(&read(name), 32);
            let seconds: Vec<u64> = found.iter().map(|(second, _)| *second).collect();
            assert_eq!(seconds, [0, 31, 62, 93, 124], "{name}");
            let expected = expected.data().chunks_exact(expected.data().len() / 5);
            for ((_, pixels), expected) in found.iter().zip(expected) {
                assert_eq!([pixels.width, pixels.height], [61, 71], "{name}");
                let pairs = pixels.rgb.iter().zip(expected);
                let differences = pairs.map(|(found, expected)| expected.abs_diff(*found));
                let allowed = if name == "clip.webp" { 1 } else { 0 };
                let largest = differences.max().expect("the frame has pixels");
                assert!(largest <= allowed, "{name}: {largest}");
            }
        }
    }

    /// Sets the flag of a WebP file's frame that clears the frame before the next one is drawn.
    #[test]
    fn decode_of_cleared_webp_frames_clears_them() {
        let mut file = read("clip.webp");
        let position = file.windows(4).position(|kind| kind == b"ANMF");
        let flags = position.expect("the file has frames") + 8 + 15;
        file[flags] |= 1;
        let frames = decoded(&file, 32);
        // The second frame covers a part of the image only. The rest is transparent, which becomes black.
        assert_eq!(frames[1].1.rgb[..3], [0; 3]);
        assert_ne!(frames[0].1.rgb[..3], [0; 3]);
        // The second frame is lossy now.
        let second = file[flags..].windows(4).position(|kind| kind == b"ANMF");
        let bits = flags + second.expect("two frames") + 8 + 16;
        file[bits..bits + 4].copy_from_slice(b"VP8 ");
        // The header of lossy pixels has the sides of the frame, which the chunk of the frame has less 1.
        let side = |at: usize| 1 + u16::from_le_bytes([file[bits + at - 16], file[bits + at - 15]]);
        let [width, height] = [side(6), side(9)].map(u16::to_le_bytes);
        let sides = [width, height].concat();
        file[bits + 8..bits + 14].copy_from_slice(&[0, 0, 0, 0x9D, 0x01, 0x2A]);
        file[bits + 14..bits + 18].copy_from_slice(&sides);
        let reason = refused(&file);
        assert!(reason.contains("frame 1 is lossy"), "{reason}");
    }

    #[test]
    fn decode_of_fewer_frames_samples_them() {
        for name in CLIPS {
            let all = decoded(&read(name), 5);
            let some = decoded(&read(name), 3);
            assert_eq!(some.len(), 3);
            for ((second, pixels), index) in some.iter().zip([0, 1, 3]) {
                assert_eq!(*second, all[index].0, "{name}");
                assert!(*pixels == all[index].1, "{name}");
            }
        }
    }

    /// The last 4 bytes of a PNG file are the checksum of an empty chunk, which may be missing.
    #[test]
    fn decode_of_truncated_file_is_refused() {
        for (name, end) in [("clip.gif", 0), ("clip.png", 4), ("clip.webp", 0)] {
            let whole = read(name);
            for length in (0..whole.len() - end).step_by(7) {
                refused(&whole[..length]);
            }
            let reason = refused(&whole[..whole.len() - end - 1]);
            assert!(reason.contains("truncated"), "{name}: {reason}");
        }
    }

    /// Broken files may be decodable, but must not panic. The seed of the changes is fixed.
    #[test]
    fn decode_of_broken_file_does_not_panic() {
        let mut state = 1u64;
        let mut random = |most: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % most
        };
        for name in CLIPS {
            let whole = read(name);
            for _ in 0..300 {
                let mut broken = whole.clone();
                for _ in 0..=random(4) {
                    // Most fields are in the first bytes.
                    let most = if random(2) == 0 { 120 } else { broken.len() };
                    let at = random(most);
                    broken[at] = random(256) as u8;
                }
                let _ = decode(&broken, 3);
            }
        }
    }

    #[test]
    fn decode_of_gif_with_too_many_pixels_is_refused_before_allocation() {
        let mut file = read("clip.gif");
        file[6..10].fill(0xFF);
        let reason = refused(&file);
        assert!(reason.contains("65535 x 65535"), "{reason}");
        // 8,000 x 8,000 pixels are an image, but too large for five frames.
        file[6..10].copy_from_slice(&[0x40, 0x1F, 0x40, 0x1F]);
        let reason = refused(&file);
        assert!(reason.contains("5 sampled frames"), "{reason}");
    }

    /// Returns a GIF file of one pixel with this number of frames.
    fn frames_of_one_pixel(count: usize) -> Vec<u8> {
        let mut file = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xFF\xFF\xFF".to_vec();
        for _ in 0..count {
            file.extend(b",\0\0\0\0\x01\0\x01\0\0\x02\x02L\x01\0");
        }
        file.push(b';');
        file
    }

    #[test]
    fn decode_of_frames_without_delays_gives_each_a_tenth_of_a_second() {
        let frames = decoded(&frames_of_one_pixel(30), 30);
        let seconds: Vec<u64> = frames.iter().map(|(second, _)| *second).collect();
        let expected: Vec<u64> = (0..30).map(|index| index / 10).collect();
        assert_eq!(seconds, expected);
        assert_eq!(frames[0].1.rgb, [255; 3]);
    }

    #[test]
    fn decode_of_too_many_frames_is_refused() {
        let reason = refused(&frames_of_one_pixel(MOST_FRAMES + 1));
        assert!(reason.contains("100001 frames"), "{reason}");
        let reason = refused(&frames_of_one_pixel(0));
        assert!(reason.contains("still image"), "{reason}");
    }

    #[test]
    fn decode_of_large_canvas_with_many_frames_is_refused() {
        let mut file = frames_of_one_pixel(1000);
        // The canvas has 3,000 x 2,000 pixels.
        file[6..10].copy_from_slice(&[0xB8, 0x0B, 0xD0, 0x07]);
        let reason = refused(&file);
        assert!(reason.contains("in the first 969 frames"), "{reason}");
    }

    #[test]
    fn decode_of_gif_frame_beyond_the_canvas_is_refused() {
        let file = frames_of_one_pixel(2);
        let second = file.len() - 1 - 15;
        assert_eq!(file[second], b',');
        // The fields are the left and top edges, the width and the height.
        for (at, words) in [
            (1, "frame 1 has 1 x 1 pixels at 1, 0"),
            (3, "frame 1 has 1 x 1 pixels at 0, 1"),
            (5, "frame 1 has 257 x 1 pixels at 0, 0"),
            (7, "frame 1 has 1 x 257 pixels at 0, 0"),
        ] {
            let mut broken = file.clone();
            broken[second + at + usize::from(at > 3)] = 1;
            let reason = refused(&broken);
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn decode_of_gif_with_zeros_before_its_trailer_ignores_them() {
        let whole = frames_of_one_pixel(3);
        let frames = &whole[..whole.len() - 1];
        let padded = decoded(&[frames, b"\0\0\0;rest"].concat(), 32);
        assert!(padded == decoded(&whole, 32));
        for (end, words) in [
            (&b""[..], "truncated, or its trailer is missing"),
            (b"\0\0", "truncated, or its trailer is missing"),
            (b"\0\x07;", "begins with the byte 0x00"),
            (b"\x07;", "begins with the byte 0x07"),
        ] {
            let reason = refused(&[frames, end].concat());
            assert!(reason.contains(words), "{reason}");
        }
    }

    /// Changes the disposals of the frames in a PNG file. The checksums of the chunks become wrong, which is found later.
    #[test]
    fn decode_of_png_frame_that_is_removed_after_a_cleared_one_is_refused() {
        let whole = read("clip.png");
        let controls: Vec<usize> = (0..whole.len() - 4)
            .filter(|at| whole[*at..].starts_with(b"fcTL"))
            .collect();
        let with_disposals = |disposals: [u8; 5]| {
            let mut file = whole.clone();
            for (at, disposal) in controls.iter().zip(disposals) {
                file[at + 4 + 24] = disposal;
            }
            file
        };
        for (disposals, is_refused) in [
            ([0, 1, 2, 0, 0], true),
            ([1, 2, 2, 0, 0], true),
            // No frame follows the last one.
            ([0, 0, 0, 1, 2], false),
            ([0, 2, 1, 0, 2], false),
        ] {
            let outcome = refuse_restored_png(&with_disposals(disposals));
            assert_eq!(outcome.is_err(), is_refused, "{disposals:?}");
        }
        let reason = refused(&with_disposals([0, 1, 2, 0, 0]));
        assert!(reason.contains("frame 2 is removed"), "{reason}");
    }
}
