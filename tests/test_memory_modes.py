"""The memory mode belongs to a session and to a call: sessions over one model do not interfere, in any thread."""

import random
import sys
import threading
import warnings

import pytest
import torch

from remanence import Model, Session, preset
from remanence.config import MODES
from remanence.inference.decoder import Decoder


def native():
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "window": 8, "segment": 8, "vocab_size": 257, "ffn": 16}
    memory = {"heads": 2, "chunk": 4}
    return Model(preset("tiny", ("mag", "mac", "lmm"), num_layers=3, memory=memory, **sizes)).eval()


def segmented():
    """Read in a wavefront, which computes several layers as one with stacked parameters."""
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "segment": 8, "vocab_size": 257, "ffn": 16}
    return Model(preset("tiny", ("mac",), num_layers=3, memory={"heads": 2, "chunk": 4}, **sizes)).eval()


def attached():
    transformers = pytest.importorskip("transformers")
    from remanence import attach
    from remanence.tokenizers.tokens import ByteTokenizer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = attach(transformers.LlamaForCausalLM(config).eval(), every=1, heads=2, head_dim=8, chunk=4).model
    for parameter in model.saved_parameters():
        torch.nn.init.normal_(parameter[1], std=0.3)
    assert ByteTokenizer().vocabulary <= 257
    return model


def course(model, mode, tokenizer, pause=lambda: None):
    """What a session of this mode gives: surprise, an answer and the numbers of its state, step after step."""
    session, found = Session(model, tokenizer, memory_mode=mode), []
    for number in range(4):
        pause()
        found.append(session.read(f"{number}: the otter swims past the mill {mode}. ").surprise)
        pause()
        answer = session.stream("And then", max_tokens=6, temperature=0.8, seed=number)
        for text in answer:
            pause()
            found.append(text)
    return found, [tensor.clone() for tensor in session.state.tensors()]


@pytest.fixture
def often():
    """Threads take turns after microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [native, segmented, attached])
def test_threads_with_sessions_of_other_modes_over_one_model_do_not_interfere(make, often):
    from remanence.tokenizers.tokens import ByteTokenizer

    model, tokenizer = make(), ByteTokenizer()
    alone = {mode: course(model, mode, tokenizer) for mode in MODES}
    assert len({str(found) for found, _ in alone.values()}) == len(MODES)  # the modes differ
    turns, jobs = random.Random(0), [mode for mode in MODES for _ in range(2)]
    turns.shuffle(jobs)
    results, barrier = [None] * len(jobs), threading.Barrier(len(jobs))

    def run(index, mode, chance):
        barrier.wait()
        pause = lambda: threading.Event().wait(chance.random() * 2e-3)
        results[index] = course(model, mode, tokenizer, pause)

    threads = [
        threading.Thread(target=run, args=(index, mode, random.Random(index)))
        for index, mode in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mode, result in zip(jobs, results, strict=True):
        assert result is not None, mode
        assert result[0] == alone[mode][0], mode
        assert all(torch.equal(a, b) for a, b in zip(result[1], alone[mode][1], strict=True)), mode


@pytest.mark.parametrize("make", [native, attached])
def test_a_session_keeps_the_mode_it_began_with(make):
    from remanence.tokenizers.tokens import ByteTokenizer

    model, tokenizer = make(), ByteTokenizer()
    expected = course(model, "on", tokenizer)
    session = Session(model, tokenizer)
    model.memory_mode = "off"
    assert session.memory_mode == "on" and session.fork().memory_mode == "on"
    assert Session(model, tokenizer).memory_mode == "off"
    found, state = course(model, "on", tokenizer, lambda: setattr(model, "memory_mode", "frozen"))
    assert found == expected[0] and all(map(torch.equal, state, expected[1]))


def test_without_writing_a_memory_that_is_off_stays_off():
    model, answers = native(), []
    for write in ("all", "none"):
        session = Session(model, write=write, memory_mode="off")
        session.read("the otter")
        answers.append(session.generate("swims", max_tokens=8, temperature=0))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("make", [native, attached])
def test_the_earlier_name_of_the_argument_works_with_one_warning(make):
    model, tokens = make(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    calls = [lambda **mode: model(tokens, **mode)[0], lambda **mode: model.trace(tokens, **mode).hidden]
    if make is native:
        features, state = model.embed(tokens), model.start(1)
        calls += [
            lambda **mode: model.backbone(features, **mode)[0],
            lambda **mode: model.backbone.trace(features, **mode).hidden,
            lambda **mode: Decoder(model, state, **mode).step(tokens[:, 0]),
        ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            old = call(memory="off")
        told = [each for each in caught if issubclass(each.category, DeprecationWarning)]
        assert len(told) == 1 and "memory_mode" in str(told[0].message) and told[0].filename == __file__
        assert torch.equal(old, call(memory_mode="off"))
    with pytest.warns(DeprecationWarning, match="memory is deprecated: use .memory_mode"):
        model.memory = "frozen"
    with pytest.warns(DeprecationWarning, match="memory is deprecated: use .memory_mode"):
        assert model.memory == "frozen" == model.memory_mode
