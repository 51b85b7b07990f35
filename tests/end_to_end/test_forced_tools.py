"""Forced tool calls on a real pair of workers: a model of random weights calls tools with valid arguments."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import openai

from small_clusters import cluster

TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{{ '<|im_start|>assistant\n' }}"
)
PLACE = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "boolean"}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": PLACE | {"required": ["city", "days"], "additionalProperties": False},
    "time": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]


def test_a_model_of_random_weights_calls_tools_when_it_must(tiny_qwen3: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_qwen3, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with cluster(model, "1P1D") as running, openai.OpenAI(base_url=running.url + "/v1", api_key="none") as client:
        ended = 0
        for seed in range(2):
            for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
                fields: dict[str, Any] = {
                    "model": running.spec.served_model_name,
                    "messages": [{"role": "user", "content": "How is the weather?"}],
                    "tools": TOOLS,
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                    "seed": seed,
                    "max_tokens": 120,
                }
                answer = client.chat.completions.create(**fields).choices[0]
                streamed = [""]
                for chunk in client.chat.completions.create(**fields, stream=True):
                    for call in chunk.choices[0].delta.tool_calls or []:
                        streamed[0] += call.function.arguments or ""
                assert answer.message.content is None and len(answer.message.tool_calls) == 1
                function = answer.message.tool_calls[0].function
                assert streamed[0] == function.arguments
                assert choice == "required" or function.name == "weather"
                if answer.finish_reason == "tool_calls":
                    ended += 1
                    jsonschema.validate(json.loads(function.arguments), SCHEMAS[function.name])
        assert ended >= 2
