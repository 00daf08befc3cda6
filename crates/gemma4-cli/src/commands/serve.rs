//! The command `gemma4 serve`: a server with the APIs of OpenAI and Anthropic.

use super::serve_embeddings;
use super::served_media::ServedMedia;
use crate::{
    Error,
    generation::{Kv, positive},
    messages::{LogFormat, set_log_format},
    model::ModelArguments,
    signals,
    terminal::{WrongArgument, exit_code, note},
};
use burn_gemma4::{CacheKind, ChatTemplate};
use clap::Parser;
use gemma4_serve::engine::{
    DEFAULT_MAX_ADAPTERS, DEFAULT_PREFIX_CACHE_BYTES, EmbeddingEngineOptions, EngineOptions,
};
use gemma4_serve::{EmbeddingServer, Server, ServerOptions};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Serve a model over HTTP, with the APIs of OpenAI and Anthropic.
///
/// An embedding model, such as google/embeddinggemma-2, is served by /v1/embeddings alone. Arguments that only a model
/// which generates text can have are then refused, or have no effect.
///
/// --device cuda:0,cuda:1 serves on several devices, each with a copy of the model and an engine of its own.
///
/// The server listens on this machine only, unless --host names another address. SIGTERM and Ctrl-C finish the requests in
/// progress; a second signal ends the program at once. Before the server listens to requests, the first signal does.
#[derive(Parser)]
#[command(version)]
pub struct Serve {
    #[command(flatten)]
    model: ModelArguments,
    /// Address to listen on. 0.0.0.0 serves other machines too.
    #[arg(
        long,
        help_heading = "Server",
        value_name = "ADDRESS",
        default_value = "127.0.0.1"
    )]
    host: String,
    /// Port to listen on; 0 takes a free port.
    #[arg(
        long,
        help_heading = "Server",
        value_name = "PORT",
        default_value_t = 8080
    )]
    port: u16,
    /// Name of the model in the APIs [default: the last part of --model].
    #[arg(long, help_heading = "Server")]
    name: Option<String>,
    /// Key that clients must send. The argument may be repeated. Other users of this machine can read arguments;
    /// --api-key-file avoids that.
    #[arg(long, help_heading = "Server", value_name = "KEY")]
    api_key: Vec<String>,
    /// File with one API key per line.
    #[arg(long, help_heading = "Server", value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Largest body of a request in bytes.
    #[arg(long, help_heading = "Server", value_name = "BYTES", default_value_t = ServerOptions::default().max_body, value_parser = positive)]
    max_body: usize,
    /// Memory for the bodies of requests that are being read and prepared, in MiB. A body of at least 256 KiB takes
    /// memory as it arrives, then that of its values, and waits for memory.
    #[arg(long, help_heading = "Server", value_name = "MIB", default_value_t = ServerOptions::default().body_memory >> 20, value_parser = positive)]
    body_memory: usize,
    /// Largest number of open connections. Further connections wait.
    #[arg(long, help_heading = "Server", value_name = "COUNT", default_value_t = 1024, value_parser = positive)]
    max_connections: usize,
    /// Seconds that the requests in progress get after SIGTERM.
    #[arg(
        long,
        help_heading = "Server",
        value_name = "SECONDS",
        default_value_t = 30
    )]
    drain_seconds: u64,
    /// Chat template to use in place of the checkpoint's.
    #[arg(long, help_heading = "Server", value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Format of messages on standard error. json prints one object per line, and one for each request.
    #[arg(
        long,
        value_enum,
        help_heading = "Server",
        value_name = "FORMAT",
        default_value_t
    )]
    log_format: LogFormat,
    #[command(flatten)]
    media: ServedMedia,
    #[command(flatten)]
    adapters: AdapterArguments,
    #[command(flatten)]
    engine: EngineArguments,
    #[command(flatten)]
    cache: CacheArguments,
}

