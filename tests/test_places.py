"""To the last bit, wherever it lay: what is read from a file is put where torch puts its own, as some processors'
matrix products round differently elsewhere.

That bits are equal shows on these processors only; that nothing is left at odd places shows on all of them.
"""

import os
import shutil

import pytest
import torch
from models import VARIANTS, model, tokens
from places import misaligned, misplace, unaligned
from runs import config, losses, weights

from remanence import Model, Session
from remanence.inference import memfile
from remanence.io.tensors import aligned, read_tensors, write_tensors
from remanence.testing import assert_close
from remanence.train import DataConfig, fit
from remanence.train.checkpoint import checkpoints

pytestmark = [
    pytest.mark.sample(1),
    pytest.mark.skipif(os.environ.get("REMANENCE_TEST_DEVICE", "cpu") != "cpu", reason="of a CPU's memory"),
]
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PLACES = (8, 24, 40)
"""Where safetensors put them, if anything stands before them whose size is no multiple of 64."""
ODD = {"dim": 12, "memory": {"heads": 3}}
"""Of a model in which nothing has a size that is a multiple of 64 bytes: a view of anything begins at an odd place."""


def test_aligned_is_the_same_elsewhere():
    whole = torch.randn(5, 7)
    assert aligned(whole) is whole, "what lies well is not copied"
    for by in (4, 8, 16, 24, 60):
        moved = unaligned(whole, by)
        assert misaligned([moved]) == [by]
        assert torch.equal(aligned(moved), whole) and not misaligned([aligned(moved)])
    for odd in (
        whole[1:],
        whole.T[2:],
        torch.zeros(0, 3),
        torch.randn(3, dtype=torch.bfloat16)[1:],
        torch.arange(9)[1:],
    ):
        assert torch.equal(aligned(odd), odd) and not misaligned([aligned(odd)])
    assert aligned(torch.empty(3, device="meta")).is_meta


