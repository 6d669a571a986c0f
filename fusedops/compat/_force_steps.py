"""Force steps of fairchem's UMA models by CUDA graphs: a replay finds edges, energy and forces.

fairchem finds the pairs of atoms up to the cutoff and a skin; in every step a graph takes the edges
from them, until two atoms may have come nearer by the skin (Verlet, Phys. Rev. 159 (1967) 98). A
step is three graphs: the edges, the model, and, beside it, numbers that tell whether the results
are the model's. The GPU runs one while the host launches the next.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from fusedops._frame.arrays import allows_tf32
from fusedops._frame.bridge.modes import transforms
from fusedops._frame.check import positive, refuse, traced, warn
from fusedops._kept import Kept, keeping
from fusedops._layers import has_hooks
from fusedops.compat._edges import targets_of
from fusedops.compat._graphs import captured, compile_ahead
from fusedops.compat._pairs import Pairs, inside, vectors
from fusedops.compat._uma import divides_atoms, has_halves, has_splits

#: The names in fairchem's data of what depends on edges.
EDGES = frozenset(("edge_index", "cell_offsets", "nedges", "scatter_target"))
#: The names of what pairs of atoms follow from, beside positions and cells.
SYSTEMS = "pbc", "batch", "natoms"

#: More neighbours than an atom has.
_ALL = 1 << 20
#: Å. Closer atoms may have no edge: fairchem's versions of graphs differ.
_CLOSE = 0.01
#: Å. Atoms are moved by up to this along each axis before pairs are found.
_APART = 0.05


class ForceStep(torch.nn.Module):
    """A model of fairchem's (2.17 or newer) whose force steps are replayed as CUDA graphs.

    The second of two calls with as many atoms and systems captures a graph, which later calls
    replay; atoms, elements, cells, charges and spins may change between. A replay takes the time of
    the GPU's kernels alone. It gives the model's results, without gradients, and is served where
    the model would give forces without gradients too: for tensors on a GPU, in evaluation, with
    frozen weights, without Hessians and activation checkpointing, and with experts and heads of
    several datasets merged. All else, such as an atom with more neighbours than fairchem keeps, or
    within 0.01 Å of another, is served by the model itself.

    Parameters
    ----------
    model : torch.nn.Module
        A function of fairchem's ``AtomicData`` with one ``eSCNMDBackbone``, prepared for inference.
    skin : float
        Å. With more, pairs are found less often, and more of them are looked at in every step.

    Attributes
    ----------
    module : torch.nn.Module
        The model's own ``module``, which fairchem's predictor asks for tasks.

    Raises
    ------
    TypeError, ValueError
        If `model` has no such backbone, or fairchem 2.16's, or `skin` is not a positive number.

    Notes
    -----
    Periodic atoms may lie outside of the cell; fairchem's own graphs miss edges of atoms far away
    from it.
    Pairs are found anew once twice the farthest move of an atom, besides the cell's strain, and the
    strain times the cutoff add up to more than the skin; and when periodicity or systems change. A
    graph keeps the memory of a step, and of the weights that it reads, with copies of them. After
    changes of weights, layers, or the backbone's attributes, the step is captured anew. A capture
    that fails, as where a model waits for the GPU, leaves the steps to the model, with a warning.
    Forward hooks of the model's layers run in no replay. A model without hooks is evaluated once
    more in the first call, and before each capture, to compile all new kernels side by side.

    Where the products of SO(2) convolutions may be TF32's, messages of float32 models in fast modes
    (lmax = 2, fairchem 2.23 or newer) are arrays of float16: TF32 and float16 keep 11 binary digits
    of a number. Cotangents are scaled. A step with numbers beyond float16's range is the model's;
    features below 6e-8 are zeros.

    Examples
    --------
    >>> from fusedops.compat.fairchem import ForceStep
    >>> step = ForceStep(model)  # doctest: +SKIP
    >>> forces = step(data)["forces"]  # doctest: +SKIP
    """

    def __init__(self, model: torch.nn.Module, *, skin: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.skin = positive("ForceStep", "skin", skin)
        backbones = _backbones(model.modules())
        if len(backbones) != 1:
            was = f"has {len(backbones)} backbones of the class eSCNMDBackbone"
            refuse(TypeError, "ForceStep", "model", was, "have one")
        if not hasattr(backbones[0], "regress_config"):
            refuse(TypeError, "ForceStep", "model", "is fairchem 2.16's", "be of 2.17 or newer")
        self._seen: Any = None
        self._captured: _Captured | None = None
        self._fails = False
        self._is_new = True
        # Calls of several threads would write to the same arrays.
        self._lock = threading.RLock()
        self.train(model.training)

    def __getstate__(self) -> dict[str, Any]:
        # No copy of a graph or a lock can be made.
        return {**vars(self), "_seen": None, "_captured": None, "_lock": None, "_is_new": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_lock": threading.RLock()})

    @property
    def module(self) -> Any:
        """The model's own ``module``, which fairchem's predictor asks for tasks."""
        return self.model.module

    def forward(self, data: Any) -> Any:
        """Return what the model returns, without gradients where a graph is replayed.

        Parameters
        ----------
        data : AtomicData
            fairchem's description of one or several systems; it stays as it is in a replay.

        Returns
        -------
        dict, tuple, list or tensor
            Copies of the model's results: energies, forces, and stress if the model has it.

        Examples
        --------
        >>> step(data)["energy"]  # doctest: +SKIP
        """
        with self._lock:
            form = self._form(data)
            begun = self._begin(data) if self._seen and form == self._seen[0] else None
            weights = None if form is None else self._weights()
            kind = None if weights is None else (form, weights)
            if kind is None or kind != self._seen:
                self._seen, self._captured, self._fails = kind, None, False
                if kind is not None and self._is_new:
                    self._is_new = False
                    _compile(self.model, lambda: self.model(copied(data)), data)
            elif not self._fails and (found := self._step(data, begun)):
                return found.outputs
            return self.model(data)

    def _begin(self, data: Any) -> Any:
        """Launch a step, and return its results, which are of no use if the weights have changed.

        The GPU works while the host looks at them. A graph has kept the memory that it reads.
        """
        # An error leaves no graph with half of the inputs.
        graph, self._captured = self._captured, None
        begun = None if graph is None else graph.begin(data)
        self._captured = graph
        return begun

    def _step(self, data: Any, begun: Any) -> _Found | None:
        """Return the results of a step, or None where they aren't the model's."""
        graph, self._captured = self._captured, None
        found = None if graph is None or begun is None else graph.finish(data, begun)
        if found is None:
            # Its memory serves the next one.
            graph = None
            try:
                graph = _Captured(self.model, data, self.skin)
            except Exception as error:
                self._fails = True
                warn(f"ForceStep: such steps are the model's own: capturing failed: {error!r}")
                return None
            found = graph.finish(data, graph.begin(data))
        self._captured = graph
        # A new graph has room.
        assert found is not None
        return found if found.serves else None

    def _form(self, data: Any) -> Any:
        """Return all that a graph of data depends on but values, or None where none serves."""
        given, pos = _inputs(data), data["pos"]
        if (
            traced()
            or transforms()
            or not _is_on_gpu(pos)
            or any([x.device != pos.device for _, x in given])
            # A caller may want gradients that go on from here.
            or any([x.grad_fn is not None for _, x in given])
            or divides_atoms()
        ):
            return None
        return (
            [(name, x.shape, x.dtype, x.device) for name, x in given],
            list(data["dataset"]) if "dataset" in data else None,
            # Replays, and copies of their results, are in the order of one stream.
            torch.cuda.current_stream(pos.device).cuda_stream if pos.is_cuda else None,
            allows_tf32(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )

    def _weights(self) -> Any:
        """Return all of the model that a graph depends on, or None where no graph serves."""
        modules = list(self.modules())
        backbones, tensors = _backbones(modules), _tensors(modules)
        if (
            any([m.training for m in modules])
            or not _have_force_steps(backbones)
            or any([x.requires_grad for x in tensors])
            or any(map(_divides, modules))
        ):
            return None
        settings = {**vars(backbones[0]), **vars(backbones[0].regress_config)}
        return (
            # Activations have no tensors. This object itself would be kept alive.
            modules[1:],
            [(x.data_ptr(), x._version) for x in tensors],
            {name: x for name, x in settings.items() if isinstance(x, (int, float, str))},
            [vars(m).get("precision") for m in modules],
        )


def has_force_steps(model: Any) -> bool:
    """Return whether a model is UMA with forces that are gradients, and no Hessian."""
    return _have_force_steps(_backbones(model.modules()))


def _have_force_steps(backbones: list[Any]) -> bool:
    asked = [backbone.regress_config for backbone in backbones]
    if len(asked) != 1 or asked[0].direct_forces or asked[0].hessian:
        return False
    return bool(asked[0].forces or asked[0].stress)


def _divides(module: Any) -> bool:
    """Return whether a module divides edges or atoms by numbers of the host.

    Experts do, checkpoints, and heads of several datasets that aren't merged for one.
    """
    own = vars(module)
    return (
        type(module).__name__.startswith("MOLE")
        or own.get("activation_checkpoint_chunk_size") is not None
        or own.get("merged_on_dataset", "") is None
    )


def _backbones(modules: Iterable[Any]) -> list[Any]:
    names = [(m, [of.__name__ for of in type(m).__mro__]) for m in modules]
    return [m for m, classes in names if "eSCNMDBackbone" in classes]


def _tensors(modules: Iterable[Any]) -> list[Any]:
    """Return the modules' parameters and buffers."""
    # The GPU waits, and torch's lists of them take three times as long.
    held = [of for m in modules for of in (m._parameters, m._buffers)]
    return [x for of in held for x in of.values() if x is not None]


