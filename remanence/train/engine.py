"""One training step: the forward and backward pass of its parts, then the update of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from remanence.data import Batch
from remanence.model import Model, State, Trace
from remanence.train.config import TrainConfig
from remanence.train.distributed import ProcessGroup, gather_tensor
from remanence.train.graphed import Graphed, write_cost_at, writing
from remanence.train.initial_state import InitialState
from remanence.train.loss import batch_loss, target_count
from remanence.train.task import Gradients, TrainTask
from remanence.train.trainable import TrainableModel


class Step(NamedTuple):
    """The result of one step. `loss`, `gradient` (its norm) and `tokens` are those of all processes together.

    `taken` is False if the update was skipped because the loss or the gradient was not finite. `trace` and
    `answers` are those of this process. `answers` is the mean loss of the targets with weight 1, if other
    targets have a lower weight, else None.
    """

    loss: float
    gradient: float
    taken: bool
    tokens: int
    trace: Trace
    answers: float | None = None


def make_optimizer(model: TrainableModel, config: TrainConfig) -> torch.optim.AdamW:
    """Create AdamW. Weight decay applies to the matrices of projections and feed-forward networks only."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    decayed = [weight for name, weight in named if name.endswith("proj.weight") or ".ffn." in name]
    others = [weight for name, weight in named if not (name.endswith("proj.weight") or ".ffn." in name)]
    o = config.optimizer
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = model.device.type == "cuda" or None
    return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=fused)


def compile_parts(model: nn.Module) -> None:
    """Compile the feed-forward networks.

    Memories are not compiled, as their loop over chunks would be unrolled.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ValueError("compile: expected False for a model attached to a pretrained one, got True")
    for block in blocks:
        block.ffn.compile(dynamic=True)


def take_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    batches: Sequence[Any],
    state: State | None,
    number: int,
    process_group: ProcessGroup | None = None,
    initial_state: InitialState | None = None,
    *,
    graph: Graphed | None = None,
    carried: State | None = None,
    task: TrainTask | None = None,
) -> Step:
    """Compute the gradients of all parts and update the weights. Skip the update if loss or gradient is not
    finite.

    Rows start from `state`, or from the states that `initial_state` chooses. With a `graph`, they start from
    `carried`. If `task` is None, the batches are tokens for language modelling. `number` is the step, counted
    from 0.
    """
    process_group = process_group or ProcessGroup(model.device)
    optimizer.zero_grad(set_to_none=True)
    if task is not None:
        found = task.gradients(model, batches, state, number, initial_state, graph, carried)
    else:
        found = token_gradients(
            model, config, batches, state, number, process_group, initial_state, graph, carried
        )
    gradient = gather_tensor(nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip))
    loss_total, norm = process_group.sum_over_processes(float(found.loss))[0], float(gradient)
    taken = isfinite(loss_total) and isfinite(norm)
    if taken:
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.rate(number, config.steps)
        optimizer.step()
    return Step(loss_total, norm, taken, found.tokens, found.trace, found.answers)


def token_gradients(
    model: Model,
    config: TrainConfig,
    batches: Sequence[Batch],
    state: State | None,
    number: int,
    process_group: ProcessGroup,
    initial_state: InitialState | None,
    graph: Graphed | None,
    carried: State | None,
) -> Gradients:
    """Run the forward and backward pass of all parts of a language modelling step.

    Arguments are as in `take_step`. The `answers` of the result are None if the step is replayed as a CUDA
    graph.
    """
    targets_here = sum(target_count(batch) for batch in batches)
    tokens_here = sum(b.tokens.numel() if b.mask is None else int(b.mask.sum()) for b in batches)
    count, tokens = process_group.sum_over_processes(targets_here, tokens_here)
    dense = all(bool((batch.targets >= 0).all()) for batch in batches)
    cost = write_cost_at(config.write_cost, number, config.steps) if config.write_cost else None
    loss_here: Tensor | float = 0.0
    answers: list[Tensor] = []
    for part, batch in enumerate(batches):
        if graph is not None:
            loss_here, trace = graph(
                batch.tokens, batch.targets, carried, batch.begins, max(1, count), batch.weights, cost
            )
            break
        if initial_state is not None:
            fresh = model.start(batch.tokens.shape[0] if batch.offsets is None else len(batch.offsets) - 1)
            state = initial_state.start(fresh, batch, number * config.accumulate + part)
        keep = config.carry or initial_state is not None
        with torch.autocast(
            process_group.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"
        ):
            loss, trace, known = batch_loss(model, batch, state, process_group.device, keep=keep, dense=dense)
            answers.append(known)
            loss = loss / max(1, count)
            wanted = loss * process_group.size  # FSDP averages over processes, but the loss is a sum
            if cost is not None:
                wanted = wanted + cost / len(batches) * writing(trace, config.model.memory.threshold)
        wanted.backward()
        loss_here = loss_here + loss.detach()
    costs = torch.cat(answers) if answers else torch.empty(0)
    return Gradients(loss_here, int(tokens), trace, float(costs.mean()) if costs.numel() else None)
