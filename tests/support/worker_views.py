"""Workers as the router's membership and placement see them."""

from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.policies import WorkerView


def view(name, role, **fields):
    defaults = {"max_num_seqs": 8, "max_model_len": 1000, "kv_capacity_tokens": 10_000}
    return WorkerView(party=Party(name, 1), role=role, **(defaults | fields))


def info(name="w", incarnation=1, role=Role.MIXED, **fields):
    defaults = {
        "endpoint": "tcp://127.0.0.1:1",
        "pid": 1,
        "layout": DEFAULT_LAYOUT,
        "num_blocks": 10,
        "max_num_seqs": 4,
        "max_model_len": 100,
        "vocab_size": 50,
    }
    return WorkerInfo(party=Party(name, incarnation), role=role, **(defaults | fields))
