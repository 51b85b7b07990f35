"""The start of a detached cluster, as the process that follows it shows it."""

import os
from pathlib import Path

from splitserve.orchestration.cli.display import describe_progress
from splitserve.orchestration.cluster.detached import _follow, _pass_on
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.hosts.child import StatusPipe


def test_progress_arrives_as_it_was() -> None:
    """A tier has a name of its own, which is not that of its process."""
    given = [
        ChildProgress("prefill-0", "kv_tier", {"name": "host", "holds": "64 blocks"}),
        ChildProgress("prefill-0", "ready", {"threads": "2"}),
    ]
    read_fd, write_fd = os.pipe()
    status, shown = StatusPipe(write_fd), list[ChildProgress]()
    for progress in (*given, ChildProgress("prefill-0", "error", {"message": "reported elsewhere"})):
        _pass_on(status, progress)
    status.report("serving", {"url": "http://here"})
    status.close()
    assert _follow(read_fd, shown.append, Path("logs")) == "http://here"
    assert shown == given
    assert describe_progress(shown[0]) == "  prefill-0  host KV    64 blocks"
