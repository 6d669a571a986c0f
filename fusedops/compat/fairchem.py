"""Edge rotations and layers of fairchem's UMA models.

fairchem looks an execution backend up, by its mode, when it builds a model. `EdgeOps` has a
backend's methods around rotations, and replaces layers when fairchem prepares a model for
inference; `register` joins it to fairchem's own classes, which keep all other methods. Versions
2.16 to 2.24 differ in the arguments of these methods, and all are served. In older ones a backend
can't choose the form of its matrices.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import fusedops._frame.needs_torch

import torch

# Imported now: torch.compile can't import the bridge while it traces a call.
import fusedops._frame.bridge  # noqa: F401
from fusedops._frame.check import flag, one_of
from fusedops._swaps import Swap, log, of, start, stop
from fusedops.compat._edges import edges_of
from fusedops.compat._force_steps import ForceStep, has_force_steps
from fusedops.compat._uma import has_our_parts, replace_layers
from fusedops.so2 import PRECISIONS
from fusedops.wigner import (
    edge_degree_scatter,
    node_to_edge_wigner_permute,
    permute_wigner_inv_edge_to_node,
    wigner_d,
)

__all__ = ["EdgeOps", "ForceStep", "register", "unregister"]

F = TypeVar("F", bound=Callable[..., Any])


def _matrices(wigner: Any) -> Any:
    """Return dense matrices, or packed blocks (E, P) of (E, 1, P) or (E, P, 1)."""
    return wigner.flatten(1) if 1 in wigner.shape[1:] else wigner


def _of_the_way_back(wigner_inv: Any) -> tuple[Any, bool]:
    """Return the matrices, and whether they are to be read transposed, which (E, P, 1) are."""
    return _matrices(wigner_inv), wigner_inv.ndim == 3 and wigner_inv.shape[2] == 1


def _packed(matrices: Any, lmax: int) -> Any:
    """Return the blocks of dense matrices, (E, 1, P)."""
    rows = [slice(l * l, (l + 1) ** 2) for l in range(lmax + 1)]
    return torch.cat([matrices[:, of, of].flatten(1) for of in rows], dim=1).unsqueeze(1)


def _frames(lmax: int, edge_vec: Any) -> tuple[Any, Any]:
    """Return the matrices of edges, packed, (E, 1, P), and (E, P, 1) to be read transposed."""
    matrices = wigner_d(edge_vec, lmax, packed=True)
    return matrices.unsqueeze(1), matrices.unsqueeze(2)


def _fits(edgewise: Any) -> bool:
    """Return whether fairchem's layer calls fused methods, and all of its parts are ours."""
    return (
        # fairchem 2.22 has fused methods too, but others.
        hasattr(_fairchem().UMASFastGPUBackend, "gate_activation")
        # fairchem fuses this degree only, and others are untimed.
        and edgewise.lmax == 2
        and has_our_parts(edgewise)
    )


def _counted(rotate: F) -> F:
    """Return a method of `EdgeOps` that counts calls by models of fairchem."""

    @functools.wraps(rotate)
    def method(self: EdgeOps, *args: Any, **kwargs: Any) -> Any:
        if self.swap is not None:
            self.swap.count()
        return rotate(self, *args, **kwargs)

    return method  # type: ignore[return-value]


