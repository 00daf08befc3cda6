//! The loading of a model to its devices.

use crate::device::{Chosen, DeviceName};
use crate::host_memory::host_memory;
use crate::model::{ModelArguments, progress_bar, tell_dtype};
use crate::terminal::{is_wrong_argument, note};
use crate::{Dtype, Error, hub};
use burn_gemma4::{DeviceMemory, DeviceUse, EmbeddingGemma, Gemma4, LoadOptions, LoadProgress};
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A model that has been loaded to its device.
pub struct Loaded {
    /// The model.
    pub gemma: Gemma4,
    /// The device.
    pub chosen: Chosen,
    /// The duration of loading.
    pub time: Duration,
}

impl Loaded {
    /// Returns the name of the model's compute dtype, for messages to the user.
    pub fn dtype(&self) -> String {
        let dtype = self.gemma.dtype();
        Dtype::of(dtype).map_or_else(|| format!("{dtype:?}"), |dtype| dtype.to_string())
    }
}

/// The path of a model that is in this machine's file system, after a download if one was necessary.
pub struct ResolvedModel {
    path: Option<PathBuf>,
    /// The devices, if their memory decided which of several GGUF files to take.
    opened: Option<Vec<Chosen>>,
}

impl ResolvedModel {
    /// Returns the model's folder if it has an embedding model, and `None` for a model that generates text.
    ///
    /// # Errors
    /// Returns an error if the folder's `config.json` cannot be read or is not JSON.
    pub fn embedding_folder(&self) -> Result<Option<&Path>, Error> {
        Ok(match self.path.as_deref() {
            Some(path) if EmbeddingGemma::is_at(path)? => Some(path),
            _ => None,
        })
    }
}

impl ModelArguments {
    /// Finds the model, and downloads a model of the Hub that its cache lacks.
    ///
    /// # Errors
    /// Returns an error if the model cannot be found, or if a device does not exist.
    pub fn resolve_all(&self) -> Result<ResolvedModel, Error> {
        self.resolve(|| self.device.choose_all())
    }

    /// Loads the model, and attaches the adapter in the folder `adapter`. A progress bar is shown on standard error if
    /// that is a terminal.
    ///
    /// # Errors
    /// Returns an error if the arguments name several devices, if the device does not exist, or if the checkpoint or the
    /// adapter is invalid.
    pub fn load(&self, adapter: Option<&Path>) -> Result<Loaded, Error> {
        let devices = || Ok(vec![self.device.choose_one()?]);
        let mut loaded = self.load_to(self.resolve(devices)?, devices, adapter)?;
        Ok(loaded.remove(0))
    }

    /// Loads a resolved model to each device, and attaches the adapter in the folder `adapter`. The devices are loaded at the
    /// same time, each by a thread of its own. The threads share the pages of the memory-mapped checkpoint, so host memory
    /// holds one copy of the weights at most. Engines on the CPU share one copy of the weights.
    ///
    /// # Errors
    /// Returns an error if a device does not exist, or if the checkpoint or the adapter is invalid.
    pub fn load_all(
        &self,
        resolved: ResolvedModel,
        adapter: Option<&Path>,
    ) -> Result<Vec<Loaded>, Error> {
        self.load_to(resolved, || self.device.choose_all(), adapter)
    }

    fn resolve(
        &self,
        devices: impl FnOnce() -> Result<Vec<Chosen>, Error>,
    ) -> Result<ResolvedModel, Error> {
        // The memory of the devices is asked only if one of several GGUF files must be chosen. The devices are opened
        // once, after a wrong path was refused.
        let mut opened = None;
        let mut devices = Some(devices);
        let mut memory = || {
            if let Some(devices) = devices.take() {
                opened = Some(devices()?);
            }
            Ok(opened.iter().flatten().filter_map(memory_of).min())
        };
        let path = self.model.as_deref();
        let path = path
            .map(|path| hub::resolve(path, &mut memory))
            .transpose()?;
        Ok(ResolvedModel { path, opened })
    }

