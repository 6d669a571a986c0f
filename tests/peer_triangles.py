"""Run folding programs' own tests, with our modules of pair representations in the programs::

    python tests/peer_triangles.py boltz <clone of its repository> [arguments for pytest]

or cuequivariance, openfold, openfold3 or protenix. Nothing of theirs is installed: the clone is
imported, with ours in the places of its modules, and with empty modules for packages that its
layers import but don't need. Each of ours is then compared with the module that it replaces.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import unittest
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fusedops import nn
from fusedops.compat import boltz, cuequivariance, openfold, openfold3, protenix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UPDATES = "TriangleMultiplicationOutgoing", "TriangleMultiplicationIncoming"
FUSED = "FusedTriangleMultiplicationOutgoing", "FusedTriangleMultiplicationIncoming"
ATTENTIONS = "TriangleAttention", "TriangleAttentionStartingNode", "TriangleAttentionEndingNode"
C = 32
#: The arguments of a class that aren't (C, C).
SIZES = {name: (C, 8, 4) for name in ATTENTIONS} | {"PairformerNoSeqLayer": (C, 0.25, 8, 4)}


@dataclass(frozen=True)
class Program:
    """Our modules in a program, by its modules and the names there, and its tests that use them.

    `needless` are packages that its layers import and don't need; `source` is the folder of its
    packages.
    """

    ours: dict[str, dict[str, Any]]
    tests: Sequence[str] = ()
    needless: Sequence[str] = ()
    source: str = ""


def named(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


PROGRAMS = {
    # Blocks come before the parts that they are made of, so that theirs are made of their own.
    "boltz": Program(
        {
            "boltz.model.layers.pairformer": named(boltz, "PairformerNoSeqLayer"),
            "boltz.model.layers.triangular_mult": named(boltz, *UPDATES),
            "boltz.model.layers.triangular_attention.attention": {
                **named(boltz, *ATTENTIONS[1:]),
                "TriangleAttention": nn.TriangleAttention,
            },
            "boltz.model.layers.transition": named(boltz, "Transition"),
        },
        ["tests/model/layers/test_triangle_attention.py"],
        ["pytorch_lightning"],
        "src",
    ),
    "cuequivariance": Program({}),
    "openfold": Program(
        {
            "openfold.model.triangular_multiplicative_update": named(openfold, *UPDATES, *FUSED),
            "openfold.model.triangular_attention": named(openfold, *ATTENTIONS[1:]),
        },
        [
            f"tests/test_{name}.py"
            for name in ("triangular_multiplicative_update", "evoformer", "template")
        ],
        ["Bio", "attn_core_inplace_cuda", "modelcif"],
    ),
    "openfold3": Program(
        {
            "openfold3.core.model.layers.triangular_multiplicative_update": named(
                openfold3, *UPDATES, *FUSED
            ),
        },
        [
            f"openfold3/tests/test_{name}.py"
            for name in (
                "triangular_multiplicative_update",
                "pairformer",
                "evoformer",
                "msa_module",
            )
        ],
        ["biotite", "rdkit"],
    ),
    "protenix": Program(
        {"protenix.model.triangular.triangular": named(protenix, *UPDATES)}, needless=["optree"]
    ),
}


class Anything(type):
    """A class that has every attribute, and decorates without effect."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else None

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Needless:
    """Finds packages of some names, whose modules contain anything."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = ModuleType(spec.name)

        def attribute(name: str) -> Any:
            return getattr(Anything(spec.name, (), {}), name)

        made.__dict__["__getattr__"] = attribute
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


class OnCPU(TorchFunctionMode):
    """Computes on the CPU for `cuda` calls."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {} if kwargs is None else kwargs
        return function(*args, **{**kwargs, "device": DEVICE} if "device" in kwargs else kwargs)


