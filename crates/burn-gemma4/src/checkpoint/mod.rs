//! Checkpoints: safetensors files, as Hugging Face has them, and GGUF files into a model.

pub(crate) mod adapter;
mod adapter_config;

pub(crate) mod gguf;

mod drafter;
mod export;
mod files;
mod folder;
mod foreign;
mod host_table;
mod names;
mod packed;
pub(crate) mod placement;
mod quantize;
mod save;
mod source;
mod spare;

pub use export::{QuantizedCheckpoint, quantize_checkpoint};
pub(crate) use files::map;
pub(crate) use foreign::missing;
pub(crate) use host_table::HostTable;
pub use save::copy_beside;
pub(crate) use save::{Stored, create, stored, write_file, write_tensors};
pub(crate) use source::upload_f32;

use crate::{
    Gemma4Config, Gemma4Error, Gemma4Model, TensorProblem,
    config::quantization::schemes_of,
    quantized::{layout::Layout, quantize::Target},
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{DType, Device, Tensor},
};
use files::TensorFiles;
use folder::Folder;
use gguf::Gguf;
use placement::{DeviceMemory, PerLayerTable, Wanted};
use source::{PORTION, Source, Weights, upload, upload_words};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

type OnProgress<'a> = Box<dyn FnMut(LoadProgress<'_>) + 'a>;

/// How to load a checkpoint.
#[derive(Default)]
pub struct LoadOptions<'a> {
    dtype: Option<DType>,
    quantization: Quantization,
    table: PerLayerTable,
    memory: Option<DeviceMemory>,
    on_progress: Option<OnProgress<'a>>,
}

/// In what form a model has its weights: those of its products, of embeddings and of the head. Norms, scalars and routers are always
/// whole, and so are matrices whose rows are no whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantization {
    /// As the checkpoint has them: quantized, if they are. Of those an adapter is trained; who trains all weights asks for whole ones.
    #[default]
    Stored,
    /// Whole.
    Whole,
    /// Those that are not quantized already, in blocks of 32 numbers of 8 bits, by the definition of llama.cpp's Q8_0.
    Q8,
    /// Those that are not quantized already, in blocks of 32 numbers of 4 bits, by the definition of llama.cpp's Q4_0.
    Q4,
}

impl Quantization {
    /// What becomes of weights that are not quantized in the checkpoint.
    fn target(self) -> Option<Target> {
        match self {
            Self::Stored | Self::Whole => None,
            Self::Q8 => Some(Target::Q8),
            Self::Q4 => Some(Target::Q4),
        }
    }
}

/// How far loading has come.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress<'a> {
    /// The tensor that is there now.
    pub tensor: &'a str,
    /// Bytes of the checkpoint that are on the device.
    pub bytes: usize,
    /// Bytes of the checkpoint that the model has.
    pub total_bytes: usize,
}

impl<'a> LoadOptions<'a> {
    /// The checkpoint's own dtype, or f32 on a processor and where the device does not compute in the checkpoint's; without
    /// progress.
    pub fn new() -> Self {
        Self::default()
    }

    /// Casts the weights to `dtype`, in which the model then computes.
    ///
    /// A processor computes in f32 by default: bf16 is much slower there. f16 is faster than f32 and takes half the memory, but
    /// activations beyond 65,504 overflow.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// In what form the model has its weights; without it [as the checkpoint has them](Quantization::Stored).
    pub fn quantization(mut self, quantization: Quantization) -> Self {
        self.quantization = quantization;
        self
    }

    /// Where the table of per-layer embeddings goes; without it [where it fits](PerLayerTable::Auto).
    pub fn per_layer_table(mut self, table: PerLayerTable) -> Self {
        self.table = table;
        self
    }

