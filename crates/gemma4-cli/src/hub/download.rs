//! Downloads of a model's files from the Hugging Face Hub into its cache, in the layout of `huggingface_hub`:
//! `blobs/ID` has a file's contents, and `snapshots/COMMIT/PATH` is a link to the contents.
//!
//! The crate `hf-hub` does not serve here. Its version 0.5 gives neither sizes nor checksums of files, and its version
//! 1.0 brings a second HTTP client and an asynchronous runtime.

use super::layout::{create_beside, link};
use super::repository::{RemoteFile, Repository};
use super::transfer::Transfer;
use indicatif::ProgressBar;
use std::{
    env,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};
use ureq::{Agent, Body, config::RedirectAuthHeaders, http::Response};

/// The public Hub.
const ENDPOINT: &str = "https://huggingface.co";
/// A connection to the Hub.
pub(super) struct Hub {
    agent: Agent,
    endpoint: Endpoint,
    token: Option<String>,
    /// The pause before the second attempt. Later pauses are longer.
    pub pause: Duration,
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
            endpoint: Endpoint::new(endpoint),
            token: token
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty()),
            pause: Duration::from_secs(2),
        }
    }

    /// The address of the Hub, without a password that it may contain.
    pub fn endpoint(&self) -> &str {
        &self.endpoint.shown
    }

    /// Gets the list of a model's files at the branch `main`.
    ///
    /// # Errors
    /// Returns the reason, and a remedy if the Hub refuses.
    pub fn repository(&self, name: &str) -> Result<Repository, String> {
        let path = format!("api/models/{name}/revision/main?blobs=true");
        let mut response = self.get(&path, 0).map_err(|reason| {
            format!("the Hub at {} cannot be reached: {reason}", self.endpoint())
        })?;
        self.refuse(&response, name)?;
        let json = response.body_mut().read_to_vec();
        let json = json.map_err(|error| format!("the Hub's answer is incomplete: {error}"))?;
        Repository::parse(name, &json)
    }

    /// Requests a path of the Hub from the byte `first` on. The error is the reason.
    pub fn get(&self, path: &str, first: u64) -> Result<Response<Body>, String> {
        let mut request = self.agent.get(format!("{}/{path}", self.endpoint.url));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if first > 0 {
            request = request.header("Range", format!("bytes={first}-"));
        }
        let called = request.call();
        called.map_err(|error| self.endpoint.without_password(&error.to_string()))
    }

    /// Returns an error for an answer that is not a success. The error says what to do.
    pub fn refuse<T>(&self, response: &Response<T>, name: &str) -> Result<(), String> {
        let status = response.status();
        let page = format!("{}/{name}", self.endpoint());
        match status.as_u16() {
            200..300 => Ok(()),
            401 if self.token.is_none() => Err(format!(
                "the Hub answers 401: the model does not exist, or needs a token. Accept its licence at {page}, and \
                 set HF_TOKEN to a token of {}/settings/tokens",
                self.endpoint()
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
            let transfer = Transfer {
                hub: self,
                model: &repository.name,
                commit: repository.commit(),
                file,
                bar,
            };
            transfer
                .run(&blob)
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
                let main = refs.join("main");
                let own = create_beside(&main, |own| {
                    File::create_new(own)?.write_all(repository.commit().as_bytes())
                })?;
                fs::rename(own, main)
            })
            .map_err(failed(&refs))?;
        Ok(snapshot)
    }
}

/// The address of the Hub.
struct Endpoint {
    url: String,
    /// The user and the password before the host, with the `@`. Empty if the address has none.
    credentials: String,
    /// The address without the credentials, for messages.
    shown: String,
}

impl Endpoint {
    fn new(url: &str) -> Self {
        let url = url.trim_end_matches('/').to_owned();
        let start = url.find("://").map_or(0, |scheme| scheme + 3);
        let host = url[start..]
            .split(['/', '?', '#'])
            .next()
            .unwrap_or_default();
        let credentials = host.rfind('@').map_or("", |end| &host[..=end]).to_owned();
        let shown = format!("{}{}", &url[..start], &url[start + credentials.len()..]);
        Self {
            url,
            credentials,
            shown,
        }
    }

    /// Removes the credentials from a text, such as an error with the address.
    fn without_password(&self, text: &str) -> String {
        match self.credentials.is_empty() {
            true => text.to_owned(),
            false => text.replace(&self.credentials, ""),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_with_a_password_is_shown_without_it() {
        for (url, shown, credentials) in [
            ("https://a.example/", "https://a.example", ""),
            ("https://u:p@a.example/x", "https://a.example/x", "u:p@"),
            ("http://u:p@q@a.example:80", "http://a.example:80", "u:p@q@"),
            ("u:p@a.example", "a.example", "u:p@"),
            ("https://a.example/x@y", "https://a.example/x@y", ""),
        ] {
            let endpoint = Endpoint::new(url);
            assert_eq!(endpoint.shown, shown);
            assert_eq!(endpoint.credentials, credentials);
            let error = endpoint.without_password(&format!("bad uri: {url}"));
            assert!(credentials.is_empty() || !error.contains("u:p"), "{error}");
        }
    }
}
