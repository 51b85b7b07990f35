"""The LM head of a checkpoint whose config.json calls it tied to the embedding. No torch here."""

import math
from pathlib import Path

from splitserve.common.errors import CheckpointError
from splitserve.models.weights.checkpoint import ITEM_BITS, TensorRecord, read_records, text_records

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PIECE_BYTES = 4 << 20


def has_own_head(directory: Path, *, is_text_of_whole: bool) -> bool:
    """Return whether an LM head is stored beside the embedding, with other content: then it isn't tied to it, whatever
    config.json says (transformers' ``tie_weights`` decides so, too).

    A head that differs is found at its first difference; one that doesn't is read once. False where files are missing
    or can't be read: loading reports them. ``is_text_of_whole``: the checkpoint has other parts beside the text model.
    """
    try:
        records = read_records(directory)
        if is_text_of_whole:
            records = text_records(records)
        head, embedding = records.get(_HEAD), records.get(_EMBEDDING)
        return head is not None and embedding is not None and not _have_same_content(head, embedding)
    except (CheckpointError, OSError):
        return False


def _have_same_content(one: TensorRecord, other: TensorRecord) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in ITEM_BITS:
        return False
    left = math.prod(one.shape) * ITEM_BITS[one.dtype] // 8
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        while left > 0:
            size = min(left, _PIECE_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True
