//! A model into a checkpoint as Hugging Face has it.

use super::{
    files::TensorFiles,
    folder::Folder,
    host_table::TABLE,
    names::{HEAD, Names},
    packed,
    source::Weights,
};
use crate::{
    Gemma4Config, Gemma4Error, Gemma4Model,
    config::name_of,
    error::{existing, read},
};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Tensor, TensorData},
};
use safetensors::{Dtype, View, serialize_to_file};
use serde_json::Value;
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::Path,
    sync::Arc,
};

impl Gemma4Model {
    /// Writes `config.json` and `model.safetensors` into `folder`, which is made where it is not there:
    /// [`load`](Self::load) and transformers read them. The weights are in `dtype`, or as they are; quantized ones are whole,
    /// and low-rank adapters are merged into them. The tokenizer's files are the caller's.
    ///
    /// Tensors leave the device one at a time. A file is complete when it has its name: what was there before stays until
    /// then.
    ///
    /// ```no_run
    /// use burn::tensor::{DType, Device};
    /// use burn_gemma4::{Gemma4Model, LoadOptions};
    ///
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// let model = Gemma4Model::load("trained", &Device::default(), LoadOptions::new())?;
    /// model.save("smaller", Some(DType::BF16))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Where a file cannot be written, and as [`Gemma4Config::to_json`].
    ///
    /// # Panics
    /// If the dtype is none of f32, f16, bf16, or the device fails.
    pub fn save(&self, folder: impl AsRef<Path>, dtype: Option<DType>) -> Result<(), Gemma4Error> {
        let folder = folder.as_ref();
        let dtype = dtype.unwrap_or_else(|| self.dtype());
        let config = Gemma4Config {
            dtype: Some(dtype),
            ..self.config().clone()
        };
        let config = config.to_json()?;
        create(folder)?;
        let names = Names::of_text();
        write_tensors(
            &folder.join("model.safetensors"),
            None,
            self.stored(dtype)
                .into_iter()
                .map(|(path, tensor)| (names.in_file(&path), tensor)),
        )?;
        write_file(&folder.join("config.json"), config.as_bytes())
    }

    /// As [`save`](Self::save), in the way of the checkpoint in `base`, which this model was loaded from: the weights have the
    /// names that they have there, and what else is there is written as it is, such as the towers of a multimodal checkpoint.
    /// `config.json` is that of `base` but for the dtype. Weights that were packed there are whole.
    ///
    /// # Errors
    /// Where `base` cannot be read, describes another model, is no folder or has packed weights beside the text model's, and where a file
    /// cannot be written.
    ///
    /// # Panics
    /// As [`save`](Self::save).
    pub fn save_like(
        &self,
        base: impl AsRef<Path>,
        folder: impl AsRef<Path>,
        dtype: Option<DType>,
    ) -> Result<(), Gemma4Error> {
        let (base, folder) = (base.as_ref(), folder.as_ref());
        let dtype = dtype.unwrap_or_else(|| self.dtype());
        let config = config_like(&base.join("config.json"), self.config(), dtype)?;
        let files = Arc::new(TensorFiles::open(base)?);
        let names = Names::of(&files);
        let weights = self.stored(dtype);
        let kept = kept(&files, &names, weights.iter().map(|(path, _)| path))?;
        let kept = kept
            .into_iter()
            .map(|name| (name.to_owned(), Stored::kept(&files, name)));
        let mut tensors: BTreeMap<String, Stored> = kept.collect();
        tensors.extend(
            weights
                .into_iter()
                .map(|(path, tensor)| (names.in_file(&path), tensor)),
        );
        create(folder)?;
        write_tensors(&folder.join("model.safetensors"), None, tensors.into_iter())?;
        write_file(&folder.join("config.json"), config.as_bytes())
    }
}

impl Gemma4Model {
    /// The parameters by their paths, all of them whole.
    fn stored(&self, dtype: DType) -> Vec<(String, Stored)> {
        let model = self.valid().materialize();
        let mut parameters = stored(&model, dtype);
        for (path, numbers) in model.quantized_weights() {
            // Of its adapter, too.
            parameters.retain(|(parameter, _)| !parameter.starts_with(&format!("{path}.")));
            let shape = numbers.shape.clone();
            let read = move || numbers.bytes(dtype);
            parameters.push((path, Stored::of_read(shape, dtype_in_file(dtype), read)));
        }
        // The table's parts are no parameters of a checkpoint's.
        parameters.retain(|(path, _)| !path.starts_with("split_table."));
        parameters.extend(model.stored_table(dtype));
        parameters
    }
}

