//! Reads llama.cpp's importance matrices: GGUF files and the older `.dat` files.

use super::container::{Container, MAGIC, Tensor};
use super::types::{Encoding, Type};
use crate::error::{Gemma4Error, read};
use burn::tensor::DType;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::Path,
};

/// The suffixes of the two tensors that a GGUF file has for each matrix: the sums of squared inputs, and the number of
/// rows in each sum.
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
/// llama.cpp's names of the fused gate and up projections of all experts, and of the gate projections alone. Both have
/// the same inputs.
const FUSED: &str = "ffn_gate_up_exps.weight";
const GATE: &str = "ffn_gate_exps.weight";

/// The mean squared input of each channel of a model's matrices, by which quantization weights its errors.
///
/// llama.cpp's program `llama-imatrix` writes such files.
///
/// ```no_run
/// use burn_gemma4::{ExportForm, ExportOptions, ImportanceMatrix, quantize_checkpoint};
///
/// let matrix = ImportanceMatrix::from_file("imatrix.gguf")?;
/// let options = ExportOptions::from(ExportForm::Q3KMedium).importance(&matrix);
/// quantize_checkpoint("gemma-4-E2B-it", "gemma-4-E2B-it-Q3_K_M.gguf", options, |_| ())?;
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone)]
pub struct ImportanceMatrix {
    /// The values of each matrix, by llama.cpp's name of the weight. The values of all experts follow one another.
    values: BTreeMap<String, Vec<f32>>,
}

impl ImportanceMatrix {
    /// Reads a GGUF file of `llama-imatrix`, or a `.dat` file of an older version. The contents decide, not the name.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, if it is neither of the two, or if a value is negative or not
    /// finite.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let file = read(path)?;
        let values = match file.starts_with(MAGIC) {
            true => gguf(&file),
            false => legacy(&file),
        };
        let malformed = |reason: String| Gemma4Error::Malformed {
            path: path.into(),
            reason,
        };
        match values.map_err(malformed)? {
            values if values.is_empty() => Err(malformed("has no importance matrix".into())),
            values => Ok(Self { values }),
        }
    }

    /// Returns the number of matrices in the file.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns true if the file has no matrix. [`from_file`](Self::from_file) refuses such files.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns the values of the tensor `name`, which has `slices` matrices with `columns` channels each.
    ///
    /// # Errors
    /// Returns a text if the number of values differs.
    pub(in crate::checkpoint) fn of_tensor(
        &self,
        name: &str,
        slices: usize,
        columns: usize,
    ) -> Result<Option<&[f32]>, String> {
        let other = || self.values.get(&name.replace(FUSED, GATE));
        match self.values.get(name).or_else(other) {
            Some(values) if values.len() != slices * columns => Err(format!(
                "has {} values for {name}; expected {slices} times {columns}. It is of another model",
                values.len()
            )),
            values => Ok(values.map(Vec::as_slice)),
        }
    }
}

impl fmt::Debug for ImportanceMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportanceMatrix")
            .field("matrices", &self.values.len())
            .finish_non_exhaustive()
    }
}

type Values = BTreeMap<String, Vec<f32>>;

/// Returns an error if a value is negative or not finite. Values stay so when they are divided by a count.
fn check(name: &str, values: &[f32]) -> Result<(), String> {
    match values
        .iter()
        .all(|value| value.is_finite() && *value >= 0.0)
    {
        true => Ok(()),
        false => Err(format!(
            "has a value for {name} that is negative or not finite; compute the matrix with other texts"
        )),
    }
}

