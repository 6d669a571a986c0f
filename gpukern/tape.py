"""Replays the work of a kernel's Python for further arguments of the same kind.

A kernel's work on the host follows from the kinds of its arguments: the compiled forms it launches,
their integers, and the calls of torch in between. So the first call of a kind is recorded, launch
by launch, and later calls launch the same forms on other addresses, in a tenth of the time. A
kernel that asks torch for a value is not replayed, as its work might change with the value.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from fusedops._ahead import ahead
from fusedops._frame.check import warn
from fusedops._frame.packed import Packed
from fusedops._kept import kept

#: More steps than this take a GPU as long as the host.
_LONGEST = 256

#: The most bytes of an array of scratch that lies with others in one memory, the first that is met.
_TOGETHER = 1 << 24, 1 << 20, 1 << 17
#: The most bytes that a call may take more for it, and never more than an eighth.
_MORE = 1 << 20
#: Torch allocates memory in multiples of so many bytes.
_UNIT = 512

# Triton's launcher is no public interface: another version's may differ.
_DIRECT = triton.__version__.startswith("3.6.") and torch.version.cuda is not None

_here = threading.local()
_switching = threading.RLock()

aten = torch.ops.aten
_EMPTY = {
    aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default,
    aten.empty_strided.default, aten.new_empty_strided.default,
}  # fmt: skip
#: Functions for operators: they take the same arguments, but skip the look into a schema.
_FASTER = {
    aten.add.Tensor: torch.add,
    aten.addmm.out: torch.addmm,
    aten.baddbmm.out: torch.baddbmm,
    aten.bmm.default: torch.bmm,
    aten.bmm.out: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.copy_.default: torch.Tensor.copy_,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.stack.default: torch.stack,
    aten.sum.dim_IntList: torch.sum,
    aten.zero_.default: torch.Tensor.zero_,
}
if hasattr(aten.bmm, "dtype"):
    _FASTER[aten.bmm.dtype] = lambda a, b, dtype: torch.bmm(a, b, out_dtype=dtype)


class _Refused(Exception):
    """A step can't be replayed; the message says why."""


class _Ref(NamedTuple):
    """A tensor of a tape, by its number."""

    number: int


class _Value(NamedTuple):
    """A tensor that has been met.

    A view is found by its root, in whose memory it lies, by its bytes from the root's start, and by
    its layout; any other tensor is its own root.
    """

    root: int
    offset: int
    dtype: torch.dtype
    layout: tuple[Any, ...]


class _Call(NamedTuple):
    """A call of torch, and the numbers of the tensors it makes; empty memory has no function."""

    function: Callable[..., Any] | None
    args: list[Any]
    options: dict[str, Any]
    made: list[int]


class _Launch(NamedTuple):
    """A launch of a compiled kernel, with (position, root, bytes) of its pointers.

    At the position of a descriptor, `args` has the rest of it.
    """

    launch: Callable[..., Any]
    head: tuple[Any, ...]
    function: Any
    tail: tuple[Any, ...]
    args: list[Any]
    pointers: list[tuple[int, int, int]]


class _Descriptor(NamedTuple):
    """A descriptor of memory at an address, with all that Triton's launcher reads of one."""

    address: int
    shape: list[int]
    strides: list[int]
    padding: str

    @property
    def base(self) -> _Descriptor:
        return self

    def data_ptr(self) -> int:
        return self.address


