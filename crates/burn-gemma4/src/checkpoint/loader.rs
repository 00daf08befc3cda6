//! The loader, which checks the tensors of a checkpoint and copies them to the parameters of a model.

use super::options::{LoadOptions, LoadProgress, OnProgress};
use super::source::{PORTION, Source, WeightSource, upload, upload_words};
use crate::config::Gemma4Config;
use crate::error::{Gemma4Error, TensorProblem};
use crate::model::Gemma4Model;
use crate::quant::layout::Layout;
use crate::quant::quantize::QuantTarget;
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{DType, Device, Tensor},
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// The format in which the device stores a model's weights.
#[derive(Clone, Copy)]
pub(super) enum WeightForm {
    /// All weights are unquantized.
    Whole,
    /// Weights that are quantized in the checkpoint stay quantized. All other weights are quantized to the given
    /// target. If the target is `None`, all other weights stay unquantized.
    Words(Option<QuantTarget>),
}

impl WeightForm {
    /// Returns the packed layout of a weight's rows, or `None` if the weight stays unquantized.
    pub(super) fn layout(self, source: &Source<'_>) -> Option<Layout> {
        match self {
            Self::Whole => None,
            Self::Words(target) => source.layout(target),
        }
    }

    pub(super) fn target(self) -> Option<QuantTarget> {
        match self {
            Self::Whole => None,
            Self::Words(target) => target,
        }
    }
}

/// Loads the parameters of `model` from the files. The function first checks all tensors, and then calls `prepare`. If
/// `prepare` loads a parameter, the function does not load this parameter again.
pub(super) fn load_module<M: Module>(
    path: &Path,
    weights: &dyn WeightSource,
    config: &Gemma4Config,
    mut model: M,
    device: &Device,
    options: LoadOptions<'_>,
    prepare: impl FnOnce(&mut Loader<'_, '_>, &mut M) -> Result<(), Gemma4Error>,
) -> Result<M, Gemma4Error> {
    let mut expected = Expected::default();
    model.visit(&mut expected);
    let total_bytes = check(path, weights, config, &expected)?;
    let written = written_dtype(weights, &expected.parameters);
    let dtype = dtype(written, device, options.dtype)?;
    let mut loader = Loader {
        weights,
        written,
        dtype,
        path: Vec::new(),
        bytes: 0,
        total_bytes,
        on_progress: options.on_progress,
    };
    prepare(&mut loader, &mut model)?;
    let model = model.map(&mut loader);
    device
        .sync()
        .map_err(|error| Gemma4Error::Device(format!("loading the weights failed: {error}")))?;
    Ok(model)
}

/// The path and shape of each of the model's parameters.
#[derive(Default)]
pub(super) struct Expected {
    path: Vec<String>,
    pub(super) parameters: Vec<(String, Vec<usize>)>,
}

impl ModuleVisitor for Expected {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.parameters
            .push((self.path.join("."), param.lazy_shape().to_vec()));
    }
}

/// Checks that the tensors in the files fit the model's parameters, before any tensor is loaded. Returns the number of
/// bytes of the tensors that the model needs.
pub(super) fn check(
    path: &Path,
    weights: &dyn WeightSource,
    config: &Gemma4Config,
    expected: &Expected,
) -> Result<usize, Gemma4Error> {
    let mut problems = Vec::new();
    let mut known = BTreeSet::new();
    let mut total_bytes = 0;
    for (path, shape) in &expected.parameters {
        let names = weights.names(path);
        match weights.get(path) {
            Ok(source) if source.shape == *shape => total_bytes += source.len(),
            Ok(source) => {
                let name = names.join(" and ");
                problems.push(match source.padding(shape) {
                    Some(reason) => TensorProblem::Packing { name, reason },
                    None => TensorProblem::Shape {
                        name,
                        found: source.shape,
                        expected: shape.clone(),
                    },
                });
            }
            Err(problem) => problems.push(problem),
        }
        problems.extend(weights.activation_scales(path).err());
        known.extend(names);
    }
    let unknown = weights.unknown(&known, config).into_iter();
    problems.extend(unknown.map(|name| TensorProblem::Extra { name }));
    match problems.is_empty() {
        true => Ok(total_bytes),
        false => Err(Gemma4Error::Tensors {
            path: PathBuf::from(path),
            problems,
        }),
    }
}

