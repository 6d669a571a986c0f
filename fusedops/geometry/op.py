"""Restraints of geometry: the definition of values, gradient and second derivatives, and the op."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedops._frame.arrays import ArrayT, cast, double, int64, namespace
from fusedops._frame.check import accumulator, device_of, refuse, same_device
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.geometry.plan import B_PAIRS, CONTACTS, KINDS, Restraints
from fusedops.planarity.op import scattered

#: Å² that are added to squared lengths of bonds and contacts, so that atoms on one point have
#: derivatives: zero gradients.
BOND_EPS, CONTACT_EPS = 1e-6, 1e-8
#: Å below which an arm has no direction: its angle counts as 90°, without gradient. A torsion has
#: none where the product of its normals' lengths, Å⁴, is smaller: it counts as 0°.
SHORTEST = 1e-6
#: The cosine beyond which an angle counts as this cosine's, without gradient.
STRAIGHT = 1 - 1e-6
#: Å³, the volume of a centre of either hand; and the share of its box below which it has no hand.
EITHER_HAND, NO_HAND = 2.5, 1e-6

# Each function below returns, for n restraints of a kind on atoms x (n, k, 3): f (n,), the terms
# with coordinates of the negative log-likelihood; its first and second derivatives by a coordinate
# q, such as an angle; and the gradient of q (n, k, 3). With tangents v (n, k, 3) of x, the
# derivative of that gradient along v comes last.


def _dot(a: Any, b: Any) -> Any:
    return (a * b).sum(-1)[..., None]


def _cross(a: Any, b: Any) -> Any:
    return namespace(a).stack(
        [a[..., i - 2] * b[..., i - 1] - a[..., i - 1] * b[..., i - 2] for i in range(3)], -1
    )


def _distance(r: Any, w: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return lengths of vectors r, directions, and the derivative of directions along w."""
    xp = namespace(r)
    d = xp.sqrt(_dot(r, r) + eps)
    u = r / d
    turn = None if w is None else (w - u * _dot(u, w)) / d
    return d[..., 0], u, turn


def _ends(u: Any) -> Any:
    return None if u is None else namespace(u).stack([-u, u], 1)


def _bonds(x: Any, v: Any, p: Any) -> tuple[Any, ...]:
    w = None if v is None else v[:, 1] - v[:, 0]
    d, u, turn = _distance(x[:, 1] - x[:, 0], w, BOND_EPS)
    z = d - p.ideal
    return 0.5 * p.weight * z * z, p.weight * z, p.weight, _ends(u), _ends(turn)


def _angles(x: Any, v: Any, p: Any) -> tuple[Any, ...]:
    xp = namespace(x)
    arms = x[:, ::2] - x[:, 1:2]
    squares = _dot(arms, arms)
    short = (squares < SHORTEST**2).any(1)[:, None]
    length = xp.sqrt(xp.where(short, 1.0, squares))
    arms = xp.where(short, 0.0, arms) / length
    others = arms[:, [1, 0]]
    c = _dot(arms, others)
    flat = (short | (abs(c) > STRAIGHT))[:, 0, 0]
    cosine = c[:, 0, 0].clip(-STRAIGHT, STRAIGHT)
    square = 1 - cosine * cosine
    sine = xp.sqrt(square)
    z = xp.arccos(cosine) - p.ideal
    f1 = -p.weight * z / sine
    f2 = p.weight * (1 - z * cosine / sine) / square
    G = (others - c * arms) / length
    turn = None
    if v is not None:
        w = (v[:, ::2] - v[:, 1:2]) / length
        along = _dot(arms, w)
        w = w - arms * along
        w_others = w[:, [1, 0]]
        dc = _dot(w, others).sum(1)[:, None]
        turn = (w_others - dc * arms - c * w) / length - G * along
    f1, f2 = (xp.where(flat, 0.0, f) for f in (f1, f2))
    return 0.5 * p.weight * z * z, f1, f2, _with_vertex(G), _with_vertex(turn)


def _with_vertex(G: Any) -> Any:
    if G is None:
        return None
    return namespace(G).stack([G[:, 0], -G[:, 0] - G[:, 1], G[:, 1]], 1)


