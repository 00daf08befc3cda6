//! Models of random weights, for benchmarks.

use crate::{
    Error,
    model::{Quantize, Table},
};
use burn::tensor::Device;
use burn_gemma4::{Gemma4Config, Gemma4Model, LoadOptions, Quantization};
use std::path::Path;

/// A model of this shape on `device`, in its default dtype, through files in `folder` if its table is to stay there. Weights that are
/// quantized are drawn one after the other, so that they are never all whole.
///
/// # Errors
/// Where the files cannot be written or read.
pub fn random_model(
    config: &Gemma4Config,
    quantize: Option<Quantize>,
    table: Table,
    folder: &Path,
    device: &Device,
) -> Result<Gemma4Model, Error> {
    let quantization = quantize.map_or(Quantization::Stored, Into::into);
    if table == Table::Device {
        return Ok(Gemma4Model::new(config, device).quantize(quantization)?);
    }
    let plain = device.clone().inner();
    Gemma4Model::new(config, &plain).save(folder, None)?;
    plain.memory_cleanup();
    let options = LoadOptions::default()
        .quantization(quantization)
        .per_layer_table(table.into());
    Ok(Gemma4Model::load(folder, device, options)?)
}
