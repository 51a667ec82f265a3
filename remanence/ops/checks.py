"""Checks of the operator's arguments. Every error message is one line with the argument's name, the expected
value and the given value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from remanence.ops.nets import MLP, FeatureNet, Net, is_matrix
from remanence.ops.rules import LOSSES, Rule, is_linear
from remanence.ops.state import Gates, MemoryState


def check_chunk(chunk: int) -> None:
    """Raise ValueError if this is not a valid chunk size."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk: expected an integer of at least 1, got {chunk!r}")


def _check_shape(name: str, x: Tensor, expected: tuple[int, ...], like: str) -> None:
    """Raise ValueError if x is not a tensor of the expected shape. `like` explains that shape in the message."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name}: expected a tensor of shape {list(expected)} ({like}), got {type(x).__name__}"
        )
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {list(expected)} ({like}), got {list(x.shape)}")


def _state_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype that a state must have for these queries: float64 if they are float64, otherwise
    float32.
    """
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def count_documents(offsets: Tensor | Sequence[int]) -> int:
    """Return the number of packed documents, given their offsets."""
    return len(_offset_list(offsets)) - 1


def _offset_list(offsets: Tensor | Sequence[int]) -> list[int]:
    """Return the offsets as a list of integers, or raise ValueError if they are not integers."""
    values = offsets.tolist() if isinstance(offsets, Tensor) else offsets
    if (
        not isinstance(values, (list, tuple))
        or not values
        or any(type(border) is not int for border in values)
    ):
        raise ValueError(f"offsets: expected integers, 0 and each document's end, got {offsets!r}")
    return list(values)


def check_offsets(
    offsets: Tensor | Sequence[int] | None, batch: int, tokens: int, rows: int
) -> list[int] | None:
    """Return the checked offsets as a list of integers, or None if each batch row is one document. `rows` is
    the number of rows of the state.
    """
    if offsets is None:
        if rows != batch:
            raise ValueError(f"state: expected {batch} rows, one for each row of the batch, got {rows}")
        return None
    borders = _offset_list(offsets)
    if batch != 1:
        raise ValueError(f"offsets: expected a single batch row of packed documents, got a batch of {batch}")
    if borders[0] != 0 or borders[-1] != tokens or any(b < a for a, b in pairwise(borders)):
        raise ValueError(
            f"offsets: expected to rise from 0 to {tokens} (the number of tokens), got {borders}"
        )
    if rows != len(borders) - 1:
        raise ValueError(f"state: expected {len(borders) - 1} rows, one for each packed document, got {rows}")
    return borders


def check_net_and_rule(net: object, rule: object) -> None:
    """Raise ValueError if the operator cannot run this net or this rule."""
    if isinstance(net, FeatureNet):
        raise ValueError(
            "net: expected the fast weights' net of a memory with features (net.fast, with features as keys), "
            f"got {type(net).__name__}"
        )
    if not isinstance(net, Net):
        raise ValueError(f"net: expected an object with init and apply, got {type(net).__name__}")
    check_rule(rule)


def check_rule(rule: object) -> None:
    """Raise ValueError if this is not a valid rule."""
    if is_linear(rule):
        return
    if not isinstance(rule, Rule):
        raise ValueError(f"rule: expected a Rule (or an entry of RULES), got {type(rule).__name__}")
    for name in ("granularity", "anchor", "read"):
        if getattr(rule, name) not in ("token", "chunk"):
            raise ValueError(f"rule.{name}: expected 'token' or 'chunk', got {getattr(rule, name)!r}")
    if rule.granularity == "chunk" and rule.anchor == "token":
        raise ValueError("rule.anchor: expected 'chunk' for a rule of granularity 'chunk', got 'token'")
    if not callable(rule.loss) and rule.loss not in LOSSES:
        raise ValueError(f"rule.loss: expected a function or one of {', '.join(LOSSES)}, got {rule.loss!r}")


