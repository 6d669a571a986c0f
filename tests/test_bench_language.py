"""`fusedops bench` times layers, blocks and servers of language models, and refuses wrong ones."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import benches  # noqa: E402
import fusedops  # noqa: E402
from bench import language, measure, report, steps, tables  # noqa: E402
from bench.contests import OfStep, errors_of_step  # noqa: E402
from bench.peers import EMPTY, PEERS, Unsuited  # noqa: E402
from bench.timing import graphed  # noqa: E402
from bench.workloads import WORKLOADS  # noqa: E402
from fusedops import cli  # noqa: E402
from fusedops._catalogue import BOTH, FORWARD  # noqa: E402
from fusedops.compat import causal_conv1d, fla  # noqa: E402

pytestmark = pytest.mark.usefixtures("young_heap")


@pytest.mark.parametrize(
    ("tokens", "training"),
    [(33, True), (33, False), (1, False)],
    ids=["training", "prefill", "decoding"],
)
def test_our_layer_is_that_of_jet_nemotrons_formulas(tokens, training):
    problem = language._layer(2, tokens, 16, training)
    ours = language._jet_by_module(problem, "torch", "cpu", "float64", None).steps()
    theirs = language._jet_by(language._in_torch, problem, "cpu", "float64").steps()
    stored = language._jet_by(language._stored, problem, "cpu", "float64").steps()
    layer = ["layer", "target"]
    parts = [*layer, *map(steps.backward_of, layer)]
    assert set(ours) == set(theirs) == {FORWARD, *([BOTH, *parts] if training else [])}
    # A step in decoding moves the cache on, so the second has another value.
    for _ in range(2):
        for name in (FORWARD, *[BOTH] * training):
            found = [program[name]() for program in (ours, theirs, stored)]
            assert found[0][0].shape == (() if training else problem.x.shape)
            for got in found[::2]:
                for one, other in zip(got, found[1], strict=True):
                    assert (one - other).abs().max() <= 1e-12 * other.abs().max() > 0


def bench_tiny_layer(monkeypatch, training, checks=None):
    """Let the bench time one small layer, checked first by its own checks or by the step's."""

    def tiny(device):
        few = steps.Case("tiny", lambda: language._layer(1, 3, 16, training), quick=True)
        return replace(language.jet(device), cases=(few,), checks=checks or (few,))

    monkeypatch.setattr(measure, "STEPS", {"jet": tiny})


@pytest.mark.usefixtures("quick_bench")
def test_a_layer_that_makes_kernels_wrong_is_not_timed(monkeypatch, capsys):
    """In one channel of one token, where kernels aren't stored."""
    from fusedops import nn

    def wrong(*arguments, **options):
        called.append(1)
        y = fusedops.dynamic_conv_generated(*arguments, **options)
        y[0, 4, 7] += 1e-3
        return y

    called = []
    checks = [case for case in language.jet("cpu").checks if case.name != "decoding"]
    bench_tiny_layer(monkeypatch, True, tuple(checks))
    monkeypatch.setattr(nn, "dynamic_conv_generated", wrong)
    assert cli.main(["bench", "--quick", "--step", "jet"]) == 1
    assert called
    assert "NOT TIMED, because wrong: jet by" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_bench")
def test_a_peer_that_gives_no_number_is_shown(tmp_path, monkeypatch, capsys):
    def nothing(problem, device):
        return {measure.FORWARD: lambda: (problem.x * torch.nan,)}

    (peer,) = (each for each in PEERS if each.name == "kernels stored")
    bench_tiny_layer(monkeypatch, False)
    monkeypatch.setattr(measure, "PEERS", [replace(peer, prepare=nothing)])
    found = benches.run(tmp_path / "cpu.json", "--step", "jet")["jet"]
    (row,) = [r for r in found["cases"] if not r["ours"]]
    assert row["ms"]
    assert row["error"] == {"value": None}
    assert "not finite" in capsys.readouterr().out


@pytest.fixture
def packages(program):
    """Let our functions pass for those of causal-conv1d and fla."""
    names = ("causal_conv1d_fn", "causal_conv1d_update")
    program("causal_conv1d", **{name: getattr(causal_conv1d, name) for name in names})
    program("fla")
    program("fla.modules")
    names = ("causal_conv1d", "causal_conv1d_update")
    program("fla.modules.convolution", **{name: getattr(fla, name) for name in names})


def peer_of(name, op):
    (found,) = (peer for peer in PEERS if peer.name == name and op in peer.ops)
    return found


