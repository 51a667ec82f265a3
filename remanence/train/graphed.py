"""Forward and backward of a training step as one CUDA graph, so that a step of many small kernels is not launch-bound.

For batches of one shape, whose rows begin anew or continue where the step before left them.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from remanence.data import Batch
from remanence.inference.graphs import alignment_of, longest_window, uncaptured_code_reason, unsupported
from remanence.model import Model, State, Trace
from remanence.runtime.graphs import capture, copy_all
from remanence.runtime.module import Watch
from remanence.runtime.positions import positions_of
from remanence.runtime.state import where
from remanence.train.config import TrainConfig
from remanence.train.distributed import World
from remanence.train.loss import summed_loss

SHARE = {False: 0.75, True: 0.45}
"""The share of a GPU's memory up to which a step is captured by default, by whether rows carry a state.

With a state there are two graphs, and the second is tried out beside the first.
"""


def writing(seen: Trace, threshold: float) -> Tensor:
    """How far the step gates are from being shut: the mean of log(s / threshold), 0 for tokens that are not written.

    In the logarithm, since a gate that is nearly shut is then pressed as hard as any other, and one that is wide open
    hardly at all.
    """
    steps = [each.gates.log_step.exp() for each in seen.traces if each is not None]
    return torch.stack([torch.log1p(step * ((1 - threshold) / threshold)).mean() for step in steps]).mean()


def cost_at(most: float, number: int, steps: int) -> float:
    """What writing costs at a step, counted from 0: nothing in the first half of a run, then more and more.

    Before a memory is of use, no gradient but the cost's has a direction, and an optimizer would follow the smallest
    until all gates are shut, which then have none.
    """
    return most * max(0.0, 2 * (number + 1) / steps - 1)


class _Held(NamedTuple):
    """A captured step, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    targets: Tensor
    weights: Tensor | None
    asked: Tensor
    cost: Tensor
    anew: Tensor
    state: State | None
    loss: Tensor
    seen: Trace
    grads: list[Tensor | None]


class Graphed:
    """``loss, seen = Graphed(model)(tokens, targets)``: cross-entropy, and gradients as after `backward`.

    The first call of each kind captures it, and again after a module or its hooks have changed; a model with hooks is
    refused. The next call overwrites what a call returned. The parameters must not move, and the model's settings must
    not change.
    """

    def __init__(self, model: Model, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.device, self.parameters = model.embed.weight.device, list(model.parameters())
        # Computed once: every step waits for the host here.
        self.border, self.window = alignment_of(model), longest_window(model)
        self.held: dict[tuple[int | bool, ...], _Held] = {}
        self.watch = Watch(model)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: State | None = None,
        anew: Tensor | None = None,
        count: float | None = None,
        weights: Tensor | None = None,
        cost: float | None = None,
    ) -> tuple[Tensor, Trace]:
        """The sum over all targets (-100 is none), each times its weight, divided by how many there are or by `count`.
        The gradients are of that and of `cost` times `writing`.

        Rows carry `state`, all at a multiple of `alignment_of`, except those that are `anew` ``[b]``: they begin a
        document. A step in which some do, or in which some have not filled their window yet, has a graph of its own.
        """
        if self.watch.changed():
            # What was captured is not what a call would run now.
            self.held, self.watch = {}, Watch(self.model)
            self.parameters = list(self.model.parameters())
        begins = None if anew is None or state is None else anew.tolist()
        whole = (
            state is not None and not any(begins or ()) and min(positions_of(state.position)) >= self.window
        )
        key = (*tokens.shape, state is None, whole, weights is None, cost is None)
        if key not in self.held:
            reason = unsupported(self.model, tokens.shape[1], state is not None)
            if reason is not None:
                raise ValueError(f"model: expected one whose step can be captured, but {reason}")
            self.held[key] = self._capture(tokens, targets, weights, state, whole, cost is not None)
        held = self.held[key]
        held.tokens.copy_(tokens, non_blocking=True)
        held.targets.copy_(targets, non_blocking=True)
        if held.weights is not None and weights is not None:
            held.weights.copy_(weights, non_blocking=True)
        held.asked.copy_((targets >= 0).sum()) if count is None else held.asked.fill_(count)
        held.cost.fill_(cost or 0.0)
        if held.state is not None and state is not None:
            copy_all(held.state.tensors(), state.tensors())
            held.anew.zero_() if anew is None else held.anew.copy_(anew, non_blocking=True)
        held.graph.replay()
        for parameter, grad in zip(self.parameters, held.grads, strict=True):
            parameter.grad = grad
        if state is None:
            return held.loss, held.seen
        begun = begins or [False] * len(tokens)
        known = [
            (0 if new else place) + tokens.shape[1]
            for new, place in zip(begun, positions_of(state.position), strict=True)
        ]
        return held.loss, held.seen._replace(state=held.seen.state.at(known))

    def _capture(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        state: State | None,
        whole: bool,
        costs: bool,
    ) -> _Held:
        tokens, targets = (x.to(self.device, copy=True) for x in (tokens, targets))
        weights = None if weights is None else weights.to(self.device, copy=True)
        rows = tokens.shape[0]
        count = torch.full((), float(targets.numel()), device=self.device)
        anew = torch.zeros(rows, dtype=torch.bool, device=self.device)
        cost, threshold = torch.zeros((), device=self.device), self.model.config.memory.threshold
        fixed = None if state is None else state.detach().map(torch.clone)
        made: list[tuple[Tensor, Trace]] = []

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            begun = None
            # The host knows of rows that they stand at a border, and whether they have read a window.
            if fixed is not None:
                begun = fixed if whole else where(anew, self.model.start(rows), fixed)
                begun = begun.at([self.border * self.window if whole else 0] * rows)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                seen = self.model.trace(tokens, begun)
                logits = self.model.logits(seen.hidden).flatten(0, 1)
                loss = summed_loss(logits, targets.flatten(), None if weights is None else weights.flatten())
                loss = loss / count
            (loss + cost * writing(seen, threshold) if costs else loss).backward()
            # The positions that the host knew are those of the capture: the outputs must not carry them.
            made[:] = [(loss.detach(), seen._replace(state=seen.state.map(Tensor.detach)))]

        # All outputs of a step are used before the next one begins, so all graphs can share one memory pool.
        graph, _ = capture(step, self.device, beside=next((held.graph for held in self.held.values()), None))
        ((loss, seen),) = made
        grads = [parameter.grad for parameter in self.parameters]
        return _Held(graph, tokens, targets, weights, count, cost, anew, fixed, loss, seen, grads)


