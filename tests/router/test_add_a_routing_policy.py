"""The guide "Add a routing policy", followed to the letter in a copy of this checkout."""

import json
import re
from pathlib import Path

import pytest

from documents import ROOT
from followed_guide import FollowedGuide
from router_harness import served_router, write_model_dir
from splitserve.protocol.request import Role
from waiting import wait_until

GUIDE = "add-a-routing-policy.md"
NUM_WORKERS = 4
NUM_REQUESTS = 12

EXPECTED = """
import dataclasses, json, sys
from splitserve.protocol.request import Party, Role
from splitserve.router.placement import policies
assert policies.__file__.startswith(sys.argv[1]), policies.__file__
def placed(policy):
    workers = [policies.WorkerView(Party(f"m{n}", 1), Role.MIXED, 64, 4096, 65536) for n in range(int(sys.argv[3]))]
    names = []
    for _ in range(int(sys.argv[4])):
        name = policy(policies.Snapshot(tuple(workers)), policies.RequestShape(8, 2)).worker.engine_id
        names.append(name)
        index = int(name[1:])
        workers[index] = dataclasses.replace(workers[index], num_placed=workers[index].num_placed + 1)
    return names
print(json.dumps([placed(policies.policy_by_name(name)) for name in (sys.argv[2], "least-loaded")]))
"""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not a checkout")


def test_a_policy_of_the_guide_places_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = FollowedGuide(GUIDE, tmp_path)
    file_text, line = guide.blocks("python")
    guide.write(guide.find(r"This is `(router/placement/\w+\.py)`"), file_text)
    guide.add_line(guide.find(r"line to `PLACEMENT_POLICIES` in `([\w/.]+)`"), "PLACEMENT_POLICIES", line)
    assert len(guide.touched) <= 2
    (name,) = re.findall(r'"([\w-]+)": PlacementPolicy', line)
    (help_line,) = re.findall(r'"([^"]*)"\),', line)
    (command,) = guide.blocks("console")
    assert f"--policy {name}" in command

    shown = guide.python("-m", "splitserve.orchestration.cli.main", "serve", "--help")
    assert f"{name}: {help_line}" in " ".join(shown.split())
    counts = (str(NUM_WORKERS), str(NUM_REQUESTS))
    expected, least_loaded = json.loads(guide.python("-c", EXPECTED, str(guide.checkout), name, *counts))
    assert expected != least_loaded, "another policy would place them alike"

    write_model_dir(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", guide.environment["PYTHONPATH"])  # of the router's process
    with served_router(tmp_path / "model", policy=name) as (router, workers):
        running = [workers.start(f"m{number}", Role.MIXED) for number in range(NUM_WORKERS)]
        wait_until(
            lambda: all(
                router.metric(f'splitserve_worker_ready{{role="mixed",worker="m{number}"}}') == 1
                for number in range(NUM_WORKERS)
            )
        )
        placed: list[str] = []
        for number in range(NUM_REQUESTS):
            before = [len(worker.requests) for worker in running]
            status, _, answer = router.post("/v1/completions", prompt=f"request {number}", max_tokens=2)
            assert status == 200, answer
            placed += [
                worker.party.engine_id
                for worker, count in zip(running, before, strict=True)
                if len(worker.requests) > count
            ]
    assert placed == expected
