//! Image files as the frames of a video: their order, and their pixels.

use super::animation_container::is_animated;
use super::decode::{decode, header};
use super::image::{Image, MEDIUM};
use super::sampling::check_pixels_of_frames;
use super::video::refused;
use crate::error::Gemma4Error;
use crate::media_file;
use std::path::{Path, PathBuf};
use std::{cmp::Ordering, fs};

/// The largest number of files in a folder of frames.
const MOST_FILES: usize = 100_000;

/// The extensions of the files that may be frames.
const EXTENSIONS: [&str; 4] = ["png", "jpg", "jpeg", "webp"];

/// Returns the image files in a folder in the order of their names. Hidden files are ignored, and other files are
/// refused.
pub(super) fn files_in(folder: &Path) -> Result<Vec<PathBuf>, Gemma4Error> {
    let io = |source| Gemma4Error::Io {
        path: folder.into(),
        source,
    };
    let malformed = |path: &Path, reason| Gemma4Error::Malformed {
        path: path.into(),
        reason,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') {
            continue;
        }
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        if !EXTENSIONS.iter().any(|one| extension == *one) || path.is_dir() {
            let reason = "is not a frame; expected a folder with PNG, JPEG and WebP files only";
            return Err(malformed(&path, reason.into()));
        }
        files.push(path);
        if files.len() > MOST_FILES {
            let reason = format!("has more than {MOST_FILES} files");
            return Err(malformed(folder, reason));
        }
    }
    match files.is_empty() {
        true => Err(malformed(folder, "has no PNG, JPEG or WebP files".into())),
        false => {
            files.sort_by(|one, other| compare(&name_of(one), &name_of(other)));
            Ok(files)
        }
    }
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Compares two names, in which digits form numbers: `frame-9.png` is before `frame-10.png`.
fn compare(one: &str, other: &str) -> Ordering {
    let (mut rest, mut rest_of_other) = (one, other);
    loop {
        let (number, after) = split_number(rest);
        let (number_of_other, after_other) = split_number(rest_of_other);
        let ordering = match number.is_empty() || number_of_other.is_empty() {
            true => {
                let (mut chars, mut chars_of_other) = (rest.chars(), rest_of_other.chars());
                let (char, char_of_other) = (chars.next(), chars_of_other.next());
                if (char, char_of_other) == (None, None) {
                    // Names such as 1.png and 01.png have equal numbers.
                    return one.cmp(other);
                }
                (rest, rest_of_other) = (chars.as_str(), chars_of_other.as_str());
                char.cmp(&char_of_other)
            }
            false => {
                (rest, rest_of_other) = (after, after_other);
                let digits = |number: &str| number.trim_start_matches('0').to_owned();
                let (number, number_of_other) = (digits(number), digits(number_of_other));
                let lengths = number.len().cmp(&number_of_other.len());
                lengths.then(number.cmp(&number_of_other))
            }
        };
        if ordering != Ordering::Equal {
            return ordering;
        }
    }
}

/// Splits a text after its leading digits.
fn split_number(text: &str) -> (&str, &str) {
    let is_other = |char: char| !char.is_ascii_digit();
    text.split_at(text.find(is_other).unwrap_or(text.len()))
}

/// Decodes files that are the frames of a video. The size of the first one limits the memory before others are decoded.
pub(super) fn frames<'a>(
    paths: impl ExactSizeIterator<Item = &'a Path>,
) -> Result<Vec<Image>, Gemma4Error> {
    let count = paths.len();
    let mut size_of_first = None;
    let images = paths.map(|path| {
        let pixels = media_file::open(path, MEDIUM, |bytes| {
            let found = header(bytes)?;
            if is_animated(bytes) {
                return Err("is an animation; expected a still image as a frame".into());
            }
            let mut size = [found.width, found.height];
            if found.is_turned {
                size.reverse();
            }
            let [width, height] = *size_of_first.get_or_insert(size);
            if size != [width, height] {
                return Err(format!(
                    "has {} x {} pixels; expected {width} x {height}, the size of the first frame",
                    size[0], size[1]
                ));
            }
            check_pixels_of_frames(size, count)?;
            decode(bytes)
        })?;
        Ok(Image::of(pixels))
    });
    images
        .collect::<Result<Vec<_>, Gemma4Error>>()
        .and_then(|images| match images.is_empty() {
            true => Err(refused("has no frames".into())),
            false => Ok(images),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compare_of_names_orders_numbers_by_value() {
        let ordered = [
            "1.png",
            "01.png",
            "2.png",
            "10.png",
            "a2b1.png",
            "a2b10.png",
            "a10b1.png",
            "b.png",
            "b1.png",
        ];
        for (index, one) in ordered.iter().enumerate() {
            for (other_index, other) in ordered.iter().enumerate() {
                let found = compare(one, other);
                // The names 1.png and 01.png differ by zeros only.
                match (index, other_index) {
                    (0, 1) => assert_eq!(found, Ordering::Greater),
                    (1, 0) => assert_eq!(found, Ordering::Less),
                    _ => assert_eq!(found, index.cmp(&other_index), "{one} {other}"),
                }
            }
        }
        let long = ["9".repeat(100), format!("1{}", "0".repeat(100))];
        assert_eq!(compare(&long[0], &long[1]), Ordering::Less);
    }
}
