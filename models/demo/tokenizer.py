"""The demo checkpoints' tokenizer: a byte-level BPE trained on a small text that is made here.

The text is built from word lists with a seeded generator, so that nothing has to be downloaded and the same
vocabulary comes out each time. Being byte-level, the tokenizer encodes any Unicode text without loss.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

_SUBJECTS = (
    "the scheduler",
    "a router",
    "the prefill worker",
    "the decode worker",
    "every request",
    "a long prompt",
    "the cache",
    "my neighbour",
    "an old sailor",
    "the engineer",
    "a curious child",
    "the river",
    "our garden",
    "the morning train",
    "a small model",
    "the librarian",
    "this machine",
    "the teacher",
    "a quiet village",
    "the north wind",
)
_VERBS = (
    "moves",
    "remembers",
    "waits for",
    "sends",
    "reads",
    "forgets",
    "measures",
    "shares",
    "paints",
    "carries",
    "follows",
    "repairs",
    "explains",
    "counts",
    "hides",
    "answers",
    "watches",
    "finds",
    "builds",
    "leaves",
)
_OBJECTS = (
    "the next token",
    "a block of memory",
    "two messages",
    "the first answer",
    "its neighbours",
    "a letter",
    "the map",
    "seven apples",
    "an empty bench",
    "the whole story",
    "a copper key",
    "the last page",
    "some warm bread",
    "a question",
    "the evening light",
    "three boats",
    "a careful plan",
    "the distant hills",
    "nothing at all",
    "a new song",
)
_ENDS = (
    "before sunrise",
    "in 2024",
    "without a word",
    "for 30 minutes",
    "when it rains",
    "at the station",
    "over the network",
    "as always",
    "under the bridge",
    "because it must",
    "with great care",
    "again and again",
    "on Tuesday",
)
_OTHER = (
    "def add(left, right):\n    return left + right\n",
    "for index in range(10):\n    print(index, values[index])\n",
    '{"name": "demo", "values": [1, 2, 3], "ok": true}\n',
    # Several scripts, so that multi-byte characters are split over tokens here as in real vocabularies.
    "Der Fluss ist heute ruhig. Où est la gare ? ¿Qué hora es? こんにちは世界。 你好，世界。 Привет, мир!\n",  # noqa: RUF001
    "Hello! How can I help you today? Please explain it step by step, thank you.\n",
    "What is the capital of France? The capital of France is Paris.\n",
)
_SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of one family, and its chat template (Jinja). ``eos`` ends a turn, ``pad`` fills batches."""

    tokens: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str
    chat_template: str


QWEN_TOKENS = SpecialTokens(
    tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos=None,
    eos="<|im_end|>",
    pad="<|endoftext|>",
    chat_template=(
        "{%- for message in messages %}"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
)
LLAMA_TOKENS = SpecialTokens(
    tokens=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    pad="<|end_of_text|>",
    chat_template=(
        "{{- bos_token }}"
        "{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{- message['content'] | trim + '<|eot_id|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{%- endif %}"
    ),
)


def train_tokenizer(vocab_size: int, special: SpecialTokens, seed: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens; special tokens have the highest ids.

    Fewer come out where the text has no more pairs to merge.
    """
    return train_tokenizer_on(_corpus(seed), vocab_size, special)


def train_tokenizer_on(corpus: Iterable[str], vocab_size: int, special: SpecialTokens) -> Tokenizer:
    """Train as :func:`train_tokenizer` does, on another corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special.tokens),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(special.tokens))
    return tokenizer


def _corpus(seed: int, num_lines: int = 4000) -> list[str]:
    generator = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        words = (generator.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS))
        sentence = " ".join(words)
        lines.append(f"{sentence[0].upper()}{sentence[1:]}{generator.choice('.!?')}\n")
    return lines + list(_OTHER) * 40
