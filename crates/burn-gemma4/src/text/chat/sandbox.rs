//! The sandbox of chat templates. The sandbox replaces each minijinja instruction that creates texts or lists by a
//! function call. The called functions count the created bytes and enforce a limit.
//!
//! A limit on the number of instructions would not bound the memory. With few instructions, a template can double a
//! text forty times.

use super::limits::{
    LIST, MOST_BYTES, assert_in_time, assert_no_namespace, keep, length, spend, too_much,
};
use super::python::{self, text};
use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{
    Environment, Error, ErrorKind, Expression, State, Value, context, filters, functions, tests,
};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::sync::LazyLock;

/// The maximum size in bytes of a constant in a compiled template. minijinja computes constant expressions at parse
/// time, when no function counts the bytes.
const LONGEST_CONSTANT: usize = 1 << 20;

/// The maximum width of a field in the filter `format`, in characters.
const MOST_COLUMNS: usize = 1000;

/// Returns a function call that replaces `instruction`, or `None` if `instruction` is not replaced. The called function
/// counts the created bytes. The functions' names are not valid identifiers, so no template can redefine the functions.
fn guarded<'source>(instruction: &Instruction<'source>) -> Option<Instruction<'source>> {
    Some(match instruction {
        Instruction::Add => Instruction::CallFunction("+", Some(2)),
        Instruction::Mul => Instruction::CallFunction("*", Some(2)),
        Instruction::StringConcat => Instruction::CallFunction("~", Some(2)),
        Instruction::In => Instruction::CallFunction("in", Some(2)),
        Instruction::Slice => Instruction::CallFunction("[:]", Some(4)),
        Instruction::BuildList(count) => {
            Instruction::CallFunction("[]", count.map(u16::try_from).transpose().ok()?)
        }
        Instruction::BuildMap(pairs) => {
            Instruction::CallFunction("{}", Some(u16::try_from(2 * pairs).ok()?))
        }
        _ => return None,
    })
}

/// The name of the function that checks the time limit. The function is called before each instruction that may read
/// long texts, and in each iteration of a loop.
const LOOK: &str = "in time";

/// The name of the function that converts a text to a list of its characters. The function is called before loops and
/// unpacking, because minijinja cannot unpack a text, and a minijinja loop over a text has no defined length.
const ITERATED: &str = "iterated text";

/// True if an instruction may read long texts. The time limit is then checked before the instruction.
fn may_be_long(instruction: &Instruction<'_>) -> bool {
    matches!(
        instruction,
        Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::CompareAndPreserve(_)
            | Instruction::In
            | Instruction::GetItem
            | Instruction::Slice
            | Instruction::GetAttr(_)
            | Instruction::PushLoop(_)
            | Instruction::UnpackList(_)
            | Instruction::UnpackLists(_)
            | Instruction::ApplyFilter(..)
            | Instruction::PerformTest(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_)
    )
}

