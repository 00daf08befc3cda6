//! Tests that run `gemma4 serve` as a process with the model that the program contains: signals, logs and hostile grammars.
#![cfg(all(unix, feature = "serve", feature = "flex"))]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A running server, which is killed when the test ends.
struct Server {
    child: Child,
    address: String,
    /// The lines of standard error.
    lines: Receiver<String>,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        Self::start_on("cpu", arguments)
    }

    fn start_on(devices: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_gemma4"))
            .args([
                "serve", "--device", devices, "--name", "tiny", "--port", "0",
            ])
            .args(arguments)
            .env_remove("RUST_LOG")
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        let errors = child.stderr.take().expect("standard error");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(errors).lines().map_while(Result::ok);
            lines.for_each(|line| _ = sender.send(line));
        });
        let mut server = Self {
            child,
            address: String::new(),
            lines,
        };
        let line = server.line_with("http://");
        let address = line.split("http://").nth(1).expect("an address");
        let is_of_address = |char: char| char.is_ascii_digit() || ".:".contains(char);
        server.address = address
            .chars()
            .take_while(|char| is_of_address(*char))
            .collect();
        server
    }

    /// Waits for a line of standard error that contains `part`.
    fn line_with(&self, part: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.unwrap_or_else(|_| panic!("no line with {part:?}"));
            if line.contains(part) {
                return line;
            }
        }
    }

    /// Sends a request on a connection of its own.
    fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        let mut body = body.clone();
        body["model"] = json!("tiny");
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("the head is sent");
        stream.write_all(body.as_bytes()).expect("the body is sent");
        stream
    }

    fn chat(&self, body: &Value) -> String {
        rest(self.send("/v1/chat/completions", body))
    }

    /// Begins a stream of `tokens` tokens, and waits for its first bytes.
    fn stream(&self, tokens: usize) -> TcpStream {
        let body = json!({
            "messages": user(), "max_tokens": tokens, "ignore_eos": true, "temperature": 0, "stream": true,
        });
        let mut stream = self.send("/v1/chat/completions", &body);
        stream.read_exact(&mut [0; 600]).expect("the stream begins");
        stream
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the call only sends a signal. The child has not been waited for, so its process id still identifies
        // the child.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end of the process.
    fn end(&mut self) -> ExitStatus {
        for _ in 0..3000 {
            if let Some(status) = self.child.try_wait().expect("a status") {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server does not end");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn user() -> Value {
    json!([{"role": "user", "content": "x"}])
}

/// Reads a response until the server closes the connection.
fn rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // Ignore an error, because the server may cut the connection after the last byte.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn first_sigterm_finishes_streams_and_refuses_new_requests() {
    let mut server = Server::start(&[]);
    let stream = server.stream(3000);
    server.signal(libc::SIGTERM);
    server.line_with("finishing the requests in progress");
    let body = json!({"messages": user(), "max_tokens": 1});
    let deadline = Instant::now() + Duration::from_secs(5);
    let refused = loop {
        // The server may print the note before it handles the signal, so a request may still succeed. A connection from
        // just before the shutdown may be closed without a response.
        let response = server.chat(&body);
        let is_early = response.is_empty() || response.starts_with("HTTP/1.1 200");
        match is_early && Instant::now() < deadline {
            true => continue,
            false => break response,
        }
    };
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(refused.contains("retry-after: 1"), "{refused}");
    let text = rest(stream);
    assert!(
        text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"),
        "{text}"
    );
    assert_eq!(server.end().code(), Some(0));
}

#[test]
fn two_devices_serve_behind_one_address() {
    let mut server = Server::start_on("flex:0,flex:1", &[]);
    server.line_with("2 engines");
    let body = json!({"messages": user(), "max_tokens": 8, "temperature": 0});
    let [first, second] = [(); 2].map(|()| server.chat(&body));
    let content = |response: &str| {
        let body = response.split("\r\n\r\n").nth(1).expect("a body");
        let body: Value = serde_json::from_str(body).expect("JSON");
        body["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(content(&first), content(&second));
    let mut stream = TcpStream::connect(&server.address).expect("a connection");
    let request = "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream
        .write_all(request.as_bytes())
        .expect("the request is sent");
    let health = rest(stream);
    assert!(
        health.contains("\"devices\":[\"flex:0\",\"flex:1\"]"),
        "{health}"
    );
    server.signal(libc::SIGTERM);
    assert_eq!(server.end().code(), Some(0));
}

#[test]
fn wrong_device_lists_end_with_the_argument_at_fault() {
    for (command, devices, part) in [
        ("serve", "flex:0,wgpu:0", "several backends"),
        ("serve", "flex,flex", "without numbers"),
        ("serve", "flop", "\"flop\" is not a device"),
        (
            "run",
            "flex:0,flex:1",
            "only `gemma4 serve` runs on several",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_gemma4"))
            .args([command, "--device", devices])
            .output()
            .expect("a process");
        assert_eq!(output.status.code(), Some(2), "{devices}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("--device") && text.contains(part),
            "{part}: {text}"
        );
    }
}

#[test]
fn second_sigterm_ends_the_process_at_once() {
    let mut server = Server::start(&[]);
    let stream = server.stream(7000);
    server.signal(libc::SIGTERM);
    server.line_with("finishing the requests in progress");
    let started = Instant::now();
    server.signal(libc::SIGTERM);
    assert_eq!(server.end().code(), Some(143));
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    assert!(!rest(stream).contains("[DONE]"));
}

#[test]
fn drain_timeout_ends_the_process() {
    let mut server = Server::start(&["--drain-seconds", "1"]);
    let stream = server.stream(7000);
    server.signal(libc::SIGINT);
    let started = Instant::now();
    assert_eq!(server.end().code(), Some(0));
    let elapsed = started.elapsed();
    assert!(elapsed < Duration::from_secs(10), "{elapsed:?}");
    assert!(!rest(stream).contains("[DONE]"));
}

#[test]
fn json_log_has_only_json_lines_and_one_for_each_request() {
    let mut server = Server::start(&["--log-format", "json"]);
    server.chat(&json!({"messages": user(), "max_tokens": 3, "ignore_eos": true}));
    server.chat(&json!({"messages": user(), "temperature": "hot"}));
    server.signal(libc::SIGTERM);
    assert_eq!(server.end().code(), Some(0));
    let lines: Vec<Value> = server
        .lines
        .iter()
        .map(|line| serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    assert!(
        lines
            .iter()
            .all(|line| line["time"].is_f64() && line["level"].is_string())
    );
    let requests: Vec<&Value> = lines
        .iter()
        .filter(|line| line["message"] == "request")
        .collect();
    assert_eq!(requests.len(), 2, "{lines:?}");
    assert_eq!(requests[0]["output_tokens"], 3);
    let outcomes = requests.iter().map(|line| line["outcome"].as_str());
    assert_eq!(
        outcomes.collect::<Vec<_>>(),
        [Some("finished"), Some("refused")]
    );
}

/// The largest resident memory of a process so far, in MiB.
#[cfg(target_os = "linux")]
fn peak_memory(process: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    kib.and_then(|kib| kib.parse::<usize>().ok())
        .expect("a number")
        / 1024
}

#[cfg(target_os = "linux")]
#[test]
fn hostile_grammars_take_bounded_time_and_memory() {
    let server = Server::start(&[]);
    let regex = |regex: &str| json!({"type": "regex", "regex": regex});
    let lark = |grammar: &str| json!({"type": "grammar", "grammar": grammar});
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let deep = |depth: usize| {
        (0..depth).fold(
            json!({"type": "null"}),
            |items, _| json!({"type": "array", "items": items}),
        )
    };
    let wide: serde_json::Map<_, _> = (0..3000)
        .map(|n| (format!("k{n}"), json!({"type": "string"})))
        .collect();
    let doubled: String = (1..40)
        .map(|n| format!("r{n}: r{} r{}\n", n - 1, n - 1))
        .collect();
    let formats = [
        regex("((a|b)*a(a|b){500})*"),
        regex("(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
        regex("(a?){5000}a{5000}"),
        regex("(x+x+)+y"),
        regex(&format!("({})", vec!["[a-z]{1,50}"; 2000].join("|"))),
        regex("\\p{L}{1,100000}"),
        regex(&format!("{}a{}", "(".repeat(190), ")".repeat(190))),
        lark(&format!("start: r39\n{doubled}r0: \"a\"\n")),
        lark("start: start start | \"a\" | \"\"\n"),
        lark("start: a*\na: b*\nb: \"\"*\n"),
        lark("start: \"a\"{1,1000000}\n"),
        schema(json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000})),
        schema(json!({"type": "string", "minLength": 1_000_000, "maxLength": 1_000_000_000})),
        schema(json!({"type": "string", "pattern": "^(a|aa)+$", "maxLength": 100_000})),
        schema(json!({"type": "integer", "minimum": -1e300, "maximum": 1e300, "multipleOf": 7})),
        schema(json!({"type": "object", "properties": wide})),
        schema(json!({"$ref": "#"})),
        schema(
            json!({"allOf": vec![json!({"type": "string", "pattern": "a{1,100}b{1,100}"}); 50]}),
        ),
        schema(deep(100)),
    ];
    let before = peak_memory(server.child.id());
    let mut slowest = Duration::ZERO;
    for format in formats {
        let started = Instant::now();
        let body = json!({"messages": user(), "max_tokens": 4, "response_format": format});
        let response = server.chat(&body);
        let elapsed = started.elapsed();
        let shown: String = format.to_string().chars().take(100).collect();
        println!(
            "{elapsed:.2?}, {} MiB: {shown}: {:.12}",
            peak_memory(server.child.id()),
            response
        );
        // The server either answers with 200, or reports with 400 that it refuses the grammar or that the grammar fails
        // during the answer.
        let is_known = ["200", "400"]
            .iter()
            .any(|status| response.starts_with(&format!("HTTP/1.1 {status}")));
        assert!(is_known, "{shown}: {response:.2000}");
        slowest = slowest.max(elapsed);
    }
    let grown = peak_memory(server.child.id()) - before;
    println!("slowest {slowest:?}, {grown} MiB more");
    assert!(slowest < Duration::from_secs(20), "{slowest:?}");
    assert!(grown < 1000, "{grown} MiB");
    let answer = server.chat(&json!({"messages": user(), "max_tokens": 1}));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn serve_with_wrong_adapters_ends_with_the_argument_at_fault() {
    for (arguments, parts) in [
        (
            ["--adapter", "one=missing"],
            ["--adapter one=missing", "adapter_config.json"],
        ),
        (["--adapter", "missing"], ["missing", "adapter_config.json"]),
        (["--adapter-root", "missing"], ["--adapter-root", "missing"]),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_gemma4"))
            .args(["serve", "--device", "cpu", "--port", "0"])
            .args(arguments)
            .output()
            .expect("a process");
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr);
        for part in parts {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
