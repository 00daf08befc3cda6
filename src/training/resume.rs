//! A run that goes on: where it was, and whether it is the same one.

use super::{checkpoints, corpus::read_text, world::World};
use crate::{
    Error, guarded,
    terminal::{WrongArgument, note},
};
use burn::tensor::{Device, Tensor};
use serde_json::Value;
use std::{env, fs, path::Path};

/// What a run was begun with.
const SETTINGS: &str = "settings.json";
/// The settings that may change where a run is made longer: the steps, and those from one checkpoint to the next.
const LONGER: [&str; 2] = ["steps", "checkpoint-every"];
/// The setting that may change: a run goes on with other data, and says so.
const DATA: &str = "data";
/// What tells the checkpoint from others that a run begins with. Runs of before it was written down have none.
pub const BASE: &str = "base";
/// What a finished run has written.
const RESULTS: [&str; 3] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
];

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
    let folder = history.join(checkpoints::FOLDER);
    let last = checkpoints::last(&folder, optimizer_parts)?;
    // A checkpoint in other parts is none to go on from, and would be lost all the same.
    let is_begun = checkpoints::last(&folder, 1)?.is_some();
    let has_result = RESULTS.iter().any(|result| out.join(result).exists());
    let name = out.display();
    let resume = resume || is_begun && is_restarted();
    match (resume, last) {
        (true, Some(step)) => Ok(Some(step)),
        (true, None) if is_begun => {
            let reason = format!(
                "{name}: has no checkpoint to go on from with {optimizer_parts} parts of the optimizer, which are as many as processes by --shard-optimizer: it was begun with others"
            );
            Err(WrongArgument(reason).into())
        }
        (true, None) => Err(format!("{name}: has no checkpoint to go on from").into()),
        (false, None) if !is_begun && !has_result => Ok(None),
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

/// Writes the settings of a new run or of one made longer, and checks those of a run that goes on from the step `begun`.
///
/// # Errors
/// The settings cannot be written, a process is lost, or the run cannot go on with these settings or this checkpoint.
pub fn keep_settings(
    world: &World,
    history: &Path,
    settings: &Value,
    begun: Option<usize>,
    optimizer_part: usize,
) -> Result<(), Error> {
    if let Some(step) = begun {
        let is_longer = check(history, settings, step, optimizer_part)?;
        if !is_longer {
            return Ok(());
        }
        // Another process may still read the file.
        world.wait_for_all()?;
    }
    match world.place().is_first() {
        true => write_settings(history, settings),
        false => Ok(()),
    }
}

fn write_settings(history: &Path, settings: &Value) -> Result<(), Error> {
    let path = history.join(SETTINGS);
    fs::create_dir_all(history)
        .and_then(|()| fs::write(&path, format!("{settings:#}\n")))
        .map_err(|error| format!("{}: {error}", path.display()).into())
}

/// True if the run is made longer. Refuses to go on with other settings than the run was begun with, with a checkpoint that is broken, and where Burn could not
/// restore the optimizer.
///
/// # Errors
/// Naming the setting, the file or the device.
fn check(
    history: &Path,
    settings: &Value,
    step: usize,
    optimizer_part: usize,
) -> Result<bool, Error> {
    let path = history.join(SETTINGS);
    let begun: Value = serde_json::from_str(&read_text(&path)?)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let [before, now] = [&begun, settings].map(|of| of[LONGER[0]].as_u64());
    let is_longer = before.zip(now).is_some_and(|(before, now)| before < now);
    let fields = settings.as_object().into_iter().flatten();
    let mut others: Vec<_> = fields
        .filter(|(name, value)| begun[name.as_str()] != **value)
        .collect();
    // Other steps change the default of other settings. What weights are in says more than that they are others.
    others.sort_by_key(|(name, _)| match name.as_str() {
        "steps" => 0,
        BASE => 2,
        _ => 1,
    });
    for (name, value) in others {
        if is_longer && LONGER.contains(&name.as_str()) {
            continue;
        }
        if name == DATA {
            note("the data are others than the run was begun with");
            continue;
        }
        let before = &begun[name.as_str()];
        if name == BASE && before.is_null() {
            continue;
        }
        let reason = format!("{name} is {value}, but the run was begun with {before}");
        return Err(WrongArgument(reason).into());
    }
    checkpoints::check(&history.join(checkpoints::FOLDER), step, optimizer_part)?;
    check_default_device()?;
    Ok(is_longer)
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn write(path: &Path) {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, []).expect("a file");
    }

    /// Whoever has as many processes as before goes on; whoever has others does not begin anew where something would be lost.
    #[test]
    fn checkpoints_in_other_parts_are_not_lost() {
        for (files, own, other) in [
            (&["model", "optimizer", "schedule"][..], 1, 2),
            (&["model", "optimizer", "optimizer-1", "schedule"], 2, 8),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let (out, history) = (folder.path(), folder.path().join("run"));
            let step = history.join(checkpoints::FOLDER).join("step-3");
            for file in files {
                write(&step.join(file).with_extension("bpk"));
            }
            assert_eq!(begun(out, &history, true, own).expect("begun"), Some(3));
            for parts in [own, other] {
                let error = begun(out, &history, false, parts).expect_err("lost");
                assert!(error.to_string().contains("--resume"), "{error}");
            }
            let error = begun(out, &history, true, other).expect_err("other parts");
            assert!(
                error.to_string().contains("parts of the optimizer"),
                "{error}"
            );
        }
    }

    #[test]
    fn models_that_are_there_are_not_lost() {
        for name in RESULTS {
            let folder = tempfile::tempdir().expect("a folder");
            let (out, history) = (folder.path(), folder.path().join("run"));
            assert_eq!(begun(out, &history, false, 1).expect("nothing"), None);
            write(&out.join(name));
            let error = begun(out, &history, false, 1).expect_err("lost");
            assert!(error.to_string().contains("has a model already"), "{error}");
        }
    }

    /// Whatever its numbers: some are read as their neighbours.
    #[test]
    fn a_run_has_its_own_settings() {
        let folder = tempfile::tempdir().expect("a folder");
        for number in 1..1000u16 {
            let settings = json!({"weight-decay": f32::from(number) / 1000.0});
            write_settings(folder.path(), &settings).expect("written");
            let outcome = check(folder.path(), &settings, 3, 0);
            let error = outcome.expect_err("there is no checkpoint").to_string();
            assert!(!error.contains("weight-decay"), "{error}");
        }
    }
}
