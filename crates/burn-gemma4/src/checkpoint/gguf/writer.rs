//! Writes a GGUF file. The file holds keys with values, then the positions of the tensors, and then the tensors' bytes.

use super::{container::MAGIC, types::Encoding};
use std::io::{self, Write};

/// The version of the format that this crate writes.
const VERSION: u32 = 3;
/// The alignment of tensors in bytes.
const ALIGNMENT: usize = 32;
/// The type id of a list.
const LIST: u32 = 9;

/// The value of a metadata key in the written file. llama.cpp expects each key's value in one of these types.
pub(in crate::checkpoint) enum Written {
    U32(u32),
    I32(i32),
    F32(f32),
    Boolean(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Booleans(Vec<bool>),
}

/// The name, shape and encoding of a tensor to write.
pub(in crate::checkpoint) struct Planned {
    pub name: String,
    /// The size of each dimension, from the slowest-varying to the fastest-varying one.
    pub shape: Vec<usize>,
    pub encoding: Encoding,
}

impl Planned {
    /// Returns the number of bytes of the tensor in the file.
    pub fn bytes(&self) -> usize {
        let numbers: usize = self.shape.iter().product();
        numbers / self.encoding.block_numbers() * self.encoding.block_bytes()
    }
}

impl Written {
    fn kind(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::I32(_) | Self::I32s(_) => 5,
            Self::F32(_) | Self::F32s(_) => 6,
            Self::Boolean(_) | Self::Booleans(_) => 7,
            Self::Text(_) | Self::Texts(_) => 8,
        }
    }

    fn write(&self, file: &mut impl Write) -> io::Result<()> {
        let mut list = |count: usize| {
            file.write_all(&LIST.to_le_bytes())?;
            file.write_all(&self.kind().to_le_bytes())?;
            file.write_all(&(count as u64).to_le_bytes())
        };
        match self {
            Self::Texts(values) => list(values.len())?,
            Self::I32s(values) => list(values.len())?,
            Self::F32s(values) => list(values.len())?,
            Self::Booleans(values) => list(values.len())?,
            _ => file.write_all(&self.kind().to_le_bytes())?,
        }
        match self {
            Self::U32(value) => file.write_all(&value.to_le_bytes()),
            Self::I32(value) => file.write_all(&value.to_le_bytes()),
            Self::F32(value) => file.write_all(&value.to_le_bytes()),
            Self::Boolean(value) => file.write_all(&[u8::from(*value)]),
            Self::Text(value) => text(file, value),
            Self::Texts(values) => values.iter().try_for_each(|value| text(file, value)),
            Self::I32s(values) => all(file, values, |value| value.to_le_bytes()),
            Self::F32s(values) => all(file, values, |value| value.to_le_bytes()),
            Self::Booleans(values) => all(file, values, |value| [u8::from(*value)]),
        }
    }
}

fn all<T, const N: usize>(
    file: &mut impl Write,
    values: &[T],
    bytes: impl Fn(&T) -> [u8; N],
) -> io::Result<()> {
    values
        .iter()
        .try_for_each(|value| file.write_all(&bytes(value)))
}

fn text(file: &mut impl Write, text: &str) -> io::Result<()> {
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(text.as_bytes())
}

/// Writes a file with the metadata `values` and the tensors `tensors`. The function calls `write` once for each tensor,
/// in order. Each call must write exactly the tensor's bytes.
pub(in crate::checkpoint) fn write<W: Write>(
    file: W,
    values: &[(String, Written)],
    tensors: &[Planned],
    mut write: impl FnMut(&Planned, &mut dyn Write) -> io::Result<()>,
) -> io::Result<W> {
    let mut file = Counted { file, at: 0 };
    file.write_all(MAGIC)?;
    file.write_all(&VERSION.to_le_bytes())?;
    file.write_all(&(tensors.len() as u64).to_le_bytes())?;
    file.write_all(&(values.len() as u64).to_le_bytes())?;
    for (key, value) in values {
        text(&mut file, key)?;
        value.write(&mut file)?;
    }
    let mut offset = 0;
    for tensor in tensors {
        text(&mut file, &tensor.name)?;
        file.write_all(&(tensor.shape.len() as u32).to_le_bytes())?;
        for size in tensor.shape.iter().rev() {
            file.write_all(&(*size as u64).to_le_bytes())?;
        }
        file.write_all(&tensor.encoding.id().to_le_bytes())?;
        file.write_all(&(offset as u64).to_le_bytes())?;
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    for tensor in tensors {
        file.align()?;
        let start = file.at;
        write(tensor, &mut file)?;
        assert_eq!(file.at - start, tensor.bytes(), "{}", tensor.name);
    }
    // The last tensor is padded to the alignment too, as in files that ggml's programs write.
    file.align()?;
    Ok(file.file)
}

/// A writer that counts the bytes that it has written.
struct Counted<W> {
    file: W,
    at: usize,
}

impl<W: Write> Counted<W> {
    fn align(&mut self) -> io::Result<()> {
        let rest = self.at.next_multiple_of(ALIGNMENT) - self.at;
        self.write_all(&[0; ALIGNMENT][..rest])
    }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.at += written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
