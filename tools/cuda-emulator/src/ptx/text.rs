//! Splits PTX text into statements, after comments have been removed.

/// Returns `source` without comments.
pub fn without_comments(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(slash) = rest.find('/') {
        let (before, comment) = rest.split_at(slash);
        text.push_str(before);
        let (end, skipped) = match comment.as_bytes().get(1) {
            Some(b'/') => ("\n", 0),
            Some(b'*') => ("*/", 2),
            _ => {
                text.push('/');
                rest = &comment[1..];
                continue;
            }
        };
        rest = match comment[2..].find(end) {
            Some(length) => &comment[2 + length + skipped..],
            None => "",
        };
        text.push(' ');
    }
    text + rest
}

/// A parser's position in a text.
pub struct Cursor<'a> {
    text: &'a str,
}

impl<'a> Cursor<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text }
    }

    /// Skips white space, and returns the next character without consuming it.
    pub fn peek(&mut self) -> Option<char> {
        self.text = self.text.trim_start();
        self.text.chars().next()
    }

    /// Consumes the next character.
    pub fn skip(&mut self) {
        let mut characters = self.text.chars();
        characters.next();
        self.text = characters.as_str();
    }

    /// Consumes and returns the text before the first character in `stops`, or the rest of the text.
    pub fn until(&mut self, stops: &[char]) -> &'a str {
        let end = self.text.find(stops).unwrap_or(self.text.len());
        let (head, rest) = self.text.split_at(end);
        self.text = rest;
        head.trim()
    }

    /// Consumes the text up to and including `stop`, and returns the text before `stop`.
    pub fn through(&mut self, stop: char) -> &'a str {
        let head = self.until(&[stop]);
        self.skip();
        head
    }

    /// Consumes and returns the statement up to its semicolon. The statement may contain braces, such as the braces
    /// around vectors.
    pub fn statement(&mut self) -> &'a str {
        self.through(';')
    }

    /// Skips the block in braces that starts at the parser's position.
    pub fn skip_block(&mut self) {
        let mut depth = 0;
        while let Some(character) = self.peek() {
            self.skip();
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return;
            }
        }
    }

    /// Consumes and returns the label at the parser's position, or returns `None` if there is no label.
    pub fn label(&mut self) -> Option<&'a str> {
        self.peek();
        let end = self.text.find(|c: char| !is_name(c))?;
        let rest = self.text[end..].trim_start().strip_prefix(':')?;
        let label = (end > 0 && !rest.starts_with(':')).then(|| &self.text[..end])?;
        self.text = rest;
        Some(label)
    }
}

fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '$' | '%')
}

/// Splits a text at the commas that are outside of all brackets.
pub fn split_list(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, character) in text.char_indices() {
        match character {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        parts.push(last);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_comments_removes_both_kinds() {
        assert_eq!(without_comments("a // b\nc /* d\n e */ f"), "a  \nc   f");
    }

    #[test]
    fn split_list_keeps_bracketed_commas() {
        assert_eq!(
            split_list("{a, b}, [c, {d, e}], f"),
            ["{a, b}", "[c, {d, e}]", "f"]
        );
    }

    #[test]
    fn label_is_parsed_before_a_statement() {
        let mut cursor = Cursor::new(" $L_1: add.u32 a, b;");
        assert_eq!(cursor.label(), Some("$L_1"));
        assert_eq!(cursor.label(), None);
        assert_eq!(cursor.statement(), "add.u32 a, b");
    }
}
