//! Downloads of a model's files from the Hugging Face Hub into its cache, in the layout of `huggingface_hub`:
//! `blobs/ID` has a file's contents, and `snapshots/COMMIT/PATH` is a link to the contents.
//!
//! The crate `hf-hub` does not serve here. Its version 0.5 gives neither sizes nor checksums of files, and its version
//! 1.0 brings a second HTTP client and an asynchronous runtime.

use super::repository::{RemoteFile, Repository};
use crate::terminal::note;
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};
use ureq::{Agent, Body, config::RedirectAuthHeaders, http::Response};

/// The public Hub.
const ENDPOINT: &str = "https://huggingface.co";
/// The number of attempts in a row that may give no byte of a file.
const ATTEMPTS: u32 = 5;
/// The number of bytes that are read and hashed at once.
const PIECE: usize = 1 << 20;

/// A connection to the Hub.
pub(super) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    /// The pause before the second attempt. Later pauses are longer.
    pub pause: Duration,
}

/// The result of one attempt to get a file.
enum Attempt {
    /// The file has all its bytes.
    Complete,
    /// The connection ended early, or the Hub is busy. Another attempt may give the other bytes.
    Interrupted(String),
    /// Another attempt would fail, too.
    Refused(String),
}

impl Hub {
    /// Connects to the Hub of `HF_ENDPOINT`, with the token of `HF_TOKEN` or of `hf auth login`.
    pub fn from_env() -> Self {
        let of = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
        let endpoint = of("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let saved = || {
            let home = || of("HOME").or_else(|| of("USERPROFILE")).map(PathBuf::from);
            let of_hub = of("HF_HOME")
                .map(PathBuf::from)
                .or_else(|| Some(PathBuf::from(of("XDG_CACHE_HOME")?).join("huggingface")))
                .or_else(|| Some(home()?.join(".cache/huggingface")));
            let path = of("HF_TOKEN_PATH").map(PathBuf::from);
            fs::read_to_string(path.or_else(|| Some(of_hub?.join("token")))?).ok()
        };
        let token = of("HF_TOKEN")
            .or_else(|| of("HUGGING_FACE_HUB_TOKEN"))
            .or_else(saved);
        Self::new(&endpoint, token)
    }

    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Large files come from another host by a redirection. That host must not get the token.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .user_agent(concat!("gemma4/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: config.into(),
            endpoint: endpoint.trim_end_matches('/').into(),
            token: token
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty()),
            pause: Duration::from_secs(2),
        }
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Gets the list of a model's files at the branch `main`.
    ///
    /// # Errors
    /// Returns the reason, and a remedy if the Hub refuses.
    pub fn repository(&self, name: &str) -> Result<Repository, String> {
        let url = format!(
            "{}/api/models/{name}/revision/main?blobs=true",
            self.endpoint
        );
        let mut response = self
            .get(&url, 0)
            .map_err(|error| format!("the Hub at {} cannot be reached: {error}", self.endpoint))?;
        self.refuse(&response, name)?;
        let json = response.body_mut().read_to_vec();
        let json = json.map_err(|error| format!("the Hub's answer is incomplete: {error}"))?;
        Repository::parse(name, &json)
    }

    /// Requests `url` from the byte `first` on.
    fn get(&self, url: &str, first: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if first > 0 {
            request = request.header("Range", format!("bytes={first}-"));
        }
        request.call()
    }

    /// Returns an error for an answer that is not a success. The error says what to do.
    fn refuse<T>(&self, response: &Response<T>, name: &str) -> Result<(), String> {
        let status = response.status();
        let page = format!("{}/{name}", self.endpoint);
        match status.as_u16() {
            200..300 => Ok(()),
            401 if self.token.is_none() => Err(format!(
                "the Hub answers 401: the model does not exist, or needs a token. Accept its licence at {page}, and \
                 set HF_TOKEN to a token of {}/settings/tokens",
                self.endpoint
            )),
            401 | 403 => Err(format!(
                "the Hub answers {}: the token has no access. Accept the model's licence at {page} with the token's \
                 account, or set HF_TOKEN to another token",
                status.as_u16()
            )),
            404 => Err(format!(
                "the Hub answers 404: no such model or file; see {page}"
            )),
            _ => Err(format!("the Hub answers {status}")),
        }
    }

