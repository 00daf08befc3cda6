//! Random requests of all APIs, and the comparison of their responses. The load generator uses them, too.

use crate::client::Response;
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const WORDS: [&str; 12] = [
    "cache",
    "fn main()",
    "the",
    "Paris",
    "42",
    "é",
    "🙂",
    "<turn|>",
    "\n\n",
    "why",
    "{\"a\": 1}",
    "tensor",
];

/// A request. If its client disconnects early, the case also describes when the client disconnects.
#[derive(Clone, Debug)]
pub struct Case {
    pub path: &'static str,
    pub body: Value,
    /// The milliseconds that the client waits before it sends the request.
    pub delay: u64,
    /// `None` for a client that reads the whole response. Any other client disconnects after the given number of
    /// response bytes. This client also disconnects if no byte arrives for the given number of milliseconds.
    pub leaves: Option<(usize, u64)>,
}

fn text(rng: &mut StdRng) -> String {
    // Some prompts are longer than the sliding window of 128 tokens, and longer than a prefill chunk of 50 tokens.
    let count = match rng.random_bool(0.15) {
        true => rng.random_range(60..150),
        false => rng.random_range(1..20),
    };
    let words = (0..count).map(|_| *WORDS.choose(rng).expect("a word"));
    words.collect::<Vec<_>>().join(" ")
}

/// Sets fields of `body` at random. Each entry of `fields` holds a field's name, the probability that the field is set,
/// and the value of the field.
fn set(rng: &mut StdRng, body: &mut Value, fields: &[(&str, f64, Value)]) {
    for (name, probability, value) in fields {
        if rng.random_bool(*probability) {
            body[*name] = value.clone();
        }
    }
}

fn schema() -> Value {
    json!({
        "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"], "additionalProperties": false,
    })
}

fn stop(rng: &mut StdRng) -> Value {
    let strings = ["e", "ab", "\n", " the", "é", "()", "a "];
    json!(strings.choose_multiple(rng, 3).collect::<Vec<_>>())
}

/// Adds random options that OpenAI's chat API and completions API share.
fn set_openai(rng: &mut StdRng, body: &mut Value) {
    let (stop, n, max_tokens) = (
        stop(rng),
        rng.random_range(1..4),
        body["max_tokens"].clone(),
    );
    let format = match rng.random_range(0..3) {
        0 => json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}}),
        1 => json!({"type": "regex", "regex": "(red|green){2,9}[0-9]+"}),
        _ => json!({"type": "grammar", "grammar": "start: (\"x\" | \"é\" | \"yz\")+"}),
    };
    let bias = json!({"300": 4, "17": -100, "900": 2.5});
    let fields = [
        ("n", 0.3, json!(n)),
        ("stop", 0.3, stop),
        ("ignore_eos", 0.3, json!(true)),
        ("min_tokens", 0.2, max_tokens),
        ("presence_penalty", 0.15, json!(0.5)),
        ("frequency_penalty", 0.15, json!(1.5)),
        ("repetition_penalty", 0.15, json!(1.3)),
        ("logit_bias", 0.15, bias),
        ("response_format", 0.25, format),
    ];
    set(rng, body, &fields);
}

fn tools(rng: &mut StdRng, body: &mut Value, tool: Value, named: Value, required: Value) {
    if body.get("response_format").is_none() && rng.random_bool(0.3) {
        body["tools"] = json!([tool]);
        match rng.random_range(0..3) {
            0 => body["tool_choice"] = named,
            1 => body["tool_choice"] = required,
            _ => (),
        }
    }
}

/// Returns a random request with greedy decoding.
pub fn case(rng: &mut StdRng) -> Case {
    let (text, max_tokens) = (text(rng), rng.random_range(1..24));
    let messages = json!([{"role": "user", "content": text}]);
    let parameters = json!({"type": "object", "properties": {"x": {"type": "string"}}});
    let (path, mut body) = match rng.random_range(0..4) {
        0 => {
            let mut body = json!({"messages": messages, "max_tokens": max_tokens});
            set_openai(rng, &mut body);
            let tool =
                json!({"type": "function", "function": {"name": "look", "parameters": parameters}});
            let named = json!({"type": "function", "function": {"name": "look"}});
            tools(rng, &mut body, tool, named, json!("required"));
            let fields = [
                ("logprobs", 0.3, json!(true)),
                ("reasoning_effort", 0.2, json!("low")),
            ];
            set(rng, &mut body, &fields);
            if body.get("logprobs").is_some() {
                body["top_logprobs"] = json!(rng.random_range(0..4));
            }
            ("/v1/chat/completions", body)
        }
        1 => {
            let mut body = json!({"prompt": text, "max_tokens": max_tokens});
            set_openai(rng, &mut body);
            let count = rng.random_range(0..4);
            set(rng, &mut body, &[("logprobs", 0.3, json!(count))]);
            ("/v1/completions", body)
        }
        2 => {
            let mut body = json!({"input": text, "max_output_tokens": max_tokens});
            let tool = json!({"type": "function", "name": "look", "parameters": parameters});
            let named = json!({"type": "function", "name": "look"});
            tools(rng, &mut body, tool, named, json!("required"));
            let effort = json!({"effort": "high"});
            set(rng, &mut body, &[("reasoning", 0.2, effort)]);
            ("/v1/responses", body)
        }
        _ => {
            let mut body = json!({"messages": messages, "max_tokens": max_tokens + 2});
            let tool = json!({"name": "look", "input_schema": parameters});
            let named = json!({"type": "tool", "name": "look"});
            tools(rng, &mut body, tool, named, json!({"type": "any"}));
            let thinking =
                json!({"type": "enabled", "budget_tokens": rng.random_range(1..=max_tokens)});
            let stop = stop(rng);
            set(
                rng,
                &mut body,
                &[("thinking", 0.3, thinking), ("stop_sequences", 0.3, stop)],
            );
            ("/v1/messages", body)
        }
    };
    body["temperature"] = json!(0);
    body["stream"] = json!(rng.random_bool(0.5));
    Case {
        path,
        body,
        delay: rng.random_range(0..8),
        leaves: rng
            .random_bool(0.25)
            .then(|| (rng.random_range(0..3000), rng.random_range(1..60))),
    }
}

