//! Tool calls in the syntax of Gemma 4: `call:name{key:<|"|>text<|"|>,count:3,list:[true,null]}`.

use serde_json::{Map, Number, Value};

/// The special token that begins and ends a string.
const QUOTE: &str = "<|\"|>";
/// The largest nesting depth of lists and objects.
const MAX_DEPTH: usize = 64;

/// A tool call: the name of the tool and the arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The name of the tool.
    pub name: String,
    /// The arguments, by name.
    pub arguments: Map<String, Value>,
}

/// Parses the text between the tokens that begin and end a tool call. Returns `None` if the text is not a complete tool
/// call.
pub fn parse(text: &str) -> Option<ToolCall> {
    let rest = text.trim().strip_prefix("call:")?;
    let at = rest.find('{')?;
    let name = rest[..at].trim();
    if name.is_empty() {
        return None;
    }
    let mut parser = Parser { rest: &rest[at..] };
    let value = parser.value(0)?;
    match (value, parser.rest.trim()) {
        (Value::Object(arguments), "") => Some(ToolCall {
            name: name.to_owned(),
            arguments,
        }),
        _ => None,
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, token: &str) -> bool {
        self.skip_space();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        if self.take("{") {
            return self.object(depth).map(Value::Object);
        }
        if self.take("[") {
            return self.list(depth).map(Value::Array);
        }
        match self.string() {
            Some(text) => Some(Value::String(text)),
            None => self.scalar(),
        }
    }

    /// Parses a string between two quote tokens, or a JSON string. Some chat templates write JSON strings in tool calls.
    fn string(&mut self) -> Option<String> {
        if self.take(QUOTE) {
            let (text, rest) = self.rest.split_once(QUOTE)?;
            self.rest = rest;
            return Some(text.to_owned());
        }
        self.skip_space();
        if !self.rest.starts_with('"') {
            return None;
        }
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
        let text = values.next()?.ok()?;
        self.rest = &self.rest[values.byte_offset()..];
        Some(text)
    }

    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut object = Map::new();
        if self.take("}") {
            return Some(object);
        }
        loop {
            let key = match self.string() {
                Some(key) => key,
                None => {
                    let (key, _) = self.rest.split_once(':')?;
                    let key = key.to_owned();
                    self.rest = &self.rest[key.len()..];
                    key.trim().to_owned()
                }
            };
            if key.is_empty() || !self.take(":") {
                return None;
            }
            object.insert(key, self.value(depth + 1)?);
            match (self.take(","), self.take("}")) {
                (true, false) => (),
                (false, true) => return Some(object),
                _ => return None,
            }
        }
    }

    fn list(&mut self, depth: usize) -> Option<Vec<Value>> {
        let mut list = Vec::new();
        if self.take("]") {
            return Some(list);
        }
        loop {
            list.push(self.value(depth + 1)?);
            match (self.take(","), self.take("]")) {
                (true, false) => (),
                (false, true) => return Some(list),
                _ => return None,
            }
        }
    }

    fn scalar(&mut self) -> Option<Value> {
        let end = self.rest.find([',', '}', ']']).unwrap_or(self.rest.len());
        let text = self.rest[..end].trim();
        let value = match text {
            "true" | "True" => Value::Bool(true),
            "false" | "False" => Value::Bool(false),
            "null" | "None" => Value::Null,
            number => Value::Number(number.parse::<Number>().ok()?),
        };
        self.rest = &self.rest[end..];
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parse_reads_every_kind_of_argument() {
        let text = "call:get_weather{city:<|\"|>Paris, {FR}: \"now\"<|\"|>,days:3,exact:-1.5,ok:true,none:null,\
                    list:[1,<|\"|>a<|\"|>,[]],nested:{<|\"|>a key<|\"|>:{}},json:\"a\\n\"}";
        let call = parse(text).expect("the call is complete");
        assert_eq!(call.name, "get_weather");
        let expected = json!({
            "city": "Paris, {FR}: \"now\"", "days": 3, "exact": -1.5, "ok": true, "none": null,
            "list": [1, "a", []], "nested": {"a key": {}}, "json": "a\n",
        });
        assert_eq!(Value::Object(call.arguments), expected);
        assert!(parse(" call:f{} ").is_some_and(|call| call.arguments.is_empty()));
    }

    #[test]
    fn parse_of_an_incomplete_call_gives_nothing() {
        let whole = "call:f{a:<|\"|>x<|\"|>,b:[1,2],c:{d:true}}";
        assert!(parse(whole).is_some());
        for end in (0..whole.len()).filter(|end| whole.is_char_boundary(*end)) {
            assert_eq!(parse(&whole[..end]), None, "{}", &whole[..end]);
        }
        let deep = format!("call:f{{a:{}", "[".repeat(100_000));
        for wrong in [
            "call:{}",
            "f{}",
            "call:f{a}",
            "call:f{a:}",
            "call:f{a:1}x",
            "call:f{a:word}",
            "call:f{:1}",
            "call:f{a:1,}",
            "call:f[1]",
            "",
            deep.as_str(),
        ] {
            assert_eq!(parse(wrong), None, "{:.40}", wrong);
        }
    }
}
