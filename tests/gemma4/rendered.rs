//! Compares rendered chat templates with the output of Python's jinja2. `tests/fixtures/make_templates.py` has made the
//! expected output.

use burn_gemma4::{ChatOptions, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Case {
    name: String,
    source: String,
    variables: Map<String, Value>,
    /// The expected text, or `None` if jinja2 refuses the template.
    rendered: Option<String>,
}

#[test]
fn chat_template_renders_as_jinja2_does() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../fixtures/templates.json")).expect("the cases parse");
    let mut wrong = Vec::new();
    for case in &cases {
        let mut variables = case.variables.clone();
        let messages = variables.remove("messages");
        let messages = messages.and_then(|messages| messages.as_array().cloned());
        let options = ChatOptions {
            add_generation_prompt: variables.remove("add_generation_prompt")
                == Some(Value::Bool(true)),
            ..ChatOptions::default()
        };
        let rendered = ChatTemplate::from_source(&case.source).and_then(|template| {
            template.render_json(&messages.unwrap_or_default(), &variables, options)
        });
        match (&case.rendered, rendered) {
            (Some(expected), Ok(found)) if *expected == found => (),
            (None, Err(_)) => (),
            (expected, found) => wrong.push(format!(
                "{}:\n  jinja2 {expected:?}\n  ours   {found:?}",
                case.name
            )),
        }
    }
    let count = (wrong.len(), cases.len());
    assert!(wrong.is_empty(), "{count:?} differ:\n{}", wrong.join("\n"));
}
