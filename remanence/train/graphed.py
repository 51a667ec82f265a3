"""The forward and backward pass of a training step as one CUDA graph, which saves the launch of many small
kernels.

All batches must have the same shape. Rows begin a document or continue from the previous step.
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
from remanence.train.distributed import ProcessGroup
from remanence.train.loss import summed_loss

SHARE = {False: 0.75, True: 0.45}
"""A step is captured by default if it uses at most this fraction of the GPU's memory. The key is `carry`.

If rows carry a state, there are two graphs, and the second one is warmed up while the first one is kept.
"""


def writing(seen: Trace, threshold: float) -> Tensor:
    """Return how far the step gates s are open: the mean of log(s / threshold), with 0 for tokens that are
    not written.

    With the logarithm, the penalty pushes nearly closed gates hard, and wide open gates hardly at all.
    """
    steps = [each.gates.log_step.exp() for each in seen.traces if each is not None]
    return torch.stack([torch.log1p(step * ((1 - threshold) / threshold)).mean() for step in steps]).mean()


def write_cost_at(max_cost: float, number: int, steps: int) -> float:
    """Return the write cost at step `number`, counted from 0: 0 in the first half of a run, then linear up to
    `max_cost`.

    Before the memory is useful, the only consistent gradient of the gates is that of the cost. The optimizer
    would follow it, however small, until all gates are closed, and closed gates have no gradient.
    """
    return max_cost * max(0.0, 2 * (number + 1) / steps - 1)


class _CapturedStep(NamedTuple):
    """A captured step, and the fixed tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    targets: Tensor
    weights: Tensor | None
    loss_divisor: Tensor
    """The number by which the summed loss is divided."""
    cost: Tensor
    begins_document: Tensor
    """Whether each row begins a document [b]."""
    state: State | None
    loss: Tensor
    seen: Trace
    grads: list[Tensor | None]


class Graphed:
    """``loss, seen = Graphed(model)(tokens, targets)``: cross-entropy, and gradients as after `backward`.

    The first call for each shape and combination of arguments captures a graph. Graphs are captured again
    after a module or its hooks have changed; a model with hooks raises an error. Each call overwrites the
    tensors that the previous call returned. The storage of the parameters and the model's settings must not
    change.
    """

    def __init__(self, model: Model, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.device, self.parameters = model.embed.weight.device, list(model.parameters())
        # Computed once, since every step would wait for the host to compute it.
        self.border, self.window = alignment_of(model), longest_window(model)
        self.captured_steps: dict[tuple[int | bool, ...], _CapturedStep] = {}
        self.watch = Watch(model)

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: State | None = None,
        begins_document: Tensor | None = None,
        count: float | None = None,
        weights: Tensor | None = None,
        cost: float | None = None,
    ) -> tuple[Tensor, Trace]:
        """Run a step. Return the loss (a scalar) and the trace; the gradients are set as after `backward`.

        The loss is the sum over all targets (-100 means no target), each times its weight, divided by
        `count`, or by the number of targets if `count` is None. The gradients are those of the loss plus
        `cost` times `writing`.

        Rows continue from `state`, except for rows where `begins_document` ``[b]`` is true, which begin a document. The
        positions must be multiples of `alignment_of`. Steps in which a row begins a document, or has not
        filled its window yet, use a separate graph.
        """
        if self.watch.changed():
            # The captured graphs no longer match the model.
            self.captured_steps, self.watch = {}, Watch(self.model)
            self.parameters = list(self.model.parameters())
        begins = None if begins_document is None or state is None else begins_document.tolist()
        is_window_full = (
            state is not None and not any(begins or ()) and min(positions_of(state.position)) >= self.window
        )
        key = (*tokens.shape, state is None, is_window_full, weights is None, cost is None)
        if key not in self.captured_steps:
            reason = unsupported(self.model, tokens.shape[1], state is not None)
            if reason is not None:
                raise ValueError(f"model: expected one whose step can be captured, but {reason}")
            self.captured_steps[key] = self._capture(
                tokens, targets, weights, state, is_window_full, cost is not None
            )
        step = self.captured_steps[key]
        step.tokens.copy_(tokens, non_blocking=True)
        step.targets.copy_(targets, non_blocking=True)
        if step.weights is not None and weights is not None:
            step.weights.copy_(weights, non_blocking=True)
        step.loss_divisor.copy_((targets >= 0).sum()) if count is None else step.loss_divisor.fill_(count)
        step.cost.fill_(cost or 0.0)
        if step.state is not None and state is not None:
            copy_all(step.state.tensors(), state.tensors())
            step.begins_document.zero_() if begins_document is None else step.begins_document.copy_(
                begins_document, non_blocking=True
            )
        step.graph.replay()
        for parameter, grad in zip(self.parameters, step.grads, strict=True):
            parameter.grad = grad
        if state is None:
            return step.loss, step.seen
        is_new_document = begins or [False] * len(tokens)
        positions = [
            (0 if is_new else position) + tokens.shape[1]
            for is_new, position in zip(is_new_document, positions_of(state.position), strict=True)
        ]
        return step.loss, step.seen._replace(state=step.seen.state.at(positions))

    def _capture(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        state: State | None,
        is_window_full: bool,
        has_write_cost: bool,
    ) -> _CapturedStep:
        """Capture the graph of a step.

        `is_window_full` is whether all rows continue and have filled their window; `has_write_cost`, whether there
        is a write cost.
        """
        tokens, targets = (x.to(self.device, copy=True) for x in (tokens, targets))
        weights = None if weights is None else weights.to(self.device, copy=True)
        rows = tokens.shape[0]
        count = torch.full((), float(targets.numel()), device=self.device)
        begins_document = torch.zeros(rows, dtype=torch.bool, device=self.device)
        cost, threshold = torch.zeros((), device=self.device), self.model.config.memory.threshold
        fixed = None if state is None else state.detach().map(torch.clone)
        results: list[tuple[Tensor, Trace]] = []

        def step() -> None:
            """Run the step that is captured, and store its loss and trace in `results`."""
            self.model.zero_grad(set_to_none=True)
            initial_state = None
            # Positions on the host: any multiple of the alignment, beyond the window if `is_window_full`.
            if fixed is not None:
                initial_state = (
                    fixed if is_window_full else where(begins_document, self.model.start(rows), fixed)
                )
                initial_state = initial_state.at([self.border * self.window if is_window_full else 0] * rows)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                seen = self.model.trace(tokens, initial_state)
                logits = self.model.logits(seen.hidden).flatten(0, 1)
                loss = summed_loss(logits, targets.flatten(), None if weights is None else weights.flatten())
                loss = loss / count
            (loss + cost * writing(seen, threshold) if has_write_cost else loss).backward()
            # The host positions are only valid during the capture, so the outputs must not keep them.
            results[:] = [(loss.detach(), seen._replace(state=seen.state.map(Tensor.detach)))]

        # All outputs of a step are used before the next step begins, so all graphs can share one memory pool.
        graph, _ = capture(
            step, self.device, beside=next((held.graph for held in self.captured_steps.values()), None)
        )
        ((loss, seen),) = results
        grads = [parameter.grad for parameter in self.parameters]
        return _CapturedStep(
            graph, tokens, targets, weights, count, cost, begins_document, fixed, loss, seen, grads
        )


