"""The table of docs/compatibility.md: every row is run, for a layer and for a model, and does what the table says."""

import copy
import io
import pickle
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from remanence import Model, NeuralMemory
from tests.compiling import whole
from tests.models import config

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
ROW = re.compile(
    r"^\| (?P<feature>.+?) \| (?P<status>works|refuses|not supported) \| (?P<note>.*?) ?\|$", re.M
)
ROWS = {row["feature"].replace("`", ""): row for row in ROW.finditer(PAGE.read_text())}


def layer():
    torch.manual_seed(0)
    return NeuralMemory(dim=8, heads=2, chunk=4, depth=2)


def model():
    torch.manual_seed(0)
    return Model(config("mag"))


def inputs(make, tokens=9):
    return torch.randn(2, tokens, 8) if make is layer else torch.randint(0, 11, (2, tokens))


def grads(module):
    """The module's gradients, which are then cleared."""
    found = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad()
    return found


def train(module, x):
    y, _ = module(x)
    y.square().sum().backward()
    return y


def equal(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_training(module, other, x):
    equal(train(other, x), train(module, x))
    equal(grads(getattr(other, "module", other)), grads(module))


def compiles(make, folder):
    module, x = make(), inputs(make)
    expected = train(module, x)
    wanted = grads(module)
    equal(train(whole(module), x), expected)
    equal(grads(module), wanted)


def exports(make, folder):
    module, x = make().eval(), inputs(make)
    equal(torch.export.export(module, (x,)).module()(x)[0], module(x)[0])


def with_processes(run):
    def inside(make, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            run(make)
        finally:
            dist.destroy_process_group()

    return inside


@with_processes
def ddp(make):
    module = make()
    spread, state, x = DistributedDataParallel(copy.deepcopy(module)), None, inputs(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_training(module, spread, x)
        for _ in range(2):  # a carried state, and a gradient of every parameter
            y, state = spread(x, state)
            y.square().sum().backward()
            state = state.detach()


@with_processes
def fsdp2(make):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, x = make(), inputs(make)
    with torch.device("meta"):
        sharded = make()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    sharded.to_empty(device="cpu")
    torch.manual_seed(0)
    sharded.reset_parameters()
    equal(train(sharded, x), train(module, x))
    equal({name: grad.full_tensor() for name, grad in grads(sharded).items()}, grads(module))


def autocast(make, folder):
    module, x = make(), inputs(make)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = module(x)
    assert y.dtype == torch.bfloat16
    memory = state.memory if make is layer else state.blocks[0].memory.memory
    assert memory.k.dtype == torch.float32
    equal(y.float(), module(x)[0], 0.1)
    y.float().square().sum().backward()
    assert all(grad.isfinite().all() for grad in grads(module).values())


def functional_call(make, folder):
    module, x = make(), inputs(make)
    torch.manual_seed(1)
    other = copy.deepcopy(module)
    other.reset_parameters()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in other.named_parameters()}
    y = torch.func.functional_call(module, weights, (x,))[0]
    equal(y, train(other, x))
    y.square().sum().backward()
    equal({name: w.grad for name, w in weights.items() if w.grad is not None}, grads(other))


def loss_of(module, x):
    return lambda weights: torch.func.functional_call(module, weights, (x,))[0].square().sum()


def func_grad(make, folder):
    module = make()
    torch.func.grad(loss_of(module, inputs(make)))(dict(module.named_parameters()))


def vmap(make, folder):
    module = make()
    torch.func.vmap(lambda x: module(x)[0])(inputs(make).unsqueeze(1))


def double_backward(make, folder):
    module = make()
    weights = [*module.parameters()]
    # Written out: attention's own kernel on a CPU is not differentiable twice either, with torch's message.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y, _ = module(inputs(make))
        found = torch.autograd.grad(y.sum(), weights, create_graph=True, allow_unused=True)
        sum(grad.square().sum() for grad in found if grad is not None).backward()


def checkpointing(make, folder):
    module, x = make(), inputs(make)
    expected = train(module, x)
    wanted = grads(module)
    for reentrant in (False, True):
        again = x.clone().requires_grad_() if make is layer else x
        if reentrant and make is model:
            module.train().checkpointing = True
            y = module(x)[0]
        else:
            y = checkpoint(module, again, use_reentrant=reentrant)[0]
        equal(y, expected)
        y.square().sum().backward()
        equal(grads(module), wanted)


def save_states(make, folder):
    module, x = make(), inputs(make)
    with torch.no_grad():
        state = module(x)[1]
        torch.save(state, folder / "state.pt")
        loaded = torch.load(folder / "state.pt", weights_only=True)
        assert type(loaded) is type(state) and torch.equal(module(x, loaded)[0], module(x, state)[0])


def meta(make, folder):
    module = make()
    with torch.device("meta"):
        later = make()
    later.to_empty(device="cpu")
    torch.manual_seed(0)
    later.reset_parameters()
    assert all(map(torch.equal, module.parameters(), later.parameters()))


def copies(make, folder):
    module = make()
    same_training(module, copy.deepcopy(module), inputs(make))


def copies_states(make, folder):
    module, x = make(), inputs(make)
    state = module(x)[1].detach()
    copied = copy.deepcopy(state)
    assert all(
        a is not b and torch.equal(a, b) for a, b in zip(state.tensors(), copied.tensors(), strict=True)
    )
    assert torch.equal(module(x, copied)[0], module(x, state)[0])


def pickles(make, folder):
    module = make()
    same_training(module, pickle.loads(pickle.dumps(module)), inputs(make))


CHECKS = {
    "torch.compile": compiles,
    "torch.export": exports,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "autocast": autocast,
    "torch.func.functional_call": functional_call,
    "torch.func.grad": func_grad,
    "torch.func.vmap": vmap,
    "double backward": double_backward,
    "gradient checkpointing": checkpointing,
    "torch.jit.trace": lambda make, folder: torch.jit.trace(make(), (inputs(make),)),
    "torch.jit.script": lambda make, folder: torch.jit.script(make()),
    "ONNX export": lambda make, folder: torch.onnx.export(make(), (inputs(make),), io.BytesIO()),
    "torch.save and torch.load of states": save_states,
    "meta device": meta,
    "copy.deepcopy of the module": copies,
    "copy.deepcopy of a state": copies_states,
    "pickling of the module": pickles,
}


def test_every_row_is_checked():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    assert len(lines) == len(ROWS)
    assert set(ROWS) == set(CHECKS)


def cases():
    for feature in CHECKS:
        slow = pytest.mark.slow if feature in ("torch.compile", "torch.export", "DDP", "FSDP2") else ()
        yield pytest.param(feature, layer, id=f"{feature}-layer", marks=slow)
        yield pytest.param(feature, model, id=f"{feature}-model", marks=slow)


@pytest.mark.skipif(sys.platform != "linux", reason="gloo processes are tried on Linux only")
@pytest.mark.parametrize(("feature", "make"), list(cases()))
def test_row(feature, make, tmp_path, aside):
    row = ROWS[feature]
    try:
        aside(CHECKS[feature], make, tmp_path)
    except Exception as error:
        if row["status"] == "works":
            raise
        message = str(error)
    else:
        assert row["status"] == "works", "this works now: the table is out of date"
        return
    if row["status"] == "refuses":
        assert re.match(r"`(.+?)` ", row["note"])[1] in message
        assert "\n" not in message and "use " in message
