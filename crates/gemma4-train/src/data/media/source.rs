//! The sources of images and audio clips: files, and data in the lines of a JSONL file.

use base64::{
    Engine as _,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use percent_encoding::percent_decode_str;
use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Base64 of the standard alphabet. Some programs leave out the padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The largest size of a file in bytes, which is the limit of [`Image`](burn_gemma4::Image) and
/// [`Audio`](burn_gemma4::Audio).
const MOST_BYTES: u64 = 64 << 20;

/// The source of the contents of an image or audio file, as a part of a message names it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Source<'a> {
    /// A file. A relative path begins in the folder of the JSONL file.
    File(PathBuf),
    /// A data URL or base64.
    Inline(&'a str),
}

/// The place of the contents of an image or audio file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// A file. A relative path begins in the folder of the JSONL file.
    File(PathBuf),
    /// The bytes of a JSON string in the line, with its quotes. The string is a data URL or base64. Reading it needs no
    /// other part of the line, so the time for a line does not grow with the square of its images.
    Inline(Range<usize>),
}

/// The line of a JSONL file to which a medium belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The path of the JSONL file.
    pub file: Arc<Path>,
    /// The number of the line, counted from 1.
    pub line: usize,
    /// The number of bytes before the line in the file.
    pub start: u64,
}

impl<'a> Source<'a> {
    /// Returns the source of base64, after a check that decodes it.
    pub fn data(base64: &'a str) -> Result<Self, String> {
        decode(base64)?;
        Ok(Self::Inline(base64))
    }

    /// Returns the source of a path, of a `file:` URL or of a data URL. The data of a data URL are checked.
    pub fn of_url(url: &'a str) -> Result<Self, String> {
        match scheme(url).as_deref() {
            Some("data") => {
                decode(data_of(url)?)?;
                Ok(Self::Inline(url))
            }
            Some("file") => path_of(url).map(Self::File),
            Some("http" | "https") => Err(
                "is a web address, and training loads nothing from the network; download the file and name its path"
                    .into(),
            ),
            Some(scheme) => Err(format!(
                "has the scheme {scheme:?}; expected a path, a file URL or a data URL"
            )),
            None => Ok(Self::File(url.into())),
        }
    }
}

impl Location {
    /// Reads the contents.
    pub fn read(&self, origin: &Origin) -> Result<Vec<u8>, String> {
        match self {
            Self::File(path) => {
                let folder = origin.file.parent().unwrap_or(Path::new(""));
                let path = folder.join(path);
                read_file(&path).map_err(|reason| format!("{}: {reason}", path.display()))
            }
            Self::Inline(bytes) => {
                let text = origin.read_string(bytes)?;
                let data = match scheme(&text).as_deref() {
                    Some("data") => data_of(&text),
                    _ => Ok(text.as_str()),
                };
                data.and_then(decode).map_err(|_| changed())
            }
        }
    }
}

impl Origin {
    /// Reads a JSON string of the line again, so that the data of all lines need not be in memory.
    fn read_string(&self, bytes: &Range<usize>) -> Result<String, String> {
        let mut string = Vec::new();
        let read = File::open(&self.file).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.start + bytes.start as u64))?;
            file.take(bytes.len() as u64).read_to_end(&mut string)
        });
        read.map_err(|error| error.to_string())?;
        serde_json::from_slice(&string).map_err(|_| changed())
    }
}

/// Returns the reason why contents are not those with which the run began.
pub(super) fn changed() -> String {
    "has changed since the file was read; expected the same file during the whole run".into()
}

/// The JSON strings of a line, from the first to the last.
pub(super) struct LineStrings<'a> {
    line: &'a str,
    /// The position after the string that was found last.
    position: usize,
}

impl<'a> LineStrings<'a> {
    pub fn new(line: &'a str) -> Self {
        Self { line, position: 0 }
    }

    /// Returns the bytes of a string with the value `text`, with its quotes. The search begins after the string that was
    /// found last, and goes on from the beginning of the line.
    ///
    /// # Panics
    /// Panics if the line has no such string.
    pub fn find(&mut self, text: &str) -> Range<usize> {
        let is_found = |bytes: &Range<usize>| is_string(&self.line[bytes.clone()], text);
        let found = strings(self.line, self.position)
            .chain(strings(self.line, 0))
            .find(is_found)
            .expect("the texts of a line's JSON are strings of the line");
        self.position = found.end;
        found
    }
}

/// Returns the bytes of each JSON string of a line of valid JSON, with the quotes. `start` is not within a string.
fn strings(line: &str, start: usize) -> impl Iterator<Item = Range<usize>> {
    let mut rest = start;
    std::iter::from_fn(move || {
        let start = rest + line[rest..].find('"')?;
        let mut end = start + 1;
        loop {
            end += line[end..].find(['"', '\\'])?;
            match line.as_bytes()[end] {
                // The character after a backslash is escaped. It is ASCII in valid JSON.
                b'\\' => end += 2,
                _ => break,
            }
        }
        rest = end + 1;
        Some(start..rest)
    })
}

/// True if a JSON string, with its quotes, has the value `text`.
fn is_string(json: &str, text: &str) -> bool {
    let inner = &json[1..json.len() - 1];
    // An escaped string is longer than its value, so most strings are not parsed.
    inner == text
        || inner.len() > text.len()
            && inner.contains('\\')
            && serde_json::from_str::<String>(json).is_ok_and(|value| value == text)
}