class EdgeOps:
    """The methods of a fairchem backend that rotate features into the frames of edges and back.

    They serve any lmax, mmax and number of channels, on CPUs and GPUs, with derivatives of any
    order. A model that fairchem prepares for inference gets our SO(2) convolutions and gates too,
    our products in the networks of radial functions, matrices by `fusedops.wigner_d`, and norms and
    linear layers of fewer operations.
    `register` makes backends of this class and fairchem's own.

    Attributes
    ----------
    mmax : int or None
        The model's largest order, read from its mapping by `prepare_wigner`; None for lmax.
    supports_fused_edgewise : bool
        Whether fairchem (2.23 or newer) may call the fused methods: for lmax = 2, after
        `prepare_model_for_inference`, in modes that compute the radial functions of all layers at
        once.
    precision : str or None
        Of the products in SO(2) convolutions; see `fusedops.so2_convolution`.

    Notes
    -----
    An index tensor is checked and sorted when first met; later layers find its edges again. On the
    CPU its values are compared in every call; on a GPU its version is. Inside ``torch.compile``
    every run of the graph reads the tensor.

    References
    ----------
    fairchem-core, ``fairchem/core/models/uma/nn/execution_backends.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.fairchem import EdgeOps
    >>> x, edge_index = torch.ones(2, 4, 1), torch.tensor([[0], [1]])
    >>> wigner = torch.eye(4)[None]
    >>> EdgeOps().node_to_edge_wigner_permute(x, edge_index, wigner).shape
    torch.Size([1, 4, 2])
    """

    mmax: int | None = None
    supports_fused_edgewise = False
    precision: str | None = None
    #: The backend that fairchem has for the mode.
    theirs: Any
    #: Counts the calls of rotations in the mode.
    swap: Swap | None = None

    def prepare_model_for_inference(self, model: Any) -> None:
        """Let fairchem prepare a model, and replace its matrices of edges and most of its layers.

        Ours share their parameters. Layers with hooks, or whose weights are mixtures of experts,
        stay.

        Parameters
        ----------
        model : torch.nn.Module
            fairchem's backbone.

        Examples
        --------
        fairchem calls it with a model: see `register`.

        >>> from fusedops.compat.fairchem import EdgeOps
        >>> EdgeOps.prepare_model_for_inference.__name__
        'prepare_model_for_inference'
        """
        super().prepare_model_for_inference(model)  # type: ignore[misc]
        # A model merged from experts has another backend than the one that prepares it, and after
        # `unregister` fairchem's own.
        before = model.backend
        backend = before if isinstance(before, EdgeOps) else type(self)()
        for module in model.modules():
            if vars(module).get("backend") is before:
                module.backend = backend
        replace_layers(model, self.precision)
        model._get_rotmat_and_wigner = functools.partial(_frames, model.lmax)
        layers = [getattr(block, "edge_wise", None) for block in getattr(model, "blocks", ())]
        backend.supports_fused_edgewise = bool(layers) and all(map(_fits, layers))

    def prepare_wigner(
        self, wigner: Any, wigner_inv: Any, mappingReduced: Any, coefficient_index: Any
    ) -> tuple[Any, Any]:
        """Return the matrices for the other methods: their blocks, packed, unpermuted.

        Parameters
        ----------
        wigner, wigner_inv : tensor (E, (lmax + 1)², (lmax + 1)²) or (E, Σ(2l + 1)²)
            The matrices of both ways, dense or packed.
        mappingReduced : CoefficientMapping
            The model's lmax and mmax.
        coefficient_index : tensor or None
            Not needed: the ops leave out orders above mmax.

        Returns
        -------
        wigner, wigner_inv : tensor (E, 1, Σ(2l + 1)²), or as given if packed
            fairchem multiplies an envelope (E, 1, 1) into three dimensions, in every version.

        Examples
        --------
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> wigner = torch.eye(9)[None]
        >>> mapping = SimpleNamespace(lmax=2, mmax=2)
        >>> EdgeOps().prepare_wigner(wigner, wigner.mT, mapping, None)[0].shape
        torch.Size([1, 1, 35])
        """
        lmax = mappingReduced.lmax
        mmax = None if mappingReduced.mmax == lmax else mappingReduced.mmax
        # A model has one, and torch.compile traces again after an assignment.
        if mmax != self.mmax:
            self.mmax = mmax
        if wigner.ndim == 2 or wigner.shape[1] == 1:
            return wigner, wigner_inv
        return _packed(wigner, lmax), _packed(wigner_inv, lmax)

    @_counted
    def node_to_edge_wigner_permute(self, x_full: Any, edge_index: Any, wigner: Any) -> Any:
        """Return the features of both ends of every edge in its frame.

        Parameters
        ----------
        x_full : tensor (N, (lmax + 1)², C)
            Features of the nodes, l-major.
        edge_index : tensor (2, E), int64
            Source and target of every edge.
        wigner : tensor
            As `prepare_wigner` returns it, or dense.

        Returns
        -------
        tensor (E, M, 2C)
            See `fusedops.node_to_edge_wigner_permute`.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> x, edge_index = torch.arange(8.0).view(2, 4, 1), torch.tensor([[0], [1]])
        >>> message = EdgeOps().node_to_edge_wigner_permute(x, edge_index, torch.eye(4)[None])
        >>> message[0].tolist()
        [[0.0, 4.0], [2.0, 6.0], [3.0, 7.0], [1.0, 5.0]]
        """
        edges = edges_of(edge_index, x_full.shape[0])
        return node_to_edge_wigner_permute(x_full, edges, _matrices(wigner), mmax=self.mmax)

    @_counted
    def fused_node_to_edge_conv1_pack(
        self, x_full: Any, edge_index: Any, wigner: Any, radial: Any, sphere_channels: int
    ) -> tuple[Any, Any, None]:
        """Return messages for the first convolution, and radial functions that it still needs.

        On a GPU messages are multiplied as they are written; on a CPU the convolution does it.

        Parameters
        ----------
        x_full, edge_index, wigner
            As in `node_to_edge_wigner_permute`.
        radial : tensor (E, Σ (lmax + 1 - m) 2C)
            See `fusedops.so2_convolution`.
        sphere_channels : int
            C; not needed.

        Returns
        -------
        message : tensor (E, M, 2C)
            See `fusedops.node_to_edge_wigner_permute`.
        radial : tensor or None
            As given on a CPU.
        none : None
            fairchem has three arrays.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> x, edge_index = torch.arange(8.0).view(2, 4, 1), torch.tensor([[0], [1]])
        >>> found = EdgeOps().fused_node_to_edge_conv1_pack(
        ...     x, edge_index, torch.eye(4)[None], torch.ones(1, 6), 1
        ... )
        >>> found[0].shape, found[1].shape
        (torch.Size([1, 4, 2]), torch.Size([1, 6]))
        """
        edges = edges_of(edge_index, x_full.shape[0])
        matrices, here = _matrices(wigner), x_full.device.type == "cpu"
        factors = None if here else radial
        message = node_to_edge_wigner_permute(
            x_full, edges, matrices, radial=factors, mmax=self.mmax
        )
        return message, radial if here else None, None

    def gate_activation(
        self, gates: Any, message: Any, none: Any, channels: int, activation: Any
    ) -> tuple[Any, None, None]:
        """Return gated messages, and nothing more.

        Parameters
        ----------
        gates, message : tensor
            As the first convolution returns them.
        none, channels
            Not needed.
        activation : torch.nn.Module
            Ours for fairchem's ``GateActivation``.

        Returns
        -------
        tensor, None, None
            See `fusedops.gate_activation`.

        Examples
        --------
        >>> import torch, fusedops
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> gates, message = torch.zeros(1, 1), torch.ones(1, 4, 1)
        >>> EdgeOps().gate_activation(gates, message, None, 1, fusedops.gate_activation)[0].shape
        torch.Size([1, 4, 1])
        """
        return activation(gates, message), None, None

    def fused_conv2_inv_edge_to_node(
        self,
        message: Any,
        no: Any,
        none: Any,
        wigner_inv_envelope: Any,
        scatter_target: Any,
        num_nodes: int,
        sphere_channels: int,
    ) -> Any:
        """Return messages rotated out of the frames of their edges, summed by target.

        Parameters
        ----------
        message : tensor (E, M, C)
            As the second convolution returns it.
        no, none, sphere_channels
            Not needed.
        wigner_inv_envelope, scatter_target, num_nodes
            As in `permute_wigner_inv_edge_to_node`.

        Returns
        -------
        tensor (N, (lmax + 1)², C)
            See `fusedops.permute_wigner_inv_edge_to_node`.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> message, wigner_inv = torch.ones(2, 4, 1), torch.eye(4).expand(2, 4, 4)
        >>> EdgeOps().fused_conv2_inv_edge_to_node(
        ...     message, None, None, wigner_inv, torch.tensor([1, 1]), 2, 1
        ... )[..., 0].tolist()
        [[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
        """
        return self.permute_wigner_inv_edge_to_node(
            message, wigner_inv_envelope, scatter_target, num_nodes
        )

    @_counted
    def permute_wigner_inv_edge_to_node(
        self,
        x_message: Any,
        wigner_inv: Any,
        scatter_target: Any,
        num_nodes: int,
        node_offset: int = 0,
    ) -> Any:
        """Return messages rotated out of the frames of their edges, summed by target.

        Parameters
        ----------
        x_message : tensor (E, M, C)
            Features of the edges, m-major.
        wigner_inv : tensor
            As `prepare_wigner` returns it, or dense; with an envelope or without.
        scatter_target : tensor (E,) or (2, E), int64
            The target of every edge; before fairchem 2.22, both ends.
        num_nodes : int
            N.
        node_offset : int
            Subtracted from the targets; before fairchem 2.22.

        Returns
        -------
        tensor (N, (lmax + 1)², C)
            See `fusedops.permute_wigner_inv_edge_to_node`.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> message, wigner_inv = torch.ones(2, 4, 1), torch.eye(4).expand(2, 4, 4)
        >>> EdgeOps().permute_wigner_inv_edge_to_node(
        ...     message, wigner_inv, torch.tensor([1, 1]), num_nodes=2
        ... )[..., 0].tolist()
        [[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
        """
        edges = edges_of(scatter_target, num_nodes, node_offset)
        matrices, transpose = _of_the_way_back(wigner_inv)
        return permute_wigner_inv_edge_to_node(
            x_message, edges, matrices, num_nodes, mmax=self.mmax, transpose=transpose
        )

    @_counted
    def edge_degree_scatter(
        self,
        x: Any,
        radial_output: Any,
        wigner_inv: Any,
        scatter_target: Any,
        m_0_num_coefficients: int,
        sphere_channels: int,
        rescale_factor: float,
        node_offset: int = 0,
    ) -> Any:
        """Return node features plus the edge-degree embedding.

        Parameters
        ----------
        x : tensor (N, (lmax + 1)², C)
            Features of the nodes, l-major.
        radial_output : tensor (E, (lmax + 1) C)
            Functions of the edge's length.
        wigner_inv : tensor
            As `prepare_wigner` returns it, or dense; with an envelope or without.
        scatter_target, node_offset
            As in `permute_wigner_inv_edge_to_node`.
        m_0_num_coefficients, sphere_channels : int
            lmax + 1, and C.
        rescale_factor : float
            The divisor of the sums.

        Returns
        -------
        tensor (N, (lmax + 1)², C)
            See `fusedops.edge_degree_scatter`.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fairchem import EdgeOps
        >>> x, radial, target = torch.ones(1, 4, 1), torch.ones(2, 2), torch.tensor([0, 0])
        >>> wigner_inv = torch.eye(4).expand(2, 4, 4)
        >>> EdgeOps().edge_degree_scatter(x, radial, wigner_inv, target, 2, 1, 2.0).flatten()
        tensor([2., 1., 2., 1.])
        """
        radial = radial_output.reshape(-1, m_0_num_coefficients, sphere_channels)
        edges = edges_of(scatter_target, x.shape[0], node_offset)
        matrices, transpose = _of_the_way_back(wigner_inv)
        return edge_degree_scatter(
            x, radial, edges, matrices, rescale_factor=rescale_factor, transpose=transpose
        )