    /// Takes the device's memory for this, rather than for what the device says: for less of it, where others use it as well.
    pub fn memory(mut self, memory: DeviceMemory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Calls `on_progress` after each tensor.
    pub fn on_progress(mut self, on_progress: impl FnMut(LoadProgress<'_>) + 'a) -> Self {
        self.on_progress = Some(Box::new(on_progress));
        self
    }
}

impl std::fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadOptions")
            .field("dtype", &self.dtype)
            .field("quantization", &self.quantization)
            .field("table", &self.table)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

impl Gemma4Model {
    /// Loads the weights at `path`: a folder as Hugging Face has it, with `config.json` and `model.safetensors`, or an index
    /// and several files, perhaps with weights that compressed-tensors has packed into integers of 4 or 8 bits; or a GGUF file. Of
    /// a multimodal checkpoint, the text model.
    ///
    /// Files are mapped into memory and go to the device tensor by tensor, so that the host holds about one tensor at a time. Quantized
    /// weights stay quantized, unless the [options](LoadOptions::quantization) say otherwise.
    ///
    /// # Errors
    /// Where a file is missing, truncated or not what it should be, where tensors do not fit the configuration (all of
    /// them named), and where the device does not compute in the dtype asked for.
    pub fn load(
        path: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        if let Some(gguf) = Gguf::at(path)? {
            let config = gguf.config()?;
            return Self::load_gguf(gguf, &config, device, options);
        }
        let config = Gemma4Config::from_file(path.join("config.json"))?;
        Self::load_weights(path, &config, device, options)
    }

    /// [`load`](Self::load) of a folder with the configuration already read.
    pub(crate) fn load_weights(
        folder: &Path,
        config: &Gemma4Config,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let path = folder.join("config.json");
        let json = fs::read_to_string(&path).map_err(|source| missing(path, source))?;
        let files = TensorFiles::open(folder)?;
        load_folder(folder, files, &json, config, device, options)
    }

    /// [`load`](Self::load) of a GGUF file with the configuration already read.
    pub(crate) fn load_gguf(
        gguf: Gguf,
        config: &Gemma4Config,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let path = gguf.path().to_owned();
        load(&path, Arc::new(gguf), config, device, options)
    }

    /// Loads weights that are part of the program: the contents of a `config.json` and of a `model.safetensors`.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_bytes(
        config: &str,
        weights: &'static [u8],
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let files = TensorFiles::embedded("model.safetensors", weights)?;
        let shape = Gemma4Config::from_json(config)?;
        load_folder(
            Path::new("embedded"),
            files,
            config,
            &shape,
            device,
            options,
        )
    }
}

fn load_folder(
    folder: &Path,
    files: TensorFiles,
    json: &str,
    config: &Gemma4Config,
    device: &Device,
    options: LoadOptions<'_>,
) -> Result<Gemma4Model, Gemma4Error> {
    let weights = Folder::of(Arc::new(files), schemes_of(json)?);
    weights.refuse_mlx(folder)?;
    load(folder, Arc::new(weights), config, device, options)
}

fn load(
    path: &Path,
    weights: Arc<dyn Weights>,
    config: &Gemma4Config,
    device: &Device,
    options: LoadOptions<'_>,
) -> Result<Gemma4Model, Gemma4Error> {
    let target = options.quantization.target();
    let form = match options.quantization == Quantization::Whole {
        true => Form::Whole,
        false => Form::Words(target),
    };
    let wanted = Wanted {
        table: options.table,
        memory: options.memory.unwrap_or_else(|| DeviceMemory::of(device)),
        form,
    };
    let model = Gemma4Model::new(config, device);
    let mut split = None;
    let prepare = |loader: &mut Loader<'_, '_>, model: &mut Gemma4Model| {
        model.written = Some(loader.written);
        split = loader.place(model, &weights, wanted, device)?;
        if let Form::Words(target) = form {
            loader.quantized(model, target, device);
        }
        Ok(())
    };
    let model = load_module(path, &*weights, config, model, device, options, prepare)?;
    Ok(Gemma4Model {
        split_table: split,
        ..model
    })
}

/// In what form a checkpoint's weights come to a device.
#[derive(Clone, Copy)]
enum Form {
    /// Whole, all of them.
    Whole,
    /// As words, those that are quantized in the checkpoint, and the others by a target.
    Words(Option<Target>),
}

impl Form {
    /// How a weight's rows are as words; nothing where they stay whole.
    fn layout(self, source: &Source<'_>) -> Option<Layout> {
        match self {
            Self::Whole => None,
            Self::Words(target) => source.layout(target),
        }
    }

    fn target(self) -> Option<Target> {
        match self {
            Self::Whole => None,
            Self::Words(target) => target,
        }
    }
}

/// Replaces the parameters of `model`, which is of the shape that `config` describes; what `prepare` has loaded stays as it is.
fn load_module<M: Module>(
    path: &Path,
    weights: &dyn Weights,
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
        .map_err(|error| Gemma4Error::Device(format!("the weights did not arrive: {error}")))?;
    Ok(model)
}

/// The parameters of the model: path and shape.
#[derive(Default)]
struct Expected {
    path: Vec<String>,
    parameters: Vec<(String, Vec<usize>)>,
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

/// Finds everything that does not fit before anything is loaded; the bytes that the model has in the files.
fn check(
    path: &Path,
    weights: &dyn Weights,
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
            Ok(source) => problems.push(TensorProblem::Shape {
                name: names.join(" and "),
                found: source.shape,
                expected: shape.clone(),
            }),
            Err(problem) => problems.push(problem),
        }
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

/// The dtype to compute in.
fn dtype(written: DType, device: &Device, asked: Option<DType>) -> Result<DType, Gemma4Error> {
    match asked {
        Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) if device.supports_dtype(dtype) => {
            Ok(dtype)
        }
        Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Err(Gemma4Error::Device(format!(
            "it does not compute in {}",
            dtype.name()
        ))),
        Some(other) => Err(Gemma4Error::Argument {
            argument: "dtype",
            reason: format!("is {}, which is none of f32, f16, bf16", other.name()),
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

/// The dtype of most of a checkpoint's numbers: a single tensor in another dtype, as some trainers leave it, decides nothing.
fn written_dtype(weights: &dyn Weights, parameters: &[(String, Vec<usize>)]) -> DType {
    let mut counts: Vec<(DType, usize)> = Vec::new();
    for (path, shape) in parameters {
        let Ok(source) = weights.get(path) else {
            continue;
        };
        // Quantized weights count as bf16, the dtype of all published models.
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

/// True if Burn's Flex backend computes on the device. A processor rounds every number in bf16 by itself, which is 30 times
/// slower than f32, and Gemma's activations may exceed the range of f16.
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

/// Replaces the parameters of a model by the tensors of a checkpoint that fits it.
struct Loader<'a, 'options> {
    weights: &'a dyn Weights,
    /// The dtype that the checkpoint is written in.
    written: DType,
    dtype: DType,
    path: Vec<String>,
    bytes: usize,
    total_bytes: usize,
    on_progress: Option<OnProgress<'options>>,
}

impl Loader<'_, '_> {
    /// Loads the weights that are words on the device.
    fn quantized(&mut self, model: &mut Gemma4Model, target: Option<Target>, device: &Device) {
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

    fn source(&self, path: &str) -> Source<'_> {
        self.weights
            .get(path)
            .unwrap_or_else(|problem| unreachable!("checked: {problem}"))
    }

    fn is_there(&mut self, path: &str, bytes: usize) {
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
