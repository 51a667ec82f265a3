"""A memory that takes one token at a time, in place: nothing is allocated anew, nothing waits for the device.

What a token needs of the open chunk is each earlier token's layer inputs X and errors D at the anchor weights, so those are kept
beside the tail instead of being computed again; a token is then one row of every product of closed_form.py. Rows stand anywhere
in their chunks: where a row writes, and whether its chunk is complete, is decided on the device, and all shapes are fixed. So a
CUDA graph can hold the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remanence.ops import closed_form as cf
from remanence.ops.nets import MLP, Net
from remanence.ops.rules import Rule, coefficients
from remanence.ops.state import Gates, MemoryState, Weights
from remanence.ops.triton import launch

BLOCK = 64
"""Of the kernels, along the hidden axis or a matrix's columns; half of it for heads wider, or chunks longer, than 64."""

WARPS = 8


def unsupported(net: Net, rule: Rule) -> str | None:
    """Why such a memory cannot be written in place, in words; None if it can."""
    if isinstance(net, MLP) and isinstance(rule.loss, str):
        return None
    return "only MLP memories with a loss of ours have the closed form that decoding goes by"


def written(net: MLP, rule: Rule) -> bool:
    """Whether there is a kernel that reads one token into such a memory."""
    if net.bias or not isinstance(rule.loss, str):
        return False
    two = net.depth == 2 and rule.loss == "squared" and rule.anchor == "chunk" and not rule.decay_first
    return net.linear or two


def put(buffer: Tensor, slot: Tensor, new: Tensor, active: Tensor) -> None:
    """Write new ``[r ...]`` to each active row's place ``[r]`` in ``[r places ...]``."""
    where = torch.arange(buffer.shape[0], device=buffer.device), slot
    buffer[where] = choose(active, new.to(buffer.dtype), buffer[where])


def keep(buffers: Sequence[Tensor], new: Sequence[Tensor], rows: Tensor) -> None:
    """In place, the new in these rows."""
    for old, tensor in zip(buffers, new, strict=True):
        old.copy_(choose(rows, tensor, old))


def choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Each row from the one or the other."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def fits(like: Tensor, width: int) -> bool:
    """Whether kernels can run for heads of this width, beside a state such as this."""
    if launch.kernels() is None or width > launch.WIDEST:
        return False
    return launch.interpreted() or (like.is_cuda and like.dtype == torch.float32)


def convolve(
    xs: Sequence[Tensor], pasts: Sequence[Tensor], weights: Sequence[Tensor], heads: int, active: Tensor
) -> list[Tensor]:
    """What the short convolutions of q, k and v (or of the first of them) make of one token ``[r inner]``, as ``[r h e]``: one
    kernel for the convolutions, SiLU and unit length. The active rows of their pasts ``[r history inner]`` move on in place.
    """
    rows, history, inner = pasts[0].shape
    taps, width = weights[0].shape[1], inner // heads
    xs = [x.contiguous() for x in xs]
    ys = [x.new_empty(rows, heads, width) for x in xs]
    slots = [[*tensors, *tensors[:1] * (3 - len(xs))] for tensors in (xs, list(pasts), list(weights), ys)]
    launch.launch(
        "convolve_kernel", (rows * heads, len(xs)),
        *[tensor for group in slots for tensor in group], active.view(torch.uint8),
        HEADS=heads, D=width, BD=launch.power(width), HISTORY=history, BT=launch.power(max(history, 1)), TAPS=taps,
        ACC=launch.triton_type(pasts[0].dtype), options={"num_warps": 4 if history <= 64 else 8},
    )  # fmt: skip
    return ys


