"""Progress of the processes as lines for people."""

from splitserve.orchestration.process import ChildProgress
from splitserve.orchestration.sizes import format_bytes


def describe_progress(event: ChildProgress) -> str | None:
    """One line, or None for what is of no interest to people."""
    text = _describe(event.stage, event.detail)
    return None if text is None else f"  {event.name:<10} {text}"


def print_progress(event: ChildProgress) -> None:
    line = describe_progress(event)
    if line is not None:
        print(line, flush=True)


def _describe(stage: str, detail: dict[str, str]) -> str | None:
    match stage, detail:
        case ("membership" | "error", _):
            return None  # of no use to people; an error ends the start and is shown there
        case "weights", {"seconds": seconds, **more}:
            size = f"{format_bytes(float(more['bytes']))}, " if "bytes" in more else ""
            dtype = f"{more['dtype']}, " if "dtype" in more else ""
            return f"weights    {size}{dtype}{float(seconds):.1f} s"
        case "listening", {"url": url}:
            return f"listening  {url}"
        case "kv_memory", {"blocks": blocks, "bytes": size, "tokens": tokens}:
            return f"KV memory  {int(blocks):,} blocks, {int(tokens):,} tokens, {format_bytes(float(size))}"
        case "ready", {"threads": threads, **more}:
            after = f", {more['seconds']} s" if "seconds" in more else ""
            return f"ready      {threads} thread{'' if threads == '1' else 's'}{after}"
        case _:
            facts = ", ".join(f"{name} {value}" for name, value in detail.items())
            return f"{stage:<10} {facts}".rstrip()
