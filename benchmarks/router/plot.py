"""The plot of added latency against rate, as SVG."""

from collections.abc import Sequence
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560, 320, 56, 44, 16, 96
_COLOURS = {"ids": "#1b6ca8", "seen": "#2e7d32", "new": "#b3541e"}


def latency_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return p99 (solid) and p50 (dashed) of the added milliseconds over requests per second, a colour per kind."""
    most_rate = max(float(row["rate"]) for row in rows)
    most_ms = max(1.0, *(max(0.0, float(row["added_p99_ms"])) for row in rows))

    def x(rate: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * rate / most_rate

    def y(milliseconds: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * max(0.0, milliseconds) / most_ms

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for step in range(5):
        value = most_ms * step / 4
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for rate in sorted({row["rate"] for row in rows}):
        parts.append(f'<text x="{x(rate):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{rate:g}</text>')
    for kind, colour in _COLOURS.items():
        mine = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["rate"])
        for share, dash in (("p99", ""), ("p50", ' stroke-dasharray="4 3"')):
            points = " ".join(f"{x(row['rate']):.1f},{y(row[f'added_{share}_ms']):.1f}" for row in mine)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if mine:
            at = y(mine[-1]["added_p99_ms"]) + 4
            parts.append(f'<text x="{_WIDTH - _RIGHT + 6}" y="{at:.1f}" fill="{colour}">{kind} p99</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">requests per second</text>')
    parts.append(f'<text x="14" y="{_HEIGHT / 2}" transform="rotate(-90 14 {_HEIGHT / 2})">added ms</text>')
    return "\n".join([*parts, "</svg>"])
