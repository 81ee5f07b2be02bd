"""Describes the user's code and settings identically in every process, at any time.

An object is described by its parts: a function by its code, defaults, and the variables that it
uses; a ``partial`` by its function and arguments; an object by its class and attributes; a class by
its methods and bases. Nothing depends on an address in memory, on the order of a set or on where a
source file lies. What cannot be described (a lock, a connection) counts as its type alone.

    the standard library, torch,     by their names: a new version does not make a new training
    numpy and the like
    packages that are installed      by their own code, not what it calls
    everything else: scripts,        by their code and all it refers to
    notebooks, modules on the path
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparkdl.checkpoint.tensor_file import octets_of
from sparkdl.user_code.needed_modules import INSTALLED, plain

Parts = dict[str, bytes]
"""The digest of each part, by name."""

BY_NAME = sys.stdlib_module_names | {
    "numpy",
    "pandas",
    "pyarrow",
    "pyspark",
    "sparkdl",
    "torch",
}
DEEPEST = 50
"""How deeply nested objects are examined."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OF_A_MODULE = frozenset(vars(nn.Module()))
_OF_A_CLASS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def describe(
    value: object, *, text: str | None = None, parts: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Describe a setting that may be any object, for ``differences``.

    Args:
        value: the object.
        text: what it is, in readable form; by default its name or ``repr``.
        parts: further parts, by name.

    Returns:
        JSON.
    """
    digester = _Digester()
    found = {
        **digester.parts(value),
        **{name: digester.digest(v) for name, v in (parts or {}).items()},
    }
    return _described(text_of(value) if text is None else text, found)


def describe_model(module: nn.Module) -> dict[str, Any]:
    """Describe a model that has just been built.

    Initial values are described only by norm and direction, each to four digits, because the random
    numbers of different processors and versions of torch differ in their last bits.
    """
    state = [*module.parameters(), *module.buffers()]
    fractions = [tensor for tensor in state if tensor.is_floating_point()]
    digester = _Digester(without_values={id(tensor) for tensor in fractions})
    found = digester.parts(module)
    found["initial values"] = digester.digest(_outline(fractions))
    return _described(text_of(module), found)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Describe an optimizer, except for the hyperparameters in its groups.

    Args:
        optimizer: the optimizer of a model that ``describe_model`` describes.
    """
    groups = optimizer.param_groups
    digester = _Digester(without_values={id(p) for group in groups for p in group["params"]})
    usual = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    own = {key: each for key, each in vars(optimizer).items() if key not in usual}
    found = {**digester.class_parts(type(optimizer)), **digester.named("attribute", own)}
    return _described(type(optimizer).__name__, found)


def text_of(value: object) -> str:
    """What an object is, in readable form: its name or ``repr``, without its address."""
    if isinstance(value, functools.partial):
        keywords = [f"{key}={text_of(each)}" for key, each in value.keywords.items()]
        arguments = ", ".join([text_of(value.func), *map(text_of, value.args), *keywords])
        return f"partial({arguments})"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__qualname__
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:  # any __repr__ may raise anything
        return type(value).__qualname__


def _described(text: str, parts: Parts) -> dict[str, Any]:
    return {
        "is": text,
        "parts": {name: digest.hex()[:16] for name, digest in sorted(parts.items())},
        # Bytecode differs between versions of Python.
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def _outline(tensors: list[Tensor]) -> list[str]:
    """Norm and direction of all tensors taken together."""
    directions = torch.cos(torch.arange(1, 65537, dtype=torch.float64))
    square = along = 0.0
    number = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).cpu()
        for start in range(0, len(flat), len(directions)):
            number += 1
            values = flat[start : start + len(directions)].double()
            square += float(values @ values)
            along += float(np.cos(number)) * float(values @ directions[: len(values)])
    norm = square**0.5
    return [f"{norm:.3e}", f"{along / norm if norm else 0.0:.3f}"]


class _Digester:
    """Computes digests of objects, each once.

    Args:
        without_values: the ``id`` of each tensor to describe by kind and shape only.
    """

    def __init__(self, without_values: Collection[int] = ()) -> None:
        self._without_values = without_values
        self._known: dict[int, bytes] = {}
        # Kept alive, because the id of a deleted object may be reused.
        self._kept: list[object] = []
        self._path: list[int] = []

    def digest(self, value: object) -> bytes:
        """One digest of all of an object's parts."""
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            return _hash(kind.__name__, repr(value))
        if id(value) in self._known:
            return self._known[id(value)]
        if id(value) in self._path:
            return _hash("above", str(len(self._path) - self._path.index(id(value))))
        if len(self._path) > DEEPEST:
            return _hash("deep", kind.__qualname__)
        self._path.append(id(value))
        try:
            parts = self.parts(value)
        finally:
            self._path.pop()
        found = _hash("parts", *(f"{name}={part.hex()}" for name, part in sorted(parts.items())))
        self._known[id(value)] = found
        self._kept.append(value)
        return found

    def named(self, what: str, values: Mapping[str, object]) -> Parts:
        """Named parts, with ``what`` before each name."""
        return {f"{what} {name}": self.digest(values[name]) for name in sorted(values)}

    def parts(self, value: object) -> Parts:
        """What an object consists of."""
        value = plain(value)
        name = _import_name(value)
        if name is not None:
            return {"name": _hash(name)}
        for kinds, tell in self._kinds():
            if isinstance(value, kinds):
                found: Parts = tell(value)
                return found
        return self._object_parts(value)

    def _kinds(self) -> Iterator[tuple[Any, Callable[[Any], Parts]]]:
        yield types.FunctionType, self._function_parts
        yield (
            types.MethodType,
            lambda v: {
                **self.parts(v.__func__),
                "object": self.digest(v.__self__),
            },
        )
        yield types.BuiltinFunctionType, self._builtin_parts
        yield functools.partial, self._partial_parts
        yield (staticmethod, classmethod), lambda v: self.parts(v.__func__)
        yield property, lambda v: {"accessors": self.digest([v.fget, v.fset, v.fdel])}
        yield enum.Enum, lambda v: {"member": _hash(str(v)), "value": self.digest(v.value)}
        yield type, self.class_parts
        yield types.ModuleType, lambda v: {"name": _hash(v.__name__)}
        yield types.CodeType, lambda v: {"code": self._code(v)}
        yield types.CellType, self._cell_parts
        yield Tensor, self._tensor_parts
        yield np.ndarray, self._array_parts
        yield nn.Module, self._module_parts

    def _function_parts(self, function: types.FunctionType) -> Parts:
        parts = {"code": self._code(function.__code__)}
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            parts[f"variable {name}"] = self.digest(cell)
        defaults = function.__defaults__ or ()
        arguments = code.co_varnames[: code.co_argcount]
        given = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
        parts |= self.named("default of", {**given, **(function.__kwdefaults__ or {})})
        parts |= self.named("attribute", vars(function))
        if _is_users(function.__module__, code.co_filename):
            parts |= self.named("variable", _used_globals(function))
        return parts

    def _code(self, code: types.CodeType) -> bytes:
        # Without positions in files, which may differ where nothing else does.
        return _hash(
            "code",
            code.co_code.hex(),
            repr((code.co_names, code.co_argcount, code.co_kwonlyargcount, code.co_flags)),
            *(self.digest(constant).hex() for constant in code.co_consts),
        )

    def _cell_parts(self, cell: types.CellType) -> Parts:
        try:
            return {"value": self.digest(cell.cell_contents)}
        except ValueError:  # it is still empty
            return {}

    def _builtin_parts(self, function: types.BuiltinFunctionType) -> Parts:
        owner = function.__self__
        named = owner is None or isinstance(owner, (types.ModuleType, type))
        where = getattr(owner, "__name__", "") if named else ""
        parts = {"name": _hash(where, function.__qualname__)}
        return parts if named else {**parts, "object": self.digest(owner)}

    def _partial_parts(self, value: functools.partial[Any]) -> Parts:
        given = {f"{index}": each for index, each in enumerate(value.args)}
        parts = {"function": self.digest(value.func)}
        return {**parts, **self.named("argument", {**given, **value.keywords})}

    def class_parts(self, value: type) -> Parts:
        """What a class consists of."""
        name = _import_name(value)
        if name is not None:
            return {"name": _hash(name)}
        parts = {"bases": self.digest(list(value.__bases__))}
        callables = (types.FunctionType, staticmethod, classmethod, property)
        for key, member in sorted(vars(value).items()):
            hidden = key.startswith("__") and key.endswith("__")
            if isinstance(member, _OF_A_CLASS) or (hidden and not isinstance(member, callables)):
                continue
            if key not in ("__annotate__", "__annotate_func__", "_abc_impl"):
                parts[f"its {key}"] = self.digest(member)
        return parts

    def _tensor_parts(self, value: Tensor) -> Parts:
        parts = {"kind": _hash(str(value.dtype), str(tuple(value.shape)))}
        if id(value) not in self._without_values and not value.is_meta:
            octets = octets_of(value.detach().to_dense())
            parts["values"] = hashlib.sha256(octets).digest()
        return parts

    def _array_parts(self, value: np.ndarray) -> Parts:
        if value.dtype.hasobject:
            return {"values": self.digest(value.tolist())}
        values = hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()
        return {"kind": _hash(value.dtype.str, str(value.shape)), "values": values}

    def _module_parts(self, module: nn.Module) -> Parts:
        own = {key: each for key, each in vars(module).items() if key not in _OF_A_MODULE}
        # The keys of hooks are left out: they count all hooks of this process.
        hooks = [list(each.values()) for each in (module._forward_pre_hooks, module._forward_hooks)]
        parts = {
            **self.class_parts(type(module)),
            **self.named("attribute", own),
            **self.named("parameter", dict(module.named_parameters(recurse=False))),
            **self.named("buffer", dict(module.named_buffers(recurse=False))),
            **self.named("submodule", dict(module.named_children())),
            "hooks": self.digest(hooks),
        }
        if isinstance(module, torch.jit.ScriptModule):
            parts["code"] = _hash(module.code)
        return parts

    def _object_parts(self, value: object) -> Parts:
        """What pickling an object would save."""
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return {f"{index}": self.digest(each) for index, each in enumerate(value)}
        if isinstance(value, (set, frozenset)):
            return {"items": _hash(*sorted(self.digest(each).hex() for each in value))}
        if isinstance(value, Mapping) and type(value) in (dict, types.MappingProxyType):
            if all(isinstance(key, str) for key in value):
                return self.named("item", value)
            pairs = [self.digest((key, each)).hex() for key, each in value.items()]
            return {"items": _hash(*sorted(pairs))}
        if type(value) is object:
            return {}
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # any __reduce__ may raise anything; then only the type counts
            return {"type": _hash(type(value).__qualname__)}
        if isinstance(reduced, str):
            return {"name": _hash(reduced)}
        make, arguments, *rest = reduced
        state, items, pairs = [*rest, None, None, None][:3]
        # Pickle's own reconstructor comes in two forms, and says nothing.
        arguments = [each for each in arguments if each is not type(value)]
        parts = {"class": self.digest(type(value)), "made by": self.digest(make)}
        if arguments:
            parts["arguments"] = self.digest(arguments)
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            parts |= self.named("attribute", state)
        elif state is not None:
            parts["state"] = self.digest(state)
        if items is not None:
            parts["items"] = self.digest(list(items))
        if pairs is not None:
            parts["items by key"] = self.digest(dict(pairs))
        return parts


def _hash(*texts: str) -> bytes:
    found = hashlib.sha256()
    for text in texts:
        octets = text.encode("utf-8", "surrogatepass")
        found.update(len(octets).to_bytes(8, "little") + octets)
    return found.digest()


def own_name(value: object) -> tuple[str, str]:
    """The module and the qualified name that an object says it has; empty for none."""
    try:
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    except Exception:  # a dict whose items are attributes too may raise KeyError
        return "", ""
    return (module, name) if isinstance(module, str) and isinstance(name, str) else ("", "")


def _import_name(value: object) -> str | None:
    """The name of something that is described by its name alone; None for anything else."""
    module, name = own_name(value)
    if not module or not name:
        return None
    if module.partition(".")[0] not in BY_NAME or module == "__main__":
        return None
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value else None


def _used_globals(function: types.FunctionType) -> dict[str, object]:
    """The global variables that a function uses, and what it uses of the user's own modules."""
    names: set[str] = set()
    taken: set[str] = set()
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        taken |= set(code.co_names)
        names |= {
            str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"
        }
    used: dict[str, object] = {}
    for name in names & function.__globals__.keys():
        value = used[name] = function.__globals__[name]
        if isinstance(value, types.ModuleType) and _is_users(
            value.__name__, getattr(value, "__file__", None) or ""
        ):
            used |= {f"{name}.{key}": vars(value)[key] for key in taken & vars(value).keys()}
    return used


def _is_users(module: str | None, file: str) -> bool:
    """Whether code is the user's: neither described by name nor installed."""
    return (module or "").partition(".")[0] not in BY_NAME and not INSTALLED.search(file)
