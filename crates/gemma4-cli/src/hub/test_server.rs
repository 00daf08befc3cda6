//! A server of this machine that answers as the Hub does, for tests of downloads.

use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

pub const NAME: &str = "google/gemma-4-test";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The behaviour of the server.
#[derive(Clone, Default)]
pub struct Server {
    /// The contents that the server gives for each path.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The contents by whose sizes and hashes the list describes a path, if they differ from those above.
    pub described: BTreeMap<String, Vec<u8>>,
    /// The number of bytes after which each of the next answers with a file is cut.
    pub cuts: Arc<Mutex<Vec<usize>>>,
    /// The status of all answers, unless the request has this token.
    pub refuses: Option<(u16, &'static str)>,
    /// True if the server ignores ranges.
    pub gives_whole_files: bool,
    /// True if the server answers 416 to each range.
    pub refuses_ranges: bool,
    /// The requests that have come: the path, and the first byte that was asked for.
    pub requests: Arc<Mutex<Vec<(String, usize)>>>,
}

impl Server {
    pub fn of(files: &[(&str, Vec<u8>)]) -> Self {
        let files = files.iter();
        Self {
            files: files
                .map(|(path, bytes)| ((*path).to_owned(), bytes.clone()))
                .collect(),
            ..Self::default()
        }
    }

    /// Starts the server. Returns the URL.
    pub fn start(&self) -> String {
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
            let id = git_id(bytes);
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
        if first > 0 && (first >= file.len() || self.refuses_ranges) {
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
    pub fn ranges(&self, file: &str) -> Vec<usize> {
        let requests = self.requests.lock().expect("no panic");
        let of_file = requests
            .iter()
            .filter(|(path, _)| path.ends_with(&format!("/{file}")));
        of_file.map(|(_, first)| *first).collect()
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// Returns the id that Git gives to a file.
pub fn git_id(bytes: &[u8]) -> String {
    let header = format!("blob {}\0", bytes.len());
    format!("{:x}", Sha1::digest([header.as_bytes(), bytes].concat()))
}

pub fn bytes(count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 24) as u8
    };
    (0..count).map(|_| random()).collect()
}

pub fn model() -> Server {
    Server::of(&[
        ("README.md", bytes(100, 1)),
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{}\n".to_vec()),
        ("model.safetensors", bytes(300_000, 2)),
    ])
}
