//! Tests that training runs resume at their last checkpoint, even if they are killed or stopped at an arbitrary time.

use super::{
    Ended,
    folder::Folder,
    refused::check,
    run, succeed,
    training::{conversations, finetune, losses, train},
};
#[cfg(unix)]
use gemma4_cli::signals::ignores_hang_up;
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::Command,
    thread,
    time::Duration,
};
use tempfile::TempDir;

/// Returns the contents of the weights file that a finished training run has written to `folder`.
fn written(folder: &Path) -> Vec<u8> {
    let names = ["model.safetensors", "adapter_model.safetensors"];
    let path = names
        .map(|name| folder.join(name))
        .into_iter()
        .find(|path| path.exists());
    fs::read(path.expect("the weights file exists")).expect("the file is readable")
}

/// Returns true if a checkpoint is complete, which means that its three files exist. A run writes the three files concurrently,
/// so they may appear in any order.
fn is_whole(step: &Path) -> bool {
    ["model", "optimizer", "schedule"]
        .iter()
        .all(|record| step.join(record).with_extension("bpk").exists())
}

/// Starts a run, kills it, and resumes it, until a run finishes. The delay before the kill grows with each run, so that some
/// kills come while the run writes a checkpoint. Returns the number of kills.
fn kill_often(begin: impl Fn() -> Command, go_on: impl Fn() -> Command, history: &Path) -> u64 {
    for kills in 0..400 {
        let steps = fs::read_dir(history.join("checkpoints"));
        let is_begun = steps
            .is_ok_and(|mut steps| steps.any(|step| step.is_ok_and(|step| is_whole(&step.path()))));
        let mut command = if is_begun { go_on() } else { begin() };
        let mut child = command.spawn().expect("the process starts");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        // The delay before the kill begins when the run prints its first loss. If the run prints no loss, the delay
        // begins when the run ends.
        let reached = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("  loss ")));
        thread::sleep(Duration::from_millis(3 * kills));
        let _ = child.kill();
        let status = child.wait().expect("the process ends");
        if status.success() {
            return kills;
        }
        let mut error = String::new();
        let stderr = child.stderr.as_mut().expect("stderr is piped");
        stderr
            .read_to_string(&mut error)
            .expect("the output is text");
        assert!(reached.is_some() || !error.contains("error:"), "{error}");
    }
    panic!("the run does not finish");
}

#[test]
fn train_killed_often_gives_the_weights_of_one_run() {
    let folder = TempDir::new().expect("a temporary folder");
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let arguments = ["--checkpoint-every", "2"];
    succeed(&mut train(&whole, &arguments));
    let resumed = [&arguments[..], &["--resume"]].concat();
    let kills = kill_often(
        || train(&killed, &arguments),
        || train(&killed, &resumed),
        &killed.join("run"),
    );
    println!("{kills} kills");
    assert!(kills > 3);
    assert!(written(&whole) == written(&killed));
}

#[test]
fn finetune_killed_and_resumed_gives_the_weights_of_one_run() {
    let base = Folder::copy("dense-ple-mm-bf16");
    // The checkpoint `other` has the same sizes as `base`, but all of its weights differ.
    let other = Folder::copy("dense-ple-mm-bf16");
    let mut weights = other.read("model.safetensors");
    let (length, _) = weights.split_first_chunk().expect("a length");
    let numbers = 8 + u64::from_le_bytes(*length) as usize;
    let low_bytes = weights[numbers..].iter_mut().step_by(2);
    low_bytes.for_each(|byte| *byte ^= 1);
    other.write("model.safetensors", weights);
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    fs::write(&data, conversations()).expect("the file is written");
    for (name, arguments) in [("adapter", &["--rank", "4"][..]), ("full", &["--full"])] {
        let path = |kind: &str| folder.path().join(format!("{name}-{kind}"));
        let (whole, killed) = (path("whole"), path("killed"));
        let expected = succeed(&mut finetune(&base, &data, &whole, arguments));
        let mut child = finetune(&base, &data, &killed, arguments)
            .spawn()
            .expect("the process starts");
        let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut lines = output.lines().map(|line| line.expect("the output is text"));
        assert!(lines.any(|line| line.starts_with("step 5/")), "{name}");
        child.kill().expect("the process can be killed");
        child.wait().expect("the process ends");
        let resumed = [arguments, &["--resume"]].concat();
        let ended = succeed(&mut finetune(&base, &data, &killed, &resumed));
        let of_steps = losses(&expected.stdout, "  loss ");
        let of_resumed = losses(&ended.stdout, "  loss ");
        let begun = of_steps.len() - of_resumed.len();
        assert!([2, 4].contains(&begun), "{name}: {ended:?}");
        assert_eq!(of_resumed, of_steps[begun..], "{name}");
        assert!(written(&whole) == written(&killed), "{name}");
        let again = run(&mut finetune(&base, &data, &whole, arguments));
        check("a second run", &again, 2, &["whole", "--resume"]);
        let elsewhere = run(&mut finetune(&other, &data, &whole, &resumed));
        check("another base", &elsewhere, 2, &["base is", "begun with"]);
    }
    // A checkpoint of an adapter run is much smaller than a checkpoint of a full run.
    let size = |name: &str| {
        let path = folder
            .path()
            .join(name)
            .join("run/checkpoints/step-8/model.bpk");
        fs::metadata(path).expect("the checkpoint is valid").len()
    };
    assert!(4 * size("adapter-whole") < size("full-whole"));
}

