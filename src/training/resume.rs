//! A run that goes on: where it was, and whether it is the same one.

use super::{checkpoints, corpus::read_text};
use crate::{
    Error, guarded,
    terminal::{WrongArgument, note},
};
use burn::tensor::{Device, Tensor};
use serde_json::Value;
use std::{env, fs, path::Path};

/// What a run was begun with.
const SETTINGS: &str = "settings.json";
/// The setting that may change: a run goes on with other data, and says so.
const DATA: &str = "data";
/// What a finished run has written.
const RESULTS: [&str; 2] = ["model.safetensors", "adapter_model.safetensors"];

/// The steps of the checkpoint, with as many parts of the optimizer, to go on from, if the run in the folder `out` is to go on.
///
/// # Errors
/// Where there is nothing to go on from, or something that would be lost.
pub fn begun(
    out: &Path,
    history: &Path,
    resume: bool,
    optimizer_parts: usize,
) -> Result<Option<usize>, Error> {
    let last = checkpoints::last(&history.join(checkpoints::FOLDER), optimizer_parts)?;
    let name = out.display();
    let resume = resume || last.is_some() && is_restarted();
    match (resume, last) {
        (true, Some(step)) => Ok(Some(step)),
        (true, None) => Err(format!("{name}: has no checkpoint to go on from").into()),
        (false, None) if !RESULTS.iter().any(|result| out.join(result).exists()) => Ok(None),
        (false, _) => {
            let reason = format!(
                "{name}: has a model already: --resume goes on with it, and another --out begins anew"
            );
            Err(WrongArgument(reason).into())
        }
    }
}

/// Whether torchrun or Slurm has started the run again, after a failure, as it was begun.
fn is_restarted() -> bool {
    let counts = ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"];
    let count = |name| env::var(name).ok()?.parse::<usize>().ok();
    counts.iter().filter_map(count).any(|count| count > 0)
}

/// What all processes of a run have to agree on: its settings, and the steps of the checkpoint that they go on from.
pub fn of_all(settings: &Value, begun: Option<usize>) -> Value {
    let mut all = settings.clone();
    if let Some(all) = all.as_object_mut() {
        all.insert("the step to go on from".into(), begun.into());
    }
    all
}

/// Writes down what a run is begun with.
///
/// # Errors
/// Where it cannot be written.
pub fn write_settings(history: &Path, settings: &Value) -> Result<(), Error> {
    let path = history.join(SETTINGS);
    fs::create_dir_all(history)
        .and_then(|()| fs::write(&path, format!("{settings:#}\n")))
        .map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Refuses to go on with other settings than the run was begun with, with a checkpoint that is broken, and where Burn could not
/// restore the optimizer.
///
/// # Errors
/// Naming the setting, the file or the device.
pub fn check(
    history: &Path,
    settings: &Value,
    step: usize,
    optimizer_part: usize,
) -> Result<(), Error> {
    let path = history.join(SETTINGS);
    let begun: Value = serde_json::from_str(&read_text(&path)?)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let fields = settings.as_object().into_iter().flatten();
    for (name, value) in fields.filter(|(name, value)| begun[name.as_str()] != **value) {
        if name == DATA {
            note("the data are others than the run was begun with");
            continue;
        }
        let before = &begun[name.as_str()];
        let reason = format!("{name} is {value}, but the run was begun with {before}");
        return Err(WrongArgument(reason).into());
    }
    checkpoints::check(&history.join(checkpoints::FOLDER), step, optimizer_part)?;
    check_default_device()
}

/// Burn restores an optimizer's numbers on its default device, whichever the model is on.
fn check_default_device() -> Result<(), Error> {
    let open = || Tensor::<1>::zeros([1], &Device::default()).into_data();
    guarded(open).map(|_| ()).map_err(|reason| {
        format!(
            "Burn's default device, on which it restores optimizers, does not open: BURN_DEVICE=flex chooses the processor. {reason}"
        )
        .into()
    })
}