MODULE = "fairchem.core.models.uma.nn.execution_backends"
PREDICTOR = "fairchem.core.units.mlip_unit.predict"
#: For each of fairchem's modes our methods, and the class that has all others. fairchem's class for
#: GPUs demands a GPU and lmax = mmax = 2, as its kernels do.
MODES: dict[str, tuple[type[EdgeOps], str]] = {
    "general": (EdgeOps, "ExecutionBackend"),
    "umas_fast_pytorch": (EdgeOps, "UMASFastPytorchBackend"),
    "umas_fast_gpu": (EdgeOps, "UMASFastPytorchBackend"),
}
PROGRAM = "fairchem-core"
_lock = threading.Lock()


def _fairchem() -> Any:
    """Return fairchem's module of backends."""
    found = None
    try:
        found = importlib.import_module(MODULE)
    except ImportError as error:
        # Another name is a package that fairchem needs; Python's message says so.
        if not (error.name or "").startswith("fairchem"):
            raise
    if hasattr(getattr(found, "ExecutionBackend", None), "prepare_wigner"):
        return found
    try:
        installed = importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    raise ImportError(
        f"fusedops.compat.fairchem: fairchem-core is {installed}; it should be 2.16 or newer, in "
        "which a backend has prepare_wigner (pip install 'fairchem-core>=2.16')",
        name="fairchem",
    )


