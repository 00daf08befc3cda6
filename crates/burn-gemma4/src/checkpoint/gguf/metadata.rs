//! The values of a file's metadata keys. Each method reads a value as the type that the caller expects.

use std::{collections::BTreeMap, ops::Range};

/// The value of a metadata key. Numbers and booleans are decoded. A text or a list is represented by the range of its
/// bytes in the file.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Boolean(bool),
    Text(Range<usize>),
    List { kind: Kind, place: Range<usize> },
}

/// The type of a metadata value. An integer type includes the size of the integer in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Unsigned(u64),
    Signed(u64),
    F32,
    F64,
    Boolean,
    Text,
    List,
}

/// The types of metadata values. A type's index in this array is the type's id in files.
const KINDS: [Kind; 13] = {
    use Kind::{Boolean, F32, F64, List, Signed, Text, Unsigned};
    [
        Unsigned(1),
        Signed(1),
        Unsigned(2),
        Signed(2),
        Unsigned(4),
        Signed(4),
        F32,
        Boolean,
        Text,
        List,
        Unsigned(8),
        Signed(8),
        F64,
    ]
};

impl Kind {
    pub fn of(id: u32) -> Option<Self> {
        KINDS.get(id as usize).copied()
    }

    /// Returns the size of a value of this type in bytes. For a text or a list, the function returns the size of the
    /// field that holds the length.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Unsigned(bytes) | Self::Signed(bytes) => bytes,
            Self::F32 => 4,
            Self::Boolean => 1,
            Self::F64 | Self::Text | Self::List => 8,
        }
    }

    /// Decodes `bytes` as a number or a boolean of this type. Returns `None` for texts and lists, and if the bytes are
    /// not a valid boolean.
    pub fn number(self, bytes: &[u8]) -> Option<Value> {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(eight);
        match self {
            Self::Unsigned(_) => Some(Value::Unsigned(bits)),
            Self::Signed(_) => {
                let unused = 64 - 8 * bytes.len();
                Some(Value::Signed((bits << unused) as i64 >> unused))
            }
            // Print the f32 as a decimal number and parse it as an f64, so that 1e-6 becomes the same f64 as in a JSON
            // file.
            Self::F32 => {
                let decimals = f32::from_bits(bits as u32).to_string();
                Some(Value::Float(decimals.parse().ok()?))
            }
            Self::F64 => Some(Value::Float(f64::from_bits(bits))),
            Self::Boolean if bits < 2 => Some(Value::Boolean(bits == 1)),
            Self::Boolean | Self::Text | Self::List => None,
        }
    }
}

/// A file's keys with their values.
#[derive(Clone, Copy)]
pub(super) struct Metadata<'a> {
    pub file: &'a [u8],
    pub values: &'a BTreeMap<String, Value>,
}

impl<'a> Metadata<'a> {
    fn get<T>(
        &self,
        key: &str,
        what: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let wrong = || format!("{key} is not {what}");
        self.values
            .get(key)
            .map(|value| read(value).ok_or_else(wrong))
            .transpose()
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        self.get(key, "a text in UTF-8", |value| match value {
            Value::Text(place) => self.utf8(place),
            _ => None,
        })
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, String> {
        self.get(key, "a number", |value| match value {
            Value::Float(number) => Some(*number),
            _ => None,
        })
    }

    /// Returns the value of `key` as a non-negative integer.
    pub fn size(&self, key: &str) -> Result<Option<usize>, String> {
        self.get(key, "a whole number of at least 0", Value::size)
    }

    /// Returns a list of `count` non-negative integers. If the file has one integer instead of a list, the function
    /// repeats this integer.
    pub fn sizes(&self, key: &str, count: usize) -> Result<Option<Vec<usize>>, String> {
        let what = format!("a whole number of at least 0 or a list of {count}");
        self.get(key, &what, |value| match value.size() {
            Some(size) => Some(vec![size; count]),
            None => self
                .values_of(value, Value::size)
                .filter(|sizes| sizes.len() == count),
        })
    }

    /// Returns a list of non-negative integers.
    pub fn list(&self, key: &str) -> Result<Option<Vec<usize>>, String> {
        self.get(key, "a list of whole numbers of at least 0", |value| {
            self.values_of(value, Value::size)
        })
    }

    /// Returns a list of `count` booleans.
    pub fn booleans(&self, key: &str, count: usize) -> Result<Option<Vec<bool>>, String> {
        let what = format!("a list of {count} times true or false");
        self.get(key, &what, |value| {
            self.values_of(value, |value| match value {
                Value::Boolean(boolean) => Some(*boolean),
                _ => None,
            })
            .filter(|booleans| booleans.len() == count)
        })
    }

    /// Returns a list of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, String> {
        self.get(key, "a list of texts in UTF-8", |value| match value {
            Value::List {
                kind: Kind::Text,
                place,
            } => {
                let mut texts = Vec::new();
                let mut at = place.start;
                while at < place.end {
                    let (length, _) = self.file.get(at..)?.split_first_chunk()?;
                    let start = at + length.len();
                    at = start + usize::try_from(u64::from_le_bytes(*length)).ok()?;
                    texts.push(self.utf8(&(start..at))?);
                }
                Some(texts)
            }
            _ => None,
        })
    }

    fn utf8(&self, place: &Range<usize>) -> Option<&'a str> {
        std::str::from_utf8(self.file.get(place.clone())?).ok()
    }

    /// Decodes a list of numbers or booleans, and applies `read` to each element. Returns `None` if the value is not
    /// such a list, or if `read` returns `None` for an element.
    fn values_of<T>(&self, list: &Value, read: fn(&Value) -> Option<T>) -> Option<Vec<T>> {
        match list {
            Value::List {
                kind: Kind::Text | Kind::List,
                ..
            } => None,
            Value::List { kind, place } => self
                .file
                .get(place.clone())?
                .chunks_exact(kind.bytes() as usize)
                .map(|bytes| read(&kind.number(bytes)?))
                .collect(),
            _ => None,
        }
    }
}

impl Value {
    fn size(&self) -> Option<usize> {
        match self {
            Self::Unsigned(number) => usize::try_from(*number).ok(),
            Self::Signed(number) => usize::try_from(*number).ok(),
            _ => None,
        }
    }
}
