//! Writes a GGUF file of the text model. The file has the keys and tensors that llama.cpp's converter and quantizer
//! write.

use super::folder::TABLES;
use super::{Export, QuantizedCheckpoint};
use crate::checkpoint::gguf::types::Encoding;
use crate::checkpoint::gguf::writer::Planned;
use crate::checkpoint::gguf::{Gguf, names, writer};
use crate::checkpoint::save::replace;
use crate::checkpoint::source::{PORTION, Source};
use crate::config::generation::GenerationDefaults;
use crate::config::{Gemma4Config, LayerType};
use crate::error::Gemma4Error;
use crate::error::existing;
use crate::quant::blocks::BlockFormat;
use crate::quant::rows::written;
use burn::tensor::DType;
use serde_json::Value;
use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

/// The name of the tensor that holds one number for each channel pair. The number divides the rotary angle of the
/// channel pair. A divisor of 1e30 means no rotation.
const ROPE_FREQUENCIES: &str = "rope_freqs.weight";
const STANDS_STILL: f32 = 1e30;

impl Export<'_> {
    pub(super) fn write_gguf(&self, to: &Path) -> Result<QuantizedCheckpoint, Gemma4Error> {
        let values = self.values()?;
        self.refuse_other_importance()?;
        // Parse the generation defaults first, so that an error in the defaults is reported before the long write
        // begins.
        let defaults = existing(self.from, "generation_config.json")?;
        let defaults = defaults.map(GenerationDefaults::from_file).transpose()?;
        let (paths, mut tensors): (Vec<&str>, Vec<Planned>) = self.planned().into_iter().unzip();
        let divisors = self.divisors();
        if let Some(divisors) = &divisors {
            tensors.push(Planned {
                name: ROPE_FREQUENCIES.into(),
                shape: vec![divisors.len()],
                encoding: Encoding::Floats(DType::F32),
            });
        }
        let write = |partial: &Path| {
            let mut paths = paths.iter();
            let file = BufWriter::new(File::create(partial)?);
            let file = writer::write(file, &values, &tensors, |tensor, file| {
                match (paths.next(), &divisors) {
                    (Some(path), _) => self.write_parameter(path, tensor, file),
                    (None, Some(divisors)) => divisors
                        .iter()
                        .try_for_each(|divisor| file.write_all(&divisor.to_le_bytes())),
                    (None, None) => Ok(()),
                }
            })?;
            file.into_inner()?;
            if self.report.borrow().problem.is_some() {
                return Err(io::Error::other("a weight cannot be written"));
            }
            self.refuse_what_reads_otherwise(partial)
        };
        self.finish(replace(to, write))?;
        let mut written = self.written(to, self.left_out(to, defaults)?);
        for (path, shape) in &self.parameters {
            let (encoding, elements) = (self.encoding(path), shape.iter().product::<usize>());
            *written.types.entry(encoding.name()).or_default() += elements;
            let blocks = elements / encoding.block_numbers();
            written.parameter_bytes += (blocks * encoding.block_bytes()) as u64;
        }
        Ok(written)
    }

    /// Returns the tensors to write, each with its parameter's path.
    fn planned(&self) -> Vec<(&str, Planned)> {
        let plan = |(path, shape): &(String, Vec<usize>)| {
            let name = names::in_file(path, |_| false).swap_remove(0);
            Planned {
                name,
                shape: shape.clone(),
                encoding: self.encoding(path),
            }
        };
        let parameters = self.parameters.iter();
        parameters
            .map(|parameter| (parameter.0.as_str(), plan(parameter)))
            .collect()
    }

    /// Returns the encoding of a parameter in the file.
    pub(super) fn encoding(&self, path: &str) -> Encoding {
        if let Some(format) = self.format(path) {
            return Encoding::Blocks(format);
        }
        Encoding::Floats(match self.large.contains(path) {
            // A matrix that the form does not quantize keeps its dtype.
            true => match self.source(path).dtype() {
                Some(dtype @ (DType::F16 | DType::BF16)) => dtype,
                _ => DType::F32,
            },
            // Norms, scalars and routers are written in f32, because programs that read GGUF files compute with these
            // tensors in f32.
            false => DType::F32,
        })
    }

    fn write_parameter(
        &self,
        path: &str,
        tensor: &Planned,
        file: &mut dyn Write,
    ) -> io::Result<()> {
        let source = self.source(path);
        let slices = tensor.shape[0];
        let of_slice: usize = tensor.shape[1..].iter().product();
        let at_once = (PORTION / (of_slice * size_of::<f32>())).clamp(1, slices);
        for start in (0..slices).step_by(at_once) {
            let range = start..(start + at_once).min(slices);
            let bytes = match tensor.encoding {
                Encoding::Floats(dtype) => {
                    let numbers = source.slices(range, dtype);
                    if numbers.iter::<f32>().any(|number| !number.is_finite()) {
                        self.is_no_number(path);
                    }
                    numbers.into_bytes().to_vec()
                }
                Encoding::Blocks(format) => self.blocks(path, format, &source, range),
            };
            file.write_all(&bytes)?;
        }
        self.is_written(&tensor.name, source.len());
        Ok(())
    }

    /// Quantizes the slices `range` of a parameter, and returns the quantized blocks. A slice is the part of the
    /// parameter at one index of its first dimension.
    fn blocks(
        &self,
        path: &str,
        format: BlockFormat,
        source: &Source<'_>,
        range: std::ops::Range<usize>,
    ) -> Vec<u8> {
        let columns = source.shape.last().copied().unwrap_or(1);
        // The rows of an expert share a slice of the importance matrix. A matrix has only one slice.
        let rows_of_slice = match source.shape[..] {
            [_, rows, _] => rows,
            _ => usize::MAX,
        };
        let first_row = match source.shape.len() {
            3 => range.start * rows_of_slice,
            _ => range.start,
        };
        let importance = self.importance(path, &source.shape).unwrap_or_default();
        let importance = |row: usize| {
            let slice = (first_row + row) / rows_of_slice;
            importance.map(|values| &values[slice * columns..][..columns])
        };
        let numbers: Vec<f32> = source.slices(range, DType::F32).iter().collect();
        let row_bytes = columns / format.numbers() * format.bytes();
        let are_numbers = AtomicBool::new(true);
        let rows = numbers.len() / columns;
        let bytes = written(
            0..rows,
            row_bytes,
            || (),
            |row, (), bytes| {
                let numbers = &numbers[row * columns..][..columns];
                if !format.encode(numbers, importance(row), bytes) {
                    are_numbers.store(false, Ordering::Relaxed);
                }
            },
        );
        if !are_numbers.load(Ordering::Relaxed) {
            self.is_no_number(path);
        }
        bytes
    }

    /// Returns the importance of the channels of a parameter, or `None` if no importance is known.
    ///
    /// # Errors
    /// Returns a text if the importance matrix has another number of channels.
    fn importance(&self, path: &str, shape: &[usize]) -> Result<Option<&[f32]>, String> {
        let (slices, columns) = match shape {
            [slices, _, columns] => (*slices, *columns),
            _ => (1, shape.last().copied().unwrap_or(1)),
        };
        let name = names::in_file(path, |_| false).swap_remove(0);
        match self
            .options
            .importance
            .map(|matrix| matrix.of_tensor(&name, slices, columns))
        {
            // llama.cpp ignores the importance of a table with another number of channels, too.
            Some(Err(_)) if TABLES.contains(&path) => Ok(None),
            Some(importance) => importance,
            None => Ok(None),
        }
    }

    /// Returns an error if the importance matrix fits none of the quantized matrices, or has another number of channels
    /// for one of them.
    fn refuse_other_importance(&self) -> Result<(), Gemma4Error> {
        let refused = |reason| {
            Err(Gemma4Error::Argument {
                argument: "importance",
                reason,
            })
        };
        let Some(matrix) = self.options.importance else {
            return Ok(());
        };
        let mut is_used = false;
        for (path, shape) in &self.parameters {
            if self.format(path).is_some() {
                match self.importance(path, shape) {
                    Ok(values) => is_used |= values.is_some(),
                    Err(reason) => return refused(reason),
                }
            }
        }
        match is_used {
            true => Ok(()),
            false => refused(format!(
                "has {} matrices, but none of this model's; it is of another model",
                matrix.len()
            )),
        }
    }

    /// Returns the paths of the quantized matrices of the layers that the importance matrix lacks.
    pub(super) fn without_importance(&self) -> Vec<String> {
        if self.options.importance.is_none() {
            return Vec::new();
        }
        let lacks = |(path, shape): &&(String, Vec<usize>)| {
            self.format(path).is_some()
                && !TABLES.contains(&path.as_str())
                && matches!(self.importance(path, shape), Ok(None))
        };
        let lacking = self.parameters.iter().filter(lacks);
        lacking.map(|(path, _)| path.clone()).collect()
    }

    /// Returns the numbers that divide the rotary angles, one per channel pair. Returns `None` if the model has no
    /// full-attention layers.
    fn divisors(&self) -> Option<Vec<f32>> {
        let config = self.config;
        let rope = &config.global_rope;
        let rotated = rope.rotated_pairs(config.global_head_dim);
        let divisor = |pair| match pair < rotated {
            true => rope.factor as f32,
            false => STANDS_STILL,
        };
        let pairs = 0..config.global_head_dim / 2;
        let has_full = config.layer_types.contains(&LayerType::Full);
        has_full.then(|| pairs.map(divisor).collect())
    }

    /// Returns an error if the configuration in the written file differs from the source's configuration. GGUF's keys
    /// cannot express every configuration.
    fn refuse_what_reads_otherwise(&self, path: &Path) -> io::Result<()> {
        let alike = |config: &Gemma4Config| Gemma4Config {
            // Ignore differences in fields that do not change the model's outputs.
            dtype: None,
            initializer_range: 0.0,
            eos_tokens: Vec::new(),
            ..config.clone()
        };
        let found = Gguf::at(path)
            .map_err(io::Error::other)?
            .ok_or_else(|| io::Error::other("is not a GGUF file"))?
            .config()
            .map_err(io::Error::other)?;
        match alike(&found) == alike(self.config) {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "GGUF has no words for the configuration: the file would be read as {:?} instead of {:?}",
                alike(&found),
                alike(self.config)
            ))),
        }
    }

    /// Returns descriptions of everything in the source that the GGUF file lacks, such as the vision tower.
    fn left_out(
        &self,
        written: &Path,
        defaults: Option<GenerationDefaults>,
    ) -> Result<Vec<String>, Gemma4Error> {
        let json: Value = serde_json::from_str(self.json)
            .map_err(|error| Gemma4Error::Config(error.to_string()))?;
        let towers = ["vision_config", "audio_config"].into_iter();
        let towers = towers.filter(|part| json.get(part).is_some_and(|part| !part.is_null()));
        let mut left_out: Vec<String> = towers.map(|part| format!("the tower of {part}")).collect();
        let Some(expected) = defaults else {
            return Ok(left_out);
        };
        let found = match Gguf::at(written)? {
            Some(gguf) => gguf.generation_defaults()?,
            None => GenerationDefaults::default(),
        };
        let lost = |token: &&u32| !found.stop_tokens.contains(token);
        let tokens: Vec<&u32> = expected.stop_tokens.iter().filter(lost).collect();
        if !tokens.is_empty() {
            left_out.push(format!("{tokens:?} as ends of a text"));
        }
        for (name, is_set) in [
            ("the sampling", found.sampling() != expected.sampling()),
            ("stop_strings", !expected.stop_strings.is_empty()),
            ("max_new_tokens", expected.max_new_tokens.is_some()),
            ("max_length", expected.max_length.is_some()),
            ("min_new_tokens", expected.min_new_tokens.is_some()),
            (
                "min_length",
                expected.min_length.is_some_and(|most| most > 0),
            ),
            (
                "begin_suppress_tokens",
                !expected.begin_suppress_tokens.is_empty(),
            ),
        ] {
            left_out.extend(is_set.then(|| format!("{name} of generation_config.json")));
        }
        Ok(left_out)
    }
}