@pytest.mark.parametrize("by", PLACES)
def test_files_are_read_to_aligned_memory(tmp_path, by):
    path = tmp_path / "a.safetensors"
    given = {
        "a": torch.randn(3, 5),
        "b": torch.arange(3),
        "c": torch.randn(64),
        "d": torch.randn(1).bfloat16(),
    }
    write_tensors(path, given, {"some": "words"})
    misplace(path, by)
    found = read_tensors(path)
    assert found.metadata == {"some": "words"}
    assert not misaligned(found.tensors.values())
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in given.items())
    left = read_tensors(path, mapped=100).tensors
    assert misaligned([left["c"]]) and not misaligned([left["a"], left["b"], left["d"]]), (
        "what is large stays in the file"
    )


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_where_weights_lie_is_rounding_at_most(variant):
    """What is promised of weights that a caller has put somewhere else; to the last bit it is not."""
    subject, x = model(variant, torch.float32).eval(), tokens()
    whole, state = subject(x)
    one, _ = subject(x[:, :1], state)
    for by in PLACES:
        for parameter in subject.parameters():
            parameter.data = unaligned(parameter.data, by)
        assert_close(subject(x)[0], whole, 1e-5)
        assert_close(subject(x[:, :1], state.map(lambda tensor, by=by: unaligned(tensor, by)))[0], one, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("by", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_comes_back_to_the_last_bit(variant, by, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        subject, x = model(variant, dtype), tokens()
        subject.save(tmp_path)
        misplace(tmp_path / "model.safetensors", by)
        other = Model.load(tmp_path)
        assert not misaligned(other.parameters())
        whole, state = subject(x)
        assert torch.equal(other(x)[0], whole)
        assert torch.equal(other(x[:, :1], state)[0], subject(x[:, :1], state)[0])
    assert not misaligned(Model.load(tmp_path, dtype=torch.float32).parameters())


@torch.no_grad()
@pytest.mark.parametrize("by", PLACES)
def test_so_does_one_of_transformers(by, tmp_path):
    transformers = pytest.importorskip("transformers")
    import remanence.hf  # noqa: F401  # for its registration

    for variant in ("mac", "one store, rare tokens"):
        subject, x = model(variant, torch.float32, tie=False), tokens()
        subject.save(tmp_path)
        misplace(tmp_path / "model.safetensors", by)
        outer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert not misaligned(outer.parameters())
        assert torch.equal(outer(x).logits, subject(x)[0])
        trained = {name for name, parameter in outer.model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name, parameter in subject.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_memory_goes_on_to_the_last_bit(variant, tmp_path):
    subject = model(variant, torch.float32, vocab_size=257, **ODD).eval()
    for by, count in zip(PLACES, (103, 104, 107), strict=True):  # in, at and before a segment's end
        session = Session(subject)
        session.read(TEXT[:count])
        session.save(tmp_path / "a.mem")
        misplace(tmp_path / "a.mem", by)
        other = Session(subject).load(tmp_path / "a.mem", verify=True)
        assert not misaligned(other.state.tensors())
        assert_close(other.state, session.state, 0.0)
        mode = "frozen" if subject.has_memory else None
        asked = [
            subject(torch.tensor([[65, 66]]), each.state, memory_mode=mode)[0] for each in (session, other)
        ]
        assert torch.equal(*asked)
        for each in (session, other):
            each.read("And so on, for a while.")
        assert_close(other.state, session.state, 0.0)
        drawn = [each.generate("Then", max_tokens=9, temperature=1.0, seed=3) for each in (session, other)]
        assert drawn[0] == drawn[1]
        assert_close(other.state, session.state, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_calls_return_lies_as_if_it_had_been_loaded(variant):
    """Otherwise a memory that was saved could not go on to the same bits as one that was not."""
    subject = model(variant, torch.float32, **ODD).eval()
    for rows in (1, 3):
        state = subject.start(rows)
        for count in (1, 1, 1, 4, 5, 8, 3, 13, 29):
            _, state = subject(tokens(rows, count), state)
            assert not misaligned(state.tensors())
            assert not misaligned(state.rows([rows - 1]).tensors())
            # Nothing is multiplied by the importance of a token.
            assert all(
                tensor.is_contiguous()
                for name, tensor in memfile.named_tensors(state)
                if not name.endswith("worth")
            )
        mask = torch.arange(9) >= torch.arange(rows).unsqueeze(-1)
        assert not misaligned(subject(tokens(rows, 9), state, mask=mask)[1].tensors())


def test_what_stays_in_the_file_goes_on_up_to_rounding(tmp_path, monkeypatch):
    """A store too large to be read lies where its file has it: that is the one exception."""
    monkeypatch.setattr(memfile, "LARGE", 200)
    monkeypatch.setattr(memfile, "LARGE_STORE", 200)
    subject, x = model("knn", torch.float32), tokens(1, 13)
    _, state = subject(tokens(1, 29))
    for by in PLACES:
        memfile.save(tmp_path / "a.mem", subject, state)
        misplace(tmp_path / "a.mem", by)
        loaded = memfile.load(tmp_path / "a.mem", subject, verify=True)
        assert misaligned(loaded.tensors()), "it was not copied"
        assert not misaligned([tensor for tensor in loaded.tensors() if tensor.nbytes <= 200])
        assert_close(subject(x, loaded)[0], subject(x, state)[0], 1e-5)


@pytest.mark.parametrize(("variant", "carry"), [("mac", True), ("mag", False)])
def test_a_run_goes_on_to_the_last_bit(variant, carry, tmp_path, corpus):
    data = (
        DataConfig(kind="documents", path=corpus, length=24)
        if carry
        else DataConfig(kind="recall", length=24, pairs=4)
    )
    whole, part = tmp_path / "whole", tmp_path / "part"
    fit(config(variant, data=data, carry=carry, steps=6, keep=9), whole)
    for by in PLACES:
        shutil.copytree(whole, part)
        shutil.rmtree(part / "model")
        shutil.rmtree(part / "checkpoints" / "00000006")
        (stopped,) = checkpoints(part / "checkpoints")
        files = list(stopped.glob("*.safetensors"))
        assert len(files) == 3 + carry
        for path in files:
            misplace(path, by)
        trained = fit(None, part, resume=True)
        assert not misaligned(trained.parameters())
        assert losses(part) == losses(whole)
        assert_close(weights(part), weights(whole), 0.0)
        shutil.rmtree(part)


@pytest.fixture
def corpus(tmp_path):
    from remanence.data import prepare

    for number in range(6):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[number:] * (1 + number % 3))
    prepare([tmp_path / "texts"], tmp_path / "tokens")
    return str(tmp_path / "tokens")