def _is_on_gpu(tensor: Any) -> bool:
    return bool(tensor.is_cuda) and not torch.cuda.is_current_stream_capturing()


def _compile(model: Any, compute: Any, data: Any) -> None:
    """Compile the kernels of a model's step, unless hooks would see numbers that no kernel made."""
    if not (_has_any_global_hook() or any(map(has_hooks, model.modules()))):
        compile_ahead(compute, data["pos"].device)


def _inputs(data: Any) -> list[tuple[str, Any]]:
    """Return the tensors that a graph reads, by name."""
    given = [(name, data[name]) for name in sorted(data.keys()) if name not in EDGES]
    return [(name, x) for name, x in given if isinstance(x, torch.Tensor)]


def copied(data: Any) -> Any:
    """Return data to write to, with the same tensors; fairchem's own copy waits for the GPU."""
    found = copy.copy(data)
    if not isinstance(data, dict):
        vars(found)["__keys__"] = set(data.keys())
    return found


class _Found(NamedTuple):
    """The results of a step, and whether they are the model's."""

    outputs: Any
    serves: bool


class _Captured:
    """Graphs of a model's step, for data of one kind, and the arrays that they read and write."""

    def __init__(self, model: Any, data: Any, skin: float) -> None:
        self.model, self.skin = model, skin
        modules = list(model.modules())
        (self.backbone,) = _backbones(modules)
        self.data = copied(data)
        for name, x in _inputs(data):
            self.data[name] = x.detach().clone()
        pos = self.data["pos"]
        # Where the pairs were found.
        self.origin = {name: self.data[name].clone() for name in ("pos", "cell", *SYSTEMS)}
        pairs, offsets = self._pairs(data)
        cutoff = self.backbone.cutoff
        squares = vectors(*_atoms(self.data), pairs, offsets).square().sum(1)
        self.pairs = Pairs(pos, pairs, int(inside(squares, cutoff).sum()), cutoff)
        self._keep(data, pairs, offsets)
        kinds = has_halves(self.backbone), has_splits(self.backbone)
        # Kernels of float64 have neither.
        kinds = kinds if pos.dtype == torch.float32 else (False, False)
        keeper = functools.partial(Kept, _tensors(modules), pos.device, *kinds)
        self.kept = keeper()
        #: The stream of `_look`, which runs beside the model.
        self.aside = torch.cuda.Stream(pos.device) if pos.is_cuda else None
        self.edges: Any = None
        self.outputs: Any = None
        self.sums: Any = None
        self.report: Any = None
        self.runs = [self._graph(self._choose)]
        # The others are evaluated before they are captured, and need edges.
        self.runs[0].replay()
        _compile(model, self._evaluate, data)
        # Forms of that evaluation hold nothing: kernels weren't launched.
        self.kept = keeper()
        self.runs += [self._graph(self._evaluate), self._graph(self._look)]

    def _graph(self, compute: Any) -> Any:
        return captured(compute, self.data["pos"].device, shares=False, before=1)[0]

    def _embedded(self, datasets: list[str]) -> Any:
        """Return the datasets' embedding, which fairchem looks up by a number of the host."""
        embedding = self.backbone.dataset_embedding
        named = [embedding.dataset_mapping[dataset] for dataset in datasets]
        return torch.stack([embedding.dataset_emb_dict[name].weight[0] for name in named])

    def _pairs(self, data: Any) -> tuple[Any, Any]:
        """Return the pairs of atoms up to cutoff and skin, or the edges that are given."""
        backbone = self.backbone
        if not backbone.otf_graph:
            return data["edge_index"], data["cell_offsets"].to(data["pos"])
        wide = backbone.cutoff + self.skin + 2 * _APART
        pos, cell, batch = (x.detach() for x in _atoms(data))
        # fairchem misses edges of atoms that lie far outside of the cell.
        inside_cell = (pos[:, :, None] * _inverse(cell).index_select(0, batch)).sum(1)
        pbc = data["pbc"].reshape(-1, 3).index_select(0, batch)
        cells = torch.where(pbc, inside_cell.floor(), 0.0)
        pos = pos - (cells[:, :, None] * cell.index_select(0, batch)).sum(1)
        # It leaves out atoms that lie on each other, which may part within the skin.
        numbers = torch.Generator(pos.device).manual_seed(0)
        moves = torch.rand(pos.shape, generator=numbers, dtype=pos.dtype, device=pos.device)
        parted = copied(data)
        parted["pos"] = pos + _APART * moves
        with torch.no_grad(), _replaced(backbone, cutoff=wide, max_neighbors=_ALL):
            found = backbone._generate_graph(parted)
        offsets = found["cell_offsets"]
        # Edges that fairchem adds, to none or to fill a chunk, come first and have no offset.
        added = found["edge_index"].shape[1] - len(offsets)
        pairs = found["edge_index"][:, added:]
        of_source, of_target = (cells.index_select(0, end) for end in pairs)
        return pairs, offsets.to(pos) - of_source + of_target

    def _keep(self, data: Any, pairs: Any, offsets: Any) -> bool:
        """Take pairs, if there is room for them."""
        if not self.pairs.keep(pairs, offsets):
            return False
        if self.backbone.otf_graph:
            for name, x in self.origin.items():
                x.copy_(data[name].detach())
        return True

    def _read(self, data: Any) -> None:
        """Copy data into the graphs' arrays, all of one dtype at once."""
        by_dtype: dict[Any, list[tuple[Any, Any]]] = {}
        for name, x in _inputs(data):
            by_dtype.setdefault(x.dtype, []).append((self.data[name], x))
        for copies in by_dtype.values():
            to, given = zip(*copies, strict=True)
            torch._foreach_copy_(to, given)

    def begin(self, data: Any) -> Any:
        """Launch a step, and return copies of its results, or None if there is no room for it."""
        with torch.no_grad():
            self._read(data)
            # Edges that are given hold for one step.
            if not self.backbone.otf_graph and not self._keep(data, *self._pairs(data)):
                return None
            return self._launched()

    def finish(self, data: Any, outputs: Any) -> _Found | None:
        """Return the results of a step that has begun, or None if there was no room for it."""
        given = not self.backbone.otf_graph
        changed, edges, most, nearer, other, close, *sums = self._numbers()
        # A distance may be NaN.
        moved = not given and (other or not nearer <= self.skin)
        if moved or changed:
            with torch.no_grad():
                if changed:
                    self.kept.renew()
                if moved and not self._keep(data, *self._pairs(data)):
                    return None
                outputs = self._launched()
            _, edges, most, _, _, close, *sums = self._numbers()
        if edges > self.pairs.space:
            return None
        serves = given or (most <= self.backbone.max_neighbors and not close)
        return _Found(outputs, serves and all(map(math.isfinite, sums)))

    def _launched(self) -> Any:
        """Launch a replay, and return copies of its results."""
        choose, evaluate, look = self.runs
        choose.replay()
        if self.aside is None:
            evaluate.replay()
            look.replay()
        else:
            here: Any = torch.cuda.current_stream(self.aside.device)
            chosen = here.record_event()
            evaluate.replay()
            self.aside.wait_event(chosen)
            with torch.cuda.stream(self.aside):
                look.replay()
            here.wait_stream(self.aside)
        return tree_map_only(torch.Tensor, torch.clone, self.outputs)

    def _numbers(self) -> list[float]:
        """Return numbers of `_look`, and sums of the results."""
        found: list[float] = torch.cat([self.report, self.sums]).tolist()
        return found

    def _evaluate(self) -> None:
        """Evaluate the model on the arrays."""
        data = copied(self.data)
        for name, x in _inputs(data):
            data[name] = x.detach()
        data["batch"] = data["batch"].as_subclass(_OnGPU)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(self.backbone, _generate_graph=self._edges))
            if self.backbone.use_dataset_embedding:
                looked_up = _replaced(self.backbone.dataset_embedding, forward=self._embedded)
                stack.enter_context(looked_up)
            stack.enter_context(keeping(self.kept))
            self.outputs = tree_map_only(torch.Tensor, torch.detach, self.model(data))
        self.sums = self.data["pos"].new_zeros(0, dtype=torch.float64)
        if self.kept.halves:
            # They tell of a number beyond float16's range, and the model serves the step.
            found = _of_dataset(self.model, self.outputs)
            self.sums = torch.stack([x.sum().double() for x in found])

    def _look(self) -> None:
        """Find the numbers that tell whether weights are as before, and pairs and places enough."""
        with torch.no_grad():
            edges = self.edges
            others = [(self.data[name] != self.origin[name]).any() for name in SYSTEMS]
            numbers = (
                self.kept.changed().to(edges.total),
                edges.total,
                edges.degrees.max(),
                self._nearer(*_atoms(self.data)),
                torch.stack(others).any(),
                (self.pairs.are_pairs[1:] & (edges.squares <= _CLOSE**2)).any(),
            )
            self.report = torch.stack([number.double() for number in numbers])

    def _nearer(self, pos: Any, cell: Any, batch: Any) -> Any:
        """Return an upper bound of how much nearer two atoms within the cutoff may have come, Å.

        With M the matrix that takes the cell to what it was, a vector r was r M, but for moves of
        the atoms at its ends; and |r M| is at most (1 + |M - 1|) |r|.
        """
        before, one = self.origin["cell"], torch.eye(3, dtype=cell.dtype, device=cell.device)
        # Sums of products, as TF32 would round products of matrices.
        back = (_inverse(cell)[..., None] * before[:, None]).sum(2)
        # A molecule may have a cell without a volume.
        same = (cell == before).flatten(1).all(1)
        back = torch.where(same[:, None, None], one, back)
        strain = (back - one).flatten(1).norm(dim=1).max()
        moved = (pos[:, :, None] * back.index_select(0, batch)).sum(1) - self.origin["pos"]
        return 2 * moved.norm(dim=1).max() + self.backbone.cutoff * strain

    def _choose(self) -> None:
        """Find the edges among the pairs."""
        with torch.no_grad():
            self.edges = self.pairs.choose(*_atoms(self.data))

    def _edges(self, data: Any) -> dict[str, Any]:
        """Return fairchem's description of the edges."""
        edges = self.edges
        index = torch.stack(edges.lists[:2])
        data["scatter_target"] = targets_of(index, edges.lists)
        # fairchem before 2.22 subtracts it from targets.
        data["gp_node_offset"] = 0
        found = vectors(*_atoms(data), index, edges.offsets) + edges.far
        return {
            "edge_index": index,
            "edge_distance": torch.linalg.norm(found, dim=-1),
            "edge_distance_vec": found,
        }


