"""Pictures of reports: kernels under the roofline, ratios to peers, and growth with size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops._frame.registry import BACKENDS
from fusedops.bench import report as reports
from fusedops.bench.timing import GRAPH
from fusedops.bench.workloads import BOTH, CALL, FORWARD

#: Neither dark nor light, so that text is read on a page of either; the background is clear.
INK = "#7f8792"
#: Colours of the ops, in order; colour-blind readers can tell them apart.
COLOURS = (
    *("#3b82c4", "#e08a1e", "#1f9e77", "#c75d8e", "#8a6fd1"),
    *("#b0872a", "#38a3b5", "#d1603d", "#6d8f3c", "#9a7b6c"),
)
MARKERS = "osD^vP*Xhd<>p"


def draw(found: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw a roofline, ratios to peers and growth, with a panel for every report, as SVG.

    Parameters
    ----------
    found : sequence of dict
        Reports.
    folder : Path
        Where to draw; made if it isn't there.

    Returns
    -------
    list of Path
        Of the pictures.

    Raises
    ------
    OSError
        If nothing can be written there.
    """
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    style = {
        "svg.fonttype": "path",
        "svg.hashsalt": "fusedops",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.titlecolor"), INK),
        **dict.fromkeys(("grid.color", "legend.edgecolor"), INK),
        "grid.alpha": 0.25,
        "savefig.transparent": True,
    }
    paths = []
    with matplotlib.rc_context(style):
        for name, panel, height in (
            ("roofline", _roofline, 4.8),
            ("peers", _peers, max(3.0, 0.22 * max(len(_ratios(each)) for each in found) + 1.2)),
            ("growth", _growth, 4.8),
        ):
            figure = Figure(figsize=(6.2 * len(found), height), layout="constrained")
            axes = figure.subplots(1, len(found), squeeze=False)[0]
            for axis, each in zip(axes, found, strict=True):
                panel(axis, each)
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def _where(report: dict[str, Any]) -> str:
    """Return the machine of a report in a few words."""
    for block in report["ops"].values():
        machine = block["machine"]
        name = machine["name"].partition(",")[0].replace("(R)", "")
        return name if machine["device"] == "cuda" else f"{name}, {machine['threads']} threads"
    return report["device"]


def _style(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return every op's colour and marker."""
    return {
        op: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
        for i, op in enumerate(report["ops"])
    }


def _extent(row: dict[str, Any]) -> float:
    """Return the bytes that a row's call must move; of a whole step, its size."""
    return row["work"]["bytes"] if row["work"] else row["size"]


def _best(report: dict[str, Any], key: Any) -> dict[Any, dict[str, Any]]:
    """Return our fastest row of each key; rows with the key None are skipped."""
    kernels = {backend.name for backend in BACKENDS}
    best: dict[Any, dict[str, Any]] = {}
    for row in reports.cases(report):
        at = key(row) if row["ms"] and row["who"] in kernels else None
        if at is not None and (at not in best or row["ms"] < best[at]["ms"]):
            best[at] = row
    return best


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["op"], row["workload"], row["dtype"], row["pass"], *row["shape"].items())


def _roofline(axis: Any, report: dict[str, Any]) -> None:
    """Draw operations a second over operations a byte, under the roofs of memory and products."""
    styles = _style(report)
    rows = [
        row
        for row in _best(report, _case).values()
        if row["work"] and row["work"]["flops"] and row["pass"] in (FORWARD, BOTH)
        # Calls show the host's time, not the machine's rates.
        if row["workload"] != CALL
    ]
    intensity = [row["work"]["flops"] / row["work"]["bytes"] for row in rows]
    low, high = min(intensity, default=0.1) / 2, max(intensity, default=100) * 4
    rates = next((block["rates"] for block in report["ops"].values()), None)
    if rates:
        bandwidth = rates["copy_GB_s"]
        roofs: list[tuple[float, list[str]]] = []
        for dtype, top in sorted(rates["product_GFLOP_s"].items(), key=lambda item: item[1]):
            # Roofs of about one height share a line.
            if roofs and top < 1.15 * roofs[-1][0]:
                roofs[-1][1].append(dtype)
            else:
                roofs.append((top, [dtype]))
        right = max(high, *(4 * top / bandwidth for top, _ in roofs))
        for top, dtypes in roofs:
            ridge = max(low, top / bandwidth)
            axis.plot([low, ridge, right], [low * bandwidth, top, top], color=INK)
            what = f"products in {', '.join(dtypes)}"
            axis.annotate(what, (right, top), ha="right", va="bottom", fontsize=7)
        axis.text(
            3 * low,
            4 * low * bandwidth,
            f"copy, {bandwidth:,.0f} GB/s",
            fontsize=7,
            ha="center",
            va="bottom",
            rotation=math.degrees(math.atan(4 / 3 * bandwidth)),
            rotation_mode="anchor",
            transform_rotates_text=True,
        )
    seen = set()
    for row, x in zip(rows, intensity, strict=True):
        colour, marker = styles[row["op"]]
        rate = row["work"]["flops"] / row["ms"] / 1e6
        label = None if row["op"] in seen else row["op"]
        seen.add(row["op"])
        full = row["pass"] == BOTH
        axis.plot(
            x,
            rate,
            marker,
            label=label,
            markersize=5,
            color=colour,
            markerfacecolor=colour if full else "none",
        )
    axis.set(xscale="log", yscale="log", title=_where(report))
    axis.set_xlabel("operations a byte that must move (full: with the gradient)")
    axis.set_ylabel("GFLOP/s")
    axis.grid(which="major")
    _legend(axis, 2)


