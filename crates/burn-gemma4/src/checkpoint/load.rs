//! Loads models from a folder, from a GGUF file or from bytes.

use super::files::TensorFiles;
use super::folder::Folder;
use super::gguf::Gguf;
use super::loader::{Loader, WeightForm, load_module};
use super::options::{LoadOptions, Quantization};
use super::placement::Wanted;
use super::source::WeightSource;
use crate::config::Gemma4Config;
use crate::config::quantization::schemes_of;
use crate::config::unknown_files::missing;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::op::device_memory::DeviceMemory;
use burn::tensor::Device;
use std::{fs, path::Path, sync::Arc};

impl Gemma4Model {
    /// Loads the weights at `path`, which is a folder in Hugging Face's layout or a GGUF file.
    ///
    /// A folder's weights may be quantized by compressed-tensors, or by Google's method "gemma". Only the text model of a
    /// multimodal checkpoint is loaded. The host holds about one tensor at a time.
    ///
    /// # Errors
    /// Returns an error if a file is missing, truncated or malformed, or if the device does not compute in the
    /// requested dtype. If tensors do not fit the configuration, the error lists all such tensors.
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

    /// Loads a folder as [`load`](Self::load) does, with a configuration that has been read already.
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

    /// Loads a GGUF file as [`load`](Self::load) does, with a configuration that has been read already.
    pub(crate) fn load_gguf(
        gguf: Gguf,
        config: &Gemma4Config,
        device: &Device,
        options: LoadOptions<'_>,
    ) -> Result<Self, Gemma4Error> {
        let path = gguf.path().to_owned();
        load(&path, Arc::new(gguf), config, device, options)
    }

    /// Loads a model from the contents of a `config.json` and of a `model.safetensors`.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
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
    weights: Arc<dyn WeightSource>,
    config: &Gemma4Config,
    device: &Device,
    options: LoadOptions<'_>,
) -> Result<Gemma4Model, Gemma4Error> {
    let target = options.quantization.target();
    let form = match options.quantization == Quantization::Whole {
        true => WeightForm::Whole,
        false => WeightForm::Words(target),
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
        loader.activation_scales(model);
        split = loader.place(model, &weights, wanted, device)?;
        if let WeightForm::Words(target) = form {
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
