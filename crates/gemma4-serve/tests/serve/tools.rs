//! Tests tool calls, thoughts and constrained answers, in streamed and complete responses.

use crate::harness::{Harness, gemma, user};
use serde_json::{Value, json};

fn weather() -> Value {
    json!([
        {"type": "function", "function": {
            "name": "get_weather", "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        }},
        {"type": "function", "function": {"name": "get_time"}},
    ])
}

/// Checks the JSON of a tool call, and returns the tool's name.
fn checked_call(call: &Value) -> String {
    assert_eq!(call["type"], "function");
    assert!(
        call["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("call_"))
    );
    let arguments = call["function"]["arguments"].as_str().expect("a text");
    let arguments: Value = serde_json::from_str(arguments).expect("JSON");
    assert!(arguments.is_object(), "{arguments}");
    call["function"]["name"]
        .as_str()
        .expect("a name")
        .to_owned()
}

/// Sends the request with different seeds until an answer has a complete tool call. The small test model often writes
/// arguments that never end.
async fn called(harness: &Harness, mut body: Value) -> Value {
    for seed in 0..40 {
        body["seed"] = json!(seed);
        let answer = harness.chat(body.clone()).await.ok();
        let choice = answer["choices"][0].clone();
        match choice["finish_reason"].as_str() {
            Some("tool_calls") => return choice,
            reason => assert_eq!(reason, Some("length"), "{choice}"),
        }
    }
    panic!("no seed gives a complete call");
}

#[tokio::test]
async fn required_tools_are_called() {
    let harness = Harness::with_tools();
    let body = json!({
        "messages": user("Weather in Paris?"), "tools": weather(), "tool_choice": "required",
        "max_tokens": 60, "temperature": 1.5, "parallel_tool_calls": false,
    });
    let choice = called(&harness, body).await;
    let calls = choice["message"]["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 1);
    assert!(["get_weather", "get_time"].contains(&checked_call(&calls[0]).as_str()));
    assert_eq!(choice["message"]["content"], Value::Null);
}

#[tokio::test]
async fn named_tool_is_called_in_streams_too() {
    let harness = Harness::with_tools();
    let named = json!({"type": "function", "function": {"name": "get_time"}});
    let mut body = json!({
        "messages": user("x"), "tools": weather(), "tool_choice": named, "max_tokens": 60, "temperature": 1.5,
    });
    let choice = called(&harness, body.clone()).await;
    assert_eq!(
        checked_call(&choice["message"]["tool_calls"][0]),
        "get_time"
    );
    body["stream"] = json!(true);
    for seed in 0..40 {
        body["seed"] = json!(seed);
        let chunks = harness.chat(body.clone()).await.chunks();
        let last = chunks.last().expect("chunks");
        let deltas: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0])
            .filter(|call| call.is_object())
            .collect();
        if last["choices"][0]["finish_reason"] == "tool_calls" {
            assert_eq!(deltas.len(), 1);
            assert_eq!(deltas[0]["index"], 0);
            assert_eq!(checked_call(deltas[0]), "get_time");
            return;
        }
        assert!(deltas.is_empty());
    }
    panic!("no seed gives a complete call");
}

#[tokio::test]
async fn tool_results_continue_the_conversation() {
    let harness = Harness::with_tools();
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}});
    let body = json!({
        "messages": [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "<turn|>noon"},
        ],
        "tools": weather(), "max_tokens": 4, "tool_choice": "none",
    });
    harness.chat(body).await.ok();
    let body = json!({
        "messages": [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}, {"type": "text", "text": "?"}]},
        ],
        "tools": [{"name": "get_time", "input_schema": {"type": "object"}}], "max_tokens": 4,
    });
    harness.messages(body).await.ok();
}

#[tokio::test]
async fn tools_without_a_template_for_them_are_refused() {
    let harness = Harness::plain();
    let body = json!({"messages": user("x"), "tools": weather(), "max_tokens": 4});
    let answer = harness.chat(body).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text.contains("chat template"), "{}", answer.text);
}

#[tokio::test]
async fn anthropic_tools_are_called() {
    let harness = Harness::with_tools();
    let mut body = json!({
        "messages": user("x"), "max_tokens": 60, "temperature": 1, "top_k": 200,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "look"},
    });
    for _ in 0..80 {
        let answer = harness.messages(body.clone()).await.ok();
        if answer["stop_reason"] == "tool_use" {
            let block = &answer["content"][0];
            assert_eq!(
                (&block["type"], &block["name"]),
                (&json!("tool_use"), &json!("look"))
            );
            assert!(block["input"].is_object());
            body["stream"] = json!(true);
            break;
        }
    }
    assert_eq!(body["stream"], true, "no answer has a complete call");
    for _ in 0..80 {
        let messages = harness.messages(body.clone()).await.messages();
        let text: String = messages.iter().map(|(_, data)| data.as_str()).collect();
        if text.contains("\"stop_reason\":\"tool_use\"") {
            assert!(text.contains("input_json_delta"), "{text}");
            return;
        }
    }
    panic!("no stream has a complete call");
}