class _Recorder(TorchDispatchMode):
    """Notes the calls and launches that take tensors whose numbers are known."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.values: list[_Value] = []
        self.numbers: dict[int, int] = {}
        # Weak, so that memory comes free as early as without a record.
        self.alive: list[Any] = []
        for at, tensor in enumerate(known):
            self._met(tensor, _Value(at, 0, tensor.dtype, ()))
        self.steps: list[_Call | _Launch] = []
        self.refused: str | None = None
        #: Torch's switch for TF32 that a kernel has set; None if it is torch's own.
        self.tf32: bool | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        if self.refused is None:
            try:
                self._note(function, args, options, result)
            except _Refused as refusal:
                self.refused = f"{function}: {refusal}"
        return result

    def _note(self, function: Any, args: Any, options: dict[str, Any], result: Any) -> None:
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        if any(tag in function.tags for tag in tags):
            raise _Refused("it depends on values")
        if len(self.steps) >= _LONGEST:
            raise _Refused("there are too many steps")
        made = result if isinstance(result, (tuple, list)) else [result]
        made = [] if result is None else made
        given = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
        if not given and not any(isinstance(value, torch.Tensor) for value in made):
            # A call on dtypes alone need not be replayed.
            return
        views = bool(made) and not function._schema.is_mutable
        numbers = []
        for tensor in made:
            value = self._value(tensor, given)
            numbers.append(len(self.values) if value else self._number(tensor))
            if value:
                self._met(tensor, value)
            views = views and value is not None and bool(value.layout)
        if views:
            # A view is made of its root where it is used.
            return
        if function in _EMPTY:
            memory = [tuple(result.shape), result.stride(), result.dtype]
            self.steps.append(_Call(None, memory, {}, numbers))
            return
        if self.tf32 is not None:
            function = functools.partial(_switched, self.tf32, _FASTER.get(function, function))
        refs = [self._refs(value) for value in args]
        named = {name: self._refs(value) for name, value in options.items()}
        self.steps.append(_Call(function, refs, named, numbers))

    def _value(self, tensor: Any, given: Sequence[torch.Tensor]) -> _Value | None:
        """Return the value of a tensor that a call made; None if the tensor was there before."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            raise _Refused("it leaves the GPU")
        if id(tensor) in self.numbers:
            return None
        # A tensor without an element has no address of its own.
        memory = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        bases = [t for t in given if memory and t.untyped_storage().data_ptr() == memory]
        own = _Value(len(self.values), 0, tensor.dtype, ())
        if not bases:
            return own
        base = self.values[self._number(bases[0])]
        if base.dtype != tensor.dtype:
            return own
        offset = base.offset + tensor.data_ptr() - bases[0].data_ptr()
        steps = offset // tensor.itemsize
        return base._replace(offset=offset, layout=(tuple(tensor.shape), tensor.stride(), steps))

    def _met(self, tensor: torch.Tensor, value: _Value) -> None:
        name, numbers = id(tensor), self.numbers
        numbers[name] = len(self.values)
        self.values.append(value)
        self.alive.append(weakref.ref(tensor, lambda _: numbers.pop(name, None)))

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self.numbers:
            raise _Refused("a tensor comes from elsewhere")
        return self.numbers[id(tensor)]

    def _refs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Ref(self._number(value))
        if isinstance(value, (list, tuple)):
            return [self._refs(part) for part in value]
        return value

    def launch(self, compiled: Any, programs: int, args: Sequence[Any]) -> None:
        """Note a launch of a compiled kernel."""
        if self.refused is None:
            try:
                self._note_launch(compiled, programs, args)
            except _Refused as refusal:
                self.refused = f"{compiled.name}: {refusal}"

    def _note_launch(self, compiled: Any, programs: int, args: Sequence[Any]) -> None:
        runner = compiled.run
        if runner.global_scratch_size or runner.profile_scratch_size:
            raise _Refused("it takes memory of Triton's")
        pointers, others = [], list(args)
        for at, value in enumerate(args):
            described = hasattr(value, "base")
            if described or isinstance(value, torch.Tensor):
                found = self.values[self._number(value.base if described else value)]
                pointers.append((at, found.root, found.offset))
                others[at] = (value.shape, value.strides, value.padding) if described else None
        head = (programs, 1, 1)
        flags = runner.launch_cooperative_grid, runner.launch_pdl, None, None
        tail = (*flags, compiled.packed_metadata, None, None, None)
        step = _Launch(runner.launch, head, compiled.function, tail, others, pointers)
        self.steps.append(step)


