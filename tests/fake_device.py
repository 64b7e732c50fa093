"""A device without hardware: tensors that are on ``toy:0``, with kernels of the CPU, and a count of what is waited for.

`install` registers it, once and for the whole process, so that the tests of it run in processes of their own. A tensor
of it is a plain `torch.Tensor` with a storage of its own: every dispatch, autograd thread and device check is the one
that a GPU would meet, and the numbers are right. What a GPU would refuse (tensors on two devices) is refused, and
what it would wait for (a value that the host reads, a copy that is not asynchronous) is noted with the line that asked
for it. Its random numbers come from a state of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "toy"
DEVICE: torch.device
"""Set by `install`."""
_CPU = torch._C.DispatchKey.CPU
_aten = torch.ops.aten

_READS = {
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default,
    _aten.is_nonzero.default, _aten._unique2.default,
}  # fmt: skip
"""Operations whose result depends on values that the host must know."""

_TAKE_HOST_SCALARS = {_aten.fill_.Tensor, _aten.where.self, _aten.index_put_.default, _aten._index_put_impl_.default}
"""Operations that take a 0-dim tensor on the host, beside the pointwise ones."""


@dataclasses.dataclass
class Log:
    """What happened since it was cleared: ``kind @ file:line`` of the package's innermost frame."""

    waits: list[str] = dataclasses.field(default_factory=list)
    """Values that the host read, and copies that it waited for."""
    copies: list[str] = dataclasses.field(default_factory=list)
    """Asynchronous copies between host and device."""
    random: list[str] = dataclasses.field(default_factory=list)
    """Reads of the random state."""
    events: list[str] = dataclasses.field(default_factory=list)
    """What was done with events."""

    def clear(self) -> None:
        """Forget everything."""
        for entries in vars(self).values():
            entries.clear()


LOG = Log()


def _caller() -> str:
    """Return the innermost line of the package, or of a test, on the stack."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "bda_optim/" in name or ("tests/" in name and "fake_device" not in name):
            return f"{name.rpartition('bda_optim/')[2].rpartition('tests/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


# Tensors.


def _place(tensor: Tensor, values: Tensor, storage: Any = None) -> Tensor:
    """Give a tensor of the device the memory of one on the host; `storage` is the device's own, if it exists."""
    if storage is None:
        memory = values.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), DEVICE, memory.nbytes())
        storage.values = values
    place = (values.storage_offset(), values.shape, values.stride())
    _aten.set_.source_Storage_storage_offset._op_dk(_CPU, tensor, storage, *place)
    return tensor


def _from_host(values: Tensor, storage: Any = None) -> Tensor:
    """Return a tensor of the device with the memory of one on the host."""
    return _place(torch._C._acc.create_empty_tensor((), values.dtype), values, storage)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor on the host with the same memory."""
    values: Tensor = tensor.untyped_storage().values  # type: ignore[attr-defined]
    if tensor.dtype == values.dtype:
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    other = torch.tensor((), dtype=tensor.dtype, device="cpu")
    return other.set_(values.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


# Kernels.


class _Kernel:
    """An operation of the device: the host's, on the same memory."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._pointwise = torch.Tag.pointwise in op.tags or op in _TAKE_HOST_SCALARS
        self._reads = op in _READS
        self._random = torch.Tag.nondeterministic_seeded in op.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        own: list[Tensor] = []
        twins: list[Tensor] = []
        host = [self._plain(value, own, twins) for value in args]
        names = {name: self._plain(value, own, twins) for name, value in kwargs.items()}
        if self._reads:
            LOG.waits.append(f"{self._op} @ {_caller()}")
        if self._random:
            with _drawing():
                result = self._op(*host, **names)
        else:
            result = self._op(*host, **names)
        return _wrapped(result, own, twins)

    def _plain(self, value: Any, own: list[Tensor], twins: list[Tensor]) -> Any:
        """Return an argument as the host's kernel takes it."""
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            if value.device != DEVICE:
                self._check(value)
                return value
            own.append(value)
            twins.append(_on_host(value))
            return twins[-1]
        if kind is list or kind is tuple:
            return [self._plain(item, own, twins) for item in value]
        return torch.device("cpu") if kind is torch.device else value

    def _check(self, tensor: Tensor) -> None:
        """Refuse what a GPU would refuse."""
        if not (self._pointwise and tensor.dim() == 0 and tensor.device.type == "cpu"):
            place = f"{tuple(tensor.shape)} on {tensor.device}"
            raise RuntimeError(f"{self._op}: expected all tensors to be on the same device; got {place}")


def _wrapped(value: Any, own: Sequence[Tensor], twins: Sequence[Tensor]) -> Any:
    """Return what the host's kernel gave, with its tensors on the device."""
    if isinstance(value, Tensor):
        return _back(value, own, twins)
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(item, own, twins) for item in value)
    return value


def _back(value: Tensor, own: Sequence[Tensor], twins: Sequence[Tensor]) -> Tensor:
    """Return a result on the device; a view or an argument stays one."""
    memory = value.untyped_storage()._cdata
    for tensor, twin in zip(own, twins, strict=True):
        if value is twin:
            same = twin.shape == tensor.shape and twin.stride() == tensor.stride()
            return tensor if same else _place(tensor, twin)  # an `out=` of another size
        if twin.untyped_storage()._cdata == memory:
            return _from_host(value, tensor.untyped_storage())
    return _from_host(value)


_kernels: dict[Any, _Kernel] = {}


