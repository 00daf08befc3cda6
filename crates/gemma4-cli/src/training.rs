//! Chooses the devices for `train` and `finetune`, and runs these commands in several processes.

use crate::{
    Error,
    device::{Chosen, DeviceName, choose, count, several},
    signals::{self, Signal, Stopped},
    terminal::{self, code_of, speak_as},
};
use burn::tensor::Device;
use gemma4_train::{
    args::TrainingArguments,
    checkpoint::stop::Stop,
    distributed::{Ending, ProcessGroup, Rank},
};
use std::{process::ExitCode, sync::Arc};

/// Runs a program as one of several processes or as the only one. Returns the same exit codes as
/// [`terminal::exit_code`]. If one process fails, all other processes end with the error of the failed process.
pub fn exit_code(program: impl FnOnce(&Arc<ProcessGroup>) -> Result<(), Error>) -> ExitCode {
    terminal::exit_code(|| {
        let rank = Rank::of_process()?;
        speak_as(rank.global);
        let group = ProcessGroup::join(rank)?;
        group.run(program, |error| match error.is::<Stopped>() {
            true => Ending::Stopped,
            false => Ending::Failed(code_of(error).into()),
        })
    })
}

/// Waits until every process has saved its state, and then ends a stopped run. The wait is necessary because a launcher
/// may kill all processes as soon as one process exits with a signal's exit code.
///
/// # Errors
/// Returns [`Stopped`] if this process received the signal. Returns a different error if one of the processes no longer
/// exists.
pub fn end_of_stopped(group: &ProcessGroup) -> Result<(), Error> {
    group.wait_for_all()?;
    signals::end_of_stopped()
}

/// Installs the signal handlers of training. The first signal stops the run after the current step, with a checkpoint. A
/// later Ctrl-C ends the program at once. A later `SIGHUP` or `SIGTERM` has no effect, because a closing terminal may send
/// `SIGHUP` twice.
///
/// # Errors
/// Returns an error if the system cannot install the handlers.
pub fn stop_on_signal(stop: Stop) -> Result<(), Error> {
    signals::handle(move |signal| {
        if !stop.ask() && signal == Signal::Interrupt {
            std::process::exit(signal.exit_code().into());
        }
    })
}

/// Returns the devices of the process with this rank. The model is created on the first device. In a run of several
/// processes, each process has one device.
///
/// # Errors
/// Returns an error if a device does not exist.
pub fn choose_devices(
    name: DeviceName,
    arguments: &TrainingArguments,
    rank: Rank,
) -> Result<(Chosen, Vec<Device>), Error> {
    let mut chosen = choose(name)?;
    let devices = match arguments.device_number(rank, || count(&chosen))? {
        Some(number) => {
            let devices = several(&chosen, &[number])?;
            chosen.device = devices[0].clone();
            devices
        }
        None if arguments.devices.is_empty() => vec![chosen.device.clone()],
        None => several(&chosen, &arguments.devices)?,
    };
    let checkpointing = arguments.step.checkpointing;
    let devices = devices.into_iter();
    let devices = devices.map(|device| checkpointing.tracked(device));
    Ok((chosen, devices.collect()))
}
