"""Restraints of geometry: closed forms, derivatives, TorchRef, degenerate atoms and refusals."""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings

import numpy as np
import pytest

import fusedops
from fusedops import Restraints, geometry_nll
from fusedops.geometry.op import nll_vjp
from fusedops.samples import backbone
from places import SERVE_ARRAYS, available

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@pytest.fixture(params=SERVE_ARRAYS)
def backend(request):
    available("numpy", request.param)
    with fusedops.use_backend(request.param):
        yield request.param


def of(kind, index, **columns):
    return Restraints(**{kind: {"indices": np.array([index]), **columns}})


def bent(degrees, twist=0.0):
    """Return four atoms, with an angle at the second and third, and a torsion, in degrees."""
    a, t = np.deg2rad([degrees, twist])
    x, y = 1.5 * np.cos(a), 1.5 * np.sin(a)
    return np.array([[x, y, 0], [0, 0, 0], [2, 0, 0], [2 - x, y * np.cos(t), y * np.sin(t)]])


def test_closed_forms(backend):
    xyz = bent(110, 50.0)
    log = math.log(0.1) + HALF_LOG_2PI
    bond = of("bonds", [1, 2], ideals=1.8, sigmas=0.1)
    assert geometry_nll(xyz, bond)[0] == pytest.approx(2 + log, abs=1e-5)
    angle = of("angles", [0, 1, 2], ideals=104.0, sigmas=3.0)
    log = math.log(np.deg2rad(3)) + HALF_LOG_2PI
    assert geometry_nll(xyz, angle)[1] == pytest.approx(2 + log)
    kappa = np.deg2rad(10) ** -2
    log = np.log(2 * np.pi * np.i0(kappa))
    for ideal, period in ((40.0, 1), (160.0, 3), (-140.0, 2)):
        torsion = of("torsions", [0, 1, 2, 3], ideals=ideal, sigmas=10.0, periods=period)
        want = log - kappa * np.cos(np.deg2rad(10))
        assert geometry_nll(xyz, torsion)[2] == pytest.approx(want)
    omega = of("torsions", [0, 1, 2, 3], ideals=180.0, sigmas=60.0, opposite=0.05)
    k, c = np.deg2rad(60) ** -2, np.cos(np.deg2rad(130))
    want = np.log(2 * np.pi * np.i0(k) / (0.95 * np.exp(k * c) + 0.05 * np.exp(-k * c)))
    assert geometry_nll(xyz, omega)[2] == pytest.approx(want)
    corner = np.array([[1.0, 1, 1], [3, 1, 1], [1, 2, 1], [1, 1, 2]])
    log = math.log(0.5) + HALF_LOG_2PI
    for ideal, order, z in ((2.5, [1, 2, 3], 1), (2.5, [1, 3, 2], 9), (0.0, [1, 3, 2], 1)):
        centre = of("chirals", [0, *order], ideals=ideal, sigmas=0.5)
        assert geometry_nll(corner, centre)[3] == pytest.approx(z * z / 2 + log)
    shift = np.array([[[0.0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3]]])
    away = {"indices": [[0, 0]], "sigmas": 0.3, "images": 0, "operations": shift, "weights": 0.5}
    for distance in (2.0, 5.0):
        contact = Restraints(contacts={**away, "distances": distance})
        # The image of (1, 1, 1) is (0, 3, 4), √14 Å away.
        overlap = max(0, distance - math.sqrt(14))
        want = 0.5 * (overlap**4 / (4 * 0.3**4) + math.log(0.3) + HALF_LOG_2PI)
        assert geometry_nll(corner, contact)[4] == pytest.approx(want, rel=1e-6)
    pair = of("b_pairs", [2, 0], sigmas=2.0)
    found = geometry_nll(corner, pair, np.array([20.0, 0, 26, 0]))
    assert found[5] == pytest.approx(4.5 + math.log(2) + HALF_LOG_2PI)