    /// Downloads the files that the cache lacks. Returns the folder of the snapshot with all of them. `folder` is the
    /// model's folder in the cache. A later call goes on where an interrupted one stopped.
    ///
    /// # Errors
    /// Returns the reason, with the file.
    pub fn fetch(
        &self,
        repository: &Repository,
        files: &[RemoteFile],
        folder: &Path,
        bar: &ProgressBar,
    ) -> Result<PathBuf, String> {
        let failed = |what: &Path| {
            let what = what.display().to_string();
            move |error: std::io::Error| format!("{what}: {error}")
        };
        let blobs = folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(failed(&blobs))?;
        let bytes = files.iter().map(|file| file.bytes);
        bar.set_length(bytes.fold(0, u64::saturating_add));
        let mut done = 0;
        for file in files {
            bar.set_position(done);
            bar.set_message(file.path.clone());
            let blob = blobs.join(&file.etag);
            self.fetch_file(repository, file, &blob, bar)
                .map_err(|reason| format!("{}: {reason}", file.path))?;
            done += file.bytes;
        }
        let snapshot = folder.join("snapshots").join(repository.commit());
        for file in files {
            let path = snapshot.join(&file.path);
            link(folder, file, &path).map_err(failed(&path))?;
        }
        let refs = folder.join("refs");
        fs::create_dir_all(&refs)
            .and_then(|()| {
                let (main, own) = (refs.join("main"), unique(&refs.join("main")));
                fs::write(&own, repository.commit())?;
                fs::rename(own, main)
            })
            .map_err(failed(&refs))?;
        Ok(snapshot)
    }

