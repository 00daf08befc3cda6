//! The source of the bytes of an image or an audio clip: a data URL, base64, or a file.

use super::kind::{Kind, check_audio_format};
use super::options::MediaOptions;
use super::root;
use super::store::MediaStore;
use crate::engine::MediaMemory;
use crate::error::RequestError;
use base64::Engine as _;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use percent_encoding::percent_decode_str;
use std::borrow::Cow;
use std::path::Path;

/// Base64 of the standard alphabet. Some clients leave out the padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The largest number of characters of a request's text that an error shows.
const SHOWN: usize = 40;

/// The source of an image or an audio clip in a request.
#[derive(Debug)]
pub(crate) enum MediaSource {
    /// A data URL, a `file:` URL, or a path in the folder of media.
    Url(String),
    /// The contents of a file in base64, with their media type.
    Base64 { media_type: String, data: String },
    /// The contents of an audio file in base64, with their format as in OpenAI's `input_audio`.
    InputAudio { format: String, data: String },
}

/// The contents of a file.
pub(super) struct SourceFile {
    pub bytes: Vec<u8>,
    /// The memory of a file in the folder of media. The body of the request has reserved the memory of other sources.
    _memory: Option<MediaMemory>,
}

/// The place of a file's contents.
enum Location<'a> {
    /// Base64.
    Data(&'a str),
    /// A path in the folder of media.
    File(&'a Path, Cow<'a, str>),
}

impl MediaSource {
    /// Checks the source without reading the file.
    ///
    /// # Errors
    /// Returns an error that names `field` or a part of it if the source is malformed or not supported.
    pub fn check(
        &self,
        field: &str,
        kind: Kind,
        options: &MediaOptions,
    ) -> Result<(), RequestError> {
        match self.location(field, kind, options)? {
            Location::Data(data) => {
                check_data(&self.data_field(field), data, kind.max_bytes(options))
            }
            Location::File(..) => Ok(()),
        }
    }

    /// Reads the contents of the file. `store` has the limits, and reserves the memory of a file in the folder of
    /// media, which is added to `taken`.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check). Returns an error if the contents cannot be read, are too large, or
    /// need more memory than is free.
    pub(super) fn read(
        self,
        field: &str,
        kind: Kind,
        store: &MediaStore,
        taken: &mut usize,
    ) -> Result<SourceFile, RequestError> {
        let max_bytes = kind.max_bytes(&store.options);
        match self.location(field, kind, &store.options)? {
            Location::Data(data) => Ok(SourceFile {
                bytes: decode(&self.data_field(field), data, max_bytes)?,
                _memory: None,
            }),
            Location::File(root, path) => {
                let reserve = |bytes| store.reserve(field, taken, bytes);
                let (bytes, memory) = root::read(field, root, &path, max_bytes, reserve)?;
                Ok(SourceFile {
                    bytes,
                    _memory: Some(memory),
                })
            }
        }
    }

    /// Returns the field of the data, which `input_audio` has in a field of its own.
    fn data_field<'a>(&self, field: &'a str) -> Cow<'a, str> {
        match self {
            Self::InputAudio { .. } => format!("{field}.data").into(),
            Self::Url(_) | Self::Base64 { .. } => field.into(),
        }
    }

    /// Returns the place of the file's contents.
    fn location<'a>(
        &'a self,
        field: &str,
        kind: Kind,
        options: &'a MediaOptions,
    ) -> Result<Location<'a>, RequestError> {
        let refuse = |reason: String| Err(RequestError::field(field, reason));
        match self {
            Self::Base64 { media_type, data } => {
                kind.check_media_type(field, media_type)?;
                Ok(Location::Data(data))
            }
            Self::InputAudio { format, data } => {
                check_audio_format(field, format)?;
                Ok(Location::Data(data))
            }
            Self::Url(url) => match scheme(url).as_deref() {
                Some("data") => {
                    let (media_type, data) = data_url(field, url, kind)?;
                    kind.check_media_type(field, media_type)?;
                    Ok(Location::Data(data))
                }
                Some("file") => {
                    let path = file_url(field, url)?;
                    Ok(Location::File(root_of(field, kind, options)?, path.into()))
                }
                Some("http" | "https") => refuse(format!(
                    "is a web address, and this server loads nothing from the network; send the {} as a data URL",
                    kind.contents()
                )),
                Some(scheme) => refuse(format!(
                    "has the scheme {:?}; expected a data URL, a file URL or a path",
                    shown(scheme)
                )),
                None => Ok(Location::File(root_of(field, kind, options)?, url.into())),
            },
        }
    }
}

