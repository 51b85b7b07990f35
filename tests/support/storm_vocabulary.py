"""The vocabulary of the simulated storm: letters, pieces of JSON, and the tokens of reasoning and tool calls.

Not a test module.
"""

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from splitserve.simulation.model import VOCAB

_LETTERS = "abcdefgh"
_TEXTS = ("{", "}", '"', ":", ",", " ", "\n", "[", "]", '{"', '"}', ": ", '": "', '", "', '": {', "}\n", "name")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ENDS = ("<end>", "<pad>")


@cache
def chat_vocabulary() -> Path:
    """Return a directory, kept until the process ends, with the tokenizer.json of the simulator's vocabulary."""
    directory = TemporaryDirectory()
    atexit.register(directory.cleanup)
    assert tokenizer().get_vocab_size() == VOCAB
    tokenizer().save(str(Path(directory.name) / "tokenizer.json"))
    return Path(directory.name)


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer."""
    texts = [*_LETTERS, *_TEXTS, "arguments", *"0123", "ce"]
    pairs = (one + other for one in _LETTERS for other in _LETTERS)
    texts += [pair for pair in pairs if pair not in texts][: VOCAB - len(texts) - len(ADDED) - len(ENDS)]
    byte_level = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in texts]
    # Grammars force texts by their tokens: a text must have some, without all pieces that merges would need.
    made = Tokenizer(models.Unigram([(text, -1.0) for text in byte_level], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(list(ADDED))
    made.add_special_tokens(list(ENDS))
    return made
