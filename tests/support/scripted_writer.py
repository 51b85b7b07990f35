"""Workers that write given texts, for a model whose form of reasoning and tool calls is known. Not a test module."""

import json

from model_outputs import qwen_call
from router_harness import EOS, write_model_dir
from splitserve.benchmarks.router.worker_script import Reply
from splitserve.protocol.messages.requests import FailureCode, RequestFailed, StepTokens, TokenDelta
from splitserve.protocol.request import FinishReason

TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{{ message.content }}"
    "{%- if message.tool_calls %}{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{%- endfor %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
CALL = {"city": "Köln 😀", "days": 3}
ANSWER = (
    f"<think>\nThe user asks.\n</think>\n\nI look.\n{qwen_call('get_weather', json.dumps(CALL, ensure_ascii=False))}\n"
    + qwen_call("get-time", "{}")
)


class Writer:
    """A script for workers that write :attr:`text`; the first attempts fail midway, as many as they are told."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.text = ANSWER
        self.num_failures = 0
        self.prompts = []
        self.grammars = []

    def __call__(self, body):
        if getattr(body, "prefill", None) is not None:
            return []
        self.grammars.append(body.sampling.constraint.grammar if body.sampling.constraint else "")
        self.prompts.append(self._tokenizer.decode(list(body.token_ids), skip_special_tokens=False))
        ids = [*self._tokenizer.encode(self.text).ids, self._tokenizer.token_to_id(EOS)]
        ids = ids[: 1 + next(index for index, each in enumerate(ids) if each in body.sampling.stop_token_ids)]
        begin, limit = len(body.output_ids), body.sampling.max_tokens
        assert list(body.output_ids) == ids[:begin], "the client's tokens aren't those that were written"
        end = min(len(ids), limit)
        stop = min(end, begin + 7) if self.num_failures else end
        replies = []
        for first in range(begin, stop, 3):
            part = ids[first : min(first + 3, stop)]
            is_last = first + len(part) == end
            reason = (FinishReason.LENGTH if end == limit < len(ids) else FinishReason.STOP) if is_last else None
            replies.append(Reply(StepTokens([TokenDelta(body.key, first, part, finish_reason=reason)])))
        if stop < end:
            self.num_failures -= 1
            replies.append(Reply(RequestFailed(body.key, FailureCode.INTERNAL, "planted")))
        return replies


def write_thinking_model(path):
    """Write the files of a model with tools and reasoning; returns its tokenizer."""
    tokenizer = write_model_dir(path)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": EOS}))
    return tokenizer
