//! Decides how a run resumes: finds its last checkpoint, and checks that its settings have not changed.

use crate::{
    Error, InvalidArgument, checkpoint::checkpoints, data::corpus::read_text,
    distributed::ProcessGroup, report::note,
};
use burn::tensor::{Device, Tensor};
use burn_gemma4::catch_panic;
use serde_json::Value;
use std::{env, fs, path::Path};

/// The name of the file with the settings of the run.
const SETTINGS: &str = "settings.json";
/// The settings that may change when a run is extended: the number of steps, and the number of steps between two
/// checkpoints.
const LONGER: [&str; 2] = ["steps", "checkpoint-every"];
/// The name of the setting with the hash of the data. If the hash changes, the run prints a note and resumes.
const DATA: &str = "data";
/// The name of the setting with the fingerprint of the base model. Runs of older versions lack this setting.
pub const BASE: &str = "base";
/// The files that a finished run leaves in its folder.
const RESULTS: [&str; 3] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
];

/// Returns the step of the checkpoint from which the run in the folder `out` resumes, or `None` for a new run. The
/// checkpoint's optimizer record must have `optimizer_parts` shards.
///
/// # Errors
/// Returns an error if there is no checkpoint to resume from, or if a new run would overwrite a model or a checkpoint.
pub fn find_checkpoint(
    out: &Path,
    history: &Path,
    resume: bool,
    optimizer_parts: usize,
) -> Result<Option<usize>, Error> {
    let folder = history.join(checkpoints::FOLDER);
    let last = checkpoints::last(&folder, optimizer_parts)?;
    // `is_begun` is true if a checkpoint exists, even if its number of optimizer shards differs from this run's number.
    // A new run would overwrite this checkpoint, so the new run must be refused.
    let is_begun = checkpoints::last(&folder, 1)?.is_some();
    let has_result = RESULTS.iter().any(|result| out.join(result).exists());
    let name = out.display();
    let resume = resume || is_begun && is_restarted();
    match (resume, last) {
        (true, Some(step)) => Ok(Some(step)),
        (true, None) if is_begun => {
            let reason = format!(
                "{name}: has no checkpoint to resume from with {optimizer_parts} parts of the optimizer; expected the --shard-optimizer and the number of processes that the run began with"
            );
            Err(InvalidArgument(reason).into())
        }
        (true, None) => Err(format!("{name}: has no checkpoint to resume from").into()),
        (false, None) if !is_begun && !has_result => Ok(None),
        (false, _) => {
            let reason = format!(
                "{name}: has a model already; --resume continues its run, and another --out starts a new one"
            );
            Err(InvalidArgument(reason).into())
        }
    }
}

/// True if torchrun or Slurm has restarted the run after a failure. A restarted run has its original arguments, so
/// `--resume` may be missing.
fn is_restarted() -> bool {
    let counts = ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"];
    let count = |name| env::var(name).ok()?.parse::<usize>().ok();
    counts.iter().filter_map(count).any(|count| count > 0)
}

/// Returns the settings that all processes must share, together with the step of the checkpoint to resume from.
pub fn shared_settings(settings: &Value, begun: Option<usize>) -> Value {
    let mut all = settings.clone();
    if let Some(all) = all.as_object_mut() {
        all.insert("the step to resume from".into(), begun.into());
    }
    all
}

/// Writes the settings of a new or extended run to its folder. If the run is resumed, `begun` is the step of its checkpoint.
/// The settings and the checkpoint of a resumed run are checked first.
///
/// # Errors
/// Returns an error if the settings cannot be written, if a process is lost, or if the run cannot resume with these settings
/// or this checkpoint.
pub fn keep_settings(
    group: &ProcessGroup,
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
        // Wait before the first process writes the file, because another process may still be reading the file.
        group.wait_for_all()?;
    }
    match group.rank().is_first() {
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

/// Checks that a run can resume, and returns true if the run is extended to more steps. The settings must equal those
/// with which the run began. There are exceptions for [`LONGER`] in an extended run, for [`DATA`], and for a run that
/// lacks [`BASE`]. The checkpoint must be intact, and Burn's default device must open.
///
/// # Errors
/// The error names the setting, the file or the device.
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
    // The error names only the first setting that differs, so the cause must come before its effects. A change of `steps`
    // changes other defaults, so `steps` comes first. A change of the weight format changes the base model's fingerprint, so
    // the fingerprint comes last.
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
            note("the data differ from those that the run began with");
            continue;
        }
        let before = &begun[name.as_str()];
        if name == BASE && before.is_null() {
            continue;
        }
        let reason = format!("{name} is {value}, but the run was begun with {before}");
        return Err(InvalidArgument(reason).into());
    }
    checkpoints::check(&history.join(checkpoints::FOLDER), step, optimizer_part)?;
    check_default_device()?;
    Ok(is_longer)
}

/// Checks that Burn's default device opens. Burn restores an optimizer's state there even if the model is on another device.
fn check_default_device() -> Result<(), Error> {
    let open = || Tensor::<1>::zeros([1], &Device::default()).into_data();
    catch_panic(open).map(|_| ()).map_err(|reason| {
        format!(
            "Burn's default device, on which it restores optimizers, does not open; set BURN_DEVICE=flex to use the CPU. {reason}"
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

    /// Checks that a run resumes only from a checkpoint whose optimizer record has the run's number of shards. A new run is
    /// always refused, because it would overwrite the checkpoint.
    #[test]
    fn checkpoint_with_other_optimizer_parts_is_refused() {
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
            assert_eq!(
                find_checkpoint(out, &history, true, own).expect("a checkpoint"),
                Some(3)
            );
            for parts in [own, other] {
                let error = find_checkpoint(out, &history, false, parts)
                    .expect_err("a new run would overwrite the checkpoint");
                assert!(error.to_string().contains("--resume"), "{error}");
            }
            let error =
                find_checkpoint(out, &history, true, other).expect_err("another number of parts");
            assert!(
                error.to_string().contains("parts of the optimizer"),
                "{error}"
            );
        }
    }

    #[test]
    fn new_run_over_existing_model_is_refused() {
        for name in RESULTS {
            let folder = tempfile::tempdir().expect("a folder");
            let (out, history) = (folder.path(), folder.path().join("run"));
            assert_eq!(
                find_checkpoint(out, &history, false, 1).expect("a new run"),
                None
            );
            write(&out.join(name));
            let error = find_checkpoint(out, &history, false, 1)
                .expect_err("a new run would overwrite the model");
            assert!(error.to_string().contains("has a model already"), "{error}");
        }
    }

    /// Checks that settings keep their exact values in the file. A decimal parser with rounding errors would return a
    /// neighbouring float for some of the 999 values of this test.
    #[test]
    fn settings_read_back_equal_those_written() {
        let folder = tempfile::tempdir().expect("a folder");
        for number in 1..1000u16 {
            let settings = json!({"weight-decay": f32::from(number) / 1000.0});
            write_settings(folder.path(), &settings).expect("a file");
            let outcome = check(folder.path(), &settings, 3, 0);
            let error = outcome.expect_err("there is no checkpoint").to_string();
            assert!(!error.contains("weight-decay"), "{error}");
        }
    }
}
