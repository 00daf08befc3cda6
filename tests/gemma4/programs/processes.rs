//! Tests the training of one model by several processes, through MPI on this machine's CPU. The processes give the results of
//! one process, end together, and resume at the last checkpoint.

use super::{
    Ended,
    folder::Folder,
    refused::check,
    run, succeed,
    training::{assert_same_losses, finetune, losses, train, unequal_conversations, validation},
};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};
use tempfile::TempDir;

/// Returns the command that runs a program in `count` processes.
fn several(count: usize, program: &Command) -> Command {
    let mut command = Command::new("mpirun");
    command
        .args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
        ])
        .args(["-n", &count.to_string()])
        .arg(program.get_program())
        .args(program.get_args())
        .env("BURN_DEVICE", "flex");
    command
}

/// Returns the lines that a program has printed, without the learning rates and speeds at their ends.
fn without_speeds(ended: &Ended) -> Vec<&str> {
    let lines = ended.stdout.lines();
    lines
        .filter_map(|line| line.split("  learning rate").next())
        .collect()
}

#[test]
fn processes_give_the_losses_of_one_process() {
    let folder = TempDir::new().expect("a temporary folder");
    let short = ["--steps", "6", "--warmup", "5", "--checkpoint-every", "3"];
    let out = |name: &str| folder.path().join(name);
    let arguments = [&short[..], &["--accumulate", "3"]].concat();
    let alone = succeed(&mut train(&out("alone"), &arguments));
    let together = succeed(&mut several(3, &train(&out("together"), &short)));
    let in_parts = [&short[..], &["--shard-optimizer"]].concat();
    let in_parts = succeed(&mut several(3, &train(&out("in parts"), &in_parts)));
    // With a sharded optimizer, each parameter is updated by only one of the processes. All processes still sum their
    // gradients as without sharding, so the losses are equal.
    assert_eq!(without_speeds(&in_parts), without_speeds(&together));
    for (kind, count) in [
        (losses as fn(&str, &str) -> _, 6),
        (|text, _| validation(text), 2),
    ] {
        let [alone, together]: [Vec<(usize, f64)>; 2] =
            [&alone, &together].map(|ended: &Ended| kind(&ended.stdout, "  loss "));
        // Only one of the three processes prints, so each loss appears once.
        assert_eq!(together.len(), count, "{together:?}");
        for ((step, alone), (other, together)) in alone.into_iter().zip(together) {
            assert_eq!(step, other);
            let error = (alone - together).abs();
            assert!(error < 2e-3, "{together}, not {alone} in step {step}");
        }
    }
    let files = |name: &str| {
        let mut names: Vec<_> = fs::read_dir(out(name))
            .expect("the folder is readable")
            .map(|entry| entry.expect("the file is readable").file_name())
            .collect();
        names.sort();
        names
    };
    assert_eq!(files("together"), files("alone"));
}

/// The gradient of a step is the mean over the tokens of all processes. In each step, one process has long answers and
/// the other process has short answers. The two processes therefore have different numbers of tokens.
#[test]
fn processes_weigh_answers_by_their_tokens() {
    let base = Folder::copy("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    fs::write(&data, unequal_conversations()).expect("the file is written");
    let of = |name: &str, count: usize, batch: &str, accumulate: &str| {
        let out = folder.path().join(name);
        let arguments = [
            "--length",
            "40",
            "--batch",
            batch,
            "--accumulate",
            accumulate,
        ];
        let mut command = finetune(&base, &data, &out, &arguments);
        let ended = match count {
            1 => succeed(&mut command),
            _ => succeed(&mut several(count, &command)),
        };
        (losses(&ended.stdout, "  loss "), validation(&ended.stdout))
    };
    let (steps, validations) = of("alone", 1, "2", "1");
    assert_eq!((steps.len(), validations.len()), (8, 4));
    for (name, count, batch, accumulate) in
        [("accumulated", 1, "1", "2"), ("together", 2, "1", "1")]
    {
        let (of_steps, of_validations) = of(name, count, batch, accumulate);
        assert_eq!((of_steps.len(), of_validations.len()), (8, 4), "{name}");
        assert_same_losses(name, &of_steps, &steps);
        assert_same_losses(name, &of_validations, &validations);
    }
}

#[test]
fn processes_end_after_a_kill_and_resume() {
    let folder = TempDir::new().expect("a temporary folder");
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let expected = succeed(&mut several(2, &train(&whole, &[])));

    let in_parts = ["--shard-optimizer"];
    let mut child = several(2, &train(&killed, &in_parts))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("mpirun starts");
    let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut lines = output.lines().map(|line| line.expect("the output is text"));
    assert!(lines.any(|line| line.starts_with("step 12/")));
    signal_one(&killed, "-9");
    assert!(!child.wait().expect("mpirun ends").success());
    drop(lines);

    let other = run(&mut several(
        3,
        &train(&killed, &["--resume", "--shard-optimizer"]),
    ));
    assert!(other.stderr.contains("has no checkpoint"), "{other:?}");
    let other = run(&mut several(2, &train(&killed, &["--resume"])));
    assert!(
        other.stderr.contains("parts of the optimizer is 1"),
        "{other:?}"
    );
    let resumed = ["--resume", "--shard-optimizer"];
    let resumed = succeed(&mut several(2, &train(&killed, &resumed)));
    let of_steps = losses(&expected.stdout, "  loss ");
    let of_resumed = losses(&resumed.stdout, "  loss ");
    let begun = of_steps.len() - of_resumed.len();
    assert!([5, 10].contains(&begun), "{resumed:?}");
    assert_eq!(of_resumed, of_steps[begun..], "{resumed:?}");
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).expect("weights");
    assert!(weights(&whole) == weights(&killed));
}

