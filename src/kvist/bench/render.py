"""A comparison for people: tables as text and as Markdown, and a plot. It reads the report of `kvist bench compare`, as saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvist.errors import UsageError

OURS, THEIRS = "#c2410c", "#94a3b8"
PANELS_A_ROW = 4


def amount(value: float) -> str:
    """Three digits are enough of a figure: 1,234 or 56.7."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a work, each contender's median with its smallest and largest value, kvist against the best peer."""
    names = [contender["name"] for contender in report["contenders"]]
    rows = []
    for row in report["works"]:
        shown = []
        for name in names:
            values = row["values"].get(name)
            spread = "" if not values or len(values) == 1 else f" ({amount(min(values))} to {amount(max(values))})"
            shown.append(f"{amount(row['medians'][name])}{spread}" if values else "-")
        best = f"{row['ratio_to_best']:.2f} × {row['best_peer']}" if row["ratio_to_best"] is not None else "-"
        rows.append([f"{row['work']}, {row['unit']}", *shown, best])
    return ["work", *names, "kvist to the best peer"], rows


def roofline_cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what kvist's figures are in bytes and operations a second, and as a share of what the machine reads."""
    roofline = report["roofline"] or {"works": []}
    rows = [
        [
            row["work"],
            f"{row['bytes_per_token'] / 1e6:,.1f}",
            f"{row['operations_per_token'] / 1e9:.3f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['operations_per_second'] / 1e9:,.0f}",
            f"{row['share_of_bandwidth']:.0%}",
        ]
        for row in roofline["works"]
    ]
    return ["kvist", "MB read a token", "GOP a token", "GB/s", "GOP/s", "of the bytes that the machine reads"], rows


def read_report(path: Path, text: str) -> dict[str, Any]:
    """What `kvist bench compare --save` wrote to a file. Raises UsageError."""
    try:
        report = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}.") from error
    if not isinstance(report, dict) or report.get("command") != "compare":
        raise UsageError(f"{path} is no report of `kvist bench compare --save`.")
    try:
        markdown(merged([report]))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} is a comparison that this kvist cannot read ({type(error).__name__}: {error}); run it again."
        ) from error
    return report


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several comparisons of one model as one: a work comes from the first that has it. Raises UsageError where an engine, the
    model or the machine is not the same in all."""
    contenders: dict[str, dict[str, Any]] = {}
    works: dict[str, dict[str, Any]] = {}
    bounds: dict[str, dict[str, Any]] = {}
    failures: list[dict[str, Any]] = []
    for report in reports:
        pairs: list[tuple[Any, Any]] = [(contenders.setdefault(one["name"], one), one) for one in report["contenders"]]
        pairs += [(reports[0][key], report[key]) for key in ("model", "num_threads")]
        pairs.append((reports[0]["machine"]["cpu"], report["machine"]["cpu"]))
        if any(known != this for known, this in pairs):
            raise UsageError("These comparisons are not of the same model, engines and machine; show them one by one.")
        for row in report["works"]:
            works.setdefault(row["work"], row)
        for row in (report["roofline"] or {"works": []})["works"]:
            bounds.setdefault(row["work"], row)
        failures += [one for one in report["failures"] if one not in failures]
    rows: dict[str, Any] = {"works": list(works.values()), "failures": failures, "contenders": list(contenders.values())}
    rows["interrupted"] = any(report["interrupted"] for report in reports)
    return {**reports[0], **rows, "roofline": {"works": list(bounds.values())}}


def footnotes(report: dict[str, Any]) -> list[str]:
    """What stands under the table: what each one ran, what could not be run, and the machine."""
    cpu = report["machine"]["cpu"]
    cut = ["interrupted: not all rounds were run"] if report["interrupted"] else []
    lines = [
        *cut,
        f"{cpu['name']}, {cpu['usable_cores']} of {cpu['cores']} cores ({' '.join(cpu['flags'])}); load {report['load']}",
    ]
    for one in report["contenders"]:
        told = ", ".join(str(one["facts"][key]) for key in ("version", "isa") if key in one["facts"])
        lines.append(f"{one['name']}{f' {told}' if told else ''}: {one['weights']}")
    lines += [
        f"could not run {one['contender']}{', ' + one['work'] if one['work'] else ''}: {one['reason']}"
        for one in report["failures"]
    ]
    return lines


def _rounds(report: dict[str, Any]) -> str:
    count = report["rounds"]
    return "1 round" if count == 1 else f"{count} rounds in turn"


def markdown(report: dict[str, Any]) -> str:
    """The table and its footnotes, to be pasted into a page."""
    told = f"Medians of {_rounds(report)}; `start` and `memory_2048`: less is better."
    lines = [*_table(*cells(report)), "", told, "", *(f"- {line}" for line in footnotes(report))]
    header, rows = roofline_cells(report)
    return "\n".join([*lines, "", *_table(header, rows)] if rows else lines)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def require_matplotlib() -> Any:
    """matplotlib's pyplot, drawing to files only. Raises UsageError."""
    try:
        import matplotlib
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise UsageError("A plot needs matplotlib: python -m pip install 'kvist[bench]', or leave --plot away.") from error
    matplotlib.use("Agg")
    return pyplot


def check_plot(path: Path) -> None:
    """Before the work whose outcome is to be drawn: raises UsageError where no plot could be."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if path.suffix and path.suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise UsageError(f"A plot cannot be written as {path.suffix}; name {path.stem}.png or so.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {path.absolute().parent} to put {path.name} in.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file for the plot.")


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel a work, one bar a contender: its median, with a line from its smallest to its largest value. Raises UsageError."""
    pyplot = require_matplotlib()
    names = [contender["name"] for contender in report["contenders"]]
    rows: Sequence[dict[str, Any]] = report["works"]
    across = min(PANELS_A_ROW, len(rows))
    down = -(-len(rows) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(3.4 * across, 1.1 + down * (1.1 + 0.32 * len(names))), squeeze=False)
    for panel in axes.flat[len(rows) :]:
        panel.set_axis_off()
    for panel, row in zip(axes.flat, rows, strict=False):
        _draw_panel(panel, row, names)
    cpu = report["machine"]["cpu"]
    figure.suptitle(f"{report['model']['name']} on {cpu['usable_cores']} cores of {cpu['name']}, {_rounds(report)}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Any, row: dict[str, Any], names: Sequence[str]) -> None:
    """Bars from the top in the order of the names; a missing one is named as such."""
    widest = max(row["medians"].values(), default=1.0)
    for place, name in enumerate(names):
        median, values = row["medians"].get(name), row["values"].get(name)
        if median is None or values is None:
            panel.text(0, place, " not run", va="center", color=THEIRS, fontsize=8)
            continue
        spread = [[median - min(values)], [max(values) - median]]
        panel.barh(place, median, color=OURS if name == names[0] else THEIRS, xerr=spread, ecolor="#334155", capsize=2)
        panel.text(max(values) + 0.02 * widest, place, amount(median), va="center", fontsize=8)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, 1.3 * max((max(values) for values in row["values"].values()), default=1.0))
    panel.tick_params(axis="x", labelsize=7)
    less = ", less is better" if row["lower_is_better"] else ""
    panel.set_title(f"{row['work']} ({row['unit']}{less})", fontsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
