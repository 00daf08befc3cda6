//! Checks the official Python clients of OpenAI and Anthropic against `gemma4 serve`, with the small model that the
//! program embeds, and with fixtures that see images and hear audio.

use crate::process::{self, Result};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The clients, at versions with which `crates/gemma4-serve/tests/clients.py` has passed.
const PACKAGES: [&str; 2] = ["openai==3.57.0", "anthropic==2.14.0"];

/// The file that marks a complete Python environment. The file holds the versions of the installed clients.
const MARKER: &str = "complete";

const MODEL: &str = "tiny";

/// The fixtures of models that see images and hear audio, each with a file.
const VISION: &str = "tests/fixtures/vision-keqv";
const IMAGE: &str = "tests/fixtures/vision-keqv/wide.png";
const AUDIO: &str = "tests/fixtures/audio-ple";
const CLIP: &str = "tests/fixtures/audio-ple/short.wav";

/// Runs the clients. If this machine lacks Python, its module venv, or the package index, the function prints a note
/// instead.
pub fn check_if_possible() -> Result<()> {
    let folder = process::target_folder().join("python-clients");
    let Some(python) = environment(&folder) else {
        return Ok(());
    };
    // Building the test target `program` also builds the program itself, with the same options as in the step `tests`.
    process::run(process::test_workspace().args(["--no-run", "--test", "program"]))?;
    let name = format!("gemma4{}", std::env::consts::EXE_SUFFIX);
    let program = process::target_folder().join("debug").join(name);
    for (model, file) in [
        (&[][..], None),
        (&["--model", VISION], Some(IMAGE)),
        (&["--model", AUDIO], Some(CLIP)),
    ] {
        let server = Server::start(&program, model)?;
        process::run(
            Command::new(&python)
                .current_dir(process::workspace_root())
                .args([
                    "crates/gemma4-serve/tests/clients.py",
                    &server.url,
                    MODEL,
                    "none",
                ])
                .args(file),
        )?;
    }
    Ok(())
}

/// Returns the Python interpreter of an environment in which the clients are installed. Creates the environment in
/// `folder` if it is missing. If that fails, prints a note and returns `None`.
fn environment(folder: &Path) -> Option<PathBuf> {
    let python = folder.join(match cfg!(windows) {
        true => "Scripts/python.exe",
        false => "bin/python3",
    });
    let marker = folder.join(MARKER);
    let versions = PACKAGES.join("\n");
    let is_ready = fs::read_to_string(&marker).is_ok_and(|found| found == versions);
    if is_ready && process::output(Command::new(&python).arg("--version")).is_some() {
        return Some(python);
    }
    let mut create = Command::new("python3");
    create.args(["-m", "venv", "--clear"]).arg(folder);
    let mut install = Command::new(&python);
    install
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            // With one retry, pip asks the package index only twice if there is no network.
            "--retries=1",
            "--disable-pip-version-check",
        ])
        .args(PACKAGES);
    let created = process::run(&mut create)
        .and_then(|()| process::run(&mut install))
        .and_then(|()| fs::write(&marker, versions).map_err(|error| error.to_string()));
    match created {
        Ok(()) => Some(python),
        Err(error) => {
            println!(
                "The Python clients are not checked, because they cannot be installed: {error}."
            );
            None
        }
    }
}

/// A running server on a free port. Dropping this value stops the server.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    /// Starts `program` with the arguments of a model, and waits until the server listens.
    fn start(program: &Path, model: &[&str]) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .current_dir(process::workspace_root())
            .args(["serve", "--device", "cpu", "--port", "0", "--name", MODEL])
            .args(model)
            .stderr(Stdio::piped());
        let shown = process::display(&command);
        let process = command
            .spawn()
            .map_err(|error| format!("`{shown}` could not be started: {error}"))?;
        let mut server = Self {
            process,
            url: String::new(),
        };
        let errors = server.process.stderr.take();
        let errors = errors.ok_or_else(|| format!("`{shown}` has no standard error"))?;
        let mut lines = BufReader::new(errors)
            .lines()
            .map_while(std::result::Result::ok);
        let url = lines.find_map(|line| url(&line));
        server.url = url.ok_or_else(|| format!("`{shown}` ended before it listened"))?;
        // Read the rest of the output too. Otherwise, the pipe could fill up and block the server.
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the URL in the line that the server prints when it listens.
fn url(line: &str) -> Option<String> {
    let at = line.find("http://")?;
    let end = line[at..].find(char::is_whitespace);
    Some(line[at..end.map_or(line.len(), |end| at + end)].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_a_line_is_the_word_with_http() {
        let line = "serving tiny on http://127.0.0.1:8080";
        assert_eq!(url(line).as_deref(), Some("http://127.0.0.1:8080"));
        assert_eq!(
            url("see http://[::1]:1 now").as_deref(),
            Some("http://[::1]:1")
        );
        assert_eq!(url("device: cpu"), None);
    }
}
