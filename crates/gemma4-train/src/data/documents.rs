//! Reads documents from files. A file contains either one JSON object per line, or a single text.

use crate::{
    Error, InvalidArgument,
    data::{
        conversations::{Ignored, Line, Reader, of_line, parse},
        corpus::{KINDS, read_text},
        media::Origin,
        packing::Example,
    },
    report::note,
};
use burn_gemma4::{Gemma4, MediaKinds};
use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
    sync::Arc,
};

/// A document: a text, or a conversation. A text is one example. A conversation is one or more examples, depending on the
/// chat template.
#[derive(Clone, Debug)]
pub struct Document {
    /// The line number of the document in its file, counted from 1.
    pub line: usize,
    /// The tokens of each example, with a flag for each token. The flag is true for tokens to train on.
    pub examples: Vec<Example>,
}

impl Document {
    /// Returns the kinds of the images and audio clips in some documents.
    pub fn media_kinds(documents: &[Self]) -> MediaKinds {
        let examples = documents.iter().flat_map(|document| &document.examples);
        let media = examples.flat_map(|example| &example.media);
        media.fold(MediaKinds::default(), |found, one| {
            let MediaKinds { images, audio } = one.medium.kinds();
            MediaKinds {
                images: found.images || images,
                audio: found.audio || audio,
            }
        })
    }
}

/// Reads a file with one JSON object per line. In an object with `messages`, the assistant's messages are trained on. In an
/// object with `text`, all tokens after the first are trained on.
///
/// A conversation may have `tools` and `enable_thinking`. Its messages may have every field that the chat template renders,
/// such as `tool_calls`. A field that is `null` or not rendered is ignored, and a note reports the number of lines with this
/// field. Empty lines are ignored too.
///
/// A message may have images and audio clips, in the forms of Transformers' chat templates and of OpenAI's API: a path, a
/// `file:` URL or a data URL. Relative paths begin in the folder of the file. Images and clips are read, and clips are
/// decoded, for their numbers of tokens. The contents are read again when a batch needs them.
///
/// # Errors
/// Returns an error, which names the file and the line, in these cases:
///
/// - A line is not one of these objects.
/// - The chat template fails.
/// - The template does not render a part of a message, or a field that is meant for templates, such as `tools`.
/// - An image or an audio clip cannot be read, the model does not read its kind, or an answer has one.
/// - A line has an image or an audio clip, but the file is a pipe.
pub fn read_documents(path: &Path, gemma: &Gemma4) -> Result<Vec<Document>, Error> {
    let named = |reason: String| format!("{}: {reason}", path.display());
    let broken = |error: io::Error| named(error.to_string());
    let opened = File::open(path).map_err(broken)?;
    let is_regular = opened.metadata().map_err(broken)?.is_file();
    let mut opened = BufReader::new(opened);
    let mut ignored = Ignored::default();
    let mut documents = Vec::new();
    let reader = Reader::new(gemma);
    let file: Arc<Path> = path.into();
    let (mut number, mut end) = (0, 0);
    let mut bytes = Vec::new();
    // One line at a time is in memory, because lines may have the data of images and clips.
    loop {
        bytes.clear();
        if opened.read_until(b'\n', &mut bytes).map_err(broken)? == 0 {
            break;
        }
        number += 1;
        let start = end;
        end += bytes.len() as u64;
        let line = str::from_utf8(&bytes)
            .map_err(|_| named(format!("line {number} is not UTF-8")))?
            .trim_end_matches(['\n', '\r']);
        if number == 1 {
            refuse_byte_order_mark(line).map_err(named)?;
        }
        if line.trim().is_empty() {
            continue;
        }
        if documents.is_empty() {
            refuse_array(line).map_err(named)?;
        }
        let origin = Origin {
            file: file.clone(),
            line: number,
            start,
        };
        let document = parse(line, &mut ignored).and_then(|line| {
            if line.has_media() && !is_regular {
                let reason = "has images or audio, but the file is a pipe or a device; expected a regular file, in whose folder relative paths begin and whose data are read again";
                return Err(reason.into());
            }
            document(line, &origin, &reader, &mut ignored)
        });
        documents.push(document.map_err(|reason| named(format!("line {number}: {reason}")))?);
    }
    if let Some(summary) = ignored.summary() {
        note(format_args!("{}: {summary}", path.display()));
    }
    match documents.is_empty() {
        true => Err(format!("{}: has no examples", path.display()).into()),
        false => Ok(documents),
    }
}

/// Refuses a file with a byte order mark at the beginning. Some editors write such files.
fn refuse_byte_order_mark(line: &str) -> Result<(), String> {
    match line.starts_with('\u{feff}') {
        true => Err("begins with a byte order mark; expected UTF-8 without one".into()),
        false => Ok(()),
    }
}

/// Refuses a file with one JSON array around all objects. Some exports are such files.
fn refuse_array(line: &str) -> Result<(), String> {
    match line.trim_start().starts_with('[') {
        true => Err("is a JSON array; expected a JSON object per line".into()),
        false => Ok(()),
    }
}

/// Reads the documents of a file. [`read_documents`] reads a `.jsonl` file. A `.txt`, `.md` or `.rs` file is a single
/// document.
///
/// # Errors
/// Returns [`InvalidArgument`] for other extensions. Also passes on the errors of [`read_documents`].
pub fn read_documents_or_text(path: &Path, gemma: &Gemma4) -> Result<Vec<Document>, Error> {
    match path.extension().and_then(|kind| kind.to_str()) {
        Some("jsonl") => read_documents(path, gemma),
        Some(kind) if KINDS.contains(&kind) => Ok(vec![text(path, gemma)?]),
        _ => Err(InvalidArgument(format!(
            "{}: has another extension; expected one of .jsonl, .{}",
            path.display(),
            KINDS.join(", .")
        ))
        .into()),
    }
}

/// Reads a file as a single text. All of its tokens after the first are trained on.
///
/// # Errors
/// Returns an error if the file is not UTF-8, is empty, or cannot be tokenized. The error names the file.
fn text(path: &Path, gemma: &Gemma4) -> Result<Document, Error> {
    let text = read_text(path)?;
    if text.trim().is_empty() {
        return Err(format!("{}: is empty", path.display()).into());
    }
    let origin = Origin {
        file: path.into(),
        line: 1,
        start: 0,
    };
    let reader = Reader::new(gemma);
    let document = document(Line::Text(text), &origin, &reader, &mut Ignored::default());
    document.map_err(|reason| format!("{}: {reason}", path.display()).into())
}

fn document(
    line: Line,
    origin: &Origin,
    reader: &Reader<'_>,
    ignored: &mut Ignored,
) -> Result<Document, String> {
    let vocabulary = reader.gemma().config().vocab_size;
    let examples = of_line(line, origin, reader, ignored)?.into_iter();
    let within = examples.map(|example| within(example, vocabulary));
    Ok(Document {
        line: origin.line,
        examples: within.collect::<Result<_, _>>()?,
    })
}

/// Refuses an example with a token id outside the model's vocabulary. A tokenizer may have more tokens than the model has
/// embedding rows.
fn within(example: Example, vocabulary: usize) -> Result<Example, String> {
    let outside = |token: &&u32| **token as usize >= vocabulary;
    match example.tokens.iter().find(outside) {
        Some(token) => Err(format!(
            "has the token {token}, but the model's vocabulary has {vocabulary} tokens"
        )),
        None => Ok(example),
    }
}