SERVERS = "torch eager", "causal-conv1d", "fla"


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("who", ["ours", *SERVERS])
def test_a_server_gives_every_request_its_own_convolution(who):
    step = language.serving("cpu")
    (small,) = (case.make() for case in step.checks)
    # Requests wait, since the batch is full, and prompts are longer than a chunk.
    assert len(small.lengths) > small.batch
    assert max(prompt for prompt, _ in small.lengths) > small.chunk
    if who == "ours":
        made = step.ours(small, "torch", "cpu", "float32", "numpy").steps()
    else:
        made = peer_of(who, "serving").prepare(small, "cpu")
    for _ in range(2):
        assert errors_of_step(made, step.reference(small))["value"] < 1e-6
        # Neither a single step nor a chunk disturbs the requests that follow.
        for name in made.keys() - {FORWARD}:
            made[name]()


def test_a_server_that_forgets_a_state_is_told():
    """A prompt's second chunk, or the first token of an answer, would begin with zeros."""
    step = language.serving("cpu")
    small = step.checks[0].make()

    def forgetful(x, weight, state):
        return language._read_in_torch(x, weight, torch.zeros_like(state))

    program = language.Convolution(forgetful, language._step_in_torch)
    made = language.Server(small, program, "cpu", "float32", False).steps()
    assert errors_of_step(made, step.reference(small))["value"] > 100 * step.tolerance


@pytest.mark.usefixtures("quick_bench")
def test_a_serving_step_has_its_tables(tmp_path, monkeypatch):
    def tiny(device):
        step = language.serving(device)
        return replace(step, cases=(replace(step.checks[0], quick=True),))

    monkeypatch.setattr(measure, "STEPS", {"serving": tiny})
    # On a CPU the host does all the work, beside which an empty function says nothing.
    anywhere = [replace(peer, devices=("cpu",)) if peer.name == EMPTY else peer for peer in PEERS]
    monkeypatch.setattr(measure, "PEERS", anywhere)
    monkeypatch.setattr(OfStep, "times_host", True)
    rows = benches.run(tmp_path / "cpu.json", "--step", "serving")["serving"]["cases"]
    assert {row["who"] for row in rows if not row["ours"]} == {"torch eager", EMPTY}
    for row in rows:
        held = row["pass"] == language.CONVOLUTION
        assert (row["over_empty"] is not None) == (held and row["who"] != EMPTY)
        assert row["share"] is None
    told = "<!-- measured: serving cpu -->\n<!-- end of measured -->\n"
    written = tables.tables(told, tmp_path)
    assert EMPTY not in written
    assert "tokens/s" in written
    assert "; host " in written


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["causal-conv1d", "fla"])
def test_a_peer_of_static_kernels(name):
    workloads = [w for w in WORKLOADS if w.op is fusedops.dynamic_conv and not w.tiny]
    done = list(benches.judged(peer_of(name, "dynamic_conv"), workloads, 5))
    assert [workload.name for workload, _ in done] == ["static, SiLU"] * 3
    assert max(max(found.values()) for _, found in done) < 1e-5


@pytest.mark.usefixtures("quick_bench")
def test_a_case_that_is_left_out_is_told_once(monkeypatch, capsys):
    """A table follows every case, here of none."""

    def unsuited(*sizes, **options):
        raise Unsuited("no machine is large enough")

    monkeypatch.setattr(language, "_block", unsuited)
    assert cli.main(["bench", "--step", "jet_block"]) == 2
    names = "training", "prefill", "decoding"
    assert capsys.readouterr().out.splitlines() == [
        f"jet_block, {name} is left out: no machine is large enough" for name in names
    ]


def test_a_jet_block_of_jet_nemotron_needs_its_packages(monkeypatch, tmp_path):
    theirs = peer_of("Jet-Nemotron", "jet_block")
    monkeypatch.setenv("FUSEDOPS_PEERS", str(tmp_path))
    assert "checkout of https://github.com/NVlabs/Jet-Nemotron" in theirs.why_not()
    (tmp_path / language.JET).mkdir(parents=True)
    (tmp_path / language.BLOCK).touch()
    monkeypatch.setitem(sys.modules, "fla", None)
    assert theirs.why_not() == "not installed"


