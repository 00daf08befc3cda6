//! The GGUF container. A file holds metadata keys with values, then the positions of the tensors, and then the tensors'
//! bytes.
//!
//! The parser does not trust a file. A wrong count in the file cannot make the parser allocate much memory. Before the
//! parser reads at a position, the parser checks the position.

use super::{
    metadata::{Kind, Value},
    types::Type,
};
use std::{collections::BTreeMap, ops::Range};

/// The magic bytes at the beginning of a file.
pub(super) const MAGIC: &[u8] = b"GGUF";
/// The supported versions of the format. Version 1, which stores lengths in 32 bits, is not supported, because no Gemma
/// file has this version.
const VERSIONS: [u32; 2] = [2, 3];
/// The limits on the number of keys (`MOST_KEYS`) and on the number of tensors (`MOST_TENSORS`) in a file. Real files
/// have about fifty keys, and far fewer tensors than `MOST_TENSORS`.
const MOST_KEYS: u64 = 1 << 12;
const MOST_TENSORS: u64 = 1 << 16;
/// The limit on the length of a key or of a tensor's name, in bytes.
const LONGEST_NAME: u64 = 1 << 12;
/// The limit on the number of dimensions of a tensor. ggml has the same limit.
const MOST_DIMENSIONS: u32 = 4;
/// The alignment of tensors in bytes, for files that give no alignment.
const ALIGNMENT: u64 = 32;

/// The parsed header of a file.
#[derive(Debug)]
pub(super) struct Container {
    pub values: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, Tensor>,
}

/// The type, shape and position of a tensor.
#[derive(Debug, PartialEq)]
pub(super) struct Tensor {
    pub kind: Type,
    /// The size of each dimension, from the slowest-varying to the fastest-varying one. The file stores the sizes in
    /// the reverse order.
    pub shape: Vec<usize>,
    /// The range of the tensor's bytes in the file. If this crate does not know the block size of the tensor's type,
    /// the range is empty.
    pub place: Range<usize>,
}

impl Container {
    /// Reads a file's header, and checks that every tensor lies within the file.
    ///
    /// # Errors
    /// Returns a text that names the key or tensor at fault.
    pub fn read(file: &[u8]) -> Result<Self, String> {
        let mut reader = Reader {
            file,
            at: 0,
            within: "its header".into(),
        };
        let (keys, tensors) = reader.header()?;
        let mut values = BTreeMap::new();
        for _ in 0..keys {
            reader.within = format!("key {} of {keys}", values.len() + 1);
            let key = reader.name()?;
            reader.within = format!("{key:?}");
            let value = reader.value()?;
            if values.insert(key.clone(), value).is_some() {
                return Err(format!("has the key {key:?} twice"));
            }
        }
        let alignment = alignment(&values)?;
        let mut infos = Vec::new();
        for _ in 0..tensors {
            reader.within = format!("the place of tensor {} of {tensors}", infos.len() + 1);
            infos.push(reader.info()?);
        }
        let data = (reader.at as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for info in infos {
            let name = info.name.clone();
            let tensor = info.place(data, alignment, file.len() as u64)?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(format!("has the tensor {name:?} twice"));
            }
        }
        Ok(Self { values, tensors })
    }
}

fn alignment(values: &BTreeMap<String, Value>) -> Result<u64, String> {
    match values.get("general.alignment") {
        None => Ok(ALIGNMENT),
        // The alignment must be a power of two, as in ggml. The limit of 2^30 excludes enormous gaps before the tensors.
        Some(Value::Unsigned(alignment))
            if alignment.is_power_of_two() && *alignment <= 1 << 30 =>
        {
            Ok(*alignment)
        }
        Some(_) => Err("general.alignment is not a power of two up to 2^30".into()),
    }
}

/// The entry of a tensor in the file's header.
struct Info {
    name: String,
    kind: u32,
    /// The size of each dimension, from the fastest-varying to the slowest-varying one.
    dimensions: Vec<u64>,
    offset: u64,
}