@dataclass(frozen=True)
class Ratio:
    """A peer's time over ours, and the factor by which the ratio is uncertain."""

    value: float
    uncertain: float


def _ratios(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Ratio]]:
    """Return ratios to peers by op and label, and by pass.

    Each op and peer has its smallest and its largest problem, beside our fastest way to do the
    same: eager calls both, or CUDA graphs where nothing else was timed.
    """

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return (*_case(row), row["how"] == GRAPH)

    best, known = _best(report, key), {backend.name for backend in BACKENDS}
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for eager, graph in reports.side_by_side(reports.cases(report)):
        both = [row for row in (eager, graph) if row and row["ms"] and key(row) in best]
        if not both:
            continue
        row = both[0]
        if row["who"] not in known and row["computes"] and row["pass"] in (FORWARD, BOTH):
            kind = tuple(row[name] for name in ("op", "who", "pass"))
            kinds.setdefault(kind, []).append(row)
    found: dict[tuple[str, str], dict[str, Ratio]] = {}
    for rows in kinds.values():
        # Among equally large problems the first is the plainest.
        small, large = (end(rows, key=_extent) for end in (min, max))
        for row in [small] if small is large else [small, large]:
            ours = best[key(row)]
            ratio = row["ms"] / ours["ms"]
            quartiles = ours["quartiles_ms"][0], row["quartiles_ms"][1]
            sizes = "×".join(map(str, row["shape"].values()))
            label = f"{row['who']}: {row['op']}, {row['workload']} {sizes}, {row['dtype']}"
            label += ", graphs" if row["how"] == GRAPH else ""
            uncertain = quartiles[1] / quartiles[0] / ratio
            found.setdefault((row["op"], label), {})[row["pass"]] = Ratio(ratio, uncertain)
    return found


def _peers(axis: Any, report: dict[str, Any]) -> None:
    """Draw the peers' times over ours."""
    styles, ratios = _style(report), _ratios(report)
    for at, ((op, _), passes) in enumerate(ratios.items()):
        for what, ratio in passes.items():
            y, full = at + (0.2 if what == BOTH else -0.2), what == BOTH
            # At one, where a bar begins, both are equally fast.
            style = {"color": styles[op][0], "alpha": 1 if full else 0.45}
            axis.barh(y, ratio.value - 1, left=1, height=0.4, **style)
            low, high = ratio.value / ratio.uncertain, ratio.value * ratio.uncertain
            axis.plot([low, high], [y, y], color=INK, linewidth=0.8)
            axis.annotate(f" {ratio.value:.1f}", (max(1, high), y), va="center", fontsize=5.5)
    axis.axvline(1, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(ratios)), [label for _, label in ratios])
    axis.tick_params(axis="y", labelsize=6.5, length=0)
    axis.set(xscale="log", title=_where(report), ylim=(len(ratios) - 0.4, -0.6))
    axis.margins(x=0.12)
    axis.set_xlabel("time over our fastest\nfull: with the gradient, pale: without")


def _growth(axis: Any, report: dict[str, Any]) -> None:
    """Draw times by size, with the fitted exponents."""
    styles = _style(report)
    for op, block in report["ops"].items():
        # The first backend is the one that is chosen.
        for row in block["growth"][:1]:
            colour, marker = styles[op]
            power = row["exponent"]
            axis.plot(
                row["sizes"],
                row["ms"],
                f"-{marker}",
                color=colour,
                markersize=3.5,
                linewidth=1,
                label=f"{op}, {row['unit']}: {'noisy' if power is None else f'{power:.2f}'}",
            )
    axis.set(xscale="log", yscale="log", title=_where(report), xlabel="N")
    axis.set_ylabel("ms, with the gradient where there is one")
    axis.grid(which="major")
    _legend(axis, 2, title="op, N: exponent")


def _legend(axis: Any, columns: int, **options: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(
            ncols=columns,
            fontsize=6.5,
            title_fontsize=6.5,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.13),
            **options,
        )
