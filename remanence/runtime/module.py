"""Modules that can be initialised again, as models made on the meta device must be. Checks of whether a
module can be called, and of whether a fast path may use its weights instead of calling it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class Module(nn.Module):
    """A module whose `reset_parameters` initialises all its submodules in the constructor's order. After
    ``torch.manual_seed`` it therefore draws the same numbers as a new module.

    A subclass that has its own parameters or buffers, or work to do after its submodules are initialised,
    defines `reset_own_parameters` and calls it at the end of its constructor.
    """

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers again, for example after ``to_empty``."""
        _reset_parts(self)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the module's own parameters and buffers. Called after the submodules have been
        initialised.
        """
        _check_not_overridden(self, "reset_own_parameters")


def _reset_parts(module: nn.Module) -> None:
    """Initialise all submodules. Raises NotImplementedError if a submodule has parameters but no
    `reset_parameters`.
    """
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
        else:
            _reset_parts(part)
            _check_not_overridden(part, "reset_parameters")


def _check_not_overridden(module: nn.Module, method: str) -> None:
    """Raise NotImplementedError if the module has its own parameters or buffers, as it lacks `method` to
    initialise them.
    """
    own = [*module._parameters, *module._buffers]
    if own:
        name = type(module).__name__
        raise NotImplementedError(
            f"{name}: expected a method {method} that initialises {', '.join(own)}, got none; define it"
        )


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy a value into a parameter. If the parameter is sharded over processes (a DTensor), each process
    copies its shard.
    """
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        value = distribute_tensor(value.to(sharded.device), sharded.device_mesh, sharded.placements)
    parameter.copy_(value)


