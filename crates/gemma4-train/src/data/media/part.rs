//! The parts of messages that are images or audio clips, in the forms of Transformers' chat templates and of OpenAI's API.

use super::source::{LineStrings, Location, Source};
use serde_json::{Map, Value, json};

/// The number of soft tokens of an image with OpenAI's detail `low`, which is the smallest number that models support.
const LOW: usize = 70;

/// The number of soft tokens of an image with OpenAI's detail `high`, which is the largest number that models support.
const HIGH: usize = 1120;

/// The fields that can name the file of an image or audio part. The field `image` or `audio` can name the file, too.
const SOURCES: [&str; 3] = ["url", "path", "base64"];

/// The names of audio formats in OpenAI's field `format`. OpenAI has the first two. The contents decide the format.
const AUDIO_FORMATS: [&str; 4] = ["wav", "mp3", "flac", "ogg"];

/// A kind of media.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// An image. The number is the largest number of its soft tokens. `None` stands for the checkpoint's number.
    Image { soft_tokens: Option<usize> },
    /// An audio clip.
    Audio,
}

/// An image or an audio clip in a message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MediaPart {
    /// The index of the message.
    pub message: usize,
    /// The index of the part in the message.
    pub part: usize,
    pub kind: Kind,
    pub location: Location,
}

/// Takes the images and audio clips out of the messages of `line`. Each of their parts becomes `{"type": "image"}` or
/// `{"type": "audio"}`, which is the form of chat templates.
pub(crate) fn take_parts(messages: &mut [Value], line: &str) -> Result<Vec<MediaPart>, String> {
    let mut media = Vec::new();
    let mut strings = LineStrings::new(line);
    for (index, message) in messages.iter_mut().enumerate() {
        let is_answer = message["role"] == "assistant";
        let Some(parts) = message.get_mut("content").and_then(Value::as_array_mut) else {
            continue;
        };
        for (number, part) in parts.iter_mut().enumerate() {
            let named = |reason: String| {
                let message = index + 1;
                let part = number + 1;
                format!("\"content\" of message {message}, part {part}: {reason}")
            };
            let Some((kind, source)) = read_part(part).map_err(named)? else {
                continue;
            };
            if is_answer {
                let reason = "is an image or audio in a message of the assistant, which is learned; expected text";
                return Err(named(reason.into()));
            }
            let location = match source {
                Source::File(path) => Location::File(path),
                Source::Inline(text) => Location::Inline(strings.find(text)),
            };
            *part = match kind {
                Kind::Image { .. } => json!({"type": "image"}),
                Kind::Audio => json!({"type": "audio"}),
            };
            media.push(MediaPart {
                message: index,
                part: number,
                kind,
                location,
            });
        }
    }
    Ok(media)
}

/// Reads a part of a message. Returns `None` for a text.
fn read_part(part: &Value) -> Result<Option<(Kind, Source<'_>)>, String> {
    let Some(fields) = part.as_object() else {
        return Ok(None);
    };
    let image = |detail| -> Result<Kind, String> {
        Ok(Kind::Image {
            soft_tokens: soft_tokens(detail)?,
        })
    };
    let (kind, source) = match fields.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(None),
        Some("image") => (image(None)?, own_source(fields, "image")?),
        Some("audio") => (Kind::Audio, own_source(fields, "audio")?),
        Some("image_url") => {
            refuse_others(fields, "", &["type", "image_url"])?;
            let url = match fields.get("image_url") {
                Some(Value::String(url)) => return Ok(Some((image(None)?, Source::of_url(url)?))),
                value => object(value, "image_url")?,
            };
            refuse_others(url, "image_url.", &["url", "detail"])?;
            let kind = image(url.get("detail"))?;
            (kind, Source::of_url(text(url, "url", "image_url.url")?)?)
        }
        Some("input_image") => {
            refuse_others(fields, "", &["type", "image_url", "detail"])?;
            let kind = image(fields.get("detail"))?;
            (
                kind,
                Source::of_url(text(fields, "image_url", "image_url")?)?,
            )
        }
        Some("input_audio") => {
            refuse_others(fields, "", &["type", "input_audio"])?;
            let clip = object(fields.get("input_audio"), "input_audio")?;
            refuse_others(clip, "input_audio.", &["data", "format"])?;
            check_format(clip.get("format"))?;
            let data = text(clip, "data", "input_audio.data")?;
            (Kind::Audio, Source::data(data)?)
        }
        Some("audio_url") => {
            refuse_others(fields, "", &["type", "audio_url"])?;
            let clip = object(fields.get("audio_url"), "audio_url")?;
            refuse_others(clip, "audio_url.", &["url"])?;
            (
                Kind::Audio,
                Source::of_url(text(clip, "url", "audio_url.url")?)?,
            )
        }
        _ => {
            let kind = &part["type"];
            return Err(format!(
                "has the type {kind}, which is not supported in training; expected \"text\", \"image\", \"image_url\", \"audio\" or \"input_audio\""
            ));
        }
    };
    Ok(Some((kind, source)))
}