/// Returns a template's instructions with two changes. Counting functions replace the instructions that create texts or
/// lists, and checks of the time limit are added.
///
/// # Errors
/// Returns an error if a constant in the instructions exceeds its size limit.
pub(super) fn guard<'source>(
    instructions: &Instructions<'source>,
) -> Result<Instructions<'source>, Error> {
    let count = instructions.len() as u32;
    let all = || (0..count).filter_map(|index| Some((index, instructions.get(index)?)));
    // A time check takes two instructions: the call of the function and the removal of its result.
    let look = 2;
    let mut starts = vec![look];
    for (_, instruction) in all() {
        let width = match instruction {
            Instruction::EmitRaw(_) => 2,
            Instruction::SetAttr(_) => 4,
            Instruction::Iterate(_) => 1 + look,
            Instruction::PushLoop(_) | Instruction::UnpackList(_) => look + 2,
            _ if may_be_long(instruction) => look + 1,
            _ => 1,
        };
        starts.push(starts[starts.len() - 1] + width);
    }
    let moved = |target: u32| starts[target as usize];

    let mut result = Instructions::new(instructions.name(), instructions.source());
    result.add(Instruction::CallFunction(LOOK, Some(0)));
    result.add(Instruction::DiscardTop);
    for (index, instruction) in all() {
        let mut add =
            |instruction| match (instructions.get_span(index), instructions.get_line(index)) {
                (Some(span), _) => result.add_with_span(instruction, span),
                (None, Some(line)) => result.add_with_line(instruction, line as u16),
                (None, None) => result.add(instruction),
            };
        if may_be_long(instruction) {
            add(Instruction::CallFunction(LOOK, Some(0)));
            add(Instruction::DiscardTop);
        }
        let instruction = match instruction {
            Instruction::EmitRaw(raw) => {
                add(Instruction::LoadConst(Value::from(*raw)));
                Instruction::Emit
            }
            // The namespace is on the top of the stack, above the assigned value. Swap the two to check the value, and
            // swap them back.
            Instruction::SetAttr(_) => {
                add(Instruction::Swap);
                add(Instruction::CallFunction(".", Some(1)));
                add(Instruction::Swap);
                instruction.clone()
            }
            Instruction::PushLoop(_) | Instruction::UnpackList(_) => {
                add(Instruction::CallFunction(ITERATED, Some(1)));
                instruction.clone()
            }
            Instruction::LoadConst(value) if length(value)? > LONGEST_CONSTANT => {
                return Err(too_much());
            }
            Instruction::Iterate(target) => {
                add(Instruction::Iterate(moved(*target)));
                add(Instruction::CallFunction(LOOK, Some(0)));
                Instruction::DiscardTop
            }
            Instruction::Jump(target) => Instruction::Jump(moved(*target)),
            Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(moved(*target)),
            Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(moved(*target)),
            Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(moved(*target)),
            Instruction::BuildMacro(name, start, flags) => {
                Instruction::BuildMacro(name, moved(*start), *flags)
            }
            other => guarded(other).unwrap_or_else(|| other.clone()),
        };
        add(instruction);
    }
    Ok(result)
}

/// Adds to the environment the functions that the instructions of [`guard`] call. Also replaces filters and methods by
/// versions that count the created bytes, and tests by versions that check the time limit.
pub(super) fn set(environment: &mut Environment<'_>) {
    environment.add_function(LOOK, |state: &State<'_, '_>| assert_in_time(state));
    environment.add_function("+", add);
    environment.add_function("*", multiply);
    environment.add_function("~", concatenate);
    environment.add_function("in", contains);
    environment.add_function("[:]", slice);
    environment.add_function(".", |value: Value| {
        assert_no_namespace(&value)?;
        Ok::<_, Error>(value)
    });
    environment.add_function(
        ITERATED,
        |state: &State<'_, '_>, value: Value| match value.as_str() {
            Some(text) => {
                spend(
                    state,
                    size_of::<Value>().saturating_mul(text.chars().count()),
                )?;
                Ok(text.chars().map(Value::from).collect())
            }
            None => Ok(value),
        },
    );
    environment.add_function("[]", |state: &State<'_, '_>, elements: Rest<Value>| {
        keep(state, Value::from(elements.0))
    });
    environment.add_function("{}", |state: &State<'_, '_>, pairs: Rest<Value>| {
        let pairs = pairs
            .0
            .chunks(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()));
        keep(state, pairs.collect())
    });
    environment.add_function("dict", |state: &State<'_, '_>, of: Rest<Value>| {
        keep(
            state,
            from_args::<(Option<Value>, Kwargs)>(&of)
                .and_then(|(of, more)| functions::dict(of, more))?,
        )
    });
    environment.add_function("namespace", |state: &State<'_, '_>, of: Option<Value>| {
        spend(state, LIST)?;
        if let Some(of) = &of {
            assert_no_namespace(of)?;
        }
        functions::namespace(of)
    });
    for (name, filter) in filters() {
        environment.add_filter(
            name,
            move |state: &State<'_, '_>, arguments: Rest<Value>| {
                // Check the time in each call, because a single `map` instruction may call a filter for thousands of
                // elements.
                assert_in_time(state)?;
                check(name, &arguments)?;
                let arguments = printed(name, arguments.0)?;
                keep(state, filter.call(state, &arguments)?)
            },
        );
    }
    for (name, test) in tests() {
        environment.add_test(
            name,
            move |state: &State<'_, '_>, arguments: Rest<Value>| {
                // Check the time limit whenever a template test runs. One `select` filter may run a test on thousands
                // of elements, while minijinja counts only one instruction.
                assert_in_time(state)?;
                Ok::<_, Error>(test.call(state, &arguments)?.is_true())
            },
        );
    }
    environment.add_filter("string", |state: &State<'_, '_>, value: &Value| {
        keep(state, Value::from(text(value)?))
    });
    environment.add_filter("pprint", |state: &State<'_, '_>, value: &Value| {
        keep(state, Value::from(python::pprint(value)?))
    });
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = [value].into_iter().chain(arguments).cloned().collect();
        match method {
            // The method `join` has the separator as its object and the list as its argument. `check` expects the
            // reverse order, as in the filter `join`.
            "join" if arguments.len() == 1 => check(method, &[all[1].clone(), all[0].clone()])?,
            _ => check(method, &all)?,
        }
        let arguments = printed(method, arguments.to_vec())?;
        keep(state, call_method(state, value, method, &arguments)?)
    });
}

