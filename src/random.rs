//! Creates models with random weights for benchmarks.

use crate::{
    Error,
    model::{Table, WeightForm},
};
use burn::tensor::Device;
use burn_gemma4::{Gemma4Config, Gemma4Model, LoadOptions, Quantization};
use std::path::Path;

/// Creates a model with random weights on `device`, in the device's default dtype.
///
/// Unless `table` is [`Table::Device`], the per-layer embedding table may stay on the host. The model is then saved to
/// files in `folder` and loaded from these files. Quantized weights are created one at a time to save memory.
///
/// # Errors
/// Returns an error if the files cannot be written or read.
pub fn random_model(
    config: &Gemma4Config,
    quantize: Option<WeightForm>,
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
