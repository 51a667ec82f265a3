"""Parts of a neural memory layer: choosing its net and rule by name, its initial weights, the step threshold,
and input checks.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from remanence.config import MemoryConfig
from remanence.layers import Features, SparseFeatures, assign
from remanence.ops import MLP, NETS, RULES, Deep, FeatureNet, Gates, Net, Rule, Sparse
from remanence.ops.nets import is_matrix
from remanence.ops.rules import is_linear
from remanence.runtime.choices import check_choice

CLOSED_LOG_GATE = -200.0
"""The logarithm of a closed gate. It is finite, but its exponential is 0 in float32."""

LARGEST_INPUT = 1e6
"""The largest allowed absolute value of a layer's input. Values are stored at the scale of the input, so a
token beyond this limit could make all others vanish in float32.
"""


def resolve_net(config: MemoryConfig) -> Net | FeatureNet:
    """Return the entry of NETS that a configuration names, with the configuration's changes applied to it."""
    check_choice("net", config.net, NETS)
    net = NETS[config.net]
    names = [field.name for field in fields(net)] if is_dataclass(net) else []
    changes = {name: getattr(config, name) for name in ("depth", "expansion", "activation", "bias")}
    changes = {name: value for name, value in changes.items() if value is not None}
    for name, value in changes.items():
        if name not in names:
            raise ValueError(f"{name}: expected None, as the net {config.net!r} has no {name}, got {value!r}")
    return replace(net, **changes) if changes else net


def make_features(net: Net | FeatureNet, heads: int, width: int) -> Features | SparseFeatures | None:
    """Return the module that computes the features of keys and queries, or None if they are the keys themselves."""
    if isinstance(net, Sparse):
        return SparseFeatures(heads, width, net.features(width), net.keep, learned=net.learned)
    if isinstance(net, Deep) and net.depth > 1:
        return Features(heads, width, net.hidden(width), net.depth - 1)
    return None


def resolve_rule(config: MemoryConfig, net: Net) -> Rule:
    """Return the entry of RULES that a configuration names. By default, a rule is made token-exact where that
    has no extra cost.
    """
    check_choice("rule", config.rule, RULES)
    rule = RULES[config.rule]
    if rule.forget_channels and not is_matrix(net):
        raise ValueError(
            f"net: the rule {config.rule!r} has a forget gate for each channel, which needs the net 'deep' or "
            f"'linear', got {config.net!r}"
        )
    if not is_linear(rule):
        if config.anchor not in (None, rule.anchor):
            raise ValueError(
                f"anchor: expected None, as the rule {config.rule!r} declares its own, got {config.anchor!r}"
            )
        return rule
    exact = isinstance(net, MLP) and net.linear and isinstance(rule.loss, str)
    anchor = config.anchor or ("token" if exact else rule.anchor)
    if anchor == "token" and not exact and config.chunk > 1:
        raise ValueError(
            f"anchor: 'token' (yours, or the rule {config.rule!r}'s) needs a net linear in its weights, "
            f"got {config.net!r}; use net='linear', or anchor='chunk'"
        )
    return replace(rule, anchor=anchor)


class InitialMemory(nn.Module):
    """The learned initial weights of the memory, per head. In a deep memory, their output is added to the
    output of the updated weights, and the forget gate does not affect them. This is a separate module, so
    that it can be reset alone. `keys` is the number of features of a key, if it is not the width.
    """

    def __init__(self, net: Net, heads: int, width: int, keys: int | None = None) -> None:
        super().__init__()
        # In a tuple, so that a net that is itself a module is not registered as a submodule.
        self._init_args = (
            net,
            heads,
            width,
            width if keys is None else keys,
        )
        device = torch.empty(0).device
        for index, weight in enumerate(self._draw(meta=device.type == "meta")):
            self.register_parameter(f"layer{index}", nn.Parameter(weight.to(device)))

    def _draw(self, meta: bool = False) -> tuple[Tensor, ...]:
        """Return newly drawn initial weights ``[h ...]`` on the CPU, or on the meta device."""
        net, heads, width, keys = self._init_args
        wide: dict[str, Any] = {} if keys == width else {"values": width}
        with torch.device("meta" if meta else "cpu"):  # the same random numbers on every device
            return net.init(heads, keys, **wide)

    def reset_parameters(self) -> None:
        for parameter, weight in zip(self.parameters(), self._draw(), strict=True):
            assign(parameter, weight)


def apply_threshold(gates: Gates, least: float) -> Gates:
    """Change the gates so that tokens whose step size is at most `least` are skipped: such a token writes
    nothing and forgets nothing.
    """
    above = gates.log_step.exp() - least
    written = above > 0
    # Where nothing is written, 1 replaces the argument of the log, whose gradient would be NaN.
    share = above.where(written, 1.0) / (1 - least)
    log_step, keep = share.log().where(written, CLOSED_LOG_GATE), gates.log_keep
    if keep is not None:
        by_channel = keep.dim() > share.dim()
        share, written = (x.unsqueeze(-1) if by_channel else x for x in (share, written))
        keep = (keep * share).where(written, 0.0)
    return Gates(log_step, gates.log_momentum, keep)


def mean_over_channels(gates: Gates) -> Gates:
    """Return gates ``[b t h]`` in which a forget gate for each channel is replaced by its mean over channels."""
    keep = gates.log_keep
    if keep is None or keep.dim() == gates.log_step.dim():
        return gates
    return gates._replace(log_keep=keep.logsumexp(-1) - log(keep.shape[-1]))


def check_input(x: Tensor, dim: int, dtype: torch.dtype, *, values: bool) -> None:
    """Check the shape and dtype of a layer's input. With `values` and on a CPU, also check that it is finite
    and in range.
    """
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
        got = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected a floating-point tensor [batch, tokens, {dim}], got {got}")
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x: expected {dtype} like the layer's parameters, got {x.dtype}")
    if values and x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel():
        largest = float(torch.stack(x.detach().aminmax()).abs().max())
        if not largest < torch.inf:
            raise ValueError(
                f"x: expected finite numbers, got {int((~x.isfinite()).sum())} infinite or NaN of {x.numel()}"
            )
        if largest > LARGEST_INPUT:
            raise ValueError(
                f"x: expected numbers of at most {LARGEST_INPUT:g} in absolute value, got {largest:.2g}; "
                "normalise them before this layer"
            )