def for_openfold() -> None:
    """Give OpenFold's tests random weights for AlphaFold's, and a CPU where there is no GPU."""
    made = sys.modules["tests.compare_utils"] = ModuleType("tests.compare_utils")
    sizes = 128, 128
    updates = [getattr(openfold, name)(*sizes).to(DEVICE).eval() for name in UPDATES]
    for parameter in (p for update in updates for p in update.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    pair_stack = SimpleNamespace(tri_mul_out=updates[0], tri_mul_in=updates[1])
    evoformer = SimpleNamespace(blocks=[SimpleNamespace(pair_stack=pair_stack)])
    made.__dict__.update(
        alphafold_is_installed=lambda: False,
        get_global_pretrained_openfold=lambda: SimpleNamespace(evoformer=evoformer),
        skip_unless_alphafold_installed=lambda: unittest.skip("needs AlphaFold"),
    )
    if DEVICE == "cpu":
        OnCPU().__enter__()


def for_cuequivariance(clone: Path, folder: str) -> str:
    """Return cuEquivariance's tests of the update, on ours with the weights that it would draw."""

    def update(x: Any, direction: str, mask: Any) -> Any:
        channels = x.shape[-1]

        def draw(rows: int) -> Any:
            return torch.randn(rows, channels, device=x.device) / channels**0.5

        norms = {f"norm_{side}_weight": torch.ones_like(x[0, 0, 0]) for side in ("in", "out")}
        weights = {f"{kind}_in_weight": draw(2 * channels) for kind in "pg"}
        weights |= {f"{kind}_out_weight": draw(channels) for kind in "pg"}
        return cuequivariance.triangle_multiplicative_update(x, direction, mask, **weights, **norms)

    made = sys.modules["cuequivariance_torch"] = ModuleType("cuequivariance_torch")
    made.__dict__["triangle_multiplicative_update"] = update
    source = (clone / "cuequivariance_torch/tests/primitives/triangle_test.py").read_text()
    path = Path(folder) / "test_cuequivariance.py"
    path.write_text(
        source.replace("torch.cuda.is_available()", "True").replace('"cuda"', f'"{DEVICE}"')
    )
    return str(path)


class Comparison:
    """Makes a case of every module that we replaced, and its replacement."""

    def __init__(self, replaced: list[tuple[str, Any, Any]]) -> None:
        self.replaced = replaced

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "theirs" in metafunc.fixturenames:
            metafunc.parametrize(
                "name, theirs, ours", self.replaced, ids=[name for name, *_ in self.replaced]
            )


def both(name: str, theirs: Any, ours: Any) -> tuple[Any, Any, Any, Any]:
    """Return modules with the same random parameters, and z and a mask."""
    torch.manual_seed(1)
    sizes = SIZES.get(name, (C, C) if "boltz" not in theirs.__module__ else (C,))
    made = theirs(*sizes).to(DEVICE), ours(*sizes).to(DEVICE)
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made[1].load_state_dict(made[0].state_dict())
    z = torch.randn(2, 13, 13, C, device=DEVICE)
    return *made, z, (torch.rand(2, 13, 13, device=DEVICE) > 0.2).float()


def run(module: Any, name: str, z: Any, mask: Any, **options: Any) -> Any:
    torch.manual_seed(2)
    return module(z) if name == "Transition" else module(z, mask, **options)


def test_values_and_gradients(name, theirs, ours):
    *made, z, mask = both(name, theirs, ours)
    outs, states = [], []
    for module in made:
        own = z.clone().requires_grad_()
        out = run(module, name, own, mask)
        out.square().sum().backward()
        outs += [(out, own.grad)]
        for parameter in module.parameters():
            parameter.data = parameter.grad
        states += [module.state_dict()]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-4)
    assert set(states[0]) == set(states[1])
    for key, gradient in states[0].items():
        error = (states[1][key] - gradient).norm() / gradient.norm()
        assert error < 1e-4, key


def test_inference(name, theirs, ours):
    """OpenFold and its kin write the update, or the sum, to z, or leave z alone."""
    *made, z, mask = both(name, theirs, ours)
    flags: list[dict[str, Any]] = [{}]
    if issubclass(ours, openfold._Update):
        flags = [{"inplace_safe": True, "_add_with_inplace": add} for add in (False, True)]
    for options in flags:
        found = []
        for module in made:
            given = z.clone()
            with torch.no_grad():
                out = run(module.eval(), name, given, mask, **options)
            found.append((out, given, torch.tensor(out is given)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_rows_without_edges(name, theirs, ours):
    *made, z, mask = both(name, theirs, ours)
    mask[:, 3] = mask[..., 3] = 0
    with torch.no_grad():
        want, got = (run(module.eval(), name, z, mask) for module in made)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_dtypes(name, theirs, ours):
    """Theirs are ours, where theirs take bfloat16 beside parameters in float32."""
    *made, z, mask = both(name, theirs, ours)
    for dtype, autocast in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        found = []
        for module in made:
            with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                try:
                    found.append(run(module.eval(), name, z.to(dtype), mask.to(dtype)).dtype)
                except RuntimeError:
                    found.append(None)
        assert found[0] in (None, found[1]), (dtype, autocast)


def test_the_order_of_parameters(name, theirs, ours):
    """An optimizer's state is by their index. Two layers of OpenFold's are one of ours."""
    made = both(name, theirs, ours)[:2]
    layers = getattr(ours, "_layers", {})
    if any(len(names) > 1 for names in layers.values()):
        pytest.skip("its parameters are fewer")
    found = []
    for parameter, _ in made[1].named_parameters():
        layer, _, part = parameter.rpartition(".")
        found.append(".".join([*layers.get(layer, [layer]), part]))
    assert found == [parameter for parameter, _ in made[0].named_parameters()]


def test_attributes(name, theirs, ours):
    """All that a program may read is there, but the activation of gates, which ours have fused."""
    made = both(name, theirs, ours)[:2]
    fused = {"sigmoid"}
    read = {key for key in vars(made[0]) if not key.startswith("_") and key != "training"}
    read |= {key for key, _ in made[0].named_children()}
    assert {key for key in read - fused if not hasattr(made[1], key)} == set()


def replaced(program: Program) -> list[tuple[str, Any, Any]]:
    """Put ours in the places of a program's modules; return both, by their names."""
    found = []
    for place, own in program.ours.items():
        module = importlib.import_module(place)
        for name, ours in own.items():
            found.append((name, getattr(module, name), ours))
            setattr(module, name, ours)
    return found


if __name__ == "__main__":
    name, given, *arguments = sys.argv[1:]
    clone, program = Path(given).absolute(), PROGRAMS[name]
    sys.path[:0] = [str(clone / program.source), str(clone)]
    sys.meta_path.append(Needless(program.needless))  # type: ignore[arg-type]
    os.environ["LAYERNORM_TYPE"] = "torch"  # Protenix compiles its own otherwise.
    options = ["-q", "-p", "no:cacheprovider", "--disable-warnings", "-c", os.devnull]
    options += ["--rootdir", str(clone)]
    with tempfile.TemporaryDirectory() if name == "cuequivariance" else nullcontext("") as folder:
        if name == "cuequivariance":
            tests = [for_cuequivariance(clone, folder), "-k", "multiplicative"]
        else:
            # Ours first: theirs of Boltz turn gradients off.
            tests = [__file__, *(str(clone / test) for test in program.tests)]
        pairs = replaced(program)
        if name == "openfold":
            for_openfold()
        sys.exit(pytest.main([*options, *tests, *arguments], plugins=[Comparison(pairs)]))
