//! The models of a server of embeddings.

use crate::{
    Error, device::Chosen, device::DeviceName, embedding, loading::with_device,
    model::ModelArguments, model::WeightForm, terminal::WrongArgument, terminal::note,
};
use burn_gemma4::{DeviceUse, EmbeddingGemma};
use std::path::Path;
use std::thread;

/// Loads the embedding model in a folder to each device, by a thread for each. Returns the models with the names of
/// their devices. Engines on the CPU share one copy of the weights.
///
/// # Errors
/// Returns an error if a device does not exist, if the checkpoint is invalid, or if the arguments ask for quantized
/// weights.
pub(super) fn load(
    folder: &Path,
    arguments: &ModelArguments,
) -> Result<Vec<(String, EmbeddingGemma)>, Error> {
    if let Some(WeightForm::Q8 | WeightForm::Q4) = arguments.quantize {
        let reason = "--quantize: the weights of embedding models are not quantized".to_owned();
        return Err(WrongArgument(reason).into());
    }
    let devices = arguments.device.choose_all()?;
    devices.iter().for_each(note);
    let load = |chosen: &Chosen| embedding::load(folder, chosen, arguments.dtype);
    let models = match devices[0].name == DeviceName::Flex || devices.len() == 1 {
        true => vec![load(&devices[0])?; devices.len()],
        // Each engine's thread takes over the stream of the thread that loaded its model.
        false => thread::scope(|scope| {
            let loads: Vec<_> = devices
                .iter()
                .map(|chosen| {
                    scope.spawn(|| {
                        let _in_use = DeviceUse::begin(&chosen.device);
                        load(chosen).map_err(|error| with_device(error, chosen))
                    })
                })
                .collect();
            let models = loads.into_iter().map(|load| {
                load.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            models.collect::<Result<Vec<_>, Error>>()
        })?,
    };
    let labels = devices.iter().map(Chosen::label);
    let models = labels.zip(models).collect();
    note(
        "note: the model computes embeddings, and /v1/embeddings is served; the arguments of adapters, images, audio and \
         the prefix cache, --max-running and --per-layer-table have no effect",
    );
    Ok(models)
}