NORM = """
class FusedRMSNormGated:
    def __init__(self, size):
        pass
"""
BLOCK = """
import dataclasses

import fusedops.nn

from .norm import FusedRMSNormGated


@dataclasses.dataclass
class JetBlockConfig:
    num_heads: int
    head_dim: int
    expand_v: float
    dconv_implementation: str


class JetBlock(fusedops.nn.JetBlock):
    def __init__(self, hidden_size, initializer_range, layer_idx, jet_block_config):
        c = jet_block_config
        super().__init__(hidden_size, c.num_heads, c.head_dim, c.expand_v)
        FusedRMSNormGated(c.head_dim, autotune_interval=7)

    def forward(self, x, past_key_value, use_cache):
        names = "conv_state", "recurrent_state"
        # A copy, since ours updates a cache in place.
        given = tuple(past_key_value[0][name].clone() for name in names) if use_cache else None
        y, cache = super().forward(x, cache=given, output_final_state=use_cache)
        if use_cache:
            past_key_value.update(layer_idx=0, **dict(zip(names, cache)))
        return y, past_key_value
"""
CACHE = """
class JetNemotronCache:
    made = []

    def __init__(self):
        self.states = []
        self.made.append(self)

    def __getitem__(self, layer_idx):
        return self.states[layer_idx]

    def update(self, layer_idx, **state):
        self.states[layer_idx:] = [state]
"""


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """Have files with Jet-Nemotron's names."""
    monkeypatch.setenv("FUSEDOPS_PEERS", str(tmp_path))
    folder = tmp_path / language.JET
    folder.mkdir(parents=True)
    for name, code in {"norm": NORM, "jet_block": BLOCK, "kv_cache": CACHE}.items():
        (folder / f"{name}.py").write_text(code)
    language.file_module.cache_clear()
    monkeypatch.setattr(language, "_no_training", lambda: None)


def test_a_block_keeps_its_state_where_it_is(checkout):
    """A CUDA graph that was captured with other memory would read it when it is gone."""
    problem = language._block(2, 1, 2, 8, False).to("cpu", "float64")
    function, _ = language._their_block(problem)
    cache = language.file_module(f"{language.JET}/kv_cache.py").JetNemotronCache.made[-1]
    state = cache[0]["recurrent_state"]
    before = state.clone()
    with torch.no_grad():
        one, other = function(problem.x), function(problem.x)
    assert cache[0]["recurrent_state"] is state
    assert not torch.equal(state, before)
    assert not torch.equal(one, other)


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("tokens", [5, 1], ids=["training", "decoding"])
def test_a_jet_block_is_that_of_jet_nemotrons_formulas(tokens):
    """By our module, by a block of a checkout, and by torch with chunks of tokens."""
    problem = language._block(2, tokens, 2, 8, tokens > 1, "float64")
    formula = language._block_by(language._formula_of_block, problem, "cpu", "float64").steps()
    programs = [
        language._block_by_module(problem, "torch", "cpu", "float64", None).steps(),
        language.jet_block_by_its_kernels(problem, "cpu"),
        language.jet_block_in_torch(problem, "cpu"),
    ]
    # A step in decoding moves the cache on, so the second has another value.
    for _ in range(2):
        truth = language.result(formula)
        for made in programs:
            found = language.result(made)
            assert len(found) == len(truth) == (1 + 1 + 13 if tokens > 1 else 1)
            for got, want in zip(found, truth, strict=True):
                assert (got - want).abs().max() <= 1e-10 * want.abs().max() > 0


def test_a_rule_by_chunks_of_tokens_is_that_by_tokens():
    """With a last chunk that isn't full."""
    normal = language._drawn(0)
    q, k = normal(2, 130, 3, language.KEYS), normal(2, 130, 3, language.KEYS, scale=0.1)
    v, g, beta = normal(2, 130, 3, 5), -normal(2, 130, 3).abs(), normal(2, 130, 3).sigmoid()
    given = q, k, v, g, beta, normal(2, 3, language.KEYS, 5)
    torch.testing.assert_close(language._rule_by_chunks(*given), language._rule_by_tokens(*given))


@pytest.mark.gpu
def test_every_pass_of_a_layer_has_its_graph(tmp_path):
    path = tmp_path / "gpu.json"
    arguments = ["bench", "--quick", "--device", "cuda", "--step", "jet", "--json", str(path)]
    assert cli.main(arguments) == 0
    rows = [row for row in report.cases(report.read(path)) if row["how"] == "CUDA graph"]
    assert {row["pass"] for row in rows} == {FORWARD, BOTH}
    for row in rows:
        assert row["ms"], row


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_and_random_numbers():
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        graphed(lambda: torch.ones(1, device="cuda").item())
    assert torch.cuda.current_stream() == before
    torch.rand(1, device="cuda")
