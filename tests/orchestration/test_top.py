"""``splitserve top``: the overview as text."""

import re

import pytest

import overviews
from page_server import PageServer
from splitserve.orchestration.cli.main import main
from splitserve.orchestration.cli.top import overview_lines
from splitserve.orchestration.doctor.overview import check_bottleneck
from splitserve.router.admin.diagnosis.diagnose import diagnose


def shown(view: overviews.Overview, width: int = 120) -> str:
    return "\n".join(overview_lines(overviews.replace(view, diagnosis=diagnose(view)), width))


def test_a_loaded_cluster_is_shown() -> None:
    text = shown(overviews.PLANTED["prefill_short"](overviews.healthy(1)))
    assert "Prefill is the bottleneck" in text and "what to do: Add a prefill worker" in text
    assert re.search(r"prefill +\[#+ *\] busy 98%; 80,000 tokens wait", text)
    assert re.search(r"decode KV +\[#+/+\.+ *\] used \d+% \(#\), reserved and empty 37%", text)
    assert "cuda_ipc: 180.0 GB/s, link 260.0 GB/s" in text and "possible; tokens by tier: device" in text
    assert "(cached_on_decode)" in text and "request-0" in text


@pytest.mark.parametrize("name", ["idle", "large", "broken"])
def test_every_sight_is_shown_within_its_width(name: str) -> None:
    text = shown(getattr(overviews, name)(), 100)
    assert "nan" not in text and "None" not in text
    verdict = text.split("\n\n")[1]
    assert all(len(line) <= 100 for line in verdict.splitlines())
    if name == "broken":
        assert re.search(r"decode-1 +decode +ready +open 12 s .*7 failed attempts", text)
        assert re.search(r"prefill-1 +prefill +draining", text)
        assert re.search(r"decode-2 +decode +lost .*silent for 21 s", text)


def test_the_command_reads_it_from_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    server = PageServer(overviews.PLANTED["sick_worker"](overviews.healthy(2)))
    try:
        url = server.url.removesuffix("/dashboard")
        assert main(["top", "--once", "--against", url]) == 0
        assert "prefill-1 is sick: it takes 4.2 times as long" in capsys.readouterr().out
        server.view = None
        assert main(["top", "--once", "--against", url]) != 0
        assert "answered 500 to GET /admin/overview" in capsys.readouterr().err
    finally:
        server.close()


def test_the_doctor_names_the_bottleneck_first() -> None:
    view = overviews.PLANTED["cold_prefix"](overviews.healthy(2))
    found = check_bottleneck(overviews.replace(view, diagnosis=diagnose(view)))
    assert found.status == "problem" and found.problems[0].name == "cold_prefix"
    assert found.text == diagnose(view).sentence
    calm = overviews.healthy(2)
    assert check_bottleneck(overviews.replace(calm, diagnosis=diagnose(calm))).status == "ok"
