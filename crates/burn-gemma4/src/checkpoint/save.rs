//! Saves a model as a checkpoint in Hugging Face's layout.

use super::files::TensorFiles;
use super::floats8;
use super::folder::Folder;
use super::media_towers::MediaTowers;
use super::names::{HEAD, Names};
use super::packed;
use super::source::WeightSource;
use crate::config::quantization::QuantizationSchemes;
use crate::config::{Gemma4Config, name_of};
use crate::error::{Gemma4Error, existing, read};
use crate::model::Gemma4Model;
use crate::model::host_table::TABLE;
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

/// The refused action in an error about a model from a mobile checkpoint, because the saved files have no scales.
const SAVING: &str = "saving";

impl Gemma4Model {
    /// Writes the model to the files `config.json` and `model.safetensors` in `folder`. If `folder` is missing, it is
    /// created. [`load`](Self::load) and Hugging Face Transformers can read these files.
    ///
    /// The weights are written in `dtype`, by default in the model's dtype. Quantized weights are dequantized, and LoRA
    /// adapters are merged. The tokenizer's files are not written.
    ///
    /// An older file is replaced only when the new file is complete.
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
    /// Returns an error if a file cannot be written, or if the model comes from a mobile checkpoint, whose static
    /// scales the written files could not hold. Also returns the errors of [`Gemma4Config::to_json`].
    ///
    /// # Panics
    /// Panics if the dtype is not f32, f16 or bf16, or if the device fails.
    pub fn save(&self, folder: impl AsRef<Path>, dtype: Option<DType>) -> Result<(), Gemma4Error> {
        let folder = folder.as_ref();
        self.refuse_if_mobile(SAVING)?;
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

    /// Saves the model as [`save`](Self::save) does, but in the layout of the checkpoint `base`, from which the model
    /// was loaded.
    ///
    /// Each weight keeps its name in `base`. Other tensors of `base` are copied unchanged, such as the towers of a
    /// multimodal checkpoint. Weights that are packed in `base` are written unquantized.
    ///
    /// # Errors
    /// Returns an error if `base` cannot be read, describes another model, is not a folder or has packed weights outside
    /// the text model. Also returns an error if a file cannot be written.
    ///
    /// # Panics
    /// Panics like [`save`](Self::save).
    pub fn save_like(
        &self,
        base: impl AsRef<Path>,
        folder: impl AsRef<Path>,
        dtype: Option<DType>,
    ) -> Result<(), Gemma4Error> {
        self.save_like_with_towers(base, None, folder, dtype)
    }

    /// Saves the model as [`save_like`](Self::save_like) does, with the adapters of `towers` merged into their weights.
    /// All other tensors of the towers are those of `base`.
    ///
    /// # Errors
    /// Returns the errors of [`save_like`](Self::save_like).
    ///
    /// # Panics
    /// Panics like [`save`](Self::save).
    pub fn save_like_with_towers(
        &self,
        base: impl AsRef<Path>,
        towers: Option<&MediaTowers>,
        folder: impl AsRef<Path>,
        dtype: Option<DType>,
    ) -> Result<(), Gemma4Error> {
        let (base, folder) = (base.as_ref(), folder.as_ref());
        self.refuse_if_mobile(SAVING)?;
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
        tensors.extend(
            towers
                .into_iter()
                .flat_map(|towers| towers.adapted_weights(dtype)),
        );
        create(folder)?;
        write_tensors(&folder.join("model.safetensors"), None, tensors.into_iter())?;
        write_file(&folder.join("config.json"), config.as_bytes())
    }
}

impl Gemma4Model {
    /// Returns all parameters with their paths. Quantized weights are returned in dequantized form.
    fn stored(&self, dtype: DType) -> Vec<(String, Stored)> {
        let model = self.valid().materialize();
        let mut parameters = stored(&model, dtype);
        for (path, numbers) in model.quantized_weights() {
            // The dequantized weight already includes the weight's adapter, so remove the adapter's parameters. The
            // paths of the adapter's parameters begin with the weight's path.
            parameters.retain(|(parameter, _)| !parameter.starts_with(&format!("{path}.")));
            let shape = numbers.shape.clone();
            let read = move || numbers.bytes(dtype);
            parameters.push((path, Stored::of_read(shape, dtype_in_file(dtype), read)));
        }
        // Remove the tensors of a split per-layer embedding table. The next line adds the whole table.
        parameters.retain(|(path, _)| !path.starts_with("split_table."));
        parameters.extend(model.stored_table(dtype));
        parameters
    }
}

impl Gemma4Model {
    /// Returns the per-layer embedding table if the table is in host memory or split into several tensors. In these
    /// cases, the table is not one of the model's parameters.
    fn stored_table(&self, dtype: DType) -> Option<(String, Stored)> {
        let config = self.config();
        let rows = config.vocab_size_per_layer_input;
        let columns = config.num_layers() * config.hidden_size_per_layer_input;
        // First round the table to the model's dtype, as the loader does with a table on the device.
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

/// Returns the names of the tensors in `files` that are copied unchanged to the saved checkpoint. `paths` are the paths
/// of the model's parameters.
fn kept<'a>(
    files: &'a Arc<TensorFiles>,
    names: &Names,
    paths: impl Iterator<Item = impl AsRef<str>>,
) -> Result<BTreeSet<&'a str>, Gemma4Error> {
    let mut kept: BTreeSet<&str> = files.names().collect();
    // Do not copy the output projection. It may repeat the old embedding table of `base`, and the model's embedding
    // table may have changed since.
    kept.remove(HEAD);
    let folder = Folder::of(files.clone(), QuantizationSchemes::default());
    for path in paths {
        for name in folder.names(path.as_ref()) {
            kept.remove(name.as_str());
        }
    }
    let is_packed = |name: &str| {
        let part = name.rsplit('.').next();
        let is_part = |part| packed::PARTS.contains(&part) || floats8::PARTS.contains(&part);
        part.is_some_and(is_part) || files.get(name).is_some_and(floats8::is_fp8)
    };
    // Do not copy the packed K and V projections that no layer uses, because the saved checkpoint has no packed
    // weights.
    kept.retain(|name| !(is_packed(name) && names.is_ours(name)));
    match kept.iter().find(|name| is_packed(name)) {
        None => Ok(kept),
        Some(name) => Err(Gemma4Error::Argument {
            argument: "base",
            reason: format!("has {name}, which is packed and outside the text model"),
        }),
    }
}

/// Returns the text of the `config.json` at `path`, with the given dtype and without a description of packed weights.
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
    // Set the dtype in `text_config` too, because that dtype takes precedence over the top-level dtype.
    for pointer in ["", "/text_config"] {
        if let Some(Value::Object(fields)) = json.pointer_mut(pointer) {
            fields.shift_remove("torch_dtype");
            fields.shift_remove("quantization_config");
            fields.insert("dtype".into(), name_of(dtype).into());
        }
    }
    Ok(format!("{json:#}\n"))
}

