//! Several processes that train one model, through MPI on this machine's processor: they do what one would, end together, and
//! go on where they were.

use super::{
    Ended,
    refused::check,
    run, succeed,
    training::{losses, train, validation},
};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};
use tempfile::TempDir;

/// As many processes of a program.
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

#[test]
fn processes_do_what_one_does() {
    let folder = TempDir::new().expect("a folder");
    let short = ["--steps", "6", "--warmup", "5", "--checkpoint-every", "3"];
    let out = |name: &str| folder.path().join(name);
    let arguments = [&short[..], &["--accumulate", "3"]].concat();
    let alone = succeed(&mut train(&out("alone"), &arguments));
    let together = succeed(&mut several(3, &train(&out("together"), &short)));
    for (kind, count) in [
        (losses as fn(&str, &str) -> _, 6),
        (|text, _| validation(text), 2),
    ] {
        let [alone, together]: [Vec<(usize, f64)>; 2] =
            [&alone, &together].map(|ended: &Ended| kind(&ended.stdout, "  loss "));
        // One process speaks for all.
        assert_eq!(together.len(), count, "{together:?}");
        for ((step, alone), (other, together)) in alone.into_iter().zip(together) {
            assert_eq!(step, other);
            let error = (alone - together).abs();
            assert!(error < 2e-3, "{together}, not {alone} in step {step}");
        }
    }
    let files = |name: &str| {
        let mut names: Vec<_> = fs::read_dir(out(name))
            .expect("a folder")
            .map(|entry| entry.expect("a file").file_name())
            .collect();
        names.sort();
        names
    };
    assert_eq!(files("together"), files("alone"));
}

#[test]
fn a_process_that_is_killed_ends_all_and_the_run_goes_on() {
    let folder = TempDir::new().expect("a folder");
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let expected = succeed(&mut several(2, &train(&whole, &[])));

    let mut child = several(2, &train(&killed, &[]))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("processes");
    let output = BufReader::new(child.stdout.take().expect("their output"));
    let mut lines = output.lines().map(|line| line.expect("text"));
    assert!(lines.any(|line| line.starts_with("step 12/")));
    kill_one(&killed);
    assert!(!child.wait().expect("their end").success());
    drop(lines);

    let resumed = succeed(&mut several(2, &train(&killed, &["--resume"])));
    let of_steps = losses(&expected.stdout, "  loss ");
    let of_resumed = losses(&resumed.stdout, "  loss ");
    let begun = of_steps.len() - of_resumed.len();
    assert!([5, 10].contains(&begun), "{resumed:?}");
    assert_eq!(of_resumed, of_steps[begun..], "{resumed:?}");
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).expect("weights");
    assert!(weights(&whole) == weights(&killed));
}

/// Kills one of the processes that write to a folder.
fn kill_one(out: &Path) {
    let writes_there = |process: &Path| {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let mut words = line.split('\0');
        words.next().is_some_and(|name| name.ends_with("train"))
            && words.any(|word| Path::new(word) == out)
    };
    let processes = fs::read_dir("/proc").expect("processes");
    let mut paths = processes.map(|process| process.expect("a process").path());
    let found = paths.find(|path| writes_there(path)).expect("a process");
    let number = found.file_name().expect("a number");
    let killed = Command::new("kill").arg("-9").arg(number).status();
    assert!(killed.expect("a process").success());
}

#[test]
fn what_processes_cannot_do() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out");
    let ended = run(&mut several(2, &train(&out, &["--devices", "0,0"])));
    // Each has something to say, and so has the launcher.
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let reason = "error: --devices is for one process";
    assert!(ended.stderr.contains(reason), "{ended:?}");
    assert!(!out.join("run").join("settings.json").exists());
}

/// Where a launcher other than MPI's starts processes of a build for the processor.
#[test]
fn launchers_that_have_no_way() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out");
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let number = port.local_addr().expect("a port").port().to_string();
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
    let second = start("1").spawn().expect("a process");
    let first = run(&mut start("0"));
    let second: Ended = second.wait_with_output().expect("its end").into();
    for ended in [first, second] {
        check("no way", &ended, 1, &["NCCL", "mpirun"]);
    }
    let mut lost = train(&out, &[]);
    let ended = run(lost.env("WORLD_SIZE", "2"));
    check("no rank", &ended, 1, &["RANK is not set"]);
}