impl Gemma4Model {
    /// The table of per-layer embeddings, where it is no parameter.
    fn stored_table(&self, dtype: DType) -> Option<(String, Stored)> {
        let config = self.config();
        let rows = config.vocab_size_per_layer_input;
        let columns = config.num_layers() * config.hidden_size_per_layer_input;
        // In the model's own dtype first, as loading it to the device rounds it.
        let of_model = self.dtype();
        let rounded = move |bytes: Vec<u8>| {
            let data = TensorData::from_bytes_vec(bytes, [rows, columns], of_model);
            data.convert_dtype(dtype).into_bytes().to_vec()
        };
        let read: Box<dyn Fn() -> Vec<u8>> = match (&self.host_table, &self.split_table) {
            (Some(table), _) => {
                let table = table.clone();
                Box::new(move || rounded(table.whole(of_model)))
            }
            (None, Some(table)) => {
                let table = table.clone();
                Box::new(move || rounded(table.whole(of_model)))
            }
            (None, None) => return None,
        };
        let stored = Stored {
            shape: vec![rows, columns],
            dtype: dtype_in_file(dtype),
            read,
        };
        Some((TABLE.to_owned(), stored))
    }
}

/// The tensors that a model whose parameters are at `paths` does not have.
fn kept<'a>(
    files: &'a Arc<TensorFiles>,
    names: &Names,
    paths: impl Iterator<Item = impl AsRef<str>>,
) -> Result<BTreeSet<&'a str>, Gemma4Error> {
    let mut kept: BTreeSet<&str> = files.names().collect();
    // A head that repeats the embedding's table would repeat the old one.
    kept.remove(HEAD);
    let folder = Folder::of(files.clone(), Vec::new());
    for path in paths {
        for name in folder.names(path.as_ref()) {
            kept.remove(name.as_str());
        }
    }
    let is_packed = |name: &str| {
        let part = name.rsplit('.').next();
        part.is_some_and(|part| packed::PARTS.contains(&part))
    };
    // What nobody reads, of layers that have an earlier one's keys and values.
    kept.retain(|name| !(is_packed(name) && names.is_ours(name)));
    match kept.iter().find(|name| is_packed(name)) {
        None => Ok(kept),
        Some(name) => Err(Gemma4Error::Argument {
            argument: "base",
            reason: format!("has {name}, which is packed and not of the text model"),
        }),
    }
}

/// The configuration at `path`, which has to be `config`, with another dtype and without packed weights.
fn config_like(path: &Path, config: &Gemma4Config, dtype: DType) -> Result<String, Gemma4Error> {
    let base = Gemma4Config::from_file(path)?;
    let same = Gemma4Config {
        dtype: base.dtype,
        ..config.clone()
    };
    if base != same {
        return Err(Gemma4Error::Argument {
            argument: "base",
            reason: format!("{} describes another model", path.display()),
        });
    }
    let malformed = |error: serde_json::Error| Gemma4Error::Malformed {
        path: path.into(),
        reason: error.to_string(),
    };
    let mut json: Value = serde_json::from_slice(&read(path)?).map_err(malformed)?;
    // The text part's own dtype goes before that of the whole.
    for pointer in ["", "/text_config"] {
        if let Some(Value::Object(fields)) = json.pointer_mut(pointer) {
            fields.shift_remove("torch_dtype");
            fields.shift_remove("quantization_config");
            fields.insert("dtype".into(), name_of(dtype).into());
        }
    }
    Ok(format!("{json:#}\n"))
}

/// Makes a folder.
pub(crate) fn create(folder: &Path) -> Result<(), Gemma4Error> {
    fs::create_dir_all(folder).map_err(|source| Gemma4Error::Io {
        path: folder.to_owned(),
        source,
    })
}

/// Writes a file under another name and gives it its own when it is complete.
pub(crate) fn write_file(path: &Path, contents: &[u8]) -> Result<(), Gemma4Error> {
    replace(path, |partial| fs::write(partial, contents))
}

/// [`write_file`] of tensors, with one more of the file's metadata.
pub(crate) fn write_tensors<V: View>(
    path: &Path,
    metadata: Option<(&str, String)>,
    tensors: impl Iterator<Item = (String, V)>,
) -> Result<(), Gemma4Error> {
    // What transformers looks for in the file.
    let format = ("format", "pt".to_owned());
    let metadata = [format].into_iter().chain(metadata);
    let metadata: HashMap<String, String> = metadata
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
    replace(path, |partial| {
        serialize_to_file(tensors, Some(metadata), partial).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(error) => error,
            other => std::io::Error::other(other),
        })
    })
}