    fn load_to(
        &self,
        ResolvedModel { path, opened }: ResolvedModel,
        devices: impl FnOnce() -> Result<Vec<Chosen>, Error>,
        adapter: Option<&Path>,
    ) -> Result<Vec<Loaded>, Error> {
        let devices = match opened {
            Some(opened) => opened,
            None => devices()?,
        };
        devices.iter().for_each(note);
        if path.is_none() {
            note(
                "no --model: using the small model in this program, which was trained on this project's text",
            );
        }
        let bar = progress_bar()?;
        let start = Instant::now();
        let is_on_cpu = devices[0].name == DeviceName::Flex;
        let copies = if is_on_cpu { 1 } else { devices.len() };
        let progress = Progress::new(&bar, copies);
        let load = |index: usize| {
            self.load_one(path.as_deref(), &devices[index], &progress, index, adapter)
        };
        let mut models = match copies {
            1 => vec![load(0)?],
            _ => thread::scope(|scope| {
                let loads: Vec<_> = (0..copies)
                    .map(|index| {
                        let device = &devices[index].device;
                        scope.spawn(move || {
                            // No thread may capture a CUDA graph while another one loads.
                            let _in_use = DeviceUse::begin(device);
                            load(index)
                        })
                    })
                    .collect();
                let models = loads.into_iter().zip(&devices).map(|(load, device)| {
                    let loaded = load
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                    loaded.map_err(|error| with_device(error, device))
                });
                models.collect::<Result<Vec<_>, Error>>()
            })?,
        };
        bar.finish_and_clear();
        let time = start.elapsed();
        let first = models[0].clone();
        self.per_layer_table.tell(first.model());
        if path.is_some() && self.dtype.is_none() {
            tell_dtype(first.model());
        }
        for warning in first.warnings() {
            note(format_args!("warning: {warning}"));
        }
        if !is_on_cpu {
            note("note: compiling kernels; the first run on a device takes up to a minute longer");
        }
        models.resize(devices.len(), first);
        let loaded = models.into_iter().zip(devices);
        let loaded = loaded.map(|(gemma, chosen)| Loaded {
            gemma,
            chosen,
            time,
        });
        Ok(loaded.collect())
    }

    /// Loads the model to a device. `index` is the index of the device in the progress.
    fn load_one(
        &self,
        path: Option<&Path>,
        chosen: &Chosen,
        progress: &Progress<'_>,
        index: usize,
        adapter: Option<&Path>,
    ) -> Result<Gemma4, Error> {
        let mut options = LoadOptions::new()
            .on_progress(|loaded| progress.update(index, loaded))
            .per_layer_table(self.per_layer_table.into());
        if let Some(dtype) = self.dtype {
            options = options.dtype(chosen.dtype(Some(dtype))?.burn());
        }
        if let Some(form) = self.quantize {
            options = options.quantization(form.into());
        }
        let gemma = match path {
            Some(path) => Gemma4::load(path, &chosen.device, options),
            None => Gemma4::embedded(&chosen.device, options),
        }?;
        match adapter {
            Some(folder) => Ok(gemma.attach_adapter(folder)?),
            None => Ok(gemma),
        }
    }
}

/// Returns the memory of a device in bytes, or `None` if the device does not report its memory. A CPU has the memory of
/// the host.
fn memory_of(chosen: &Chosen) -> Option<u64> {
    let total = match chosen.name {
        DeviceName::Flex => host_memory().map(|[total, _]| total),
        _ => DeviceMemory::of(&chosen.device).total,
    };
    total.map(|total| total as u64)
}

/// Adds the name of the device to an error. A wrong argument does not depend on the device, and keeps the type that
/// decides the exit code.
pub(crate) fn with_device(error: Error, device: &Chosen) -> Error {
    match is_wrong_argument(&error) {
        true => error,
        false => format!("{}: {error}", device.label()).into(),
    }
}

/// The progress of all devices in one bar.
struct Progress<'a> {
    bar: &'a ProgressBar,
    /// The number of bytes that each device has got.
    bytes: Vec<AtomicUsize>,
}

impl<'a> Progress<'a> {
    fn new(bar: &'a ProgressBar, devices: usize) -> Self {
        Self {
            bar,
            bytes: (0..devices).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    fn update(&self, index: usize, loaded: LoadProgress<'_>) {
        self.bytes[index].store(loaded.bytes, Ordering::Relaxed);
        let bytes = self.bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed));
        self.bar
            .set_length((loaded.total_bytes * self.bytes.len()) as u64);
        self.bar.set_position(bytes.sum::<usize>() as u64);
        self.bar.set_message(loaded.tensor.to_string());
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::device::choose;
    use crate::terminal::code_of;
    use burn_gemma4::Gemma4Error;

    #[test]
    fn error_of_a_device_names_the_device_and_keeps_the_exit_code() {
        let mut device = choose(DeviceName::Flex).expect("the CPU exists");
        device.number = Some(1);
        let argument = Gemma4Error::Argument {
            argument: "quantization",
            reason: "is not supported".into(),
        };
        let argument = with_device(argument.into(), &device);
        assert_eq!(code_of(&argument), 2);
        let failed = with_device(Gemma4Error::Device("out of memory".into()).into(), &device);
        assert_eq!(code_of(&failed), 1);
        assert_eq!(failed.to_string(), "flex:1: device: out of memory");
    }
}
