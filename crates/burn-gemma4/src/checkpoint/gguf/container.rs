//! The container: keys with values, the places of tensors, and after them the tensors' bytes.
//!
//! What a file says of itself is not believed: nothing is allocated by a number that it states, every place is looked at before it is read, and
//! texts and lists stay in the file until they are asked for.

use super::{
    metadata::{Kind, Value},
    types::Type,
};
use std::{collections::BTreeMap, ops::Range};

/// What a file begins with.
pub(super) const MAGIC: &[u8] = b"GGUF";
/// The versions whose lengths are of 64 bits. The first one's, of 32, is of before there was a Gemma.
const VERSIONS: [u32; 2] = [2, 3];
/// Keys, of which files have some fifty, and tensors, of which a thousand layers have some twenty thousand.
const MOST_KEYS: u64 = 1 << 12;
const MOST_TENSORS: u64 = 1 << 16;
/// Bytes of a key or of a tensor's name.
const LONGEST_NAME: u64 = 1 << 12;
/// Dimensions, as in ggml.
const MOST_DIMENSIONS: u32 = 4;
/// Where a tensor may begin if the file does not say otherwise.
const ALIGNMENT: u64 = 32;

/// A file's header.
#[derive(Debug)]
pub(super) struct Container {
    pub values: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, Tensor>,
}

/// A tensor's place.
#[derive(Debug, PartialEq)]
pub(super) struct Tensor {
    pub kind: Type,
    /// The slowest dimension first, as everywhere but in the file.
    pub shape: Vec<usize>,
    /// Its bytes in the file; none where the bytes of a type are not known.
    pub place: Range<usize>,
}

impl Container {
    /// Reads a file's header, and checks that every tensor lies in the file.
    ///
    /// # Errors
    /// What is wrong, naming the key or tensor.
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
        // ggml asks for no more; a file's own bytes are all that a larger one could skip.
        Some(Value::Unsigned(alignment))
            if alignment.is_power_of_two() && *alignment <= 1 << 30 =>
        {
            Ok(*alignment)
        }
        Some(_) => Err("general.alignment is no power of two".into()),
    }
}

/// What the header says of a tensor.
struct Info {
    name: String,
    kind: u32,
    /// The fastest first.
    dimensions: Vec<u64>,
    offset: u64,
}

impl Info {
    /// The tensor's place in a file of `len` bytes whose tensors begin at `data`.
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
                "{name:?} has rows of {} numbers, which are no whole blocks of {block} as {kind} has them",
                self.dimensions[0]
            ));
        }
        if !self.offset.is_multiple_of(alignment) {
            return Err(format!(
                "{name:?} begins at {}, which is no multiple of {alignment}",
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
            // Within a file that is in memory.
            Some((start, end)) => Ok(Tensor {
                kind,
                shape,
                place: start as usize..end as usize,
            }),
            None => Err(format!(
                "{name:?} of the shape {shape:?} in {kind} at {} is not within the file, which has {len} bytes",
                self.offset
            )),
        }
    }
}

/// Where reading has come.
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    /// What is read, for who asks why it failed.
    within: String,
}

impl<'a> Reader<'a> {
    /// The numbers of keys and of tensors.
    fn header(&mut self) -> Result<(u64, u64), String> {
        if self.take(MAGIC.len() as u64)? != MAGIC {
            return Err("does not begin with GGUF".into());
        }
        let version = self.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(match VERSIONS.contains(&version.swap_bytes()) {
                true => "is big-endian, as no machine is that this runs on".into(),
                false => format!("is of version {version}, which is none of {VERSIONS:?}"),
            });
        }
        let (tensors, keys) = (self.u64()?, self.u64()?);
        for (what, count, most) in [
            ("tensors", tensors, MOST_TENSORS),
            ("keys", keys, MOST_KEYS),
        ] {
            if count > most {
                return Err(format!("has {count} {what}; {most} is the most"));
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

    /// A key or a tensor's name.
    fn name(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        if length > LONGEST_NAME {
            return Err(format!(
                "{} has a name of {length} bytes; {LONGEST_NAME} is the most",
                self.within
            ));
        }
        match std::str::from_utf8(self.take(length)?) {
            Ok(name) => Ok(name.to_owned()),
            Err(_) => Err(format!("{} has a name that is not UTF-8", self.within)),
        }
    }

    /// A text's place.
    fn text(&mut self) -> Result<Range<usize>, String> {
        let length = self.u64()?;
        let text = self.take(length)?;
        Ok(self.at - text.len()..self.at)
    }

    fn kind(&mut self) -> Result<Kind, String> {
        let id = self.u32()?;
        Kind::of(id)
            .ok_or_else(|| format!("{} is of the type {id}, which there is not", self.within))
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
            // As ggml has it.
            Kind::List => return Err(format!("{} is a list of lists", self.within)),
            // However many they are said to be, each is some bytes of the file.
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
                "{name:?} has {dimensions} dimensions, which are not 1 to {MOST_DIMENSIONS}"
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
