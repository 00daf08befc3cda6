"""Checks the official Python clients against a running server.

    pip install openai anthropic
    gemma4 serve --device cpu --port 8123 --name tiny &
    python3 crates/gemma4-serve/tests/clients.py http://127.0.0.1:8123 tiny

The third argument is the API key. With an image, the script checks a server of a model with vision instead:

    gemma4 serve --device cpu --port 8124 --name vision --model tests/fixtures/vision-keqv &
    python3 crates/gemma4-serve/tests/clients.py http://127.0.0.1:8124 vision none tests/fixtures/vision-keqv/wide.png

With a WAV file in place of the image, it checks a server of a model with audio, such as tests/fixtures/audio-ple.
"""

import base64
import json
import pathlib
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


def check_images(of_openai: openai.OpenAI, of_anthropic: anthropic.Anthropic, model: str, image: str) -> None:
    data = base64.b64encode(pathlib.Path(image).read_bytes()).decode()
    url = f"data:image/png;base64,{data}"
    question = "what is this?"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    answer = of_openai.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)
    text, tokens = answer.choices[0].message.content, answer.usage.prompt_tokens
    assert tokens > 30, answer.usage

    content = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": question}]
    response = of_openai.responses.create(
        model=model, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
    )
    assert response.output_text == text and response.usage.input_tokens == tokens

    source = {"type": "base64", "media_type": "image/png", "data": data}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": question}]}]
    options = {"model": model, "messages": messages, "max_tokens": 12, "extra_body": {"temperature": 0}}
    with of_anthropic.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text
    assert of_anthropic.messages.count_tokens(model=model, messages=messages).input_tokens == tokens

    content = [{"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}]
    try:
        of_openai.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    except openai.BadRequestError as error:
        assert error.param == "messages[0].content[0].image_url.url", error
        assert "loads nothing from the network" in str(error), error
    else:
        raise AssertionError("an address in the web is accepted")


def check_audio(client: openai.OpenAI, model: str, clip: str) -> None:
    data = base64.b64encode(pathlib.Path(clip).read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    question = "what is this?"
    messages = [{"role": "user", "content": [part, {"type": "text", "text": question}]}]
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**options)
    text, tokens = answer.choices[0].message.content, answer.usage.prompt_tokens
    assert tokens > 10, answer.usage
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text

    content = [part, {"type": "input_text", "text": question}]
    response = client.responses.create(
        model=model, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
    )
    assert response.output_text == text and response.usage.input_tokens == tokens

    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": [part]}])
    except openai.BadRequestError as error:
        assert error.param == "messages[0].content[0].input_audio", error
        assert "is not a WAV, FLAC, MP3 or Ogg Vorbis file" in str(error), error
    else:
        raise AssertionError("a broken clip is accepted")


def main() -> None:
    url, model = sys.argv[1], sys.argv[2]
    key = sys.argv[3] if len(sys.argv) > 3 else "none"
    of_openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    of_anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    if len(sys.argv) > 4 and sys.argv[4].endswith(".wav"):
        check_audio(of_openai, model, sys.argv[4])
        print("the client of OpenAI sends audio")
        return
    if len(sys.argv) > 4:
        check_images(of_openai, of_anthropic, model, sys.argv[4])
        print("the clients of OpenAI and Anthropic send images")
        return
    check_openai(of_openai, model)
    check_anthropic(of_anthropic, model)
    print("the clients of OpenAI and Anthropic work")


if __name__ == "__main__":
    main()
