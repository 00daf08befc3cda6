//! Decodes image files within limits on memory. Truncated files are refused.

use super::image::{ImageHeader, Pixels, check_pixels};
use super::webp_container;
use ::image::metadata::Orientation;
use ::image::{
    DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits, RgbImage,
    guess_format,
};
use std::{io::Cursor, iter};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};

/// The formats of image files that can be decoded.
const FORMATS: [ImageFormat; 3] = [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP];

/// The limit of the PNG decoder for chunks of metadata and one row of pixels. A larger color profile is ignored, and
/// larger texts are refused. Without this limit, a profile of 600 KB could be inflated to any size.
pub(super) const METADATA_BYTES: u64 = 4 << 20;

/// The largest number of bytes that the WebP decoder needs for each pixel: 14.5 for a lossy image with transparency.
const WEBP_PIXEL_BYTES: u64 = 15;

/// The chunks of a PNG file that the decoder keeps in memory, besides the pixels.
const METADATA_CHUNKS: [&[u8]; 5] = [b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf"];

/// Decodes the contents of an image file. The error is a reason that follows the file's name.
pub(super) fn decode(bytes: &[u8]) -> Result<Pixels, String> {
    let format = format_of(bytes)?;
    let mut decoder = open(bytes, format)?;
    refuse_truncated(bytes, format)?;
    let orientation = decoder.orientation().map_err(failed)?;
    let mut image = match format {
        ImageFormat::Jpeg => {
            // This decoder has a copy of the file.
            drop(decoder);
            whole_jpeg(bytes)?
        }
        _ => DynamicImage::from_decoder(decoder).map_err(failed)?,
    };
    image.apply_orientation(orientation);
    Ok(Pixels {
        width: image.width() as usize,
        height: image.height() as usize,
        rgb: rgb(image),
    })
}

/// Reads the header of an image file, and checks that the file is whole. The error is a reason that follows the file's
/// name.
pub(super) fn header(bytes: &[u8]) -> Result<ImageHeader, String> {
    let format = format_of(bytes)?;
    let mut decoder = open(bytes, format)?;
    refuse_truncated(bytes, format)?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    let orientation = decoder.orientation().map_err(failed)?;
    // Turning and the conversion to RGB each copy the decoded pixels. A progressive JPEG file also has coefficients of
    // 16 bits for three channels.
    let copies = if orientation == Orientation::NoTransforms {
        1
    } else {
        2
    };
    let coefficients = if format == ImageFormat::Jpeg { 6 } else { 0 };
    // The decoder may also hold a chunk before it is parsed, and a copy of each text.
    let metadata = match format == ImageFormat::Png && has_metadata(bytes) {
        true => 3 * METADATA_BYTES,
        false => 0,
    };
    Ok(ImageHeader {
        width: width as usize,
        height: height as usize,
        is_turned: matches!(
            orientation,
            Orientation::Rotate90
                | Orientation::Rotate270
                | Orientation::Rotate90FlipH
                | Orientation::Rotate270FlipH
        ),
        decoding_bytes: match format {
            ImageFormat::WebP => WEBP_PIXEL_BYTES * pixels,
            _ => copies * decoder.total_bytes() + (3 + coefficients) * pixels + metadata,
        },
    })
}

/// True if a PNG file has a chunk of metadata before its pixels.
fn has_metadata(bytes: &[u8]) -> bool {
    png_chunks(bytes)
        .take_while(|(kind, _)| *kind != b"IDAT")
        .any(|(kind, _)| METADATA_CHUNKS.contains(&&kind[..]))
}

/// Returns the format of an image file, if it can be decoded.
fn format_of(bytes: &[u8]) -> Result<ImageFormat, String> {
    guess_format(bytes)
        .ok()
        .filter(|format| FORMATS.contains(format))
        .ok_or_else(|| "is not a PNG, JPEG or WebP image".into())
}

/// Reads the header of an image file, and checks the size that it promises. The header may promise any size, so the
/// check precedes the allocation of pixels.
fn open(bytes: &[u8], format: ImageFormat) -> Result<impl ImageDecoder, String> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(METADATA_BYTES);
    reader.limits(limits);
    let decoder = reader.into_decoder().map_err(failed)?;
    if format == ImageFormat::WebP {
        webp_container::check_sizes(bytes)?;
    }
    let (width, height) = decoder.dimensions();
    check_pixels(width as usize, height as usize)?;
    Ok(decoder)
}

pub(super) fn failed(error: ImageError) -> String {
    format!("cannot be decoded as an image: {error}")
}