#[tokio::test]
async fn answers_follow_schemas_expressions_and_grammars() {
    let harness = Harness::plain();
    let schema = json!({
        "type": "object", "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"], "additionalProperties": false,
    });
    let ask = |format: Value, stream: bool| {
        let body = json!({
            "messages": user("x"), "response_format": format, "max_tokens": 60, "temperature": 1, "seed": 3, "stream": stream,
        });
        harness.chat(body)
    };
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
    let answer = ask(format.clone(), false).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    let text = choice["message"]["content"]
        .as_str()
        .expect("text")
        .to_owned();
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert!(
        value["ok"].is_boolean() && (value["kind"] == "a" || value["kind"] == "b"),
        "{value}"
    );
    let chunks = ask(format, true).await.chunks();
    let streamed: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(streamed, text, "a stream has the text of the whole answer");

    let answer = ask(
        json!({"type": "regex", "regex": "[0-9]{3}-(yes|no)"}),
        false,
    )
    .await
    .ok();
    let text = answer["choices"][0]["message"]["content"]
        .as_str()
        .expect("text")
        .to_owned();
    let (digits, word) = text.split_once('-').expect("a dash");
    assert!(
        digits.len() == 3 && digits.bytes().all(|byte| byte.is_ascii_digit()),
        "{text}"
    );
    assert!(["yes", "no"].contains(&word), "{text}");

    let grammar = "start: \"x\" (\"y\" | \"z\") \"é\"";
    let answer = ask(json!({"type": "grammar", "grammar": grammar}), false)
        .await
        .ok();
    let text = &answer["choices"][0]["message"]["content"];
    assert!(text == "xyé" || text == "xzé", "{text}");
}

#[tokio::test]
async fn several_constrained_choices_are_independent() {
    let harness = Harness::plain();
    let body = json!({
        "messages": user("x"), "response_format": {"type": "regex", "regex": "(red|green|blue){4}"},
        "max_tokens": 40, "temperature": 2, "seed": 1, "n": 6,
    });
    let answer = harness.chat(body).await.ok();
    let choices = answer["choices"].as_array().expect("choices");
    let texts: Vec<&str> = choices
        .iter()
        .filter_map(|choice| choice["message"]["content"].as_str())
        .collect();
    for text in &texts {
        let rest = ["red", "green", "blue"]
            .iter()
            .fold(text.to_string(), |text, word| text.replace(word, ""));
        assert_eq!(rest, "", "{texts:?}");
    }
    assert!(texts.iter().any(|text| *text != texts[0]), "{texts:?}");
}

#[tokio::test]
async fn thoughts_are_told_apart_and_limited() {
    let harness = Harness::with_tools();
    let body = json!({
        "messages": user("x"), "chat_template_kwargs": {"enable_thinking": true}, "max_tokens": 12, "temperature": 0,
        "ignore_eos": true,
    });
    let answer = harness.chat(body).await.ok();
    let message = &answer["choices"][0]["message"];
    // The template begins a thought, which the answer does not end. The thought's text must still arrive.
    assert!(
        message["reasoning_content"]
            .as_str()
            .is_some_and(|text| !text.is_empty()),
        "{message}"
    );
    assert_eq!(
        answer["usage"]["completion_tokens_details"]["reasoning_tokens"],
        12
    );
    let mut body = json!({
        "messages": user("x"), "thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 12, "temperature": 0,
    });
    let answer = harness.messages(body.clone()).await.ok();
    let content = answer["content"].as_array().expect("blocks");
    assert_eq!(content[0]["type"], "thinking", "{answer}");
    body["stream"] = json!(true);
    let messages = harness.messages(body).await.messages();
    let text: String = messages.iter().map(|(_, data)| data.as_str()).collect();
    assert!(
        text.contains("thinking_delta") && text.contains("signature_delta"),
        "{text}"
    );
}

#[tokio::test]
async fn tool_choice_none_forbids_tool_calls() {
    let harness = Harness::with_tools();
    let token = gemma()
        .tokenizer()
        .id("<|tool_call>")
        .expect("the token exists");
    let body = |choice: &str| {
        json!({
            "messages": user("x"), "tools": weather(), "tool_choice": choice, "max_tokens": 6, "temperature": 0,
            "logit_bias": {token.to_string(): 100}, "logprobs": true,
        })
    };
    let free = harness.chat(body("auto")).await.ok();
    let text = free["choices"][0]["message"]["content"].as_str();
    assert_eq!(text, Some(""), "the model writes nothing but marks: {free}");
    let forbidden = harness.chat(body("none")).await.ok();
    let message = &forbidden["choices"][0]["message"];
    assert!(
        message["content"]
            .as_str()
            .is_some_and(|text| !text.is_empty()),
        "{forbidden}"
    );
    assert!(message.get("tool_calls").is_none(), "{forbidden}");
}