def _torsions(x: Any, v: Any, p: Any) -> tuple[Any, ...]:
    xp = namespace(x)
    one, two, three = (x[:, i + 1] - x[:, i] for i in range(3))
    m, n = _cross(one, two), _cross(two, three)
    mm, nn, bb = _dot(m, m), _dot(n, n), _dot(two, two)
    flat = mm * nn < SHORTEST**2
    mm, nn, bb = (xp.where(flat, 1.0, square) for square in (mm, nn, bb))
    b = xp.sqrt(bb)
    sine = xp.where(flat, 0.0, b * _dot(one, n))
    cosine = xp.where(flat, 1.0, _dot(m, n))
    flat = flat[:, 0]
    turns = 2 * np.pi / p.period
    z = xp.arctan2(sine, cosine)[:, 0] - p.ideal
    z = z - turns * xp.round(z / turns)
    c, s = xp.cos(z), xp.sin(z)
    odds = 2 * p.weight * c + p.log_odds
    t = xp.tanh(0.5 * odds)
    f = p.weight * (1 - c) - xp.logaddexp(0.0 * odds, -odds)
    f1 = xp.where(flat, 0.0, p.weight * s * t)
    f2 = xp.where(flat, 0.0, p.weight * (c * t - p.weight * s * s * (1 - t * t)))
    # Blondel & Karplus (1996).
    P, Q = b * m / mm, b * n / nn
    j, k = _dot(one, two) / bb, _dot(three, two) / bb
    G = xp.stack([-P, P + j * P + k * Q, -j * P - k * Q - Q, Q], 1)
    turn = None
    if v is not None:
        done, dtwo, dthree = (v[:, i + 1] - v[:, i] for i in range(3))
        dm = _cross(done, two) + _cross(one, dtwo)
        dn = _cross(dtwo, three) + _cross(two, dthree)
        stretch = _dot(two, dtwo) / bb
        dP = b * dm / mm + P * (stretch - 2 * _dot(m, dm) / mm)
        dQ = b * dn / nn + Q * (stretch - 2 * _dot(n, dn) / nn)
        dj = (_dot(done, two) + _dot(one, dtwo)) / bb - 2 * j * stretch
        dk = (_dot(dthree, two) + _dot(three, dtwo)) / bb - 2 * k * stretch
        inner = dj * P + j * dP + dk * Q + k * dQ
        turn = xp.stack([-dP, dP + inner, -inner - dQ, dQ], 1)
    return f, f1, f2, G, turn


def _chirals(x: Any, v: Any, p: Any) -> tuple[Any, ...]:
    xp = namespace(x)
    arms = x[:, 1:] - x[:, :1]
    after, before = arms[:, [1, 2, 0]], arms[:, [2, 0, 1]]
    G = _cross(after, before)
    volume = _dot(arms, G)[:, 0, 0]
    box = _dot(arms, arms)[..., 0].prod(1)
    either = p.ideal == 0
    flat = volume * volume <= NO_HAND**2 * box
    sign = xp.where(either, xp.where(flat, 0.0, xp.sign(volume)), 1.0)
    z = xp.where(either, abs(volume) - EITHER_HAND, volume - p.ideal)
    turn = None
    if v is not None:
        w = v[:, 1:] - v[:, :1]
        turn = _with_centre(_cross(w[:, [1, 2, 0]], before) + _cross(after, w[:, [2, 0, 1]]))
    f1, f2 = p.weight * z * sign, p.weight * sign * sign
    return 0.5 * p.weight * z * z, f1, f2, _with_centre(G), turn


def _with_centre(G: Any) -> Any:
    return namespace(G).concatenate([-G.sum(1)[:, None], G], 1)


def _contacts(x: Any, v: Any, p: Any) -> tuple[Any, ...]:
    xp = namespace(x)
    R, t = p.operation[:, :, :3], p.operation[:, :, 3]
    r = xp.einsum("nij,nj->ni", R, x[:, 1]) + t - x[:, 0]
    w = None if v is None else xp.einsum("nij,nj->ni", R, v[:, 1]) - v[:, 0]
    d, u, turn = _distance(r, w, CONTACT_EPS)
    apart = d >= p.ideal
    # Not a maximum, because NaN is to stay NaN.
    overlap = xp.where(apart, 0.0, p.ideal - d)
    u = xp.where(apart[:, None], 0.0, u)
    square = p.weight * overlap * overlap

    def ends(u: Any) -> Any:
        return None if u is None else xp.stack([-u, xp.einsum("nij,ni->nj", R, u)], 1)

    return square * overlap * overlap, -4 * square * overlap, 12 * square, ends(u), ends(turn)


def _b_pairs(x: Any, v: Any, p: Any) -> tuple[Any, ...]:
    z = x[:, 1] - x[:, 0]
    return 0.5 * p.weight * z * z, p.weight * z, p.weight, _ends(0 * z + 1), _ends(0 * z)