def test_atoms_on_a_point_or_a_line_have_no_gradient(backend):
    quad = np.array([[0, 1, 2, 3]])
    restraints = Restraints(
        bonds={"indices": [[0, 1]], "ideals": 0.001, "sigmas": 0.02},
        angles={"indices": quad[:, :3], "ideals": 110.0, "sigmas": 3.0},
        torsions={"indices": quad, "ideals": 60.0, "sigmas": 10.0},
        chirals={"indices": quad, "ideals": 0.0, "sigmas": 0.2},
    )
    for xyz in (np.zeros((4, 3)), np.arange(4)[:, None] * [0.3, 0.1, -0.7]):
        value, pullback = geometry_nll.vjp(xyz, restraints)
        assert np.isfinite(value).all()
        (dxyz,) = pullback(np.array([0.0, 1, 1, 1, 1, 1]))
        np.testing.assert_array_equal(dxyz, 0)
    value, pullback = geometry_nll.vjp(np.zeros((4, 3)), restraints)
    np.testing.assert_array_equal(pullback(np.ones(6))[0], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(backend, bad):
    rng = np.random.default_rng(2)
    xyz, restraints = backbone(8, rng)
    restraints, b = Restraints(**restraints), rng.uniform(5, 50, len(xyz))
    clean, pullback = geometry_nll.vjp(xyz, restraints, b)
    want = pullback(np.ones(6))[0]
    xyz[-1, 1], b[0] = bad, bad
    value, pullback = geometry_nll.vjp(xyz, restraints, b)
    dxyz, db = pullback(np.ones(6))
    # An infinite distance is no contact.
    shows = [0, 1, 3, 5] if bad == np.inf else [0, 1, 3, 4, 5]
    assert not np.isfinite(value[shows]).any()
    assert not np.isfinite(dxyz[-1]).all()
    assert not np.isfinite(db[0])
    # Far along the chain nothing changes.
    np.testing.assert_array_equal(dxyz[:8], want[:8])
    assert np.isfinite(clean).all()


PAIR = {"indices": [[0, 1]], "ideals": 1.0, "sigmas": 1.0}
TORSION = {"indices": [[0, 1, 2, 3]], "ideals": 0.0, "sigmas": 9, "opposite": 1}
CONTACT = {"indices": [[0, 1]], "distances": 3.0, "sigmas": 0.3, "images": 1}
CONTACT |= {"operations": np.zeros((1, 3, 4))}


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("bonds", {"indices": [[0, 1]], "ideals": 1.0}, "bonds has no sigmas"),
        (
            "bonds",
            PAIR | {"indices": [[0, 4]]},
            r"indices'\]\[0, 1\] is 4; it should be from 0 to 3",
        ),
        (
            "bonds",
            PAIR | {"indices": [[2, 2]]},
            r"indices'\]\[0\] is \[2 2\]; it should be of diffe",
        ),
        ("angles", PAIR, r"angles\['indices'\] has shape \(1, 2\); it should be \(n, 3\)"),
        (
            "b_pairs",
            {"indices": [[0, 1]], "sigmas": [0.0]},
            r"sigmas'\]\[0\] is 0.0; it should be po",
        ),
        ("torsions", TORSION, r"opposite'\]\[0\] is 1.0; it should be at least 0, and below 1"),
        ("contacts", CONTACT, r"images'\]\[0\] is 1; it should be from -1 to 0, a place in operat"),
    ],
)
def test_refusals(kind, columns, message):
    with pytest.raises((ValueError, IndexError), match=message):
        Restraints(**{kind: columns}, num_atoms=4)


def test_an_atom_or_b_that_is_lacking():
    with pytest.raises(IndexError, match="restraints has index 3; it should be below 3"):
        geometry_nll(np.zeros((3, 3)), of("bonds", [0, 3], ideals=1.0, sigmas=1.0))
    with pytest.raises(ValueError, match="b is None beside 1 restraints of B"):
        geometry_nll(np.zeros((4, 3)), of("b_pairs", [0, 3], sigmas=1.0))


@pytest.mark.skipif(not importlib.util.find_spec("torchref"), reason="TorchRef is not installed")
@pytest.mark.parametrize("squeeze", [1.0, 0.3])
def test_torchref(squeeze, backend):
    """Values and gradients of every kind, also of a model that is far from its ideals."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    xyz, restraints = backbone(60, rng)
    xyz, b = squeeze * xyz, rng.uniform(5, 50, len(xyz))
    leaves = [torch.tensor(array, requires_grad=True) for array in (xyz, b)]
    with warnings.catch_warnings():
        # It warns of the threads that it takes.
        warnings.simplefilter("ignore")
        peers = importlib.import_module("bench.peers")
        wanted = peers.torchref_terms(leaves[0], restraints)(*leaves)
    value, pullback = geometry_nll.vjp(xyz, Restraints(**restraints), b)
    np.testing.assert_allclose(value, [term.item() for term in wanted], rtol=1e-6)
    dxyz, db = torch.autograd.grad(sum(wanted), leaves)
    got = pullback(np.ones(6))
    np.testing.assert_allclose(got[0], dxyz, rtol=1e-6, atol=1e-6 * abs(dxyz).max())
    np.testing.assert_allclose(got[1], db, rtol=1e-6, atol=1e-9)


def test_an_image_that_is_none_and_missing_b_lead_nowhere(backend):
    """Past the checks of arguments."""
    xyz, columns = backbone(6, np.random.default_rng(0))
    columns["contacts"]["operations"] = np.eye(3, 4)[None]
    columns["contacts"]["images"] = np.zeros(len(columns["contacts"]["indices"]), np.int64)
    good, wild = Restraints(**columns), Restraints(**columns)
    dnlls, b = np.ones(6), np.ones(len(xyz))
    dxyz = nll_vjp(xyz, b, dnlls, good).dxyz
    np.testing.assert_array_equal(nll_vjp(xyz, None, dnlls, good).dxyz, dxyz)
    if backend == "numpy":
        return
    vars(wild)["image"] = wild.image + np.int32(10**8)
    del columns["contacts"]
    want = nll_vjp(xyz, b, dnlls, Restraints(**columns)).dxyz
    np.testing.assert_allclose(nll_vjp(xyz, b, dnlls, wild).dxyz, want, atol=1e-9)
    assert not np.allclose(dxyz, want)
