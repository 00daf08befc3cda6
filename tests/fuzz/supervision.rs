//! Starts and watches the worker process that reads broken files of one format, and reports the input that crashed the worker.

use crate::targets::Target;
use std::{
    env, fs,
    fs::File,
    hash::{DefaultHasher, Hash, Hasher},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The maximum time for reading one input. A worker that takes longer is killed, and its target counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// The report includes at most this number of lines of a worker's standard error.
const LINES: usize = 12;

/// The file in which a worker records each input before reading it. The file holds the number of inputs so far, the length of
/// the last input, and the last input itself.
pub struct Note {
    file: File,
    count: u64,
}

impl Note {
    pub fn create(path: &Path) -> Self {
        Self {
            file: File::create(path).expect("the file is writable"),
            count: 0,
        }
    }

    pub fn write(&mut self, input: &[u8]) {
        self.count += 1;
        let mut note = self.count.to_le_bytes().to_vec();
        note.extend((input.len() as u64).to_le_bytes());
        note.extend(input);
        self.file
            .seek(SeekFrom::Start(0))
            .expect("the file is writable");
        self.file.write_all(&note).expect("the file is writable");
    }

    /// Returns the number of inputs that the worker has recorded in the file `path`.
    fn count(path: &Path) -> u64 {
        let mut count = [0; 8];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut count));
        // The count is 0 if the worker has not yet created the file or recorded its first input.
        read.map_or(0, |()| u64::from_le_bytes(count))
    }

    /// Returns the last input that the worker has recorded in the file `path`, or `None` if the file has no complete input.
    fn input(path: &Path) -> Option<Vec<u8>> {
        let note = fs::read(path).ok()?;
        let length = u64::from_le_bytes(note.get(8..16)?.try_into().ok()?);
        Some(note.get(16..)?.get(..length as usize)?.to_vec())
    }
}

/// Runs the worker of a format until the worker ends. Returns true if nothing failed. After a failure, saves the
/// worker's last input to a file, and prints the path of this file.
pub fn run(target: &Target, seconds: u64, seed: u64) -> bool {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    fs::create_dir_all(&folder).expect("a folder to write to");
    let file = |extension: &str| {
        let name = format!("{}-{}.{extension}", target.name, std::process::id());
        folder.join(name)
    };
    let (state, errors) = (file("state"), file("errors"));
    let mut worker = Command::new(env::current_exe().expect("the path of this program"))
        .args(["--worker", target.name, "--state"])
        .arg(&state)
        .args(["--seconds", &seconds.to_string()])
        .args(["--seed", &seed.to_string()])
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stderr(File::create(&errors).expect("the file is writable"))
        .spawn()
        .expect("this program starts");
    let fault = match wait(&mut worker, &state) {
        Some(status) if status.success() => None,
        Some(status) => Some(format!("the worker ended with {status}")),
        None => Some(format!("an input took more than {} s", PATIENCE.as_secs())),
    };
    if let Some(fault) = &fault {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        report(target, fault, &said, Note::input(&state), &folder);
    }
    for path in [state, errors] {
        // If the file cannot be removed, the error is ignored. No later run reads the file, because the name contains the
        // process id.
        let _ = fs::remove_file(path);
    }
    fault.is_none()
}

/// Returns the worker's exit status, or `None` if an input took too long and the worker was killed.
fn wait(worker: &mut Child, state: &Path) -> Option<ExitStatus> {
    let mut last = (0, Instant::now());
    loop {
        if let Some(status) = worker.try_wait().expect("the worker can be polled") {
            return Some(status);
        }
        let count = Note::count(state);
        if count != last.0 {
            last = (count, Instant::now());
        } else if last.1.elapsed() > PATIENCE {
            worker.kill().expect("the worker can be killed");
            worker.wait().expect("the worker ends");
            return None;
        }
        thread::sleep(BETWEEN_LOOKS);
    }
}

fn report(target: &Target, fault: &str, said: &str, input: Option<Vec<u8>>, folder: &Path) {
    let kept = match input {
        Some(input) => {
            let mut hasher = DefaultHasher::new();
            input.hash(&mut hasher);
            let path = folder.join(format!("{}-{:016x}", target.name, hasher.finish()));
            fs::write(&path, input).expect("the file is writable");
            format!(
                "the input is {}; add it to {} with the fix",
                path.display(),
                crate::worker::corpus(target.name).display()
            )
        }
        None => "no input was read".into(),
    };
    let said: Vec<&str> = said.lines().take(LINES).collect();
    println!("{}: {fault}\n{}\n{kept}", target.name, said.join("\n"));
}
