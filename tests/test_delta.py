"""The gated delta rule's mathematics and arguments, on the reference and the kernels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import contract
import fusedops
import guarded
from contract import same
from fusedops._catalogue import Problem
from fusedops.delta.op import delta_step
from places import FILLING, interpreted, needs_linux

pytestmark = interpreted

(DENSE,) = (example for example in contract.EXAMPLES if example.name == "delta")


def recurrence(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """Return the rule, one token after the other, and the last states."""
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k = (np.repeat(x, HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        starts = getattr(cu_seqlens, "cu_seqlens", cu_seqlens).tolist()
        spans = [(0, *edges) for edges in itertools.pairwise(starts)]
    out, finals = np.empty(v.shape), np.zeros((len(spans), HV, K, V))
    for s, (b, start, end) in enumerate(spans):
        S = finals[s]
        S += 0 if initial_state is None else initial_state[s]
        for t in range(start, end):
            S *= np.exp(g[b, t])[:, None, None]
            u = v[b, t] - np.einsum("hkv,hk->hv", S, k[b, t])
            S += np.einsum("hk,hv,h->hkv", k[b, t], u, beta[b, t])
            out[b, t] = scale * np.einsum("hkv,hk->hv", S, q[b, t])
    return (out, finals) if output_final_state else out


def test_the_formula():
    choices = {"scale": (None, -0.3), "output_final_state": (False, True)}
    contract.compare(fusedops.gated_delta_rule, recurrence, **choices)


def problem(size=(3, 140, 2, 20, 33), dtype="float64"):
    return DENSE.of(size).astype(dtype)


def test_a_prefill_in_chunks_and_decoding_equal_one_call(backend):
    """A decoder goes on from the states of a prefill, by one token at a time or by several."""
    p = problem(dtype="float32")
    tokens = {name: p.arguments[name] for name in ("q", "k", "v", "g", "beta")}
    options = {"scale": 0.5, "backend": backend}
    want, final = fusedops.gated_delta_rule(**p.arguments, backend=backend)
    outs, state = [], p.arguments["initial_state"]
    for low, high in itertools.pairwise([0, 1, 34, 34, 100]):
        some = {name: x[:, low:high] for name, x in tokens.items()}
        out, state = fusedops.gated_delta_rule(
            **some, initial_state=state, output_final_state=True, **options
        )
        outs.append(out)
    for low, high in itertools.pairwise([*range(100, 120), 123, 123, 140]):
        at = low if high == low + 1 else slice(low, high)
        some = {name: x[:, at] for name, x in tokens.items()}
        out = fusedops.gated_delta_rule_step(**some, state=state, **options)
        outs.append(out.reshape(len(out), high - low, *want.shape[2:]))
    for got, expected in ((np.concatenate(outs, 1), want), (state, final)):
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_every_sequence_is_computed_as_if_alone(quick):
    """Sequences may be packed, or each in a call of its own."""
    lengths = [0, 3, 64, 65, 0, 1]
    cu_seqlens = np.cumsum([0, *lengths])
    p = problem((1, cu_seqlens[-1], 2, 5, 9))
    states = np.random.default_rng(1).normal(size=(2, len(lengths), 4, 5, 9))

    def of(arrays, s):
        """Return a sequence's part of the outputs and gradients."""
        tokens = slice(*cu_seqlens[s : s + 2])
        return [x[s : s + 1] if x.ndim == 4 and len(x) > 1 else x[:, tokens] for x in arrays]

    arguments = {**p.arguments, "initial_state": states[0], "cu_seqlens": cu_seqlens}
    cotangents = p.cotangents[0], states[1]
    together = contract.solve(quick, Problem(DENSE, arguments, cotangents))
    for s in range(len(lengths)):
        alone = dict(zip(p.leaves, of([arguments[name] for name in p.leaves], s), strict=True))
        alone |= {"scale": p.arguments["scale"], "output_final_state": True}
        results = contract.solve(quick, Problem(DENSE, alone, tuple(of(cotangents, s))))
        for got, want in zip(of(together, s), results, strict=True):
            contract.agree(p, quick[1], got, want)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gate", [-1e30, -np.inf])
