"""A user's own model with a memory inside, under DistributedDataParallel, its state carried from step to step."""

import os
import socket
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remanence import NeuralMemory
from tests.models import model

STEPS = 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.memory, self.head = (
            nn.Linear(6, 12),
            NeuralMemory(dim=12, heads=2, chunk=4),
            nn.Linear(12, 6),
        )

    def forward(self, x, state=None):
        y, state = self.memory(self.before(x), state)
        return self.head(y), state


def data():
    return torch.randn(4, 9 * STEPS, 6, generator=torch.Generator().manual_seed(3))


def train(model, x):
    """A few steps of truncated backpropagation: the memory is carried, its graph is not. Returns the last weights and
    state.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for piece in x.split(9, 1):
        y, state = model(piece, state)
        loss = (y[:, :-1] - piece[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()
    return state


def worker(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    state = train(model, data()[2 * rank : 2 * rank + 2])
    torch.save({"weights": model.module.state_dict(), "memory": state.memory.weights}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="two gloo processes are tried on Linux only")
def test_two_processes_equal_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, str(tmp_path)), nprocs=2)
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = Model()
        state = train(model, data())
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name, tensor in model.state_dict().items():
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name]), (
            f"{name} differs between the ranks"
        )
        torch.testing.assert_close(ranks[0]["weights"][name], tensor, atol=1e-6, rtol=1e-5)
    for layer, tensor in enumerate(state.memory.weights):
        both = torch.cat([rank["memory"][layer] for rank in ranks])
        torch.testing.assert_close(both, tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo processes are tried on Linux only")
@pytest.mark.parametrize("view", [False, True])
def test_no_warnings_of_gradients_strides(tmp_path, view):
    """A single head's gradients had other strides than its weights."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    torch.set_warn_always(True)
    nets = [{"net": net, "heads": heads} for net in ("deep", "titans", "linear") for heads in (1, 2)]
    cases = [(NeuralMemory(dim=12, chunk=4, **net), lambda: torch.randn(1, 9, 12)) for net in nets]
    one = {"heads": 1, "memory": {"heads": 1}}
    cases += [
        (model(name, torch.float32, **one), lambda: torch.randint(0, 11, (1, 20)))
        for name in ("mac", "mag", "mal", "lmm", "gated_delta")
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for module, inputs in cases:
                spread, state = DistributedDataParallel(module, gradient_as_bucket_view=view), None
                for _ in range(2):
                    y, state = spread(inputs(), state)
                    y.square().sum().backward()
                    state = state.detach()
    finally:
        torch.set_warn_always(False)
        dist.destroy_process_group()
