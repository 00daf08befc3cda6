//! The sources of images and audio clips: files, and data in the lines of a JSONL file.

use super::part::read_part;
use base64::{
    Engine as _,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use percent_encoding::percent_decode_str;
use serde_json::Value;
use std::{
    fs::File,
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

/// The place of the contents of an image or audio file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Location {
    /// A file. A relative path begins in the folder of the JSONL file.
    File(PathBuf),
    /// The part of the message itself has the contents in base64.
    Inline,
}

/// The line of a JSONL file to which a medium belongs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Origin {
    /// The path of the JSONL file.
    pub file: Arc<Path>,
    /// The number of the line, counted from 1.
    pub line: usize,
    /// The bytes of the line in the file.
    pub bytes: Range<u64>,
}

impl Location {
    /// Returns the location of base64, after a check that decodes it.
    pub fn data(base64: &str) -> Result<Self, String> {
        decode(base64)?;
        Ok(Self::Inline)
    }

    /// Returns the location of a path, of a `file:` URL or of a data URL. The data of a data URL are checked.
    pub fn of_url(url: &str) -> Result<Self, String> {
        match scheme(url).as_deref() {
            Some("data") => Self::data(data_of(url)?),
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

    /// Reads the contents. `message` and `part` are the indices of the part in the line.
    pub fn read(&self, origin: &Origin, message: usize, part: usize) -> Result<Vec<u8>, String> {
        match self {
            Self::File(path) => {
                let folder = origin.file.parent().unwrap_or(Path::new(""));
                let path = folder.join(path);
                read_file(&path).map_err(|reason| format!("{}: {reason}", path.display()))
            }
            Self::Inline => decode(&inline_data(&origin.read_line()?, message, part)?),
        }
    }
}

impl Origin {
    /// Reads the line again, so that the data of all lines need not be in memory.
    fn read_line(&self) -> Result<Value, String> {
        let mut line = Vec::new();
        let read = File::open(&self.file).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.bytes.start))?;
            let length = self.bytes.end - self.bytes.start;
            file.take(length).read_to_end(&mut line)
        });
        read.map_err(|error| error.to_string())?;
        serde_json::from_slice(&line).map_err(|_| changed())
    }
}

fn changed() -> String {
    "the line has changed since the file was read; expected the same file during the whole run"
        .into()
}

/// Returns the base64 of a part of a line.
fn inline_data(line: &Value, message: usize, part: usize) -> Result<String, String> {
    let part = &line["messages"][message]["content"][part];
    match read_part(part) {
        Ok(Some((_, Location::Inline))) => (),
        _ => return Err(changed()),
    }
    let fields = ["image", "audio", "url", "path", "base64", "image_url"];
    let inner = [
        ("image_url", "url"),
        ("audio_url", "url"),
        ("input_audio", "data"),
    ];
    let mut texts = fields.iter().filter_map(|name| part[*name].as_str());
    let mut nested = inner
        .iter()
        .filter_map(|(name, inner)| part[*name][*inner].as_str());
    let text = texts.next().or_else(|| nested.next()).ok_or_else(changed)?;
    match scheme(text).as_deref() {
        Some("data") => data_of(text).map(str::to_owned),
        _ => Ok(text.to_owned()),
    }
}

/// Reads a file of limited size. A device or a pipe may have no end.
fn read_file(path: &Path) -> Result<Vec<u8>, String> {
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
    fn read_of_inline_data_reads_the_line_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jsonl");
        let part = |url: &str| json!({"type": "image", "image": url});
        let line = |url: &str| json!({"messages": [{"role": "user", "content": [part(url)]}]});
        let [first, second] = ["data:image/png;base64,YWJj", "data:image/png;base64,ZGVmZw"]
            .map(|url| line(url).to_string());
        std::fs::write(&path, format!("{first}\n{second}\n")).expect("the file is written");
        let start = first.len() as u64 + 1;
        let origin = Origin {
            file: path.as_path().into(),
            line: 2,
            bytes: start..start + second.len() as u64,
        };
        let read = || Location::Inline.read(&origin, 0, 0);
        assert_eq!(read(), Ok(b"defg".to_vec()));
        std::fs::write(&path, format!("{first} \n")).expect("the file is written");
        assert!(
            read()
                .expect_err("the line is gone")
                .contains("has changed")
        );
    }

    #[test]
    fn read_of_file_begins_in_the_folder_and_names_the_path() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("a.png"), "abc").expect("the file is written");
        let origin = Origin {
            file: folder.path().join("a.jsonl").as_path().into(),
            line: 1,
            bytes: 0..0,
        };
        let read = |name: &str| Location::File(name.into()).read(&origin, 0, 0);
        assert_eq!(read("a.png"), Ok(b"abc".to_vec()));
        let absolute = folder.path().join("a.png").display().to_string();
        assert_eq!(read(&absolute), Ok(b"abc".to_vec()));
        let reason = read("b.png").expect_err("the file does not exist");
        assert!(
            reason.contains("b.png") && reason.contains("No such file"),
            "{reason}"
        );
    }
}