impl Info {
    /// Checks this entry and returns the tensor that it describes. `len` is the file's size in bytes. `data` is the
    /// offset in the file at which the tensors' bytes begin.
    fn place(self, data: u64, alignment: u64, len: u64) -> Result<Tensor, String> {
        let name = &self.name;
        let kind = Type(self.kind);
        let mut shape = Vec::new();
        for dimension in self.dimensions.iter().rev() {
            match usize::try_from(*dimension) {
                Ok(size) if size > 0 => shape.push(size),
                _ => return Err(format!("{name:?} has a dimension of {dimension}")),
            }
        }
        let Some(encoding) = kind.encoding() else {
            return Ok(Tensor {
                kind,
                shape,
                place: 0..0,
            });
        };
        let block = encoding.block_numbers() as u64;
        if !self.dimensions[0].is_multiple_of(block) {
            return Err(format!(
                "{name:?} has rows of {} numbers, which is not a multiple of {kind}'s block of {block}",
                self.dimensions[0]
            ));
        }
        if !self.offset.is_multiple_of(alignment) {
            return Err(format!(
                "{name:?} begins at {}, which is not a multiple of {alignment}",
                self.offset
            ));
        }
        let numbers = self
            .dimensions
            .iter()
            .try_fold(1u64, |product, size| product.checked_mul(*size));
        let place = numbers
            .and_then(|numbers| (numbers / block).checked_mul(encoding.block_bytes() as u64))
            .and_then(|bytes| {
                let start = data.checked_add(self.offset)?;
                Some((start, start.checked_add(bytes)?))
            })
            .filter(|(_, end)| *end <= len);
        match place {
            // The casts to usize lose nothing: `start` and `end` lie within the file, and the whole file is mapped into memory.
            Some((start, end)) => Ok(Tensor {
                kind,
                shape,
                place: start as usize..end as usize,
            }),
            None => Err(format!(
                "{name:?} of the shape {shape:?} in {kind} at {} is not within the file of {len} bytes",
                self.offset
            )),
        }
    }
}

/// A reader of the file's bytes, with the position at which the reader reads next.
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    /// The name of the key or tensor that is being read, for error messages.
    within: String,
}

impl<'a> Reader<'a> {
    /// Reads the header and returns the number of keys and the number of tensors.
    fn header(&mut self) -> Result<(u64, u64), String> {
        if self.take(MAGIC.len() as u64)? != MAGIC {
            return Err("does not begin with GGUF".into());
        }
        let version = self.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(match VERSIONS.contains(&version.swap_bytes()) {
                true => "is big-endian; only little-endian files are supported".into(),
                false => format!("has version {version}; supported are {VERSIONS:?}"),
            });
        }
        let (tensors, keys) = (self.u64()?, self.u64()?);
        for (what, count, most) in [
            ("tensors", tensors, MOST_TENSORS),
            ("keys", keys, MOST_KEYS),
        ] {
            if count > most {
                return Err(format!("has {count} {what}; the maximum is {most}"));
            }
        }
        Ok((keys, tensors))
    }

    fn take(&mut self, bytes: u64) -> Result<&'a [u8], String> {
        let rest = &self.file[self.at..];
        let taken = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| rest.get(..bytes));
        match taken {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(format!(
                "is not a whole GGUF file: its {} bytes end within {}",
                self.file.len(),
                self.within
            )),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a key or a tensor's name.
    fn name(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        if length > LONGEST_NAME {
            return Err(format!(
                "{} has a name of {length} bytes; the maximum is {LONGEST_NAME}",
                self.within
            ));
        }
        match std::str::from_utf8(self.take(length)?) {
            Ok(name) => Ok(name.to_owned()),
            Err(_) => Err(format!("{} has a name that is not UTF-8", self.within)),
        }
    }

    /// Reads a text and returns the range of its bytes in the file.
    fn text(&mut self) -> Result<Range<usize>, String> {
        let length = self.u64()?;
        let text = self.take(length)?;
        Ok(self.at - text.len()..self.at)
    }

    fn kind(&mut self) -> Result<Kind, String> {
        let id = self.u32()?;
        Kind::of(id).ok_or_else(|| format!("{} has the unknown type {id}", self.within))
    }

    fn value(&mut self) -> Result<Value, String> {
        match self.kind()? {
            Kind::Text => Ok(Value::Text(self.text()?)),
            Kind::List => self.list(),
            number => {
                let bytes = self.take(number.bytes())?;
                number
                    .number(bytes)
                    .ok_or_else(|| format!("{} is neither true nor false", self.within))
            }
        }
    }

    fn list(&mut self) -> Result<Value, String> {
        let kind = self.kind()?;
        let count = self.u64()?;
        let start = self.at;
        match kind {
            // Nested lists are refused. ggml does not support them either.
            Kind::List => return Err(format!("{} is a list of lists", self.within)),
            // Read the texts one by one. Even with a wrong count, the loop ends at the end of the file, because each
            // text takes at least 8 bytes.
            Kind::Text => {
                for _ in 0..count {
                    self.text()?;
                }
            }
            number => {
                self.take(count.saturating_mul(number.bytes()))?;
            }
        }
        Ok(Value::List {
            kind,
            place: start..self.at,
        })
    }

    fn info(&mut self) -> Result<Info, String> {
        let name = self.name()?;
        self.within = format!("the place of {name:?}");
        let dimensions = self.u32()?;
        if !(1..=MOST_DIMENSIONS).contains(&dimensions) {
            return Err(format!(
                "{name:?} has {dimensions} dimensions; expected 1 to {MOST_DIMENSIONS}"
            ));
        }
        Ok(Info {
            dimensions: (0..dimensions)
                .map(|_| self.u64())
                .collect::<Result<_, _>>()?,
            kind: self.u32()?,
            offset: self.u64()?,
            name,
        })
    }
}