/// Decodes a JPEG file in strict mode. The decoder of the crate `image` fills pixels with gray after an error.
fn whole_jpeg(bytes: &[u8]) -> Result<DynamicImage, String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot be decoded as an image: {error}");
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(usize::MAX)
        .set_max_height(usize::MAX)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    let rgb = decoder.decode().map_err(|error| failed(&error))?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    RgbImage::from_raw(width as u32, height as u32, rgb)
        .map(DynamicImage::from)
        .ok_or_else(|| failed(&"the number of pixels is wrong"))
}

/// Refuses a file whose end is missing. Some decoders do not notice this, and the header of an image never shows it.
pub(super) fn refuse_truncated(bytes: &[u8], format: ImageFormat) -> Result<(), String> {
    let is_whole = match format {
        ImageFormat::Jpeg => has_end_marker(bytes),
        // The header has the number of the bytes that follow its first eight.
        ImageFormat::WebP => {
            let size = bytes.get(4..).and_then(|bytes| bytes.first_chunk());
            let size = size.map(|size| u64::from(u32::from_le_bytes(*size)));
            size.is_some_and(|size| size + 8 <= bytes.len() as u64)
        }
        _ => png_chunks(bytes).any(|(kind, _)| kind == b"IEND"),
    };
    match is_whole {
        true => Ok(()),
        false => Err("cannot be decoded as an image: the file is truncated".into()),
    }
}

/// Returns the types and the data of the chunks of a PNG file, up to the first chunk whose beginning is missing. The
/// last chunk may be incomplete.
pub(super) fn png_chunks(bytes: &[u8]) -> impl Iterator<Item = (&[u8; 4], &[u8])> {
    let mut rest = bytes.get(8..).unwrap_or_default();
    iter::from_fn(move || {
        let (length, after) = rest.split_first_chunk()?;
        let (kind, data) = after.split_first_chunk()?;
        let length = u32::from_be_bytes(*length) as usize;
        // The checksum has 4 bytes after the data.
        rest = data.get(length.saturating_add(4)..).unwrap_or_default();
        Some((kind, &data[..length.min(data.len())]))
    })
}

/// True if the segments of a JPEG file end with the marker EOI. The decoder does not notice that the last rows of a
/// file are missing.
fn has_end_marker(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        // Skip compressed data, which contains 0xFF only before a zero or in a restart marker.
        let is_marker =
            |pair: &[u8]| pair[0] == 0xFF && !matches!(pair[1], 0 | 1 | 0xD0..=0xD7 | 0xFF);
        let Some(start) = rest.windows(2).position(is_marker) else {
            return false;
        };
        let (marker, after) = (rest[start + 1], &rest[start + 2..]);
        rest = match marker {
            0xD9 => return true,
            0xD8 => after,
            _ => {
                let length = after.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
                let segment = length.and_then(|length| after.get(usize::from(length)..));
                match segment {
                    Some(segment) => segment,
                    None => return false,
                }
            }
        };
    }
}