/// The arguments of LoRA adapters.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Adapters")]
struct AdapterArguments {
    /// LoRA adapter in the folder DIR, which requests select by the model name MODEL:NAME. The argument may be
    /// repeated. DIR without a name adds its adapter to the model of all requests; write ./DIR if it contains `=`.
    #[arg(long, value_name = "NAME=DIR", value_parser = adapter)]
    adapter: Vec<Adapter>,
    /// Folder from which clients can load adapters at run time, by /v1/load_lora_adapter [default: clients cannot].
    #[arg(long, value_name = "DIR")]
    adapter_root: Option<PathBuf>,
    /// Largest number of adapters that requests can select.
    #[arg(long, value_name = "COUNT", default_value_t = DEFAULT_MAX_ADAPTERS)]
    max_adapters: usize,
}

/// A value of `--adapter`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Adapter {
    /// An adapter that requests select by its name.
    Named(String, PathBuf),
    /// An adapter of all requests.
    OfModel(PathBuf),
}

/// Parses a value of `--adapter`. A path that contains `=` counts as a path if a `/` precedes the `=`.
fn adapter(value: &str) -> Result<Adapter, String> {
    match value.split_once('=') {
        Some((name, _)) if name.contains(['/', std::path::MAIN_SEPARATOR]) => {
            Ok(Adapter::OfModel(value.into()))
        }
        Some((name, folder)) if name.is_empty() || folder.is_empty() => {
            Err("expected NAME=DIR, or DIR".into())
        }
        Some((name, folder)) => Ok(Adapter::Named(name.into(), folder.into())),
        None => Ok(Adapter::OfModel(value.into())),
    }
}

impl AdapterArguments {
    /// Checks the names and the number of the adapters that requests select.
    fn check(&self) -> Result<(), WrongArgument> {
        let mut names = BTreeSet::new();
        for adapter in &self.adapter {
            if let Adapter::Named(name, _) = adapter
                && !names.insert(name)
            {
                return Err(WrongArgument(format!(
                    "--adapter: two adapters have the name {name}"
                )));
            }
        }
        if names.len() > self.max_adapters {
            return Err(WrongArgument(format!(
                "--adapter: {} adapters exceed --max-adapters {}",
                names.len(),
                self.max_adapters
            )));
        }
        Ok(())
    }

    /// Returns the folder of the adapter of all requests.
    fn of_model(&self) -> Result<Option<&Path>, WrongArgument> {
        let mut folders = self.adapter.iter().filter_map(|adapter| match adapter {
            Adapter::OfModel(folder) => Some(folder.as_path()),
            Adapter::Named(..) => None,
        });
        match (folders.next(), folders.next()) {
            (first, None) => Ok(first),
            (_, Some(second)) => Err(WrongArgument(format!(
                "--adapter: {} is the second adapter without a name; expected NAME=DIR",
                second.display()
            ))),
        }
    }

    /// Returns the folder from which clients can load adapters.
    fn root(&self) -> Result<Option<PathBuf>, WrongArgument> {
        match &self.adapter_root {
            Some(root) if !root.is_dir() => Err(WrongArgument(format!(
                "--adapter-root: {} is not a folder",
                root.display()
            ))),
            root => Ok(root.clone()),
        }
    }

    /// Loads the adapters that requests select.
    fn load(&self, server: &Server) -> Result<(), Error> {
        for adapter in &self.adapter {
            if let Adapter::Named(name, folder) = adapter {
                server.load_adapter(name, folder).map_err(|error| {
                    WrongArgument(format!("--adapter {name}={}: {error}", folder.display()))
                })?;
            }
        }
        Ok(())
    }
}

/// The arguments of the engine that decodes many requests together. With several devices, they hold for each engine.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineArguments {
    /// Largest number of answers to decode together. With several devices, this and the other limits hold for each device.
    #[arg(long, value_name = "COUNT", default_value_t = 32, value_parser = positive)]
    max_running: usize,
    /// Largest number of requests that wait. Further requests are refused with the status 429.
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = positive)]
    max_queue: usize,
    /// Largest number of tokens of a prompt together with its answer, or of a text to embed.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = positive)]
    context: usize,
    /// Largest number of tokens in the KV cache of all answers together. A request waits until its worst case fits [default:
    /// enough for --max-running answers of --context tokens].
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    kv_tokens: Option<usize>,
    /// Number of prompt tokens to process between two decode steps [default: 2048, or 8192 while more requests wait than
    /// run; on a CPU 256].
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    prefill_chunk: Option<usize>,
    /// Memory for the keys and values of earlier prompts, in MiB. A prompt that begins like an earlier one reuses them.
    /// 0 keeps nothing.
    #[arg(long, value_name = "MIB", default_value_t = DEFAULT_PREFIX_CACHE_BYTES >> 20)]
    prefix_cache: usize,
}

