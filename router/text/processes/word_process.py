"""Main of a process that tokenises texts word by word: ``python -m splitserve.router.text.processes.word_process``.
Only :mod:`.word_encoder` starts it.

The first message (:mod:`.child`) is a :class:`TokenizerFile` as msgpack, answered by an empty message; then come parts
of texts as UTF-8, each answered by its tokens as packed int32.
"""

import gc
import os
import sys
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from splitserve.common.errors import CheckpointError
from splitserve.router.text.processes.child import connect, framed, receive
from splitserve.router.text.tokens.file import TokenizerFile, load_tokenizer
from splitserve.router.text.tokens.words import WordMemory

MAX_MEMORY_BYTES = 4 << 30  # of address space


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads for single words cost more than they save
    connection = connect(MAX_MEMORY_BYTES)
    if not (content := receive(connection)):
        return
    wanted = msgspec.msgpack.decode(content, type=TokenizerFile)
    try:
        tokenizer, found = load_tokenizer(Path(wanted.path))
    except CheckpointError as error:
        sys.exit(str(error))
    if found != wanted:
        sys.exit(f"{wanted.path} has changed since the router read it: restart the router")
    connection.sendall(framed(b""))
    memory = WordMemory()
    gc.freeze()
    while part := receive(connection):
        connection.sendall(framed(tokens_of(part.decode(), tokenizer, memory)))


def tokens_of(part: str, tokenizer: Tokenizer, memory: WordMemory) -> bytes:
    """Return the packed tokens of a part of a text."""
    lookup = memory.look_up(part)
    unknown = list(lookup.unknown)
    # The "fast" call leaves out offsets.
    encodings = tokenizer.encode_batch_fast(unknown, add_special_tokens=False) if unknown else ()
    return memory.complete(lookup, [encoding.ids for encoding in encodings])


if __name__ == "__main__":
    main()
