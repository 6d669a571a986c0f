"""Wigner D matrices of real spherical harmonics, for the rotations that turn edges to an axis.

This file has the coupling of degrees, the rotation, the definition of the matrices and of their
first and second derivatives, the closed form that kernels evaluate, the public op, and matrices of
rotations that a program has of its own.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from fusedops._frame import registry
from fusedops._frame.arrays import ArrayT, beside, cast, namespace, table, wide, zeros
from fusedops._frame.check import (
    bridge,
    device_of,
    flag,
    floats,
    is_tensor,
    is_traced,
    refuse,
    size,
)
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName


def matrix_size(lmax: int, packed: bool) -> tuple[int, ...]:
    """Return the shape of an edge's matrices: dense, or blocks one after the other."""
    if packed:
        return ((lmax + 1) * (2 * lmax + 1) * (2 * lmax + 3) // 3,)
    return (lmax + 1) ** 2, (lmax + 1) ** 2


def places(lmax: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every degree, the place of its matrix's element (0, 0), and the step of a row.

    Both are counted in elements of an edge's contiguous matrices.
    """
    l = np.arange(lmax + 1)
    if layout == "packed":
        return l * (4 * l * l - 1) // 3 + 2 * l * (l + 1), 2 * l + 1
    rows = (lmax + 1) ** 2
    return l * (l + 1) * (rows + 1), np.full(lmax + 1, rows)


# Matrices of every degree are kept, here and below: together they take less memory than one edge's
# matrix of the highest degree.
@functools.cache
def _real_basis(l: int) -> np.ndarray:
    """Return the unitary matrix from complex spherical harmonics (Condon-Shortley) to real ones."""
    basis = np.zeros((2 * l + 1, 2 * l + 1), complex)
    basis[l, l] = 1
    for m in range(1, l + 1):
        # Y^{-m} is (-1)^m times the conjugate of Y^m.
        basis[l + m, [l + m, l - m]] = [(-1) ** m / np.sqrt(2), 1 / np.sqrt(2)]
        basis[l - m, [l + m, l - m]] = [(-1) ** m / (1j * np.sqrt(2)), -1 / (1j * np.sqrt(2))]
    return basis


@functools.cache
def coupling(l: int) -> np.ndarray:
    r"""Return the isometry (2l + 1, 3(2l - 1)) from degrees l - 1 and 1 to degree l, real.

    The elements are the Clebsch-Gordan coefficients
    :math:`\langle l-1\, m_1; 1\, m_2 | l\, m \rangle` in the basis of real spherical harmonics:
    :math:`D^l = A (D^{l-1} \otimes D^1) A^\top`.
    """
    j = l - 1
    coefficients = np.zeros((2 * l + 1, 2 * j + 1, 3))
    for m in range(-l, l + 1):
        for m2 in (-1, 0, 1):
            if abs(m - m2) > j:
                continue
            if m2 == 0:
                square = (j - m + 1) * (j + m + 1) / ((2 * j + 1) * (j + 1))
            else:
                square = (j + m2 * m) * (j + m2 * m + 1) / ((2 * j + 1) * (2 * j + 2))
            coefficients[l + m, j + m - m2, 1 + m2] = np.sqrt(square)
    lower = np.kron(_real_basis(j), _real_basis(1))
    return (_real_basis(l) @ coefficients.reshape(2 * l + 1, -1) @ lower.conj().T).real


def _normalized(vectors: Any) -> tuple[Any, Any, Any]:
    """Return unit vectors, or zeros; lengths, or ones; and whether a length is zero."""
    xp = namespace(vectors)
    largest = xp.amax(xp.abs(vectors), -1)[:, None]
    none = largest == 0
    largest = xp.where(none, xp.ones_like(largest), largest)
    # The squares of tiny vectors would vanish, and the squares of huge vectors overflow.
    scaled = vectors / largest
    square = (scaled * scaled).sum(-1)[:, None]
    length = xp.sqrt(xp.where(none, xp.ones_like(square), square))
    return scaled / length, length * largest, none


def _unit(edge_vec: Any) -> tuple[Any, Any]:
    """Return unit vectors and lengths; a vector of length zero is the axis, infinitely long."""
    xp = namespace(edge_vec)
    unit, length, none = _normalized(edge_vec)
    x, y, z = unit.T
    unit = xp.stack([x, xp.where(none[:, 0], xp.ones_like(y), y), z], -1)
    return unit, xp.where(none, xp.inf, length)


def _rotation(u: Any) -> Any:
    """Return the rotations (E, 3, 3) that turn unit vectors to +y.

    Where y ≥ 0 they turn the shortest way; elsewhere by half a turn about x and then the shortest
    way. Neither divides by less than one.
    """
    xp = namespace(u)
    x, y, z = u[:, 0], u[:, 1], u[:, 2]
    s = xp.where(y >= 0, xp.ones_like(y), -xp.ones_like(y))
    k = 1 / (1 + s * y)
    rows = (
        (1 - x * x * k, -s * x, -x * z * k),
        (x, y, z),
        (-s * x * z * k, -z, s * (1 - z * z * k)),
    )
    return xp.stack([xp.stack(row, -1) for row in rows], -2)


def _rotation_jvp(u: Any, tu: Any) -> Any:
    """Return the tangents of rotations for tangents of unit vectors."""
    xp = namespace(u)
    (x, y, z), (tx, ty, tz) = u.T, tu.T
    s = xp.where(y >= 0, xp.ones_like(y), -xp.ones_like(y))
    k = 1 / (1 + s * y)
    tk = -s * k * k * ty
    corner = -(tx * z + x * tz) * k - x * z * tk
    rows = (
        (-2 * x * tx * k - x * x * tk, -s * tx, corner),
        (tx, ty, tz),
        (s * corner, -tz, -s * (2 * z * tz * k + z * z * tk)),
    )
    return xp.stack([xp.stack(row, -1) for row in rows], -2)


def _rotation_vjp(u: Any, g: Any) -> Any:
    """Return the cotangents of unit vectors for cotangents of their rotations."""
    xp = namespace(u)
    x, y, z = u[:, 0], u[:, 1], u[:, 2]
    s = xp.where(y >= 0, xp.ones_like(y), -xp.ones_like(y))
    k = 1 / (1 + s * y)
    corner = g[:, 0, 2] + s * g[:, 2, 0]
    dk = -x * x * g[:, 0, 0] - x * z * corner - s * z * z * g[:, 2, 2]
    dx = g[:, 1, 0] - 2 * x * k * g[:, 0, 0] - s * g[:, 0, 1] - z * k * corner
    dz = g[:, 1, 2] - 2 * s * z * k * g[:, 2, 2] - g[:, 2, 1] - x * k * corner
    return xp.stack([dx, g[:, 1, 1] - s * k * k * dk, dz], -1)


def _rotation_vjp_jvp(u: Any, g: Any, tu: Any, tg: Any) -> Any:
    """Return the tangents of `_rotation_vjp` for tangents of its arguments."""
    xp = namespace(u)
    (x, y, z), (tx, ty, tz) = u.T, tu.T
    s = xp.where(y >= 0, xp.ones_like(y), -xp.ones_like(y))
    k = 1 / (1 + s * y)
    tk = -s * k * k * ty
    corner = g[:, 0, 2] + s * g[:, 2, 0]
    dk = -x * x * g[:, 0, 0] - x * z * corner - s * z * z * g[:, 2, 2]
    tdk = -2 * x * tx * g[:, 0, 0] - (tx * z + x * tz) * corner - 2 * s * z * tz * g[:, 2, 2]
    txk, tzk = tx * k + x * tk, tz * k + z * tk
    dx = -2 * txk * g[:, 0, 0] - tzk * corner
    dy = -s * k * (2 * tk * dk + k * tdk)
    dz = -2 * s * tzk * g[:, 2, 2] - txk * corner
    return xp.stack([dx, dy, dz], -1) + _rotation_vjp(u, tg)


def _product(lower: Any, R: Any) -> Any:
    """Return the Kronecker products of matrices (E, a, a) with (E, 3, 3)."""
    width = 3 * lower.shape[1]
    product = lower[:, :, None, :, None] * R[:, None, :, None, :]
    return product.reshape(len(R), width, width)


def _factors_vjp(dproduct: Any, lower: Any, R: Any) -> tuple[Any, Any]:
    """Return the cotangents of both factors of a Kronecker product."""
    width = lower.shape[1]
    dproduct = dproduct.reshape(len(R), width, 3, width, 3)
    dlower = (dproduct * R[:, None, :, None, :]).sum((2, 4))
    return dlower, (dproduct * lower[:, :, None, :, None]).sum((1, 3))


def _degrees(R: Any, lmax: int) -> list[Any]:
    """Return the matrices of degrees 0 to lmax, each degree made of the degree before."""
    xp = namespace(R)
    matrices = [xp.ones_like(R[:, :1, :1]), R][: lmax + 1]
    for l in range(2, lmax + 1):
        A = table(coupling, l, R)
        matrices.append(A @ _product(matrices[-1], R) @ A.T)
    return matrices


def _degrees_jvp(matrices: list[Any], R: Any, tR: Any) -> list[Any]:
    """Return the tangents of the matrices of `_degrees`."""
    xp = namespace(R)
    tangents = [xp.zeros_like(R[:, :1, :1]), tR][: len(matrices)]
    for l in range(2, len(matrices)):
        A = table(coupling, l, R)
        both = _product(tangents[-1], R) + _product(matrices[l - 1], tR)
        tangents.append(A @ both @ A.T)
    return tangents


def _laid_out(matrices: list[Any], layout: str) -> Any:
    """Return matrices of all degrees in one array."""
    xp = namespace(matrices[0])
    count, rows = len(matrices[0]), len(matrices) ** 2
    if layout == "packed":
        return xp.concatenate([D.reshape(count, D.shape[1] ** 2) for D in matrices], axis=1)
    padded = []
    for l, D in enumerate(matrices):
        before, after = (zeros(D, (count, 2 * l + 1, n)) for n in (l * l, rows - (l + 1) ** 2))
        padded.append(xp.concatenate([before, D, after], axis=2))
    return xp.concatenate(padded, axis=1)


def _block(array: Any, l: int, layout: str) -> Any:
    """Return the matrices of a degree out of the matrices of all degrees."""
    if layout == "dense":
        return array[:, l * l : (l + 1) ** 2, l * l : (l + 1) ** 2]
    (at,) = matrix_size(l - 1, packed=True)
    width = 2 * l + 1
    return array[:, at : at + width * width].reshape(len(array), width, width)


def _formula(a: Any) -> tuple[Any]:
    r"""Return :math:`D^0, D^1, …`, with :math:`D^1 = R` and :math:`R \hat v = \hat y`."""
    edge_vec, lmax, layout = a
    u, _ = _unit(wide(edge_vec))
    return (cast(_laid_out(_degrees(_rotation(u), lmax), layout), edge_vec),)


def _across(u: Any, vectors: Any) -> Any:
    """Return the parts of vectors that are perpendicular to unit vectors."""
    return vectors - u * (u * vectors).sum(-1)[:, None]


def _vjp_formula(a: Any) -> tuple[Any]:
    """Return the cotangent of edge_vec, degree by degree from the highest."""
    edge_vec, dmatrices, lmax, layout = a
    u, length = _unit(wide(edge_vec))
    g = wide(dmatrices)
    R = _rotation(u)
    matrices = _degrees(R, lmax)
    dR = namespace(R).zeros_like(R)
    carried: Any = 0
    for l in range(lmax, 1, -1):
        A = table(coupling, l, R)
        dproduct = A.T @ (carried + _block(g, l, layout)) @ A
        carried, dfactor = _factors_vjp(dproduct, matrices[l - 1], R)
        dR = dR + dfactor
    if lmax:
        dR = dR + carried + _block(g, 1, layout)
    return (cast(_across(u, _rotation_vjp(u, dR)) / length, edge_vec),)


def _vjp_vjp_formula(a: Any) -> tuple[Any, Any]:
    r"""Return the cotangents of edge_vec and of dmatrices for the vjp's cotangent t.

    The vjp is :math:`\nabla_v F` of :math:`F(v) = \langle g, D(v) \rangle`, so that the cotangents
    are the tangents along t of :math:`\nabla F` and of D, pushed forward through all steps.
    """
    edge_vec, dmatrices, ddedge_vec, lmax, layout = a
    u, length = _unit(wide(edge_vec))
    g, t = wide(dmatrices), wide(ddedge_vec)
    R, tu = _rotation(u), _across(u, t) / length
    tR = _rotation_jvp(u, tu)
    matrices = _degrees(R, lmax)
    tangents = _degrees_jvp(matrices, R, tR)
    dR = tdR = namespace(R).zeros_like(R)
    carried: Any = 0
    tcarried = namespace(R).zeros_like(_block(g, lmax, layout))
    for l in range(lmax, 1, -1):
        A = table(coupling, l, R)
        dproduct = A.T @ (carried + _block(g, l, layout)) @ A
        tdproduct = A.T @ tcarried @ A
        carried, dfactor = _factors_vjp(dproduct, matrices[l - 1], R)
        dR = dR + dfactor
        pushed = _factors_vjp(tdproduct, matrices[l - 1], R)
        turned = _factors_vjp(dproduct, tangents[l - 1], tR)
        tcarried, tdR = pushed[0] + turned[0], tdR + pushed[1] + turned[1]
    if lmax:
        dR, tdR = dR + carried + _block(g, 1, layout), tdR + tcarried
    du = _rotation_vjp(u, dR)
    tdu = _rotation_vjp_jvp(u, dR, tu, tdR)
    along_t, along_u = ((u * w).sum(-1)[:, None] / length for w in (t, du))
    dedge_vec = _across(u, tdu - along_t * du - along_u * t) / length
    dedge_vec = dedge_vec - u * (tu * du).sum(-1)[:, None] / length
    return cast(dedge_vec, edge_vec), cast(_laid_out(tangents, layout), dmatrices)


@functools.cache
def recursion(lmax: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the numbers of the closed form in which kernels evaluate the same matrices.

    With :math:`y \ge 0` and :math:`\rho = z + i x` of the unit vector, whose azimuth α about y is
    the argument of ρ, the shortest rotation is :math:`R_y(α) R_x(-β) R_y(-α)`, so that for
    :math:`n \ge m > 0`

    .. math:: D_{n, m} = P \operatorname{Re} \rho^{n-m} + Q \operatorname{Re} \rho^{n+m}, \quad
              D_{n, -m} = Q \operatorname{Im} \rho^{n+m} - P \operatorname{Im} \rho^{n-m}, \\
              D_{-n, m} = Q \operatorname{Im} \rho^{n+m} + P \operatorname{Im} \rho^{n-m}, \quad
              D_{-n, -m} = P \operatorname{Re} \rho^{n-m} - Q \operatorname{Re} \rho^{n+m}

    where P and Q are Wigner's :math:`d^l_{n, \pm m}` over powers of sin β, functions of y without a
    pole; Q = 0 for m = 0; and :math:`D_{j, i} = (-1)^{i + j} D_{i, j}`. P and Q begin at l = n as
    :math:`p (1 + y)^m` and :math:`q (1 + y)^{-m}`, and go on by Jacobi's recursion

    .. math:: P^{l+1} = (a y - b) P^l - c P^{l-1}, \quad Q^{l+1} = (a y + b) Q^l - c Q^{l-1}.

    Where y < 0, (x, -y, -z) takes the place of u, and the half turn about x changes the sign of
    columns: for even l of columns with m < 0, for odd l of columns with m ≥ 0.

    Returns
    -------
    starts : array (pairs, 2)
        p and q for m = 0, 1, …, lmax, and n = m, …, lmax for each.
    steps : array (Σ pairs of n (lmax - n + 1), 3)
        a, b and c for l = n, …, lmax for each pair.

    References
    ----------
    Varshalovich, Moskalev and Khersonskii, "Quantum Theory of Angular Momentum", 1988, sections
    4.3.4 (Jacobi polynomials) and 4.8.2 (the recursion in l).
    """
    starts, steps = [], []
    for m in range(lmax + 1):
        for n in range(m, lmax + 1):
            twice = 2 if n > m == 0 else 1
            start = (-1) ** n * math.sqrt(twice * math.comb(2 * n, n + m)) / 2**n
            starts.append(((-1) ** m * start, start if m else 0.0))
            below = 0.0
            for l in range(n, lmax + 1):
                above = math.sqrt(((l + 1) ** 2 - n * n) * ((l + 1) ** 2 - m * m))
                a = (2 * l + 1) * (l + 1) / above
                # In degree 0, where n m = 0 and `below` too, any divisor serves.
                b, c = (2 * l + 1) * n * m, (l + 1) * below
                steps.append((a, b / (max(l, 1) * above), c / (max(l, 1) * above)))
                below = above
    return np.array(starts), np.array(steps)


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    return Call(matrices_vjp, a.edge_vec, dy.matrices, a.lmax, a.layout, out=wanted)


def _vjp_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    given = a.edge_vec, a.dmatrices, dy.dedge_vec, a.lmax, a.layout
    return Call(matrices_vjp_vjp, *given, out=wanted)


_SIZES: dict[str, Any] = {
    "L": lambda a: matrix_size(a.lmax, False)[0],
    "P": lambda a: matrix_size(a.lmax, True)[0],
}
matrices_vjp_vjp = Primitive(
    "wigner_d_vjp_vjp",
    family="harmonics",
    arrays={"edge_vec": "(E, 3)", "dmatrices": "(E, L, L) or (E, P)", "ddedge_vec": "(E, 3)"},
    static={"lmax": int, "layout": str},
    sizes=_SIZES,
    outputs={"dedge_vec": "like edge_vec", "ddmatrices": "like dmatrices"},
    formula=_vjp_vjp_formula,
)
matrices_vjp = Primitive(
    "wigner_d_vjp",
    family="harmonics",
    arrays={"edge_vec": "(E, 3)", "dmatrices": "(E, L, L) or (E, P)"},
    static={"lmax": int, "layout": str},
    sizes=_SIZES,
    outputs={"dedge_vec": "like edge_vec"},
    formula=_vjp_formula,
    pullback=_vjp_pullback,
)
matrices = Primitive(
    "wigner_d",
    family="harmonics",
    arrays={"edge_vec": "(E, 3)"},
    static={"lmax": int, "layout": str},
    sizes={"matrix": lambda a: matrix_size(a.lmax, a.layout == "packed")},
    outputs={"matrices": "(E, *matrix)"},
    formula=_formula,
    pullback=_pullback,
)


@op(matrices)
def wigner_d(
    edge_vec: ArrayT,
    lmax: int,
    *,
    packed: bool = False,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return the real Wigner D matrices of rotations that turn edge vectors to the axis +y.

    .. math:: D^l(R)\, Y_l(v) = Y_l(R v), \quad R\, \hat r = \hat y

    for all v, with the real spherical harmonics of e3nn and fairchem: the polar axis is y, orders
    run from -l to l without the Condon-Shortley phase, and degree 1 is (x, y, z), so that
    :math:`D^1 = R`.

    Parameters
    ----------
    edge_vec : array or tensor (E, 3), float32 or float64; in torch bfloat16 and float16 too
        Vectors of any length, in any unit, x, y, z.
    lmax : int
        The largest degree, from 0 to 63.
    packed : bool
        Whether to return only the blocks of 2l + 1 rows, one after the other.

    Returns
    -------
    array or tensor (E, (lmax + 1)², (lmax + 1)²), or with `packed` (E, Σ(2l + 1)²)
        Orthogonal, in the dtype of `edge_vec`; the matrices of the way back are their transposes.

    Notes
    -----
    A rotation that turns a vector to an axis is free to turn about that axis too, and no choice of
    this turn is continuous all over the sphere. Here the rotation jumps at y = 0, between the
    shortest rotation (y ≥ 0) and half a turn about x followed by the shortest rotation (y < 0):
    there is no pole, and derivatives of every order are finite in every direction; a derivative of
    order k falls with the length to the power k. Operations that commute with turns about the axis,
    as all on an eSCN message do, give energies without the jump. A vector of length zero counts as
    the axis, with a gradient of zero.

    Torch differentiates to any order, and NumPy's `.vjp` to the first. The definition makes each
    degree from the one before, by a Clebsch-Gordan product with the rotation. Kernels for value,
    first and second derivative evaluate Wigner's closed form by recursions, in float64, and round
    once. Neither has an angle. For higher derivatives torch differentiates the definition, which on
    a GPU serves degrees above 15 too.

    References
    ----------
    Geiger and Smidt, "e3nn: Euclidean Neural Networks", arXiv:2207.09453, for the convention;
    Varshalovich, Moskalev and Khersonskii, "Quantum Theory of Angular Momentum", 1988, section 4.6,
    for the product.

    Examples
    --------
    >>> import numpy as np
    >>> from fusedops.wigner import wigner_d
    >>> D = wigner_d(np.array([[0.0, 0.0, 2.0]]), 1)
    >>> (D[0, 1:, 1:] @ [0.0, 0.0, 1.0]).tolist()  # the edge is now along y
    [0.0, 1.0, 0.0]
    """
    # The elements of a matrix grow with the fourth power of lmax.
    degree = size("wigner_d", "lmax", lmax, bits=6)
    flag("wigner_d", "packed", packed)
    return to_run((edge_vec, degree, "packed" if packed else "dense"), "matrices")


@functools.lru_cache(maxsize=64)
def _orders(lmax: int, packed: bool) -> tuple[list[int], list[float], list[int]]:
    """Return each row's m, as |m| and sign, and the row of -m; with `packed`, each element's."""
    # Lists of Python's, since torch.compile takes NumPy's arrays for tensors.
    orders: list[int] = []
    signs: list[float] = []
    others: list[int] = []
    for l in range(lmax + 1):
        for m in range(-l, l + 1):
            width = 2 * l + 1 if packed else 1
            first = l * (4 * l * l - 1) // 3 + (l - m) * width if packed else l * l + l - m
            orders += [abs(m)] * width
            signs += [float((m > 0) - (m < 0))] * width
            others += range(first, first + width)
    return orders, signs, others


#: The largest error of a rotation's matrix: numbers rounded to 16 bits have less.
_NO_ROTATION = 0.05


def _need_rotations(name: str, matrices: Any) -> None:
    """Raise ValueError unless matrices that the host may read are proper rotations."""
    if device_of(matrices) != "cpu" or is_traced(matrices):
        return
    if is_tensor(matrices) and bridge().modes.transforms():
        return
    R = bridge().tensors.values(matrices) if is_tensor(matrices) else matrices
    error = abs(R @ R.swapaxes(1, 2) - np.eye(3)).max((1, 2)) + (np.linalg.det(R) < 0)
    # NaN stays NaN in the result.
    if (error > _NO_ROTATION).any():
        bad = int((error > _NO_ROTATION).argmax())
        was = f"is {R[bad].round(3).tolist()}"
        refuse(ValueError, name, f"rotation[{bad}]", was, "be a matrix of a proper rotation")


def _matrices_of(rotation: Any) -> Any:
    """Return rotations (E, 3, 3) of Euler angles (E, 3) or quaternions (E, 4)."""
    xp = namespace(rotation)
    if rotation.ndim == 3:
        return rotation
    if rotation.shape[1] == 4:
        w, x, y, z = _normalized(rotation)[0].T
        rows: Any = (
            (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
            (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
            (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
        )
    else:
        (a, b, c), (i, j, k) = xp.cos(rotation).T, xp.sin(rotation).T
        rows = (
            (a * c - i * b * k, i * j, a * k + i * b * c),
            (j * k, b, -j * c),
            (-i * c - a * b * k, a * j, a * b * c - i * k),
        )
    return xp.stack([xp.stack(row, -1) for row in rows], -2)


def wigner_d_of(
    rotation: ArrayT, lmax: int, *, packed: bool = False, backend: BackendName | None = None
) -> ArrayT:
    r"""Return the real Wigner D matrices of given rotations.

    .. math:: D^l(R)\, Y_l(v) = Y_l(R v)

    for all v, with the spherical harmonics of `wigner_d`.

    Parameters
    ----------
    rotation : array or tensor (E, 3, 3), (E, 4) or (E, 3), float32 or float64; in torch 16 bits too
        Either matrices R, which on a CPU are checked to be proper rotations; or quaternions w, x,
        y, z of any length; or Euler angles α, β, γ in radians, for
        :math:`R = R_y(\alpha) R_x(\beta) R_y(\gamma)`, as e3nn and fairchem have them. A quaternion
        of length zero counts as no turn, with a gradient of zero.
    lmax : int
        The largest degree, from 0 to 63.
    packed : bool
        Whether to return only the blocks of 2l + 1 rows, one after the other.
    backend : str, optional
        The backend that must serve `wigner_d`.

    Returns
    -------
    array or tensor (E, (lmax + 1)², (lmax + 1)²), or with `packed` (E, Σ(2l + 1)²)
        In the dtype of `rotation`. The matrices that turn an edge r to the axis are those of R with
        :math:`R\, \hat r = \hat y`.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or value; the message names it.
    BackendUnavailable
        If `backend` can't serve the call.

    Notes
    -----
    `wigner_d` of the direction that R turns to the axis, and then a turn about the axis, which
    mixes the rows of orders m and -m by the cosine and the sine of m times its angle; no angle is
    computed. Derivatives are along rotations: R is assumed to stay a rotation. Torch
    differentiates to any order.

    References
    ----------
    Geiger and Smidt, "e3nn: Euclidean Neural Networks", arXiv:2207.09453: ``wigner_D``,
    ``angles_to_matrix`` and ``quaternion_to_matrix``, whose conventions these are.

    Examples
    --------
    A turn about y by a quarter takes z to x:

    >>> import numpy as np
    >>> from fusedops.wigner import wigner_d_of
    >>> D = wigner_d_of(np.array([[np.pi / 2, 0.0, 0.0]]), 1)
    >>> (D[0, 1:, 1:] @ [0.0, 0.0, 1.0]).round(12).tolist()
    [1.0, 0.0, 0.0]
    """
    name = "wigner_d_of"
    given = floats(name, "rotation", rotation)
    if backend is not None:
        registry.forced(backend, name)
    rotation = wide(given)
    if tuple(rotation.shape[1:]) not in ((3, 3), (4,), (3,)):
        raise ValueError(
            f"{name}: rotation has shape {tuple(rotation.shape)}; it should be (E, 3, 3), or "
            "(E, 4) for quaternions, or (E, 3) for Euler angles"
        )
    lmax = size(name, "lmax", lmax, bits=6)
    flag(name, "packed", packed)
    if rotation.ndim == 3:
        _need_rotations(name, rotation)
    xp, R = namespace(rotation), _matrices_of(rotation)
    u = R[:, 1]
    D = wigner_d(u, lmax, packed=packed, backend=backend)
    # The rest of R is a turn about the axis, with this cosine and sine.
    rest = R @ _rotation(u).swapaxes(1, 2)
    cos, sin = rest[:, 0, 0], rest[:, 0, 2]
    cosines, sines = [xp.ones_like(cos)], [xp.zeros_like(sin)]
    for _ in range(lmax):
        c, s = cosines[-1], sines[-1]
        cosines.append(c * cos - s * sin)
        sines.append(s * cos + c * sin)
    m, sign, other = _orders(lmax, packed)
    signs = namespace(D).asarray(sign, dtype=D.dtype, **beside(D))
    kept, mixed = xp.stack(cosines, -1)[:, m], xp.stack(sines, -1)[:, m] * -signs
    if not packed:
        kept, mixed = kept[..., None], mixed[..., None]
    return cast(kept * D + mixed * D[:, other], given)
