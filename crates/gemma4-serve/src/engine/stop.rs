//! Searches generated text for stop strings. The client receives the text before a stop string, but not the stop string.

use std::sync::Arc;

/// A search for stop strings in a stream of text. The search holds back text that may be the beginning of a stop
/// string.
#[derive(Debug)]
pub(super) struct StopText {
    strings: Vec<Arc<str>>,
    pending: String,
}

impl StopText {
    pub fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|string| !string.is_empty());
        Self {
            strings: strings.map(|string| string.as_str().into()).collect(),
            pending: String::new(),
        }
    }

    /// Appends text. Returns the text that the client may receive, and the first stop string in the text, if any.
    pub fn push(&mut self, text: &str) -> (String, Option<Arc<str>>) {
        if self.strings.is_empty() {
            return (text.to_owned(), None);
        }
        self.pending += text;
        let found = self.strings.iter().filter_map(|string| {
            let at = self.pending.find(&**string)?;
            Some((at, string.clone()))
        });
        // Choose the stop string that ends first, so that the result does not depend on how the text is divided among calls.
        if let Some((at, string)) = found.min_by_key(|(at, string)| (at + string.len(), *at)) {
            self.pending.truncate(at);
            return (std::mem::take(&mut self.pending), Some(string));
        }
        let possible = |start: &usize| {
            let end = &self.pending[*start..];
            self.strings.iter().any(|string| string.starts_with(end))
        };
        let mut starts = self.pending.char_indices().map(|(at, _)| at);
        let keep = starts.find(possible).unwrap_or(self.pending.len());
        let rest = self.pending.split_off(keep);
        (std::mem::replace(&mut self.pending, rest), None)
    }

    /// Returns the text that is still held back. The caller calls this function after the last `push`.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches `text` once for every way to split it into three pieces. Returns the text before the stop string, and
    /// the stop string. Both must be equal for all ways to split.
    fn all_splits(strings: &[&str], text: &str) -> (String, Option<String>) {
        let strings: Vec<String> = strings.iter().map(|string| string.to_string()).collect();
        let splits: Vec<usize> = (0..=text.len())
            .filter(|at| text.is_char_boundary(*at))
            .collect();
        let mut outcomes = Vec::new();
        for first in &splits {
            for second in splits.iter().filter(|second| *second >= first) {
                let mut stop = StopText::new(&strings);
                let (mut released, mut found) = (String::new(), None);
                for part in [&text[..*first], &text[*first..*second], &text[*second..]] {
                    let (text, string) = stop.push(part);
                    released += &text;
                    if string.is_some() {
                        found = string;
                        break;
                    }
                }
                if found.is_none() {
                    released += &stop.finish();
                }
                outcomes.push((released, found.map(|string| string.to_string())));
            }
        }
        let first = outcomes[0].clone();
        assert!(
            outcomes.iter().all(|outcome| *outcome == first),
            "{outcomes:?}"
        );
        first
    }

    #[test]
    fn push_at_every_split_gives_the_text_before_the_stop_string() {
        let found = |text: &str, stop: &str| (text.to_owned(), Some(stop.to_owned()));
        assert_eq!(all_splits(&["END"], "one END two"), found("one ", "END"));
        assert_eq!(all_splits(&["\n\n", "é!"], "café! x"), found("caf", "é!"));
        assert_eq!(all_splits(&["aab"], "aaaab"), found("aa", "aab"));
        assert_eq!(all_splits(&["b", "bc"], "abcd"), found("a", "b"));
        assert_eq!(all_splits(&["abcd", "bc"], "abcd"), found("a", "bc"));
        assert_eq!(all_splits(&["END"], "an EN"), ("an EN".into(), None));
        assert_eq!(all_splits(&[""], "text"), ("text".into(), None));
    }
}