def _any(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation."""
    if op not in _kernels:
        _kernels[op] = _Kernel(op)
    return _kernels[op](*args, **kwargs)


_WHOLE = (
    "transpose.int", "t", "select.int", "slice.Tensor", "unsqueeze", "expand", "permute", "squeeze", "squeeze.dim",
    "zeros_like", "ones_like", "full_like", "empty_like", "mul.Scalar", "add.Scalar", "sub.Scalar", "div.Scalar",
    "unbind.int", "split.Tensor", "isinf", "stack", "new_zeros", "new_empty", "new_empty_strided", "native_dropout",
)  # fmt: skip
"""Operations that torch composes of others: run as one they take a fraction of the time."""


def _single_operations() -> Iterator[tuple[str, Any]]:
    """Yield those that the device runs as one: the above, and all that torch would turn into ``out=`` and `empty`."""
    composed = "CompositeExplicitAutogradNonFunctional"
    for full in torch._C._dispatch_get_all_op_names():
        library, _, name = full.partition("::")
        if library == "aten" and (name in _WHOLE or torch._C._dispatch_has_kernel_for_dispatch_key(full, composed)):
            base, _, overload = name.partition(".")
            yield name, getattr(getattr(_aten, base), overload or "default")


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between the devices, or on one of them."""
    ends = [t.device == DEVICE for t in (source, target)]
    if not all(ends):
        host = source if ends[1] else target
        pinned = getattr(host.untyped_storage(), "pinned", False)
        kind = "to the device" if ends[1] else "to the host"
        if pinned and non_blocking:
            LOG.copies.append(f"{kind} @ {_caller()}")
        else:
            LOG.waits.append(f"{kind} @ {_caller()}")
    plain = [_on_host(t) if away else t for t, away in zip((source, target), ends, strict=True)]
    plain[1].copy_(plain[0])
    return target


def _convolution(*args: Any) -> Tensor:
    result: Tensor = _any(_aten.convolution.default, *args)
    return result


def _convolution_backward(cotangent: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    transposed, groups = options[3], options[5]
    sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
    result: tuple[Tensor, ...] = _any(
        _aten.convolution_backward.default, cotangent, x, weight, sizes, *options[:-1], list(options[-1])
    )
    return result


def _lstm_cell(
    x: Tensor, hidden: Tensor, cell: Tensor, x_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The cell that only GPUs have in one kernel; the last result is what its pull-back needs."""
    gates = x + hidden
    for bias in (x_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    kept = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)
    i, f, g, o = kept.chunk(4, 1)
    after = f * cell + i * g
    return o * after.tanh(), after, kept


def _lstm_cell_backward(
    hidden: Tensor | None, after: Tensor | None, cell: Tensor, new: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = kept.chunk(4, 1)
    bent = new.tanh()
    hidden = torch.zeros_like(new) if hidden is None else hidden
    total = hidden * o * (1 - bent * bent) + (0.0 if after is None else after)
    slopes = [total * g * i * (1 - i), total * cell * f * (1 - f), total * i * (1 - g * g), hidden * bent * o * (1 - o)]
    gates = torch.cat(slopes, 1)
    return gates, total * f, gates.sum(0) if has_bias else None


# Random numbers.


class _Random:
    state = torch.Generator().manual_seed(0).get_state()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Let the host's kernels draw from the device's state."""
    outside = torch.get_rng_state()
    torch.set_rng_state(_Random.state)
    try:
        yield
    finally:
        _Random.state = torch.get_rng_state()
        torch.set_rng_state(outside)


# The module ``torch.toy``.


class Event:
    """An event, which notes what is done with it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        """Note that the work before it is to be waited for."""
        self.recorded = True
        LOG.events.append(f"record {id(self)}")

    def wait(self, stream: Any = None) -> None:
        """Note that the device waits, not the host."""
        assert self.recorded
        LOG.events.append(f"wait {id(self)}")

    def synchronize(self) -> None:
        """Note that the host waits."""
        LOG.waits.append(f"synchronize @ {_caller()}")


class Stream:
    """The only stream."""

    def wait_event(self, event: Event) -> None:
        """Wait on the device."""
        event.wait(self)

    def synchronize(self) -> None:
        """Note that the host waits."""
        LOG.waits.append(f"synchronize @ {_caller()}")


class Module(types.ModuleType):
    """What ``torch.toy`` offers: the functions that torch.cuda and torch.xpu have in common."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        super().__init__(NAME)
        self._stream = Stream()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device(self, index: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    def synchronize(self, device: Any = None) -> None:
        LOG.waits.append(f"synchronize @ {_caller()}")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def manual_seed_all(self, seed: int) -> None:
        _Random.state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        LOG.random.append(_caller())
        return _Random.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        _Random.state = state.clone()


def is_possible() -> bool:
    """Whether this torch can have a device that is written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and hasattr(torch._C, "_acc")


_libraries: list[torch.library.Library] = []


def install() -> torch.device:
    """Register the device in this process, and return it."""
    global DEVICE
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
        DEVICE = torch.device(NAME, 0)
        every = torch.library.Library("_", "IMPL")
        every.fallback(_any, "PrivateUse1")
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        own = torch.library.Library("aten", "IMPL")
        own.impl("_thnn_fused_lstm_cell", _lstm_cell, "PrivateUse1")
        own.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "PrivateUse1")
        for name, op in _single_operations():
            own.impl(name, _Kernel(op), "PrivateUse1")
        own.impl("_copy_from", _copy, "PrivateUse1")
        own.impl("convolution_overrideable", _convolution, "PrivateUse1")
        own.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
        _libraries.extend([every, own])
        torch.empty = _pinning(torch.empty)
    return DEVICE


def _pinning(empty: Any) -> Any:
    """Let `torch.empty` pin memory, which torch leaves to a backend in C++."""

    def pinned(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Tensor:
        # `torch.set_default_device` knows the original function by its identity.
        tensor: Tensor = empty(*args, device=device or torch.get_default_device(), **kwargs)
        if pin_memory:
            tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
        return tensor

    return pinned