def _switched(tf32: bool, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of torch that multiplies float32 with TF32, or without."""
    matmul: Any = torch.backends.cuda.matmul
    # Newer versions refuse the older of the names after a use of the newer.
    name, values = "fp32_precision", ("ieee", "tf32")
    if not hasattr(matmul, name):
        name, values = "allow_tf32", (False, True)
    # The switch is the process's: without turns, threads would leave one another's setting behind.
    with _switching:
        before, now = getattr(matmul, name), values[tf32]
        if before == now:
            return function(*args, **options)
        setattr(matmul, name, now)
        try:
            return function(*args, **options)
        finally:
            setattr(matmul, name, before)


def product(tf32: bool | None, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call a function of torch that multiplies float32 with TF32, without, or as torch does."""
    if tf32 is None:
        function(*args, **options)
        return
    recorder = recording()
    if recorder is not None:
        recorder.tf32 = tf32
    try:
        _switched(tf32, function, *args, **options)
    finally:
        if recorder is not None:
            recorder.tf32 = None


def recording() -> _Recorder | None:
    """Return the recorder of this thread's launches, if there is one."""
    return getattr(_here, "recorder", None)


@functools.cache
def _warn_of_no_tape() -> None:
    """Warn, once in a process."""
    warn(
        f"fusedops records launches with Triton 3.6 alone, and this is {triton.__version__}: each "
        "launch takes the host about 10 µs instead of 4, and each call runs the kernel's Python "
        "again; results are the same"
    )


def per_plan(kernel: Callable[[Any, Any], None], device: Any) -> Callable[[Any, Any], None]:
    """Return a function that does a kernel's work for arguments of one kind."""
    if device.type != "cuda":
        return kernel
    if not _DIRECT:
        if torch.version.cuda is not None:
            _warn_of_no_tape()
        return kernel
    found: list[Callable[[Any, Any], None] | None] = []

    def run(a: Any, y: Any) -> None:
        if kept(device) is not None or ahead(device) is not None:
            # A tape has other addresses for arguments alone, and kept forms are none. It would lack
            # launches in whose place kernels are compiled.
            kernel(a, y)
            return
        if not found:
            found.append(_recorded(kernel, a, y)) if _is_clear(a, y) else kernel(a, y)
            return
        replay = found[0]
        if replay is None or knobs.runtime.launch_enter_hook.calls:
            kernel(a, y)
        else:
            replay(a, y)

    return run


def _sources(a: Any, y: Any) -> list[tuple[bool, int, int | None]]:
    """Return for each tensor of a call whether it is an output, its place, and its packed part."""
    found: list[tuple[bool, int, int | None]] = []
    for output, record in ((False, a), (True, y)):
        for at, value in enumerate(record):
            if isinstance(value, torch.Tensor):
                found.append((output, at, None))
            elif isinstance(value, Packed):
                found += [(output, at, part) for part in range(len(value.tensors_here()))]
    return found


def _fetch(a: Any, y: Any, sources: Sequence[tuple[bool, int, int | None]]) -> list[Any]:
    values = []
    for output, at, part in sources:
        value = y[at] if output else a[at]
        values.append(value if part is None else value.tensors_here()[part])
    return values


def _is_clear(a: Any, y: Any) -> bool:
    """Return whether every tensor of a call is an argument once."""
    known = [id(tensor) for tensor in _fetch(a, y, _sources(a, y))]
    return len(set(known)) == len(known) and recording() is None


def _recorded(kernel: Any, a: Any, y: Any) -> Callable[[Any, Any], None] | None:
    """Run a kernel, and return a function that replays it; None where none can."""
    sources = _sources(a, y)
    recorder = _Recorder(_fetch(a, y, sources))
    _here.recorder = recorder
    try:
        with recorder:
            kernel(a, y)
    finally:
        del _here.recorder
    if recorder.refused is not None:
        return None
    return _compiled(recorder.steps, recorder.values, sources)


def _compiled(
    steps: list[_Call | _Launch], values: list[_Value], sources: list[tuple[bool, int, int | None]]
) -> Callable[[Any, Any], None]:
    """Return a function that takes the steps, in Python written out: a loop would save no time."""
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        for number in _used(step):
            last[number] = last[values[number].root] = at
    addressed = {
        root for step in steps if isinstance(step, _Launch) for _, root, _ in step.pointers
    }
    names: dict[str, Any] = {
        "stream": torch._C._cuda_getCurrentRawStream,
        "device": torch.cuda.current_device(),
        "empty": torch._C._dynamo.guards._empty_strided_cuda,
        "view": torch._C._dynamo.guards._reinterpret_tensor,
        "described": _Descriptor,
    }
    places, size = _together(steps, values, last)
    lines = ["s = stream(device)"]
    if places:
        names["m"] = (size,), (1,), torch.uint8
        lines += ["v = empty(*m)", "p = v.data_ptr()"]
    for number, (output, at, part) in enumerate(sources):
        record = f"{'y' if output else 'a'}"
        if part == 0:
            lines.append(f"{record}{at} = {record}[{at}].tensors_here()")
        if number in last:
            of = f"{record}[{at}]" if part is None else f"{record}{at}[{part}]"
            lines.append(f"v{number} = {of}")
            lines += [f"p{number} = v{number}.data_ptr()"] if number in addressed else []
    there = set(range(len(sources)))
    for at, step in enumerate(steps):
        if isinstance(step, _Launch):
            lines.append(_launched(step, at, names))
        elif step.made and step.made[0] in places:
            lines.append(f"p{step.made[0]} = p + {places[step.made[0]]}")
        elif step.function is not None or last.get(step.made[0], -1) > at:
            for number in _given(step):
                if number not in there:
                    root, _, _, (shape, strides, skipped) = values[number]
                    names[f"l{number}"] = shape, strides, skipped
                    lines.append(f"v{number} = view(v{root}, *l{number})")
                    there.add(number)
            lines += _called(step, at, names)
            fresh = [number for number in step.made if number not in there]
            lines += [f"p{n} = v{n}.data_ptr()" for n in fresh if n in addressed]
            there.update(fresh)
        gone = [n for n, when in last.items() if when == at and n >= len(sources) and n in there]
        lines += [f"v{number} = None" for number in gone]
    exec("def replay(a, y):\n    " + "\n    ".join(lines), names)
    replay: Callable[[Any, Any], None] = names["replay"]
    return replay


def _together(
    steps: list[_Call | _Launch], values: list[_Value], last: dict[int, int]
) -> tuple[dict[int, int], int]:
    """Return places in one memory, by number, of tensors that launches alone use, and its size.

    Tensors that live at once lie apart. Large ones have memory of their own where the places would
    take much, or a call, which keeps them to its end, much more than with separate memories.
    """
    calls = [step for step in steps if isinstance(step, _Call) and step.function is not None]
    given = {values[number].root for step in calls for number in _used(step)}
    # By number: the size of a tensor, and the first and the last step of its life.
    spans: dict[int, tuple[int, int, int]] = {}
    others: list[tuple[int, int, int]] = []
    for at, step in enumerate(steps):
        if isinstance(step, _Call) and step.function is None:
            (number,), (shape, strides, dtype) = step.made, step.args
            if last[number] > at:
                steps_to_last = [(n - 1) * by for n, by in zip(shape, strides, strict=True)]
                extent = 0 if 0 in shape else 1 + sum(steps_to_last)
                size = -(-extent * dtype.itemsize // _UNIT) * _UNIT
                span = size, at, last[number]
                if number in given:
                    others.append(span)
                else:
                    spans[number] = span

    def most(living: list[tuple[int, int, int]]) -> int:
        """Return the most bytes that live at once."""
        alive = [
            sum([size for size, first, until in living if first <= at <= until])
            for at in range(len(steps))
        ]
        return max(alive, default=0)

    apart = most([*spans.values(), *others])
    for limit in _TOGETHER:
        small = {number: span for number, span in spans.items() if span[0] <= limit}
        large = [span for number, span in spans.items() if number not in small]
        places, total = _placed(small)
        if total <= _TOGETHER[0] and total + most(others + large) <= apart + min(apart // 8, _MORE):
            return places, total
    return {}, 0


def _placed(spans: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Return places for tensors of some size, first and last step, and the size of all."""
    places: dict[int, int] = {}
    # The longest lives come first, each at the first place that has room.
    longest_first = sorted(spans.items(), key=lambda item: item[1][1] - item[1][2])
    for number, (size, first, until) in longest_first:
        place = 0
        for other in sorted(places, key=places.__getitem__):
            other_size, other_first, other_until = spans[other]
            if first <= other_until and other_first <= until:
                if place + size <= places[other]:
                    break
                place = max(place, places[other] + other_size)
        places[number] = place
    return places, max([place + spans[number][0] for number, place in places.items()], default=0)


def _used(step: _Call | _Launch) -> list[int]:
    """Return the numbers of the tensors that a step reads, writes or makes."""
    if isinstance(step, _Launch):
        return [root for _, root, _ in step.pointers]
    return [*_given(step), *step.made]


def _given(step: _Call) -> list[int]:
    return _numbers((step.args, list(step.options.values())))


def _launched(step: _Launch, at: int, names: dict[str, Any]) -> str:
    """Return a launch as Python; pointers come first, and all after the last is one tuple."""
    count = max((position for position, *_ in step.pointers), default=-1) + 1
    first = [f"c{at}_{position}" for position in range(count)]
    names |= dict(zip(first, step.args, strict=False))
    for position, root, offset in step.pointers:
        address = f"p{root} + {offset}" if offset else f"p{root}"
        described = step.args[position] is not None
        rest = first[position]
        first[position] = f"described({address}, *{rest})" if described else address
    names |= {f"f{at}": step.launch, f"h{at}": step.function, f"t{at}": step.tail}
    names[f"c{at}"] = tuple(step.args[count:])
    grid = ", ".join(map(str, step.head))
    return f"f{at}({grid}, s, h{at}, *t{at}, {', '.join(first)}, *c{at})"


def _called(step: _Call, at: int, names: dict[str, Any]) -> list[str]:
    """Return a call of torch as Python."""
    if step.function is None:
        names[f"m{at}"] = step.args
        return [f"v{step.made[0]} = empty(*m{at})"]
    names[f"f{at}"] = _FASTER.get(step.function, step.function)
    args = [_written(value, names, f"c{at}_{i}") for i, value in enumerate(step.args)]
    args += [
        f"{name}={_written(value, names, f'c{at}_{name}')}" for name, value in step.options.items()
    ]
    call = f"f{at}({', '.join(args)})"
    if len(step.made) == 1:
        return [f"v{step.made[0]} = {call}"]
    return [f"r = {call}", *(f"v{n} = r[{i}]" for i, n in enumerate(step.made))]


def _numbers(value: Any) -> list[int]:
    if isinstance(value, _Ref):
        return [value.number]
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in _numbers(part)]
    return []


def _written(value: Any, names: dict[str, Any], name: str) -> str:
    """Return a value as Python: by a name, where it has no other form."""
    if isinstance(value, _Ref):
        return f"v{value.number}"
    if isinstance(value, list) and _numbers(value):
        parts = [_written(part, names, f"{name}_{i}") for i, part in enumerate(value)]
        return f"[{', '.join(parts)}]"
    names[name] = value
    return name
