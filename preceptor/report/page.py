"""The report's HTML. All that comes from the run is escaped."""

from __future__ import annotations

from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from preceptor.launch.metrics import Row
from preceptor.launch.progress import number
from preceptor.report.figures import figures, is_accuracy
from preceptor.report.run import Run, read_run

_STYLE = """
:root { --ink: #22292f; --soft: #66717b; --rule: #e3e6e9; --accent: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 36px 28px 60px; color: var(--ink);
  background: #fff; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 25px; font-weight: 650; margin: 0; }
h2 { font-size: 15px; font-weight: 650; margin: 0; }
header p, .note { color: var(--soft); margin: 2px 0 0; }
.note { font-size: 13px; margin-bottom: 8px; }
.top { display: grid; grid-template-columns: 3fr 2fr; gap: 0 44px; margin: 26px 0 34px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 4px; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; }
tbody th { font-weight: 500; }
.facts th { color: var(--soft); font-weight: 400; }
.change { white-space: nowrap; color: var(--accent); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr));
  gap: 30px 44px; }
.charts section { min-width: 0; }
.warnings { border-left: 3px solid #d0782c; padding-left: 12px; margin: 0 0 30px; }
.warnings li { list-style: none; }
details { margin-top: 34px; border-top: 1px solid var(--rule); padding-top: 14px; }
summary { cursor: pointer; font-weight: 600; }
pre { background: #f6f7f8; padding: 14px; overflow-x: auto; font-size: 13px; }
@media (max-width: 760px) { .top { grid-template-columns: 1fr; gap: 26px; } }
"""

# Warnings beyond these say the same.
_MOST_WARNINGS = 20


def write_report(folder: Path, output: Path) -> None:
    """Write the report of the run in `folder` to `output`.

    Raises:
        ReportError: there is nothing to report.
    """
    output.write_text(_page(read_run(folder)), encoding="utf-8")


def _page(run: Run) -> str:
    charts = "".join(
        f"<section><h2>{escape(title)}</h2><p class=note>{escape(note)}</p>"
        + figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            default_height="270px",
            config={"displaylogo": False, "displayModeBar": False, "responsive": True},
        )
        + "</section>"
        for title, note, figure in figures(run)
    )
    name = escape(run.name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} - Preceptor</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>"
        f"<header><h1>{name}</h1><p>On-policy distillation with Preceptor</p></header>"
        f"<div class=top>{_before_after(run)}{_facts(run)}</div>"
        f"{_warnings(run)}<main class=charts>{charts}</main>{_config(run)}</body></html>\n"
    )


def _before_after(run: Run) -> str:
    if not run.evaluations:
        return "<p class=note>No evaluation yet.</p>"
    first, last = run.evaluations[0], run.evaluations[-1]
    keys = dict.fromkeys(key for key in [*first, *last] if is_accuracy(key))
    rows = [
        _row(_label(key, last), number(first, key), number(last, key), percent=True) for key in keys
    ]
    rows.append(_row("raw KL", *_raw_kl(run)))
    return (
        "<table><thead><tr><th></th>"
        f"<th>step {_count(number(first, 'step'))}</th><th>step {_count(number(last, 'step'))}</th>"
        f"<th>change</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _label(key: str, evaluation: Row) -> str:
    tag = key.removeprefix("accuracy").removeprefix("/")
    prompts = number(evaluation, f"prompts/{tag}" if tag else "prompts")
    of = "" if prompts is None else f" ({_count(prompts)} prompts)"
    return f"accuracy{', ' if tag else ''}{tag}{of}"


def _raw_kl(run: Run) -> tuple[float | None, float | None]:
    """Of the evaluations where they say it, else of the first and last step."""
    rows = run.evaluations if number(run.evaluations[0], "raw_kl") is not None else run.steps
    return (number(rows[0], "raw_kl"), number(rows[-1], "raw_kl")) if rows else (None, None)


def _row(label: str, before: float | None, after: float | None, percent: bool = False) -> str:
    form = ".1%" if percent else ".3f"
    change = "-"
    if before is not None and after is not None:
        if percent:
            change = f"{(after - before) * 100:+.1f} points"
        elif before and after:
            change = f"{before / after:.1f}x lower" if after < before else f"{after - before:+.3f}"
    cells = [_show(before, form), _show(after, form)]
    return (
        f"<tr><th>{escape(label)}</th><td>{cells[0]}</td><td>{cells[1]}</td>"
        f"<td class=change>{change}</td></tr>"
    )


def _facts(run: Run) -> str:
    minutes, seconds = divmod(round(run.seconds), 60)
    facts = {
        "steps": _count(len(run.steps)),
        "rollouts trained": _count(_total(run.steps, "sequences")),
        "tokens trained": _count(_total(run.steps, "tokens")),
        "duration": f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}",
        "resumed": f"{run.resumes} times",
    }
    if dropped := _total(run.steps, "dropped"):
        facts["rollouts dropped"] = _count(dropped)
    if run.ledger is not None:
        rollouts, distinct = run.ledger
        facts["ledger"] = f"{rollouts:,} rollouts, {rollouts - distinct:,} repeated"
    if run.unreadable:
        facts["unreadable metrics"] = f"{run.unreadable} lines"
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
    return f"<table class=facts><tbody>{rows}</tbody></table>"


def _warnings(run: Run) -> str:
    if not run.warnings:
        return ""
    items = "".join(f"<li>{escape(words)}</li>" for words in run.warnings[-_MOST_WARNINGS:])
    return f"<ul class=warnings><li><b>Warnings: {len(run.warnings)}</b></li>{items}</ul>"


def _config(run: Run) -> str:
    if not run.config:
        return ""
    return f"<details><summary>Settings</summary><pre>{escape(run.config)}</pre></details>"


def _total(rows: list[Row], key: str) -> float:
    return sum(number(row, key) or 0.0 for row in rows)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
