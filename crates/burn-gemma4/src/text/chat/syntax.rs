//! Checks a template's source before minijinja parses it. Also translates the `generation` tag, which minijinja does
//! not support.

use minijinja::machinery::{Token, WhitespaceConfig, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};
use std::borrow::Cow;

/// The maximum size of a template in bytes. Published templates have about 20,000 bytes.
const LONGEST: usize = 1 << 20;

/// The maximum number of multiplications of constants in a template. minijinja multiplies constants at parse time. A
/// product of a text and a number repeats the text, and may create a text of 100 MB.
const MOST_CONSTANT_PRODUCTS: usize = 4;

/// The maximum number of operators in one expression. For `n` operators, the parser's stack memory is proportional to
/// `n`, and the parser's time is proportional to `n²`.
const MOST_OPERATORS: usize = 1000;

/// The maximum total number of `elif` branches in an `if` and in all `if`s around this `if`. The parser recurses once
/// per branch, and does not limit the recursion.
const MOST_BRANCHES: usize = 300;

/// Rejects a template that could exhaust time, memory or the stack while it is parsed.
pub(super) fn check(source: &str) -> Result<(), Error> {
    if source.len() > LONGEST {
        return Err(refused(format!(
            "it has {} bytes; expected at most {LONGEST}",
            source.len()
        )));
    }
    let whitespace = WhitespaceConfig::default();
    // Check only the tokens before the first invalid token. The parser reports the invalid token later.
    let tokens: Vec<Token<'_>> = tokenize(source, false, SyntaxConfig, whitespace)
        .map_while(Result::ok)
        .map(|(token, _)| token)
        .collect();
    check_products(&tokens)?;
    check_operators(&tokens)?;
    check_branches(&tokens)
}

fn refused(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn check_products(tokens: &[Token<'_>]) -> Result<(), Error> {
    let products = tokens.windows(3).filter(|window| {
        matches!(window, [before, Token::Mul, after]
            if !matches!(before, Token::Ident(_)) && !matches!(after, Token::Ident(_)))
    });
    match products.count() > MOST_CONSTANT_PRODUCTS {
        true => Err(refused(format!(
            "it has more than {MOST_CONSTANT_PRODUCTS} products of constants"
        ))),
        false => Ok(()),
    }
}

fn check_operators(tokens: &[Token<'_>]) -> Result<(), Error> {
    let mut operators = 0;
    for token in tokens {
        match token {
            Token::VariableStart | Token::BlockStart => operators = 0,
            Token::Ident("not" | "and" | "or" | "is" | "in" | "if" | "else") => operators += 1,
            Token::Ident(_)
            | Token::Str(_)
            | Token::String(_)
            | Token::Int(_)
            | Token::Int128(_)
            | Token::Float(_)
            | Token::Comma
            | Token::Colon
            | Token::TemplateData(_) => (),
            _ => operators += 1,
        }
        if operators > MOST_OPERATORS {
            return Err(refused(format!(
                "an expression has more than {MOST_OPERATORS} operators: parsing it takes too deep a recursion"
            )));
        }
    }
    Ok(())
}

fn check_branches(tokens: &[Token<'_>]) -> Result<(), Error> {
    // `open` holds the number of `elif` branches so far in each open `if`, and `total` is the sum of these numbers.
    let mut open: Vec<usize> = Vec::new();
    let mut total = 0;
    for pair in tokens.windows(2) {
        let [Token::BlockStart, Token::Ident(tag)] = pair else {
            continue;
        };
        match *tag {
            "if" => open.push(0),
            "elif" => {
                if let Some(branches) = open.last_mut() {
                    *branches += 1;
                    total += 1;
                }
            }
            "endif" => total -= open.pop().unwrap_or(0),
            _ => (),
        }
        if total > MOST_BRANCHES {
            return Err(refused(format!(
                "`if` and the `if` around it have more than {MOST_BRANCHES} `elif`"
            )));
        }
    }
    Ok(())
}

/// Replaces the `{% generation %}` blocks of Hugging Face Transformers by `{% with %}` blocks. A `generation` block
/// marks the assistant's text for training. In a rendering, both kinds of blocks only open a scope of variables.
pub(super) fn without_generation(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        result.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'%') => rest.find("%}").map_or(rest.len(), |end| end + 2),
            _ => 1,
        };
        let (tag, after) = rest.split_at(end);
        match tag_name(tag) {
            Some("generation") => result.push_str(&tag.replacen("generation", "with", 1)),
            Some("endgeneration") => result.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            Some("raw") => {
                let end = after.find("endraw").unwrap_or(after.len());
                result.push_str(tag);
                result.push_str(&after[..end]);
                rest = &after[end..];
                continue;
            }
            _ => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    Cow::Owned(result)
}

/// Returns the text between `{%` and `%}`, or `None` if `tag` is not enclosed in `{%` and `%}`. White space and the
/// signs `-` and `+` at both ends of the text are removed.
fn tag_name(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    Some(inner.trim_matches(['-', '+']).trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_generation_keeps_whitespace_control_and_raw_text() {
        let source = "a{%- generation -%} b {%- endgeneration %}{# {% generation %} #}{% raw %}{% generation %}{% endraw %}{{ x }}{";
        let expected = "a{%- with -%} b {%- endwith %}{# {% generation %} #}{% raw %}{% generation %}{% endraw %}{{ x }}{";
        assert_eq!(without_generation(source), expected);
    }
}