/// Returns the dtype in which the model computes. If `asked` is `None`, the function returns the default dtype for the
/// checkpoint and the device. Otherwise it returns the dtype in `asked`.
fn dtype(written: DType, device: &Device, asked: Option<DType>) -> Result<DType, Gemma4Error> {
    match asked {
        Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) if device.supports_dtype(dtype) => {
            Ok(dtype)
        }
        Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Err(Gemma4Error::Device(format!(
            "the device does not compute in {}",
            dtype.name()
        ))),
        Some(other) => Err(Gemma4Error::Argument {
            argument: "dtype",
            reason: format!("is {}; expected f32, f16 or bf16", other.name()),
        }),
        None => {
            let serves = device.supports_dtype(written) && written != DType::F64;
            Ok(match serves && !is_processor(device) {
                true => written,
                false => DType::F32,
            })
        }
    }
}

/// Returns the dtype in which the checkpoint stores most of its elements. Some trainers leave a few tensors in another
/// dtype.
pub(super) fn written_dtype(
    weights: &dyn WeightSource,
    parameters: &[(String, Vec<usize>)],
) -> DType {
    let mut counts: Vec<(DType, usize)> = Vec::new();
    for (path, shape) in parameters {
        let Ok(source) = weights.get(path) else {
            continue;
        };
        // If the dtype of a quantized weight is unknown, count the weight as bf16, because all published models are in
        // bf16.
        let dtype = source.dtype().unwrap_or(DType::BF16);
        let numbers: usize = shape.iter().product();
        match counts.iter_mut().find(|(counted, _)| *counted == dtype) {
            Some((_, count)) => *count += numbers,
            None => counts.push((dtype, numbers)),
        }
    }
    let most = counts.into_iter().max_by_key(|(_, numbers)| *numbers);
    most.map_or(DType::F32, |(dtype, _)| dtype)
}

/// True if the device is a CPU, on which Burn's Flex backend computes. The default dtype of a CPU is f32, because bf16
/// is 30 times slower on a CPU, and Gemma's activations may overflow in f16.
fn is_processor(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    return matches!(
        device.clone().without_autodiff().as_dispatch(),
        burn::backend::DispatchDevice::Flex(_)
    );
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

/// Panics with a problem that [`check`] would have found.
fn checked(problem: TensorProblem) -> ! {
    unreachable!("the tensors were checked before: {problem}")
}

/// A module mapper that replaces a model's parameters with the tensors of a checkpoint. The tensors have been checked before.
pub(super) struct Loader<'a, 'options> {
    pub(super) weights: &'a dyn WeightSource,
    /// The dtype in which the checkpoint stores most of its elements.
    pub(super) written: DType,
    pub(super) dtype: DType,
    path: Vec<String>,
    bytes: usize,
    pub(super) total_bytes: usize,
    on_progress: Option<OnProgress<'options>>,
}

impl Loader<'_, '_> {
    /// Loads those weights that the device stores in quantized form. The device stores them as packed 32-bit words.
    pub(super) fn quantized(
        &mut self,
        model: &mut Gemma4Model,
        target: Option<QuantTarget>,
        device: &Device,
    ) {
        for (path, weight) in model.weights_mut() {
            let source = self.source(&path);
            if let Some(layout) = source.layout(target) {
                let all = 0..source.shape[0];
                let words = upload_words(&source, all, target, layout, device, PORTION);
                weight.quantize(words, layout, self.dtype);
                self.is_there(&path, source.len());
            }
        }
    }

    /// Sets the static scales by which the projections of a model round their activations. [`check`] has read them
    /// before.
    pub(super) fn activation_scales(&self, model: &mut Gemma4Model) {
        for (path, linear) in model.linears_mut() {
            let scales = self.weights.activation_scales(&format!("{path}.weight"));
            linear.activation_scales = scales.unwrap_or_else(|problem| checked(problem));
        }
        model.is_mobile = self.weights.is_mobile();
    }

    pub(super) fn source(&self, path: &str) -> Source<'_> {
        let source = self.weights.get(path);
        source
            .unwrap_or_else(|problem| checked(problem))
            .computed_in(self.dtype)
    }

    pub(super) fn is_there(&mut self, path: &str, bytes: usize) {
        self.bytes += bytes;
        if let Some(on_progress) = &mut self.on_progress {
            on_progress(LoadProgress {
                tensor: &self.weights.names(path)[0],
                bytes: self.bytes,
                total_bytes: self.total_bytes,
            });
        }
    }
}

impl ModuleMapper for Loader<'_, '_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let source = self.source(&path);
        let bytes = source.len();
        let device = param.lazy_device();
        let all = 0..source.shape[0];
        let tensor = upload(&source, all, self.dtype, &device, PORTION);
        self.is_there(&path, bytes);
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}
