"""What an error advises is accepted by the same command, and needs no more memory than there is."""

import re
from dataclasses import replace

import pytest
from runs import config

from remanence.recipes import load_recipe
from remanence.train import DataConfig, TrainConfig, override
from remanence.train import plan as planning

CASES = {
    "attach": {"kind": "fact_dialogues", "curriculum": (64, 64, 128, 256)},
    "carried": {"kind": "documents"},
    "packed": {"kind": "packed"},
    "curriculum": {"kind": "babilong", "curriculum": (0, 64, 1024)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [0.7, 0.3, 0.15])
@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_advised_is_accepted_and_fits(name, share, gpus, monkeypatch):
    small = config("mag", batch=32, steps=4)
    given = replace(small, carry=name in ("attach", "carried"), data=DataConfig(length=64, **CASES[name]))
    needed = sum(planning.memory_of_run(given, gpus).values())
    fixed = planning.memory_of_run(given, gpus)["weights, gradients, moments"]
    monkeypatch.setitem(planning.GPUS, "H100", (fixed + share * (needed - fixed)) / 1e9)
    with pytest.raises(ValueError, match="memory: expected at most") as error:
        planning.plan(given, gpus)
    options = dict(re.findall(r"--([\w.]+)=(\S+)", str(error.value)))
    assert options, error.value
    changed = override(given, options)
    assert planning.plan(changed, gpus).needed <= planning.GPUS["H100"] * 1e9
    step = changed.batch * changed.data.length
    assert all(not length or step % length == 0 for length in changed.data.stages)
    if name == "packed":
        assert "accumulate" in options or "checkpointing" in options, "the same rows make a step"


def test_parts_of_a_step_are_refused_with_advice_that_works():
    given = config("mag", batch=8, carry=True, data=DataConfig(kind="documents", length=64))
    with pytest.raises(ValueError, match="accumulate: expected 1 with carry=true") as error:
        override(given, {"accumulate": "2"})
    override(given, {"accumulate": "2"} | dict(re.findall(r"--([\w.]+)=(\S+)", str(error.value))))
    with pytest.raises(ValueError, match="carry: expected") as error:
        override(given, {"data.kind": "packed"})
    override(given, {"data.kind": "packed"} | dict(re.findall(r"--([\w.]+)=(\S+)", str(error.value))))


def test_the_small_recipe_is_the_large_one_with_less_at_once():
    large, small = load_recipe("attach"), load_recipe("attach_small")
    step = small.batch * small.data.length
    assert isinstance(small, TrainConfig) and small.checkpointing and small.carry
    assert all(step % length == 0 for length in small.data.curriculum)
    data = replace(large.data, curriculum=small.data.curriculum)
    assert replace(large, data=data, batch=small.batch, checkpointing=True) == small
