"""Distributed training: the processes of a run, collective calls, and models sharded over processes (FSDP2)."""

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


class ProcessGroup(NamedTuple):
    """The processes of a training run, seen from one of them: its device and rank, and the number of processes.

    In a single process, collective calls do nothing.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.rank == 0

    def sum_over_processes(self, *numbers: float) -> list[float]:
        """Return each number summed over all processes."""
        if self.size == 1:
            return list(numbers)
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return summed.tolist()

    def run_on_rank0(self, act: Callable[[], object]) -> None:
        """Run `act` in the first process only, for example to write a file.

        If it fails, all processes fail.
        """
        self.run_on_all(act if self.is_first else lambda: None)

    def run_on_all(self, act: Callable[[], object]) -> None:
        """Run `act` in every process.

        If it fails in one, an error is raised in all, so that none waits for ever.
        """
        failure: BaseException | None = None
        try:
            act()
        except BaseException as error:
            failure = error
        failed = self.sum_over_processes(float(failure is not None))[0]
        if failure is not None:
            raise failure
        if failed:
            raise ValueError("another process could not go on; its message says why")


@contextmanager
def join_process_group(device: str) -> Iterator[ProcessGroup]:
    """Join the process group that `torchrun` started, if any, and leave it at the end."""
    this_device = resolve(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup(this_device)
        return
    if this_device.type == "cuda":
        this_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(this_device)
    is_new_group = not dist.is_initialized()
    if is_new_group:
        dist.init_process_group("nccl" if this_device.type == "cuda" else "gloo")
    try:
        yield ProcessGroup(this_device, dist.get_rank(), dist.get_world_size())
    finally:
        if is_new_group:
            dist.destroy_process_group()


def shard(model: Model, process_group: ProcessGroup) -> Model:
    """Shard a model over all processes with FSDP2, block by block. In a single process, return it unchanged.

    Weights are gathered in float32; autocast decides what is computed in bfloat16. `cast_forward_inputs` is
    off, since with a lower `param_dtype` it would convert the float32 states of memories to bfloat16. The
    methods `start`, `trace` and `logits` use weights outside of `forward`, so they are registered to gather
    the weights as well.
    """
    if process_group.size == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Parts of a state are views. Torch warns against changing them in place, which never happens.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {
        "mesh": init_device_mesh(process_group.device.type, (process_group.size,)),
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
    """Whether the weights of a model are sharded over processes. Otherwise every process has all of them."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


@torch.no_grad()
def average_gradients(model: nn.Module, process_group: ProcessGroup) -> None:
    """Replace gradients by their mean over all processes, for a model that every process holds in full.

    A parameter that has no gradient in any process keeps none, so that the optimizer skips it as in a single
    process.
    """
    if process_group.size == 1:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.float32)
    present = present.to(process_group.device)
    dist.all_reduce(present)
    used = [parameter for parameter, count in zip(trained, present.tolist(), strict=True) if count]
    for dtype in sorted({parameter.dtype for parameter in used}, key=str):
        group = [parameter for parameter in used if parameter.dtype == dtype]
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in group]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= process_group.size
        for parameter, mean in zip(group, flat.split([each.numel() for each in group]), strict=True):
            parameter.grad = mean.view_as(parameter)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass that has no backward pass (which would free them)."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_backward"):  # an FSDPModule
            module.reshard()  # type: ignore[operator]


def gather_model(model: Any, process_group: ProcessGroup) -> TrainableModel | None:
    """Return the model with all its weights, in the first process. All processes must call it; the others get
    None.

    A sharded model is gathered into a copy on the CPU; any other model is returned itself.
    """
    if not is_sharded(model):
        return model if process_group.is_first else None
    gathered = {name: gather_tensor(parameter.detach()).cpu() for name, parameter in model.named_parameters()}
    if not process_group.is_first:
        return None
    with torch.device("meta"):
        copy = Model(model.config)
    copy = copy.to_empty(device="cpu")
    copy.load_state_dict(gathered, strict=False, assign=True)
    return copy


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor if it is sharded over processes, by a collective call; otherwise the tensor
    itself.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Move a full tensor to the device of `like`.

    If `like` is sharded, return this process's shard of the tensor.
    """
    value = value.to(like.device)
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
