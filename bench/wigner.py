"""Times the edge Wigner operations, forward and backward, beside their peers and their floors.

    python bench/wigner.py [--device cuda] [--json FILE]

Rounds are interleaved in one process and a table of medians is printed, in ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import (
    COPIES,
    bandwidth,
    both,
    graphed,
    interleaved,
    machine,
    print_table,
    save,
    waiting,
)

import fusedops
from fusedops._registry import Call
from fusedops.wigner import edge_wigner, m_major_order, wigner_d

NODES, CHANNELS = 2000, 128


class Graph:
    """Random edges, features and matrices; `wigner` is dense, zero outside of its blocks."""

    def __init__(self, count: int, lmax: int, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.index = torch.randint(
            NODES, (2, count), generator=generator, device=device, dtype=torch.int64
        )
        self.edges = fusedops.Edges(self.index, NODES)
        self.lmax = lmax
        self.rows = (lmax + 1) ** 2
        vectors = torch.randn(count, 3, generator=generator, device=device)
        self.wigner = wigner_d(vectors, lmax)
        self.packed = wigner_d(vectors, lmax, packed=True)
        sizes = (NODES, self.rows, CHANNELS), (count, self.rows, CHANNELS)
        self.x, self.message = (
            torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes
        )

    def floor_ms(self, what: str, rate: float) -> float:
        """Bytes of features and dense matrices, each read or written once."""
        x, matrices = self.x.nbytes, self.wigner.nbytes
        message = self.message.nbytes
        forward, backward = {
            "forth": (2 * message + matrices + x, 2 * message + 2 * matrices + 2 * x),
            "back": (message + matrices + x, 2 * message + 2 * matrices + x),
        }[what.split(",")[0]]
        passes = {"forward": (1, 0), "backward": (0, 1), "both": (1, 1)}[what.split(", ")[1]]
        return (passes[0] * forward + passes[1] * backward) / rate * 1e3


def forth(graph: Graph, **options: Any) -> Callable[..., Any]:
    def run(x: Any, wigner: Any) -> Any:
        return fusedops.node_to_edge_wigner_permute(x, graph.edges, wigner, **options)

    return run


def back(graph: Graph, **options: Any) -> Callable[..., Any]:
    def run(message: Any, wigner: Any) -> Any:
        op = fusedops.permute_wigner_inv_edge_to_node
        return op(message, graph.edges, wigner, transpose=True, **options)

    return run


def forth_in_torch(graph: Graph) -> Callable[..., Any]:
    """A peer: gather, cat and bmm, with the matrices permuted, as in fairchem's general backend."""
    order = torch.as_tensor(m_major_order(graph.lmax), device=graph.x.device)

    def run(x: Any, wigner: Any) -> Any:
        ends = torch.cat([x[graph.index[0]], x[graph.index[1]]], dim=2)
        return torch.bmm(wigner[:, order], ends)

    return run


def back_in_torch(graph: Graph) -> Callable[..., Any]:
    """A peer: bmm and index_add."""
    order = torch.as_tensor(m_major_order(graph.lmax), device=graph.x.device)

    def run(message: Any, wigner: Any) -> Any:
        turned = torch.bmm(wigner[:, order].mT, message)
        return torch.zeros_like(graph.x).index_add_(0, graph.index[1], turned)

    return run


def on_cpu(rate: float) -> list[dict[str, Any]]:
    graph = Graph(60_000, 2, "cpu", torch.float32)
    rows = []
    for way, op, peer, features in (
        ("forth", forth, forth_in_torch, graph.x),
        ("back", back, back_in_torch, graph.message),
    ):
        runs = {
            "fusedops": (op(graph), features, graph.wigner),
            "fusedops, packed": (op(graph), features, graph.packed),
            "fusedops, Numba": (op(graph, backend="numba"), features, graph.wigner),
            "torch eager": (peer(graph), features, graph.wigner),
        }
        forward = {name: partial(*run) for name, run in runs.items()}
        training = {name: both(*run) for name, run in runs.items()}
        rows.append(row(graph, f"{way}, forward", forward, rate))
        rows.append(row(graph, f"{way}, both", training, rate))
    return rows


def on_gpu(rate: float) -> list[dict[str, Any]]:
    rows = []
    sizes = [(2, 60_000), (2, 320_000), (1, 60_000), (4, 30_000)]
    for lmax, count in sizes:
        for dtype in (torch.float32, torch.bfloat16) if lmax == 2 else (torch.float32,):
            graph = Graph(count, lmax, "cuda", dtype)
            x, wigner, message = graph.x, graph.wigner, graph.message
            sent = torch.cat([message, message], dim=2)
            away = Call(edge_wigner, (graph.edges, lmax, "forth", 1.0), None)
            home = Call(edge_wigner, (graph.edges, lmax, "undo", 1.0), None)
            steps = {
                "forth, forward": (away, (None, x, None, wigner), (False, True, False)),
                "forth, backward": (away, (None, x, sent, wigner), (True, False, True)),
                "back, forward": (home, (None, None, message, wigner), (True, False, False)),
                "back, backward": (home, (None, x, message, wigner), (False, True, True)),
            }
            for what, (call, arrays, wanted) in steps.items():
                runs = {"fusedops": graphed(partial(call, arrays, wanted))}
                if what.endswith("forward") and dtype == torch.float32 and lmax == 2:
                    peer = forth_in_torch(graph) if call is away else back_in_torch(graph)
                    features = x if call is away else message
                    runs["torch eager"] = graphed(partial(peer, features, wigner))
                rows.append(row(graph, what, runs, rate))
            torch.cuda.empty_cache()
    return rows


def row(graph: Graph, what: str, runs: dict[str, Callable[[], Any]], rate: float) -> dict[str, Any]:
    device = graph.x.device.type
    times = interleaved(runs, waiting(device))
    if device == "cuda":
        times = {name: time_ms / COPIES for name, time_ms in times.items()}
    times["byte floor"] = graph.floor_ms(what, rate)
    shape = graph.lmax, NODES, graph.edges.num_edges, CHANNELS
    dtype = str(graph.x.dtype).removeprefix("torch.")
    return {"shape": shape, "dtype": dtype, "what": what, "device": device, "ms": times}


def preparations(device: str) -> dict[str, float]:
    """Return the time in ms of sorting 60,000 edges, and of making their matrices."""
    graph = Graph(60_000, 2, device, torch.float32)
    vectors = torch.randn(60_000, 3, device=device)
    runs = {
        "Edges": lambda: fusedops.Edges(graph.index, NODES),
        "wigner_d": lambda: wigner_d(vectors, 2),
        "wigner_d, packed": lambda: wigner_d(vectors, 2, packed=True),
    }
    return interleaved(runs, waiting(device), seconds=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(fusedops.get_num_threads())
    rate = bandwidth(arguments.device)
    rows = on_gpu(rate) if arguments.device == "cuda" else on_cpu(rate)
    where = {**machine(arguments.device), "bandwidth_GB_s": rate / 1e9}
    where["preparations_ms"] = preparations(arguments.device)
    print_table(where, "lmax, N, E, C", rows)
    save(arguments.json, {**where, "rows": rows})


if __name__ == "__main__":
    main()
