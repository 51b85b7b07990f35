"""Small random copies of a config's model, for a test at start: the same code, few layers, narrow, noisy weights."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from splitserve.common.errors import CheckpointError

MAX_ELEMENTS = 1 << 27
WINDOW = 6
VOCAB_SIZE = 512
_ALIGNMENT = 16  # of widths, for products of experts
_MOST = {  # of sizes that families name alike
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "mlp_intermediate_size": 64,
    "ffn_dim": 128,
    "n_inner": 128,
    "expert_intermediate_size": 48,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")


def make_small_copy(model_class: Any, config: Any, num_layers: int, implementation: str) -> tuple[Any, Any]:
    """Return (config, model) of a copy with the first ``num_layers`` layers, in float32 on the CPU. Its weights are
    random and large, its norms and biases noisy, so that any mistake of attention changes its logits. Raises
    :class:`CheckpointError` if the config can't be made small."""
    problems: list[str] = []
    for shrink in _ways():
        small = copy.deepcopy(config)
        try:
            text = small.get_text_config()
            _cut_layers(text, num_layers)
            shrink(text)
            with torch.device("meta"):
                planned = model_class._from_config(copy.deepcopy(small), attn_implementation=implementation)
            if sum(weight.numel() for weight in planned.parameters()) > MAX_ELEMENTS:
                problems.append(f"it has more than {MAX_ELEMENTS} weights")
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = model_class._from_config(small, attn_implementation=implementation, dtype=torch.float32)
                _randomise(model)
        except Exception as error:  # each class checks its own fields
            problems.append(f"{type(error).__name__}: {error}")
            continue
        return small, model.eval()
    raise CheckpointError(
        "config.json: the architecture can't be served through transformers: no small copy of it could be made to test "
        f"it ({'; '.join(dict.fromkeys(problems))[:400]})"
    )


def _ways() -> Iterator[Callable[[Any], None]]:
    """Yield ways to make a config small, the most thorough first."""
    yield _narrow
    yield _narrow_mlp
    yield _shorten


def _cut_layers(text: Any, num_layers: int) -> None:
    """Keep the first layers. Lists with an entry for each layer are cut."""
    count = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            text.__dict__[name] = value[:num_layers]
    text.num_hidden_layers = num_layers


def _shorten(text: Any) -> None:
    """Make vocabulary and window short."""
    text.vocab_size = min(text.vocab_size, VOCAB_SIZE)
    if getattr(text, "sliding_window", None):
        text.sliding_window = WINDOW
    for name in _TOKENS:
        value = getattr(text, name, None)
        if (isinstance(value, int) and value >= text.vocab_size) or isinstance(value, list):
            setattr(text, name, 0)


def _narrow_mlp(text: Any) -> None:
    """Make MLPs narrow, too."""
    _shorten(text)
    for name, most in _MOST.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > most:
            setattr(text, name, most)


def _narrow(text: Any) -> None:
    """Keep a few heads, too, of the same size and in groups, and as much of the residual for each."""
    _narrow_mlp(text)
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    kept_kv_heads = min(num_kv_heads, 2)
    kept_heads = kept_kv_heads * min(num_heads // num_kv_heads, 4)
    width = text.hidden_size * kept_heads // num_heads
    width -= width % _ALIGNMENT if width > _ALIGNMENT else 0
    text.hidden_size = width
    text.num_attention_heads = kept_heads
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = kept_kv_heads


def _randomise(model: torch.nn.Module) -> None:
    """Draw weights that keep activations of a size, and noise on everything else."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() < 2:
                weight.add_(0.3 * torch.randn_like(weight))
            else:
                weight.normal_(0.0, 1.5 / min(weight.shape[-2:]) ** 0.5)
