//! Tables of the APIs' fields, from which malformed requests are generated.

use crate::harness::{MODEL, user};
use serde_json::{Value, json};

/// The type of a field.
#[derive(Clone, Copy)]
enum Type {
    Count,
    Integer,
    Number,
    Bool,
    Text,
    List,
    Object,
    /// A text or a list of texts.
    Texts,
}

use Type::{Bool, Count, Integer, List, Number, Object, Text, Texts};

impl Type {
    /// Returns JSON values that do not have this type.
    fn wrong(self) -> Vec<Value> {
        let all = [
            json!("x"),
            json!(true),
            json!(1.5),
            json!(-1),
            json!([]),
            json!({}),
            json!([{}]),
        ];
        let is_wrong = |value: &Value| match self {
            Count => true,
            Integer => *value != -1,
            Number => !value.is_number(),
            Bool => !value.is_boolean(),
            Text => !value.is_string(),
            List => !value.is_array(),
            Object => !value.is_object(),
            Texts => !value.is_string() && *value != json!([]),
        };
        all.into_iter().filter(is_wrong).collect()
    }
}

/// An API endpoint: its path, a valid request, the types of the request's fields, and values outside of the fields'
/// ranges.
pub struct Api {
    pub path: &'static str,
    pub valid: Value,
    types: &'static [(&'static str, Type)],
    ranges: &'static [(&'static str, &'static [f64])],
}

const SAMPLING: [(&str, Type); 16] = [
    ("model", Text),
    ("max_tokens", Count),
    ("min_tokens", Count),
    ("temperature", Number),
    ("top_p", Number),
    ("top_k", Integer),
    ("min_p", Number),
    ("seed", Integer),
    ("n", Count),
    ("stop", Texts),
    ("presence_penalty", Number),
    ("frequency_penalty", Number),
    ("repetition_penalty", Number),
    ("logit_bias", Object),
    ("ignore_eos", Bool),
    ("stream", Bool),
];

const RANGES: &[(&str, &[f64])] = &[
    ("max_tokens", &[0.0]),
    ("temperature", &[-0.01, 2.01, 1e300, -1e300]),
    ("top_p", &[-0.01, 1.01]),
    ("top_k", &[-2.0]),
    ("min_p", &[-0.01, 1.01]),
    ("presence_penalty", &[-2.01, 2.01]),
    ("frequency_penalty", &[-2.01, 2.01]),
    ("repetition_penalty", &[0.0, -1.0, 11.0]),
    ("n", &[0.0, 33.0]),
];

const MESSAGES: &[(&str, Type)] = &[
    ("model", Text),
    ("messages", List),
    ("max_tokens", Count),
    ("stop_sequences", List),
    ("stream", Bool),
    ("temperature", Number),
    ("top_p", Number),
    ("top_k", Integer),
    ("tools", List),
    ("tool_choice", Object),
    ("thinking", Object),
    ("output_config", Object),
];

/// Returns the APIs.
pub fn apis() -> [Api; 5] {
    let messages =
        json!({"model": MODEL, "messages": user("x"), "max_tokens": 1, "temperature": 0});
    let anthropic_ranges: &[(&str, &[f64])] = &[
        ("max_tokens", &[0.0]),
        ("temperature", &[-0.01, 1.01]),
        ("top_p", &[-0.01, 1.01]),
        ("top_k", &[-2.0]),
    ];
    [
        Api {
            path: "/v1/chat/completions",
            valid: messages.clone(),
            types: &[
                ("messages", List),
                ("max_completion_tokens", Count),
                ("logprobs", Bool),
                ("top_logprobs", Count),
                ("stream_options", Object),
                ("response_format", Object),
                ("tools", List),
                ("parallel_tool_calls", Bool),
                ("reasoning_effort", Text),
                ("chat_template_kwargs", Object),
            ],
            ranges: RANGES,
        },
        Api {
            path: "/v1/completions",
            valid: json!({"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": 0}),
            types: &[
                ("logprobs", Count),
                ("stream_options", Object),
                ("response_format", Object),
                ("echo", Bool),
                ("best_of", Count),
            ],
            ranges: RANGES,
        },
        Api {
            path: "/v1/responses",
            valid: json!({"model": MODEL, "input": "x", "max_output_tokens": 1, "temperature": 0}),
            types: &[
                ("model", Text),
                ("instructions", Text),
                ("max_output_tokens", Count),
                ("temperature", Number),
                ("top_p", Number),
                ("stream", Bool),
                ("tools", List),
                ("parallel_tool_calls", Bool),
                ("text", Object),
                ("reasoning", Object),
                ("include", List),
            ],
            ranges: &[
                ("max_output_tokens", &[0.0]),
                ("temperature", &[-0.01, 2.01]),
                ("top_p", &[-0.01, 1.01]),
            ],
        },
        Api {
            path: "/v1/messages",
            valid: messages.clone(),
            types: MESSAGES,
            ranges: anthropic_ranges,
        },
        Api {
            path: "/v1/messages/count_tokens",
            valid: json!({"model": MODEL, "messages": user("x")}),
            types: MESSAGES,
            ranges: &[],
        },
    ]
}

