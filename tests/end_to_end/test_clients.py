"""Clients unchanged against a real cluster: the openai and anthropic packages, a model of the Hub's cache, real KV.

One cluster of a prefill and a decode worker, started by the command line, serves all tests.
"""

import os
import subprocess
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from command_line import command
from splitserve.models.demo.checkpoint import write_demo_model

MODEL = "Some-Org/demo"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LONG = "Prefill reads a whole prompt at once and is bound by arithmetic; decode writes one token after another. " * 3


class Verdict(BaseModel):
    """A verdict that fits into few tokens."""

    answer: Literal["yes", "no"]
    weight: Literal[1, 2, 3]


class Verdicts(BaseModel):
    """Verdicts in a tree of models, which the package puts into ``$defs``."""

    first: Verdict
    second: Verdict | None


def cache_model(home):
    """A cache below ``home`` in the hub's layout with a demo checkpoint in it."""
    checkpoint = write_demo_model(home / "checkpoint")
    root = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        blob = root / "blobs" / f"of-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    home = tmp_path_factory.mktemp("hub")
    cache_model(home)
    serve = command(
        *("serve", MODEL, "--prefill", "1", "--decode", "1", "--port", "0", "--kv-memory", "64MiB"),
        *("--block-size", "16", "--log-level", "warning"),
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("Ready: "):
                    break
            assert lines and lines[-1].startswith("Ready: "), lines
            assert f"(model {MODEL})" in lines[-1]
            yield lines[-1].split()[1].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def messages(url):
    import anthropic  # thousands of modules: only the process that runs this test loads them

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened.messages


def test_responses_whole_and_streamed_are_the_chats_text(client):
    fields = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
    asked = [{"role": "user", "content": LONG}]
    chat = client.chat.completions.create(messages=asked, max_tokens=24, **fields)
    whole = client.responses.create(input=asked, max_output_tokens=24, store=False, **fields)
    assert whole.output_text == chat.choices[0].message.content and whole.status == "incomplete"
    assert whole.usage.input_tokens == chat.usage.prompt_tokens and whole.usage.output_tokens == 24
    *_, last = client.responses.create(input=asked, max_output_tokens=24, stream=True, **fields)
    assert last.response.output_text == whole.output_text


def test_messages_whole_and_streamed_are_the_chats_text(client, messages):
    asked = [{"role": "user", "content": LONG}]
    fields = {"model": MODEL, "max_tokens": 24, "messages": asked, "extra_body": {"temperature": 0}}
    chat = client.chat.completions.create(**fields)
    whole = messages.create(**fields)
    assert whole.content[0].text == chat.choices[0].message.content
    with messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    count = messages.count_tokens(model=MODEL, messages=asked).input_tokens
    assert count == chat.usage.prompt_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_the_prefix_cache_is_found_with_the_same_salt_only(client):
    def cached(salt):
        extra = {} if salt is None else {"cache_salt": salt}
        prompt = [(7 * number) % 250 + 3 for number in range(100)]
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

    first, text = cached("tenant-a")
    assert first == 0
    assert cached("tenant-b") == (0, text) and cached(None) == (0, text)
    for salt in ("tenant-a", "tenant-b", None):
        count, again = cached(salt)
        assert count >= 96 and again == text


def test_generated_tokens_are_the_completions(client, url):
    prompt = list(range(3, 60))
    fields = {"max_tokens": 12, "temperature": 0}
    whole = client.completions.create(model=MODEL, prompt=prompt, **fields, extra_body={"return_token_ids": True})
    answer = client.post("/generate", body={"token_ids": prompt, **fields}, cast_to=object)
    assert answer["token_ids"] == whole.choices[0].model_dump()["token_ids"]
    assert len(answer["weights_version"]) == 32


@pytest.mark.parametrize("model", [Verdict, Verdicts])
def test_parsed_answers_are_of_the_pydantic_model(client, model):
    """``parse()`` of chats and responses, whole and streamed: the package's own strict schemas, greedy and drawn."""
    asked = [{"role": "user", "content": "Yes or no?"}]
    for temperature in (0, 1):
        fields = {"model": MODEL, "temperature": temperature, "extra_body": {"seed": 5}}
        chat = client.chat.completions.parse(messages=asked, response_format=model, max_tokens=400, **fields)
        message = chat.choices[0].message
        assert chat.choices[0].finish_reason == "stop" and isinstance(message.parsed, model)
        assert message.parsed == model.model_validate_json(message.content)
        whole = client.responses.parse(input=asked, text_format=model, max_output_tokens=400, store=False, **fields)
        assert whole.status == "completed" and whole.output_parsed == message.parsed
        with client.chat.completions.stream(messages=asked, response_format=model, max_tokens=400, **fields) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == message.parsed


def test_a_cut_answer_is_an_error_of_parse(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=Verdicts, max_tokens=2
        )
