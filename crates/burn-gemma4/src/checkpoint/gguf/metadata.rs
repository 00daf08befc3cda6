//! The values of a file's keys, asked for by what they should be.

use std::{collections::BTreeMap, ops::Range};

/// A key's value. What may be long is a place in the file.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Boolean(bool),
    Text(Range<usize>),
    List { kind: Kind, place: Range<usize> },
}

/// What a value is; whole numbers by their bytes.
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

/// Kinds by their numbers in files.
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

    /// Bytes of a value; of a text or a list, that of its length.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Unsigned(bytes) | Self::Signed(bytes) => bytes,
            Self::F32 => 4,
            Self::Boolean => 1,
            Self::F64 | Self::Text | Self::List => 8,
        }
    }

    /// The number that `bytes`, which are as many as it has, stand for; nothing where they stand for none.
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
            // By its decimals: 1e-6 is to be the same from every kind of file.
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

/// A file's keys and their values.
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

    /// A whole number from 0.
    pub fn size(&self, key: &str) -> Result<Option<usize>, String> {
        self.get(key, "a whole number from 0", Value::size)
    }

    /// A number that is one for all of `count`, or a list of one for each.
    pub fn sizes(&self, key: &str, count: usize) -> Result<Option<Vec<usize>>, String> {
        let what = format!("a whole number from 0 or a list of {count}");
        self.get(key, &what, |value| match value.size() {
            Some(size) => Some(vec![size; count]),
            None => self
                .values_of(value, Value::size)
                .filter(|sizes| sizes.len() == count),
        })
    }

    /// A list of whole numbers from 0.
    pub fn list(&self, key: &str) -> Result<Option<Vec<usize>>, String> {
        self.get(key, "a list of whole numbers from 0", |value| {
            self.values_of(value, Value::size)
        })
    }

    /// A list of `count` times true or false.
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

    /// A list of texts.
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

    /// What `read` makes of each value of a list; nothing where it makes nothing of one.
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
