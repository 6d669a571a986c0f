"""What kernels keep of frozen weights."""

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
    keeper, zero = Kept([weight, other]), torch.zeros((), dtype=torch.float64)
    with keeping(keeper, CPU):
        found = doubled(weight, calls)
        assert doubled(weight.detach(), calls) is found
        # A part of a weight has a form of its own, and so has a form.
        part, twice = doubled(weight[1:].T, calls), doubled(found, calls)
        assert len(calls) == 3
        assert keeper.change(zero) == 0
        other.mul_(3)
        assert keeper.change(zero) == 0
        weight.data[2, 1] += 1
        assert keeper.change(zero) == pytest.approx(1, abs=1e-6)
        keeper.renew()
        assert keeper.change(zero) == 0
    for made, of in ((found, 2 * weight), (part, 2 * weight[1:].T), (twice, 4 * weight)):
        torch.testing.assert_close(made, of, rtol=0, atol=0)
    weight[0, 0] = torch.nan
    assert keeper.change(zero).isnan()


def test_weights_that_share_memory_are_compared_whole():
    memory = torch.randn(2, 3)
    keeper, zero = Kept(memory), torch.zeros(())
    with keeping(keeper, CPU):
        doubled(memory[0], [])
    memory[1, 2] += 1
    assert keeper.change(zero) > 0


def test_nothing_is_kept_of_other_arrays_or_outside():
    weight, calls = torch.randn(3), []
    keeper = Kept([weight])
    with keeping(keeper, CPU):
        for _ in range(2):
            doubled(weight + 1, calls)
    assert len(calls) == 2
    assert kept(CPU) is None
    for _ in range(2):
        doubled(weight, calls)
    assert len(calls) == 4


def test_a_keeper_is_of_all_threads():
    """Autograd's have no context."""
    weight, found = torch.randn(3), []
    with keeping(keeper := Kept([weight]), CPU):
        thread = threading.Thread(target=lambda: found.append(kept(CPU)))
        thread.start()
        thread.join()
    assert found == [keeper]


@pytest.mark.gpu
def test_another_stream_keeps_nothing():
    weight, device = torch.randn(3, device="cuda"), torch.device("cuda", 0)
    with keeping(keeper := Kept([weight]), device):
        assert kept(device) is keeper
        with torch.cuda.stream(torch.cuda.Stream()):
            assert kept(device) is None