/// Returns the parts of a response that are the same in every run: the data of a stream, or the body. If a prompt has
/// several answers, their events may interleave in any order. The events of a stream are therefore grouped by the index
/// of the answer.
fn stable(case: &Case, response: &Response) -> BTreeMap<Option<u64>, Vec<Value>> {
    let mut values = match case.body["stream"] == true {
        true => response.data(),
        false => vec![response.json()],
    };
    // Heartbeats depend on the time that the server takes.
    values.retain(|value| value["type"] != "ping");
    values.iter_mut().for_each(remove_unstable);
    let mut parts = BTreeMap::<_, Vec<Value>>::new();
    for value in values {
        let index = match case.body["stream"] == true {
            true => value["choices"][0]["index"].as_u64(),
            false => None,
        };
        parts.entry(index).or_default().push(value);
    }
    parts
}

/// Removes ids and times from a response. Also removes the numbers of cached tokens. If a request is sent twice, the
/// second answer reuses cached keys and values of the first, so these numbers differ.
fn remove_unstable(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            // Anthropic's API does not count cached tokens as input tokens. Add them, so that the number of input
            // tokens does not depend on the cache.
            let cached = fields.remove("cache_read_input_tokens");
            if let Some(cached) = cached.and_then(|cached| cached.as_u64()) {
                let input = fields["input_tokens"].as_u64().expect("a number of tokens");
                fields["input_tokens"] = json!(input + cached);
            }
            fields.remove("cached_tokens");
            for name in ["id", "created", "created_at", "item_id", "call_id"] {
                fields.remove(name);
            }
            fields.values_mut().for_each(remove_unstable);
        }
        Value::Array(values) => values.iter_mut().for_each(remove_unstable),
        _ => (),
    }
}

/// True if two JSON values are equal. Floating-point numbers, which are log-probabilities, may differ by rounding.
fn equal(first: &Value, second: &Value) -> bool {
    match (first, second) {
        (Value::Object(first), Value::Object(second)) => {
            let same = |(name, value)| second.get(name).is_some_and(|other| equal(value, other));
            first.len() == second.len() && first.iter().all(same)
        }
        (Value::Array(first), Value::Array(second)) => {
            first.len() == second.len() && first.iter().zip(second).all(|(a, b)| equal(a, b))
        }
        (Value::Number(first), Value::Number(second)) if first.is_f64() && second.is_f64() => {
            let difference = first
                .as_f64()
                .zip(second.as_f64())
                .map(|(a, b)| (a - b).abs());
            difference.is_some_and(|difference| difference < 1e-3)
        }
        (first, second) => first == second,
    }
}

/// Compares the response of a request with the response to the same request alone. The client of `found` may have
/// disconnected early. Returns true if `found` is complete.
///
/// # Errors
/// Returns a description if the responses differ.
pub fn compare(case: &Case, alone: &Response, found: &Response) -> Result<bool, String> {
    if alone.status != 200 || found.status != 200 {
        return Err(format!("{case:?}: {found:?}\nalone: {alone:?}"));
    }
    let (alone, found) = (stable(case, alone), stable(case, found));
    let mut is_whole = true;
    for (choice, alone) in &alone {
        let found = found.get(choice).map_or(&[][..], Vec::as_slice);
        let is_equal = alone.iter().zip(found).all(|(a, b)| equal(a, b));
        if !is_equal || found.len() > alone.len() {
            return Err(format!("{case:?}\n{found:#?}\nalone: {alone:#?}"));
        }
        is_whole &= found.len() == alone.len();
    }
    match is_whole || case.leaves.is_some() {
        true => Ok(is_whole),
        false => Err(format!(
            "{case:?}: the response has ended early: {found:#?}"
        )),
    }
}
