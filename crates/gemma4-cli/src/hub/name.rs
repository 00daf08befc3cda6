//! The names of models on the Hub.

use std::path::Path;

/// A model on the Hub, and one of its GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name<'a> {
    /// The name `organisation/name`.
    pub model: &'a str,
    pub file: Option<&'a str>,
}

impl<'a> Name<'a> {
    /// Returns the path as a name `organisation/name` or `organisation/name:file.gguf`, or `None` if the path does not
    /// have this form.
    pub fn of(model: &'a Path) -> Option<Self> {
        let text = model.to_str()?;
        let (model, file) = match text.split_once(':') {
            Some((model, file)) => (model, Some(file)),
            None => (text, None),
        };
        let is_character = |one: char| one.is_ascii_alphanumeric() || "-_.".contains(one);
        let is_part = |part: &str| {
            let first = part.chars().next();
            first.is_some_and(|first| first.is_ascii_alphanumeric() || first == '_')
                && part.chars().all(is_character)
        };
        let is_file = |file: &str| file.ends_with(".gguf") && file.split('/').all(is_part);
        let (organisation, name) = model.split_once('/')?;
        // Do not treat a path with a weight file's extension as a model's name, because the user means a file.
        let is_weights = model.ends_with(".gguf") || model.ends_with(".safetensors");
        let is_name = is_part(organisation) && is_part(name) && !is_weights;
        (is_name && file.is_none_or(is_file)).then_some(Self { model, file })
    }
}