impl Api {
    pub fn is_anthropic(&self) -> bool {
        self.path.starts_with("/v1/messages")
    }

    /// Returns the name and the type of each field of the API.
    fn all_types(&self) -> impl Iterator<Item = (&'static str, Type)> {
        let has_sampling = matches!(self.path, "/v1/chat/completions" | "/v1/completions");
        let shared = has_sampling.then_some(SAMPLING).into_iter().flatten();
        shared.chain(self.types.iter().copied())
    }

    fn with(&self, field: &str, value: Value) -> String {
        let mut body = self.valid.clone();
        body[field] = value;
        body.to_string()
    }

    /// Returns malformed request bodies. Each body comes with a list of texts. The error message for the body must
    /// contain at least one text of its list.
    pub fn malformed(&self) -> Vec<(Vec<u8>, Vec<String>)> {
        let mut all = Vec::new();
        let mut add = |body: String, names: &[&str]| {
            let names = names.iter().map(ToString::to_string).collect();
            all.push((body.into_bytes(), names));
        };
        for (field, kind) in self.all_types() {
            kind.wrong()
                .into_iter()
                .for_each(|value| add(self.with(field, value), &[field]));
        }
        for (field, values) in self.ranges {
            for value in *values {
                let value = match value.fract() == 0.0 && value.abs() < 1e9 {
                    true => json!(*value as i64),
                    false => json!(value),
                };
                add(self.with(field, value), &[field]);
            }
        }
        for name in ["unknown", "Model", "max tokens", "", "\u{0}"] {
            let shown = format!("unknown field `{name}`");
            add(self.with(name, json!(1)), &[shown.as_str()]);
        }
        let valid = self.valid.to_string();
        let fields = self.valid.as_object().expect("an object");
        for (name, value) in fields {
            let twice = format!("{},{}:{value}}}", &valid[..valid.len() - 1], json!(name));
            add(twice, &["duplicate field"]);
            let mut fields = fields.clone();
            fields.remove(name);
            let is_required = ["model", "messages", "prompt", "input"].contains(&name.as_str());
            if is_required {
                add(json!(fields).to_string(), &[name.as_str()]);
            }
        }
        for end in (0..valid.len()).step_by(3) {
            add(valid[..end].to_owned(), &["the body", "EOF"]);
        }
        for broken in [
            "null",
            "1",
            "\"x\"",
            "[]",
            "{}x",
            "{'a': 1}",
            "NaN",
            "{\"a\": 01}",
            "\u{feff}{}",
        ] {
            add(broken.to_owned(), &["the body", "unknown field"]);
        }
        add(format!("{valid} {valid}"), &["trailing characters"]);
        add(
            valid.replace("\"x\"", "\"\\ud800\""),
            &["surrogate", "escape", "hex", "expected"],
        );
        let open = &valid[..valid.len() - 1];
        // Balanced brackets are valid JSON at any depth, so only a limit on the depth refuses them.
        for depth in [200, 100_000] {
            let (begin, end) = ("[".repeat(depth), "]".repeat(depth));
            add(
                format!("{open},\"metadata\":{begin}{end}}}"),
                &["recursion limit", "metadata"],
            );
            add(
                format!("{open},\"tools\":{begin}{end}}}"),
                &["recursion limit", "tools"],
            );
        }
        add(
            format!("{open},\"top_p\":1e999}}"),
            &["number out of range"],
        );
        all.push((
            valid.replace('x', "\u{1}").into_bytes(),
            vec!["control character".into()],
        ));
        let mut bytes = valid.into_bytes();
        let at = bytes.iter().position(|byte| *byte == b'x').expect("a text");
        bytes[at] = 0xff;
        all.push((bytes, vec!["unicode".into(), "UTF-8".into()]));
        all
    }
}