/// Creates a folder, and its parents if they are missing.
pub(crate) fn create(folder: &Path) -> Result<(), Gemma4Error> {
    fs::create_dir_all(folder).map_err(|source| Gemma4Error::Io {
        path: folder.to_owned(),
        source,
    })
}

/// Writes a file under a temporary name, and renames the file when it is complete.
pub(crate) fn write_file(path: &Path, contents: &[u8]) -> Result<(), Gemma4Error> {
    replace(path, |partial| fs::write(partial, contents))
}

/// Writes tensors to a safetensors file, and replaces an older file when the new file is complete.
pub(crate) fn write_tensors<V: View>(
    path: &Path,
    metadata: Option<(&str, String)>,
    tensors: impl Iterator<Item = (String, V)>,
) -> Result<(), Gemma4Error> {
    // Add the entry `format` to the metadata, because Hugging Face Transformers requires this entry.
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

/// Replaces the file at `path` atomically. `write` fills a temporary file, which is then renamed.
pub(super) fn replace(
    path: &Path,
    write: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<(), Gemma4Error> {
    let mut builder = partial();
    #[cfg(unix)]
    {
        // Request the permissions of an ordinary new file. The umask removes some of these permissions.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let written = builder.tempfile_in(folder_of(path)).and_then(|file| {
        let permissions = match fs::symlink_metadata(path) {
            // If a file with the final name exists already, the new file gets the permissions of the existing file.
            Ok(former) if former.is_file() => former.permissions(),
            _ => file.as_file().metadata()?.permissions(),
        };
        // If an error occurs from here on, dropping `partial` removes the temporary file.
        let partial = file.into_temp_path();
        write(&partial)?;
        // Set the permissions again: after safetensors has written the file, only the file's owner can read it.
        fs::set_permissions(&partial, permissions)?;
        fs::File::open(&partial)?.sync_all()?;
        Ok(partial.persist(path)?)
    });
    written.map_err(|source| Gemma4Error::Io {
        path: path.to_owned(),
        source,
    })
}

/// Returns a builder of temporary files and folders with unique names.
pub(super) fn partial() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("partial-");
    builder
}

