"""Pictures of reports: kernels under the roofline, ratios to peers, and growth with size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import report as reports
from bench.timing import GRAPH
from bench.workloads import CALL
from fusedops._catalogue import BOTH, FORWARD

#: Neither dark nor light, so that text is read on a page of either; the background is clear.
INK = "#7f8792"
#: Colours of the ops, in order; colour-blind readers can tell them apart.
COLOURS = (
    *("#3b82c4", "#e08a1e", "#1f9e77", "#c75d8e", "#8a6fd1"),
    *("#b0872a", "#38a3b5", "#d1603d", "#6d8f3c", "#9a7b6c"),
)
MARKERS = "osD^vP*Xhd<>p"
#: matplotlib's settings for all pictures.
STYLE = {
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
#: The ops that the picture of peers shows before all others, and the number that it shows.
MOST = 6
FIRST = (
    *("planarity_nll", "gaussian_density", "node_to_edge_wigner_permute", "so2_convolution"),
    *("triangle_multiplicative_update", "dynamic_conv"),
)


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
    paths, styles = [], _styles(found)
    with matplotlib.rc_context(STYLE):
        for name, panel, height in (
            ("roofline", partial(_roofline, styles=styles), 4.8),
            ("peers", _peers, 5.6),
            ("growth", partial(_growth, styles=styles), 4.8),
        ):
            figure = Figure(figsize=(5.4 * len(found), height), layout="constrained")
            axes = figure.subplots(1, len(found), squeeze=False)[0]
            for axis, each in zip(axes, found, strict=True):
                panel(axis, each)
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def draw_ops(report: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Draw every op's eager times and its peers' over the bytes that a call must move, as SVG.

    Parameters
    ----------
    report : dict
        A report.
    folder : Path
        Where to draw; made if it isn't there.

    Returns
    -------
    dict
        From the names of ops to pictures.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    with matplotlib.rc_context(STYLE):
        for op in report["ops"]:
            points = _points(report, op)
            if not points:
                continue
            figure = Figure(figsize=(6.4, 3.2), layout="constrained")
            axis = figure.subplots()
            for i, (who, of) in enumerate(points.items()):
                colour = COLOURS[i % len(COLOURS)]
                face = "none" if i else colour
                marker = MARKERS[i % len(MARKERS)]
                style = {"markersize": 5, "color": colour, "markerfacecolor": face}
                axis.plot(*zip(*sorted(of), strict=True), marker, label=who, **style)
            axis.set(xscale="log", yscale="log", title=f"{op}: {where(report)}")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set(
                xlabel="bytes that a call must move", ylabel="ms, with a gradient if there is one"
            )
            axis.grid(which="major")
            axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
            paths[op] = folder / f"{op}.svg"
            figure.savefig(paths[op], metadata={"Date": None})
    return paths


def _points(report: dict[str, Any], op: str) -> dict[str, list[tuple[float, float]]]:
    """Return bytes and ms of an op's problems: ours on the fastest backend, then each peer's.

    Times include the gradient if the op has one.
    """
    rows = [
        row
        for row in reports.cases(report)
        if row["op"] == op and row["ms"] and row["work"] and row["how"] != GRAPH
        # Calls show the host's time, not the kernels'.
        if row["workload"] != CALL and row["computes"]
    ]
    full = BOTH if any(row["pass"] == BOTH for row in rows) else FORWARD
    best: dict[str, dict[Any, tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: not row["ours"]):
        if row["pass"] == full:
            who = "fusedops" if row["ours"] else row["who"]
            point = row["work"]["bytes"], row["ms"]
            case = best.setdefault(who, {})
            case[_case(row)] = min(point, case.get(_case(row), point))
    return {who: list(of.values()) for who, of in best.items()}


def where(report: dict[str, Any]) -> str:
    """Return the machine of a report in a few words."""
    for block in report["ops"].values():
        machine = block["machine"]
        name = machine["name"].partition(",")[0].replace("(R)", "")
        return name if machine["device"] == "cuda" else f"{name}, {machine['threads']} threads"
    return report["device"]


def _styles(found: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return every op's colour and marker, the same for all reports."""
    ops = dict.fromkeys(op for report in found for op in report["ops"])
    return {op: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, op in enumerate(ops)}


def _extent(row: dict[str, Any]) -> float:
    """Return the bytes that a row's call must move; of a whole step, its size."""
    return row["work"]["bytes"] if row["work"] else row["size"]


def _best(report: dict[str, Any], key: Any) -> dict[Any, dict[str, Any]]:
    """Return our fastest row of each key; rows with the key None are skipped."""
    best: dict[Any, dict[str, Any]] = {}
    for row in reports.cases(report):
        at = key(row) if row["ms"] and row["ours"] else None
        if at is not None and (at not in best or row["ms"] < best[at]["ms"]):
            best[at] = row
    return best


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["op"], row["workload"], row["dtype"], row["pass"], *row["shape"].items())


