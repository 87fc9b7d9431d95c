"""The HTML page of a run: no scripts, no fonts, nothing to fetch; it can be mailed.

Errors are drawn on one scale for all ops: the share of the tolerance that an element used up, from exact to beyond.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from deepinfer.conformance.compare import EDGES
from deepinfer.conformance.levels import LEVELS
from deepinfer.conformance.results import BAD, CaseResult, Report, implementations
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.spec import OpSpec

_LABELS = ("exact", *(f"{edge:g}" for edge in EDGES[1:]), "beyond")

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #667085; --line: #e4e7ec; --paper: #fff; --card: #f8f9fb;
  --good: #2e7d5b; --warn: #b7791f; --bad: #c0362c; --bar: #5b7fb5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2c3444; --paper: #12161f;
  --card: #191f2b; --good: #5fbf94; --warn: #d9a441; --bad: #ef6a5f; --bar: #7fa3dc; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.5rem 5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
p, dl { margin: .3rem 0; } .soft { color: var(--soft); } code { font: 13px ui-monospace, monospace; }
.verdict { font-weight: 600; } .good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem 1rem;
  min-width: 8rem; }
.tile b { display: block; font-size: 1.5rem; font-weight: 600; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dt { color: var(--soft); }
dd { margin: 0; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
td.n, th.n { text-align: right; } tr.reference td { color: var(--soft); }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; } summary { cursor: pointer; }
details table { margin: .6rem 0; font-size: 13.5px; } svg { display: block; } svg rect { fill: var(--bar); }
svg rect.beyond { fill: var(--bad); } svg text { fill: var(--soft); font: 9px system-ui, sans-serif; }
pre { white-space: pre-wrap; background: var(--card); padding: .6rem .8rem; border-radius: 6px; font-size: 12.5px; }
"""


def page(report: Report) -> str:
    """The whole page."""
    head = f"<title>{escape(report.backend)}: conformance</title><style>{_STYLE}</style>"
    body = "".join((_head(report), _failures(report), _levels(report), _ops(report), _sheet(report), _details(report)))
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8">{view}{head}</head><body>{body}</body></html>\n'


def _head(report: Report) -> str:
    verdict = (
        '<span class="verdict good">conforms</span>'
        if report.ok
        else '<span class="verdict bad">does not conform</span>'
    )
    ops = [rows for rows in report.by_op().values() if rows[0].level == 1]
    native = sum(any(r.native for r in rows) for rows in ops)
    tiles = [
        ("cases passed", report.count("pass", "slow")),
        ("failed", report.count("fail", "unexpected pass")),
        ("waived", report.count("waived")),
        ("unsupported", report.count("unsupported")),
        ("slow", report.count("slow")),
        ("ops native", f"{native} of {len(ops)}"),
    ]
    facts = {"device": report.device, **report.versions, "duration": f"{report.seconds:.0f} s"}
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    boxes = "".join(f'<div class="tile"><b>{value}</b>{escape(name)}</div>' for name, value in tiles)
    return (
        f"<h1>{escape(report.backend)}</h1>"
        f"<p>{verdict} to op contract {report.contract}, levels 0 to {report.level}</p>"
        f'<div class="tiles">{boxes}</div><dl class="facts">{listed}</dl>'
    )


def _failures(report: Report) -> str:
    bad = [r for r in report.results if r.status in BAD]
    if not bad and not report.problems:
        return ""
    parts = ["<h2>What is wrong</h2>"]
    parts += [f'<p class="bad">{escape(problem)}</p>' for problem in report.problems]
    for result in bad:
        parts.append(
            f'<p><b class="bad">{escape(result.name)}</b> '
            f'<span class="soft">on {escape(result.implementation)}</span></p>'
            f"<pre>{escape(result.detail)}\n\n$ {escape(report.again(result))}</pre>"
        )
    return "".join(parts)


def _levels(report: Report) -> str:
    rows = []
    for number, level in LEVELS.items():
        results = [r for r in report.results if r.level == number]
        passed, failed = sum(r.status in ("pass", "slow") for r in results), sum(r.status in BAD for r in results)
        state, kind = ("not asked for", "soft") if not results else ("passed", "good")
        if failed:
            state, kind = f"{failed} failed", "bad"
        elif results and not passed:
            state, kind = results[0].detail or results[0].status, "soft"
        rows.append(
            f'<tr><td>L{number}</td><td>{escape(level.title)}</td><td class="n">{passed}</td>'
            f'<td class="{kind}">{escape(state)}</td></tr>'
        )
    return f'<h2>Levels</h2><table><tr><th></th><th></th><th class="n">passed</th><th></th></tr>{"".join(rows)}</table>'


def _ops(report: Report) -> str:
    groups = [(op, rows) for op, rows in report.by_op().items() if rows[0].level in (1, 2)]
    if not groups:
        return ""
    known = defined_ops()
    lines = []
    for native in (True, False):
        for op, rows in groups:
            if any(r.native for r in rows) == native:
                lines.append(_op_row(op, rows, known.get(op), native))
    head = (
        '<tr><th>op</th><th>ran on</th><th></th><th class="n">pass</th><th class="n">fail</th>'
        "<th>error, share of tolerance</th></tr>"
    )
    note = (
        "Rows in grey ran on the reference and do not count as native. A bar is the number of elements (square root)."
    )
    return f'<h2>Ops</h2><p class="soft">{note}</p><table>{head}{"".join(lines)}</table>'


