//! Tests of downloads from a server of this machine that answers as the Hub does.

use super::{Hub, Wanted, download};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};
use tempfile::TempDir;

const NAME: &str = "google/gemma-4-test";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The behaviour of the server.
#[derive(Clone, Default)]
struct Server {
    /// The contents that the server gives for each path.
    files: BTreeMap<String, Vec<u8>>,
    /// The contents by whose sizes and hashes the list describes a path, if they differ from those above.
    described: BTreeMap<String, Vec<u8>>,
    /// The number of bytes after which each of the next answers with a file is cut.
    cuts: Arc<Mutex<Vec<usize>>>,
    /// The status of all answers, unless the request has this token.
    refuses: Option<(u16, &'static str)>,
    /// True if the server ignores ranges.
    gives_whole_files: bool,
    /// The requests that have come: the path, and the first byte that was asked for.
    requests: Arc<Mutex<Vec<(String, usize)>>>,
}

impl Server {
    fn of(files: &[(&str, Vec<u8>)]) -> Self {
        let files = files.iter();
        Self {
            files: files
                .map(|(path, bytes)| ((*path).to_owned(), bytes.clone()))
                .collect(),
            ..Self::default()
        }
    }

    /// Starts the server. Returns the URL.
    fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("the server has an address");
        let server = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let server = server.clone();
                thread::spawn(move || server.answer(stream.expect("a connection")));
            }
        });
        format!("http://{address}")
    }

    /// Returns the list of files, as the Hub gives it. A file whose name ends with `.json` is a small one.
    fn list(&self) -> String {
        let siblings = self.files.iter().map(|(path, bytes)| {
            let bytes = self.described.get(path).unwrap_or(bytes);
            let id = format!("{:040x}", path.len());
            match path.ends_with(".json") {
                true => serde_json::json!({"rfilename": path, "size": bytes.len(), "blobId": id}),
                false => serde_json::json!({
                    "rfilename": path, "size": bytes.len(), "blobId": id,
                    "lfs": {"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 1}
                }),
            }
        });
        let siblings: Vec<serde_json::Value> = siblings.collect();
        serde_json::json!({"id": NAME, "sha": COMMIT, "siblings": siblings, "gated": false})
            .to_string()
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().expect("a stream")).lines();
        let mut line = || lines.next()?.ok().filter(|line| !line.is_empty());
        let Some(request) = line() else { return };
        let path = request.split(' ').nth(1).expect("a path").to_owned();
        let (mut first, mut token) = (0, String::new());
        while let Some(header) = line() {
            let (name, value) = header.split_once(": ").expect("a header");
            match name.to_lowercase().as_str() {
                "range" => {
                    let from = value.strip_prefix("bytes=").expect("a range");
                    first = from.trim_end_matches('-').parse().expect("a number");
                }
                "authorization" => token = value.to_owned(),
                _ => {}
            }
        }
        self.requests
            .lock()
            .expect("no panic")
            .push((path.clone(), first));
        let mut send = |status: &str, headers: &str, body: &[u8], length: usize| {
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
            );
            let _ = stream.write_all(&[head.as_bytes(), body].concat());
        };
        if let Some((status, needed)) = self.refuses
            && token != format!("Bearer {needed}")
        {
            return send(&format!("{status} Refused"), "", b"", 0);
        }
        if path == format!("/api/models/{NAME}/revision/main?blobs=true") {
            let list = self.list();
            return send("200 OK", "", list.as_bytes(), list.len());
        }
        let of_files = format!("/{NAME}/resolve/{COMMIT}/");
        let file = path
            .strip_prefix(&of_files)
            .and_then(|path| self.files.get(path));
        let Some(file) = file else {
            return send("404 Not Found", "", b"", 0);
        };
        let first = if self.gives_whole_files { 0 } else { first };
        if first > 0 && first >= file.len() {
            return send("416 Range Not Satisfiable", "", b"", 0);
        }
        let rest = &file[first..];
        let cut = self.cuts.lock().expect("no panic").pop();
        let given = &rest[..cut.map_or(rest.len(), |cut| cut.min(rest.len()))];
        match first {
            0 => send("200 OK", "", given, rest.len()),
            _ => {
                let range = format!(
                    "Content-Range: bytes {first}-{}/{}\r\n",
                    file.len() - 1,
                    file.len()
                );
                send("206 Partial Content", &range, given, rest.len());
            }
        }
    }

    /// Returns the first bytes that were asked for of a file, in the order of the requests.
    fn ranges(&self, file: &str) -> Vec<usize> {
        let requests = self.requests.lock().expect("no panic");
        let of_file = requests
            .iter()
            .filter(|(path, _)| path.ends_with(&format!("/{file}")));
        of_file.map(|(_, first)| *first).collect()
    }
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn bytes(count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 24) as u8
    };
    (0..count).map(|_| random()).collect()
}