def _roofline(axis: Any, report: dict[str, Any], styles: dict[str, tuple[str, str]]) -> None:
    """Draw operations a second over operations a byte, under the roofs of memory and products."""
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
    axis.set(xscale="log", yscale="log", title=where(report))
    axis.set_xlabel("operations a byte that must move (full: with the gradient)")
    axis.set_ylabel("GFLOP/s")
    axis.grid(which="major")
    _legend(axis, 2)


@dataclass(frozen=True)
class Bar:
    """A problem: our fastest eager row and the fastest peer's, and the two in CUDA graphs."""

    ours: dict[str, Any]
    peer: dict[str, Any]
    #: The peer's fastest way, eager or in a graph, over ours in a CUDA graph.
    graph: float | None

    @property
    def eager(self) -> float:
        """The peer's time over ours."""
        return float(self.peer["ms"] / self.ours["ms"])

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest ratio of the two rows' quartiles."""
        ours, peer = self.ours["quartiles_ms"], self.peer["quartiles_ms"]
        return peer[0] / ours[1], peer[1] / ours[0]


def bars_of(report: dict[str, Any]) -> dict[str, list[Bar]]:
    """Return two bars for each of a few ops: the smallest and the largest problem of programs.

    Passes have the gradient where a peer has it. Eager calls are compared with eager calls, of
    arrays or of tensors, whichever the fastest peer takes. A problem in several dtypes counts in
    the one in which the peer comes closest.
    """
    found: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for row in reports.cases(report):
        # Calls show the host's time, not the kernels'.
        counts = row["computes"] and row["ms"] and row["workload"] != CALL
        if counts and row["pass"] in (FORWARD, BOTH):
            found.setdefault(row["op"], {}).setdefault(_case(row), []).append(row)
    bars: dict[str, list[Bar]] = {}
    for op, cases in found.items():
        contests = [rows for rows in cases.values() if _fastest_peer(rows)]
        full = [rows for rows in contests if rows[0]["pass"] == BOTH] or contests
        by_shape: dict[tuple[Any, ...], list[list[dict[str, Any]]]] = {}
        for rows in sorted(full, key=lambda rows: _extent(rows[0])):
            by_shape.setdefault(tuple(rows[0]["shape"].items()), []).append(rows)
        problems = [
            min((_bar(rows) for rows in same), key=lambda bar: bar.eager)
            for same in by_shape.values()
        ]
        if problems:
            bars[op] = [*problems[:1], *problems[1:][-1:]]
    return {op: bars[op] for op in [*FIRST, *(op for op in bars if op not in FIRST)] if op in bars}


def _fastest_peer(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a case's fastest peer whose eager calls are made as some of ours."""
    hows = {row["how"] for row in rows if row["ours"]} - {GRAPH}
    peers = [row for row in rows if not row["ours"] and row["how"] in hows]
    return min(peers, key=lambda row: row["ms"], default=None)


def _bar(rows: Sequence[dict[str, Any]]) -> Bar:
    peer = _fastest_peer(rows)
    assert peer is not None
    alike = [row for row in rows if row["ours"] and row["how"] == peer["how"]]
    captured = [row["ms"] for row in rows if row["ours"] and row["how"] == GRAPH]
    fastest = min(row["ms"] for row in rows if not row["ours"])
    graph = fastest / min(captured) if captured else None
    return Bar(min(alike, key=lambda row: row["ms"]), peer, graph)


def _peers(axis: Any, report: dict[str, Any]) -> None:
    """Draw the fastest peers' times over ours, two problems below the name of each op."""
    across = axis.get_yaxis_transform()
    ticks, labels, y = [], [], 0.0
    for op, bars in [*bars_of(report).items()][:MOST]:
        colour = COLOURS[FIRST.index(op) if op in FIRST else len(FIRST)]
        axis.text(-0.01, y, op, transform=across, color=colour, ha="right", va="center")
        for bar in bars:
            y += 1
            # At one, where a bar begins, both are equally fast.
            axis.barh(y, bar.eager - 1, left=1, height=0.6, color=colour)
            axis.plot(bar.ends, [y, y], color=INK, linewidth=0.8)
            if bar.graph:
                style = {"markerfacecolor": "white", "markeredgecolor": colour, "markersize": 5}
                axis.plot(bar.graph, y, "D", **style)
            ratios = f"{bar.eager:.1f}" + (f"  ◇ {bar.graph:.1f}" if bar.graph else "")
            axis.text(1.01, y, ratios, transform=across, va="center", fontsize=8)
            ticks.append(y)
            row = bar.peer
            labels.append(f"{reports.sizes(row)}, {row['dtype']}\nbeside {row['who']}")
        y += 1
    axis.axvline(1, color=INK, linewidth=0.8)
    axis.set_yticks(ticks, labels)
    axis.tick_params(axis="y", labelsize=7.5, length=0)
    axis.set(xscale="log", title=where(report), ylim=(y - 0.4, -0.6))
    axis.set_xlabel(
        "time of the fastest peer over ours\nbars: eager calls; ◇: ours in a CUDA graph"
    )


def _growth(axis: Any, report: dict[str, Any], styles: dict[str, tuple[str, str]]) -> None:
    """Draw times by size, with the exponents."""
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
    axis.set(xscale="log", yscale="log", title=where(report), xlabel="N")
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