_TERMS = (_bonds, _angles, _torsions, _chirals, _contacts, _b_pairs)


class _Parameters:
    """The parameters of the restraints of one kind, in the framework of an array."""

    def __init__(self, like: Any, restraints: Restraints, kind: int) -> None:
        fields = restraints.fields_like(like)
        first, count = sum(restraints.counts[:kind]), restraints.counts[kind]
        atoms = [of.atoms for of in KINDS.values()]
        entries = sum(n * k for n, k in zip(restraints.counts[:kind], atoms[:kind], strict=True))
        span = slice(entries, entries + count * atoms[kind])
        self.index = int64(fields.index[span]).reshape(count, atoms[kind])
        self.ideal, self.weight = (
            double(array[first : first + count]) for array in (fields.ideal, fields.weight)
        )
        self.period, self.log_odds = double(fields.period), double(fields.log_odds)
        if kind == CONTACTS:
            rows = double(fields.operations)[int64(fields.image)]
            self.operation = rows.reshape(count, 3, 4)


@np.errstate(invalid="ignore", over="ignore")
def _evaluated(a: Any, dnlls: Any = None, tangents: Any = None) -> tuple[Any, Any, Any]:
    """Return the sum for each kind (6,), and the rows that a cotangent of sums adds to atoms.

    With tangents of xyz and b, return the derivatives of sums and rows along these. Rows come with
    the atoms' indices, apart for xyz and b.
    """
    xp = namespace(a.xyz)
    constant = double(a.restraints.fields_like(a.xyz).constant)
    sums: list[Any] = []
    rows_xyz: list[tuple[Any, Any]] = []
    rows_b: list[tuple[Any, Any]] = []
    for kind, terms in enumerate(_TERMS):
        p = _Parameters(a.xyz, a.restraints, kind)
        atoms, rows = (a.b, rows_b) if kind == B_PAIRS else (a.xyz, rows_xyz)
        if not len(p.index) or atoms is None:
            sums.append(constant[kind] if tangents is None else 0 * constant[kind])
            continue
        x = double(atoms[p.index])
        along = None if tangents is None else tangents[kind == B_PAIRS]
        v = None if tangents is None else 0 * x if along is None else double(along[p.index])
        f, f1, f2, G, turn = terms(x, v, p)
        f1, f2 = (each.reshape((-1, *[1] * (x.ndim - 1))) for each in (f1, f2))
        if v is None:
            row = f1 * G
            sums.append(f.sum() + constant[kind])
        else:
            push = (G * v).reshape(len(G), -1).sum(1).reshape(f1.shape)
            sums.append((f1 * push).sum())
            row = f2 * push * G + f1 * turn
        if dnlls is not None:
            rows.append((p.index, double(dnlls)[kind] * row))
    return xp.stack(sums), rows_xyz, rows_b


def _on_atoms(rows: list[tuple[Any, Any]], like: Any) -> Any:
    return None if like is None else scattered(rows, like)


def _nll_formula(a: Any) -> tuple[Any]:
    sums, _, _ = _evaluated(a)
    return (cast(sums, accumulator(a.xyz)),)


def _nll_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    return Call(nll_vjp, a.xyz, a.b, dy.nlls, a.restraints, out=wanted)


def _vjp_formula(a: Any) -> tuple[Any, Any]:
    _, rows_xyz, rows_b = _evaluated(a, a.dnlls)
    return _on_atoms(rows_xyz, a.xyz), _on_atoms(rows_b, a.b)


def _vjp_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    return Call(nll_vjp_vjp, a.xyz, a.b, a.dnlls, dy.dxyz, dy.db, a.restraints, out=wanted)


def _vjp_vjp_formula(a: Any) -> tuple[Any, Any, Any]:
    sums, rows_xyz, rows_b = _evaluated(a, a.dnlls, (a.ddxyz, a.ddb))
    return _on_atoms(rows_xyz, a.xyz), _on_atoms(rows_b, a.b), cast(sums, a.dnlls)


_ATOMS = {"xyz": "(N, 3)", "b": "(N), optional"}

