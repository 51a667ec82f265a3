"""What a user does with a state: print it, move it, save it."""

import pytest
import torch

from remanence import NeuralMemory
from remanence.runtime.state import TensorTuple
from tests.models import VARIANTS, model

pytestmark = pytest.mark.sample(3)


def tokens(count=13):
    return torch.randint(0, 11, (2, count))


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, tuple):
        for one, other in zip(a, b, strict=True):
            same(one, other)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_saved_state_is_loaded_without_unpickling_code(variant, tmp_path):
    reader = model(variant, torch.float32).eval()
    with torch.no_grad():
        state = reader(tokens())[1]
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        same(loaded, state)
        more = tokens(5)
        assert torch.equal(reader(more, loaded)[0], reader(more, state)[0])


def test_a_layers_state_among_other_things(tmp_path):
    state = NeuralMemory(dim=12, heads=2)(torch.randn(2, 20, 12))[1].detach()
    torch.save({"state": state, "step": 3, "none": None}, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    same(loaded["state"], state)


def test_a_state_is_printed_without_its_numbers():
    memory = NeuralMemory(dim=64, heads=2)
    state = memory(torch.randn(2, 20, 64))[1]
    text = repr(state)
    assert text == str(state) and len(text) < 1500
    assert text.startswith(
        "NeuralMemoryState(\n  memory=MemoryState(\n    layers=(float32[2, 2, 1, 32, 32] cpu,),\n"
    )
    assert (
        f"nbytes={state.nbytes:,}" in text and "position=int64[2] cpu" in text and "log_momentum=None" in text
    )
    assert text.count("nbytes") == 1 and text.endswith("\n)")
    assert "grad_fn" not in text and "0." not in text


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_state_has_a_short_repr(variant):
    state = model(variant, torch.float32)(tokens())[1]
    assert repr(state).startswith("State(\n  blocks=(") and len(repr(state)) < 6000
    assert "tensor(" not in repr(state)


def test_a_state_moves_as_a_module_does():
    state = NeuralMemory(dim=12, heads=2)(torch.randn(2, 20, 12))[1].detach()
    for wide in (state.to(torch.float64), state.to(dtype=torch.float64), state.to("cpu", torch.float64)):
        for new, old in zip(wide.tensors(), state.tensors(), strict=True):
            assert new.dtype == (torch.float64 if old.is_floating_point() else old.dtype)
            assert torch.equal(new, old.to(new.dtype))
    assert all(tensor.is_meta for tensor in state.to("meta").tensors())
    assert all(tensor.is_meta for tensor in state.to(device=torch.device("meta")).tensors())
    with pytest.raises(ValueError, match=r"dtype: expected a floating-point dtype, got torch.int32"):
        state.to(torch.int32)
    memory = NeuralMemory(dim=12, heads=2).double()
    y, after = memory(torch.randn(2, 3, 12, dtype=torch.float64), state.to(torch.float64))
    assert y.dtype == after.memory.k.dtype == torch.float64
    with pytest.raises(ValueError, match=r"state: expected .*float32"):
        NeuralMemory(dim=12, heads=2)(torch.randn(2, 3, 12), state.to(torch.bfloat16))


def test_a_state_of_ones_own_can_be_saved_and_printed(tmp_path):
    from examples.own_mixer import EMAState

    state = EMAState(torch.ones(2, 3))
    assert isinstance(state, TensorTuple)
    torch.save(state, tmp_path / "own.pt")
    same(torch.load(tmp_path / "own.pt", weights_only=True), state)
    assert repr(state) == "EMAState(\n  mean=float32[2, 3] cpu,\n  nbytes=24,\n)"
