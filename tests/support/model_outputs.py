"""Outputs as models of several families write them, and the messages that they are. Not a test module."""

from dataclasses import dataclass
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "where": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get-time", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, TIME]


@dataclass(frozen=True)
class Output:
    template: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    prompt: str = ""
    ids: tuple[str, ...] = ()


QWEN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PARIS = '{"city": "Paris", "days": 3}'
OSLO = '{"city": "Oslo"}'
TWO = (("get_weather", PARIS), ("get-time", "{}"))
DS_CALL = "<｜tool▁call▁begin｜>"  # noqa: RUF001
DS_SEP = "<｜tool▁sep｜>"  # noqa: RUF001
DS_END = "<｜tool▁call▁end｜>"  # noqa: RUF001
DS_CALLS = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
DS_CALLS_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
DS_PROMPT = "<｜User｜>Hi<｜Assistant｜>"  # noqa: RUF001


def qwen_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def kimi_call(name: str, number: int, arguments: str) -> str:
    begin, middle = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    return f"{begin}functions.{name}:{number}{middle}{arguments}<|tool_call_end|>"


OUTPUTS = [
    # ---- Qwen3 and Hermes ----
    Output("qwen3", "Hello there.", "Hello there.", prompt=QWEN),
    Output("qwen3", "<think>\nHm.\n\nYes.\n</think>\n\nHello.\n\nBye.", "Hello.\n\nBye.", "Hm.\n\nYes.", prompt=QWEN),
    Output("qwen3", "Well.\n</think>\n\nHello.", "Hello.", "Well.", prompt=QWEN + "<think>\n"),
    Output("qwen3", "Hello.", "Hello.", prompt=QWEN + "<think>\n\n</think>\n\n"),
    Output(
        "qwen3",
        f"<think>\nTwo calls.\n</think>\n\nI look.\n{qwen_call('get_weather', PARIS)}\n{qwen_call('get-time', '{}')}",
        "I look.",
        "Two calls.",
        TWO,
        QWEN,
    ),
    Output("hermes", qwen_call("get_weather", OSLO), calls=(("get_weather", OSLO),), prompt=QWEN),
    Output(
        "hermes",
        f"First.\n{qwen_call('get_weather', OSLO)}\nThen this.",
        "First.\nThen this.",
        calls=(("get_weather", OSLO),),
        prompt=QWEN,
    ),
    Output("hermes", "if a <tool and b < c: <tool_cal", "if a <tool and b < c: <tool_cal", prompt=QWEN),
    # ---- Qwen3.5 and Qwen3-Coder ----
    Output(
        "qwen3.5",
        "Let me see.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n York \n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=where>\n[1.5, -2]\n</parameter>\n</function>\n</tool_call>",
        reasoning="Let me see.",
        calls=(("get_weather", '{"city": "New\\n York ", "days": 3, "where": [1.5, -2]}'),),
        prompt=QWEN + "<think>\n",
    ),
    Output(
        "qwen3.5",
        "<tool_call>\n<function=get-time>\n</function>\n</tool_call>",
        calls=(("get-time", "{}"),),
        prompt=QWEN + "<think>\n\n</think>\n\n",
    ),
    # ---- Llama ----
    Output("llama3", "Hello { there }", "Hello { there }"),
    Output(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        calls=(("get_weather", OSLO),),
        prompt="<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    Output(
        "llama3",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}',
        calls=(("get_weather", OSLO),),
    ),
    Output(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "get-time", "parameters": {}}',
        calls=(("get_weather", OSLO), ("get-time", "{}")),
    ),
    Output("llama3", '{"answer": {"name": "x"}, "list": [1, 2]}', '{"answer": {"name": "x"}, "list": [1, 2]}'),
    # ---- Mistral ----
    Output(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get-time", "arguments": {{}}}}]',
        calls=TWO,
        prompt="<s>[INST] Hi[/INST]",
    ),
    Output("mistral", "A list: [1, 2] [TOOL", "A list: [1, 2] [TOOL", prompt="<s>[INST] Hi[/INST]"),
    Output(
        "mistral-args",
        f"[THINK]Two things.[/THINK]Of course.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get-time[ARGS]{{}}",
        "Of course.",
        "Two things.",
        TWO,
        "<s>[INST]Hi[/INST]",
    ),
    Output(
        "mistral-args",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{OSLO}",
        calls=(("get_weather", OSLO),),
        ids=("abcdefghi",),
    ),
    # ---- DeepSeek ----
    Output(
        "deepseek-v3",
        f"I look.{DS_CALLS}{DS_CALL}function{DS_SEP}get_weather\n```json\n{PARIS}\n```{DS_END}\n"
        f"{DS_CALL}function{DS_SEP}get-time\n```json\n{{}}\n```{DS_END}{DS_CALLS_END}",
        "I look.",
        calls=TWO,
        prompt=DS_PROMPT,
    ),
    Output("deepseek-v3", "So.\n</think>\n\nHello.", "Hello.", "So.", prompt=DS_PROMPT + "<think>\n"),
    Output("deepseek-v3", "<think>\nSo.\n</think>\n\nHello.", "Hello.", "So.", prompt=DS_PROMPT),
    Output(
        "deepseek-v3.1",
        f"{DS_CALLS}{DS_CALL}get_weather{DS_SEP}{PARIS}{DS_END}{DS_CALL}get-time{DS_SEP}{{}}{DS_END}{DS_CALLS_END}",
        calls=TWO,
        prompt=DS_PROMPT + "</think>",
    ),
    Output("deepseek-v3.1", "So.</think>Hello.", "Hello.", "So.", prompt=DS_PROMPT + "<think>"),
    # ---- GLM ----
    Output(
        "glm-4.5",
        "\n<think>I need it.</think>\nOne moment.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get-time\n</tool_call>",
        "One moment.",
        "I need it.",
        (("get_weather", PARIS), ("get-time", "{}")),
        "[gMASK]<sop><|user|>\nHi<|assistant|>",
    ),
    Output("glm-4.5", "Hello.", "Hello.", prompt="<|user|>\nHi<|assistant|>\n<think></think>\n"),
    # ---- Kimi ----
    Output(
        "kimi-k2",
        f"I look.<|tool_calls_section_begin|>{kimi_call('get_weather', 0, PARIS)}{kimi_call('get-time', 1, '{}')}"
        "<|tool_calls_section_end|>",
        "I look.",
        calls=TWO,
        prompt="<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
        ids=("functions.get_weather:0", "functions.get-time:1"),
    ),
    Output(
        "kimi-k2",
        "<think>Hm.</think>Hello.",
        "Hello.",
        "Hm.",
        prompt="<|im_assistant|>assistant<|im_middle|>",
    ),
    # ---- GPT-OSS ----
    Output(
        "gpt-oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        "Hello.",
        "Easy.",
        prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant",
    ),
    Output(
        "gpt-oss",
        "<|channel|>analysis<|message|>A call.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{OSLO}",
        "I look.",
        "A call.",
        (("get_weather", OSLO),),
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
    ),
    Output(
        "gpt-oss",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{OSLO}<|call|>",
        calls=(("get_weather", OSLO),),
        prompt="<|start|>assistant",
    ),
    # ---- Gemma ----
    Output(
        "gemma4",
        '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        "I look.",
        "Hm.",
        (("get_weather", PARIS),),
        "<|turn>user\nHi<turn|>\n<|turn>model\n",
    ),
    Output(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
        calls=(("get_weather", OSLO),),
        prompt="<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    ),
]