/// Reads a GGUF file. Each sum is divided by its count. An expert without any row has the importance 1 in all channels.
fn gguf(file: &[u8]) -> Result<Values, String> {
    let container = Container::read(file)?;
    let of_tensors = container.tensors.values().map(|tensor| tensor.place.len());
    // Tensors that overlap would take more memory than the file has bytes.
    if of_tensors.sum::<usize>() > file.len() {
        return Err("has tensors that overlap".into());
    }
    let matrices: BTreeSet<&str> = container
        .tensors
        .keys()
        .filter_map(|name| name.strip_suffix(SUMS).or(name.strip_suffix(COUNTS)))
        .collect();
    if matrices.is_empty() {
        return Err("is not an importance matrix; expected tensors that end with .in_sum2".into());
    }
    let floats = |name: String| -> Result<Vec<f32>, String> {
        let tensor: &Tensor = container
            .tensors
            .get(&name)
            .ok_or_else(|| format!("lacks the tensor {name:?}"))?;
        match tensor.kind.encoding() {
            Some(Encoding::Floats(DType::F32)) => Ok(f32s(&file[tensor.place.clone()])),
            _ => Err(wrong_type(&name, tensor.kind)),
        }
    };
    let mut all = Values::new();
    for name in matrices {
        let mut values = floats(format!("{name}{SUMS}"))?;
        let counts = floats(format!("{name}{COUNTS}"))?;
        if values.len() % counts.len() != 0 {
            return Err(format!(
                "has {} sums and {} counts for {name}; the sums are not a multiple of the counts",
                values.len(),
                counts.len()
            ));
        }
        if counts
            .iter()
            .any(|count| !count.is_finite() || *count < 0.0)
        {
            return Err(format!(
                "has a count for {name} that is negative or not finite"
            ));
        }
        // An expert without any row has no sums, but what stands in their place must be numbers, too.
        check(name, &values)?;
        let columns = values.len() / counts.len();
        for (values, count) in values.chunks_exact_mut(columns).zip(counts) {
            let count = count.round();
            for value in values {
                *value = match count > 0.0 {
                    true => *value / count,
                    false => 1.0,
                };
            }
        }
        all.insert(name.into(), values);
    }
    Ok(all)
}

fn wrong_type(name: &str, kind: Type) -> String {
    format!("has the tensor {name:?} in {kind}; expected F32")
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let (floats, _) = bytes.as_chunks();
    floats
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

/// Reads a `.dat` file: the number of matrices, and for each the name, the number of calls and the values. The values
/// are divided by the number of calls. The number of chunks and the name of the text may follow.
fn legacy(file: &[u8]) -> Result<Values, String> {
    let mut rest = file;
    let mut take = |bytes: usize| -> Result<&[u8], String> {
        let (taken, left) = rest
            .split_at_checked(bytes)
            .ok_or("is neither a GGUF file nor a whole .dat file of an importance matrix")?;
        rest = left;
        Ok(taken)
    };
    let mut all = Values::new();
    let count = size(take(4)?)?;
    for _ in 0..count {
        let length = size(take(4)?)?;
        let name = std::str::from_utf8(take(length)?)
            .map_err(|_| "has a name that is not UTF-8; expected an importance matrix")?
            .to_owned();
        let calls = size(take(4)?)?;
        let length = size(take(4)?)?;
        let mut values = f32s(take(length.saturating_mul(size_of::<f32>()))?);
        check(&name, &values)?;
        if calls > 0 {
            for value in &mut values {
                *value /= calls as f32;
            }
        }
        all.insert(name, values);
    }
    Ok(all)
}

/// Reads a count of a `.dat` file.
fn size(bytes: &[u8]) -> Result<usize, String> {
    let mut four = [0; 4];
    four.copy_from_slice(bytes);
    let number = i32::from_le_bytes(four);
    usize::try_from(number).map_err(|_| {
        format!(
            "has the count {number}; expected a GGUF file or a .dat file of an importance matrix"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/gguf/moe.imatrix.gguf"
    );

    #[test]
    fn gguf_with_numbers_that_are_not_finite_is_refused() {
        let file = std::fs::read(FIXTURE).expect("the fixture is readable");
        gguf(&file).expect("the fixture is an importance matrix");
        let tensors = Container::read(&file).expect("the file is GGUF").tensors;
        for suffix in [SUMS, COUNTS] {
            let tensor = tensors.iter().find(|(name, _)| name.ends_with(suffix));
            let (_, tensor) = tensor.expect("the fixture has the tensor");
            for number in [f32::NAN, f32::INFINITY, -1.0] {
                let mut file = file.clone();
                file[tensor.place.start..][..4].copy_from_slice(&number.to_le_bytes());
                let error = gguf(&file).expect_err("the number is refused");
                assert!(error.contains("negative or not finite"), "{error}");
            }
        }
    }
}
