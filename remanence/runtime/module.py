"""Modules that can be initialised again, as models made on the meta device must be; where they can be called; and
whether a fast path may take their weights instead of calling them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class Module(nn.Module):
    """A module whose `reset_parameters` initialises all that is inside it, in the constructor's order: after
    ``torch.manual_seed`` it draws the numbers that a new module would have.

    A subclass with parameters or buffers of its own, or with something to do once its parts are initialised, defines
    `reset_own_parameters` and calls it at the end of its constructor.
    """

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers again: after ``to_empty``, for example."""
        _reset_parts(self)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise what belongs to no part, once the parts have been initialised."""
        _check_no_own(self, "reset_own_parameters")


def _reset_parts(module: nn.Module) -> None:
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
        else:
            _reset_parts(part)
            _check_no_own(part, "reset_parameters")


def _check_no_own(module: nn.Module, method: str) -> None:
    own = [*module._parameters, *module._buffers]
    if own:
        name = type(module).__name__
        raise NotImplementedError(
            f"{name}: expected a method {method} that initialises {', '.join(own)}, got none; define it"
        )


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy a value into a parameter; into one that is sharded over processes (a DTensor), each process its share."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        value = distribute_tensor(value.to(sharded.device), sharded.device_mesh, sharded.placements)
    parameter.copy_(value)


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module runs exactly the `forward` of `kind`: no subclass, no hooks, no replaced `forward`.

    A path that computes the same from the module's weights may then skip the call.
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


# torch never replaces these dictionaries, nor those of a module.
_GLOBAL_FORWARD, _GLOBAL_PRE = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
_GLOBAL_BACKWARD = torch_module._global_backward_hooks
_GLOBAL_BACKWARD_PRE = torch_module._global_backward_pre_hooks
GLOBAL_HOOKS: list[dict[Any, Any]] = [_GLOBAL_FORWARD, _GLOBAL_PRE, _GLOBAL_BACKWARD, _GLOBAL_BACKWARD_PRE]
"""Hooks that torch runs at the call of every module."""


def hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The dictionaries of the hooks that a call of the module runs, on the way forward and back."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def modules_of(*roots: nn.Module) -> list[nn.Module]:
    """These modules and all inside them; faster than ``modules()``, for what is asked at every call."""
    found = list(roots)
    for module in found:
        found.extend(part for part in module._modules.values() if part is not None)
    return found


def altered(modules: Iterable[nn.Module]) -> str | None:
    """What makes a call of one of these modules differ from what its class computes, in words: hooks, or a method
    replaced in the module itself. None if nothing does. What FSDP adds, which gathers sharded weights, does not count.
    """
    if any(GLOBAL_HOOKS):
        return "torch has global module hooks"
    for module in modules:
        if any(hooks_of(module)) and not _sharding_alone(module):
            return f"a module ({type(module).__name__}) has hooks"
        if (name := replaced(module)) is not None:
            return f"the method {name} of a module ({type(module).__name__}) is replaced"
    return None


def replaced(module: nn.Module) -> str | None:
    """A method that is set in the module itself, instead of its class's."""
    kind: Any = type(module)
    methods, own = _methods(kind), module.__dict__
    if methods.isdisjoint(own):
        return None
    return next((name for name in own if name in methods and not _of_fsdp(own[name])), None)


@cache
def _methods(kind: type) -> frozenset[str]:
    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    found = {name for each in above for name, value in vars(each).items() if callable(value)}
    return frozenset({"forward", *(name for name in found if not name.startswith("__"))})


class Watch:
    """What a call of a model runs: its modules, their classes, which of them have hooks or replaced methods. What was
    prepared for one call, such as a captured graph, is not for a call after a change.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root, self.modules = root, modules_of(root)
        self.hooks = [*GLOBAL_HOOKS, *(hooks for module in self.modules for hooks in hooks_of(module))]
        self.before = self._now()

    def _now(self) -> tuple[object, ...]:
        hooked = [bool(hooks) for hooks in self.hooks] if any(self.hooks) else None
        return hooked, [*map(replaced, self.modules)], [*map(type, self.modules)]

    def changed(self) -> bool:
        """Whether anything is other than when this was made."""
        return modules_of(self.root) != self.modules or self._now() != self.before


def _sharding_alone(module: nn.Module) -> bool:
    return all(_of_fsdp(hook) for hooks in hooks_of(module) for hook in hooks.values())


def _of_fsdp(defined: Any) -> bool:
    # A method that FSDP wraps has the name of the method's module, and the globals of FSDP's.
    scope = getattr(getattr(defined, "__func__", defined), "__globals__", {}).get("__name__", "")
    return any(
        name.startswith("torch.distributed.fsdp") for name in (getattr(defined, "__module__", ""), scope)
    )


def ours(module: nn.Module) -> bool:
    """Whether a module's class is one of this package, not a subclass made elsewhere. FSDP's change no call."""
    kind: Any = type(module)
    return _ours(kind)


@cache
def _ours(kind: type) -> bool:
    first = next(each for each in kind.__mro__ if not _of_fsdp(each))
    return first.__module__.startswith("remanence.")


def overridden(module: nn.Module, method: str, names: tuple[str, ...] | None = None) -> str | None:
    """What a subclass made elsewhere overrides without overriding `method`, which describes or replaces it: a mixer
    with another `forward` is not decoded by its parent's `decoder`. None if there is nothing.

    Only `names` count, if given. Otherwise all do that a base class has, but costs, checks and initialisation, which
    change no result.
    """
    kind: Any = type(module)
    return _overridden(kind, method, names)


@cache
def _overridden(kind: type, method: str, names: tuple[str, ...] | None) -> str | None:
    for index, each in enumerate(kind.__mro__):
        if method in vars(each) or each.__module__.startswith("remanence."):
            return None
        for name in vars(each) if not _of_fsdp(each) else ():
            known = any(name in vars(base) for base in kind.__mro__[index + 1 :])
            counts = name not in _HARMLESS and (not name.startswith("__") or name in _CALLS)
            if known and (counts if names is None else name in names):
                return name
    return None


_CALLS = ("__call__", "__getattr__", "__getattribute__")
_HARMLESS = {
    *("State", "activation_bytes", "check", "decoder", "extra_repr", "flops", "has_memory", "needs_unigrams"),
    *("reset_own_parameters", "reset_parameters", "capture_unsupported_reason", "decode_unsupported_reason"),
}


def described(module: nn.Module, method: str) -> set[nn.Module]:
    """The modules of which a method of `module` knows what they are: those inside it, if a class made elsewhere defines
    the method; itself, if the method is one of this package, which cannot know what others put inside.
    """
    kind: Any = type(module)
    here = getattr(kind, method).__module__.startswith("remanence.")
    return {module} if here else set(modules_of(module))


def check_transforms() -> None:
    """That a memory is not called inside a transform it cannot run in: those of torch.func, and torch.jit.trace."""
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
