"""Checked access to the fields of a config.json, which notes what was read: a field that nobody reads is refused."""

from collections.abc import Mapping
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few, shown

RECURRENT_KINDS = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2", "recurrent")
"""Kinds of layers, as ``layer_types`` names them, whose state isn't keys and values of tokens."""

MAX_POSITIONS = 1 << 27

# Several times what the largest models have: more is an error of the file, and would be built for hours.
_HIGHEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": MAX_POSITIONS,
    "sliding_window": 1 << 27,
    "rms_norm_eps": 1.0,
    "rope_theta": 1e15,
}
_HIGHEST_OTHER = 1e6

# Fields that change no logit of a served model: training, names, tokens of templates, speed of other software
_NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout attn_implementation
    auto_map aux_loss_alpha
    bad_words_ids begin_suppress_tokens boi_token_index bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size eoi_token_index ep_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label image_token_id
    image_token_index initializer_range is_decoder keys_to_ignore_at_inference label2id layer_norm_type length_penalty
    max_length max_window_layers min_length mm_tokens_per_image model_type no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id pretraining_tp
    prefix problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop router_aux_loss_coef seq_aux
    router_jitter_noise
    residual_dropout return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_mrope vision_config
    """.split()  # noqa: SIM905 -- a list of its own lines would be four times as long
)


class ConfigFields:
    """The fields of ``raw``; each method reads one, and raises :class:`CheckpointError` that names it if it is bad."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return a field as it is; None if it is missing."""
        self._read.add(name)
        return self.raw.get(name)

    def refuse_unread(self) -> None:
        """Raise an error that names fields that nothing has read: they may change what the model computes."""
        unread = [name for name in self.raw if name not in self._read and name not in _NEUTRAL]
        unread = [name for name in unread if self.raw[name] not in (None, False, [], {})]
        if unread:
            raise CheckpointError(
                f"config.json: {few(unread)}: unknown for this architecture, and may change what it computes; remove "
                "what doesn't"
            )

    def items(self, name: str) -> list[Any]:
        """Return a list; empty if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise CheckpointError(f"config.json: {name} is {shown(value)}; a list is needed")
        return value or []

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"config.json: {name} is {shown(value)}; an object is needed")
        return value or {}

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false; ``default`` if it is missing."""
        value = self.get(name)
        # null is false in transformers, where its class takes it: not a default of true
        if name in self.raw and not isinstance(value, bool) and (value is not None or default):
            raise CheckpointError(f"config.json: {name} is {shown(value)}; true or false is needed")
        return default if value is None else value

    def only_flag(self, name: str, allowed: bool, *, default: bool) -> None:
        """Refuse a flag that isn't ``allowed``; ``default`` is its value if it is missing."""
        if self.flag(name, default) is not allowed:
            given, supported = ("false", "true") if allowed else ("true", "false")
            raise CheckpointError(f"config.json: {name} is {given}; only {supported} is supported in this architecture")

    def without_effect(self, name: str, value: Any) -> None:
        """Pass over a field that nothing computes with; refuse it unless it is missing or has the one ``value`` that
        fits what is computed anyway."""
        if (found := self.get(name)) is not None and found != value:
            raise CheckpointError(
                f"config.json: {name} is {shown(found)}; only {shown(value)} is supported in this architecture"
            )

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Return one of ``allowed``."""
        value = self.get(name)
        value = default if value is None else value
        if value not in allowed:
            names = " and ".join(f"'{each}'" for each in allowed)
            raise CheckpointError(
                f"config.json: {name} is {shown(value)}; only {names} {'is' if len(allowed) == 1 else 'are'} supported"
            )
        return str(value)

    def positive(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(name)
        value = default if value is None else value
        most = int(_HIGHEST.get(name, _HIGHEST_OTHER))
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(
                f"config.json: {name} is {shown(value)}; a positive integer of at most {most} is needed"
            )
        return value

    def natural(self, name: str, default: int) -> int:
        """Return a positive integer, or 0."""
        value = self.get(name)
        value = default if value is None else value
        return 0 if type(value) is int and value == 0 else self.positive(name, default)

    def optional_positive(self, name: str) -> int | None:
        """Return a positive integer, None if it is missing or null."""
        return None if self.get(name) is None else self.positive(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(name)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        most = _HIGHEST.get(name, _HIGHEST_OTHER)
        if value is None or not is_number or not 0 < value <= most:
            raise CheckpointError(
                f"config.json: {name} is {shown(value)}; a positive number of at most {most:g} is needed"
            )
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive number, None if it is missing or null."""
        return None if self.get(name) is None else self.number(name)
