"""Calls of rotations, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops._pictures import space
from fusedops.harmonics.op import matrix_size, wigner_d
from fusedops.samples import ubiquitin
from fusedops.wigner.op import edge_wigner
from fusedops.wigner.plan import Edges
from fusedops.wigner.rows import function_rows, m_major_order


def _wigner_case(
    name: str,
    lmax: int,
    mmax: int | None = None,
    *,
    nodes: int = 4,
    edges: int = 7,
    channels: int = 3,
    way: str = "forth",
    packed: bool = False,
    own: bool = False,
    base: bool = False,
    scale: float = 1.0,
    scaled: bool = False,
) -> Case:
    """Return all partial derivatives of the form; `own` makes every edge a node of its own."""

    def make() -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
        rng = np.random.default_rng(lmax)
        limit = lmax if mmax is None else mmax
        count, rows, ends = edges if own else nodes, (lmax + 1) ** 2, 2 if way == "forth" else 1
        # The last node has no edge; self-loops and repeated edges occur by chance.
        graph = None if own else Edges(rng.integers(0, max(nodes - 1, 1), (2, edges)), nodes)
        x = rng.normal(size=(count, rows, channels))
        message = rng.normal(size=(edges, len(m_major_order(lmax, limit)), ends * channels))
        wigner = rng.normal(size=(edges, *matrix_size(lmax, packed))) / np.sqrt(2 * lmax + 1)
        functions = function_rows(lmax, limit)
        factors = rng.normal(size=(edges, functions * ends * channels)) if scaled else None
        arrays = rng.normal(size=x.shape) if base else None, x, message, wigner, factors
        return arrays, (graph, limit, way, scale)

    # Sums run over channels, or over the rows of a degree at both ends of a node's edges; factors
    # round terms once more.
    terms = 2 * (1 + scaled) * max(channels, (2 * lmax + 1) * edges // max(nodes - 1, 1))
    return Case(name, edge_wigner, make, terms)


def cases() -> list[Case]:
    found = [
        _wigner_case("uma", 2, nodes=6, edges=20, channels=40),
        _wigner_case("uma-scaled", 2, nodes=6, edges=20, channels=40, packed=True, scaled=True),
        _wigner_case("uma-back", 2, nodes=6, edges=20, channels=40, way="back"),
        _wigner_case("uma-degree", 2, 0, channels=40, way="back", base=True, scale=0.3),
    ]
    for lmax in range(5):
        for mmax in range(lmax + 1):
            for way in ("forth", "back"):
                packed = (lmax + mmax + len(way)) % 2 == 0
                name = f"l{lmax}-m{mmax}-{way}"
                found.append(_wigner_case(name, lmax, mmax, way=way, packed=packed))
    for lmax, edges in ((6, 3), (8, 1)):
        found.append(_wigner_case(f"l{lmax}", lmax, 2, nodes=2, edges=edges, channels=2))
    for packed in (False, True):
        name = f"undo-{'packed' if packed else 'dense'}"
        found.append(_wigner_case(name, 2, 1, way="undo", packed=packed))
    for lmax, mmax in ((1, 0), (2, 1), (3, 2)):
        found.append(_wigner_case(f"l{lmax}-m{mmax}-scaled", lmax, mmax, scale=0.3, scaled=True))
    found.append(_wigner_case("no-edges-scaled", 1, edges=0, scaled=True))
    found.append(_wigner_case("wide", 1, channels=300, packed=True))
    found.append(_wigner_case("wide-back", 1, channels=300, way="back"))
    found.append(_wigner_case("own", 2, 1, way="back", own=True))
    found.append(_wigner_case("no-edges", 1, edges=0, base=True, way="back"))
    found.append(_wigner_case("no-nodes", 1, nodes=0, edges=0))
    found.append(_wigner_case("no-channels", 1, channels=0))
    found.append(_wigner_case("no-channels-back", 1, channels=0, way="back"))
    found.append(_wigner_case("lone-nodes", 1, nodes=40, edges=2, channels=17))
    for way in ("forth", "back"):
        found.append(_wigner_case(f"hub-{way}", 1, nodes=2, edges=70, way=way))
    return found


def rotation(
    rng: Any,
    nodes: int,
    edges: int,
    lmax: int,
    C: int,
    *,
    way: str,
    packed: bool = False,
    transpose: bool = False,
    scaled: bool = False,
    raw: bool = False,
) -> dict[str, Any]:
    """Features of nodes or edges; the last node has no edge."""
    ends = rng.integers(0, nodes - 1, (2, edges))
    rows, mmax = (lmax + 1) ** 2, 0 if way == "degree" else lmax - packed
    shape = (edges, rows, rows)
    matrices = rng.normal(size=shape) / np.sqrt(2 * lmax + 1)
    if packed:
        l = np.floor(np.sqrt(np.arange(rows)))
        matrices = matrices[:, l[:, None] == l]
    shapes = {
        "x": (nodes, rows, C),
        "message": (edges, len(m_major_order(lmax, mmax)), C),
        "radial": (edges, lmax + 1, C),
    }
    names = {"forth": ("x",), "back": ("message",), "own": ("message",), "degree": ("x", "radial")}
    arguments = {name: rng.normal(size=shapes[name]) for name in names[way]}
    if way != "own":
        arguments["edge_index"] = ends if raw else fusedops.Edges(ends, nodes)
    arguments["wigner" if way == "forth" else "wigner_inv"] = matrices
    if scaled:
        functions = function_rows(lmax, mmax)
        arguments["radial"] = rng.normal(size=(edges, 2 * functions * C))
    if way == "degree":
        arguments["rescale_factor"] = 2.5
    else:
        arguments["mmax"] = mmax
    if raw and way == "back":
        arguments["num_nodes"] = nodes
    if transpose:
        arguments["transpose"] = True
    return arguments


def _rotation(name: str, op: Any, *leaves: str, packs: bool = False, **options: Any) -> Example:
    return example(
        name,
        op,
        functools.partial(rotation, **options),
        *leaves,
        tiny=(3, 2, 1, 1),
        small=(6, 7, 2, 3),
        medium=(6, 7, 3, 5),
        large=(91, 500, 2, 19),
        # Channels of both ends, or a degree's rows of a node's edges, twice with factors.
        many=256,
        others=((7, 20, 2, 4), (11, 37, 2, 4), (30, 64, 2, 4)),
        packs=packs,
    )


def examples() -> list[Example]:
    return [
        _rotation(
            "forth", fusedops.node_to_edge_wigner_permute, "x", "wigner", way="forth", packs=True
        ),
        _rotation(
            "forth-packed",
            fusedops.node_to_edge_wigner_permute,
            *("x", "wigner"),
            way="forth",
            packed=True,
        ),
        _rotation(
            "forth-scaled",
            fusedops.node_to_edge_wigner_permute,
            *("x", "wigner", "radial"),
            way="forth",
            packed=True,
            scaled=True,
        ),
        _rotation(
            "back",
            fusedops.permute_wigner_inv_edge_to_node,
            *("message", "wigner_inv"),
            way="back",
            packs=True,
        ),
        _rotation(
            "undo",
            fusedops.permute_wigner_inv_edge_to_node,
            *("message", "wigner_inv"),
            way="back",
            packed=True,
            transpose=True,
        ),
        _rotation("own", fusedops.permute_wigner_inv, "message", "wigner_inv", way="own"),
        _rotation(
            "degree",
            fusedops.edge_degree_scatter,
            *("x", "radial", "wigner_inv"),
            way="degree",
            packed=True,
        ),
    ]


def arguments() -> Arguments:
    edges = {"edge_index": np.zeros((2, 2), np.int64), "num_nodes": 3}
    return {
        fusedops.Edges: edges,
        fusedops.node_to_edge_wigner_permute: {
            "x": np.ones((3, 4, 2)),
            "edge_index": edges["edge_index"],
            "wigner": np.ones((2, 4, 4)),
            "mmax": 1,
            "out": np.ones((2, 4, 4)),
        },
        fusedops.permute_wigner_inv_edge_to_node: {
            "message": np.ones((2, 4, 2)),
            "wigner_inv": np.ones((2, 10)),
            "mmax": 1,
            "transpose": False,
            "out": np.ones((3, 4, 2)),
            **edges,
        },
        fusedops.permute_wigner_inv: {
            "message": np.ones((2, 4, 2)),
            "wigner_inv": np.ones((2, 10)),
            "mmax": 1,
            "transpose": False,
            "out": np.ones((2, 4, 2)),
        },
        fusedops.edge_degree_scatter: {
            "x": np.ones((3, 4, 2)),
            "radial": np.ones((2, 2, 2)),
            "edge_index": edges["edge_index"],
            "wigner_inv": np.ones((2, 4, 4)),
            "rescale_factor": 2.0,
            "transpose": False,
            "out": np.ones((3, 4, 2)),
        },
        m_major_order: {"lmax": 2, "mmax": 1},
    }


def _draw(figure: Any) -> None:
    """Edges rotate a pair force out of their frames; an atom of ubiquitin sums its edges'"""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    structure = ubiquitin()
    xyz = structure.xyz[[44 <= int(label.split()[1]) < 48 for label in structure.labels]]
    lengths = np.linalg.norm(xyz[:, None] - xyz, axis=-1)
    pairs = np.argwhere((lengths > 0) & (lengths < 3))
    edges, graph = xyz[pairs], fusedops.Edges(pairs.T, len(xyz))
    vectors, r = edges[:, 0] - edges[:, 1], lengths[tuple(pairs.T)]
    # Degree 0 is the energy of an edge, and degree 1 a force along it: zero at 2.4 Å.
    radial = np.stack([(r - 2.4) ** 2, 2 * (r - 2.4)], 1)[..., None]
    nothing, D = np.zeros((len(xyz), 4, 1)), wigner_d(vectors, 1, packed=True)
    x = fusedops.edge_degree_scatter(nothing, radial, graph, wigner_inv=D, transpose=True)
    panel = space(figure, np.concatenate([xyz, xyz + x[:, 1:, 0]]))
    for chosen, colour, width in ((r >= 1.9, "0.8", 0.6), (r < 1.9, "0.4", 2)):
        panel.add_collection3d(Line3DCollection(edges[chosen], colors=colour, linewidths=width))
    panel.quiver(*xyz.T, *x[:, 1:, 0].T, color="C1", arrow_length_ratio=0.2)


pictures = {"edge_wigner": _draw}