@functools.cache
def _served(mode: str, theirs: type, precision: str | None) -> type[EdgeOps]:
    """Return our backend for a mode, in the place of one of fairchem's."""
    ours, others = MODES[mode]
    parts = {
        "__doc__": ours.__doc__,
        "__module__": __name__,
        "__reduce__": lambda self: (_backend, (mode, precision), vars(self)),
        "theirs": theirs,
        "precision": precision,
        "swap": of(PROGRAM, mode),
    }
    return type(ours.__name__, (ours, getattr(_fairchem(), others)), parts)


def _backend(mode: str, precision: str | None) -> EdgeOps:
    """Return a new backend, for pickle: registered or not."""
    backends = _fairchem()
    theirs = backends._EXECUTION_BACKENDS[backends.ExecutionMode(mode)]
    return _served(mode, getattr(theirs, "theirs", theirs), precision)()


def register(
    *, turbo: bool | None = None, precision: str | None = None, graphs: bool = False
) -> None:
    """Serve the edge rotations of all UMA models that fairchem builds from now on.

    Call it in every process, before a model is built there. A second call replaces the choices of
    the first; models that exist keep their backends. `fusedops.compat.swaps` counts the rotations
    of each execution mode. A model that fairchem 2.24 runs by Nitro, its default for UMA-S 1.2.1 on
    a GPU, calls no execution backend: fusedops serves nothing of it, and warns by ``logging``.

    Parameters
    ----------
    turbo : bool, optional
        Whether to serve ``umas_fast_gpu`` beside ``general`` and ``umas_fast_pytorch``, for any
        lmax and mmax, and without a GPU too. By default only where torch has no GPU: on one, for
        lmax = mmax = 2, fairchem has kernels for that mode.
    precision : {None, "float32", "ieee", "tf32", "bf16"}
        Of the products in SO(2) convolutions of models that are prepared for inference; see
        `fusedops.so2_convolution`. With ``"tf32"``, messages of `ForceStep` are of float16, too.
    graphs : bool
        Whether fairchem's predictors of UMA, and so its calculator, have their force steps on a GPU
        by `ForceStep`, in the place of Nitro and torch.compile.

    Raises
    ------
    TypeError, ValueError
        If `precision` is none of these, or `turbo` or `graphs` no bool.
    ImportError
        If fairchem-core is not installed, or older than 2.16; or than 2.24 with `graphs`.

    References
    ----------
    fairchem-core, ``fairchem/core/models/uma/nn/execution_backends.py``.

    Examples
    --------
    >>> import fusedops.compat.fairchem as uma
    >>> uma.register()  # doctest: +SKIP
    """
    one_of("register", "precision", precision, PRECISIONS)
    flag("register", "graphs", graphs)
    turbo = not torch.cuda.is_available() if turbo is None else turbo
    flag("register", "turbo", turbo)
    backends = _fairchem()
    table = backends._EXECUTION_BACKENDS
    served = [mode for mode in MODES if turbo or mode != "umas_fast_gpu"]
    stays = "" if turbo else "; umas_fast_gpu, fairchem's choice on a GPU, stays: see turbo"
    predictor = _predictor()
    if graphs and predictor is None:
        raise ImportError(
            "fusedops.compat.fairchem: graphs is True; fairchem-core should be 2.24 or newer then",
            name="fairchem",
        )
    with _lock:
        start(PROGRAM, [mode.value for mode in table if mode.value in served], stays)
        for mode, backend in table.items():
            theirs = getattr(backend, "theirs", backend)
            ours = mode.value in served
            table[mode] = _served(mode.value, theirs, precision) if ours else theirs
        _restore(predictor)
        if predictor:
            load = _declined if graphs else _watched
            predictor._load_nitro_model = load(predictor._load_nitro_model)
        if graphs:
            predictor._lazy_init = _stepped(predictor._lazy_init)