/// Returns the source of a part of the type `image` or `audio`, as Transformers' chat templates have them.
fn own_source<'a>(fields: &'a Map<String, Value>, kind: &str) -> Result<Source<'a>, String> {
    let names = [&[kind], &SOURCES[..]].concat();
    refuse_others(fields, "", &[&["type"], &names[..]].concat())?;
    let mut given = names.iter().filter(|name| is_given(fields, name));
    let (Some(name), None) = (given.next(), given.next()) else {
        return Err(format!(
            "does not name one {kind}; expected one of the fields {names:?} with a path or a data URL"
        ));
    };
    let source = text(fields, name, name)?;
    match *name {
        "base64" => Source::data(source),
        _ => Source::of_url(source),
    }
}

fn is_given(fields: &Map<String, Value>, name: &str) -> bool {
    fields.get(name).is_some_and(|value| !value.is_null())
}

/// Refuses fields other than `known`, which would change nothing. `prefix` is the path of the object in the part.
fn refuse_others(fields: &Map<String, Value>, prefix: &str, known: &[&str]) -> Result<(), String> {
    let mut names = fields.keys();
    match names.find(|name| !known.contains(&name.as_str()) && is_given(fields, name)) {
        Some(name) => Err(format!(
            "has the field \"{prefix}{name}\", which has no effect; expected only {known:?}"
        )),
        None => Ok(()),
    }
}

fn object<'a>(value: Option<&'a Value>, name: &str) -> Result<&'a Map<String, Value>, String> {
    value
        .and_then(Value::as_object)
        .ok_or_else(|| format!("\"{name}\" is not an object; expected an object"))
}

fn text<'a>(fields: &'a Map<String, Value>, name: &str, path: &str) -> Result<&'a str, String> {
    let text = fields.get(name).and_then(Value::as_str);
    text.filter(|text| !text.is_empty())
        .ok_or_else(|| format!("\"{path}\" is not a text, or empty; expected a text"))
}

/// Returns the largest number of soft tokens of an image with OpenAI's `detail`.
fn soft_tokens(detail: Option<&Value>) -> Result<Option<usize>, String> {
    match detail {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(detail)) if detail == "auto" => Ok(None),
        Some(Value::String(detail)) if detail == "low" => Ok(Some(LOW)),
        Some(Value::String(detail)) if detail == "high" => Ok(Some(HIGH)),
        Some(detail) => Err(format!(
            "\"detail\" is {detail}; expected \"auto\", \"low\" or \"high\""
        )),
    }
}

