//! Mutations of GGUF files that change a metadata value or a tensor.

use super::{bytes, json};
use attention_workspace::testing::gguf::Gguf;
use rand::{Rng, rngs::StdRng, seq::IteratorRandom};

/// The exclusive upper bound of a random tensor type. The bound is the number of known types plus one, so that an
/// unknown type is also drawn.
const TYPES: u32 = 43;

/// Returns a copy of `input` with one broken metadata value or tensor. The replacement may be a value or a tensor of
/// the file `other`. Returns `None` if `input` is not a readable GGUF file.
pub fn broken(input: &[u8], other: &[u8], random: &mut StdRng) -> Option<Vec<u8>> {
    let mut gguf = Gguf::read(input)?;
    let other = Gguf::read(other).unwrap_or_default();
    match random.random_bool(0.6) {
        true => break_value(&mut gguf, &other, random)?,
        false => break_tensor(&mut gguf, &other, random)?,
    }
    Some(gguf.to_bytes())
}

fn break_value(gguf: &mut Gguf, other: &Gguf, random: &mut StdRng) -> Option<()> {
    let key = gguf.values.keys().choose(random)?.clone();
    match random.random_range(0..6) {
        0 => drop(gguf.values.remove(&key)),
        1 => drop(
            gguf.values
                .insert(key.clone(), other.values.get(&key)?.clone()),
        ),
        2 => {
            let value = other.values.values().choose(random)?.clone();
            gguf.values.insert(key, value);
        }
        3 => gguf.values.get_mut(&key)?.0 = random.random_range(0..14),
        4 => {
            // The mutation overwrites eight bytes of the metadata value, from byte 0 or from byte 4. A number or the length
            // of a text starts at byte 0. The element count of a list starts at byte 4.
            let value = &mut gguf.values.get_mut(&key)?.1;
            let number = json::number(random).to_le_bytes();
            let start = if value.len() > 12 && random.random_bool(0.5) {
                4
            } else {
                0
            };
            let end = value.len().min(start + number.len());
            value[start..end].copy_from_slice(&number[..end - start]);
        }
        _ => {
            let value = &mut gguf.values.get_mut(&key)?.1;
            *value = bytes(std::mem::take(value), &[], random);
        }
    }
    Some(())
}

fn break_tensor(gguf: &mut Gguf, other: &Gguf, random: &mut StdRng) -> Option<()> {
    let name = gguf.tensors.keys().choose(random)?.clone();
    match random.random_range(0..7) {
        0 => drop(gguf.tensors.remove(&name)),
        1 => drop(
            gguf.tensors
                .insert(name.clone(), other.tensors.get(&name)?.clone()),
        ),
        2 => {
            let tensor = gguf.tensors.remove(&name)?;
            let name = other.tensors.keys().choose(random)?.clone();
            gguf.tensors.insert(name, tensor);
        }
        3 => gguf.tensors.get_mut(&name)?.kind = random.random_range(0..TYPES),
        4 => {
            let dimensions = &mut gguf.tensors.get_mut(&name)?.dimensions;
            *dimensions.iter_mut().choose(random)? = json::number(random);
        }
        5 => {
            let dimensions = &mut gguf.tensors.get_mut(&name)?.dimensions;
            match random.random_bool(0.5) {
                true => drop(dimensions.pop()),
                false => dimensions.push(random.random_range(0..3)),
            }
        }
        _ => {
            let tensor = gguf.tensors.get_mut(&name)?;
            tensor.bytes = bytes(std::mem::take(&mut tensor.bytes), &[], random);
        }
    }
    Some(())
}