def is_unmodified(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module runs exactly the `forward` of `kind`: no subclass, no hooks, no replaced
    `forward`.

    If so, a faster path may compute the same result from the module's weights instead of calling it.
    """
    return type(module) is kind and not (
        _GLOBAL_FORWARD
        or _GLOBAL_PRE
        or _GLOBAL_BACKWARD
        or _GLOBAL_BACKWARD_PRE
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


# torch never replaces these dictionaries, nor the hook dictionaries of a module.
_GLOBAL_FORWARD, _GLOBAL_PRE = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
_GLOBAL_BACKWARD = torch_module._global_backward_hooks
_GLOBAL_BACKWARD_PRE = torch_module._global_backward_pre_hooks
GLOBAL_HOOKS: list[dict[Any, Any]] = [_GLOBAL_FORWARD, _GLOBAL_PRE, _GLOBAL_BACKWARD, _GLOBAL_BACKWARD_PRE]
"""The hook dictionaries that apply to calls of every module."""


def hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the module's own dictionaries of forward and backward hooks."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def modules_of(*roots: nn.Module) -> list[nn.Module]:
    """Return these modules and all modules inside them. Faster than ``modules()``, for checks that run at
    every call.
    """
    found = list(roots)
    for module in found:
        found.extend(part for part in module._modules.values() if part is not None)
    return found


def alteration_reason(modules: Iterable[nn.Module]) -> str | None:
    """Describe why calling one of these modules may not compute what its class defines: hooks, or a method
    replaced on the instance. Returns None if there is no such reason. Hooks that FSDP adds to gather sharded
    weights are ignored.
    """
    if any(GLOBAL_HOOKS):
        return "torch has global module hooks"
    for module in modules:
        if any(hooks_of(module)) and not _has_only_fsdp_hooks(module):
            return f"a module ({type(module).__name__}) has hooks"
        if (name := replaced_method(module)) is not None:
            return f"the method {name} of a module ({type(module).__name__}) is replaced"
    return None


def replaced_method(module: nn.Module) -> str | None:
    """Return the name of a method that is replaced on the module instance, or None. Methods wrapped by FSDP
    are ignored.
    """
    kind: Any = type(module)
    methods, own = _method_names(kind), module.__dict__
    if methods.isdisjoint(own):
        return None
    return next((name for name in own if name in methods and not _is_from_fsdp(own[name])), None)


@cache
def _method_names(kind: type) -> frozenset[str]:
    """Return the names of the methods that a class and its bases below `nn.Module` define."""
    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    found = {name for each in above for name, value in vars(each).items() if callable(value)}
    return frozenset({"forward", *(name for name in found if not name.startswith("__"))})


class Watch:
    """Detects changes in what a model's call runs: its modules, their classes, hooks and replaced methods.
    After a change, anything prepared for an earlier call, such as a captured graph, must not be used.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root, self.modules = root, modules_of(root)
        self.hooks = [*GLOBAL_HOOKS, *(hooks for module in self.modules for hooks in hooks_of(module))]
        self.before = self._snapshot()

    def _snapshot(self) -> tuple[object, ...]:
        """Return what `changed` compares: which modules have hooks, which methods are replaced, and all classes."""
        hooked = [bool(hooks) for hooks in self.hooks] if any(self.hooks) else None
        return hooked, [*map(replaced_method, self.modules)], [*map(type, self.modules)]

    def changed(self) -> bool:
        """Whether anything has changed since this object was made."""
        return modules_of(self.root) != self.modules or self._snapshot() != self.before


def _has_only_fsdp_hooks(module: nn.Module) -> bool:
    """Whether all hooks of a module were added by FSDP."""
    return all(_is_from_fsdp(hook) for hooks in hooks_of(module) for hook in hooks.values())


def _is_from_fsdp(defined: Any) -> bool:
    """Whether a function, method or class is defined by FSDP."""
    # A method wrapped by FSDP has the original method's `__module__` but the globals of FSDP's module.
    scope = getattr(getattr(defined, "__func__", defined), "__globals__", {}).get("__name__", "")
    return any(
        name.startswith("torch.distributed.fsdp") for name in (getattr(defined, "__module__", ""), scope)
    )


def is_package_module(module: nn.Module) -> bool:
    """Whether a module's class is defined in this package, not a subclass from elsewhere. Classes made by
    FSDP are ignored.
    """
    kind: Any = type(module)
    return _is_package_class(kind)


@cache
def _is_package_class(kind: type) -> bool:
    """Whether a class is defined in this package. The cached part of `is_package_module`."""
    first = next(each for each in kind.__mro__ if not _is_from_fsdp(each))
    return first.__module__.startswith("remanence.")


def overridden_method(module: nn.Module, method: str, names: tuple[str, ...] | None = None) -> str | None:
    """Return the name of a method that a subclass from outside this package overrides without overriding
    `method`, or None.

    `method` describes or replaces the other methods, so it would no longer be right: for example, a mixer
    with a new `forward` must not be decoded by its parent's `decoder`. Only `names` are considered, if given.
    Otherwise every name that a base class has is considered, except costs, checks and initialisation, which
    do not change results.
    """
    kind: Any = type(module)
    return _overridden_method(kind, method, names)


@cache
def _overridden_method(kind: type, method: str, names: tuple[str, ...] | None) -> str | None:
    """The cached part of `overridden_method`."""
    for index, each in enumerate(kind.__mro__):
        if method in vars(each) or each.__module__.startswith("remanence."):
            return None
        for name in vars(each) if not _is_from_fsdp(each) else ():
            overrides = any(name in vars(base) for base in kind.__mro__[index + 1 :])
            changes_results = name not in _HARMLESS and (not name.startswith("__") or name in _CALLS)
            if overrides and (changes_results if names is None else name in names):
                return name
    return None


_CALLS = ("__call__", "__getattr__", "__getattribute__")
"""Special methods that change the result of a call."""
_HARMLESS = {
    *("State", "activation_bytes", "check", "decoder", "extra_repr", "flops", "has_memory", "needs_unigrams"),
    *("reset_own_parameters", "reset_parameters", "capture_unsupported_reason", "decode_unsupported_reason"),
}
"""Names whose override does not change the result of a call."""


def modules_covered_by(module: nn.Module, method: str) -> set[nn.Module]:
    """Return the modules that a method of `module` is responsible for. If a class outside this package
    defines the method, these are the module and all modules inside it. If this package defines it, only the
    module itself, because other code may have put unknown modules inside.
    """
    kind: Any = type(module)
    is_ours = getattr(kind, method).__module__.startswith("remanence.")
    return {module} if is_ours else set(modules_of(module))


def check_transforms() -> None:
    """Raise RuntimeError if a memory is called inside a transform that it does not support: torch.func or
    torch.jit.trace.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func: a memory does not run inside grad, vmap, jvp or jacrev; use torch.autograd.grad or backward() "
            "(with torch.func.functional_call for other parameters), and batch rows instead of vmap"
        )
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace: a memory's call depends on where its rows stand; use torch.compile or torch.export.export"
        )
