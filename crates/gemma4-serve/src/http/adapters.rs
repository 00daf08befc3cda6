//! The handlers that load and unload adapters at run time, with the paths and fields of vLLM.

use super::app::App;
use super::body::read_json;
use super::form::Form;
use crate::error::{ErrorKind, RequestError};
use axum::{
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The files of an adapter.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// The fields of a request to `/v1/load_lora_adapter`. An unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadRequest {
    lora_name: String,
    lora_path: String,
    load_inplace: Option<bool>,
}

/// The fields of a request to `/v1/unload_lora_adapter`. An unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnloadRequest {
    lora_name: String,
    // An accepted field without an effect. Its number is internal to vLLM.
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<Value>,
}

/// Handles a request to `/v1/load_lora_adapter`.
pub(crate) async fn load(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    respond("added", try_load(app, request).await)
}

/// Handles a request to `/v1/unload_lora_adapter`.
pub(crate) async fn unload(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    respond("removed", try_unload(app, request).await)
}

/// Returns vLLM's text for a success, or the error.
fn respond(done: &str, outcome: Result<String, RequestError>) -> Response {
    match outcome {
        Ok(name) => {
            log::info!("adapter {name}: {done}");
            format!("Success: LoRA adapter '{name}' {done} successfully.").into_response()
        }
        Err(error) => Form::OpenAi.response(&error),
    }
}

async fn try_load(app: Arc<App>, request: Request<Body>) -> Result<String, RequestError> {
    let root = root(&app)?;
    let (request, _) = read_json::<LoadRequest>(request, &*app).await?;
    if request.load_inplace == Some(true) {
        let reason = "is not supported; unload the adapter, then load it";
        return Err(RequestError::field("load_inplace", reason));
    }
    let loaded = tokio::task::spawn_blocking(move || {
        let folder = folder_in(&root, &request.lora_path)?;
        app.load_adapter(&request.lora_name, &folder)?;
        Ok(request.lora_name)
    });
    loaded.await.unwrap_or_else(|error| {
        let message = format!("the adapter cannot be loaded: {error}");
        Err(RequestError::new(ErrorKind::Internal, message))
    })
}

async fn try_unload(app: Arc<App>, request: Request<Body>) -> Result<String, RequestError> {
    root(&app)?;
    let (request, _) = read_json::<UnloadRequest>(request, &*app).await?;
    app.engines.unload_adapter(&request.lora_name)?;
    Ok(request.lora_name)
}

/// Returns the folder of the adapters.
///
/// # Errors
/// Returns [`ErrorKind::NotFound`] if the server was started without such a folder.
fn root(app: &App) -> Result<PathBuf, RequestError> {
    app.options.adapter_root.clone().ok_or_else(|| {
        let message =
            "path: adapters cannot change at run time; start the server with --adapter-root";
        RequestError::new(ErrorKind::NotFound, message)
    })
}

/// Returns the folder at `path`, which is absolute or relative to `root`, without symbolic links.
///
/// # Errors
/// Returns an error if the folder or one of its files is missing. Returns an error if a part of the path is `..`, or if
/// the folder or one of its files is outside of `root`. A symbolic link counts as the file or folder that it names.
fn folder_in(root: &Path, path: &str) -> Result<PathBuf, RequestError> {
    let refuse = |reason: String| RequestError::field("lora_path", format!("{path:?} {reason}"));
    let relative = Path::new(path);
    // A relative path is always relative to the root, also if it begins like a relative root.
    let relative = match relative.is_absolute() {
        true => relative.strip_prefix(root).unwrap_or(relative),
        false => relative,
    };
    let root = root.canonicalize().map_err(|error| {
        refuse(format!(
            "cannot be found in the folder of adapters: {error}"
        ))
    })?;
    let outside = || refuse("is outside of the folder of adapters".into());
    let has_parent = |path: &Path| path.components().any(|part| part == Component::ParentDir);
    if has_parent(relative) {
        return Err(outside());
    }
    // Check the place before the existence, so that an error does not reveal which files exist outside of the root. A
    // symbolic link to a missing file cannot be resolved, and is refused as a missing file.
    let inside = |path: PathBuf| match path.canonicalize() {
        Ok(found) if found.starts_with(&root) => Ok(found),
        Ok(_) => Err(outside()),
        Err(error) => Err(refuse(format!("cannot be read: {error}"))),
    };
    let joined = root.join(relative);
    if !joined.starts_with(&root) {
        return Err(outside());
    }
    let folder = inside(joined)?;
    for file in FILES {
        inside(folder.join(file))?;
    }
    Ok(folder)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Creates the files of an adapter.
    fn create(folder: &Path) {
        fs::create_dir_all(folder).expect("a folder");
        for file in FILES {
            fs::write(folder.join(file), "").expect("a file");
        }
    }

    #[test]
    fn folder_in_root_resolves_only_paths_inside() {
        let all = tempfile::tempdir().expect("a folder");
        let all = all.path().canonicalize().expect("the folder exists");
        let (root, outside) = (all.join("root"), all.join("outside"));
        create(&root.join("one"));
        create(&outside);
        symlink(root.join("one"), root.join("link")).expect("a link");
        symlink(&outside, root.join("escape")).expect("a link");
        create(&root.join("file"));
        let config = root.join("file").join(FILES[0]);
        fs::remove_file(&config).expect("the file exists");
        symlink(outside.join(FILES[0]), &config).expect("a link");
        fs::create_dir(root.join("empty")).expect("a folder");
        for path in ["one", "./one", "link", &format!("{}/one", root.display())] {
            assert_eq!(folder_in(&root, path), Ok(root.join("one")), "{path}");
        }
        for path in [
            "../outside",
            "one/../../outside",
            "one/../one",
            "escape",
            "file",
            &outside.display().to_string(),
            "/missing",
        ] {
            let error = folder_in(&root, path).expect_err(path);
            assert!(error.message.contains("outside"), "{path}: {error}");
        }
        for path in ["missing", "empty", "one/adapter_config.json", "a\0b"] {
            let error = folder_in(&root, path).expect_err(path);
            assert!(error.message.contains("cannot be read"), "{path}: {error}");
        }
    }
}
