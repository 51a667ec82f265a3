"""Models made on the meta device: after `to_empty`, `reset_parameters` gives what the constructor gives."""

import pytest
import torch
from torch import nn

from remanence import Backbone, Model, NeuralMemory, preset
from remanence.config import change
from remanence.layers import Module
from tests.models import VARIANTS, config

pytestmark = pytest.mark.sample(3)


def on_meta(make):
    with torch.device("meta"):
        module = make()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    module.to_empty(device="cpu")
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 7)
    return module


def check(make):
    torch.manual_seed(0)
    made = make()
    after = torch.rand(1)
    later = on_meta(make)
    torch.manual_seed(0)
    later.reset_parameters()
    assert torch.equal(torch.rand(1), after)  # and as many numbers were drawn
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        other = dict([*later.named_parameters(), *later.named_buffers()])[name]
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_model_of_every_mixer(variant, tie):
    check(lambda: Model(config(variant, tie=tie)))
    check(lambda: Backbone(config(variant)))


@pytest.mark.parametrize("mixer", ["mac", "mag", "mal", "lmm"])
def test_a_model_of_a_preset(mixer):
    """Presets differ in their sizes alone."""
    check(lambda: Model(preset("tiny", mixer)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"induction": True},
        {"net": "titans", "depth": 3, "bias": True},
        {"net": "linear", "conv": 0},
        {"depth": 3, "rule": "titans"},
    ],
    ids=str,
)
def test_a_layer(fields):
    check(lambda: NeuralMemory(dim=16, heads=2, **fields))


def test_every_module_by_apply():
    """The parts first, as nn.Module.apply goes: residual branches are scaled, and keys are the queries' of before."""
    make = lambda: Model(change(config("mac"), {"memory": {"induction": True}}))
    model = on_meta(make)
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    new = make()
    for name, parameter in model.named_parameters():
        other = new.get_parameter(name)
        assert parameter.isfinite().all()
        assert abs(parameter.std() - other.std()) <= 0.4 * other.std() + 1e-6, name
    memory = model.mixers[0].memory.layer
    assert torch.equal(memory.k_proj.weight, memory.q_proj.weight)


def test_a_part_that_cannot_be_reset_is_named():
    class Own(Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(NotImplementedError, match=r"Own: expected a method reset_own_parameters .* scale"):
        Own().reset_parameters()