def check_buffers(buffers: object) -> None:
    """Raise ValueError if these are not valid buffers of a rule, which `Rule.init_state` must return as a
    tuple of floating-point tensors.
    """
    is_valid = isinstance(buffers, (tuple, list)) and all(
        isinstance(buffer, Tensor) and buffer.is_floating_point() for buffer in buffers
    )
    if not is_valid:
        got = (
            [str(getattr(x, "dtype", type(x).__name__)) for x in buffers]
            if isinstance(buffers, (tuple, list))
            else type(buffers).__name__
        )
        raise ValueError(f"rule: expected init_state to return a tuple of floating-point tensors, got {got}")


def check_start(weights: object, momentum: object, rows: object, rule: Rule) -> None:
    """Raise ValueError if an argument of `remanence.ops.start` is invalid."""
    check_rule(rule)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ValueError(f"rows: expected an integer of at least 0, got {rows!r}")
    if (
        not isinstance(weights, (tuple, list))
        or not weights
        or not all(isinstance(weight, Tensor) for weight in weights)
    ):
        raise ValueError(
            f"weights: expected a tuple of tensors [heads, ...], as init makes it, got {type(weights).__name__}"
        )
    if momentum is None:
        return
    if not is_linear(rule):
        raise ValueError(
            "momentum: expected None for a rule that makes its own state (init_state), got weights"
        )
    if not rule.momentum:
        raise ValueError("momentum: expected None for a rule without momentum, got weights")
    expected = [[rows, *weight.shape] for weight in weights]
    got = (
        [list(past.shape) for past in momentum]
        if isinstance(momentum, (tuple, list))
        else type(momentum).__name__
    )
    if got != expected:
        raise ValueError(f"momentum: expected tensors of shapes {expected} (rows first), got {got}")


def check_state(
    q: Tensor, state: MemoryState, net: Net, rule: Rule, chunk: int, offsets: Tensor | Sequence[int] | None
) -> list[int] | None:
    """Check that a state fits a call in rows, heads, width, dtype, device, chunk, net and rule. Return the
    offsets as a list, or None if each batch row is one document.
    """
    if not isinstance(q, Tensor) or q.dim() != 4 or not q.is_floating_point():
        got = f"{list(q.shape)} {q.dtype}" if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"q: expected a floating-point tensor [batch, tokens, heads, width], got {got}")
    if not isinstance(state, MemoryState):
        raise ValueError(f"state: expected a MemoryState (make one with start), got {type(state).__name__}")
    heads, width = q.shape[2:]
    rows = state.position.shape[0]
    if state.chunk != chunk:
        raise ValueError(
            f"state: expected chunk {chunk}, got chunk {state.chunk}; the chunk is part of the model"
        )
    values = state.v.shape[-1] if isinstance(net, MLP) and net.rectangular else width
    for name, tail, wide in (("state.k", state.k, width), ("state.v", state.v, values)):
        _check_shape(name, tail, (rows, chunk - 1, heads, wide), "rows, chunk - 1, heads, width")
    if state.k.dtype != _state_dtype(q):
        raise ValueError(f"state: expected dtype {_state_dtype(q)} for q of {q.dtype}, got {state.k.dtype}")
    if state.k.device != q.device:
        raise ValueError(f"state: expected on {q.device} like q, got on {state.k.device}")
    if is_linear(rule):
        parts, buffers = 2 if rule.momentum else 1, []
    else:
        parts, buffers = 1, _buffer_shapes(state, rule) if rows and heads else []
    got_buffers = [list(buffer.shape[2:]) for buffer in state.buffers]
    if (rows and got_buffers != buffers) or any(
        buffer.shape[:2] != (rows, heads) for buffer in state.buffers
    ):
        raise ValueError(
            f"state: expected buffers of shapes {buffers} for each row and head, as init_state of "
            f"{type(rule).__name__} makes them, got {got_buffers}"
        )
    for tensor in state.layers:
        if tensor.dtype != state.k.dtype or tuple(tensor.shape[:2]) != (rows, heads):
            got = f"{list(tensor.shape)} of {tensor.dtype}"
            raise ValueError(
                f"state: expected layers [{rows}, {heads}, ...] of {state.k.dtype} (rows, heads), got {got}"
            )
        if tensor.shape[2] != parts:
            raise ValueError(
                f"state: expected one of a rule with momentum={rule.momentum}, got momentum={not rule.momentum}"
            )
    if isinstance(net, MLP) and not torch.compiler.is_compiling():  # torch 2.11 fails on dynamic widths
        shapes, expected = [tuple(layer.shape[3:]) for layer in state.layers], net.shapes(width, values)
        if shapes != expected:
            raise ValueError(f"state: expected weights of shapes {expected} for this net, got {shapes}")
    if (state.gates.log_keep is not None) != rule.forget:
        raise ValueError(
            f"state: expected one of a rule with forget={rule.forget}, got forget={not rule.forget}"
        )
    return check_offsets(offsets, q.shape[0], q.shape[1], rows)


