//! Watches a format's process, and says which input it died of.

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

/// The longest that reading one input may take.
const PATIENCE: Duration = Duration::from_secs(30);
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// Lines of a worker's standard error that say what it died of, at most.
const LINES: usize = 12;

/// The file that a worker writes its input to before it reads it: how many there were, the input's length, the input.
pub struct Note {
    file: File,
    count: u64,
}

impl Note {
    pub fn create(path: &Path) -> Self {
        Self {
            file: File::create(path).expect("a file to write"),
            count: 0,
        }
    }

    pub fn write(&mut self, input: &[u8]) {
        self.count += 1;
        let mut note = self.count.to_le_bytes().to_vec();
        note.extend((input.len() as u64).to_le_bytes());
        note.extend(input);
        self.file.seek(SeekFrom::Start(0)).expect("a file to write");
        self.file.write_all(&note).expect("a file to write");
    }

    /// The number of the last input.
    fn count(path: &Path) -> u64 {
        let mut count = [0; 8];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut count));
        // The worker has not come to its first input.
        read.map_or(0, |()| u64::from_le_bytes(count))
    }

    /// The last input.
    fn input(path: &Path) -> Option<Vec<u8>> {
        let note = fs::read(path).ok()?;
        let length = u64::from_le_bytes(note.get(8..16)?.try_into().ok()?);
        Some(note.get(16..)?.get(..length as usize)?.to_vec())
    }
}

/// Runs a format's worker to its end. Whether nothing was found; else the input is kept, and where it is, is printed.
pub fn run(target: &Target, seconds: u64, seed: u64) -> bool {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    fs::create_dir_all(&folder).expect("a folder to write to");
    let file = |extension: &str| {
        let name = format!("{}-{}.{extension}", target.name, std::process::id());
        folder.join(name)
    };
    let (state, errors) = (file("state"), file("errors"));
    let mut worker = Command::new(env::current_exe().expect("this program"))
        .args(["--worker", target.name, "--state"])
        .arg(&state)
        .args(["--seconds", &seconds.to_string()])
        .args(["--seed", &seed.to_string()])
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stderr(File::create(&errors).expect("a file to write"))
        .spawn()
        .expect("this program to start");
    let fault = match wait(&mut worker, &state) {
        Some(status) if status.success() => None,
        Some(status) => Some(format!("it ended with {status}")),
        None => Some(format!("it took more than {} s", PATIENCE.as_secs())),
    };
    if let Some(fault) = &fault {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        report(target, fault, &said, Note::input(&state), &folder);
    }
    for path in [state, errors] {
        // Nothing else is to be told about them.
        let _ = fs::remove_file(path);
    }
    fault.is_none()
}

/// The worker's end; none where one input took too long, and it was killed.
fn wait(worker: &mut Child, state: &Path) -> Option<ExitStatus> {
    let mut last = (0, Instant::now());
    loop {
        if let Some(status) = worker.try_wait().expect("a process of this one") {
            return Some(status);
        }
        let count = Note::count(state);
        if count != last.0 {
            last = (count, Instant::now());
        } else if last.1.elapsed() > PATIENCE {
            worker.kill().expect("a process to end");
            worker.wait().expect("its end");
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
            fs::write(&path, input).expect("a file to write");
            format!(
                "the input is {}; with the mend it belongs into {}",
                path.display(),
                crate::worker::corpus(target.name).display()
            )
        }
        None => "it came to no input".into(),
    };
    let said: Vec<&str> = said.lines().take(LINES).collect();
    println!("{}: {fault}\n{}\n{kept}", target.name, said.join("\n"));
}
