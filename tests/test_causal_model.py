"""The protocol between a language model and what reads, generates, saves and trains with it."""

import pytest
import torch
from test_attached import SMALL, base

import remanence
from remanence.attached.model import Attached
from remanence.inference import memfile
from remanence.inference.generate import Generation
from remanence.inference.reader import read
from remanence.model import CausalModel, Model


def models():
    torch.manual_seed(0)
    own = Model(remanence.preset("tiny", "mag")).eval()
    return {"own": own, "attached": remanence.attach(base(), every=2, window=24, **SMALL).model}


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_both_kinds_of_model_satisfy_the_protocol(kind):
    assert isinstance(models()[kind], CausalModel)
    assert not isinstance(base(), CausalModel) and not isinstance(torch.nn.Linear(2, 2), CausalModel)


def test_an_attached_model_has_only_what_it_can_honour():
    attached = models()["attached"]
    assert not issubclass(Attached, Model)
    for name in ("backbone", "blocks", "head", "schedule", "reset_parameters"):
        assert not hasattr(attached, name), name


class Wrapped:
    """A model of someone else's class, which only has the protocol's members."""

    def __init__(self, model):
        self._model = model
        for name in {*CausalModel.__annotations__, *vars(CausalModel)}:
            if not name.startswith("_"):
                setattr(self, name, getattr(model, name))

    def __call__(self, *args, **settings):
        return self._model(*args, **settings)


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_sessions_generation_and_memory_files_need_nothing_else(tmp_path, kind):
    plain = models()[kind]
    wrapped = Wrapped(plain)
    text = "A text that is longer than the window of its model. " * 3
    states = []
    for model in (plain, wrapped):
        session = remanence.Session(model)
        session.read(text)
        session.save(tmp_path / "text.mem")
        said = Generation(
            model, ["And"], remanence.Sampling(max_tokens=3, temperature=0), state=session.state
        ).run()
        again = remanence.Session(model).load(tmp_path / "text.mem")
        states.append(
            (said.texts, memfile.fingerprint(model), read(model, torch.tensor([[5]]), again.state).last)
        )
    assert states[0][:2] == states[1][:2] and torch.equal(states[0][2], states[1][2])


def test_a_session_refuses_what_is_no_model_of_ours():
    for wrong in (base(), torch.nn.Linear(2, 2), 3):
        with pytest.raises(
            ValueError, match=f"^model: expected a folder, a Model, .*got {type(wrong).__name__}$"
        ):
            remanence.Session(wrong)