fn model() -> Server {
    Server::of(&[
        ("README.md", bytes(100, 1)),
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{}\n".to_vec()),
        ("model.safetensors", bytes(300_000, 2)),
    ])
}

fn resolve_by(
    endpoint: &str,
    token: Option<&str>,
    cache: &Path,
    model: &str,
    wanted: &mut Wanted<'_>,
) -> Result<PathBuf, String> {
    let mut hub = download::Hub::new(endpoint, token.map(str::to_owned));
    hub.pause = Duration::ZERO;
    let hub = Hub {
        cache: Some(cache.to_owned()),
        connection: Ok(hub),
    };
    let found = hub.resolve(Path::new(model), wanted);
    found.map_err(|error| error.to_string())
}

fn resolve(server: &Server, cache: &TempDir) -> Result<PathBuf, String> {
    let mut memory = || Ok(Some(16_000_000_000));
    let mut wanted = Wanted::Any(&mut memory);
    resolve_by(&server.start(), None, cache.path(), NAME, &mut wanted)
}

fn folder() -> TempDir {
    TempDir::new().expect("a folder")
}

#[test]
fn download_of_a_checkpoint_fills_the_cache_and_is_not_repeated() {
    let (server, cache) = (model(), folder());
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let of_model = cache.path().join("models--google--gemma-4-test");
    assert_eq!(found, of_model.join("snapshots").join(COMMIT));
    for (path, expected) in &server.files {
        let read = fs::read(found.join(path)).ok();
        let expected = (path != "README.md").then_some(expected);
        assert_eq!(read.as_ref(), expected, "{path}");
    }
    let weights = of_model
        .join("blobs")
        .join(sha256(&server.files["model.safetensors"]));
    assert!(weights.is_file());
    let main = fs::read_to_string(of_model.join("refs/main"));
    assert_eq!(main.expect("a commit"), COMMIT);
    let count = server.requests.lock().expect("no panic").len();
    assert_eq!(resolve(&server, &cache), Ok(found));
    assert_eq!(server.requests.lock().expect("no panic").len(), count);
}

#[test]
fn download_after_cut_connections_goes_on_where_it_stopped() {
    let (server, cache) = (model(), folder());
    *server.cuts.lock().expect("no panic") = vec![120_000, 100_000, usize::MAX, 2, usize::MAX];
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let read = fs::read(found.join("model.safetensors")).expect("the file is there");
    assert_eq!(read, server.files["model.safetensors"]);
    assert_eq!(server.ranges("model.safetensors"), [0, 100_000, 220_000]);
    assert_eq!(server.ranges("tokenizer.json"), [0, 2]);
}

#[test]
fn download_that_stopped_goes_on_in_the_next_run() {
    let (server, cache) = (model(), folder());
    // The first cuts are those of the two small files. Afterwards no byte comes.
    *server.cuts.lock().expect("no panic") =
        [vec![0; 5], vec![50_000, usize::MAX, usize::MAX]].concat();
    let error = resolve(&server, &cache).expect_err("the connection is cut");
    let stopped = error.contains("50000 of 300000 bytes") && error.contains("model.safetensors");
    assert!(stopped, "{error}");
    server.requests.lock().expect("no panic").clear();
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let read = fs::read(found.join("model.safetensors")).expect("the file is there");
    assert_eq!(read, server.files["model.safetensors"]);
    assert_eq!(server.ranges("model.safetensors"), [50_000]);
    assert!(server.ranges("config.json").is_empty());
}

#[test]
fn download_from_a_server_without_ranges_begins_again() {
    let mut server = model();
    server.gives_whole_files = true;
    *server.cuts.lock().expect("no panic") = vec![70_000, usize::MAX, usize::MAX];
    let cache = folder();
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let read = fs::read(found.join("model.safetensors")).expect("the file is there");
    assert_eq!(read, server.files["model.safetensors"]);
}

