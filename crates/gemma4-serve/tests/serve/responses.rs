//! Tests OpenAI's Responses API.

use crate::harness::{Answer, Harness, user, with_model};
use serde_json::{Value, json};

async fn respond(harness: &Harness, body: Value) -> Answer {
    harness.post("/v1/responses", &with_model(body)).await
}

#[tokio::test]
async fn response_equals_the_chat_completion() {
    let harness = Harness::plain();
    let body = json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "max_tokens": 20,
        "temperature": 0,
    });
    let chat = harness.chat(body).await.ok();
    let expected = &chat["choices"][0]["message"]["content"];
    for input in [
        json!("Hi"),
        user("Hi"),
        json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]),
    ] {
        let mut body = json!({
            "input": input, "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 0, "store": false,
        });
        let answer = respond(&harness, body.clone()).await.ok();
        assert_eq!(answer["output"][0]["content"][0]["text"], *expected);
        assert_eq!(answer["status"], "incomplete");
        assert_eq!(answer["usage"]["output_tokens"], 20);
        body["stream"] = json!(true);
        let messages = respond(&harness, body).await.messages();
        let datas: Vec<Value> = messages
            .iter()
            .map(|(_, data)| serde_json::from_str(data).expect("JSON"))
            .collect();
        let deltas: String = datas
            .iter()
            .filter(|data| data["type"] == "response.output_text.delta")
            .filter_map(|data| data["delta"].as_str())
            .collect();
        assert_eq!(json!(deltas), *expected);
        for (number, ((name, _), data)) in messages.iter().zip(&datas).enumerate() {
            assert_eq!(data["sequence_number"], number);
            assert_eq!(data["type"].as_str(), name.as_deref());
        }
        let last = datas.last().expect("messages");
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(
            last["response"]["output"][0]["content"][0]["text"],
            *expected
        );
    }
}

#[tokio::test]
async fn tools_and_schemas_work_in_responses() {
    let harness = Harness::with_tools();
    let input = json!([
        {"role": "user", "content": "When?"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
    ]);
    let tools = json!([{"type": "function", "name": "now", "parameters": {"type": "object"}}]);
    let body = json!({
        "input": input, "tools": tools, "tool_choice": {"type": "function", "name": "now"}, "max_output_tokens": 60,
    });
    let mut is_called = false;
    for _ in 0..60 {
        let answer = respond(&harness, body.clone()).await.ok();
        if answer["status"] == "completed" {
            let call = &answer["output"][0];
            assert_eq!(
                (&call["type"], &call["name"]),
                (&json!("function_call"), &json!("now"))
            );
            is_called = true;
            break;
        }
    }
    assert!(is_called, "no answer has a complete call");
    let format = json!({"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}});
    let body = json!({"input": "x", "text": {"format": format}, "max_output_tokens": 100});
    let answer = respond(&harness, body).await.ok();
    let text = answer["output"][0]["content"][0]["text"]
        .as_str()
        .expect("text");
    let value: Value = serde_json::from_str(text).expect("JSON");
    assert!(value["a"].is_boolean(), "{value}");
}

#[tokio::test]
async fn malformed_responses_requests_are_refused() {
    let harness = Harness::plain();
    let with = |field: &str, value: Value| {
        let mut body = json!({"input": "x", "max_output_tokens": 2});
        body[field] = value;
        body
    };
    for (body, part) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (
            json!({"input": [{"type": "item_reference"}]}),
            "item_reference",
        ),
        (json!({"input": [{"role": "user"}]}), "input[0].content"),
        (
            json!({"input": [{"role": "robot", "content": "x"}]}),
            "robot",
        ),
        (json!({"input": [{"type": "function_call"}]}), "call_id"),
        (
            json!({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}),
            "call_id",
        ),
        (with("store", json!(true)), "store"),
        (with("background", json!(true)), "background"),
        (
            with("previous_response_id", json!("resp_1")),
            "previous_response_id",
        ),
        (with("conversation", json!("x")), "conversation"),
        (with("truncation", json!("auto")), "truncation"),
        (
            with("include", json!(["file_search_call.results"])),
            "include",
        ),
        (with("max_output_tokens", json!(0)), "max_output_tokens"),
        (with("temperature", json!(3)), "temperature"),
        (
            with("tools", json!([{"type": "web_search"}])),
            "tools[0].type",
        ),
        (
            with("tools", json!([{"type": "function"}])),
            "tools[0].name",
        ),
        (
            with("text", json!({"format": {"type": "yaml"}})),
            "text.format.type",
        ),
        (with("text", json!({"verbosity": "low"})), "verbosity"),
        (
            with("reasoning", json!({"effort": "extreme"})),
            "reasoning.effort",
        ),
        (with("unknown", json!(1)), "unknown"),
    ] {
        let answer = respond(&harness, body.clone()).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text);
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(part), "{body}: {message}");
    }
}