/// Returns a builder of temporary folders as [`partial`] does, but with the permissions of ordinary new folders.
pub(super) fn partial_folder() -> tempfile::Builder<'static, 'static> {
    let mut builder = partial();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o777));
    }
    builder
}

/// Returns the folder that contains `path`.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// The names of a checkpoint's files other than the weights and the configuration.
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

/// Copies the files beside a checkpoint's weights, such as the tokenizer, from one folder to another. `config.json` is
/// not copied.
///
/// # Errors
/// Returns an error that names the file that cannot be copied.
pub fn copy_beside(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), Gemma4Error> {
    for name in BESIDE {
        if let Some(path) = existing(from.as_ref(), name)? {
            let copied = fs::copy(&path, to.as_ref().join(name));
            copied.map_err(|source| Gemma4Error::Io { path, source })?;
        }
    }
    Ok(())
}

/// Returns the parameters of a module with their paths, to be written in `dtype`.
pub(crate) fn stored(module: &impl Module, dtype: DType) -> Vec<(String, Stored)> {
    let mut collected = Collected {
        path: Vec::new(),
        dtype,
        tensors: Vec::new(),
    };
    module.visit(&mut collected);
    collected.tensors
}

/// A tensor to write. Its elements are copied from the device only when the file is written.
pub(crate) struct Stored {
    shape: Vec<usize>,
    dtype: Dtype,
    read: Box<dyn Fn() -> Vec<u8>>,
}

impl Stored {
    /// Creates a tensor to write from `tensor`, which has the shape `shape`. The elements are written in `dtype`.
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

    /// Creates a tensor to be written, from bytes that are already in the file's format.
    pub fn of_bytes(shape: Vec<usize>, dtype: Dtype, bytes: Vec<u8>) -> Self {
        Self::of_read(shape, dtype, move || bytes.clone())
    }

    /// Creates a tensor to write. `read` returns the tensor's bytes in the file's format.
    pub fn of_read(shape: Vec<usize>, dtype: Dtype, read: impl Fn() -> Vec<u8> + 'static) -> Self {
        Self {
            shape,
            dtype,
            read: Box::new(read),
        }
    }

    /// Creates a tensor to be written, as an unchanged copy of the tensor called `name` in `files`.
    fn kept(files: &Arc<TensorFiles>, name: &str) -> Self {
        let entry = files.get(name).expect("the name was listed by these files");
        let (files, name) = (files.clone(), name.to_owned());
        Self {
            shape: entry.shape.clone(),
            dtype: entry.dtype,
            read: Box::new(move || {
                let entry = files
                    .get(&name)
                    .expect("the name was listed by these files");
                files.bytes(entry).to_vec()
            }),
        }
    }
}

/// Returns the safetensors dtype for a checkpoint's dtype.
///
/// # Panics
/// Panics if the dtype is not f32, f16 or bf16.
pub(super) fn dtype_in_file(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => panic!(
            "a checkpoint's dtype is f32, f16 or bf16, but this is {}",
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
