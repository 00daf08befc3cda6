//! Mutations of JSON texts that change, replace or remove a value.

use rand::{Rng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Map, Number, Value, json};

/// Numbers at the limits of integer types and of buffer sizes, where overflows occur.
const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    256,
    1023,
    1 << 16,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    10_000_000_000_000,
    1 << 53,
    i64::MAX as u64,
    u64::MAX,
];
const FRACTIONS: &[f64] = &[-1.0, -0.5, 0.0, 1e-300, 0.5, 1e13, 1e38, 1e300];
const TEXTS: &[&str] = &[
    "",
    " ",
    "a",
    "▁",
    "\u{0}",
    "é\u{301}",
    "../model.safetensors",
    "full_attention",
    "F64",
    "<bos>",
    "\\p{L}+|(a*)*b",
    "assistant",
];
/// The exclusive upper bound of the number of lists that a mutation nests around a value. serde_json accepts a depth of
/// at most 128. The bound is larger, so that the refusal of deeper values is tested too.
const DEEPEST: usize = 140;

/// Returns a random element of [`NUMBERS`], which are numbers at the limits of types or buffers.
pub fn number(random: &mut StdRng) -> u64 {
    *NUMBERS.choose(random).expect("NUMBERS is not empty")
}

/// Breaks one random value in `root`. A broken value may be replaced by a value of `other`.
pub fn break_one(root: &mut Value, other: &Value, random: &mut StdRng) {
    let place = random.random_range(0..count(root));
    let value = nth(root, &mut place.clone()).expect("the index is within the values");
    match random.random_range(0..10) {
        0..=3 => change(value, random),
        4 | 5 => *value = any(random),
        6 | 7 => {
            let mut from = other.clone();
            let place = random.random_range(0..count(&from));
            *value = nth(&mut from, &mut place.clone())
                .expect("the index is within the values")
                .take();
        }
        8 => {
            let depth = random.random_range(1..DEEPEST);
            *value = (0..depth).fold(value.take(), |inner, _| json!([inner]));
        }
        _ => *value = json!({ text(random): value.take() }),
    }
}

/// Counts the values in `value`, including `value` and all nested values.
fn count(value: &Value) -> usize {
    let inner: usize = match value {
        Value::Array(values) => values.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    };
    1 + inner
}

/// Returns the value that follows the first `left` values in depth-first order, or `None` if there are too few values.
/// `left` is decremented for each value that is skipped.
fn nth<'a>(value: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(values) => values.iter_mut().find_map(|value| nth(value, left)),
        Value::Object(fields) => fields.values_mut().find_map(|value| nth(value, left)),
        _ => None,
    }
}

/// Changes a value to another value of the same kind, for example a number to another number. Null becomes a value of any kind.
fn change(value: &mut Value, random: &mut StdRng) {
    match value {
        Value::Null => *value = any(random),
        Value::Bool(is_true) => *is_true = !*is_true,
        Value::Number(old) => {
            let near = old.as_i64().filter(|_| random.random_bool(0.4));
            *value = match near {
                Some(old) => json!(old.wrapping_add(random.random_range(-3..=3))),
                None => any_number(random),
            };
        }
        Value::String(old) => *old = changed(old, random),
        Value::Array(values) => change_array(values, random),
        Value::Object(fields) => change_object(fields, random),
    }
}

fn change_array(values: &mut Vec<Value>, random: &mut StdRng) {
    let at = random.random_range(0..=values.len());
    match values.get(at).cloned() {
        None => values.push(any(random)),
        Some(value) => match random.random_range(0..4) {
            0 => drop(values.remove(at)),
            1 => values.insert(at, value),
            2 => values.truncate(at),
            _ => {
                let other = random.random_range(0..values.len());
                values.swap(at, other);
            }
        },
    }
}

fn change_object(fields: &mut Map<String, Value>, random: &mut StdRng) {
    let names: Vec<String> = fields.keys().cloned().collect();
    let (Some(name), Some(other)) = (names.choose(random), names.choose(random)) else {
        fields.insert(text(random), any(random));
        return;
    };
    let value = fields.remove(name).unwrap_or_default();
    match random.random_range(0..4) {
        0 => (),
        1 => drop(fields.insert(changed(name, random), value)),
        2 => {
            fields.insert(changed(name, random), value.clone());
            fields.insert(name.clone(), value);
        }
        _ => {
            let swapped = fields.insert(other.clone(), value).unwrap_or_default();
            fields.insert(name.clone(), swapped);
        }
    }
}

fn changed(text: &str, random: &mut StdRng) -> String {
    let mut characters: Vec<char> = text.chars().collect();
    let at = random.random_range(0..=characters.len());
    match random.random_range(0..5) {
        0 => characters.truncate(at),
        1 => {
            let more: Vec<char> = self::text(random).chars().collect();
            characters.splice(at..at, more);
        }
        2 if at < characters.len() => drop(characters.remove(at)),
        3 if at < characters.len() => {
            // The character is replaced by its successor in Unicode, which turns every digit except 9 into another digit.
            let next = u32::from(characters[at]) + 1;
            characters[at] = char::from_u32(next).unwrap_or('\u{FFFD}');
        }
        _ => return self::text(random),
    }
    characters.into_iter().collect()
}

fn text(random: &mut StdRng) -> String {
    match random.random_range(0..12) {
        0 => "a".repeat(random.random_range(1..5000)),
        1 => number(random).to_string(),
        _ => TEXTS
            .choose(random)
            .expect("TEXTS is not empty")
            .to_string(),
    }
}

fn any_number(random: &mut StdRng) -> Value {
    match random.random_range(0..4) {
        0 => json!(*FRACTIONS.choose(random).expect("FRACTIONS is not empty")),
        1 => json!((number(random) as i64).wrapping_neg()),
        _ => Value::Number(Number::from(number(random))),
    }
}

fn any(random: &mut StdRng) -> Value {
    match random.random_range(0..9) {
        0 => Value::Null,
        1 => json!(random.random_bool(0.5)),
        2 => json!(text(random)),
        3 => json!([]),
        4 => json!({}),
        5 => json!([any_number(random), any_number(random)]),
        _ => any_number(random),
    }
}