    /// Downloads one file to `blob`, unless the file is there. While the download lasts, the file's bytes are in
    /// `blob.incomplete`, as those of `huggingface_hub` are.
    fn fetch_file(
        &self,
        repository: &Repository,
        file: &RemoteFile,
        blob: &Path,
        bar: &ProgressBar,
    ) -> Result<(), String> {
        let incomplete = blob.with_extension("incomplete");
        let text = |error: std::io::Error| error.to_string();
        // Another process may download the same file. It has the lock until the file is complete.
        let lock = lock_of(blob).map_err(text)?;
        lock.lock().map_err(text)?;
        if fs::metadata(blob).is_ok_and(|found| found.len() == file.bytes) {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let mut to = options.open(&incomplete).map_err(text)?;
        let path = file
            .path
            .split('/')
            .map(escaped)
            .collect::<Vec<_>>()
            .join("/");
        let (endpoint, name, commit) = (&self.endpoint, &repository.name, repository.commit());
        let url = format!("{endpoint}/{name}/resolve/{commit}/{path}");
        let done = bar.position();
        let mut idle = 0;
        let mut hash = Sha256::new();
        let mut have = hash_file(&mut to, &mut hash).map_err(text)?;
        loop {
            let before = have;
            bar.set_position(done + have);
            let attempt = match have.cmp(&file.bytes) {
                std::cmp::Ordering::Less => self
                    .attempt(&url, file, &mut to, &mut hash, &mut have, name, |have| {
                        bar.set_position(done + have);
                    })
                    .map_err(text)?,
                std::cmp::Ordering::Equal => Attempt::Complete,
                std::cmp::Ordering::Greater => Attempt::Refused(format!(
                    "has more than the {} bytes that the Hub gives for it",
                    file.bytes
                )),
            };
            match attempt {
                Attempt::Complete => break,
                Attempt::Refused(reason) => {
                    if have > file.bytes {
                        // These bytes are of another file, so that no later call may go on with them.
                        fs::remove_file(&incomplete).map_err(text)?;
                    }
                    return Err(reason);
                }
                Attempt::Interrupted(reason) => {
                    idle = if have > before { 0 } else { idle + 1 };
                    if idle >= ATTEMPTS {
                        return Err(format!(
                            "{reason}; {have} of {} bytes are there, the same command goes on from there",
                            file.bytes
                        ));
                    }
                    note(format_args!("note: {}: {reason}; trying again", file.path));
                    thread::sleep(self.pause * (idle + 1));
                }
            }
        }
        let found = format!("{:x}", hash.finalize());
        if let Some(expected) = &file.sha256
            && !found.eq_ignore_ascii_case(expected)
        {
            fs::remove_file(&incomplete).map_err(text)?;
            return Err(format!(
                "its SHA-256 is {found}; the Hub gives {expected}. The bytes were removed; download the file again"
            ));
        }
        // Another process may have written to the file, if the file system does not lock files.
        let length = to.metadata().map_err(text)?.len();
        if length != file.bytes {
            fs::remove_file(&incomplete).map_err(text)?;
            return Err(format!(
                "it has {length} bytes instead of {}. The bytes were removed; download the file again",
                file.bytes
            ));
        }
        to.sync_all().map_err(text)?;
        drop(to);
        fs::rename(&incomplete, blob).map_err(text)
    }

    /// Requests the bytes from `have` on, and appends them to the file.
    #[allow(clippy::too_many_arguments, reason = "the state of one file")]
    fn attempt(
        &self,
        url: &str,
        file: &RemoteFile,
        to: &mut File,
        hash: &mut Sha256,
        have: &mut u64,
        name: &str,
        progress: impl Fn(u64),
    ) -> std::io::Result<Attempt> {
        let response = match self.get(url, *have) {
            Ok(response) => response,
            Err(error) => return Ok(Attempt::Interrupted(error.to_string())),
        };
        match response.status().as_u16() {
            206 if starts_at(&response, *have) => {}
            200 => {
                // The server gives the whole file, whatever range was asked for.
                to.set_len(0)?;
                (*hash, *have) = (Sha256::new(), 0);
            }
            416 => {
                return Ok(Attempt::Refused(format!(
                    "has fewer than the {} bytes that the Hub gives for it",
                    file.bytes
                )));
            }
            status @ (206 | 408 | 429 | 500..600) => {
                return Ok(Attempt::Interrupted(format!("the Hub answers {status}")));
            }
            status => {
                let refused = self.refuse(&response, name);
                let reason = refused
                    .err()
                    .unwrap_or_else(|| format!("the Hub answers {status}"));
                return Ok(Attempt::Refused(reason));
            }
        }
        let mut reader = response.into_body().into_reader();
        let mut piece = vec![0; PIECE];
        loop {
            let read = match reader.read(&mut piece) {
                Ok(0) if *have < file.bytes => {
                    return Ok(Attempt::Interrupted("the connection ended early".into()));
                }
                Ok(0) => return Ok(Attempt::Complete),
                Ok(read) => read,
                Err(error) => {
                    return Ok(Attempt::Interrupted(format!(
                        "the connection was cut: {error}"
                    )));
                }
            };
            to.write_all(&piece[..read])?;
            hash.update(&piece[..read]);
            *have += read as u64;
            progress(*have);
            if *have > file.bytes {
                return Ok(Attempt::Refused(format!(
                    "has more than the {} bytes that the Hub gives for it",
                    file.bytes
                )));
            }
        }
    }
}

/// Opens the file that processes lock while they download `blob`, where `huggingface_hub` has its locks.
fn lock_of(blob: &Path) -> std::io::Result<File> {
    let model = blob.parent().and_then(Path::parent).unwrap_or(blob);
    let cache = model.parent().unwrap_or(model);
    let folder = cache
        .join(".locks")
        .join(model.file_name().unwrap_or_default());
    fs::create_dir_all(&folder)?;
    let name = blob.with_extension("lock");
    File::create(folder.join(name.file_name().unwrap_or_default()))
}

/// True if the answer's bytes begin at `first`.
fn starts_at<T>(response: &Response<T>, first: u64) -> bool {
    let range = response.headers().get("content-range");
    let range = range.and_then(|range| range.to_str().ok()?.strip_prefix("bytes "));
    range.is_some_and(|range| range.split('-').next() == Some(&first.to_string()))
}

/// Hashes the bytes that are in the file already, and returns their number.
fn hash_file(file: &mut File, hash: &mut Sha256) -> std::io::Result<u64> {
    let mut piece = vec![0; PIECE];
    let mut bytes = 0;
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(bytes),
            read => {
                hash.update(&piece[..read]);
                bytes += read as u64;
            }
        }
    }
}

/// Makes `path` a link to the contents of a file.
fn link(folder: &Path, file: &RemoteFile, path: &Path) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    if path.exists() {
        return Ok(());
    }
    // Rename a link with a name of its own, because several processes may download one model. A link may also be there
    // whose contents are gone.
    let own = unique(path);
    #[cfg(unix)]
    {
        let _ = folder;
        let up = "../".repeat(2 + file.path.matches('/').count());
        std::os::unix::fs::symlink(format!("{up}blobs/{}", file.etag), &own)?;
    }
    #[cfg(not(unix))]
    {
        // A link needs a privilege on Windows.
        let blob = folder.join("blobs").join(&file.etag);
        fs::hard_link(&blob, &own).or_else(|_| fs::copy(&blob, &own).map(drop))?;
    }
    fs::rename(&own, path)
}

/// Returns the path of a temporary file beside `path`, which no other thread and no other process uses.
fn unique(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_added_extension(format!("{}-{number}", std::process::id()))
}

/// Escapes a part of a path for a URL.
fn escaped(part: &str) -> String {
    let escaped = part.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    });
    escaped.collect()
}