def test_a_gate_may_forget_all(place, gate, dtype):
    """It begins a sequence anew, and the gates beside it count."""
    p = problem((1, 70, 1, 5, 9), dtype)
    g = p.arguments["g"].copy()
    g[:, [0, 13, 40]] = gate
    p = p.but(g=g, initial_state=np.zeros_like(p.arguments["initial_state"]))
    results = contract.solve(place, p)
    for got, want in zip(results, recurrence(**p.arguments), strict=False):
        contract.close(p, got, want.astype(dtype))
    alone = {name: p.arguments[name][:, 13:40] for name in ("q", "k", "v", "g", "beta")}
    dout = p.cotangents[0][:, 13:40], np.zeros_like(p.cotangents[1])
    alone = Problem(DENSE, {**p.arguments, **alone}, dout)
    for got, want in zip(results[2:7], contract.solve(place, alone)[2:7], strict=True):
        contract.close(p, got[:, 13:40], want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 2**-6), ("float16", 2**-10)])
def test_chunks_of_sixteen_bits(dtype, allowed, device):
    """Factors of products are rounded once more, or cut off.

    The interpreter cuts factors off to bfloat16, and tensor cores to tf32, in which float16 is
    multiplied.
    """
    allowed *= 2 if (device == "cpu") == (dtype == "bfloat16") else 1
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    kind = getattr(torch, dtype)
    # Three chunks, of one sequence in the interpreter.
    p = problem((3 if device == "cuda" else 1, 140, 1, 20, 33))
    narrow = {name: torch.tensor(p.arguments[name]).to(device, kind) for name in p.leaves}
    options = {"scale": 0.5, "output_final_state": True}
    results = []
    for backend, given in (("triton", kind), ("torch", torch.float64)):
        leaves = [x.to(given).requires_grad_() for x in narrow.values()]
        outs = fusedops.gated_delta_rule(
            **dict(zip(narrow, leaves, strict=True)), **options, backend=backend
        )
        cotangents = [
            torch.tensor(c).to(out).to(kind).to(out)
            for c, out in zip(p.cotangents, outs, strict=True)
        ]
        results.append([*outs, *torch.autograd.grad(outs, leaves, cotangents)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= allowed * want.norm()


@pytest.mark.parametrize("K", [600, 5000])
def test_states_of_many_keys(place, K):
    """On a GPU they don't fit into the shared memory of a walk in chunks."""
    p = problem((1, 34, 1, K, 2), "float32")
    want = contract.solve(("numpy", "numpy"), p)
    for got, expected in zip(contract.solve(place, p), want, strict=True):
        contract.close(p, got, expected, times=8)


STEP = next(example for example in contract.UPDATES if example.name == "delta-step").problem()
BAD = {
    "v has shape .2, 1, 4, 4.; it should have 3 dimensions": {"v": np.ones((2, 1, 4, 4))},
    "beta has shape .2, 1, 4.; it should have 2 dimensions, since q": {"beta": np.ones((2, 1, 4))},
    "scale is inf; it should be a finite number": {"scale": np.inf},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_leaves_the_state_as_it_was(message):
    given = {**STEP.arguments, "state": np.ones((4, 4, 3, 4)), **BAD[message]}
    with pytest.raises(ValueError, match=f"^gated_delta_rule_step: {message}"):
        fusedops.gated_delta_rule_step(**given)
    assert (given["state"] == 1).all()


def test_bad_arguments_of_the_rule():
    p = problem((2, 3, 2, 4, 5))
    three = {name: p.arguments[name][:, :, :3] for name in ("v", "g", "beta")}
    for message, changes in {
        "v has 3 heads; it should have a multiple of 2, the": three | {"initial_state": None},
        "scale is -inf; it should be a finite number": {"scale": -np.inf},
        "q has shape .2, 3, 2, 4.; with cu_seqlens it should be .1, T": {"cu_seqlens": [0, 3]},
    }.items():
        with pytest.raises(ValueError, match=f"^gated_delta_rule: {message}"):
            fusedops.gated_delta_rule(**{**p.arguments, **changes})


def fill_by_lying_slots(place):
    """A state that isn't there is padding, and no other state changes."""
    N, HV, K, V = states = (2, 2, 3, 5)
    slots = np.array([N, -5, 1, 1 << 40])
    heads = [(1, K), (1, K), (HV, V), (HV,), (HV,)]
    rng = np.random.default_rng(0)
    arrays = [0.4 * rng.normal(size=shape) for shape in [*((4, *h) for h in heads), states]]
    for at_the_end in (True, False):
        outputs = [np.ones((4, HV, V))]
        given, (out,) = guarded.fill(place, delta_step, (*arrays, slots, 0.5), outputs, at_the_end)
        assert not out[[0, 1, 3]].any()
        assert out[2].all()
        same(given.state[0], arrays[5][0])


@needs_linux
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_slots_that_lie_lead_nowhere(place):
    guarded.run(fill_by_lying_slots, place)