/// Reads a file of limited size. A device or a pipe may have no end, and to open a named pipe waits for its writer.
fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let is_file = fs::metadata(path)
        .map_err(|error| error.to_string())?
        .is_file();
    if !is_file {
        return Err("is not a regular file; expected an image or audio file".into());
    }
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    check_size(bytes.len() as u64)?;
    Ok(bytes)
}

fn check_size(bytes: u64) -> Result<(), String> {
    match bytes > MOST_BYTES {
        true => Err(format!(
            "has more than {MOST_BYTES} bytes; expected a smaller file"
        )),
        false => Ok(()),
    }
}

fn decode(base64: &str) -> Result<Vec<u8>, String> {
    // Four characters are three bytes.
    check_size(base64.len() as u64 / 4 * 3)?;
    BASE64
        .decode(base64)
        .map_err(|error| format!("is not base64: {error}"))
}

/// Returns the scheme of a URL in lower case, or `None` for a path. A single letter is a drive of Windows.
fn scheme(url: &str) -> Option<String> {
    let (scheme, _) = url.split_once(':')?;
    let is_scheme = scheme.len() > 1
        && scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme
            .chars()
            .all(|one| one.is_ascii_alphanumeric() || "+-.".contains(one));
    is_scheme.then(|| scheme.to_ascii_lowercase())
}

/// Returns the base64 of a data URL. The contents decide the format, so the media type is not read.
fn data_of(url: &str) -> Result<&str, String> {
    let example = "expected data:image/png;base64,DATA";
    let Some((header, data)) = url.split_once(',') else {
        return Err(format!("is a data URL without a comma; {example}"));
    };
    match header.rsplit(';').next() {
        Some(encoding) if encoding.trim().eq_ignore_ascii_case("base64") => Ok(data),
        _ => Err(format!("is a data URL without base64; {example}")),
    }
}

/// Returns the path of a `file:` URL.
fn path_of(url: &str) -> Result<PathBuf, String> {
    let rest = &url["file:".len()..];
    let path = match rest.strip_prefix("//") {
        Some(rest) => rest.strip_prefix("localhost").unwrap_or(rest),
        None => rest,
    };
    if rest.starts_with("//") && !path.starts_with('/') {
        return Err("names a file of another machine; expected file:///PATH".into());
    }
    let path = percent_decode_str(path).decode_utf8();
    let path = path.map_err(|_| "is a file URL that is not UTF-8; expected UTF-8".to_owned())?;
    Ok(PathBuf::from(path.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn read_of_inline_data_reads_the_string_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jsonl");
        let url = "data:image/png;base64,YW/+Zw==";
        let plain = json!({"é \\": ["a", "ZGVmZw", url, "b"]}).to_string();
        // Some programs escape characters of base64.
        let escaped = plain.replace("/+Zw=", r"\/\u002bZw\u003D");
        std::fs::write(&path, format!("{plain}\n{escaped}\n")).expect("the file is written");
        let start = plain.len() as u64 + 1;
        for (line, number, start) in [(&plain, 1, 0), (&escaped, 2, start)] {
            let origin = Origin {
                file: path.as_path().into(),
                line: number,
                start,
            };
            let mut strings = LineStrings::new(line);
            // The second search for a text goes on from the beginning of the line.
            for (text, contents) in [
                (url, &b"ao\xfeg"[..]),
                ("ZGVmZw", b"defg"),
                (url, b"ao\xfeg"),
            ] {
                let location = Location::Inline(strings.find(text));
                assert_eq!(location.read(&origin).as_deref(), Ok(contents), "{line}");
            }
        }
        let origin = Origin {
            file: path.as_path().into(),
            line: 1,
            start: 0,
        };
        let location = Location::Inline(LineStrings::new(&plain).find(url));
        for text in [format!(" {plain}"), "{}".into()] {
            std::fs::write(&path, text).expect("the file is written");
            let reason = location.read(&origin).expect_err("the string has moved");
            assert!(reason.contains("has changed"), "{reason}");
        }
    }

    #[test]
    fn read_of_file_begins_in_the_folder_and_names_the_path() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("a.png"), "abc").expect("the file is written");
        let origin = Origin {
            file: folder.path().join("a.jsonl").as_path().into(),
            line: 1,
            start: 0,
        };
        let read = |name: &str| Location::File(name.into()).read(&origin);
        assert_eq!(read("a.png"), Ok(b"abc".to_vec()));
        let absolute = folder.path().join("a.png").display().to_string();
        assert_eq!(read(&absolute), Ok(b"abc".to_vec()));
        let reason = read("b.png").expect_err("the file does not exist");
        assert!(
            reason.contains("b.png") && reason.contains("No such file"),
            "{reason}"
        );
        let reason = read(".").expect_err("a folder");
        assert!(reason.contains("not a regular file"), "{reason}");
    }

    #[cfg(unix)]
    #[test]
    fn read_of_named_pipe_is_refused_without_waiting() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("a.png");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo runs").success());
        let reason = read_file(&pipe).expect_err("a pipe");
        assert!(reason.contains("not a regular file"), "{reason}");
    }
}
