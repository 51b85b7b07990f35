"""The vocabulary for grammars that name special tokens: made with the first of them, which isn't blamed for it."""

import asyncio
import json
from pathlib import Path

from splitserve.common.grammars import load_grammar_tokenizer
from splitserve.router.text.grammars import choice_grammar
from splitserve.router.text.processes.grammar_checker import GrammarChecker

CPU_SECONDS = 0.1  # a quarter of what the second vocabulary takes


def test_the_time_that_a_vocabulary_takes_is_not_the_grammars(tiny_qwen3: Path, tmp_path: Path) -> None:
    content = json.loads((tiny_qwen3 / "tokenizer.json").read_text())
    last = max(token["id"] for token in content["added_tokens"])
    content["model"]["vocab"] |= {f"zz{number}": last + 1 + number for number in range(50_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    async def check() -> None:
        checker = GrammarChecker(tmp_path, [last], cpu_seconds=CPU_SECONDS)
        try:
            await checker.check(choice_grammar(["a<|im_end|>b"]))
        finally:
            checker.close()

    asyncio.run(check())


def test_only_grammars_that_name_special_tokens_take_the_slower_vocabulary(tiny_qwen3: Path) -> None:
    vocabulary = load_grammar_tokenizer(tiny_qwen3, [0])
    for text, is_usual in (("a", True), ("<im_end>", True), ("a<|im_end|>", False), ("e\u0301", False)):
        assert (vocabulary.of(choice_grammar([text])) is vocabulary.usual) == is_usual, text
