//! Documents of files: a JSON object a line, or one text.

use super::{
    conversations::{Ignored, Line, of_line, parse},
    corpus::{KINDS, read_text},
    rows::Example,
};
use crate::{
    Error,
    terminal::{WrongArgument, note},
};
use burn_gemma4::Gemma4;
use std::path::Path;

/// What belongs together: a text, or a conversation, of which the chat template may make several examples.
#[derive(Clone, Debug)]
pub struct Document {
    /// Where it is in its file.
    pub line: usize,
    /// What it has to read and to learn.
    pub examples: Vec<Example>,
}

/// The documents of a file with a JSON object in every line: `messages`, of which the assistant's are learned, or `text`, which
/// is learned as a whole. A conversation may say `tools` and `enable_thinking`, and its messages what the chat template
/// renders, such as `tool_calls`. Empty lines are passed over. A note counts the other columns, and those that are `null`.
///
/// # Errors
/// Naming the file, and the line that is not such an object, that the chat template refuses, or that has a field that the
/// template does not render.
pub fn documents(path: &Path, gemma: &Gemma4) -> Result<Vec<Document>, Error> {
    let text = read_text(path)?;
    refuse_other_forms(path, &text)?;
    let mut ignored = Ignored::default();
    let mut documents = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let number = index + 1;
        let document =
            parse(line, &mut ignored).and_then(|line| document(line, number, gemma, &mut ignored));
        let named = |reason| format!("{}: line {number}: {reason}", path.display());
        documents.push(document.map_err(named)?);
    }
    if let Some(told) = ignored.told() {
        note(format_args!("{}: {told}", path.display()));
    }
    match documents.is_empty() {
        true => Err(format!("{}: has no examples", path.display()).into()),
        false => Ok(documents),
    }
}

/// Refuses what editors and exports make of a file with an object in every line.
fn refuse_other_forms(path: &Path, text: &str) -> Result<(), Error> {
    let problem = if text.starts_with('\u{feff}') {
        "begins with a byte order mark; expected UTF-8 without one"
    } else if text.trim_start().starts_with('[') {
        "is a JSON array; expected a JSON object per line"
    } else {
        return Ok(());
    };
    Err(format!("{}: {problem}", path.display()).into())
}

/// The documents of a file by the end of its name: [`documents`] of `.jsonl`, and of `.txt`, `.md` and `.rs` the one that it is.
///
/// # Errors
/// [`WrongArgument`] for other names, and as these.
pub fn documents_or_text(path: &Path, gemma: &Gemma4) -> Result<Vec<Document>, Error> {
    match path.extension().and_then(|kind| kind.to_str()) {
        Some("jsonl") => documents(path, gemma),
        Some(kind) if KINDS.contains(&kind) => Ok(vec![text(path, gemma)?]),
        _ => Err(WrongArgument(format!(
            "{}: its name ends with none of .jsonl, .{}",
            path.display(),
            KINDS.join(", .")
        ))
        .into()),
    }
}

/// A file that is one text, which is learned as a whole.
///
/// # Errors
/// Naming the file, where it is not UTF-8, empty or what the tokenizer does not take.
fn text(path: &Path, gemma: &Gemma4) -> Result<Document, Error> {
    let text = read_text(path)?;
    if text.trim().is_empty() {
        return Err(format!("{}: is empty", path.display()).into());
    }
    let document = document(Line::Text(text), 1, gemma, &mut Ignored::default());
    document.map_err(|reason| format!("{}: {reason}", path.display()).into())
}

fn document(
    line: Line,
    number: usize,
    gemma: &Gemma4,
    ignored: &mut Ignored,
) -> Result<Document, String> {
    let vocabulary = gemma.config().vocab_size;
    let examples = of_line(line, gemma, ignored)?.into_iter();
    let within = examples.map(|example| within(example, vocabulary));
    Ok(Document {
        line: number,
        examples: within.collect::<Result<_, _>>()?,
    })
}

/// A tokenizer may have tokens that the model has no row for.
fn within(example: Example, vocabulary: usize) -> Result<Example, String> {
    let outside = |token: &&u32| **token as usize >= vocabulary;
    match example.tokens.iter().find(outside) {
        Some(token) => Err(format!(
            "has the token {token}, but the model's vocabulary has {vocabulary} tokens"
        )),
        None => Ok(example),
    }
}