/// Returns the arguments of a filter or method. If the filter or method prints an argument, the argument is replaced by
/// the text that Python would print.
fn printed(name: &str, arguments: Vec<Value>) -> Result<Vec<Value>, Error> {
    let prints = matches!(
        name,
        "safe" | "escape" | "e" | "upper" | "lower" | "title" | "capitalize" | "trim" | "format"
    );
    match (prints, name) {
        (true, _) => arguments.iter().map(python::printable).collect(),
        (false, "replace" | "split" | "indent") => {
            let mut arguments = arguments;
            if let Some(first) = arguments.first_mut() {
                *first = python::printable(first)?;
            }
            Ok(arguments)
        }
        (false, "join") => {
            let mut arguments = arguments;
            if let Some(first) = arguments.first_mut()
                && is_sequence(first)
            {
                let elements: Result<Vec<Value>, Error> = first
                    .try_iter()?
                    .map(|element| python::printable(&element))
                    .collect();
                *first = Value::from(elements?);
            }
            Ok(arguments)
        }
        _ => Ok(arguments),
    }
}

/// Calls a Python method of a template value. minijinja-contrib implements most methods. This function implements the
/// remaining methods of strings.
fn call_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match method {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(arguments)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(arguments)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            "rsplit" => {
                let (separator, most): (Option<&str>, Option<i64>) = from_args(arguments)?;
                return rsplit(text, separator, most);
            }
            "partition" | "rpartition" => {
                let (separator,): (&str,) = from_args(arguments)?;
                if separator.is_empty() {
                    let reason = format!("{method}: the separator is empty");
                    return Err(Error::new(ErrorKind::InvalidOperation, reason));
                }
                let (found, missing) = match method {
                    "partition" => (text.split_once(separator), [text, "", ""]),
                    _ => (text.rsplit_once(separator), ["", "", text]),
                };
                let parts = found.map_or(missing, |(before, after)| [before, separator, after]);
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            _ => (),
        }
    }
    unknown_method_callback(state, value, method, arguments)
}

