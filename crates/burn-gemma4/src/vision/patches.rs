//! The size of an image in a prompt, and the image's patches.

use super::image::{Image, Pixels, SOFT_TOKENS};
use super::resize::{WEIGHT_BYTES, resize};
use crate::error::Gemma4Error;
use crate::json;
use crate::media_size::MediumSize;
use serde::Deserialize;
use serde_json::Value;
use std::fmt;

/// The settings of a checkpoint's image processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageProcessor {
    /// The width and height of a patch in pixels.
    pub patch_size: usize,
    /// The width and height, in patches, of the square that becomes one soft token.
    pub pooling_kernel_size: usize,
    /// The largest number of soft tokens of an image.
    pub max_soft_tokens: usize,
}

/// An image in the size in which the model sees it.
#[derive(Clone)]
pub(crate) struct Patches {
    /// The resized pixels, `[rows · patch_size, columns · patch_size, 3]`.
    pub rgb: Vec<u8>,
    /// The number of patches in each row.
    pub columns: usize,
    /// The number of rows of patches.
    pub rows: usize,
    pub patch_size: usize,
}

/// The fields of an image processor in `processor_config.json` or `preprocessor_config.json`.
#[derive(Deserialize)]
struct Fields {
    patch_size: Option<usize>,
    pooling_kernel_size: Option<usize>,
    max_soft_tokens: Option<usize>,
    do_resize: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    rescale_factor: Option<f64>,
    resample: Option<u32>,
}

/// The number of the bicubic filter in Pillow.
const BICUBIC: u32 = 3;

impl ImageProcessor {
    /// Returns the processor that a checkpoint with patches of these sizes has if no file describes it.
    pub fn new(patch_size: usize, pooling_kernel_size: usize) -> Self {
        Self {
            patch_size,
            pooling_kernel_size,
            max_soft_tokens: 280,
        }
    }

    /// Reads the description of an image processor, which `name` names in messages. A missing field keeps its value in
    /// `self`. The error is a reason that names the field.
    pub fn read(self, name: &str, description: &Value) -> Result<Self, String> {
        let fields: Fields = json::from_field(name, description)?;
        let refuse = |field: &str, value: String, expected: &str| {
            Err(format!(
                "{name}: {field} is {value}; only {expected} is supported"
            ))
        };
        let switches = [
            ("do_resize", fields.do_resize, true),
            ("do_rescale", fields.do_rescale, true),
            ("do_normalize", fields.do_normalize, false),
        ];
        for (field, value, expected) in switches {
            if let Some(value) = value.filter(|value| *value != expected) {
                return refuse(field, value.to_string(), &expected.to_string());
            }
        }
        if let Some(factor) = fields.rescale_factor.filter(|one| *one != 1.0 / 255.0) {
            return refuse("rescale_factor", factor.to_string(), "1/255");
        }
        if let Some(filter) = fields.resample.filter(|one| *one != BICUBIC) {
            return refuse("resample", filter.to_string(), "3 (bicubic)");
        }
        let sizes = [
            ("patch_size", fields.patch_size, self.patch_size),
            (
                "pooling_kernel_size",
                fields.pooling_kernel_size,
                self.pooling_kernel_size,
            ),
        ];
        for (field, value, expected) in sizes {
            if let Some(value) = value.filter(|value| *value != expected) {
                return refuse(
                    field,
                    value.to_string(),
                    &format!("vision_config's {expected}"),
                );
            }
        }
        let max_soft_tokens = fields.max_soft_tokens.unwrap_or(self.max_soft_tokens);
        match SOFT_TOKENS.contains(&max_soft_tokens) {
            true => Ok(Self {
                max_soft_tokens,
                ..self
            }),
            false => Err(format!(
                "{name}: max_soft_tokens is {max_soft_tokens}; expected one of {SOFT_TOKENS:?}"
            )),
        }
    }

    /// Returns the size in which the model sees an image of `width` and `height` pixels. The size is the largest one
    /// with the same aspect ratio that has at most `soft_tokens` squares of patches. A very flat or narrow image gets
    /// one row or column of squares.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the image would have no pixels.
    fn target(
        &self,
        width: usize,
        height: usize,
        soft_tokens: usize,
    ) -> Result<[usize; 2], Gemma4Error> {
        let side = self.patch_size * self.pooling_kernel_size;
        let most = soft_tokens * side * side;
        let factor = (most as f64 / (width * height) as f64).sqrt();
        let fit = |length: usize| (factor * length as f64 / side as f64).floor() as usize * side;
        let longest = soft_tokens * side;
        let target = match (fit(width), fit(height)) {
            (0, 0) => [0, 0],
            (_, 0) => [(width / height * side).min(longest), side],
            (0, _) => [side, (height / width * side).min(longest)],
            fitting => fitting.into(),
        };
        match target.contains(&0) || target[0] * target[1] > most {
            true => Err(Gemma4Error::Argument {
                argument: "image",
                reason: format!(
                    "has {width} x {height} pixels, which do not fit in {soft_tokens} soft tokens of {side} x {side} pixels"
                ),
            }),
            false => Ok(target),
        }
    }

