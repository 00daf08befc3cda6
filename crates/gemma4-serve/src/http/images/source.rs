//! The source of an image's bytes: a data URL, base64, or a file.

use super::options::ImageOptions;
use super::root;
use crate::error::RequestError;
use base64::Engine as _;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use percent_encoding::percent_decode_str;

/// Base64 of the standard alphabet. Some clients leave out the padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The media types of images that can be decoded. The contents decide which of these formats a file has.
const MEDIA_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/jpg", "image/webp"];

/// The largest number of characters of a request's text that an error shows.
const SHOWN: usize = 40;

/// An image in a request.
#[derive(Debug)]
pub(crate) enum ImageSource {
    /// A data URL, a `file:` URL, or a path in the folder of images.
    Url(String),
    /// The contents of a file in base64, with their media type.
    Base64 { media_type: String, data: String },
}

impl ImageSource {
    /// Returns the contents of the image's file. `field` is the field of the request with the image.
    ///
    /// # Errors
    /// Returns an error if the source is malformed or not supported, or if it exceeds a limit of `options`.
    pub fn into_bytes(self, field: &str, options: &ImageOptions) -> Result<Vec<u8>, RequestError> {
        match self {
            Self::Base64 { media_type, data } => {
                check_media_type(field, &media_type)?;
                decode(field, &data, options.max_bytes)
            }
            Self::Url(url) => match scheme(&url).as_deref() {
                Some("data") => {
                    let (media_type, data) = data_url(field, &url)?;
                    check_media_type(field, media_type)?;
                    decode(field, data, options.max_bytes)
                }
                Some("file") => {
                    let path = file_url(field, &url)?;
                    file(field, &path, options)
                }
                Some("http" | "https") => Err(RequestError::field(
                    field,
                    "is a web address, and this server loads nothing from the network; send the image as a data URL",
                )),
                Some(scheme) => {
                    let reason = format!(
                        "has the scheme {:?}; expected a data URL, a file URL or a path",
                        shown(scheme)
                    );
                    Err(RequestError::field(field, reason))
                }
                None => file(field, &url, options),
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
fn data_url<'a>(field: &str, url: &'a str) -> Result<(&'a str, &'a str), RequestError> {
    let refuse = |reason: &str| RequestError::field(field, reason);
    let rest = &url["data:".len()..];
    let (header, data) = rest.split_once(',').ok_or_else(|| {
        refuse("is a data URL without a comma; expected data:image/png;base64,DATA")
    })?;
    let mut parts = header.split(';');
    let media_type = parts.next().unwrap_or_default().trim();
    match parts.next_back() {
        Some(encoding) if encoding.trim().eq_ignore_ascii_case("base64") => Ok((media_type, data)),
        _ => Err(refuse(
            "is a data URL without base64; expected data:image/png;base64,DATA",
        )),
    }
}

fn check_media_type(field: &str, media_type: &str) -> Result<(), RequestError> {
    let is_known = MEDIA_TYPES
        .iter()
        .any(|known| media_type.eq_ignore_ascii_case(known));
    match is_known {
        true => Ok(()),
        false => {
            let reason = format!(
                "has the media type {:?}; expected one of {MEDIA_TYPES:?}",
                shown(media_type)
            );
            Err(RequestError::field(field, reason))
        }
    }
}

/// Decodes base64. The size is checked before.
fn decode(field: &str, data: &str, max_bytes: usize) -> Result<Vec<u8>, RequestError> {
    // Four characters are three bytes. The last four may be fewer, and up to two of them may be padding.
    let least = (data.len() / 4 * 3).saturating_sub(2);
    let refuse = |reason: String| Err(RequestError::field(field, reason));
    if data.is_empty() {
        return refuse("has no data; expected base64".into());
    }
    let too_large = |count| format!("has {count} bytes; expected at most {max_bytes} for an image");
    if least > max_bytes {
        return refuse(too_large(least));
    }
    match BASE64.decode(data) {
        Ok(bytes) if bytes.len() > max_bytes => refuse(too_large(bytes.len())),
        Ok(bytes) => Ok(bytes),
        Err(error) => refuse(format!("is not base64: {error}")),
    }
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

fn file(field: &str, path: &str, options: &ImageOptions) -> Result<Vec<u8>, RequestError> {
    match &options.root {
        Some(root) => root::read(field, root, path, options.max_bytes),
        None => Err(RequestError::field(
            field,
            "names a file, but this server reads no files; send the image as a data URL, or allow a folder by --image-root",
        )),
    }
}

/// Returns the first characters of a text, because an error must not repeat the data of an image.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(url: &str) -> Result<Vec<u8>, String> {
        let options = ImageOptions {
            max_bytes: 6,
            ..ImageOptions::default()
        };
        let source = ImageSource::Url(url.into());
        source
            .into_bytes("url", &options)
            .map_err(|error| error.message)
    }

    #[test]
    fn into_bytes_reads_data_urls() {
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
    fn into_bytes_refuses_other_urls_without_repeating_their_data() {
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
            ("file:///a.png".into(), "--image-root"),
            ("a.png".into(), "--image-root"),
            (data.clone(), "--image-root"),
            ("".into(), "--image-root"),
        ] {
            let error = bytes(&url).expect_err("the URL is refused");
            assert!(error.starts_with("url: "), "{error}");
            assert!(error.contains(reason), "{error}");
            assert!(error.len() < 300, "{error}");
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