/// Returns the scheme of a URL in lower case, or `None` for a path.
fn scheme(url: &str) -> Option<String> {
    let (scheme, _) = url.split_once(':')?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|one| one.is_ascii_alphanumeric() || "+-.".contains(one));
    is_scheme.then(|| scheme.to_ascii_lowercase())
}

/// Returns the media type and the base64 data of a data URL.
fn data_url<'a>(field: &str, url: &'a str, kind: Kind) -> Result<(&'a str, &'a str), RequestError> {
    let refuse = |what: &str| {
        let reason = format!("is a data URL without {what}; expected {}", kind.example());
        RequestError::field(field, reason)
    };
    let rest = &url["data:".len()..];
    let (header, data) = rest.split_once(',').ok_or_else(|| refuse("a comma"))?;
    let mut parts = header.split(';');
    let media_type = parts.next().unwrap_or_default().trim();
    match parts.next_back() {
        Some(encoding) if encoding.trim().eq_ignore_ascii_case("base64") => Ok((media_type, data)),
        _ => Err(refuse("base64")),
    }
}

/// Checks the length of base64 before it is decoded.
fn check_data(field: &str, data: &str, max_bytes: usize) -> Result<(), RequestError> {
    // Four characters are three bytes. The last four may be fewer, and up to two of them may be padding.
    let least = (data.len() / 4 * 3).saturating_sub(2);
    match data.is_empty() {
        true => Err(RequestError::field(field, "has no data; expected base64")),
        false => check_size(field, least, max_bytes),
    }
}

fn check_size(field: &str, bytes: usize, max_bytes: usize) -> Result<(), RequestError> {
    match bytes > max_bytes {
        true => {
            let reason = format!("has {bytes} bytes; expected at most {max_bytes}");
            Err(RequestError::field(field, reason))
        }
        false => Ok(()),
    }
}

/// Decodes base64. The length has been checked.
fn decode(field: &str, data: &str, max_bytes: usize) -> Result<Vec<u8>, RequestError> {
    let bytes = BASE64
        .decode(data)
        .map_err(|error| RequestError::field(field, format!("is not base64: {error}")))?;
    check_size(field, bytes.len(), max_bytes)?;
    Ok(bytes)
}

/// Returns the path of a `file:` URL.
fn file_url(field: &str, url: &str) -> Result<String, RequestError> {
    let refuse = |reason: &str| RequestError::field(field, reason);
    let rest = &url["file:".len()..];
    let path = match rest.strip_prefix("//") {
        // The part up to the next slash names a machine.
        Some(rest) => {
            let rest = rest.strip_prefix("localhost").unwrap_or(rest);
            match rest.starts_with('/') {
                true => rest,
                false => {
                    return Err(refuse(
                        "names a file of another machine; expected file:///PATH",
                    ));
                }
            }
        }
        None => rest,
    };
    let decoded = percent_decode_str(path).decode_utf8();
    let decoded = decoded.map_err(|_| refuse("is a file URL that is not UTF-8"))?;
    Ok(decoded.into_owned())
}

/// Returns the folder of media.
fn root_of<'a>(
    field: &str,
    kind: Kind,
    options: &'a MediaOptions,
) -> Result<&'a Path, RequestError> {
    options.root.as_deref().ok_or_else(|| {
        let reason = format!(
            "names a file, but this server reads no files; send the {} as a data URL, or allow a folder by --media-root",
            kind.contents()
        );
        RequestError::field(field, reason)
    })
}

