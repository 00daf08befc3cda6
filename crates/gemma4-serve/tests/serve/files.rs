//! Tests `run_batch_file`, which answers the requests in a file.

use crate::harness::gemma;
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::{MediaOptions, run_batch_file};
use serde_json::{Map, Value, json};

#[test]
fn each_line_is_answered_in_order() {
    let prompts = ["fn main", "use ", "# Title", "struct"];
    let mut lines: Vec<Value> = prompts
        .iter()
        .map(|prompt| json!({"prompt": prompt}))
        .collect();
    lines.push(json!({"messages": [{"role": "user", "content": "Hi"}], "custom_id": "chat"}));
    lines.push(json!({
        "custom_id": "openai", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fn main", "model": "any"},
    }));
    lines.push(json!({"prompt": "x", "temperature": -1}));
    lines.push(json!({"nothing": 1}));
    lines.push(json!({"url": "/v1/embeddings", "body": {}}));
    lines.push(json!({"prompt": "x", "stream": true}));
    let mut input: String = lines.iter().map(|line| format!("{line}\n")).collect();
    input += "\nnot JSON\n";
    let defaults = json!({"temperature": 0, "max_tokens": 10});
    let defaults: Map<String, Value> = defaults.as_object().cloned().expect("an object");
    let mut output = Vec::new();
    let options = EngineOptions {
        max_running: 3,
        ..EngineOptions::default()
    };
    let counts = run_batch_file(
        gemma(),
        options,
        MediaOptions::default(),
        input.as_bytes(),
        &mut output,
        &defaults,
        || false,
    );
    let counts = counts.expect("the engine works");
    assert_eq!((counts.answered, counts.failed), (6, 5));
    assert_eq!(counts.generated_tokens, 60);
    let output = String::from_utf8(output).expect("UTF-8");
    let output: Vec<Value> = output
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(output.len(), 11);
    let text = |line: &Value| line["response"]["body"]["choices"][0]["text"].clone();
    assert_eq!(output[0]["custom_id"], "line-1");
    assert!(
        text(&output[0])
            .as_str()
            .is_some_and(|text| !text.is_empty())
    );
    assert_eq!(text(&output[0]), text(&output[5]));
    assert_eq!(output[4]["custom_id"], "chat");
    assert_eq!(output[6]["response"]["status_code"], 400);
    for line in &output[7..] {
        assert!(line["error"]["message"].is_string(), "{line}");
    }
    assert!(
        output[10]["error"]["message"]
            .as_str()
            .is_some_and(|text| text.starts_with("line 12"))
    );
}