class Graphs:
    """Chooses which steps of a run are captured as a CUDA graph (`Graphed`).

    With ``config.graph`` false, no steps are captured; with true, all steps that can be. With None, all steps
    that can be, if the first steps left enough GPU memory free.
    """

    EAGER = 2
    """The number of steps before the first graph, in which kernels are compiled and memory use is measured.
    """

    def __init__(self, model: Model, config: TrainConfig, process_group: ProcessGroup, begins: bool) -> None:
        self.graphed = Graphed(model, torch.bfloat16 if config.precision == "bfloat16" else None)
        self.config, self.steps, self.captured, self.logged = config, 0, False, ""
        self.reason = "steps are shared by several processes" if process_group.size > 1 else None
        self.reason = self.reason or ("rows begin in states that the host chooses" if begins else None)
        self.reason = self.reason or ("several parts make a step" if config.accumulate > 1 else None)
        self.reason = self.reason or ("config.graph is off" if config.graph is False else None)

    def select_graph(self, batches: list[Batch], carried: State | None) -> Graphed | None:
        """Return the graph for a step, or None if the step is not captured.

        Log the decision when it changes.
        """
        graph = self._select_graph(batches[0], carried)
        self.captured = graph is not None
        message = f"launched by the host: {self.reason}" if self.reason else ""
        message = "captured as a CUDA graph" if graph else message
        if message and message != self.logged:
            self.logged = message
            logging.getLogger("remanence").info("training steps: %s", message)
        return graph

    def _select_graph(self, batch: Batch, carried: State | None) -> Graphed | None:
        """Decide whether a step is captured. A permanent obstacle is stored in `reason`."""
        self.steps += 1
        model = self.graphed.model
        if self.reason is not None or self.steps <= self.EAGER or batch.offsets is not None:
            return None
        if batch.mask is not None and batch.begins is None:
            return None
        if uncaptured_code_reason(model) is not None:  # until the hooks are removed
            return None
        if self.captured:  # the previous step was, so its rows are at aligned positions
            return self.graphed
        if self.config.carry and (carried is None or not is_at_alignment(model, carried)):
            return None
        self.reason = unsupported(model, batch.tokens.shape[1], self.config.carry)
        if self.reason is None and self.config.graph is None and not self.graphed.captured_steps:
            device = self.graphed.device
            used, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
            if used > SHARE[self.config.carry] * total:
                self.reason = "a step needs too much of the GPU's memory"
        return None if self.reason else self.graphed


def is_at_alignment(model: Model, state: State) -> bool:
    """Whether the position of every row is a multiple of `alignment_of`, where a captured step can begin."""
    return all(position % alignment_of(model) == 0 for position in positions_of(state.position))