nll_vjp_vjp = Primitive(
    "geometry_nll_vjp_vjp",
    family="geometry",
    arrays={**_ATOMS, "dnlls": "(6)", "ddxyz": "(N, 3), optional", "ddb": "(N), optional"},
    static={"restraints": Restraints},
    outputs={"dxyz": "like xyz", "db": "like b", "ddnlls": "like dnlls"},
    formula=_vjp_vjp_formula,
)
nll_vjp = Primitive(
    "geometry_nll_vjp",
    family="geometry",
    arrays={**_ATOMS, "dnlls": "(6)"},
    static={"restraints": Restraints},
    outputs={"dxyz": "like xyz", "db": "like b"},
    formula=_vjp_formula,
    pullback=_vjp_pullback,
)
nll = Primitive(
    "geometry_nll",
    family="geometry",
    arrays=_ATOMS,
    static={"restraints": Restraints},
    outputs={"nlls": "(6) summed of xyz"},
    formula=_nll_formula,
    pullback=_nll_pullback,
)


@op(nll)
def geometry_nll(
    xyz: ArrayT,
    restraints: Restraints,
    b: ArrayT | None = None,
    *,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return the negative log-likelihoods of a model's geometry, one for each kind of restraint.

    .. math:: E_\mathrm{bonds} = \sum \tfrac12 (d - d_0)^2/\sigma^2 + \ln\sigma
              + \tfrac12\ln 2\pi

    .. math:: E_\mathrm{torsions} = \sum \ln 2\pi I_0(\kappa) - \ln\left[(1-p)\,
              e^{\kappa \cos(\tau - \tau_0)} + p\,e^{-\kappa \cos(\tau - \tau_0)} \right]

    .. math:: E_\mathrm{contacts} = \sum w \left[ \tfrac14 \max(0, d_0 - d)^4/\sigma^4
              + \ln\sigma + \tfrac12\ln 2\pi \right]

    where :math:`\tau_0` is the nearest of a torsion's ideals, :math:`\kappa = 1/\sigma^2` in
    radians, from 1e-3 to 1e4, and p the prior probability of the opposite torsion. Angles, chiral
    volumes and differences of B have the Gaussian form of bonds.

    Parameters
    ----------
    xyz : array or tensor (N, 3), float32 or float64; in torch bfloat16 and float16 too
        Coordinates in Å.
    restraints : Restraints
        Made once for many calls.
    b : array or tensor (N,), optional
        B factors in Å², which restraints of pairs of B need.

    Returns
    -------
    array or tensor (6,)
        Of bonds, angles, torsions, chiral volumes, contacts and pairs of B, in this order; in the
        dtype of `xyz`, float32 for the 16-bit ones; accumulated in float64.

    Raises
    ------
    IndexError
        If the restraints have an atom that `xyz` lacks.

    Notes
    -----
    Second derivatives have kernels too. Degenerate geometry has finite values and derivatives, as
    in TorchRef: squared lengths of bonds and contacts are longer by 1e-6 and 1e-8 Å², so that the
    gradient of atoms on one point is zero. It is zero too for an angle within 0.08° of 0° or 180°
    or with an arm below 1e-6 Å, for a torsion of atoms on a line, and for a flat centre of either
    hand. NaN and infinite coordinates show in the values, and in the gradients of their neighbours.

    References
    ----------
    The terms are TorchRef's. Blondel & Karplus, "New formulation for derivatives of torsion angles
    and improper torsion angles in molecular mechanics", J. Comput. Chem. 17, 1132-1141 (1996).

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> bonds = {"indices": [[0, 1], [1, 2]], "ideals": [1.5, 1.5], "sigmas": 0.02}
    >>> restraints = fusedops.Restraints(bonds=bonds)
    >>> xyz = np.array([[0.0, 0, 0], [1.5, 0, 0], [1.5, 1.54, 0]])
    >>> nlls, pullback = fusedops.geometry_nll.vjp(xyz, restraints)
    >>> nlls.round(4).tolist()
    [-3.9861, 0.0, 0.0, 0.0, 0.0, 0.0]
    >>> (dxyz,) = pullback(np.ones(6))
    >>> dxyz[2].round(2).tolist()
    [0.0, 100.0, 0.0]
    """
    name = "geometry_nll"
    if not isinstance(restraints, Restraints):
        was = f"is a {type(restraints).__name__}"
        refuse(TypeError, name, "restraints", was, "be fusedops.Restraints")
    same_device(name, "restraints", restraints.device, "xyz", device_of(xyz))
    if restraints.bound > xyz.shape[0]:
        raise IndexError(
            f"{name}: restraints has index {restraints.bound - 1}; it should be below "
            f"{xyz.shape[0]}, the number of atoms in xyz"
        )
    if b is None and restraints.num_b_pairs:
        was = f"is None beside {restraints.num_b_pairs} restraints of B"
        refuse(ValueError, name, "b", was, "be an array (N,)")
    return to_run((xyz, b, restraints), "nlls")
