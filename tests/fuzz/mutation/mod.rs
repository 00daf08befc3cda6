//! Mutations of inputs. Some mutations follow the structure of the format, and others break the bytes of any format.

mod gguf;
mod json;
mod text;

use rand::{Rng, rngs::StdRng, seq::IndexedRandom};
use serde_json::Value;

/// The structure of a format's inputs, which decides how inputs are broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A JSON text.
    Json,
    /// A text with a JSON value in each line.
    JsonLines,
    /// A Jinja template.
    Template,
    /// A safetensors file: a header length in 8 bytes, a JSON header of that length, and the bytes of the tensors.
    Safetensors,
    /// A JSON text, followed by the byte [`BETWEEN`] and a file in [`Format::Safetensors`].
    JsonAndSafetensors,
    /// A GGUF file: metadata keys with values, descriptions of tensors, and the bytes of the tensors.
    Gguf,
}

/// The byte that separates the two files in an input of [`Format::JsonAndSafetensors`].
pub const BETWEEN: u8 = 0;

/// Picks a random element of `inputs`, applies one or several mutations to a copy, and returns this broken copy.
pub fn broken(format: Format, inputs: &[Vec<u8>], random: &mut StdRng) -> Vec<u8> {
    let mut input = one(inputs, random).clone();
    let mut more = true;
    while more {
        let other = one(inputs, random);
        input = match random.random_bool(0.15) {
            true => bytes(input, other, random),
            false => parts(format, input, other, random),
        };
        more = random.random_bool(0.4);
    }
    input
}

fn one<'a>(inputs: &'a [Vec<u8>], random: &mut StdRng) -> &'a Vec<u8> {
    inputs.choose(random).expect("the corpus is not empty")
}

fn parts(format: Format, input: Vec<u8>, other: &[u8], random: &mut StdRng) -> Vec<u8> {
    match format {
        Format::Json => of_json(input, other, random),
        Format::JsonLines => of_lines(&input, other, random),
        Format::Template => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            text::broken(&text(&input), &text(other), random).into_bytes()
        }
        Format::Safetensors => of_safetensors(input, other, random),
        Format::Gguf => match gguf::broken(&input, other, random) {
            Some(input) => input,
            None => bytes(input, other, random),
        },
        Format::JsonAndSafetensors => {
            let between = |input: &[u8]| input.iter().position(|byte| *byte == BETWEEN);
            let (Some(end), Some(other_end)) = (between(&input), between(other)) else {
                return bytes(input, other, random);
            };
            let (json, tensors) = (input[..end].to_vec(), input[end + 1..].to_vec());
            let (other_json, other_tensors) = (&other[..other_end], &other[other_end + 1..]);
            let (json, tensors) = match random.random_bool(0.5) {
                true => (of_json(json, other_json, random), tensors),
                false => (json, of_safetensors(tensors, other_tensors, random)),
            };
            [&json[..], &[BETWEEN], &tensors].concat()
        }
    }
}

fn of_json(input: Vec<u8>, other: &[u8], random: &mut StdRng) -> Vec<u8> {
    let (Ok(mut value), other_value) = (
        serde_json::from_slice::<Value>(&input),
        serde_json::from_slice(other).unwrap_or(Value::Null),
    ) else {
        return bytes(input, other, random);
    };
    json::break_one(&mut value, &other_value, random);
    value.to_string().into_bytes()
}

fn of_lines(input: &[u8], other: &[u8], random: &mut StdRng) -> Vec<u8> {
    let split = |input: &[u8]| -> Vec<Vec<u8>> {
        let lines = input.split(|byte| *byte == b'\n');
        lines.map(<[u8]>::to_vec).collect()
    };
    let (mut lines, other_lines) = (split(input), split(other));
    let at = random.random_range(0..lines.len());
    match random.random_range(0..6) {
        0 => drop(lines.remove(at)),
        1 => lines.insert(at, one(&other_lines, random).clone()),
        2 => lines[at].extend(b"\r"),
        _ => {
            let line = std::mem::take(&mut lines[at]);
            lines[at] = of_json(line, one(&other_lines, random), random);
        }
    }
    lines.join(&b'\n')
}

fn of_safetensors(input: Vec<u8>, other: &[u8], random: &mut StdRng) -> Vec<u8> {
    let parts = |file: &[u8]| {
        let (length, rest) = file.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (header, numbers) = rest.split_at_checked(length)?;
        Some((header.to_vec(), numbers.to_vec()))
    };
    let (Some((mut header, mut numbers)), Some((other_header, other_numbers))) =
        (parts(&input), parts(other))
    else {
        return bytes(input, other, random);
    };
    match random.random_range(0..4) {
        0 => numbers = bytes(numbers, &other_numbers, random),
        _ => header = of_json(header, &other_header, random),
    }
    let length = match random.random_range(0..12) {
        0 => json::number(random),
        1 => header.len() as u64 + random.random_range(0..4),
        _ => header.len() as u64,
    };
    [&length.to_le_bytes()[..], &header, &numbers].concat()
}

/// Removes, repeats, replaces or changes bytes of `input` without regard to their meaning. Replacement bytes come from `other`.
fn bytes(mut input: Vec<u8>, other: &[u8], random: &mut StdRng) -> Vec<u8> {
    let (from, to) = stretch(input.len(), random);
    match random.random_range(0..6) {
        0 => drop(input.drain(from..to)),
        1 => {
            let again = input[from..to].to_vec();
            input.splice(from..from, again);
        }
        2 => {
            let (start, end) = stretch(other.len(), random);
            input.splice(from..to, other[start..end].iter().copied());
        }
        3 => input.truncate(from),
        _ => {
            for byte in input[from..to].iter_mut().take(4) {
                *byte = match random.random_bool(0.5) {
                    true => *byte ^ (1 << random.random_range(0..8)),
                    false => random.random(),
                };
            }
        }
    }
    input
}

/// Returns the start and the end of a random range within `count` elements. At least seven of ten ranges have at most 16
/// elements, so that most mutations stay small.
fn stretch(count: usize, random: &mut StdRng) -> (usize, usize) {
    let from = random.random_range(0..=count);
    let most = match random.random_bool(0.7) {
        true => (count - from).min(16),
        false => count - from,
    };
    (from, from + random.random_range(0..=most))
}
