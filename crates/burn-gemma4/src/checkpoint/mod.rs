//! Checkpoints from Hugging Face: safetensors files into a model.

pub(crate) mod adapter;

mod files;
mod foreign;
mod save;

pub(crate) use foreign::missing;
pub(crate) use save::{create, stored, write_file, write_tensors};

use crate::{Gemma4Config, Gemma4Error, Gemma4Model, TensorProblem};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{DType, Device, Tensor, TensorData},
};
use files::{Entry, TensorFiles};
use safetensors::{Dtype, tensor::TensorView};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

type OnProgress<'a> = Box<dyn FnMut(LoadProgress<'_>) + 'a>;

/// How to load a checkpoint.
#[derive(Default)]
pub struct LoadOptions<'a> {
    dtype: Option<DType>,
    on_progress: Option<OnProgress<'a>>,
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
    /// The checkpoint's own dtype, or f32 where the device does not compute in that; without progress.
    pub fn new() -> Self {
        Self::default()
    }

    /// Casts the weights to `dtype`, in which the model then computes.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
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
            .finish_non_exhaustive()
    }
}

impl Gemma4Model {
    /// Loads the weights in `folder`, which is as Hugging Face has it: `config.json` and `model.safetensors`, or an index
    /// and several files. Of a multimodal checkpoint, the text model.
    ///
    /// Files are mapped into memory and go to the device tensor by tensor, so that the host holds about one tensor at a time.
    ///
    /// # Errors
    /// Where a file is missing, truncated or not what it should be, where tensors do not fit the configuration (all of
    /// them named), and where the device does not compute in the dtype asked for.
    pub fn load(
        folder: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let folder = folder.as_ref();
        let config = Gemma4Config::from_file(folder.join("config.json"))?;
        Self::load_weights(folder, &config, device, options)
    }

    /// [`load`](Self::load) with the configuration already read.
    pub(crate) fn load_weights(
        folder: &Path,
        config: &Gemma4Config,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let files = TensorFiles::open(folder)?;
        load(folder, &files, config, device, options)
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
        let config = Gemma4Config::from_json(config)?;
        let files = TensorFiles::embedded("model.safetensors", weights)?;
        load(Path::new("embedded"), &files, &config, device, options)
    }
}

fn load(
    folder: &Path,
    files: &TensorFiles,
    config: &Gemma4Config,
    device: &Device,
    options: LoadOptions<'_>,
) -> Result<Gemma4Model, Gemma4Error> {
    let names = Names::of(files);
    names.refuse_mlx(folder, files)?;
    let model = Gemma4Model::new(config, device);
    let mut expected = Expected::default();
    model.visit(&mut expected);
    let total_bytes = check(folder, files, config, &names, &expected)?;
    let dtype = dtype(files, &names, device, options.dtype)?;
    let model = model.map(&mut Loader {
        files,
        names: &names,
        dtype,
        path: Vec::new(),
        bytes: 0,
        total_bytes,
        on_progress: options.on_progress,
    });
    device
        .sync()
        .map_err(|error| Gemma4Error::Device(format!("the weights did not arrive: {error}")))?;
    Ok(model)
}

/// How the file calls the model's tensors.
struct Names {
    prefix: &'static str,
}

/// Before the text model's tensors in a multimodal checkpoint.
const MULTIMODAL: &str = "model.language_model.";
/// Before the model's tensors in a text checkpoint.
const TEXT: &str = "model.";
/// Before them in what MLX makes of a multimodal checkpoint.
const MLX: &str = "language_model.model.";
/// The output projection, which is outside of both.
const HEAD: &str = "lm_head.weight";

impl Names {
    fn of(files: &TensorFiles) -> Self {
        let multimodal = files.names().any(|name| name.starts_with(MULTIMODAL));
        Self {
            prefix: if multimodal { MULTIMODAL } else { TEXT },
        }
    }