def _predictor() -> Any:
    """Return fairchem's class that may choose Nitro, or None before fairchem 2.24."""
    with contextlib.suppress(ImportError):
        found = importlib.import_module(PREDICTOR).MLIPPredictUnit
        return found if hasattr(found, "_load_nitro_model") else None
    return None


def _watched(load: F) -> F:
    """Return fairchem's method that loads a model of Nitro, with a warning when it has done so."""

    @functools.wraps(load)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # Where Nitro can't serve a model this raises, and fairchem's backends serve it.
        found = load(*args, **kwargs)
        log.warning(
            "fairchem runs a model by Nitro, which calls no execution backend: fusedops serves "
            "nothing of it. For fusedops choose inference_settings='multigpu', and "
            "register(turbo=True)"
        )
        return found

    watched.theirs = load  # type: ignore[attr-defined]
    return watched  # type: ignore[return-value]


def _declined(load: F) -> F:
    """Return fairchem's method that loads a model of Nitro, which a `ForceStep` replaces."""

    @functools.wraps(load)
    def declined(*args: Any, **kwargs: Any) -> Any:
        error = sys.modules[PREDICTOR].UMANitroNotSupportedError
        raise error("fusedops.compat.fairchem.register(graphs=True) has asked for its own graphs")

    declined.theirs = load  # type: ignore[attr-defined]
    return declined  # type: ignore[return-value]


