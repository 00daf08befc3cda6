//! Reads matrices that compressed-tensors has packed. Each packed matrix is stored as several tensors.

use super::{
    files::{Entry, TensorFiles},
    floats8,
    source::{Source, burn_dtype},
};
use crate::error::TensorProblem;
use crate::quant::packed::{Packed, Scheme};
use crate::quant::scheme::WeightScheme;
use burn::tensor::DType;
use safetensors::Dtype;

/// The last part of the name of a tensor that stores a matrix in unpacked form. A packed matrix is stored as several
/// tensors. The last parts of these tensors' names are in [`PARTS`].
pub(super) const WHOLE: &str = "weight";
pub(super) const WORDS: &str = "weight_packed";
pub(super) const SCALES: &str = "weight_scale";
pub(super) const SHAPE: &str = "weight_shape";
const ZERO_POINTS: &str = "weight_zero_point";
pub(super) const PARTS: [&str; 4] = [WORDS, SCALES, SHAPE, ZERO_POINTS];

/// Returns the names of the tensors that store the packed matrix `name`, or an empty list if the matrix is not packed.
pub(super) fn names(files: &TensorFiles, name: &str) -> Vec<String> {
    let Some(module) = name.strip_suffix(WHOLE) else {
        return Vec::new();
    };
    match files.get(&format!("{module}{WORDS}")) {
        Some(_) => PARTS
            .into_iter()
            .chain(floats8::PARTS)
            .map(|part| format!("{module}{part}"))
            .filter(|name| files.get(name).is_some())
            .collect(),
        None => Vec::new(),
    }
}

/// Reads the packed matrix `name`. The matrix's tensors must match one of the quantization schemes in the checkpoint's
/// configuration.
pub(super) fn get<'a>(
    files: &'a TensorFiles,
    schemes: &[WeightScheme],
    name: &str,
) -> Result<Source<'a>, TensorProblem> {
    let module = Module::of(files, name);
    // Words of 32 bits have integer codes, and bytes have 4-bit floats.
    if module.entry(WORDS)?.dtype == Dtype::U8 {
        return floats8::fp4(files, schemes, name);
    }
    let schemes: Vec<Scheme> = schemes
        .iter()
        .filter_map(|scheme| match scheme {
            WeightScheme::Packed(scheme) => Some(*scheme),
            _ => None,
        })
        .collect();
    let packed = module.packed(&schemes)?;
    Ok(Source::packed(packed))
}

/// A module in the files. The module's tensors store one packed matrix.
pub(super) struct Module<'a, 'name> {
    files: &'a TensorFiles,
    name: &'name str,
}

impl<'a, 'name> Module<'a, 'name> {
    /// Returns the module whose matrix is called `name`.
    pub fn of(files: &'a TensorFiles, name: &'name str) -> Self {
        let name = name.strip_suffix(WHOLE).unwrap_or(name);
        Self { files, name }
    }

    fn packed(&self, schemes: &[Scheme]) -> Result<Packed<'a>, TensorProblem> {
        let [rows, columns] = self.shape()?;
        let words = self.integers(WORDS, Dtype::I32)?;
        let scales = self.entry(SCALES)?;
        let dtype = self.dtype_of_scales(scales, WORDS)?;
        let zero_points = match self.files.get(&self.tensor(ZERO_POINTS)) {
            Some(_) => Some(self.integers(ZERO_POINTS, Dtype::I32)?),
            None => None,
        };
        let fits = |scheme: &&Scheme| {
            let groups = scheme.groups(columns);
            let zero_points_of = |groups| match scheme.is_symmetric {
                true => None,
                false => Some([scheme.words(rows), groups]),
            };
            groups.is_some_and(|groups| {
                words.shape == [rows, scheme.words(columns)]
                    && scales.shape == [rows, groups]
                    && zero_points.map(|entry| &entry.shape[..])
                        == zero_points_of(groups).as_ref().map(|shape| &shape[..])
            })
        };
        let scheme = schemes.iter().find(fits).ok_or_else(|| {
            self.problem(WORDS, format!(
                "its shape is {:?}, {WORDS} is {:?}, {SCALES} {:?} and {ZERO_POINTS} {:?}, which fits no scheme of quantization_config",
                [rows, columns],
                words.shape,
                scales.shape,
                zero_points.map(|entry| &entry.shape),
            ))
        })?;
        Ok(Packed {
            scheme: *scheme,
            rows,
            columns,
            words: self.files.bytes(words),
            scales: self.files.bytes(scales),
            dtype,
            zero_points: zero_points.map(|entry| self.files.bytes(entry)),
        })
    }

    /// Reads the number of rows and the number of columns of the matrix.
    fn shape(&self) -> Result<[usize; 2], TensorProblem> {
        let entry = self.integers(SHAPE, Dtype::I64)?;
        let (sizes, _) = self.files.bytes(entry).as_chunks::<8>();
        let sizes: Vec<usize> = sizes
            .iter()
            .filter_map(|bytes| usize::try_from(i64::from_le_bytes(*bytes)).ok())
            // Refuse sizes above 2^40, because a matrix of such a size would not fit into the memory of any machine.
            .filter(|size| (1..=1 << 40).contains(size))
            .collect();
        match sizes[..] {
            [rows, columns] => Ok([rows, columns]),
            _ => Err(self.problem(WORDS, format!("{SHAPE} does not have two valid sizes"))),
        }
    }

    /// Returns the dtype of a matrix's scales. `part` is the tensor that an error names.
    pub fn dtype_of_scales(&self, scales: &Entry, part: &str) -> Result<DType, TensorProblem> {
        match burn_dtype(scales.dtype) {
            Some(dtype) if dtype != DType::F64 => Ok(dtype),
            _ => Err(self.problem(part, format!("{SCALES} is in {:?}", scales.dtype))),
        }
    }

    fn integers(&self, part: &str, dtype: Dtype) -> Result<&'a Entry, TensorProblem> {
        let entry = self.entry(part)?;
        match entry.dtype == dtype {
            true => Ok(entry),
            false => Err(self.problem(
                WORDS,
                format!("{part} is in {:?}, not in {dtype:?}", entry.dtype),
            )),
        }
    }

    pub fn entry(&self, part: &str) -> Result<&'a Entry, TensorProblem> {
        let name = self.tensor(part);
        self.files.get(&name).ok_or(TensorProblem::Missing { name })
    }

    fn tensor(&self, part: &str) -> String {
        format!("{}{part}", self.name)
    }

    /// Returns the problem of the module's tensor `part`.
    pub fn problem(&self, part: &str, reason: String) -> TensorProblem {
        TensorProblem::Packing {
            name: self.tensor(part),
            reason,
        }
    }
}
