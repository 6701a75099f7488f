"""The report's charts. Each is left out where a run has no numbers for it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from preceptor.launch.metrics import Row
from preceptor.launch.progress import TIME_PARTS, number
from preceptor.report.run import Run

BLUE, GREEN, ORANGE, GREY, PURPLE = "#2563a8", "#3b8f6b", "#d0782c", "#9aa3ad", "#7a5ba6"
_INK, _RULE = "#3c4650", "#e6e9ec"
# More bars than this are thinner than a pixel or two.
_MOST_BARS = 80

Series = tuple[str, str, str]
"""Metric, label, colour."""


def figures(run: Run) -> list[tuple[str, str, go.Figure]]:
    """Title, note and chart."""
    steps = run.steps
    charts = [
        (
            "Accuracy and reward",
            "Accuracy at each evaluation; reward is the mean over training rollouts.",
            _accuracy(run),
        ),
        (
            "Raw KL",
            "Mean of log p(student) - log p(teacher) over response tokens, unclamped.",
            _lines(steps, [("raw_kl", "raw KL", BLUE)]),
        ),
        (
            "Clamped and flipped",
            "Share of tokens clamped, and of tokens whose sign whitening turned.",
            _lines(
                steps,
                [
                    ("clamped_low", "clamped low", BLUE),
                    ("clamped_high", "clamped high", ORANGE),
                    ("sign_flips", "sign flipped", GREY),
                ],
                percent=True,
            ),
        ),
        (
            "Gradient norm",
            "Before clipping.",
            _lines(steps, [("gradient_norm", "gradient norm", PURPLE)]),
        ),
        ("Where a step's time goes", "Seconds, mean of neighbouring steps.", _time(steps)),
        (
            "Speed",
            "Response tokens trained per second.",
            _lines(steps, [("tokens_per_second", "tokens/s", GREEN)]),
        ),
    ]
    return [(title, note, figure) for title, note, figure in charts if figure.data]


def _accuracy(run: Run) -> go.Figure:
    figure = _lines(run.steps, [("reward", "reward (training)", GREY)], percent=True)
    colours = {"accuracy": BLUE, "accuracy/seen": GREEN, "accuracy/unseen": ORANGE}
    keys = dict.fromkeys(key for row in run.evaluations for key in row if is_accuracy(key))
    for key in keys:
        label = escape(key.removeprefix("accuracy/"))
        _add(figure, run.evaluations, key, label, colours.get(key, PURPLE), "lines+markers")
    return figure


def is_accuracy(key: str) -> bool:
    """Whether an evaluation's key is an accuracy: overall, or of a tag."""
    return key == "accuracy" or key.startswith("accuracy/")


def _lines(rows: Sequence[Row], series: Sequence[Series], percent: bool = False) -> go.Figure:
    figure = _empty()
    for key, label, colour in series:
        _add(figure, rows, key, label, colour, "lines")
    figure.update_yaxes(rangemode="tozero", tickformat=".0%" if percent else None)
    return figure


def _add(
    figure: go.Figure, rows: Sequence[Row], key: str, label: str, colour: str, mode: str
) -> None:
    points = [(row["step"], value) for row in rows if (value := number(row, key)) is not None]
    if points:
        x, y = zip(*points, strict=True)
        width = 2.4 if "markers" in mode else 1.6
        line = {"color": colour, "width": width}
        figure.add_scatter(x=x, y=y, name=label, mode=mode, line=line, marker={"size": 7})


def _time(rows: Sequence[Row]) -> go.Figure:
    """Stacked bars, neighbouring steps averaged where there are many."""
    figure = _empty()
    timed = [row for row in rows if number(row, "step_s") is not None]
    if not timed:
        return figure
    width = -(-len(timed) // _MOST_BARS)
    bins = [timed[at : at + width] for at in range(0, len(timed), width)]
    parts = [_means(chunk) for chunk in bins]
    colours = dict(zip(TIME_PARTS, (ORANGE, PURPLE, BLUE, GREEN), strict=True))
    for key, label in {**TIME_PARTS, "other": "other"}.items():
        figure.add_bar(
            x=[chunk[0]["step"] for chunk in bins],
            y=[part[key] for part in parts],
            name=label,
            marker={"color": colours.get(key, GREY), "line": {"width": 0}},
        )
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(ticksuffix=" s")
    return figure


def _means(rows: Sequence[Row]) -> dict[str, float]:
    means = {key: sum(number(row, key) or 0.0 for row in rows) / len(rows) for key in TIME_PARTS}
    whole = sum(number(row, "step_s") or 0.0 for row in rows) / len(rows)
    # Waiting overlaps nothing, but clocks round.
    return {**means, "other": max(0.0, whole - sum(means.values()))}


def _empty() -> go.Figure:
    axis = {"gridcolor": _RULE, "linecolor": _RULE, "zerolinecolor": _RULE, "automargin": True}
    layout = go.Layout(
        template=go.layout.Template(),
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={"family": "system-ui, sans-serif", "size": 12, "color": _INK},
        height=270,
        margin={"l": 44, "r": 12, "t": 6, "b": 34},
        hovermode="x unified",
        legend={
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
        xaxis={**axis, "showgrid": False, "title": {"text": "step", "standoff": 6}},
        yaxis=axis,
    )
    return go.Figure(layout=layout)