/// If one process is interrupted, all processes end after the same step and write a checkpoint.
#[test]
fn processes_end_together_after_an_interrupt() {
    let folder = TempDir::new().expect("a temporary folder");
    let (whole, stopped) = (folder.path().join("whole"), folder.path().join("stopped"));
    let expected = succeed(&mut several(2, &train(&whole, &[])));
    let mut child = several(2, &train(&stopped, &[]))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("mpirun starts");
    let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut lines = output.lines().map(|line| line.expect("the output is text"));
    assert!(lines.any(|line| line.starts_with("step 7/")));
    signal_one(&stopped, "-INT");
    let rest: Vec<_> = lines.collect();
    // The launcher exits with the code of the interrupted process.
    let code = child.wait().expect("mpirun ends").code();
    assert_eq!(code, Some(130), "{rest:?}");
    let resumed = succeed(&mut several(2, &train(&stopped, &["--resume"])));
    let [expected, resumed] = [&expected, &resumed].map(|ended| losses(&ended.stdout, "  loss "));
    assert!((1..20).contains(&resumed.len()), "{rest:?}");
    assert_eq!(resumed, expected[20 - resumed.len()..]);
}

/// Sends a signal to one of the processes that write to the folder `out`.
fn signal_one(out: &Path, signal: &str) {
    let writes_there = |process: &Path| {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let mut words = line.split('\0');
        words.next().is_some_and(|name| name.ends_with("gemma4"))
            && words.any(|word| Path::new(word) == out)
    };
    let processes = fs::read_dir("/proc").expect("/proc lists the processes");
    let mut paths = processes.map(|process| process.expect("the process starts").path());
    let found = paths
        .find(|path| writes_there(path))
        .expect("one process writes to the folder");
    let number = found
        .file_name()
        .expect("the folder's name is a process id");
    let sent = Command::new("kill").arg(signal).arg(number).status();
    assert!(sent.expect("kill starts").success());
}

#[test]
fn processes_with_devices_option_are_refused() {
    let folder = TempDir::new().expect("a temporary folder");
    let out = folder.path().join("out");
    let ended = run(&mut several(2, &train(&out, &["--devices", "0,0"])));
    // Each process and the launcher print an error, so the test cannot use `check`, which expects exactly one error.
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let reason = "error: --devices: the run has several processes";
    assert!(ended.stderr.contains(reason), "{ended:?}");
    assert!(!out.join("run").join("settings.json").exists());
}

/// Two processes that no MPI launcher has started are refused, because without MPI they would need NCCL. This build is for
/// the CPU and has no NCCL.
#[test]
fn processes_without_nccl_or_mpi_are_refused() {
    let folder = TempDir::new().expect("a temporary folder");
    let out = folder.path().join("out");
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let number = port
        .local_addr()
        .expect("a port is free")
        .port()
        .to_string();
    drop(port);
    let start = |rank: &str| {
        let mut command = train(&out, &[]);
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &number)
            .env("WORLD_SIZE", "2")
            .env("RANK", rank)
            .env("LOCAL_RANK", rank);
        command
    };
    let second = start("1").spawn().expect("the process starts");
    let first = run(&mut start("0"));
    let second: Ended = second.wait_with_output().expect("the process ends").into();
    for ended in [first, second] {
        check("no way", &ended, 1, &["NCCL", "mpirun"]);
    }
    let mut lost = train(&out, &[]);
    let ended = run(lost.env("WORLD_SIZE", "2"));
    check("no rank", &ended, 1, &["RANK is not set"]);
}