/// Writes a file by `write`, which gets another name in the same folder, and gives it its own when it is complete.
pub(super) fn replace(
    path: &Path,
    write: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<(), Gemma4Error> {
    let mut builder = partial();
    #[cfg(unix)]
    {
        // As other files are, less what the process takes away.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let written = builder.tempfile_in(folder_of(path)).and_then(|file| {
        let permissions = match fs::symlink_metadata(path) {
            // What its owner has made of it.
            Ok(former) if former.is_file() => former.permissions(),
            _ => file.as_file().metadata()?.permissions(),
        };
        // Where something goes wrong it is removed.
        let partial = file.into_temp_path();
        write(&partial)?;
        // safetensors puts a file in its place that only its owner may read.
        fs::set_permissions(&partial, permissions)?;
        fs::File::open(&partial)?.sync_all()?;
        Ok(partial.persist(path)?)
    });
    written.map_err(|source| Gemma4Error::Io {
        path: path.to_owned(),
        source,
    })
}

/// Makes what is not complete yet, a file or a folder, by a name that nobody else has: neither another process that writes to the same place
/// is in the way, nor what a killed one has left, nor a link.
pub(super) fn partial() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("partial-");
    builder
}

/// [`partial`] for a folder, which gets the permissions of other new folders: all but those that the umask takes away.
pub(super) fn partial_folder() -> tempfile::Builder<'static, 'static> {
    let mut builder = partial();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o777));
    }
    builder
}

/// The folder that a path is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// What belongs to a checkpoint beside its weights and their configuration.
const BESIDE: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
];

/// Copies what belongs to a checkpoint beside its weights and their configuration, such as the tokenizer, from one folder to another.
///
/// # Errors
/// Naming the file that cannot be copied.
pub fn copy_beside(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), Gemma4Error> {
    for name in BESIDE {
        if let Some(path) = existing(from.as_ref(), name)? {
            let copied = fs::copy(&path, to.as_ref().join(name));
            copied.map_err(|source| Gemma4Error::Io { path, source })?;
        }
    }
    Ok(())
}

/// The parameters of a module by their paths.
pub(crate) fn stored(module: &impl Module, dtype: DType) -> Vec<(String, Stored)> {
    let mut collected = Collected {
        path: Vec::new(),
        dtype,
        tensors: Vec::new(),
    };
    module.visit(&mut collected);
    collected.tensors
}

/// A tensor that is read from its device when it is written.
pub(crate) struct Stored {
    shape: Vec<usize>,
    dtype: Dtype,
    read: Box<dyn Fn() -> Vec<u8>>,
}

impl Stored {
    /// `tensor`, in `dtype` and in this shape.
    pub fn new<const D: usize>(
        shape: Vec<usize>,
        dtype: DType,
        tensor: impl Fn() -> Tensor<D> + 'static,
    ) -> Self {
        Self {
            shape,
            dtype: dtype_in_file(dtype),
            read: Box::new(move || {
                let data = tensor().into_data().convert_dtype(dtype);
                data.into_bytes().to_vec()
            }),
        }
    }

    /// So many numbers as they are written.
    pub fn of_bytes(shape: Vec<usize>, dtype: Dtype, bytes: Vec<u8>) -> Self {
        Self::of_read(shape, dtype, move || bytes.clone())
    }

    /// So many numbers as they are written, once they are asked for.
    pub fn of_read(shape: Vec<usize>, dtype: Dtype, read: impl Fn() -> Vec<u8> + 'static) -> Self {
        Self {
            shape,
            dtype,
            read: Box::new(read),
        }
    }

    /// The tensor called `name` as it is in `files`.
    fn kept(files: &Arc<TensorFiles>, name: &str) -> Self {
        let entry = files.get(name).expect("a name of these files");
        let (files, name) = (files.clone(), name.to_owned());
        Self {
            shape: entry.shape.clone(),
            dtype: entry.dtype,
            read: Box::new(move || {
                let entry = files.get(&name).expect("a name of these files");
                files.bytes(entry).to_vec()
            }),
        }
    }
}

/// The name in safetensors files of a dtype that checkpoints are in.
///
/// # Panics
/// For what no checkpoint is in.
pub(super) fn dtype_in_file(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => panic!(
            "a checkpoint is in f32, f16 or bf16, not in {}",
            other.name()
        ),
    }
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned((self.read)())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

struct Collected {
    path: Vec<String>,
    dtype: DType,
    tensors: Vec<(String, Stored)>,
}

impl ModuleVisitor for Collected {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape().to_vec();
        let param = param.clone();
        let stored = Stored::new(shape, self.dtype, move || param.val());
        self.tensors.push((self.path.join("."), stored));
    }
}
