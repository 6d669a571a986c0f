"""The edges that a force step takes from pairs of atoms."""

import pytest

torch = pytest.importorskip("torch")

from fusedops.compat._pairs import Pairs  # noqa: E402

CUTOFF = 1.0


def pairs_of(atoms, count, seed):
    """Return positions, pairs in any order, and the cells between their ends."""
    generator = torch.Generator().manual_seed(seed)
    pos = 1.5 * torch.rand(atoms, 3, generator=generator)
    ends = torch.randint(atoms, (2, count), generator=generator)
    offsets = torch.randint(-1, 2, (count, 3), generator=generator).float()
    return pos, ends, offsets


def chosen(pairs, pos, ends, offsets):
    """Return the edges, and the rows (source, target, vector) of these by a plain search."""
    cell, batch = 2 * torch.eye(3)[None], torch.zeros(len(pos), dtype=torch.long)
    assert pairs.keep(ends, offsets)
    r = pos[ends[0]] - pos[ends[1]] + offsets @ cell[0]
    near = r.norm(dim=1) < CUTOFF
    want = [(int(s), int(t), v) for s, t, v in zip(*ends[:, near], offsets[near], strict=True)]
    return pairs.choose(pos, cell, batch), want


@pytest.mark.parametrize(("atoms", "count"), [(1, 0), (1, 4), (2, 7), (5, 60), (9, 3), (40, 2000)])
@pytest.mark.parametrize("seed", range(3))
def test_edges_are_the_pairs_within_the_cutoff(atoms, count, seed):
    pos, ends, offsets = pairs_of(atoms, count, seed)
    pairs = Pairs(pos, ends, count // 4, CUTOFF)
    # Other pairs and positions come later, fewer and more.
    for size in (count, count // 2, count):
        pos = pos.roll(1, 0)
        found, want = chosen(pairs, pos, ends[:, :size], offsets[:size])
        source, target, by_source, source_ptr, by_target, target_ptr = found.lists
        assert int(found.total) == len(want)
        assert (target[1:] >= target[:-1]).all()
        for end, order, ptr in (
            (source, by_source, source_ptr),
            (target, by_target, target_ptr),
        ):
            assert order.sort().values.tolist() == list(range(pairs.space))
            assert (ptr[0], ptr[-1]) == (0, pairs.space)
            assert torch.equal(end[order], torch.arange(atoms).repeat_interleave(ptr.diff()))
        edges = (found.far == 0).all(1)
        assert int(edges.sum()) == len(want)
        kept = zip(source[edges], target[edges], found.offsets[edges], strict=True)
        rows = sorted((int(s), int(t), *v.tolist()) for s, t, v in kept)
        assert rows == sorted((s, t, *v.tolist()) for s, t, v in want)
        assert torch.equal(source[~edges], target[~edges])
        assert (found.far[~edges] == torch.tensor([2 * CUTOFF, 0, 0])).all()
        # Room is shared, lest one atom has all of it.
        room = target[~edges].bincount(minlength=atoms)
        assert room.max() - room.min() <= 1
        degrees = torch.tensor([t for _, t, _ in want], dtype=torch.long).bincount(minlength=atoms)
        assert torch.equal(found.degrees, degrees)


def test_more_edges_than_places_lead_nowhere():
    pos, ends, offsets = pairs_of(6, 9000, 0)
    pairs = Pairs(pos, ends, 0, CUTOFF)
    found, want = chosen(pairs, pos, ends, offsets)
    assert int(found.total) == len(want) > pairs.space
    source, target, by_source, source_ptr, by_target, target_ptr = found.lists
    for end in (source, target):
        assert ((end >= 0) & (end < 6)).all()
    for order, ptr in ((by_source, source_ptr), (by_target, target_ptr)):
        assert ((order >= 0) & (order < pairs.space)).all()
        assert ((ptr >= 0) & (ptr <= pairs.space)).all()


def test_no_room_for_pairs_changes_nothing():
    pos, ends, offsets = pairs_of(4, 30, 0)
    pairs = Pairs(pos, ends, 10, CUTOFF)
    found, _ = chosen(pairs, pos, ends, offsets)
    assert not pairs.keep(ends.repeat(1, 100), offsets.repeat(100, 1))
    again = pairs.choose(pos, 2 * torch.eye(3)[None], torch.zeros(4, dtype=torch.long))
    for a, b in zip(found.lists, again.lists, strict=True):
        assert torch.equal(a, b)


def test_lengths_that_are_no_numbers_are_edges():
    pos, ends, offsets = pairs_of(4, 30, 0)
    pairs = Pairs(pos, ends, 30, CUTOFF)
    pos[2] = torch.nan
    assert pairs.keep(ends, offsets)
    cell, batch = 2 * torch.eye(3)[None], torch.zeros(4, dtype=torch.long)
    found = pairs.choose(pos, cell, batch)
    assert int(found.total) >= int((ends == 2).any(0).sum())
