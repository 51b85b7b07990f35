"""Proof that a model's attention is ours to compute: a forward pass without weights, in which every call is looked at.

A model may be run over KV memory if it calls the attention interface exactly once for each layer, with a mask that is
causal, or a window, and with arguments that our attention honours. Families that compute attention by themselves, or
whose layers see other tokens (chunks, both directions), don't pass, whatever their names are.
"""

import copy
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few
from splitserve.models.transformers_backend.interface import OBSERVED, AttentionCall, attending

logger = logging.getLogger(__name__)

NUM_TOKENS = 24
WINDOW = 7  # of the forward pass, in place of the model's own: shorter than its tokens
_HONOURED = frozenset(("scaling", "softcap", "s_aux"))
_NEUTRAL = frozenset(  # that change no result of attention, or that say what the mask says better
    """
    sliding_window position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits
    return_dict logits_to_keep layer_idx
    """.split()  # noqa: SIM905
)
_WINDOW_FIELDS = ("window", "chunk_size")  # parts of names of fields that bound what a token attends to


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Properties that a layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # tokens, the query's own included; None: all
    scale: float
    soft_cap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Result of a forward pass without weights."""

    layers: tuple[LayerFacts, ...]
    vocab_size: int
    backbone: str  # the module that makes the last layer's output from the tokens
    matrices: tuple[tuple[int, int], ...]  # of all layers, without embedding and head
    experts: tuple[tuple[int, int, int], ...]  # stacks of experts' matrices
    head_elements: int
    is_tied: bool  # embedding and head are one


def prove(model_class: Any, config: Any) -> ModelFacts:
    """Run a model of ``config`` without weights. Raises :class:`CheckpointError` if our attention can't serve it."""
    shortened, windows = _with_short_windows(config)
    calls: list[AttentionCall] = []

    def observe(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.query.new_empty((1, call.query.shape[2], call.query.shape[1], call.value.shape[3]))

    try:
        with torch.device("meta"):
            model = model_class._from_config(shortened, attn_implementation=OBSERVED, dtype=torch.bfloat16).eval()
        modules = _Outermost(model)
        tokens = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device="meta")
        positions = torch.arange(NUM_TOKENS, device="meta").unsqueeze(0)
        with torch.no_grad(), attending(observe):
            output = model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=positions, use_cache=False
            )
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        logger.debug("the forward pass without weights failed", exc_info=error)
        raise _refused(
            f"its forward pass can't be looked at without weights ({type(error).__name__}: {_first_line(error)})"
        ) from error
    num_layers = config.get_text_config().num_hidden_layers
    _check_calls(calls, num_layers)
    layers = [_facts(call, windows) for call in sorted(calls, key=lambda call: call.layer)]
    return _model_facts(model, tuple(layers), output.logits.shape[-1], modules.first())


def _model_facts(model: Any, layers: tuple[LayerFacts, ...], vocab_size: int, backbone: str) -> ModelFacts:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise _refused("it has no head that makes logits of its last layer's output")
    others = [weight for weight in model.parameters() if weight is not embedding.weight and weight is not head.weight]
    matrices = [tuple(weight.shape) for weight in others if weight.dim() == 2]
    experts = [tuple(weight.shape) for weight in others if weight.dim() == 3]
    is_tied = head.weight is embedding.weight
    return ModelFacts(layers, vocab_size, backbone, tuple(matrices), tuple(experts), head.weight.numel(), is_tied)


def _refused(why: str) -> CheckpointError:
    return CheckpointError(f"config.json: the architecture can't be served through transformers: {why}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _with_short_windows(config: Any) -> tuple[Any, dict[int, int]]:
    """Return a copy of ``config`` with windows shorter than the tokens, and the real ones by those."""
    shortened = copy.deepcopy(config)
    text = shortened.get_text_config()
    windows: dict[int, int] = {}
    for name, value in list(vars(text).items()):
        if type(value) is int and value > 0 and any(part in name for part in _WINDOW_FIELDS):
            setattr(text, name, WINDOW)
            if name == "sliding_window":
                windows[WINDOW] = value
    return shortened, windows


class _Outermost:
    """The modules that a model's forward pass calls itself, in their order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._depth = 0
        self._names: list[str] = []
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(self._entering(name))
                module.register_forward_hook(self._left)

    def _entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            if not self._depth:
                self._names.append(name)
            self._depth += 1

        return enter

    def _left(self, *_: Any) -> None:
        self._depth -= 1

    def first(self) -> str:
        """Return the name of the first one."""
        return self._names[0]


def _check_calls(calls: Sequence[AttentionCall], num_layers: int) -> None:
    """Raise :class:`CheckpointError` unless there is one call for each layer."""
    if not calls:
        raise _refused("it computes attention by itself, not through transformers' attention interface")
    counts = Counter(call.layer for call in calls)
    if counts != dict.fromkeys(range(num_layers), 1):
        found = ", ".join(f"layer {layer}: {count}" for layer, count in sorted(counts.items())[:4])
        raise _refused(
            f"one call of the attention interface for each of its {num_layers} layers is needed, got {len(calls)} "
            f"({found}{', ...' if len(counts) > 4 else ''})"
        )


def _facts(call: AttentionCall, windows: Mapping[int, int]) -> LayerFacts:
    given = call.given
    unknown = [name for name, value in given.items() if name not in _HONOURED | _NEUTRAL and _matters(name, value)]
    if unknown:
        raise _refused(f"attention of layer {call.layer} has arguments that ours doesn't know: {few(unknown)}")
    (_, num_heads, num_tokens, key_dim), (num_kv_heads, value_dim) = call.query.shape, call.value.shape[1::2]
    if num_tokens != NUM_TOKENS or call.key.shape != (1, num_kv_heads, NUM_TOKENS, key_dim):
        raise _refused(
            f"layer {call.layer} attends with queries of shape {list(call.query.shape)} to keys of shape "
            f"{list(call.key.shape)}; one of each for every token is needed"
        )
    scale = given.get("scaling")
    return LayerFacts(
        num_heads,
        num_kv_heads,
        key_dim,
        value_dim,
        _window(call, windows),
        key_dim**-0.5 if scale is None else float(scale),
        None if given.get("softcap") is None else float(given["softcap"]),
        given.get("s_aux") is not None,
    )


def _matters(name: str, value: Any) -> bool:
    """Return whether an argument may change the result."""
    if name == "is_causal":
        return value is False
    return value is not None and value is not False and not (name == "dropout" and value == 0.0)


def _window(call: AttentionCall, windows: Mapping[int, int]) -> int | None:
    """Return the window of a layer, by its mask."""
    if call.mask is None or call.mask.shape != (NUM_TOKENS, NUM_TOKENS):
        raise _refused(f"layer {call.layer} has no mask that shows what a token attends to")
    causal = torch.ones((NUM_TOKENS, NUM_TOKENS), dtype=torch.bool).tril()
    if torch.equal(call.mask, causal):
        return None
    for short, window in windows.items():
        if torch.equal(call.mask, causal.triu(1 - short)):
            return window
    raise _refused(
        f"a token of layer {call.layer} attends to other tokens than all before it, or those of a sliding_window; only "
        "these two kinds of layers are supported"
    )