def _buffer_shapes(state: MemoryState, rule: Rule) -> list[list[int]]:
    """Return the shapes of a rule's buffers for one head, without the row and head axes."""
    with torch.no_grad():
        return [list(x.shape) for x in rule.init_state(tuple(layer[0, 0, 0] for layer in state.layers))]


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState,
    net: Net,
    rule: Rule,
    chunk: int,
    offsets: Tensor | Sequence[int] | None,
) -> list[int] | None:
    """Check all arguments of a call, but not the values in its tensors. Return the offsets as a list, or None
    if each batch row is one document.
    """
    check_chunk(chunk)
    check_net_and_rule(net, rule)
    if (
        is_linear(rule)
        and rule.anchor == "token"
        and chunk > 1
        and not (isinstance(net, MLP) and net.linear and isinstance(rule.loss, str))
    ):
        raise ValueError(
            "rule: anchor='token' needs a memory linear in its weights (depth=1, norm=False); use chunk=1 for this net"
        )
    if rule.forget_channels and not is_matrix(net):
        raise ValueError(
            "rule: a forget gate for each channel needs a memory that is a matrix; use net='linear' or 'deep'"
        )
    borders = check_state(q, state, net, rule, chunk, offsets)
    wide = state.v.shape[-1]
    for name, x, like in (
        ("k", k, "like q"),
        ("v", v, "like q" if wide == q.shape[-1] else "like q, as wide as the state's values"),
    ):
        _check_shape(name, x, tuple(q.shape) if name == "k" else (*q.shape[:3], wide), like)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}")
    if not isinstance(gates, Gates):
        raise ValueError(
            f"gates: expected Gates(log_step, log_momentum, log_keep), got {type(gates).__name__}"
        )
    wanted = {"log_step": True, "log_momentum": rule.momentum, "log_keep": rule.forget}
    for name, needed in wanted.items():
        gate = getattr(gates, name)
        if not needed:
            if gate is not None:
                raise ValueError(
                    f"gates.{name}: expected None, because the rule does not use it, got a tensor"
                )
            continue
        by_channel = name == "log_keep" and rule.forget_channels
        shape, axes = (q.shape, ", channels") if by_channel else (q.shape[:3], "")
        _check_shape(f"gates.{name}", gate, tuple(shape), f"batch, tokens, heads{axes}")
        if gate.dtype != state.k.dtype or gate.device != q.device:
            raise ValueError(
                f"gates.{name}: expected {state.k.dtype} on {q.device}, got {gate.dtype} on {gate.device}"
            )
    return borders


def check_values(q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> None:
    """Raise ValueError unless q, k and v are finite and the gates are in range: a finite step size, momentum
    and retention of at most 1.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not bool(x.isfinite().all()):
            count = int((~x.isfinite()).sum())
            raise ValueError(f"{name}: expected finite numbers, got {count} infinite or NaN of {x.numel()}")
    for name, gate in zip(Gates._fields, gates, strict=True):
        if gate is None or gate.numel() == 0:
            continue
        top = float(gate.detach().max())
        if name == "log_step" and not top < torch.inf:
            raise ValueError(f"gates.{name}: expected logs below infinity, got {top}")
        if name != "log_step" and not top <= 0:
            raise ValueError(f"gates.{name}: expected logs of at most 0 (gates between 0 and 1), got {top}")
