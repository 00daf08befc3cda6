//! Reads the matrices and the activation scales of Google's mobile checkpoints, whose `quant_method` is "gemma". Each
//! matrix is stored as several tensors.

use super::files::{Entry, TensorFiles};
use super::packed::{SCALES, WHOLE};
use super::source::Source;
use crate::config::{mobile::MobileScheme, quantization::QuantizationSchemes};
use crate::error::TensorProblem;
use crate::model::layer::ActivationScales;
use crate::quant::mobile::Mobile;
use crate::quant::packed::read_float;
use burn::tensor::DType;
use safetensors::Dtype;

/// The last parts of the names of an embedding table's tensors: the codes, and the scales.
const EMBEDDING: &str = "embedding_quantized";
const EMBEDDING_SCALES: &str = "embedding_scale";
/// The last parts of the names of a linear layer's scales of activations.
const INPUT_SCALE: &str = "input_activation_scale";
const OUTPUT_SCALE: &str = "output_activation_scale";

/// The last parts of the names of the tensors of a linear layer, beside the matrix.
pub(super) const PARTS: [&str; 3] = [SCALES, INPUT_SCALE, OUTPUT_SCALE];

/// The last parts of the names of tensors for a quantized KV cache. Hugging Face Transformers does not read them.
pub(super) const CACHE_SCALES: [&str; 2] = ["k_cache_scale", "v_cache_scale"];

/// The quantized module in the files whose matrix has some name.
pub(super) struct MobileModule<'a, 'name> {
    files: &'a TensorFiles,
    scheme: &'a MobileScheme,
    /// The name of the module, without a dot at the end.
    module: &'name str,
    is_embedding: bool,
}

/// True if a tensor holds codes.
pub(super) fn is_codes(entry: &Entry) -> bool {
    matches!(entry.dtype, Dtype::U8 | Dtype::I8)
}

impl<'a, 'name> MobileModule<'a, 'name> {
    /// Returns the module whose matrix is called `name`, or `None` if the checkpoint has another method than "gemma" or no
    /// codes for this matrix.
    pub fn of(
        files: &'a TensorFiles,
        schemes: &'a QuantizationSchemes,
        name: &'name str,
    ) -> Option<Self> {
        let scheme = schemes.mobile.as_ref()?;
        let module = name.strip_suffix(WHOLE)?.strip_suffix('.')?;
        let is_embedding = match files.get(name) {
            Some(entry) => is_codes(entry).then_some(false),
            None => files.get(&format!("{module}.{EMBEDDING}")).map(|_| true),
        };
        Some(Self {
            files,
            scheme,
            module,
            is_embedding: is_embedding?,
        })
    }

    /// Returns the names of the module's tensors in the files, without those that are missing.
    pub fn names(&self) -> Vec<String> {
        let parts: &[&str] = match self.is_embedding {
            true => &[EMBEDDING, EMBEDDING_SCALES],
            false => &[WHOLE, PARTS[0], PARTS[1], PARTS[2]],
        };
        let names = parts.iter().map(|part| self.tensor(part));
        names
            .filter(|name| self.files.get(name).is_some())
            .collect()
    }

    /// Reads the matrix.
    pub fn matrix(&self) -> Result<Source<'a>, TensorProblem> {
        let (codes, scales) = match self.is_embedding {
            true => (EMBEDDING, EMBEDDING_SCALES),
            false => (WHOLE, SCALES),
        };
        let refuse = |reason| Err(self.problem(codes, reason));
        let entry = self.entry(codes)?;
        let bits = match self.scheme.bits(self.module, self.is_embedding) {
            Ok(Some(bits)) => bits,
            Ok(None) => {
                return refuse(format!(
                    "it is in {:?}, but quantization_config says that the module has floats",
                    entry.dtype
                ));
            }
            Err(reason) => return refuse(reason),
        };
        let scales_entry = self.entry(scales)?;
        let dtype = match bits {
            8 => Dtype::I8,
            _ => Dtype::U8,
        };
        if entry.dtype != dtype {
            return refuse(format!(
                "it is in {:?}; expected {dtype:?} for codes of {bits} bits",
                entry.dtype
            ));
        }
        let (rows, columns) = match entry.shape[..] {
            [rows, bytes] if rows > 0 && bytes > 0 => (rows, bytes * (8 / bits)),
            _ => return refuse(format!("its shape is {:?}; expected a matrix", entry.shape)),
        };
        let groups = match scales_entry.shape[..] {
            // Only embedding tables have several scales a row.
            [of_rows, groups]
                if of_rows == rows
                    && (groups == 1 || self.is_embedding)
                    && groups > 0
                    && columns.is_multiple_of(groups) =>
            {
                groups
            }
            _ => {
                return refuse(format!(
                    "it has {rows} rows of {columns} codes, which do not fit {scales} of the shape {:?}",
                    scales_entry.shape
                ));
            }
        };
        if scales_entry.dtype != Dtype::F32 {
            return refuse(format!(
                "{scales} is in {:?}; expected F32",
                scales_entry.dtype
            ));
        }
        Ok(Source::mobile(Mobile {
            bits,
            rows,
            columns,
            groups,
            codes: self.files.bytes(entry),
            scales: self.files.bytes(scales_entry),
            dtype: DType::F32,
        }))
    }

    /// Reads the scales by which the input and the output of a linear layer are rounded. A missing scale counts as 0.
    /// The result is `None` if nothing is rounded.
    pub fn activation_scales(&self) -> Result<Option<ActivationScales>, TensorProblem> {
        if self.is_embedding {
            return Ok(None);
        }
        let scales = ActivationScales {
            input: self.activation_scale(INPUT_SCALE)?,
            output: self.activation_scale(OUTPUT_SCALE)?,
        };
        Ok(scales.round_something().then_some(scales))
    }

    /// Refuses static scales of a layer that cannot round its activations.
    pub fn refuse_scales(&self) -> Result<(), TensorProblem> {
        let part = match self.activation_scales()? {
            None => return Ok(()),
            Some(scales) if scales.input != 0.0 => INPUT_SCALE,
            Some(_) => OUTPUT_SCALE,
        };
        let reason = "a layer of this kind cannot round its activations by static scales";
        Err(self.problem(part, reason.into()))
    }

    fn activation_scale(&self, part: &str) -> Result<f32, TensorProblem> {
        let Some(entry) = self.files.get(&self.tensor(part)) else {
            return Ok(0.0);
        };
        if entry.dtype != Dtype::F32 || entry.shape.iter().any(|size| *size != 1) {
            let reason = format!(
                "it has the shape {:?} in {:?}; expected one number in F32",
                entry.shape, entry.dtype
            );
            return Err(self.problem(part, reason));
        }
        let scale = read_float(self.files.bytes(entry), 0, DType::F32);
        match scale.is_finite() && scale >= 0.0 {
            true => Ok(scale),
            false => {
                let reason = format!("it is {scale}; expected a positive number, or 0 for none");
                Err(self.problem(part, reason))
            }
        }
    }

    fn entry(&self, part: &str) -> Result<&'a Entry, TensorProblem> {
        let name = self.tensor(part);
        self.files.get(&name).ok_or(TensorProblem::Missing { name })
    }

    fn tensor(&self, part: &str) -> String {
        format!("{}.{part}", self.module)
    }

    fn problem(&self, part: &str, reason: String) -> TensorProblem {
        TensorProblem::Packing {
            name: self.tensor(part),
            reason,
        }
    }
}
