"""Sessions as rows of one batch: each is left with what it would have alone."""

import pytest
import torch

from remanence import Model, Session, preset
from remanence.testing import assert_close

TEXTS = ["The otter swims.", "A mill by the river, and a door that is green.", "x"]


def model(pattern):
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "window": 8, "segment": 8, "vocab_size": 257, "ffn": 16}
    return Model(preset("tiny", pattern, memory={"heads": 2, "chunk": 4}, **sizes)).double().eval()


def close(one, other):
    for a, b in zip(one.state.blocks, other.state.blocks, strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            if x.dim() > 1 and x.shape != y.shape:  # full attention: shorter rows have zeros in front
                x, y = (z[:, z.shape[1] - min(x.shape[1], y.shape[1]) :] for z in (x, y))
            assert_close(x, y, 1e-10)
    assert one.tokens == other.tokens


@pytest.mark.parametrize("pattern", [("mag",), ("mac",), ("lmm", "attention"), ("knn",)])
@pytest.mark.parametrize("mode", ["on", "frozen"])
def test_each_session_is_as_if_alone(pattern, mode, tmp_path):
    shared = model(pattern)
    alone = [Session(shared, memory_mode=mode) for _ in TEXTS]
    together = [Session(shared, memory_mode=mode) for _ in TEXTS]
    for number, session in enumerate((*alone, *together)):
        session.read("before " * (number % len(TEXTS)) + ".")  # rows that stand at different positions
    for session, text in zip(alone, TEXTS, strict=True):
        session.read(text)
    Session.batch(together).read(TEXTS)
    for one, other in zip(together, alone, strict=True):
        close(one, other)
    sampling = {"max_tokens": 5, "temperature": 0.0}
    expected = [session.generate(text, **sampling) for session, text in zip(alone, TEXTS, strict=True)]
    assert Session.batch(together[:2]).generate(TEXTS[:2], **sampling) == expected[:2]  # some of them
    assert together[2].generate(TEXTS[2], **sampling) == expected[2]  # or one
    Session.batch(together[::-1]).read(TEXTS)  # in another order, joined again
    for session, text in zip(alone[::-1], TEXTS, strict=True):
        session.read(text)
    for one, other in zip(together, alone, strict=True):
        close(one, other)
    together[1].save(tmp_path / "one.mem")
    loaded = Session(shared, memory_mode=mode).load(tmp_path / "one.mem")
    assert loaded.tokens == alone[1].tokens
    assert loaded.generate("So", **sampling) == alone[1].generate("So", **sampling)


def test_what_cannot_be_a_batch_is_refused():
    shared = model(("lmm",))
    session = Session(shared)
    for wrong, why in (
        ([], "expected at least one Session"),
        ([session, session], "got one twice"),
        ([session, Session(model(("lmm",)))], "the same model and tokenizer"),
        ([session, Session(shared, session.tokenizer, memory_mode="off")], "the same write and memory_mode"),
    ):
        with pytest.raises(ValueError, match=why):
            Session.batch(wrong)
    with pytest.raises(ValueError, match="texts: expected one for each of 1 sessions, got a single text"):
        Session.batch([session]).read("abc")
    with pytest.raises(ValueError, match="prompts: expected one for each of 1 sessions, got 2"):
        Session.batch([session]).generate(["a", "b"])