/// Returns the channels red, green and blue of each pixel, 8 bits each. A channel of 16 bits becomes its high byte, as
/// in Pillow.
pub(super) fn rgb(image: DynamicImage) -> Vec<u8> {
    let high = |value: u16| (value >> 8) as u8;
    let mut rgb = Vec::with_capacity(image.width() as usize * image.height() as usize * 3);
    match image {
        DynamicImage::ImageLuma16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [high(pixel[0]); 3]));
        }
        DynamicImage::ImageLumaA16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| [high(pixel[0]); 3]));
        }
        DynamicImage::ImageRgb16(image) => {
            rgb.extend(image.pixels().flat_map(|pixel| pixel.0.map(high)));
        }
        DynamicImage::ImageRgba16(image) => {
            let channels = image.pixels().map(|pixel| [pixel[0], pixel[1], pixel[2]]);
            rgb.extend(channels.flat_map(|channels| channels.map(high)));
        }
        image => return image.into_rgb8().into_raw(),
    }
    rgb
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

    fn read(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/images");
        std::fs::read(folder.join(name)).expect("the fixture is readable")
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

    /// The memory is that of the table in docs/vision.md, or more.
    #[test]
    fn header_has_the_size_and_the_memory_of_decoding() {
        for (name, bytes) in [
            ("photograph.png", 6),
            ("alpha.png", 7),
            ("deep.png", 9),
            ("gray.png", 4),
            ("lossless.webp", 15),
            ("photograph.jpg", 12),
            ("turned.jpg", 15),
        ] {
            let file = read(name);
            let found = header(&file).expect("the header is readable");
            let pixels = decode(&file).expect("the image is decodable");
            let mut sides = [pixels.width, pixels.height];
            assert_eq!(found.is_turned, name == "turned.jpg", "{name}");
            if found.is_turned {
                sides.reverse();
            }
            assert_eq!([found.width, found.height], sides, "{name}");
            let count = (found.width * found.height) as u64;
            assert_eq!(found.decoding_bytes, bytes * count, "{name}");
        }
        let reason = header(&with_size(png(3, 2), 8193, 8192)).expect_err("too many pixels");
        assert!(reason.contains("8193 x 8192"), "{reason}");
    }

    #[test]
    fn decode_ignores_a_color_profile_that_inflates_beyond_its_limit() {
        let with_profile = |count: usize| {
            let mut bytes = Vec::new();
            let mut encoder = PngEncoder::new(&mut bytes);
            let set = encoder.set_icc_profile(vec![0; count]);
            set.expect("PNG files have color profiles");
            encoder
                .write_image(&[7; 6], 3, 2, ::image::ExtendedColorType::L8)
                .expect("a gray image is encodable");
            bytes
        };
        for (count, is_kept) in [(1000, true), (64 << 20, false)] {
            let file = with_profile(count);
            let mut decoder = open(&file, ImageFormat::Png).expect("the header is readable");
            let profile = decoder.icc_profile().expect("the profile is readable");
            assert_eq!(profile.is_some(), is_kept, "{count} bytes");
            let found = header(&file).expect("the header is readable");
            assert_eq!(found.decoding_bytes, 4 * 6 + 3 * METADATA_BYTES);
            assert_eq!(decode(&file).expect("the image is decodable").rgb, [7; 18]);
        }
    }

    #[test]
    fn decode_of_header_with_missing_rows_is_refused() {
        let reason = refused(&with_size(png(3, 2), 3, 4000));
        assert!(reason.contains("cannot be decoded"), "{reason}");
        let reason = refused(&with_size(png(3, 2), 0, 4));
        assert!(reason.contains("cannot be decoded"), "{reason}");
    }

    /// Truncates files at every length. The last 4 bytes of a PNG file are the checksum of an empty chunk, which may be
    /// missing.
    #[test]
    fn truncated_file_is_refused_by_decode_and_by_header() {
        for (name, end) in [
            ("alpha.png", 4),
            ("gray.png", 4),
            ("palette.png", 4),
            ("photograph.jpg", 0),
            ("progressive.jpg", 0),
            ("turned.jpg", 0),
            ("cmyk.jpg", 0),
            ("photograph.webp", 0),
            ("lossless.webp", 0),
        ] {
            let whole = read(name);
            for length in 0..whole.len() - end {
                let is_refused = [
                    decode(&whole[..length]).is_err(),
                    header(&whole[..length]).is_err(),
                ];
                assert_eq!(
                    is_refused,
                    [true; 2],
                    "{name}: {length} of {} bytes",
                    whole.len()
                );
            }
            let reason = header(&whole[..whole.len() - end - 1]).expect_err(name);
            assert!(reason.contains("truncated"), "{name}: {reason}");
            header(&whole).expect("the file is whole");
        }
    }

    #[test]
    fn decode_of_jpeg_with_bytes_after_its_end_ignores_them() {
        let whole = read("photograph.jpg");
        let expected = decode(&whole).expect("the image is decodable");
        let found = decode(&[&whole[..], b"trailer"].concat()).expect("the image is decodable");
        assert!(found == expected);
    }

    #[test]
    fn decode_of_16_bits_takes_the_high_byte() {
        use ::image::ExtendedColorType::{L16, La16, Rgb16, Rgba16};
        let samples: [u16; 8] = [0x00FF, 0x0100, 0x7FFF, 0xFFFF, 0x12FE, 0x80FF, 0xFE00, 1];
        let bytes: Vec<u8> = samples.iter().flat_map(|one| one.to_ne_bytes()).collect();
        for (color, channels, expected) in [
            (L16, 1, &[0, 0, 0, 1, 1, 1][..]),
            (La16, 2, &[0, 0, 0, 0x7F, 0x7F, 0x7F]),
            (Rgb16, 3, &[0, 1, 0x7F, 0xFF, 0x12, 0x80]),
            (Rgba16, 4, &[0, 1, 0x7F, 0x12, 0x80, 0xFE]),
        ] {
            let mut png = Vec::new();
            PngEncoder::new(&mut png)
                .write_image(&bytes[..2 * 2 * channels], 2, 1, color)
                .expect("the image is encodable");
            let found = decode(&png).expect("the image is decodable");
            assert_eq!(found.rgb, expected, "{color:?}");
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
        let decoded = read("decoded.safetensors");
        let decoded = SafeTensors::deserialize(&decoded).expect("the fixture parses");
        assert_eq!(decoded.len(), 11);
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
