"""All kernels of a compiled program in one source file, so that the C++ compiler runs once.

Inductor writes a file per kernel and compiles each alone. Nearly all of that time goes into the headers, whatever the
kernel: the 16 kernels of an MLP's step and pull-back take 10.1 s one by one and 1.3 s together (Xeon, g++ 12, -O3).

The modules that Inductor generates call ``async_compile.cpp_pybinding(argtypes, source)`` for each kernel and
``async_compile.wait(globals())`` at the end. Inside `one_source` the first only takes note of the kernel, and the
second builds all of them. The same holds for a program from the cache on disk: its module runs the same lines.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._support import torch_private

log = logging.getLogger("bda_optim")

_FIRST_VERSION = (2, 13)
"""The names in use were checked from this version of torch on; before it kernels are compiled one by one."""

_BINDING = """
static PyObject* call_{i}(PyObject*, PyObject* const* args, Py_ssize_t count) {{
    if (count != {count}) {{
        PyErr_SetString(PyExc_TypeError, "expected {count} arguments");
        return nullptr;
    }}
    try {{
        kernel_{i}::kernel({arguments});
    }} catch (const std::exception& error) {{
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }}
    Py_RETURN_NONE;
}}
"""

_HEAD = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <exception>
static void* (*data_pointer)(PyObject*);
"""

_TAIL = """
static PyMethodDef methods[] = {{{table}{{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods}};
PyMODINIT_FUNC PyInit_kernel(void) {{
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (!address) {{
        PyErr_SetString(PyExc_RuntimeError, "torch did not say where its function for data pointers is");
        return nullptr;
    }}
    data_pointer = reinterpret_cast<decltype(data_pointer)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&definition);
}}
"""


class Kernel(NamedTuple):
    """A kernel that is still to be built: the C++ types of its arguments, and its source."""

    argtypes: list[str]
    source: str


_here = threading.local()


@contextlib.contextmanager
def one_source() -> Iterator[None]:
    """Let programs that this thread compiles or loads have one source file each, where this torch allows it."""
    before = getattr(_here, "active", False)
    _here.active = _install()
    try:
        yield
    finally:
        _here.active = before


@functools.cache
def _install() -> bool:
    """Put a switch before the two methods of Inductor, once; return whether they are what they were."""
    methods = torch_private.async_compile()
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    names = {"cpp_pybinding": ["self", "argtypes", "source_code"], "wait": ["self", "scope"]}
    known = all(list(inspect.signature(getattr(methods, name)).parameters) == args for name, args in names.items())
    if version < _FIRST_VERSION or not known:
        return False
    single, wait = methods.cpp_pybinding, methods.wait

    def note(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not getattr(_here, "active", False):
            return single(self, argtypes, source_code)
        return Kernel(argtypes, source_code)

    def build(self: Any, scope: dict[str, Any]) -> None:
        noted = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
        if noted:
            scope.update(zip(noted, _built(list(noted.values()), functools.partial(single, self)), strict=True))
        wait(self, scope)

    methods.cpp_pybinding, methods.wait = note, build
    return True


def _built(kernels: Sequence[Kernel], single: Callable[[list[str], str], Any]) -> list[Any]:
    """Return the functions of kernels; each is built alone where they cannot be built together."""
    try:
        module = torch_private.load_extension(joined(kernels))
        return [getattr(module, f"kernel_{i}") for i in range(len(kernels))]
    except Exception:  # of the compiler, or of a kernel that is not what is expected here
        log.debug("%d kernels are compiled one by one", len(kernels), exc_info=True)
        return [single(*kernel) for kernel in kernels]


def joined(kernels: Sequence[Kernel]) -> str:
    """Return one source with each kernel in a namespace of its own, and a Python module that calls them.

    Raises:
        ValueError: If an argument is no pointer.
    """
    includes: dict[str, None] = {}
    bodies, bindings = [], []
    for i, (argtypes, source) in enumerate(kernels):
        if not all(kind.rstrip().endswith("*") for kind in argtypes):
            raise ValueError(f"only pointers are passed to kernels; got {argtypes}")
        lines = source.splitlines()
        includes.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        body = "\n".join(line for line in lines if not line.startswith("#include")).replace('extern "C"', "")
        bodies.append(f"namespace kernel_{i} {{\n{body}\n}}\n")
        arguments = ", ".join(f"static_cast<{kind}>(data_pointer(args[{n}]))" for n, kind in enumerate(argtypes))
        bindings.append(_BINDING.format(i=i, count=len(argtypes), arguments=arguments))
    call = "reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_{i}))"
    table = "".join(f'{{"kernel_{i}", {call.format(i=i)}, METH_FASTCALL, nullptr}}, ' for i in range(len(kernels)))
    return "\n".join([*includes, *bodies, _HEAD, *bindings, _TAIL.format(table=table)])