/// Implements Python's `str.rsplit`.
fn rsplit(text: &str, separator: Option<&str>, most: Option<i64>) -> Result<Value, Error> {
    let most = usize::try_from(most.unwrap_or(-1)).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = text;
    match separator {
        Some("") => {
            let reason = "rsplit: the separator is empty";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        Some(separator) => {
            while parts.len() < most
                && let Some((before, after)) = rest.rsplit_once(separator)
            {
                parts.push(after);
                rest = before;
            }
            parts.push(rest);
        }
        None => {
            rest = rest.trim_end();
            while parts.len() < most
                && let Some((before, after)) = rest.rsplit_once(char::is_whitespace)
            {
                parts.push(after);
                rest = before.trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
        }
    }
    Ok(parts.into_iter().rev().map(Value::from).collect())
}

/// Compiles an expression that applies one of minijinja's own operators to variables, such as `a + b`.
fn operator(expression: &'static str) -> Expression<'static, 'static> {
    static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
    let compiled = PLAIN.compile_expression(expression);
    compiled.expect("the expression is one operator with variables as operands")
}

fn add(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value, Error> {
    static PLAIN: LazyLock<Expression<'static, 'static>> =
        LazyLock::new(|| operator("left + right"));
    if is_sequence(&left) && is_sequence(&right) {
        return keep(state, left.try_iter()?.chain(right.try_iter()?).collect());
    }
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        spend(state, left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    PLAIN.eval(context! { left, right })
}

fn multiply(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value, Error> {
    static PLAIN: LazyLock<Expression<'static, 'static>> =
        LazyLock::new(|| operator("left * right"));
    for (repeated, times) in [(&left, &right), (&right, &left)] {
        if let (Some(length), Some(times)) = (repeated.len(), times.as_usize()) {
            let bytes = repeated.as_str().map_or(length, str::len);
            if bytes.saturating_mul(times) > MOST_BYTES {
                return Err(too_much());
            }
        }
    }
    keep(state, PLAIN.eval(context! { left, right })?)
}

fn concatenate(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value, Error> {
    let (left, right) = (text(&left)?, text(&right)?);
    spend(state, left.len() + right.len())?;
    Ok(Value::from(left + &right))
}

fn contains(value: Value, container: Value) -> Result<Value, Error> {
    static PLAIN: LazyLock<Expression<'static, 'static>> =
        LazyLock::new(|| operator("value in container"));
    if container.as_str().is_some() {
        // A search in a text first formats the searched value as text. `length` returns an error if this text is too
        // long.
        length(&value)?;
    }
    PLAIN.eval(context! { value, container })
}

fn slice(
    state: &State<'_, '_>,
    value: Value,
    start: Value,
    stop: Value,
    step: Value,
) -> Result<Value, Error> {
    static PLAIN: LazyLock<Expression<'static, 'static>> =
        LazyLock::new(|| operator("value[start:stop:step]"));
    keep(state, PLAIN.eval(context! { value, start, stop, step })?)
}

fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// Rejects arguments with which a filter or method would create too much text. The first argument is the value that the
/// filter or method is applied to.
fn check(name: &str, arguments: &[Value]) -> Result<(), Error> {
    let Some(first) = arguments.first() else {
        return Ok(());
    };
    let number = |index: usize, option: &str| -> usize {
        let named = || arguments.last()?.get_attr(option).ok()?.as_usize();
        let found = arguments.get(index).and_then(Value::as_usize);
        found.or_else(named).unwrap_or(0)
    };
    let times = |count: usize, bytes: usize| match count.saturating_mul(bytes) > MOST_BYTES {
        true => Err(too_much()),
        false => Ok(()),
    };
    match name {
        "sum"
            if first
                .try_iter()
                .is_ok_and(|mut all| all.any(|element| !element.is_number())) =>
        {
            let reason = "sum: expected numbers only";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        "join" => {
            let separator = arguments.get(1).map_or(Ok(0), length)?;
            let mut bytes = 0usize;
            for element in first.try_iter()? {
                bytes = bytes
                    .saturating_add(length(&element)?)
                    .saturating_add(separator);
                times(1, bytes)?;
            }
        }
        _ => (),
    }
    if is_sequence(first) || first.kind() == ValueKind::Map {
        return match name {
            // The filters that are listed here convert any value to text. `length` returns an error if that text is too
            // long.
            "safe" | "escape" | "e" | "upper" | "lower" | "title" | "capitalize" | "replace"
            | "trim" | "split" | "lines" | "indent" | "format" | "string" | "pprint" => {
                length(first).map(drop)
            }
            "batch" | "slice" => times(number(1, "count"), size_of::<Value>()),
            _ => Ok(()),
        };
    }
    let Some(text) = first.as_str() else {
        return Ok(());
    };
    match name {
        "replace" => {
            let [from, to] =
                [1, 2].map(|index| arguments.get(index).map_or(Ok(String::new()), python::text));
            times(text.matches(&from?).count(), to?.len())
        }
        "indent" => times(text.lines().count() + 1, number(1, "width")),
        "format" => {
            let widths = text.split(|char: char| !char.is_ascii_digit());
            let starred = text.contains('*');
            let columns = widths
                .filter_map(|width| width.parse().ok())
                .max()
                .unwrap_or(0usize);
            if starred || columns > MOST_COLUMNS {
                let reason = format!(
                    "format: the width is more than {MOST_COLUMNS}, or is given by an argument"
                );
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
            let fields = text.matches(['%', '{']).count();
            for argument in &arguments[1..] {
                times(fields, length(argument)?)?;
            }
            Ok(())
        }
        "split" | "rsplit" => match arguments.get(1).and_then(Value::as_str) {
            Some(separator) => times(text.matches(separator).count(), size_of::<Value>()),
            None => times(text.split_whitespace().count(), size_of::<Value>()),
        },
        "lines" | "splitlines" => times(text.lines().count(), size_of::<Value>()),
        "list" | "sort" | "unique" | "map" | "select" | "reject" | "batch" | "slice" | "join"
        | "zip" | "chain" => times(
            text.chars().count() + number(1, "count"),
            size_of::<Value>(),
        ),
        _ => Ok(()),
    }
}

/// Returns the names and the implementations of the Jinja tests that may read long texts, such as `is eq`.
fn tests() -> [(&'static str, Value); 20] {
    let [equal, unequal] = [
        Value::from_function(tests::is_eq),
        Value::from_function(tests::is_ne),
    ];
    let [less, greater] = [
        Value::from_function(tests::is_lt),
        Value::from_function(tests::is_gt),
    ];
    let [most, least] = [
        Value::from_function(tests::is_le),
        Value::from_function(tests::is_ge),
    ];
    [
        ("eq", equal.clone()),
        ("equalto", equal.clone()),
        ("==", equal),
        ("ne", unequal.clone()),
        ("!=", unequal),
        ("lt", less.clone()),
        ("lessthan", less.clone()),
        ("<", less),
        ("gt", greater.clone()),
        ("greaterthan", greater.clone()),
        (">", greater),
        ("le", most.clone()),
        ("<=", most),
        ("ge", least.clone()),
        (">=", least),
        ("in", Value::from_function(tests::is_in)),
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("lower", Value::from_function(tests::is_lower)),
        ("upper", Value::from_function(tests::is_upper)),
    ]
}

/// Returns the filters of Jinja with their names. The list does not contain the filter `tojson`, which enforces the
/// limits itself.
fn filters() -> [(&'static str, Value); 39] {
    [
        ("safe", Value::from_function(filters::safe)),
        ("escape", Value::from_function(filters::escape)),
        ("e", Value::from_function(filters::escape)),
        ("lower", Value::from_function(filters::lower)),
        ("upper", Value::from_function(filters::upper)),
        ("title", Value::from_function(filters::title)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("replace", Value::from_function(filters::replace)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("items", Value::from_function(filters::items)),
        ("reverse", Value::from_function(filters::reverse)),
        ("trim", Value::from_function(filters::trim)),
        ("join", Value::from_function(filters::join)),
        ("split", Value::from_function(filters::split)),
        ("lines", Value::from_function(filters::lines)),
        ("round", Value::from_function(filters::round)),
        ("int", Value::from_function(filters::int)),
        ("float", Value::from_function(filters::float)),
        ("attr", Value::from_function(filters::attr)),
        ("first", Value::from_function(filters::first)),
        ("last", Value::from_function(filters::last)),
        ("min", Value::from_function(filters::min)),
        ("max", Value::from_function(filters::max)),
        ("sort", Value::from_function(filters::sort)),
        ("list", Value::from_function(filters::list)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
        ("sum", Value::from_function(filters::sum)),
        ("indent", Value::from_function(filters::indent)),
        ("select", Value::from_function(filters::select)),
        ("reject", Value::from_function(filters::reject)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("map", Value::from_function(filters::map)),
        ("groupby", Value::from_function(filters::groupby)),
        ("unique", Value::from_function(filters::unique)),
        ("chain", Value::from_function(filters::chain)),
        ("zip", Value::from_function(filters::zip)),
        ("format", Value::from_function(filters::format)),
    ]
}
