//! Tests of downloads from a server of this machine that answers as the Hub does.

use super::test_server::{COMMIT, NAME, Server, bytes, git_id, model, sha256};
use super::{Hub, Wanted, download};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    time::Duration,
};
use tempfile::TempDir;

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
    let found = hub.resolve("--model", Path::new(model), wanted);
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
    // A small file begins again.
    assert_eq!(server.ranges("tokenizer.json"), [0, 0]);
}

#[test]
fn git_id_equals_that_of_git() {
    // `git hash-object` gives this id for the same text.
    let expected = "ce013625030ba8dba906f756967f9e9ca394464a";
    assert_eq!(git_id(b"hello\n"), expected);
}

#[test]
fn download_whose_server_refuses_ranges_begins_again() {
    let mut server = model();
    server.refuses_ranges = true;
    *server.cuts.lock().expect("no panic") = vec![70_000, usize::MAX, usize::MAX];
    let cache = folder();
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let read = fs::read(found.join("model.safetensors")).expect("the file is there");
    assert_eq!(read, server.files["model.safetensors"]);
    assert_eq!(server.ranges("model.safetensors"), [0, 70_000, 0]);
}

#[test]
fn download_that_never_gets_further_ends() {
    let whole = usize::MAX;
    let (few, few_of_whole) = (vec![1000; 90], [10, 70_000].repeat(45));
    for (gives_whole_files, cuts, attempts) in [(false, few, 5), (true, few_of_whole, 6)] {
        let (mut server, cache) = (model(), folder());
        server.gives_whole_files = gives_whole_files;
        *server.cuts.lock().expect("no panic") = [cuts, vec![whole, whole]].concat();
        let error = resolve(&server, &cache).expect_err("the connection is cut");
        assert!(error.contains("of 300000 bytes are there"), "{error}");
        assert_eq!(server.ranges("model.safetensors").len(), attempts);
    }
}

#[test]
fn download_of_a_small_file_does_not_use_bytes_of_another_run() {
    let (server, cache) = (model(), folder());
    let blobs = cache.path().join("models--google--gemma-4-test/blobs");
    fs::create_dir_all(&blobs).expect("a folder");
    let id = git_id(&server.files["tokenizer.json"]);
    fs::write(blobs.join(&id).with_extension("incomplete"), "x").expect("a file");
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let read = fs::read(found.join("tokenizer.json")).expect("the file is there");
    assert_eq!(read, server.files["tokenizer.json"]);
}

#[test]
fn download_whose_part_is_too_long_begins_again() {
    let (server, cache) = (model(), folder());
    let expected = &server.files["model.safetensors"];
    let blobs = cache.path().join("models--google--gemma-4-test/blobs");
    fs::create_dir_all(&blobs).expect("a folder");
    let part = blobs.join(sha256(expected)).with_extension("incomplete");
    fs::write(part, [&expected[..], b"more"].concat()).expect("a file");
    let found = resolve(&server, &cache).expect("the model is downloaded");
    let read = fs::read(found.join("model.safetensors")).expect("the file is there");
    assert_eq!(&read, expected);
    assert_eq!(server.ranges("model.safetensors"), [0]);
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
    for words in ["no such local folder", "cannot be reached", "hf download"] {
        assert!(error.contains(words), "{error}");
    }
}

/// A mistyped path has the form of a model's name.
#[test]
fn download_of_a_mistyped_path_says_that_no_folder_exists() {
    let endpoint = model().start();
    let (cache, name) = (folder(), "models/e2b");
    let found = resolve_by(&endpoint, None, cache.path(), name, &mut Wanted::Folder);
    let error = found.expect_err("the Hub has no such model");
    for words in ["no such local folder", "404", "`hf download models/e2b`"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn download_of_safetensors_follows_that_of_a_gguf_file() {
    let mut server = model();
    server.files.insert("e2b-Q4_0.gguf".into(), bytes(1000, 3));
    for is_folder in [true, false] {
        let (endpoint, cache) = (server.start(), folder());
        let mut memory = || Ok(Some(16_000_000_000));
        let named = format!("{NAME}:e2b-Q4_0.gguf");
        let mut wanted = Wanted::Any(&mut memory);
        let found = resolve_by(&endpoint, None, cache.path(), &named, &mut wanted);
        let found = found.expect("the file is downloaded");
        assert!(found.ends_with("e2b-Q4_0.gguf"), "{found:?}");
        if is_folder {
            wanted = Wanted::Folder;
        }
        let found = resolve_by(&endpoint, None, cache.path(), NAME, &mut wanted);
        let found = found.expect("the checkpoint is downloaded");
        let read = fs::read(found.join("model.safetensors")).expect("the file is there");
        assert_eq!(read, server.files["model.safetensors"]);
    }
}

#[test]
fn download_of_gguf_files_in_the_cache_is_not_repeated() {
    let files = [
        ("e2b-Q4_0.gguf", bytes(900, 3)),
        ("e2b-Q8_0.gguf", bytes(2000, 4)),
    ];
    let (server, cache) = (Server::of(&files), folder());
    let endpoint = server.start();
    let unreachable = "http://127.0.0.1:1";
    let mut memory = || Ok(Some(16_000_000_000));
    let named = format!("{NAME}:e2b-Q4_0.gguf");
    let mut wanted = Wanted::Any(&mut memory);
    let found = resolve_by(&endpoint, None, cache.path(), &named, &mut wanted);
    for endpoint in [&endpoint, unreachable] {
        let again = resolve_by(endpoint, None, cache.path(), NAME, &mut wanted);
        assert_eq!(again, found);
    }
    assert_eq!(server.ranges("e2b-Q4_0.gguf"), [0]);
    assert!(server.ranges("e2b-Q8_0.gguf").is_empty());
    let found = resolve_by(unreachable, None, cache.path(), NAME, &mut Wanted::Folder);
    let error = found.expect_err("there are no safetensors");
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
fn download_of_a_small_file_with_other_bytes_is_refused() {
    let (mut server, cache) = (model(), folder());
    let real = server.files.insert("config.json".into(), b"[]".to_vec());
    let real = real.expect("the model has the file");
    server.described.insert("config.json".into(), real.clone());
    let error = resolve(&server, &cache).expect_err("the bytes are wrong");
    let words = ["config.json: its Git id is", &git_id(&real)];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
    let of_model = cache.path().join("models--google--gemma-4-test");
    assert!(!of_model.join("snapshots").exists());
    let left = fs::read_dir(of_model.join("blobs")).expect("a folder");
    assert_eq!(left.count(), 0);
}

#[test]
fn download_does_not_show_the_password_of_the_endpoint() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    for address in [address.to_string(), "a b".into()] {
        let endpoint = format!("http://user:secret@{address}");
        let found = resolve_by(&endpoint, None, folder().path(), NAME, &mut Wanted::Folder);
        let error = found.expect_err("no server");
        assert!(
            error.contains(&address) && !error.contains("secret"),
            "{error}"
        );
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