class Graphs:
    """Which steps of a run are captured as a CUDA graph (`Graphed`).

    With ``graph`` none, or all that can be; by default those of a run whose first steps left enough memory free.
    """

    EAGER = 2
    """Steps before the first graph: kernels are built, and the memory is measured."""

    def __init__(self, model: Model, config: TrainConfig, world: World, begins: bool) -> None:
        self.graphed = Graphed(model, torch.bfloat16 if config.precision == "bfloat16" else None)
        self.config, self.steps, self.captured, self.logged = config, 0, False, ""
        self.reason = "steps are shared by several processes" if world.size > 1 else None
        self.reason = self.reason or ("rows begin in states that the host chooses" if begins else None)
        self.reason = self.reason or ("several parts make a step" if config.accumulate > 1 else None)
        self.reason = self.reason or ("config.graph is off" if config.graph is False else None)

    def of(self, batches: list[Batch], carried: State | None) -> Graphed | None:
        """The graph for a step, or None."""
        graph = self._of(batches[0], carried)
        self.captured = graph is not None
        message = f"launched by the host: {self.reason}" if self.reason else ""
        message = "captured as a CUDA graph" if graph else message
        if message and message != self.logged:
            self.logged = message
            logging.getLogger("remanence").info("training steps: %s", message)
        return graph

    def _of(self, batch: Batch, carried: State | None) -> Graphed | None:
        self.steps += 1
        model = self.graphed.model
        if self.reason is not None or self.steps <= self.EAGER or batch.offsets is not None:
            return None
        if batch.mask is not None and batch.begins is None:
            return None
        if uncaptured_code_reason(model) is not None:  # until the hooks are removed
            return None
        if self.captured:  # the step before, which left its rows where they can go on
            return self.graphed
        if self.config.carry and (carried is None or not at_border(model, carried)):
            return None
        self.reason = unsupported(model, batch.tokens.shape[1], self.config.carry)
        if self.reason is None and self.config.graph is None and not self.graphed.held:
            device = self.graphed.device
            used, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
            if used > SHARE[self.config.carry] * total:
                self.reason = "a step needs too much of the GPU's memory"
        return None if self.reason else self.graphed


def at_border(model: Model, state: State) -> bool:
    """Whether every row is where a captured step can begin."""
    return all(position % alignment_of(model) == 0 for position in positions_of(state.position))
