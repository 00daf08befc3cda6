//! Malformed requests, each paired with a text that the error message must contain.

use crate::harness::user;
use serde_json::{Value, json};

/// Returns malformed requests to `/v1/chat/completions`.
pub fn chat_requests() -> Vec<(Value, &'static str)> {
    let with = |field: &str, value: Value| {
        let mut body = json!({"messages": user("x"), "max_tokens": 2});
        body[field] = value;
        body
    };
    let message = |message: Value| json!({"messages": [message]});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    vec![
        (json!({}), "messages"),
        (json!({"messages": "x"}), "messages"),
        (json!({"messages": []}), "messages"),
        (message(json!({})), "role"),
        (message(json!({"role": "user"})), "messages[0].content"),
        (message(json!({"role": "robot", "content": "x"})), "robot"),
        (
            message(json!({"role": "user", "content": 3})),
            "messages[0]",
        ),
        (
            message(
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            ),
            "image_url",
        ),
        (
            message(json!({"role": "user", "content": [{"type": "text"}]})),
            "content[0].text",
        ),
        (
            message(json!({"role": "user", "content": "x", "extra": 1})),
            "extra",
        ),
        (
            message(json!({"role": "tool", "content": "x"})),
            "tool_call_id",
        ),
        (
            message(json!({"role": "tool", "content": "x", "tool_call_id": "unknown"})),
            "tool_call_id",
        ),
        (message(json!({"role": "assistant"})), "content"),
        (
            message(
                json!({"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}),
            ),
            "tool_calls",
        ),
        (
            message(
                json!({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}),
            ),
            "arguments",
        ),
        (with("max_tokens", json!(0)), "max_tokens"),
        (with("max_tokens", json!(-1)), "max_tokens"),
        (with("max_tokens", json!("2")), "max_tokens"),
        (with("max_tokens", json!(1.5)), "max_tokens"),
        (
            with("max_completion_tokens", json!(0)),
            "max_completion_tokens",
        ),
        (with("max_tokens", json!(1_000_000)), "context"),
        (with("max_tokens", json!(u64::MAX)), "context"),
        (with("min_tokens", json!(9)), "min_tokens"),
        (with("temperature", json!(-0.1)), "temperature"),
        (with("temperature", json!(2.1)), "temperature"),
        (with("temperature", json!("hot")), "temperature"),
        (with("top_p", json!(1.1)), "top_p"),
        (with("top_p", json!(-1)), "top_p"),
        (with("top_k", json!(-2)), "top_k"),
        (with("min_p", json!(2)), "min_p"),
        (with("seed", json!(1.5)), "seed"),
        (with("repetition_penalty", json!(0)), "repetition_penalty"),
        (with("presence_penalty", json!(3)), "presence_penalty"),
        (with("frequency_penalty", json!(-3)), "frequency_penalty"),
        (with("logit_bias", json!({"x": 1})), "logit_bias.x"),
        (
            with("logit_bias", json!({"99999999": 1})),
            "logit_bias.99999999",
        ),
        (with("logit_bias", json!({"1": 101})), "logit_bias.1"),
        (with("logit_bias", json!({"1": "a"})), "logit_bias.1"),
        (with("logit_bias", json!([1])), "logit_bias"),
        (with("n", json!(0)), "n"),
        (with("n", json!(1000)), "n"),
        (with("n", json!(u64::MAX)), "n"),
        (with("stop", json!("")), "stop"),
        (with("stop", json!(vec!["x"; 17])), "stop"),
        (with("stop", json!("x".repeat(2000))), "stop"),
        (with("stop", json!(1)), "stop"),
        (with("logprobs", json!(3)), "logprobs"),
        (with("top_logprobs", json!(3)), "top_logprobs"),
        (
            json!({"messages": user("x"), "logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (with("stream", json!("yes")), "stream"),
        (
            with("stream_options", json!({"include_usage": true})),
            "stream_options",
        ),
        (
            json!({"messages": user("x"), "stream": true, "stream_options": {"unknown": 1}}),
            "unknown",
        ),
        (with("unknown_field", json!(1)), "unknown_field"),
        (with("store", json!(true)), "store"),
        (with("modalities", json!(["audio"])), "modalities"),
        (with("audio", json!({"voice": "x"})), "audio"),
        (with("prediction", json!({})), "prediction"),
        (with("functions", json!([])), "functions"),
        (with("function_call", json!("auto")), "function_call"),
        (with("web_search_options", json!({})), "web_search_options"),
        (with("verbosity", json!("low")), "verbosity"),
        (
            with("reasoning_effort", json!("extreme")),
            "reasoning_effort",
        ),
        (
            with("chat_template_kwargs", json!({"unknown": 1})),
            "unknown",
        ),
        (
            with("response_format", json!({"type": "yaml"})),
            "response_format",
        ),
        (
            with("response_format", json!({"type": "json_schema"})),
            "json_schema",
        ),
        (
            with(
                "response_format",
                json!({"type": "json_schema", "json_schema": {"name": "x"}}),
            ),
            "schema",
        ),
        (
            with(
                "response_format",
                json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "word"}}}),
            ),
            "schema",
        ),
        (
            with(
                "response_format",
                json!({"type": "json_schema", "json_schema": {"name": "x", "schema": 7}}),
            ),
            "schema",
        ),
        (
            with("response_format", json!({"type": "regex", "regex": "(a"})),
            "regex",
        ),
        (
            with(
                "response_format",
                json!({"type": "grammar", "grammar": "start: ("}),
            ),
            "grammar",
        ),
        (
            with(
                "response_format",
                json!({"type": "regex", "regex": "a".repeat(300_000)}),
            ),
            "bytes",
        ),
        (
            with("tools", json!([{"type": "function"}])),
            "tools[0].function",
        ),
        (
            with("tools", json!([{"type": "retrieval"}])),
            "tools[0].type",
        ),
        (with("tools", json!([tool("a b")])), "tools[0].name"),
        (with("tools", json!([tool("")])), "tools[0].name"),
        (
            with("tools", json!([tool("f"), tool("f")])),
            "tools[1].name",
        ),
        (with("tools", json!([tool("f")])), "tools"),
        (with("tool_choice", json!("required")), "tool_choice"),
        (with("tool_choice", json!("sometimes")), "tool_choice"),
        (
            with(
                "tool_choice",
                json!({"type": "function", "function": {"name": "f"}}),
            ),
            "tool_choice",
        ),
        (
            with("tool_choice", json!({"type": "custom"})),
            "tool_choice",
        ),
    ]
}

/// Returns malformed requests to `/v1/completions`.
pub fn completion_requests() -> Vec<(Value, &'static str)> {
    let with = |field: &str, value: Value| {
        let mut body = json!({"prompt": "x", "max_tokens": 2});
        body[field] = value;
        body
    };
    vec![
        (json!({}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": [-1]}), "prompt"),
        (json!({"prompt": [99_999_999]}), "prompt"),
        (json!({"prompt": {"text": "x"}}), "prompt"),
        (json!({"prompt": vec!["x"; 129]}), "prompt"),
        (with("echo", json!(true)), "echo"),
        (with("suffix", json!("x")), "suffix"),
        (with("best_of", json!(3)), "best_of"),
        (with("logprobs", json!(21)), "logprobs"),
        (with("logprobs", json!(true)), "logprobs"),
        (with("n", json!(0)), "n"),
        (with("unknown", json!(0)), "unknown"),
        (json!({"prompt": ["x", "y"], "stream": true}), "stream"),
        (with("stream_options", json!({})), "stream_options"),
        (json!({"prompt": "x".repeat(200_000)}), "context"),
    ]
}

/// Returns malformed requests to `/v1/messages`.
pub fn message_requests() -> Vec<(Value, &'static str)> {
    let with = |field: &str, value: Value| {
        let mut body = json!({"messages": user("x"), "max_tokens": 2});
        body[field] = value;
        body
    };
    let content = |content: Value| json!({"max_tokens": 2, "messages": [{"role": "user", "content": content}]});
    vec![
        (json!({"messages": user("x")}), "max_tokens"),
        (json!({"max_tokens": 2}), "messages"),
        (json!({"max_tokens": 2, "messages": []}), "messages"),
        (with("max_tokens", json!(0)), "max_tokens"),
        (with("temperature", json!(1.5)), "temperature"),
        (with("top_p", json!(2)), "top_p"),
        (with("top_k", json!(-5)), "top_k"),
        (with("stop_sequences", json!([""])), "stop_sequences"),
        (with("system", json!([{"type": "image"}])), "system[0].type"),
        (with("unknown", json!(1)), "unknown"),
        (with("mcp_servers", json!([1])), "mcp_servers"),
        (with("container", json!("x")), "container"),
        (
            with("thinking", json!({"type": "enabled"})),
            "budget_tokens",
        ),
        (
            with("thinking", json!({"type": "enabled", "budget_tokens": 0})),
            "budget_tokens",
        ),
        (
            with("thinking", json!({"type": "enabled", "budget_tokens": 2})),
            "budget_tokens",
        ),
        (with("thinking", json!({"type": "much"})), "thinking.type"),
        (with("tools", json!([{"name": "f"}])), "input_schema"),
        (
            with(
                "tools",
                json!([{"name": "f", "type": "web_search_20250305"}]),
            ),
            "tools[0].type",
        ),
        (
            with("tools", json!([{"name": "f", "input_schema": {}}])),
            "tools",
        ),
        (with("tool_choice", json!({"type": "any"})), "tool_choice"),
        (
            with("tool_choice", json!({"type": "tool"})),
            "tool_choice.name",
        ),
        (
            with("tool_choice", json!({"type": "sometimes"})),
            "tool_choice.type",
        ),
        (
            content(json!([{"type": "image", "source": {}}])),
            "source.type",
        ),
        (content(json!([{"type": "text"}])), "content[0].text"),
        (content(json!([{"type": "tool_result"}])), "tool_use_id"),
        (
            content(json!([{"type": "tool_result", "tool_use_id": "x"}])),
            "tool_use_id",
        ),
        (
            json!({"max_tokens": 2, "messages": [{"role": "system", "content": "x"}]}),
            "role",
        ),
        (
            json!({"max_tokens": 2, "messages": [{"role": "assistant", "content": "x"}]}),
            "assistant",
        ),
        (
            json!({"max_tokens": 2, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}),
            "id",
        ),
    ]
}
