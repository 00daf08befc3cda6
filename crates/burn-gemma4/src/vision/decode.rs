//! Decodes image files within limits on memory.

use super::image::{MOST_PIXELS, Pixels, check_pixels};
use ::image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, guess_format};
use std::io::Cursor;

/// The formats of image files that can be decoded.
const FORMATS: [ImageFormat; 3] = [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP];

/// The largest number of bytes of one pixel in a decoder's output. The decoders refuse to allocate more than this
/// number for each of the [`MOST_PIXELS`].
const PIXEL_BYTES: usize = 8;

/// Decodes the contents of an image file. The error is a reason that follows the file's name.
pub(super) fn decode(bytes: &[u8]) -> Result<Pixels, String> {
    let format = guess_format(bytes)
        .ok()
        .filter(|format| FORMATS.contains(format))
        .ok_or("is not a PNG, JPEG or WebP image")?;
    let failed = |error| format!("cannot be decoded as an image: {error}");
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some((MOST_PIXELS * PIXEL_BYTES) as u64);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    let (width, height) = decoder.dimensions();
    // Check the size before the pixels are allocated. The header may promise any size.
    check_pixels(width as usize, height as usize)?;
    let orientation = decoder.orientation().map_err(failed)?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(failed)?;
    image.apply_orientation(orientation);
    let rgb = image.into_rgb8();
    Ok(Pixels {
        width: rgb.width() as usize,
        height: rgb.height() as usize,
        rgb: rgb.into_raw(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::image::{ImageEncoder, codecs::png::PngEncoder};
    use safetensors::SafeTensors;
    use std::path::PathBuf;

    fn png(width: u32, height: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let pixels = vec![7; (width * height) as usize];
        PngEncoder::new(&mut bytes)
            .write_image(&pixels, width, height, ::image::ExtendedColorType::L8)
            .expect("a gray image is encodable");
        bytes
    }

    fn refused(bytes: &[u8]) -> String {
        decode(bytes).err().expect("the image is refused")
    }

    /// Replaces the size in the header of a PNG file, with the right checksum.
    fn with_size(mut bytes: Vec<u8>, width: u32, height: u32) -> Vec<u8> {
        bytes[16..20].copy_from_slice(&width.to_be_bytes());
        bytes[20..24].copy_from_slice(&height.to_be_bytes());
        let step = |crc: u32, byte: &u8| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
            })
        };
        let crc = !bytes[12..29].iter().fold(u32::MAX, step);
        bytes[29..33].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    #[test]
    fn decode_of_header_with_too_many_pixels_is_refused_before_allocation() {
        for (width, height) in [(65_535, 65_535), (8193, 8192), (1, 65_536), (65_536, 1)] {
            let reason = refused(&with_size(png(3, 2), width, height));
            assert!(reason.contains(&format!("{width} x {height}")), "{reason}");
        }
        let reason = refused(&with_size(png(3, 2), 1 << 30, 1 << 30));
        assert!(reason.contains("limit"), "{reason}");
    }

    #[test]
    fn decode_of_header_with_missing_rows_is_refused() {
        let reason = refused(&with_size(png(3, 2), 3, 4000));
        assert!(reason.contains("cannot be decoded"), "{reason}");
        let reason = refused(&with_size(png(3, 2), 0, 4));
        assert!(reason.contains("cannot be decoded"), "{reason}");
    }

    #[test]
    fn decode_of_truncated_file_is_refused() {
        let whole = png(40, 30);
        for length in 0..whole.len() - 12 {
            refused(&whole[..length]);
        }
    }

    #[test]
    fn decode_of_widest_image_is_exact() {
        let pixels = decode(&png(65_535, 1)).expect("the image is decodable");
        assert_eq!((pixels.width, pixels.height), (65_535, 1));
        assert!(pixels.rgb.iter().all(|value| *value == 7));
    }

    #[test]
    fn decode_of_other_formats_is_refused() {
        for bytes in [&b""[..], b"GIF89a", b"BM", b"II*\0", b"<svg/>", b"\xff\xd8"] {
            let reason = refused(bytes);
            let is_named = reason.contains("PNG, JPEG or WebP") || reason.contains("decoded");
            assert!(is_named, "{reason}");
        }
    }

    /// Compares with Pillow. JPEG decoders may differ in the rounding of their transforms. On 2026-11-29 the largest
    /// difference was 3 of 255 in JPEG files, and 0 in all other files.
    #[test]
    fn decode_of_every_format_equals_pillow() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/images");
        let read = |name: &str| std::fs::read(folder.join(name)).expect("the fixture is readable");
        let decoded = read("decoded.safetensors");
        let decoded = SafeTensors::deserialize(&decoded).expect("the fixture parses");
        assert_eq!(decoded.len(), 9);
        for (name, expected) in decoded.iter() {
            let found = decode(&read(name)).unwrap_or_else(|reason| panic!("{name}: {reason}"));
            assert_eq!([found.height, found.width, 3], expected.shape(), "{name}");
            let pairs = found.rgb.iter().zip(expected.data());
            let differences = pairs.map(|(found, expected)| found.abs_diff(*expected));
            let largest = differences.max().expect("the image has pixels");
            println!("{name}: {largest}");
            let allowed = if name.ends_with(".jpg") { 3 } else { 0 };
            assert!(largest <= allowed, "{name}: {largest}");
        }
    }
}