class _OnGPU(torch.Tensor):
    """A tensor that has no copy on the host.

    fairchem's heads for several datasets copy `batch` to the host, and drop the copy where they are
    merged.
    """

    # As of parameters: results of operations are plain tensors.
    __torch_function__: Any = torch.nn.Parameter.__torch_function__

    def cpu(self, *_: Any, **__: Any) -> Any:
        """Return the tensor."""
        return self


def _of_dataset(model: Any, outputs: Any) -> list[Any]:
    """Return results' numbers, but for other datasets', which a merged head fills with NaN."""
    merged = [vars(m) for m in model.modules() if vars(m).get("merged_on_dataset")]
    is_other = {name: name != m["merged_on_dataset"] for m in merged for name in m["dataset_names"]}

    def is_others(key: Any) -> bool:
        names = [name for name in is_other if str(key).startswith(f"{name}_")]
        # A name may begin with another one.
        return bool(names) and is_other[max(names, key=len)]

    return [
        x
        for path, x in tree_flatten_with_path(outputs)[0]
        if isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and not any(is_others(getattr(step, "key", "")) for step in path)
    ]


def _inverse(cell: Any) -> Any:
    """Return inverse matrices (n, 3, 3); torch's own would look for singular ones on the host."""
    a, b, c = cell.unbind(1)
    columns = [torch.linalg.cross(*pair) for pair in ((b, c), (c, a), (a, b))]
    volume = (a * columns[0]).sum(1)
    return torch.stack(columns, 2) / volume[:, None, None]


def _atoms(data: Any) -> tuple[Any, Any, Any]:
    return data["pos"], data["cell"], data["batch"]


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes of its own in a ``with`` block."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(before)
