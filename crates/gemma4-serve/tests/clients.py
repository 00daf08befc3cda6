"""Checks the official Python clients against a running server.

    pip install openai anthropic
    gemma4 serve --device cpu --port 8123 --name tiny &
    python3 crates/gemma4-serve/tests/clients.py http://127.0.0.1:8123 tiny
"""

import json
import sys

import anthropic
import openai


def check_openai(client: openai.OpenAI, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    messages = [{"role": "user", "content": "What is a cache?"}]
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert answer.usage.completion_tokens == 24 and text
    assert len(answer.choices[0].logprobs.content) == 24
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 24

    completion = client.completions.create(model=model, prompt="fn main", max_tokens=8, temperature=0)
    assert completion.choices[0].text

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=messages, response_format=form, max_tokens=100)
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)

    response = client.responses.create(model=model, input="What is a cache?", temperature=0, max_output_tokens=24)
    assert response.output_text == text and response.status == "incomplete"
    with client.responses.stream(model=model, input="What is a cache?", temperature=0, max_output_tokens=24) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text

    try:
        client.chat.completions.create(model=model, messages=messages, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
    else:
        raise AssertionError("a wrong temperature is accepted")
    try:
        client.chat.completions.create(model="other", messages=messages)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("a wrong model is accepted")


def check_anthropic(client: anthropic.Anthropic, model: str) -> None:
    messages = [{"role": "user", "content": "What is a cache?"}]
    # The client has no argument for the temperature, which the API has.
    options = {"model": model, "messages": messages, "max_tokens": 24, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**options)
    text = answer.content[0].text
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 24
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().stop_reason == "max_tokens"
    count = client.messages.count_tokens(model=model, messages=messages)
    # In this API, the tokens that the prefix cache reuses do not count as input tokens.
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = client.messages.create(model=model, messages=messages, max_tokens=100, output_config=config)
    assert isinstance(json.loads(answer.content[0].text)["ok"], bool)
    try:
        client.messages.create(**{**options, "extra_body": {"temperature": 9}})
    except anthropic.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a wrong temperature is accepted")


def main() -> None:
    url, model = sys.argv[1], sys.argv[2]
    key = sys.argv[3] if len(sys.argv) > 3 else "none"
    check_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), model)
    check_anthropic(anthropic.Anthropic(base_url=url, api_key=key, max_retries=0), model)
    print("the clients of OpenAI and Anthropic work")


if __name__ == "__main__":
    main()