class Running:
    """A `MemoryState` being written in place; the one it was made from is not touched, and `state` hands out a copy.

    ``m`` is rows times heads. `inputs` and `errors` are the open chunk's X and D, one ``[m c ...]`` for each layer.
    """

    def __init__(self, state: MemoryState, net: Net, rule: Rule, backend: str = "auto") -> None:
        reason = unsupported(net, rule)
        if reason is not None or not isinstance(net, MLP):
            raise ValueError(f"net: expected a memory that can be written in place, got {type(net).__name__}: {reason}")
        self.net, self.rule, self.chunk = net, rule, state.chunk
        self.rows, self.heads, self.width = state.k.shape[0], *state.k.shape[2:]
        self.values = state.v.shape[-1]
        # One slot more than a tail has: the token that completes the chunk.
        k, self.v, self.gates = self._slots(state.k), self._slots(state.v), state.gates.map(self._slots)
        self.layers = tuple(layer.detach().flatten(0, 1).clone(memory_format=torch.contiguous_format) for layer in state.layers)
        self.position, self.diverged = state.position.clone(), state.diverged.clone()
        self.inputs, self.errors = self._tail(k, self.v)
        self.step = self._fused if self._choose(backend) == "triton" else self._plain

    @property
    def _fits(self) -> bool:
        return fits(self.v, max(self.width, self.values))

    def _choose(self, backend: str) -> str:
        known = written(self.net, self.rule) and self.chunk <= launch.WIDEST and self._fits
        if backend == "triton" and not known:
            raise ValueError(
                "backend: 'triton' decodes two layers anchored at the chunk's start, or one without LayerNorm; no bias, and on "
                f"CUDA; got {self.net} and {self.rule}"
            )
        return ("triton" if known else "plain") if backend == "auto" else backend

    def _slots(self, tail: Tensor) -> Tensor:
        """``[r c-1 h ...]`` to ``[m c ...]``."""
        whole = torch.cat([tail.detach(), tail.new_zeros(tail.shape[0], 1, *tail.shape[2:])], 1)
        return whole.transpose(1, 2).flatten(0, 1).contiguous()

    def _tail(self, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The open chunk's X and D. Those of slots not read yet are whatever zeros give: they are met by coefficients of 0."""
        co = coefficients(self.rule, self.gates, torch.zeros(len(k), dtype=torch.bool, device=k.device))
        rec = cf.record(self.net, self.rule, cf.Anchor(self.layers, co, cf.solver(self.net, self.rule, k, co)), k, v)
        return [x.contiguous() for x in rec.inputs], [x.contiguous() for x in rec.errors]

    @property
    def weights(self) -> Weights:
        """``[r h ...]`` at the open chunk's start: views, which change as tokens come."""
        return tuple(self._split(layer[:, 0]) for layer in self.layers)

    def adopt(self, weights: Weights, rows: Tensor) -> None:
        """Copy `self.weights` to these, in place, in the rows told ``[r]``."""
        if not self._fits:
            keep(weights, self.weights, rows)
            return
        for layer, weight in zip(self.layers, weights, strict=True):
            size, block = weight[0, 0].numel(), 1024
            grid, told = (self.rows * self.heads, -(-size // block)), (size, layer.shape[1], self.heads, block)
            launch.launch("adopt_kernel", grid, rows.view(torch.uint8), layer, weight, *told, options={})

    def settled(self) -> Weights:
        """``[r h ...]`` after all that was read, the open chunk included."""
        slot = self._each(self.position % self.chunk)
        co = coefficients(self.rule, self.gates, torch.zeros_like(slot, dtype=torch.bool))
        mix, own = self._at(slot, *cf.earlier(co._replace(scale=None)))
        weights = []
        for layer, x, error in zip(self.layers, self.inputs, self.errors, strict=True):
            held = (own.mT.unsqueeze(-1) * layer).sum(1)
            weights.append(self._split(torch.baddbmm(held, (x * mix.mT).mT, error, alpha=-1)))
        return tuple(weights)

    def _each(self, x: Tensor) -> Tensor:
        """``[r]`` to ``[m]``."""
        return x.unsqueeze(-1).expand(self.rows, self.heads).flatten()

    def _split(self, x: Tensor) -> Tensor:
        """``[m ...]`` to ``[r h ...]``."""
        return x.unflatten(0, (self.rows, self.heads))

    def _at(self, slot: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Each memory's row at its slot, ``[m c ...]`` to ``[m 1 ...]``."""
        index = torch.arange(len(slot), device=slot.device)
        return [x[index, slot].unsqueeze(1) for x in tensors]

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor) -> tuple[Tensor, Tensor]:
        """Read one token ``[r h e]``, log gates ``[r h]``, into the rows that are active ``[r]``: answers and surprise.

        Those of other rows mean nothing.
        """
        q, k, v = (x.flatten(0, 1).unsqueeze(1).to(self.v.dtype) for x in (q, k, v))
        on, slot = self._each(active), self._each(self.position % self.chunk)
        for buffer, gate in zip(self.gates, gates, strict=True):
            if buffer is not None and gate is not None:
                put(buffer, slot, gate.flatten(), on)
        whole = coefficients(self.rule, self.gates, on & (slot == self.chunk - 1))
        mix, own, before, own_before = self._at(slot, whole.mix, whole.own, *cf.earlier(whole))
        co = whole._replace(mix=mix, own=own, scale=None if whole.scale is None else self._at(slot, whole.scale)[0])
        met = co._replace(mix=before, own=own_before) if cf.exact(self.net, self.rule) else co
        rec = cf.record_next(self.net, self.rule, cf.Anchor(self.layers, met), self.inputs, self.errors, k, v)
        pairs = zip((*self.inputs, *self.errors, self.v), (*rec.inputs, *rec.errors, v), strict=True)
        for buffer, new in pairs:
            put(buffer, slot, new.squeeze(1), on)
        y = cf.read(self.net, cf.Anchor(self.layers, co), self.inputs, self.errors, q).answers.squeeze(1)
        surprise = rec.surprise(self.rule).squeeze(1)
        ends = tuple(torch.empty_like(layer) for layer in self.layers)
        cf.fold(cf.Anchor(self.layers, whole), self.inputs, self.errors, ends)  # changes nothing where a chunk is open
        for layer, end in zip(self.layers, ends, strict=True):
            layer.copy_(end)
        fine = self._split(y.isfinite().all(-1) & surprise.isfinite()).all(1)
        self.diverged |= active & ~fine
        self.position += active
        return self._split(y), self._split(surprise)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, active: Tensor) -> tuple[Tensor, Tensor]:
        """`_plain` as one kernel. Answers and surprise of rows that are not active are 0."""
        y = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
        surprise = torch.empty_like(gates.log_step)
        absent = self.gates.log_step
        kept = [absent if gate is None else gate for gate in self.gates]
        new = [gates.log_step if gate is None else gate.contiguous() for gate in gates]
        launch.launch(
            "decode_kernel" if self.net.depth == 2 else "decode_linear_kernel", (self.rows * self.heads,),
            q.contiguous(), k.contiguous(), v.contiguous(), *new, *self.layers, *self.inputs, *self.errors, self.v, *kept,
            self.position, active.view(torch.uint8), y, surprise, self.diverged.view(torch.uint8),
            **self._constants(), options={"num_warps": WARPS, "num_stages": 1},
        )  # fmt: skip
        self.position += active  # not in the kernel, whose programs read it
        return y, surprise

    def _constants(self) -> dict[str, Any]:
        """What the kernel is built for."""
        net, rule, power, columns = self.net, self.rule, launch.power, self.layers[0].shape[-1]
        block = min(power(columns), BLOCK >> (self.width > 64) + (self.chunk > 64))
        constants: dict[str, Any] = {
            "HEADS": self.heads, "CHUNK": self.chunk, "BC": power(self.chunk), "D": self.width, "BD": power(self.width),
            "MOMENTUM": rule.momentum, "FORGET": rule.forget, "RESIDUAL": net.residual, "ACC": launch.triton_type(self.v.dtype),
        }  # fmt: skip
        if net.depth == 2:
            return constants | {"HIDDEN": columns, "BH": block, "NORM": net.norm, "GELU": net.activation == "gelu"}
        exact, squared = rule.anchor == "token", rule.loss == "squared"
        return constants | {"E": columns, "BV": block, "SQUARED": squared, "TOKEN": exact, "SCALED": rule.decay_first}

    @property
    def state(self) -> MemoryState:
        """Where the memory stands, as a state of its own."""
        slot = (self.position % self.chunk).unsqueeze(-1)
        read = torch.arange(self.chunk - 1, device=slot.device) < slot

        def tail(x: Tensor) -> Tensor:
            x = self._split(x).transpose(1, 2)[:, : self.chunk - 1]
            return torch.where(read.view(*read.shape, *[1] * (x.dim() - 2)), x, 0.0)

        layers = tuple(self._split(layer).clone() for layer in self.layers)
        bad = self.diverged.clone()
        for layer in layers:
            bad |= ~layer.isfinite().flatten(1).all(1)
        k = tail(cf.without_ones(self.net, self.inputs[0]))
        return MemoryState(layers, k, tail(self.v), self.gates.map(tail), self.position.clone(), bad)
