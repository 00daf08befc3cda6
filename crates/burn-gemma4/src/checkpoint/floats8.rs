//! Reads matrices that compressed-tensors has stored as 8-bit and 4-bit floats.

use super::{
    files::{Entry, TensorFiles},
    packed::{Module, SCALES, WHOLE, WORDS},
    source::Source,
};
use crate::error::TensorProblem;
use crate::quant::fp4::Fp4;
use crate::quant::fp8::{Fp8, scales_shape};
use crate::quant::packed::read_float;
use crate::quant::scheme::{Fp4Scheme, Fp8Scheme, WeightScheme};
use burn::tensor::DType;
use safetensors::Dtype;

/// The last part of the name of the tensor that divides all scales of an NVFP4 matrix.
const GLOBAL_SCALE: &str = "weight_global_scale";
/// The scales that activations would be quantized by. The program computes with unquantized activations.
const OF_ACTIVATIONS: &str = "input_global_scale";
/// The parts that belong to a matrix, beside its elements and scales.
pub(super) const PARTS: [&str; 2] = [GLOBAL_SCALE, OF_ACTIVATIONS];

/// True if a tensor has 8-bit floats, whose scales another tensor has.
pub(super) fn is_fp8(entry: &Entry) -> bool {
    entry.dtype == Dtype::F8_E4M3
}

/// Returns the names of the tensors that store the FP8 matrix `name`.
pub(super) fn fp8_names(files: &TensorFiles, name: &str) -> Vec<String> {
    let module = name.strip_suffix(WHOLE).unwrap_or(name);
    let scales = format!("{module}{SCALES}");
    let names = [name.to_owned(), scales].into_iter();
    names.filter(|name| files.get(name).is_some()).collect()
}

/// Reads the FP8 matrix `name`, whose scales must have the shape of one of the schemes in the checkpoint's
/// configuration.
pub(super) fn fp8<'a>(
    files: &'a TensorFiles,
    schemes: &[WeightScheme],
    name: &str,
) -> Result<Source<'a>, TensorProblem> {
    let module = Module::of(files, name);
    let bytes = module.entry(WHOLE)?;
    let [rows, columns] = bytes.shape[..] else {
        return Err(module.problem(WHOLE, format!("its shape is {:?}", bytes.shape)));
    };
    if rows == 0 || columns == 0 {
        return Err(module.problem(WHOLE, format!("its shape is {:?}", bytes.shape)));
    }
    let scales = module.entry(SCALES)?;
    let dtype = module.dtype_of_scales(scales, WHOLE)?;
    let fits = |scheme: &WeightScheme| match scheme {
        WeightScheme::Fp8(Fp8Scheme::Tensor) => {
            let is_one = scales.shape.iter().all(|size| *size == 1);
            is_one.then_some(Fp8Scheme::Tensor)
        }
        WeightScheme::Fp8(scheme) => {
            (scales.shape == scales_shape(*scheme, rows, columns)).then_some(*scheme)
        }
        _ => None,
    };
    let scheme = schemes.iter().find_map(fits).ok_or_else(|| {
        let reason = format!(
            "its shape is {:?} and {SCALES} is {:?}, which fits no FP8 scheme of quantization_config",
            bytes.shape, scales.shape
        );
        module.problem(WHOLE, reason)
    })?;
    Ok(Source::fp8(Fp8 {
        rows,
        columns,
        bytes: files.bytes(bytes),
        scales: files.bytes(scales),
        dtype,
        scheme,
    }))
}

/// Reads the matrix `name` of 4-bit floats. The tensors must match one of the schemes in the checkpoint's
/// configuration.
pub(super) fn fp4<'a>(
    files: &'a TensorFiles,
    schemes: &[WeightScheme],
    name: &str,
) -> Result<Source<'a>, TensorProblem> {
    let module = Module::of(files, name);
    let (codes, scales) = (module.entry(WORDS)?, module.entry(SCALES)?);
    let [rows, half] = codes.shape[..] else {
        return Err(module.problem(WORDS, format!("its shape is {:?}", codes.shape)));
    };
    let (1.., Some(columns @ 1..)) = (rows, half.checked_mul(2)) else {
        return Err(module.problem(WORDS, format!("its shape is {:?}", codes.shape)));
    };
    let fits = |scheme: &WeightScheme| {
        let WeightScheme::Fp4(scheme) = scheme else {
            return None;
        };
        let dtype = match scheme {
            Fp4Scheme::Nv => Dtype::F8_E4M3,
            Fp4Scheme::Mx => Dtype::U8,
        };
        let is_whole = columns.is_multiple_of(scheme.group());
        let shape = [rows, columns / scheme.group()];
        (is_whole && scales.dtype == dtype && scales.shape == shape).then_some(*scheme)
    };
    let scheme = schemes.iter().find_map(fits).ok_or_else(|| {
        let reason = format!(
            "its shape is {:?}, and {SCALES} is {:?} in {:?}, which fits no scheme of quantization_config",
            codes.shape, scales.shape, scales.dtype
        );
        module.problem(WORDS, reason)
    })?;
    let global_scale = match scheme {
        Fp4Scheme::Mx => 1.0,
        Fp4Scheme::Nv => {
            let entry = module.entry(GLOBAL_SCALE)?;
            let is_one = entry.shape.iter().all(|size| *size == 1);
            if entry.dtype != Dtype::F32 || !is_one {
                let reason = format!("{GLOBAL_SCALE} is {:?} in {:?}", entry.shape, entry.dtype);
                return Err(module.problem(WORDS, reason));
            }
            let scale = read_float(files.bytes(entry), 0, DType::F32);
            if !(scale.is_finite() && scale > 0.0) {
                return Err(module.problem(WORDS, format!("{GLOBAL_SCALE} is {scale}")));
            }
            scale
        }
    };
    Ok(Source::fp4(Fp4 {
        scheme,
        rows,
        columns,
        codes: files.bytes(codes),
        scales: files.bytes(scales),
        global_scale,
    }))
}
