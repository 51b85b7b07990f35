"""Child processes of the router that the machine interrupts: no other request is blamed, none is refused for ever."""

import asyncio
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from splitserve.router.text.chat_template import ChatTemplateError
from splitserve.router.text.grammars import GrammarError, json_schema_grammar
from splitserve.router.text.processes import grammar_checker
from splitserve.router.text.processes.grammar_checker import CheckerBusyError, GrammarChecker
from splitserve.router.text.processes.renderer import Renderer, TemplateSource, _State
from stopping import stop_process
from waiting import PATIENCE_SECONDS

GRAMMAR = 'start: "b"'


@pytest.mark.parametrize("how", ["killed", "slow"])
def test_a_grammar_whose_check_was_interrupted_is_checked_again(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def run() -> None:
        checker = GrammarChecker(tiny_qwen3, [1])
        try:
            await checker.check('start: "a"')
            assert checker._child is not None
            process = checker._child.process
            stop_process(process.pid)
            with monkeypatch.context() as patched:
                if how == "killed":
                    asyncio.get_running_loop().call_later(0.1, process.kill)
                else:
                    patched.setattr(grammar_checker, "CHECK_SECONDS", 0.1)
                with pytest.raises(CheckerBusyError, match="interrupted: try again"):
                    await checker.check(GRAMMAR)
            await checker.check(GRAMMAR)
        finally:
            checker.close()

    asyncio.run(run())


def test_a_grammar_that_takes_too_much_memory_is_refused_from_then_on(tiny_qwen3: Path) -> None:
    large = json_schema_grammar({"properties": {f"p{i}": {"type": "string", "maxLength": 99} for i in range(1500)}})

    async def run() -> None:
        checker = GrammarChecker(tiny_qwen3, [1], cpu_seconds=60.0)
        try:
            await checker.check('start: "a"')
            assert checker._child is not None
            pid = checker._child.process.pid
            num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            most = num_pages * resource.getpagesize() + (1 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
            for _ in range(2):
                with pytest.raises(GrammarError, match="too much memory"):
                    await checker.check(large)
                assert checker._child is None, "it was compiled again"
        finally:
            checker.close()

    asyncio.run(run())


def test_a_grammar_whose_error_is_long_gets_a_part_of_it(tiny_qwen3: Path) -> None:
    """The error quotes the grammar, escaped."""

    async def run() -> None:
        checker = GrammarChecker(tiny_qwen3, [1], cpu_seconds=60.0)
        try:
            with pytest.raises(GrammarError, match="lexer error") as caught:
                await checker.check('start: "' + 130_000 * "\U0010ffff")
            assert len(str(caught.value)) <= 10_000
        finally:
            checker.close()

    asyncio.run(run())


def test_an_error_of_the_compiler_ends_its_process(tiny_qwen3: Path) -> None:
    """Else the router would wait for a verdict until time is up."""

    async def run() -> None:
        checker = GrammarChecker(tiny_qwen3, [1])
        try:
            await checker.check('start: "a"')
            child = checker._child
            assert child is not None
            with pytest.raises(EOFError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await child.exchange(5)  # type: ignore[arg-type]
            assert child.process.wait() == -signal.SIGABRT
        finally:
            checker.close()

    asyncio.run(run())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_late_reply_of_an_abandoned_rendering_brings_its_process_no_request(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The reply comes just before the process is killed, and is there to be read just after."""

    async def run() -> None:
        renderer = Renderer(TemplateSource("{{ messages[0].content }}", {}, "the template"))
        await renderer.start()
        try:
            late = asyncio.create_task(renderer.render([{"content": "late"}]))
            await asyncio.sleep(0)
            [busy] = [child for child in renderer._children if child.state is _State.BUSY]
            assert busy._process._link is not None and busy._process._link.transport is not None
            connection = busy._process._link.transport.get_extra_info("socket")
            select.select([connection], [], [], PATIENCE_SECONDS)
            busy._give_up()
            with pytest.raises(ChatTemplateError, match="took longer than"):
                await late
            for text in ("next", "last"):
                assert await renderer.render([{"content": text}]) == text
        finally:
            renderer.close()
            await asyncio.sleep(0.05)  # for the callbacks of the closed connections

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