def _op_row(op: str, rows: list[CaseResult], spec: OpSpec[..., object] | None, native: bool) -> str:
    failed, passed = sum(r.status in BAD for r in rows), sum(r.status in ("pass", "slow") for r in rows)
    style = "" if native else ' class="reference"'
    level = spec.determinism if spec is not None else ""
    mark = f'<td class="n bad">{failed}</td>' if failed else '<td class="n"></td>'
    return (
        f"<tr{style}><td><code>{escape(op)}</code></td><td>{escape(', '.join(implementations(rows)))}</td>"
        f"<td>{level}</td>"
        f'<td class="n">{passed}</td>{mark}<td>{histogram(_sum(r.histogram for r in rows))}</td></tr>'
    )


def _sum(histograms: Iterable[list[int]]) -> list[int]:
    total = [0] * len(_LABELS)
    for bins in histograms:
        for index, number in enumerate(bins):
            total[index] += number
    return total


def histogram(bins: list[int], *, labels: bool = False) -> str:
    """Elements by share of the tolerance, as inline SVG; an empty one says so."""
    if not any(bins):
        return '<span class="soft">no elements</span>'
    width, height, step = 200, 24, 200 / len(bins)
    top = max(bins) ** 0.5
    parts = []
    for index, number in enumerate(bins):
        tall = max(height * number**0.5 / top, 1.5) if number else 0
        beyond = ' class="beyond"' if index == len(bins) - 1 else ""
        title = f"<title>{escape(_LABELS[index])}: {number}</title>"
        parts.append(
            f'<rect{beyond} x="{index * step + 1:.1f}" y="{height - tall:.1f}" '
            f'width="{step - 2:.1f}" height="{tall:.1f}">{title}</rect>'
        )
        if labels:
            parts.append(
                f'<text x="{index * step + step / 2:.1f}" y="{height + 10}" '
                f'text-anchor="middle">{_LABELS[index]}</text>'
            )
    tall = height + (14 if labels else 0)
    return f'<svg width="{width}" height="{tall}" viewBox="0 0 {width} {tall}" role="img">{"".join(parts)}</svg>'


def _sheet(report: Report) -> str:
    rows = [r for r in report.results if r.level == 6 and r.facts]
    if not rows:
        return ""
    head = "".join(
        f"<th>{name}</th>" for name in ("op", "case", "ran on", "time", "rate", "of the measured roof", "bound by")
    )
    lines = []
    for r in rows:
        cells = [
            r.op,
            r.case,
            r.implementation,
            f"{r.facts['us']:.1f} us",
            r.facts["rate"],
            f"{r.facts['share']:.0%}" if "share" in r.facts else "",
            r.facts["bound"],
        ]
        lines.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f"<h2>Performance sheet</h2><table><tr>{head}</tr>{''.join(lines)}</table>"


def _details(report: Report) -> str:
    known = defined_ops()
    parts = ["<h2>Every case</h2>"]
    for op, rows in report.by_op().items():
        spec = known.get(op)
        about = ""
        if spec is not None:
            arguments = "".join(
                f"<dt><code>{escape(n)}</code></dt><dd>{escape(str(a))}</dd>" for n, a in spec.arguments.items()
            )
            t = spec.tolerance
            bound = "equal bits" if t.exact else f"{t.atol:g} + {t.rtol:g} · |want|"
            if t.single is not None:
                bound += f" ({t.single[1]:g} + {t.single[0]:g} · |want| where nothing is bfloat16)"
            about = (
                f'<p>{escape(spec.summary)}</p><p class="soft">{spec.determinism}; {bound}: {escape(t.why)}</p>'
                f'<dl class="facts">{arguments}</dl>{histogram(_sum(r.histogram for r in rows), labels=True)}'
            )
        lines = "".join(_case_row(r) for r in rows)
        failed = sum(r.status in BAD for r in rows)
        mark = f' <span class="bad">{failed} failed</span>' if failed else ""
        parts.append(
            f"<details{' open' if failed else ''}><summary><code>{escape(op)}</code> "
            f'<span class="soft">{len(rows)} cases</span>{mark}</summary>{about}<table>{lines}</table></details>'
        )
    return "".join(parts)


def _case_row(result: CaseResult) -> str:
    kind = {"pass": "good", "fail": "bad", "unexpected pass": "bad"}.get(result.status, "warn")
    asked: dict[str, int] = {}
    for check in result.checks:
        asked[check.name] = asked.get(check.name, 0) + 1
    checks = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in asked.items())
    return (
        f'<tr><td class="{kind}">{escape(result.status)}</td><td>{escape(result.case)}</td>'
        f'<td class="soft">{escape(checks)}</td><td class="n">{result.seconds * 1e3:.1f} ms</td></tr>'
    )