    /// Refuses MLX's names: it lays experts and towers out in other ways, too.
    fn refuse_mlx(&self, folder: &Path, files: &TensorFiles) -> Result<(), Gemma4Error> {
        let is_mlx = |name: &str| name.starts_with(MLX);
        let is_ours = |name: &str| name.starts_with(self.prefix);
        match files.names().any(is_mlx) && !files.names().any(is_ours) {
            true => Err(Gemma4Error::Unsupported {
                path: folder.into(),
                reason: format!(
                    "its tensors' names begin with {MLX}, as MLX writes them; take the checkpoint that it was made of"
                ),
            }),
            false => Ok(()),
        }
    }

    /// Those of a text checkpoint.
    fn of_text() -> Self {
        Self { prefix: TEXT }
    }

    /// The name in the file of the parameter at `path`.
    fn in_file(&self, path: &str) -> String {
        match path == HEAD {
            true => HEAD.to_owned(),
            false => format!("{}{path}", self.prefix),
        }
    }

    /// Whether a tensor that the model does not have belongs in a checkpoint all the same.
    fn is_ignored(&self, name: &str, config: &Gemma4Config) -> bool {
        let Some(name) = name.strip_prefix(self.prefix) else {
            // The other towers of a multimodal checkpoint; a head that repeats the embedding's table.
            return self.prefix == MULTIMODAL || name == HEAD;
        };
        // Published checkpoints still have keys and values for layers that read an earlier layer's.
        let shared = name
            .strip_prefix("layers.")
            .and_then(|rest| rest.split_once('.'))
            .and_then(|(layer, rest)| Some((layer.parse::<usize>().ok()?, rest)));
        matches!(
            shared,
            Some((
                layer,
                "self_attn.k_proj.weight" | "self_attn.v_proj.weight" | "self_attn.k_norm.weight"
            )) if config.is_shared(layer) && layer < config.num_layers()
        )
    }
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
    folder: &Path,
    files: &TensorFiles,
    config: &Gemma4Config,
    names: &Names,
    expected: &Expected,
) -> Result<usize, Gemma4Error> {
    let mut problems = Vec::new();
    let mut known = BTreeSet::new();
    let mut total_bytes = 0;
    for (path, shape) in &expected.parameters {
        let name = names.in_file(path);
        match files.get(&name) {
            None => problems.push(TensorProblem::Missing { name: name.clone() }),
            Some(entry) => {
                total_bytes += entry.len();
                if burn_dtype(entry.dtype).is_none() {
                    problems.push(TensorProblem::Dtype {
                        name: name.clone(),
                        found: format!("{:?}", entry.dtype),
                    });
                } else if entry.shape != *shape {
                    problems.push(TensorProblem::Shape {
                        name: name.clone(),
                        found: entry.shape.clone(),
                        expected: shape.clone(),
                    });
                }
            }
        }
        known.insert(name);
    }
    problems.extend(
        files
            .names()
            .filter(|name| !known.contains(*name) && !names.is_ignored(name, config))
            .map(|name| TensorProblem::Extra { name: name.into() }),
    );
    match problems.is_empty() {
        true => Ok(total_bytes),
        false => Err(Gemma4Error::Tensors {
            path: PathBuf::from(folder),
            problems,
        }),
    }
}

/// The dtype to compute in.
fn dtype(
    files: &TensorFiles,
    names: &Names,
    device: &Device,
    asked: Option<DType>,
) -> Result<DType, Gemma4Error> {
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
            let stored = files
                .get(&names.in_file("embed_tokens.weight"))
                .and_then(|entry| burn_dtype(entry.dtype));
            Ok(match stored {
                Some(dtype) if dtype != DType::F64 && device.supports_dtype(dtype) => dtype,
                _ => DType::F32,
            })
        }
    }
}

fn burn_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F64 => Some(DType::F64),
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// Replaces the parameters of a model by the tensors of a checkpoint that fits it.
struct Loader<'a, 'options> {
    files: &'a TensorFiles,
    names: &'a Names,
    dtype: DType,
    path: Vec<String>,
    bytes: usize,
    total_bytes: usize,
    on_progress: Option<OnProgress<'options>>,
}