impl EngineArguments {
    /// Returns the options of the engine, with the given storage format of the KV cache and number of adapters.
    pub fn options(&self, cache: CacheKind, max_adapters: usize) -> EngineOptions {
        EngineOptions {
            max_running: self.max_running,
            max_queue: self.max_queue,
            context: self.context,
            kv_tokens: self.kv_tokens,
            prefill_chunk: self.prefill_chunk,
            prefix_cache_bytes: self.prefix_cache.saturating_mul(1 << 20),
            cache,
            graph_capture: true,
            max_adapters,
            load_vision: false,
            load_audio: false,
        }
    }
}

/// The arguments of the KV cache.
#[derive(clap::Args, Debug)]
struct CacheArguments {
    /// KV cache type: the model's dtype, or int8 with one scale per token and head.
    #[arg(
        long,
        value_enum,
        value_name = "PRECISION",
        default_value_t,
        help_heading = "Memory"
    )]
    kv: Kv,
    /// Store only the rotated quarter of each key in layers that use one projection for both keys and values.
    #[arg(long, help_heading = "Memory")]
    compact_keys: bool,
}

impl Serve {
    /// Executes the command and returns its exit code.
    pub fn execute(&self) -> ExitCode {
        exit_code(|| run(self))
    }

    /// Prints the address of the server, and a warning if other machines can use the server without a key.
    fn tell_address(&self, name: &str, local: SocketAddr) {
        note(format_args!("serving {name} on http://{local}"));
        if !local.ip().is_loopback() && self.api_key.is_empty() && self.api_key_file.is_none() {
            note("warning: other machines can use this server without a key; --api-key sets one");
        }
    }

    /// Refuses arguments that an embedding model cannot have, because it generates no text.
    fn refuse_generation(&self) -> Result<(), WrongArgument> {
        let (adapters, engine, cache) = (&self.adapters, &self.engine, &self.cache);
        let given = [
            ("--chat-template", self.chat_template.is_some()),
            ("--adapter", !adapters.adapter.is_empty()),
            ("--adapter-root", adapters.adapter_root.is_some()),
            ("--kv-tokens", engine.kv_tokens.is_some()),
            ("--prefill-chunk", engine.prefill_chunk.is_some()),
            ("--kv", cache.kv == Kv::Q8),
            ("--compact-keys", cache.compact_keys),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(WrongArgument(format!(
                "{name}: the model computes embeddings and generates no text"
            ))),
            None => Ok(()),
        }
    }
}