fn check_format(format: Option<&Value>) -> Result<(), String> {
    match format {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(format)) if AUDIO_FORMATS.contains(&format.as_str()) => Ok(()),
        Some(format) => Err(format!(
            "\"input_audio.format\" is {format}; expected one of {AUDIO_FORMATS:?}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn read_part_of_each_form_finds_kind_and_location() {
        let file = || Source::File(PathBuf::from("a b.png"));
        let image = |soft_tokens| Kind::Image { soft_tokens };
        for (part, kind, source) in [
            (
                json!({"type": "image", "image": "a b.png"}),
                image(None),
                file(),
            ),
            (
                json!({"type": "image", "path": "a b.png", "url": null}),
                image(None),
                file(),
            ),
            (
                json!({"type": "image", "url": "file:a%20b.png"}),
                image(None),
                file(),
            ),
            (
                json!({"type": "image", "base64": "YWJj"}),
                image(None),
                Source::Inline("YWJj"),
            ),
            (
                json!({"type": "image", "image": "data:image/png;base64,YWJj"}),
                image(None),
                Source::Inline("data:image/png;base64,YWJj"),
            ),
            (
                json!({"type": "image_url", "image_url": {"url": "a b.png", "detail": "low"}}),
                image(Some(70)),
                file(),
            ),
            (
                json!({"type": "image_url", "image_url": "a b.png"}),
                image(None),
                file(),
            ),
            (
                json!({"type": "input_image", "image_url": "a b.png", "detail": "high"}),
                image(Some(1120)),
                file(),
            ),
            (
                json!({"type": "audio", "audio": "a b.png"}),
                Kind::Audio,
                file(),
            ),
            (
                json!({"type": "audio_url", "audio_url": {"url": "a b.png"}}),
                Kind::Audio,
                file(),
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}}),
                Kind::Audio,
                Source::Inline("YWJj"),
            ),
        ] {
            assert_eq!(read_part(&part), Ok(Some((kind, source))), "{part}");
        }
        assert_eq!(read_part(&json!({"type": "text", "text": "a"})), Ok(None));
        assert_eq!(read_part(&json!("a")), Ok(None));
    }

    #[test]
    fn read_part_of_malformed_part_names_the_field() {
        for (part, words) in [
            (json!({"type": "image"}), "\"image\""),
            (json!({"type": "audio"}), "\"audio\""),
            (
                json!({"type": "image", "image": "a", "url": "b"}),
                "does not name one image",
            ),
            (
                json!({"type": "image", "image": {"bytes": "a"}}),
                "not a text",
            ),
            (
                json!({"type": "image", "image": ""}),
                "not a text, or empty",
            ),
            (
                json!({"type": "image", "image": "a", "mood": 1}),
                "\"mood\"",
            ),
            (
                json!({"type": "image", "image": "https://a/b.png"}),
                "network",
            ),
            (
                json!({"type": "image", "image": "ftp://a/b.png"}),
                "\"ftp\"",
            ),
            (
                json!({"type": "image", "image": "file://host/b.png"}),
                "another machine",
            ),
            (
                json!({"type": "image", "image": "data:image/png,YWJj"}),
                "without base64",
            ),
            (
                json!({"type": "image", "image": "data:image/png;base64"}),
                "without a comma",
            ),
            (json!({"type": "image", "base64": "a b"}), "not base64"),
            (
                json!({"type": "image_url", "image_url": 3}),
                "\"image_url\"",
            ),
            (
                json!({"type": "image_url", "image_url": {"link": "a"}}),
                "image_url.link",
            ),
            (
                json!({"type": "image_url", "image_url": {}}),
                "image_url.url",
            ),
            (
                json!({"type": "image_url", "image_url": {"url": "a", "detail": "most"}}),
                "\"most\"",
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": "YWJj", "format": "aac"}}),
                "aac",
            ),
            (json!({"type": "input_audio"}), "\"input_audio\""),
            (json!({"type": "video", "video": "a.mp4"}), "\"video\""),
            (json!({"image": "a.png"}), "type null"),
        ] {
            let reason = read_part(&part).expect_err("the part is refused");
            assert!(reason.contains(words), "{part}: {reason}");
        }
    }

    #[test]
    fn take_parts_leaves_the_parts_of_chat_templates() {
        let mut messages = vec![
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}},
                {"type": "text", "text": "b"}, {"type": "audio", "path": "c.wav"}]}),
            json!({"role": "assistant", "content": "d"}),
        ];
        let media = take_parts(&mut messages, "").expect("the parts are valid");
        let places: Vec<_> = media.iter().map(|one| (one.message, one.part)).collect();
        assert_eq!(places, [(0, 0), (0, 2)]);
        let expected = json!([{"type": "image"}, {"type": "text", "text": "b"}, {"type": "audio"}]);
        assert_eq!(messages[0]["content"], expected);
        let part = json!({"type": "image", "image": "a.png"});
        let mut messages = vec![json!({"role": "assistant", "content": [part]})];
        let reason = take_parts(&mut messages, "").expect_err("answers have no images");
        assert!(
            reason.contains("message 1, part 1") && reason.contains("assistant"),
            "{reason}"
        );
    }

    /// Parts with the same data have the same bytes or other bytes with the same contents.
    #[test]
    fn take_parts_finds_the_strings_of_inline_data() {
        let line = r#"{"messages": [{"role": "user", "content": [{"base64": "YWJj", "type": "image"},
            {"type": "text", "text": "say \"YWJj\""}, {"type": "audio", "path": "data:audio/wav;base64,ZGVm"},
            {"type": "input_audio", "input_audio": {"data": "YWJj"}}]}]}"#;
        let mut value: Value = serde_json::from_str(line).expect("valid JSON");
        let messages = value["messages"].as_array_mut().expect("a list");
        let media = take_parts(messages, line).expect("the parts are valid");
        let strings = media.iter().map(|one| match &one.location {
            Location::Inline(bytes) => &line[bytes.clone()],
            Location::File(path) => panic!("{path:?}"),
        });
        let expected = [r#""YWJj""#, r#""data:audio/wav;base64,ZGVm""#, r#""YWJj""#];
        assert_eq!(strings.collect::<Vec<_>>(), expected);
    }
}
