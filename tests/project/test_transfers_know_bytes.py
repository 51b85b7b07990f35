"""The KV connector moves bytes: names of what they mean stay in kernels, models and the layout record."""

import io
import tokenize
from pathlib import Path

MEANINGS = ("head_dim", "kv_heads", "kv_head", "num_kv_heads", "kv_heads_per_rank", "itemsize", "element_size")
ROOT = Path(__file__).parents[2]


def names_in(source: str) -> set[str]:
    """Return the names of a module's code; comments and strings are no code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_no_module_of_the_connector_knows_keys_values_and_dimensions() -> None:
    modules = sorted((ROOT / "kvconnector").rglob("*.py"))
    assert len(modules) > 40
    knowing = {str(path.relative_to(ROOT)): names_in(path.read_text(encoding="utf-8")) for path in modules}
    found = {path: sorted(names.intersection(MEANINGS)) for path, names in knowing.items()}
    assert not {path: names for path, names in found.items() if names}