/// Returns the first characters of a text, because an error must not repeat the data of a file.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: Kind = Kind::Image { soft_tokens: None };

    fn store() -> MediaStore {
        let mut options = MediaOptions::default();
        options.images.max_bytes = 6;
        options.audio.max_bytes = 6;
        MediaStore::new(options)
    }

    fn read(source: MediaSource, kind: Kind) -> Result<Vec<u8>, String> {
        let store = store();
        let checked = source.check("url", kind, &store.options);
        let read = checked.and_then(|()| source.read("url", kind, &store, &mut 0));
        read.map(|file| file.bytes).map_err(|error| error.message)
    }

    fn bytes(url: &str) -> Result<Vec<u8>, String> {
        read(MediaSource::Url(url.into()), IMAGE)
    }

    #[test]
    fn read_of_data_urls_decodes_them() {
        for url in [
            "data:image/png;base64,YWJjZA==",
            "data:image/png;base64,YWJjZA",
            "DATA:IMAGE/JPEG;charset=utf-8;BASE64,YWJjZA==",
            "data:image/webp; base64,YWJjZA==",
        ] {
            assert_eq!(bytes(url), Ok(b"abcd".to_vec()), "{url}");
        }
        assert_eq!(
            bytes("data:image/png;base64,YWJjZGVm"),
            Ok(b"abcdef".to_vec())
        );
    }

    #[test]
    fn read_of_other_urls_is_refused_without_repeating_their_data() {
        let data = "YWJj".repeat(1000);
        for (url, reason) in [
            (
                "http://example.com/a.png".into(),
                "loads nothing from the network",
            ),
            (
                "HTTPS://example.com/a.png".into(),
                "loads nothing from the network",
            ),
            ("ftp://example.com/a.png".into(), "has the scheme \"ftp\""),
            ("blob:a".into(), "has the scheme \"blob\""),
            ("data:image/png".into(), "without a comma"),
            ("data:,YWJj".into(), "without base64"),
            ("data:image/png,YWJj".into(), "without base64"),
            ("data:base64,YWJj".into(), "without base64"),
            ("data:;base64,YWJj".into(), "media type \"\""),
            (
                "data:image/gif;base64,YWJj".into(),
                "media type \"image/gif\"",
            ),
            ("data:text/html;base64,YWJj".into(), "media type"),
            (format!("data:{data};base64,YWJj"), "media type"),
            ("data:image/png;base64,".into(), "has no data"),
            ("data:image/png;base64,YW Jj".into(), "is not base64"),
            (
                "data:image/png;base64,YWJ".to_owned() + "\n",
                "is not base64",
            ),
            ("data:image/png;base64,Y".into(), "is not base64"),
            ("data:image/png;base64,YWJjZGVmZw==".into(), "has 7 bytes"),
            (format!("data:image/png;base64,{data}"), "at most 6"),
            ("file://other/a.png".into(), "another machine"),
            ("file:///%FF".into(), "not UTF-8"),
            ("file:///a.png".into(), "--media-root"),
            ("a.png".into(), "--media-root"),
            (data.clone(), "--media-root"),
            ("".into(), "--media-root"),
        ] {
            let error = bytes(&url).expect_err("the URL is refused");
            assert!(error.starts_with("url: "), "{error}");
            assert!(error.contains(reason), "{error}");
            assert!(error.len() < 300, "{error}");
        }
    }

    #[test]
    fn read_of_audio_checks_the_format_and_the_media_type() {
        let input = |format: &str, data: &str| {
            let (format, data) = (format.into(), data.into());
            read(MediaSource::InputAudio { format, data }, Kind::Audio)
        };
        for format in ["wav", "mp3", "flac", "ogg"] {
            assert_eq!(input(format, "YWJj"), Ok(b"abc".to_vec()), "{format}");
        }
        for (format, data, words) in [
            (
                "pcm16",
                "YWJj",
                "url.format: is \"pcm16\"; expected one of [\"wav\", \"mp3\"",
            ),
            ("WAV", "YWJj", "url.format: is \"WAV\""),
            ("wav", "", "url.data: has no data"),
            ("wav", "*", "url.data: is not base64"),
            (
                "wav",
                "YWJjZGVmZw==",
                "url.data: has 7 bytes; expected at most 6",
            ),
        ] {
            let error = input(format, data).expect_err("the source is refused");
            assert!(error.starts_with(words), "{error}");
        }
        let url = |url: &str| read(MediaSource::Url(url.into()), Kind::Audio);
        assert_eq!(url("data:audio/x-wav;base64,YWJj"), Ok(b"abc".to_vec()));
        for (text, words) in [
            ("data:image/png;base64,YWJj", "media type \"image/png\""),
            ("data:audio/wav,YWJj", "expected data:audio/wav;base64,DATA"),
            ("https://example.com/a.wav", "send the audio as a data URL"),
            ("a.wav", "send the audio as a data URL"),
        ] {
            let error = url(text).expect_err("the source is refused");
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn file_url_is_decoded() {
        for (url, path) in [
            ("file:///a/b%20c.png", "/a/b c.png"),
            ("file://localhost/a.png", "/a.png"),
            ("file:a.png", "a.png"),
            ("file:/a%2e%2e.png", "/a...png"),
        ] {
            assert_eq!(file_url("f", url).as_deref(), Ok(path));
        }
    }
}
