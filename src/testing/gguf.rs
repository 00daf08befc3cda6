//! Parses and writes GGUF files, so that tests can modify their contents.

use std::collections::BTreeMap;

/// The contents of a GGUF file: metadata and tensors.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    /// The metadata by key. Each value is stored as the id of its type, and its bytes exactly as in the file.
    pub values: BTreeMap<String, (u32, Vec<u8>)>,
    /// The tensors by name.
    pub tensors: BTreeMap<String, GgufTensor>,
}

/// A tensor of a GGUF file.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// The size of each dimension, fastest dimension first.
    pub dimensions: Vec<u64>,
    /// The id of the tensor's element type in GGML.
    pub kind: u32,
    /// The bytes of the elements, exactly as in the file.
    pub bytes: Vec<u8>,
}

/// The ids that GGUF gives to the types of metadata values.
pub mod kind {
    /// An unsigned integer in 32 bits.
    pub const U32: u32 = 4;
    /// A float in 32 bits.
    pub const F32: u32 = 6;
    /// A UTF-8 text. In the file, the text's length precedes it.
    pub const TEXT: u32 = 8;
    /// A list. In the file, the id of the element type and the number of elements precede the elements.
    pub const LIST: u32 = 9;
}

const ALIGNMENT: usize = 32;

impl Gguf {
    /// Parses a GGUF file. Returns `None` if the file is malformed.
    pub fn read(file: &[u8]) -> Option<Self> {
        let mut rest = file;
        take(&mut rest, 8)?;
        let (tensors, values) = (u64_of(&mut rest)?, u64_of(&mut rest)?);
        let mut gguf = Self::default();
        for _ in 0..values {
            let key = text(&mut rest)?;
            let kind = u32_of(&mut rest)?;
            let before = rest;
            skip(&mut rest, kind)?;
            let bytes = before[..before.len() - rest.len()].to_vec();
            gguf.values.insert(key, (kind, bytes));
        }
        let mut places = Vec::new();
        for _ in 0..tensors {
            let name = text(&mut rest)?;
            let dimensions = u32_of(&mut rest)?;
            let dimensions: Vec<u64> = (0..dimensions)
                .map(|_| u64_of(&mut rest))
                .collect::<Option<_>>()?;
            let kind = u32_of(&mut rest)?;
            places.push((u64_of(&mut rest)?, name, dimensions, kind));
        }
        places.sort();
        let header = (file.len() - rest.len()).next_multiple_of(ALIGNMENT);
        let ends: Vec<u64> = places.iter().skip(1).map(|place| place.0).collect();
        let data = file.get(header..)?;
        let ends = ends.into_iter().chain([data.len() as u64]);
        for ((start, name, dimensions, kind), end) in places.into_iter().zip(ends) {
            let bytes = data.get(start as usize..end as usize)?.to_vec();
            let tensor = GgufTensor {
                dimensions,
                kind,
                bytes,
            };
            gguf.tensors.insert(name, tensor);
        }
        Some(gguf)
    }

    /// Serializes the metadata and the tensors as a GGUF file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.values.len() as u64).to_le_bytes());
        for (key, (kind, bytes)) in &self.values {
            file.extend(text_bytes(key));
            file.extend(kind.to_le_bytes());
            file.extend(bytes);
        }
        let mut offset = 0;
        for (name, tensor) in &self.tensors {
            file.extend(text_bytes(name));
            file.extend((tensor.dimensions.len() as u32).to_le_bytes());
            file.extend(tensor.dimensions.iter().flat_map(|size| size.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(ALIGNMENT);
        }
        for tensor in self.tensors.values() {
            file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
            file.extend(&tensor.bytes);
        }
        file
    }

    /// Sets the metadata value of `key` to a text.
    pub fn set_text(&mut self, key: &str, text: &str) {
        self.values
            .insert(key.into(), (kind::TEXT, text_bytes(text)));
    }

    /// Sets the metadata value of `key` to a 32-bit unsigned integer.
    pub fn set_number(&mut self, key: &str, number: u32) {
        let bytes = number.to_le_bytes().to_vec();
        self.values.insert(key.into(), (kind::U32, bytes));
    }
}

/// Returns the bytes that a text value has in a GGUF file: the text's length, followed by the text.
pub fn text_bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    rest.split_off(..bytes)
}

fn u32_of(rest: &mut &[u8]) -> Option<u32> {
    let bytes = take(rest, 4)?.try_into().ok()?;
    Some(u32::from_le_bytes(bytes))
}

fn u64_of(rest: &mut &[u8]) -> Option<u64> {
    let bytes = take(rest, 8)?.try_into().ok()?;
    Some(u64::from_le_bytes(bytes))
}

fn text(rest: &mut &[u8]) -> Option<String> {
    let length = usize::try_from(u64_of(rest)?).ok()?;
    String::from_utf8(take(rest, length)?.to_vec()).ok()
}

/// Removes one metadata value of the type `kind` from the start of `rest`. Returns `None` if the bytes end too early or the
/// type is unknown.
fn skip(rest: &mut &[u8], kind: u32) -> Option<()> {
    let bytes = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        kind::TEXT => usize::try_from(u64_of(rest)?).ok()?,
        kind::LIST => {
            let (kind, count) = (u32_of(rest)?, u64_of(rest)?);
            for _ in 0..count {
                skip(rest, kind)?;
            }
            0
        }
        _ => return None,
    };
    take(rest, bytes).map(|_| ())
}
