//! Adapters that become part of a model: merged into its weights, or attached to its quantized weights.

use super::files::{AdapterFiles, AdapterReader};
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::op::linear::product;
use burn::{
    module::{LoraAdapter, Module, ModuleMapper, Param},
    tensor::{DType, Device, Tensor},
};
use std::path::Path;

impl Gemma4Model {
    /// Adds the LoRA adapter in `folder` to the weights.
    ///
    /// The folder holds `adapter_config.json` and `adapter_model.safetensors`, as
    /// [`Adapter::save`](super::Adapter::save) and PEFT write them.
    /// Quantized weights are dequantized if the adapter changes them.
    ///
    /// # Errors
    /// Returns an error if a file is missing or malformed, or if the adapter is not a LoRA adapter. If tensors do not
    /// fit the model or the rank in `adapter_config.json`, the error lists all such tensors.
    pub fn merge_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Placement::Merged, true)
    }

    /// Attaches the LoRA adapter in `folder` without merging it into the layers' quantized weights.
    ///
    /// The folder holds the files of [`merge_adapter`](Self::merge_adapter). The quantized weights stay quantized. The
    /// forward pass adds the adapter's output to the output of the quantized matrix, as in QLoRA training. The adapters
    /// of all other matrices are merged into the weights.
    ///
    /// # Errors
    /// Returns the errors of [`merge_adapter`](Self::merge_adapter).
    pub fn attach_adapter(self, folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        self.with_adapter(folder.as_ref(), Placement::Beside, true)
    }

    /// Adds the factors of the text model. `warns` is true if factors of towers, which this model lacks, are worth a
    /// warning.
    pub(crate) fn with_adapter(
        self,
        folder: &Path,
        placement: Placement,
        warns: bool,
    ) -> Result<Self, Gemma4Error> {
        self.refuse_if_mobile("an adapter")?;
        let files = AdapterFiles::open(folder)?;
        let mut merger = Merger {
            reader: files.reader()?,
            path: Vec::new(),
        };
        let mut model = self;
        model.warnings.append(&mut merger.reader.warnings);
        let of_towers = merger.reader.of_towers.take();
        model.warnings.extend(of_towers.filter(|_| warns));
        for (path, weight) in model.weights_mut() {
            let Some(matrix) = path.strip_suffix(".weight") else {
                continue;
            };
            if !merger.reader.adds_to(matrix) {
                continue;
            }
            // The adapter of a layer's quantized linear projection can stay beside the weight. The adapters of all
            // other matrices are merged into the weights.
            let beside = match placement == Placement::Beside && path.starts_with("layers.") {
                true => weight.without_adapter(),
                false => None,
            };
            match beside {
                Some((shape, dtype, device)) => {
                    if let Some((factors, scale)) = merger.factors(matrix, shape, &device) {
                        let [a, b] = factors.map(|factor| Param::from_tensor(factor.cast(dtype)));
                        weight.adapt(LoraAdapter { a, b, scale });
                    }
                }
                // A merge changes the weight, so a quantized weight is dequantized first.
                None => weight.dequantize(),
            }
        }
        let model = model.map(&mut merger);
        merger.reader.finish(model.config())?;
        Ok(model)
    }
}

/// The place of a loaded adapter: in the weights, or beside quantized weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Adds the adapter's update `B · A · scale` to every adapted weight.
    Merged,
    /// Keeps the adapter's `A` and `B` beside the layers' quantized weights, and adds `B · A · scale` to all other
    /// adapted weights.
    Beside,
}

/// A module mapper that adds `B · A · scale` to each parameter that the adapter changes.
pub(super) struct Merger<'a> {
    pub reader: AdapterReader<'a>,
    pub path: Vec<String>,
}

impl Merger<'_> {
    /// Returns the update `B · A · scale` of the matrix at `path`, `[out_features, in_features]` in f32. Returns `None`
    /// if the adapter does not change the matrix.
    fn delta(&mut self, path: &str, shape: [usize; 2], device: &Device) -> Option<Tensor<2>> {
        let ([writes, reads], scale) = self.factors(path, shape, device)?;
        Some(product(writes, reads) * scale)
    }

    /// Uploads the adapter of the matrix at `path`: `B`, `[out_features, rank]` in f32, `A`, `[rank, in_features]` in
    /// f32, and the scale of `B · A`.
    fn factors(
        &mut self,
        path: &str,
        shape: [usize; 2],
        device: &Device,
    ) -> Option<([Tensor<2>; 2], f64)> {
        let factors = self.reader.factors(path, shape)?;
        let uploaded = [factors.writes, factors.reads]
            .map(|factor| Tensor::from_data(factor, (device, DType::F32)));
        Some((uploaded, factors.scale))
    }
}

impl ModuleMapper for Merger<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let (Some(path), Ok(shape)) = (
            path.strip_suffix(".weight"),
            <[usize; 2]>::try_from(param.lazy_shape().to_vec()),
        ) else {
            return param;
        };
        let device = param.lazy_device().without_autodiff();
        let Some(delta) = self.delta(path, shape, &device) else {
            return param;
        };
        let weight = param.val().inner();
        let dtype = weight.dtype();
        let merged = (weight.cast(DType::F32) + delta.reshape(param.shape())).cast(dtype);
        let id = param.id;
        param.transform_for_load(merged, id)
    }
}