#[test]
fn download_that_is_refused_names_the_token_and_the_licence() {
    let (mut server, cache) = (model(), folder());
    for (status, token, words) in [
        (401, None, &["401", "HF_TOKEN", "licence", NAME][..]),
        (
            401,
            Some("wrong"),
            &["401", "another token", "licence", NAME],
        ),
        (403, Some("wrong"), &["403", "no access", "licence", NAME]),
        (404, None, &["404", "no such model"]),
        (500, None, &["500"]),
    ] {
        server.refuses = Some((status, "right"));
        let endpoint = server.start();
        let mut memory = || Ok(None);
        let mut wanted = Wanted::Any(&mut memory);
        let found = resolve_by(&endpoint, token, cache.path(), NAME, &mut wanted);
        let error = found.expect_err("the server refuses");
        for word in words {
            assert!(error.contains(word), "{word:?} is missing from {error}");
        }
        assert!(
            error.starts_with("--model: google/gemma-4-test: "),
            "{error}"
        );
        let found = resolve_by(&endpoint, Some("right\n"), cache.path(), NAME, &mut wanted);
        found.expect("the token has access");
        fs::remove_dir_all(cache.path().join("models--google--gemma-4-test")).expect("the folder");
    }
}

#[test]
fn download_without_a_server_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let cache = folder();
    let found = resolve_by(&endpoint, None, cache.path(), NAME, &mut Wanted::Folder);
    let error = found.expect_err("no server");
    assert!(error.contains("cannot be reached"), "{error}");
}

#[test]
fn download_of_other_bytes_is_refused_and_removed() {
    let real = bytes(300_000, 2);
    let mut flipped = real.clone();
    flipped[200_000] ^= 1;
    for (given, words) in [
        (flipped, "SHA-256"),
        ([&real[..], b"more"].concat(), "more than the 300000 bytes"),
        (real[..200_000].to_vec(), "fewer than the 300000 bytes"),
    ] {
        let (mut server, cache) = (model(), folder());
        server
            .described
            .insert("model.safetensors".into(), real.clone());
        server.files.insert("model.safetensors".into(), given);
        let error = resolve(&server, &cache).expect_err("the bytes are wrong");
        assert!(
            error.contains("model.safetensors") && error.contains(words),
            "{error}"
        );
        let of_model = cache.path().join("models--google--gemma-4-test");
        assert!(!of_model.join("snapshots").exists());
        assert!(!of_model.join("blobs").join(sha256(&real)).exists());
    }
}

#[test]
fn download_of_gguf_files_takes_one_by_memory_or_by_name() {
    let server = Server::of(&[
        ("e2b-Q4_0.gguf", bytes(1000, 3)),
        ("e2b-Q8_0.gguf", bytes(2000, 4)),
        ("BF16/e2b-00001-of-00002.gguf", bytes(3000, 5)),
        ("BF16/e2b-00002-of-00002.gguf", bytes(1000, 6)),
        ("mmproj.gguf", bytes(9000, 7)),
    ]);
    let endpoint = server.start();
    let gibibyte = 1 << 30;
    for (memory, name, expected) in [
        (gibibyte + 1200, NAME.to_owned(), "e2b-Q4_0.gguf"),
        (gibibyte + 4000, NAME.to_owned(), "e2b-Q8_0.gguf"),
        (
            gibibyte + 9000,
            NAME.to_owned(),
            "BF16/e2b-00001-of-00002.gguf",
        ),
        (1, format!("{NAME}:e2b-Q8_0.gguf"), "e2b-Q8_0.gguf"),
    ] {
        let cache = folder();
        let mut memory = || Ok(Some(memory));
        let mut wanted = Wanted::Any(&mut memory);
        let found = resolve_by(&endpoint, None, cache.path(), &name, &mut wanted);
        let found = found.expect("the file is downloaded");
        assert!(found.ends_with(expected), "{found:?}");
        assert_eq!(
            fs::read(&found).expect("the file is there"),
            server.files[expected]
        );
        let second = found.with_file_name("e2b-00002-of-00002.gguf");
        assert_eq!(second.is_file(), expected.starts_with("BF16"));
    }
    let cache = folder();
    let mut memory = || Ok(Some(gibibyte));
    for (name, words) in [
        (NAME.to_owned(), "fits 1.1 GB of memory"),
        (format!("{NAME}:e2b-Q5_0.gguf"), "no file e2b-Q5_0.gguf"),
    ] {
        let mut wanted = Wanted::Any(&mut memory);
        let found = resolve_by(&endpoint, None, cache.path(), &name, &mut wanted);
        let error = found.expect_err("no file is chosen");
        assert!(
            error.contains(words) && error.contains("e2b-Q4_0.gguf"),
            "{error}"
        );
    }
    let found = resolve_by(&endpoint, None, cache.path(), NAME, &mut Wanted::Folder);
    let error = found.expect_err("the command needs a folder");
    assert!(error.contains("safetensors"), "{error}");
}