/// Runs a program until it prints a line that begins with `line`, and then sends `signal` to the program. Returns all printed
/// lines and the result of the ended program.
#[cfg(unix)]
fn stop_at(mut command: Command, line: &str, signal: &str) -> (Vec<String>, Ended) {
    let mut child = command.spawn().expect("the process starts");
    let mut output = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
    let mut lines = Vec::new();
    for next in output.by_ref() {
        let next = next.expect("the output is text");
        let is_reached = next.starts_with(line);
        lines.push(next);
        if is_reached {
            break;
        }
    }
    let sent = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status();
    assert!(sent.expect("kill starts").success());
    lines.extend(output.map(|line| line.expect("the output is text")));
    (
        lines,
        Ended::from(child.wait_with_output().expect("the process ends")),
    )
}

#[test]
fn train_resumed_with_more_steps_has_the_rates_of_the_longer_run() {
    let folder = TempDir::new().expect("a temporary folder");
    let out = |name: &str| folder.path().join(name);
    let rates = |ended: &Ended| {
        let of_line = |line: &str| {
            let (_, rest) = line.split_once("  learning rate ")?;
            rest.split_whitespace().next().map(str::to_owned)
        };
        ended.stdout.lines().filter_map(of_line).collect::<Vec<_>>()
    };
    let long = ["--steps", "30", "--checkpoint-every", "10"];
    let whole = rates(&succeed(&mut train(&out("whole"), &long)));
    succeed(&mut train(&out("longer"), &["--steps", "10"]));
    let resumed = [&long[..], &["--resume"]].concat();
    let ended = succeed(&mut train(&out("longer"), &resumed));
    assert_eq!(rates(&ended), whole[10..], "{ended:?}");
    // The run `longer` began with 10 steps and was resumed with 30 steps. Its settings file now contains the number 30.
    // Resuming it with 10 steps is therefore refused.
    let shorter = run(&mut train(&out("longer"), &["--steps", "10", "--resume"]));
    check(
        "a shorter run",
        &shorter,
        2,
        &["steps is 10", "begun with 30"],
    );
}

#[cfg(unix)]
#[test]
fn training_signal_saves_a_checkpoint_first() {
    let base = Folder::copy("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    fs::write(&data, conversations()).expect("the file is written");
    // Without a signal, the run writes only one checkpoint, after its last step.
    let seldom = ["--steps", "400", "--checkpoint-every", "400"];
    let seldom_resumed = [&seldom[..], &["--resume"]].concat();
    let several = [&seldom[..], &["--devices", "0,0"]].concat();
    let several_resumed = [&several[..], &["--resume"]].concat();
    let hang_up = match ignores_hang_up() {
        true => ("-TERM", 143),
        false => ("-HUP", 129),
    };
    for (name, arguments, resumed, signals) in [
        (
            "one",
            &seldom[..],
            &seldom_resumed,
            [("-TERM", 143), hang_up],
        ),
        (
            "two",
            &several[..],
            &several_resumed,
            [("-INT", 130), ("-INT", 130)],
        ),
    ] {
        let path = |kind: &str| folder.path().join(format!("{name}-{kind}"));
        for (program, (signal, code)) in ["train", "finetune"].into_iter().zip(signals) {
            let command = |kind: &str, arguments: &[&str]| match program {
                "train" => train(&path(&format!("{program}-{kind}")), arguments),
                _ => finetune(&base, &data, &path(&format!("{program}-{kind}")), arguments),
            };
            let whole = losses(&succeed(&mut command("whole", arguments)).stdout, "  loss ");
            let (lines, ended) = stop_at(command("stopped", arguments), "step 3/", signal);
            assert_eq!(ended.code, Some(code), "{name}, {program}: {ended:?}");
            assert!(ended.stderr.contains("--resume"), "{ended:?}");
            let first = losses(&lines.join("\n"), "  loss ");
            assert!((3..400).contains(&first.len()), "{lines:?}");
            let ended = succeed(&mut command("stopped", resumed));
            let second = losses(&ended.stdout, "  loss ");
            assert_eq!([first, second].concat(), whole, "{name}, {program}");
        }
    }
}