def _stepped(prepare: F) -> F:
    """Return fairchem's method that prepares a predictor, with a `ForceStep` of UMA on a GPU."""

    @functools.wraps(prepare)
    def prepared(self: Any, data: Any) -> None:
        # Others keep torch.compile.
        if torch.device(self.device).type != "cuda" or not has_force_steps(self.model):
            prepare(self, data)
            return
        compiles, self.inference_settings.compile = self.inference_settings.compile, False
        try:
            prepare(self, data)
        finally:
            self.inference_settings.compile = compiles
        self.model = ForceStep(self.model)

    prepared.theirs = prepare  # type: ignore[attr-defined]
    return prepared  # type: ignore[return-value]


def _restore(predictor: Any) -> None:
    """Give fairchem's predictor its own methods."""
    for name in ("_load_nitro_model", "_lazy_init"):
        if theirs := getattr(getattr(predictor, name, None), "theirs", None):
            setattr(predictor, name, theirs)


def unregister() -> None:
    """Give every execution mode the backend that it had before `register`.

    Models that exist keep their backends. Without `register` before, nothing changes.

    Examples
    --------
    >>> import fusedops.compat.fairchem as uma
    >>> uma.unregister()
    """
    stop(PROGRAM)
    backends = sys.modules.get(MODULE)
    if backends is None:
        return
    table = backends._EXECUTION_BACKENDS
    predictor: Any = getattr(sys.modules.get(PREDICTOR), "MLIPPredictUnit", None)
    with _lock:
        for mode, ours in table.items():
            if issubclass(ours, EdgeOps):
                table[mode] = ours.theirs
        _restore(predictor)