fn run(cli: &Serve) -> Result<(), Error> {
    set_log_format(cli.log_format);
    let api_keys = api_keys(cli)?;
    let template = cli.chat_template.as_ref().map(ChatTemplate::from_file);
    let template = template.transpose()?;
    let (stop, mut stopped) = watch::channel(false);
    let is_serving = Arc::new(AtomicBool::new(false));
    let has_requests = is_serving.clone();
    signals::handle(move |signal| {
        // While the model is downloaded and loaded, no request is in progress. A later download goes on with the bytes.
        if *stop.borrow() || !has_requests.load(Ordering::SeqCst) {
            std::process::exit(signal.exit_code().into());
        }
        note("finishing the requests in progress; a second signal ends the program at once");
        stop.send_replace(true);
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    // Bind before the model is loaded, so that a port in use is reported early.
    let address = format!("{}:{}", cli.host, cli.port);
    let listener = runtime
        .block_on(TcpListener::bind((cli.host.as_str(), cli.port)))
        .map_err(|error| {
            WrongArgument(format!(
                "--host, --port: cannot listen on {address}: {error}"
            ))
        })?;
    let local = listener.local_addr()?;
    cli.adapters.check()?;
    let media = cli.media.options()?;
    let (of_model, adapter_root) = (cli.adapters.of_model()?, cli.adapters.root()?);
    let resolved = cli.model.resolve_all()?;
    let name = cli.name.clone();
    let name = name.unwrap_or_else(|| default_name(cli.model.model.as_deref()));
    let options = ServerOptions {
        model: name.clone(),
        api_keys,
        max_body: cli.max_body,
        body_memory: body_memory(cli),
        max_connections: cli.max_connections,
        drain_timeout: Duration::from_secs(cli.drain_seconds),
        adapter_root,
        media,
        ..ServerOptions::default()
    };
    let shutdown = async move {
        // Ignore the error of `wait_for`. It occurs only if the sender of the stop signal is dropped, at the end of the
        // program.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    if let Some(folder) = resolved.embedding_folder()? {
        cli.refuse_generation()?;
        let models = serve_embeddings::load(folder, &cli.model)?;
        let engine = EmbeddingEngineOptions {
            max_queue: cli.engine.max_queue,
            context: cli.engine.context,
        };
        let server = EmbeddingServer::of_devices(models, engine, options)?;
        is_serving.store(true, Ordering::SeqCst);
        cli.tell_address(&name, local);
        return Ok(runtime.block_on(server.serve(listener, shutdown))?);
    }
    let loaded = cli.model.load_all(resolved, of_model)?;
    let cache = CacheKind {
        compact_keys: cli.cache.compact_keys,
        precision: cli.cache.kv.into(),
    };
    let engine = EngineOptions {
        load_vision: options.media.images.max_count > 0,
        load_audio: options.media.audio.max_count > 0,
        ..cli.engine.options(cache, cli.adapters.max_adapters)
    };
    let models = loaded.into_iter();
    let models: Vec<_> = models.map(|one| (one.chosen.label(), one.gemma)).collect();
    let server = Server::of_devices(models, engine, options, template)?;
    cli.adapters.load(&server)?;
    is_serving.store(true, Ordering::SeqCst);
    cli.tell_address(&name, local);
    if let devices @ [_, _, ..] = server.engines().devices() {
        let count = devices.len();
        note(format_args!(
            "{count} engines, one a device; the limits of running, queued and cached tokens hold for each"
        ));
    }
    Ok(runtime.block_on(server.serve(listener, shutdown))?)
}

/// Returns the memory for bodies in bytes. One body may take four times `--max-body` from the last part, so that twice
/// as much leaves an equal part to the others.
fn body_memory(cli: &Serve) -> usize {
    let (given, least) = (
        cli.body_memory.saturating_mul(1 << 20),
        cli.max_body.saturating_mul(8),
    );
    if given < least {
        note(format_args!(
            "note: --body-memory: {} MiB are too few for --max-body {}; using {} MiB",
            cli.body_memory,
            cli.max_body,
            least.div_ceil(1 << 20)
        ));
    }
    given.max(least)
}

/// Returns the keys of the arguments and of the file.
fn api_keys(cli: &Serve) -> Result<Vec<String>, Error> {
    let mut keys = cli.api_key.clone();
    if let Some(path) = &cli.api_key_file {
        let text = std::fs::read_to_string(path).map_err(|error| {
            WrongArgument(format!("--api-key-file: {}: {error}", path.display()))
        })?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let before = keys.len();
        keys.extend(lines.map(str::to_owned));
        if keys.len() == before {
            let reason = format!("--api-key-file: {} has no key", path.display());
            return Err(WrongArgument(reason).into());
        }
    }
    match keys.iter().any(|key| key.trim().is_empty()) {
        true => Err(WrongArgument("--api-key: is empty; expected a key".into()).into()),
        false => Ok(keys),
    }
}

/// Returns the last part of the model's path, without the extension of a GGUF file.
fn default_name(path: Option<&Path>) -> String {
    let name = path.and_then(Path::file_name);
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_else(|| "gemma4".into());
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapter_argument_is_a_named_or_an_unnamed_folder() {
        let named = |name: &str, folder: &str| Ok(Adapter::Named(name.into(), folder.into()));
        let of_model = |folder: &str| Ok(Adapter::OfModel(folder.into()));
        assert_eq!(adapter("a=b/c"), named("a", "b/c"));
        assert_eq!(adapter("a=b=c"), named("a", "b=c"));
        assert_eq!(adapter("b/c"), of_model("b/c"));
        assert_eq!(adapter("./a=b"), of_model("./a=b"));
        for wrong in ["=b", "a="] {
            assert!(adapter(wrong).is_err(), "{wrong}");
        }
    }
}