impl ModuleMapper for Loader<'_, '_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.names.in_file(&self.path.join("."));
        let entry = self
            .files
            .get(&name)
            .expect("checked: every parameter is in the files");
        let device = param.lazy_device();
        let tensor = upload(self.files, entry, self.dtype, &device, PORTION);
        self.bytes += entry.len();
        if let Some(on_progress) = &mut self.on_progress {
            on_progress(LoadProgress {
                tensor: &name,
                bytes: self.bytes,
                total_bytes: self.total_bytes,
            });
        }
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}

/// A small tensor of a file in f32; none where its elements are no floating-point numbers that a model computes in.
pub(crate) fn upload_f32<const D: usize>(
    view: &TensorView<'_>,
    shape: [usize; D],
    device: &Device,
) -> Option<Tensor<D>> {
    let stored = burn_dtype(view.dtype())?;
    let data = TensorData::from_bytes_vec(view.data().to_vec(), shape, stored);
    let data = data.convert_dtype(DType::F32);
    Some(Tensor::from_data(data, (device, DType::F32)))
}

/// Bytes of a tensor that go to the device at once. On their way they are on the host twice, here and where the driver takes
/// them from, and the tables of per-layer inputs are of several GB.
const PORTION: usize = 256 << 20;

/// A tensor of the files on `device`, `portion` bytes of rows at a time.
fn upload<const D: usize>(
    files: &TensorFiles,
    entry: &Entry,
    dtype: DType,
    device: &Device,
    portion: usize,
) -> Tensor<D> {
    let stored = burn_dtype(entry.dtype).expect("checked: every tensor is of a float dtype");
    let bytes = files.bytes(entry);
    let rows = entry.shape[0];
    let row_bytes = bytes.len() / rows;
    let at_once = (portion / row_bytes).clamp(1, rows);
    let part = |start: usize, end: usize| {
        let mut shape = entry.shape.clone();
        shape[0] = end - start;
        let bytes = bytes[start * row_bytes..end * row_bytes].to_vec();
        TensorData::from_bytes_vec(bytes, shape, stored).convert_dtype(dtype)
    };
    if at_once == rows {
        // Weights live as long as the model: exact allocations, apart from the pools of what comes and goes.
        return device.memory_persistent_allocations(part(0, rows), |data| {
            Tensor::from_data(data, (device, dtype))
        });
    }
    let shape: [usize; D] = std::array::from_fn(|dimension| entry.shape[dimension]);
    let mut whole = Tensor::<D>::empty(shape, (device, dtype));
    for start in (0..rows).step_by(at_once) {
        let end = (start + at_once).min(rows);
        let ranges = std::array::from_fn::<_, D, _>(|dimension| match dimension {
            0 => start..end,
            _ => 0..shape[dimension],
        });
        whole = whole.slice_assign(ranges, Tensor::from_data(part(start, end), (device, dtype)));
        // What is queued holds its portion on the host. A device that fails says so when the model is complete.
        let _ = device.sync();
    }
    whole.detach()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_make_the_whole() {
        let bytes = include_bytes!("../../embedded/model.safetensors");
        let files = TensorFiles::embedded("model.safetensors", bytes).expect("safetensors");
        let name = "model.embed_tokens.weight";
        let entry = files.get(name).expect("the embedding's table");
        let device = Device::default();
        let load = |portion| {
            upload::<2>(&files, entry, DType::F32, &device, portion)
                .into_data()
                .iter::<f32>()
                .collect::<Vec<_>>()
        };
        let whole = load(usize::MAX);
        let row = entry.len() / entry.shape[0];
        for portion in [1, row, 7 * row + 1, entry.len() - 1] {
            assert_eq!(load(portion), whole, "{portion} bytes at a time");
        }
    }
}
