"""Charts by matplotlib, of the extra ``report``: their style, and their form as SVG."""

import io
import re
from contextlib import AbstractContextManager
from typing import Any

from splitserve.common.errors import ConfigError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
"""Colours that people with colour-blindness tell apart (Okabe and Ito), and one more."""
MARKERS = "osD^vP*X"
GREY = "#888888"
"""Colour of objectives and other lines to compare with."""
LIGHT_GREY = "#dddddd"


def require_matplotlib() -> None:
    """Raise :class:`ConfigError` where matplotlib is missing: before anything is measured or drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("charts need matplotlib: pip install 'splitserve[report]'") from error


def style() -> AbstractContextManager[None]:
    """Return a context in which figures are drawn in the style of all charts."""
    from matplotlib import rc_context

    own = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    context: AbstractContextManager[None] = rc_context(own | {"grid.color": LIGHT_GREY})
    return context


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def scale_log(axis: Any) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def svg(figure: Any, name: str, source: str = "") -> str:
    """Return a figure as an SVG element without a fixed size, always the same text for the same figure. ``source``:
    what its metadata name as the source of its figures."""
    from matplotlib import rc_context

    text, metadata = io.StringIO(), {"Date": None} | ({"Source": source} if source else {})
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata=metadata)
    document = text.getvalue()
    head, _, rest = document[document.index("<svg") :].partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest
