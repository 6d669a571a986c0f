"""transformers' models by our convolutions and our gated delta rule.

transformers takes both from other packages, where it finds them: from causal-conv1d and from
flash-linear-attention.
"""

from __future__ import annotations

from fusedops.compat import causal_conv1d, fla

__all__ = ["register", "unregister"]


def register() -> None:
    """Let transformers' models call our functions from now on, on a CPU too.

    Call it in every process, before or after transformers and its models are imported. It calls
    `fusedops.compat.causal_conv1d.register` and `fusedops.compat.fla.register`. A second call
    changes nothing.

    Examples
    --------
    >>> import fusedops.compat.transformers
    >>> fusedops.compat.transformers.register()
    >>> sorted({swap.program for swap in fusedops.compat.swaps()})
    ['causal-conv1d', 'flash-linear-attention']
    >>> fusedops.compat.transformers.unregister()
    """
    causal_conv1d.register()
    fla.register()


def unregister() -> None:
    """Let transformers' models call the functions that they called before `register`.

    It calls `fusedops.compat.causal_conv1d.unregister` and `fusedops.compat.fla.unregister`.

    Examples
    --------
    >>> import fusedops.compat.transformers
    >>> fusedops.compat.transformers.unregister()
    """
    fla.unregister()
    causal_conv1d.unregister()