    /// Returns the number of columns and rows of soft tokens that represent an image of `width` and `height` pixels.
    /// `max_soft_tokens` is their largest number, if this number is not the checkpoint's.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the image would have no soft tokens.
    pub fn soft_tokens(
        &self,
        [width, height]: [usize; 2],
        max_soft_tokens: Option<usize>,
    ) -> Result<[usize; 2], Gemma4Error> {
        let side = self.patch_size * self.pooling_kernel_size;
        let most = max_soft_tokens.unwrap_or(self.max_soft_tokens);
        let target = self.target(width, height, most)?;
        Ok(target.map(|length| length / side))
    }

    /// Returns the size of an image of `width` and `height` pixels that becomes this number of columns and rows of soft
    /// tokens.
    pub fn size(&self, [width, height]: [usize; 2], soft_tokens: [usize; 2]) -> MediumSize {
        let side = self.patch_size * self.pooling_kernel_size;
        let [columns, rows] = soft_tokens;
        let (to_width, to_height) = (columns * side, rows * side);
        let bytes = 3 * to_width * to_height;
        let longest = width.max(height).max(to_width).max(to_height);
        MediumSize {
            tokens: columns * rows + 2,
            bytes,
            preparing_bytes: bytes + 3 * to_width * height + WEIGHT_BYTES * longest,
        }
    }

    /// Resizes an image for the model.
    ///
    /// # Errors
    /// Returns the errors of [`soft_tokens`](Self::soft_tokens).
    pub fn patches(&self, image: &Image) -> Result<Patches, Gemma4Error> {
        let size = [image.width(), image.height()];
        let [columns, rows] = self.soft_tokens(size, image.max_soft_tokens())?;
        let (columns, rows) = (
            columns * self.pooling_kernel_size,
            rows * self.pooling_kernel_size,
        );
        let pixels: &Pixels = image.pixels();
        Ok(Patches {
            rgb: resize(pixels, columns * self.patch_size, rows * self.patch_size),
            columns,
            rows,
            patch_size: self.patch_size,
        })
    }
}

/// Writes the sizes only, because logs must not show the pixels of users' images.
impl fmt::Debug for Patches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patches")
            .field("columns", &self.columns)
            .field("rows", &self.rows)
            .field("patch_size", &self.patch_size)
            .finish_non_exhaustive()
    }
}

impl Patches {
    /// Returns the channels of all squares of `side · side` patches, `[squares, side · patch_size, side · patch_size, 3]`.
    /// The squares are in reading order. Each channel `value` becomes `scale · value / 255 + shift`.
    pub fn numbers(&self, side: usize, scale: f32, shift: f32) -> Vec<f32> {
        // Multiply by the reciprocal, as Hugging Face Transformers does.
        let factor = (1.0f64 / 255.0) as f32;
        let number = |value: &u8| scale * (f32::from(*value) * factor) + shift;
        let (length, row) = (
            side * self.patch_size * 3,
            self.columns * self.patch_size * 3,
        );
        let mut numbers = Vec::with_capacity(self.rgb.len());
        for rows in self.rgb.chunks_exact(side * self.patch_size * row) {
            for first in (0..row).step_by(length) {
                for line in rows.chunks_exact(row) {
                    numbers.extend(line[first..first + length].iter().map(number));
                }
            }
        }
        numbers
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::path::PathBuf;

    #[derive(Deserialize)]
    struct Case {
        width: usize,
        height: usize,
        patch_size: usize,
        max_soft_tokens: usize,
        resized: [usize; 2],
        crc: u32,
    }

    fn folder() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/images")
    }

    /// An image that `make_vision.py` computes by the same formula.
    fn pattern(width: usize, height: usize) -> Image {
        let mut rgb = Vec::with_capacity(3 * width * height);
        for y in 0..height {
            for x in 0..width {
                for c in 0..3 {
                    let value = x * 7 + y * 13 + c * 101 + x * y / 5 + (x / 9 + y / 6) % 2 * 97;
                    rgb.push((value % 256) as u8);
                }
            }
        }
        Image::from_rgb(width, height, rgb).expect("the number of bytes is right")
    }

    pub fn crc32(bytes: &[u8]) -> u32 {
        let step = |crc: u32, byte: &u8| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
            })
        };
        !bytes.iter().fold(u32::MAX, step)
    }

    #[test]
    fn patches_of_every_size_equal_torchvision() {
        let text =
            std::fs::read_to_string(folder().join("resize.json")).expect("the fixture is readable");
        let cases: Vec<Case> = serde_json::from_str(&text).expect("the fixture parses");
        for case in cases {
            let Case {
                width,
                height,
                patch_size,
                max_soft_tokens,
                resized,
                crc,
            } = case;
            let processor = ImageProcessor {
                max_soft_tokens,
                ..ImageProcessor::new(patch_size, 3)
            };
            let patches = processor
                .patches(&pattern(width, height))
                .unwrap_or_else(|error| panic!("{width} x {height}: {error}"));
            let found = [patches.columns * patch_size, patches.rows * patch_size];
            assert_eq!(found, resized, "{width} x {height}");
            assert_eq!(crc32(&patches.rgb), crc, "{width} x {height}");
        }
    }
}
