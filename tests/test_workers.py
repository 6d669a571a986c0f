"""Workers of other programs' pools: ops and packed arguments travel, and keep to their threads."""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import fusedops


def frames():
    """Return a call and its arguments, one list for each frame."""
    rng = np.random.default_rng(0)
    xyz = rng.normal(size=(4, 6, 3))
    planes = fusedops.Planes([([[0, 1, 2, 3], [2, 3, 4, 5]], [0.02, 0.05])])
    return fusedops.planarity_nll, [(frame, planes) for frame in xyz]


def spread(pool, function, calls):
    """Return a function's results in the workers of a pool, which import it by its name."""
    if pool == "joblib":
        from joblib import Parallel, delayed

        return Parallel(n_jobs=2)(delayed(function)(*call) for call in calls)
    if pool == "dask":
        import dask

        tasks = [dask.delayed(function)(*call) for call in calls]
        return dask.compute(*tasks, scheduler="processes", num_workers=2)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        return [future.result() for future in [executor.submit(function, *c) for c in calls]]


def test_ops_and_packed_arguments_are_pickled():
    op, calls = frames()
    again, others = pickle.loads(pickle.dumps((op, calls)))
    assert again is op
    assert [again(*call) for call in others] == [op(*call) for call in calls]


@pytest.mark.parametrize("pool", ["processes", "joblib", "dask"])
def test_workers_keep_to_their_threads(pool, monkeypatch):
    """Pools tell their workers by OMP_NUM_THREADS how many threads are theirs."""
    op, calls = frames()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("FUSEDOPS_NUM_THREADS", raising=False)
    if pool != "processes" and importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    assert list(spread(pool, op, calls)) == [op(*call) for call in calls]
    assert set(spread(pool, fusedops.get_num_threads, [()] * 4)) == {1}
