//! Parses the operands of an instruction, and resolves the names in them.

use super::text::split_list;
use super::types::{Register, Special, Type};
use crate::fault::Fault;

#[derive(Clone, Debug)]
pub enum Operand {
    Register(Register),
    /// A negated predicate, `!p`.
    Not(Register),
    /// The text of a constant. How the text becomes bits depends on the type of the instruction.
    Number(String),
    /// The address of a variable.
    Symbol(u64),
    Special(Special),
    /// The special register that counts the clock cycles of the multiprocessor.
    Clock,
    /// An address `[register + offset]` or `[offset]`.
    Address(Option<Register>, u64),
    /// A list `{a, b}` or `[a, {b, c}]`.
    List(Vec<Operand>),
    /// A pair of results `a|p`.
    Pair(Box<Operand>, Box<Operand>),
    /// The operand `_`, which discards a result.
    Nothing,
}

/// Looks up the names that are visible at an operand.
pub trait Names {
    fn register(&self, name: &str) -> Option<Register>;
    fn symbol(&self, name: &str) -> Option<u64>;
}

/// Parses an operand.
///
/// # Errors
/// Returns an error if a name is unknown, or if the text is not a PTX operand.
pub fn parse(text: &str, names: &impl Names) -> Result<Operand, Fault> {
    let text = text.trim();
    if let Some(list) = enclosed(text, '{', '}') {
        return list_of(list, names);
    }
    if let Some(inner) = enclosed(text, '[', ']') {
        if split_list(inner).len() > 1 {
            return list_of(inner, names);
        }
        return address(inner, names);
    }
    if text == "_" {
        return Ok(Operand::Nothing);
    }
    if text == "WARP_SZ" {
        return Ok(Operand::Number("32".into()));
    }
    if let Some((first, second)) = text.split_once('|') {
        let (first, second) = (parse(first, names)?, parse(second, names)?);
        return Ok(Operand::Pair(Box::new(first), Box::new(second)));
    }
    if let Some(register) = names.register(text) {
        return Ok(Operand::Register(register));
    }
    if let Some(name) = text.strip_prefix('!')
        && let Some(register) = names.register(name.trim())
    {
        return Ok(Operand::Not(register));
    }
    if matches!(text, "%clock" | "%clock64" | "%globaltimer") {
        return Ok(Operand::Clock);
    }
    if let Some(special) = Special::of(text) {
        return Ok(Operand::Special(special));
    }
    if let Some(address) = names.symbol(text) {
        return Ok(Operand::Symbol(address));
    }
    if let Some((name, offset)) = text.split_once('+')
        && let Some(address) = names.symbol(name.trim())
        && let Some(offset) = number(offset, Type::U64)
    {
        return Ok(Operand::Symbol(address.wrapping_add(offset)));
    }
    if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        return Ok(Operand::Number(text.to_string()));
    }
    Err(Fault::Syntax(format!("operand `{text}`")))
}

fn enclosed(text: &str, open: char, close: char) -> Option<&str> {
    text.strip_prefix(open)?.strip_suffix(close)
}

fn list_of(text: &str, names: &impl Names) -> Result<Operand, Fault> {
    let parts = split_list(text).into_iter();
    Ok(Operand::List(
        parts
            .map(|part| parse(part, names))
            .collect::<Result<_, _>>()?,
    ))
}

fn address(text: &str, names: &impl Names) -> Result<Operand, Fault> {
    let wrong = || Fault::Syntax(format!("address `{text}`"));
    let sign = text.rfind(['+', '-']).filter(|at| *at > 0);
    let (base, offset) = match sign {
        Some(at) => {
            let offset = number(&text[at + 1..], Type::U64).ok_or_else(wrong)?;
            let negative = text[at..].starts_with('-');
            let base = text[..at].trim().trim_end_matches('+').trim();
            (
                base,
                if negative {
                    offset.wrapping_neg()
                } else {
                    offset
                },
            )
        }
        None => (text.trim(), 0),
    };
    if let Some(register) = names.register(base) {
        return Ok(Operand::Address(Some(register), offset));
    }
    let start = names
        .symbol(base)
        .or_else(|| number(base, Type::U64))
        .ok_or_else(wrong)?;
    Ok(Operand::Address(None, start.wrapping_add(offset)))
}

/// Converts the text of a constant to bits. `number_type` is the type of the instruction in which the constant is an
/// operand.
pub fn number(text: &str, number_type: Type) -> Option<u64> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits.trim()),
        None => (false, text),
    };
    if let Some(digits) = prefixed(digits, ["0f", "0F"]) {
        let value = f32::from_bits(u32::from_str_radix(digits, 16).ok()?);
        return float_bits(number_type, if negative { -value } else { value }.into());
    }
    if let Some(digits) = prefixed(digits, ["0d", "0D"]) {
        let value = f64::from_bits(u64::from_str_radix(digits, 16).ok()?);
        return float_bits(number_type, if negative { -value } else { value });
    }
    let digits = digits.trim_end_matches('U');
    let value = match prefixed(digits, ["0x", "0X"]) {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    // An integer constant in an f32 or f64 instruction would need a conversion. The parser refuses such constants,
    // because NVRTC never emits them.
    if matches!(number_type, Type::F32 | Type::F64) {
        return None;
    }
    Some(if negative {
        value.wrapping_neg()
    } else {
        value
    })
}

fn prefixed<'a>(digits: &'a str, prefixes: [&str; 2]) -> Option<&'a str> {
    prefixes
        .iter()
        .find_map(|prefix| digits.strip_prefix(prefix))
}

fn float_bits(number_type: Type, value: f64) -> Option<u64> {
    match number_type.bits() {
        32 => Some(u64::from((value as f32).to_bits())),
        64 => Some(value.to_bits()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_bits_of_their_type() {
        assert_eq!(number("-1", Type::S32), Some(u64::MAX));
        assert_eq!(number("0x1F", Type::B32), Some(31));
        assert_eq!(number("0f3F800000", Type::F32), Some(0x3f80_0000));
        assert_eq!(number("0f3F800000", Type::F64), Some(1f64.to_bits()));
        assert_eq!(
            number("0d3FF0000000000000", Type::F64),
            Some(1f64.to_bits())
        );
        assert_eq!(number("1", Type::F32), None);
        assert_eq!(number("x", Type::U32), None);
    }
}
