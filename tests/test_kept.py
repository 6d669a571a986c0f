"""Forms of frozen weights that kernels keep."""

import threading

import pytest

torch = pytest.importorskip("torch")

from fusedops._kept import Kept, formed, keeping, kept  # noqa: E402

CPU = torch.device("cpu")


def doubled(weight, calls):
    def make(into):
        calls.append(weight.shape)
        return 2 * weight if into is None else torch.mul(weight, 2, out=into)

    return formed(weight, "doubled", make)


def test_a_form_is_made_once_and_again_where_a_weight_changed():
    (weight, other), calls = (torch.randn(4, 3) for _ in range(2)), []
    keeper = Kept([weight, other], CPU)
    with keeping(keeper):
        found = doubled(weight, calls)
        assert doubled(weight.detach(), calls) is found
        # A part of a weight has a form of its own, and so has a form.
        part, twice = doubled(weight[1:].T, calls), doubled(found, calls)
        assert len(calls) == 3
        assert not keeper.changed()
        other.mul_(3)
        assert not keeper.changed()
        weight.data[2, 1] += 1
        assert keeper.changed()
        keeper.renew()
        assert not keeper.changed()
    for made, of in ((found, 2 * weight), (part, 2 * weight[1:].T), (twice, 4 * weight)):
        torch.testing.assert_close(made, of, rtol=0, atol=0)
    # Bits are compared, and one of these is no number.
    weight[0, 0], weight[1, 1] = torch.nan, torch.inf
    assert keeper.changed()
    keeper.renew()
    assert not keeper.changed()


def test_weights_that_share_memory_are_compared_whole():
    memory = torch.randn(12)
    keeper = Kept([memory[:4], memory[4:6].view(torch.int32), memory[6:7].view(torch.bool)], CPU)
    with keeping(keeper):
        doubled(memory[8:], [])
    assert not keeper.changed()
    memory[9] += 1
    assert keeper.changed()


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as a distributed one."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [a.x if isinstance(a, cls) else a for a in args]
        return cls(function(*args, **kwargs or {}))


def test_a_weight_without_memory_has_no_form():
    weights, calls = [Wrapped(torch.randn(3)), torch.empty(0), torch.empty(0, 5)], []
    keeper = Kept(weights, CPU)
    with keeping(keeper):
        for _ in range(2):
            doubled(weights[1], calls)
            keeper.form(weights[0], "same", lambda into: calls.append(into))
    assert len(calls) == 4
    assert not keeper.changed()


def test_nothing_is_kept_of_other_arrays_or_outside():
    weight, calls = torch.randn(3), []
    keeper = Kept([weight], CPU)
    with keeping(keeper):
        for _ in range(2):
            doubled(weight + 1, calls)
    assert len(calls) == 2
    assert kept(CPU) is None
    for _ in range(2):
        doubled(weight, calls)
    assert len(calls) == 4


def test_a_form_is_taken_of_the_same_array_once():
    keeper, form = Kept([], CPU), object()
    x, y = torch.randn(4), torch.randn(4)
    keeper.note(form, x, y)
    assert keeper.take(x) is None
    assert keeper.take(x.view(4), y.detach()) is form
    assert keeper.take(x, y) is None
    for part in (x[:2], x.view(2, 2)):
        keeper.note(form, x)
        assert keeper.take(part) is None
    keeper.note(form, x)
    x.add_(1)
    assert keeper.take(x) is None
    keeper.note(form, x)
    del x, part
    keeper.note(form, y)
    # The form of an array that is gone went with it.
    assert [*keeper._noted] == [(y.data_ptr(),)]
    with keeping(keeper):
        keeper.note(form, y)
    assert keeper.take(y) is None


def test_a_keeper_is_of_all_threads():
    """Autograd's have no context."""
    weight, found = torch.randn(3), []
    with keeping(keeper := Kept([weight], CPU)):
        thread = threading.Thread(target=lambda: found.append(kept(CPU)))
        thread.start()
        thread.join()
    assert found == [keeper]


@pytest.mark.gpu
def test_another_stream_keeps_nothing():
    weight, device = torch.randn(3, device="cuda"), torch.device("cuda", 0)
    with keeping(keeper := Kept([weight], device)):
        assert kept(device) is keeper
        with torch.cuda.stream(torch.cuda.Stream()):
            assert kept(device) is None
