"""A checkpoint with two key/value heads, for two ranks."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two key/value heads, an untied head of odd size."""
    from splitserve.models.demo import checkpoint as demo

    shape = demo.DemoShape(128, 2, 8, 2, 32, 384, 2003, 4096, 1e4, tie_word_embeddings=False, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(demo.SHAPES, "two-heads", shape)
        return demo.write_demo_model(tmp_path_factory.mktemp("checkpoints") / "two-heads", shape="two-heads")
