"""The triangle multiplicative update on the GPU.

A row is an edge (b, i, j), a line all edges of (b, i). A call becomes an `Update` (plan.py), which
has the arguments as kernels take them and the parts that are done at a time; kernels are in
kernels.py, products of matrices in products.py.

Forward (forward.py): `project` normalizes rows of x and writes left and right, plane by plane as
products want them, and the last gate; a batched product makes o; `finish` normalizes o and
projects it. Bytes per row: x and the output once; left, right, o and the gate, written and read, in
the dtype of the factors. Where x has many channels and rows, `normalize` writes it first, so that
`project` can read it in parts (but see Hopper).

Backward (backward.py): `project` again, which keeps the logits of the gates too; `finish_back`; two
batched products; `sides_back`, which puts the cotangents of projections and of logits where left,
right and logits were; plain products with the normalized x, which give its cotangent, the weights'
cotangents and, by a column of ones, the biases'; and `norm_back`. Where memory is
short, all this goes member by member of the batch, and by some channels of left and right or some
lines of o at a time. In products of halves, all kernels write their results as halves by scales
that follow from weights, mask and largest cotangents; only the cotangent of o is split after it is
written.

Where float32 is multiplied itself, torch makes all products of many rows, from rows that kernels
normalized and for kernels that open gates (`open_sides`, `end_rows`).

On Hopper, many rows with products of 16 bits have kernels of their own: hopper.py and
hopper_wide.py for the forward, hopper_backward.py for a backward that keeps no logits. Its
`project_back` goes all the way from the cotangents of left and right to the cotangent of x, and
the cotangents of norms and of weights come from the same sums over rows (`through_norm`).

Kernels write as many channels as they read. An output of another width goes by groups of so many
channels (widths.py).
"""

from fusedops._frame.registry import register
from gpukern.trimul.stages import triangle_end, triangle_end_vjp, triangle_sides, triangle_sides_vjp
from gpukern.trimul.widths import triangle_multiplicative_update, triangle_multiplicative_update_vjp

register("triangle_multiplicative_update", "triton")(triangle_multiplicative_update)
register("triangle_multiplicative_update_vjp", "triton")(triangle_multiplicative_update_vjp)
for _stage in (triangle_sides, triangle_sides_vjp, triangle_end, triangle_end_vjp):
    register(_stage.__name__, "triton")(_stage)
