"""Text for people: progress of starting processes, and a cluster's status."""

import os
import sys

from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.control.requests import ClusterStatus, ProcessStatus
from splitserve.orchestration.spec.sizes import format_bytes

GREEN, CYAN = 32, 36


def describe_progress(event: ChildProgress) -> str | None:
    """Return one line, or None for a step that is of no interest to people."""
    text = _describe(event.stage, event.detail)
    return None if text is None else f"  {event.name:<10} {text}"


def print_progress(event: ChildProgress) -> None:
    """Print one line of a start, the process's name in colour on a terminal."""
    text = _describe(event.stage, event.detail)
    if text is not None:
        print(f"  {coloured(f'{event.name:<10}', CYAN)} {text}", flush=True)


def coloured(text: str, colour: int) -> str:
    """Return ``text`` in a colour of the terminal; as it is if standard output is none, or NO_COLOR is set."""
    is_shown = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\033[{colour}m{text}\033[0m" if is_shown else text


def _describe(stage: str, detail: dict[str, str]) -> str | None:
    match stage, detail:
        case ("membership" | "lmcache" | "error" | "placed" | "started", _):
            # "error" is shown when it ends the start; the plan names the node assignment.
            return None
        case "plan", {"text": text}:
            return f"placed     {text}"
        case "placement", {"remote_bytes": remote}:
            return f"memory     {format_bytes(int(remote))} on other NUMA nodes than planned" if int(remote) else None
        case "weights", {"seconds": seconds, **more}:
            size = f"{format_bytes(float(more['bytes']))}, " if "bytes" in more else ""
            dtype = f"{more['dtype']}, " if "dtype" in more else ""
            return f"weights    {size}{dtype}{float(seconds):.1f} s"
        case "listening", {"url": url}:
            return f"listening  {url}"
        case "sampling", {"defaults": defaults, "source": source}:
            return f"sampling   {defaults} by default ({source})"
        case "kv_memory", {"blocks": blocks, "bytes": size, "tokens": tokens}:
            return f"KV memory  {int(blocks):,} blocks, {int(tokens):,} tokens, {format_bytes(float(size))}"
        case "kv_tier", {"name": name, "holds": holds}:
            return f"{name} KV".ljust(11) + holds
        case "ready", {"threads": threads, **more}:
            after = f", {more['seconds']} s" if "seconds" in more else ""
            return f"ready      {threads} thread{'' if threads == '1' else 's'}{after}"
        case "down", {"reason": reason}:
            return f"down       its server {reason}, and is started again; `splitserve logs` shows why"
        case _:
            facts = ", ".join(f"{name} {value}" for name, value in detail.items())
            return f"{stage:<10} {facts}".rstrip()


def describe_status(status: ClusterStatus) -> str:
    lines = [f"{status.name}: {status.state}, {status.model} at {status.url or 'no address yet'}"]
    processes = (status.router, *status.more_routers, *status.lmcache, *status.workers)
    lines += [_describe_process(process, status.revision) for process in processes]
    for each in status.abandoned:
        counts = f"{each.pool} has {status.counts.get(each.pool, 0)}"
        lines.append(f"  {each.name:<12} abandoned {each.last_words}; {counts}: `splitserve scale` starts another one")
    if status.upgrade is not None:
        upgrade = status.upgrade
        problem = f": {upgrade.problem}" if upgrade.problem else ""
        lines.append(
            f"  upgrade {upgrade.state}, {upgrade.num_replaced} of {upgrade.num_workers} workers replaced{problem}"
        )
    return "\n".join(lines)


def _describe_process(process: ProcessStatus, revision: int) -> str:
    facts = [
        f"{process.seconds_ready:.0f} s" if process.seconds_ready is not None else "",
        f"starts in {process.due_in_seconds:.0f} s" if process.due_in_seconds is not None else "",
        f"pid {process.pid}" if process.pid else "",
        process.runs_on,
        f"restarted {process.num_restarts} time{'s' * (process.num_restarts > 1)}" if process.num_restarts else "",
        f"revision {process.revision}" if process.role and process.revision != revision else "",
        "won't come back" if not process.wanted else "",
        f"before: {process.last_words}" if process.last_words else "",
    ]
    return f"  {process.name:<12} {process.phase:<9} {', '.join(fact for fact in facts if fact)}".rstrip()
