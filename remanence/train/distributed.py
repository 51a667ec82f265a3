"""Distributed training: the ranks of a run, collective calls, and models sharded over processes (FSDP2)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from remanence.model import Model
from remanence.runtime.device import resolve
from remanence.train.trainable import TrainableModel


class World(NamedTuple):
    """The rank of this process and the number of processes. In a single process, collective calls do nothing."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.rank == 0

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over all processes."""
        if self.size == 1:
            return list(numbers)
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return summed.tolist()

    def run_on_rank0(self, act: Callable[[], object]) -> None:
        """Run `act` in the first process only, such as writing a file."""
        self.run_on_all(act if self.first else lambda: None)

    def run_on_all(self, act: Callable[[], object]) -> None:
        """Run `act` in every process. If it fails in one, it fails in all, instead of waiting for ever."""
        failure: BaseException | None = None
        try:
            act()
        except BaseException as error:
            failure = error
        failed = self.total(float(failure is not None))[0]
        if failure is not None:
            raise failure
        if failed:
            raise ValueError("another process could not go on; its message says why")


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Join the processes that `torchrun` started, if any."""
    own = resolve(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(own)
        return
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(own, dist.get_rank(), dist.get_world_size())
    finally:
        if ours:
            dist.destroy_process_group()


def shard(model: Model, world: World) -> Model:
    """FSDP2, block by block. Weights are gathered in float32; autocast decides what is computed in bfloat16.

    `cast_forward_inputs` is off: with a lower `param_dtype` it would turn the memories' float32 states into bfloat16 on
    their way in. `start`, `trace` and `logits` use weights outside of `forward`, so they gather them, too.
    """
    if world.size == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Parts of a state are views. They are never changed in place, which torch warns of at every block of every process.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
    }
    for block in model.blocks:
        fully_shard(block, **options)
        register_fsdp_forward_method(block, "start")
    fully_shard(model, **options)
    for method in ("start", "trace", "logits"):
        register_fsdp_forward_method(model, method)
    return model


def is_sharded(model: TrainableModel) -> bool:
    """Whether a model's weights are distributed over processes; else every process has all of them."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


@torch.no_grad()
def average_gradients(model: nn.Module, world: World) -> None:
    """Replace gradients by their mean over all processes, for a model that every process holds in full.

    A parameter without a gradient in every process keeps none, so that the optimizer passes over it as in one process.
    """
    if world.size == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.float32)
    present = present.to(world.device)
    dist.all_reduce(present)
    used = [parameter for parameter, count in zip(trained, present.tolist(), strict=True) if count]
    for dtype in sorted({parameter.dtype for parameter in used}, key=str):
        group = [parameter for parameter in used if parameter.dtype == dtype]
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in group]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= world.size
        for parameter, mean in zip(group, flat.split([each.numel() for each in group]), strict=True):
            parameter.grad = mean.view_as(parameter)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass without a backward pass, which would free them."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_backward"):  # an FSDPModule
            module.reshard()  # type: ignore[operator]


def gather_model(model: Any, world: World) -> TrainableModel | None:
    """The model with all its weights on the CPU, in the first process. The others must call this, too: they get
    None.
    """
    if not is_sharded(model):
        return model if world.first else None
    gathered = {name: full(parameter.detach()).cpu() for name, parameter in model.named_parameters()}
    if not world.first:
        return None
    with torch.device("meta"):
        copy = Model(model.config)
    copy = copy.to_empty(device="cpu")
    copy.load_state_dict(gathered, strict=False, assign=True)
    return copy


def full(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded over processes, in one piece; a collective call if it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A full tensor as `like` is: on its device, and only this process's shard if it is sharded."""
    value = value.to(like.device)
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
