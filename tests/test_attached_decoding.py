"""Speed paths of pretrained models with memories: they compute what the plain path computes."""

import numpy as np
import pytest
import torch
from test_families import NARROWED, base
from test_sentences import chat, sentence_model
from torch.utils._python_dispatch import TorchDispatchMode

import remanence
from remanence.attached.sentences.segments import ANSWER
from remanence.attached.window import WindowSpec, WindowState, attend
from remanence.inference.attached_decoder import AttachedDecoder
from remanence.inference.decoder import unsupported
from remanence.inference.sentence_decoder import SentenceDecoder
from remanence.layers.attention import AttentionState
from remanence.runtime.device import inference_dtype
from remanence.testing import assert_close

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("positions", [None, (0, 5), (100, 24), (100, 100)])
@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention_over_a_window_is_the_same_without_gradients(dtype, tokens, positions, rotates):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(2, *shape, 8).to(dtype)
    spec, state = WindowSpec(24, 2, 3), None
    if positions is not None:
        place = torch.tensor(positions)
        window = AttentionState(draw(spec.history, 2), draw(spec.history, 2), place, place.clamp(max=3))
        state = WindowState(draw(2, 2), draw(2, 2), window)
    rotation = (torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)) if rotates else None
    given = draw(tokens, 6), draw(tokens, 2), draw(tokens, 2), state, spec, 0.35, rotation, None
    plain = attend(*given)
    with torch.no_grad():
        fast = attend(*given)
    error = (fast.y.double() - plain.y.double()).abs().max()
    assert error <= TOLERANCES[dtype] * plain.y.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(fast.state.tensors(), plain.state.tensors(), strict=True))


def test_the_dtype_of_a_cpu_depends_on_its_instructions(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert inference_dtype("cpu") == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert inference_dtype("cpu") == torch.bfloat16


def attached(family="llama", dtype=torch.float64, **settings):
    """A tiny pretrained model with memories that are not zero."""
    torch.manual_seed(0)
    model = remanence.attach(base(family).to(dtype), window=24, **settings).model.eval()
    with torch.no_grad():
        for parameter in model.memories.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def read_rows(model, counts, seed=3):
    """The state of rows that have read different numbers of tokens."""
    longest = max(counts)
    ids = torch.tensor(np.random.default_rng(seed).integers(0, model.vocab_size, (len(counts), longest)))
    mask = torch.arange(longest) < torch.tensor(counts).unsqueeze(-1)
    return model(ids, mask=mask)[1]


CASES = {
    "nothing read": ("llama", {"layers": [1]}, (0, 0)),
    "less than a window": ("llama", {"layers": [1]}, (3, 20)),
    "more than a window": ("llama", {"layers": [1]}, (30, 70)),
    "memory in front": ("llama", {"layers": [0], "place": "front"}, (5, 40)),
    "no first tokens": ("llama", {"layers": [1], "sinks": 0}, (5, 40)),
    **{f"{case}, a family": (case, {"layers": [1]}, (5, 40)) for case in NARROWED},
}


@pytest.mark.parametrize("mode", ["on", "frozen", "off"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoding_in_place_is_calling_the_model(case, mode):
    family, settings, counts = CASES[case]
    model = attached(family, **settings)
    state = read_rows(model, counts) if any(counts) else model.start(2)
    given, before = state, state.clone()
    assert unsupported(model, mode) is None
    decoder = AttachedDecoder(model, state, mode)
    rng = np.random.default_rng(0)
    for _ in range(40):
        ids = torch.tensor(rng.integers(0, model.vocab_size, 2))
        active = torch.tensor(rng.random(2) < 0.8)
        active[int(rng.integers(2))] = True
        expected, state = model(ids.unsqueeze(1), state, mask=active.unsqueeze(1), memory_mode=mode)
        logits = decoder.step(ids, active)
        assert_close(expected[active, 0], logits[active], 1e-9, "logits")
    assert_close(state, decoder.state, 1e-9, "state")
    assert_close(before, given, 0.0, "the state that was given")
    assert not decoder.diverged.any()
    more = torch.tensor(rng.integers(0, model.vocab_size, (2, 30)))
    assert_close(model(more, state)[0], model(more, decoder.state)[0], 1e-9, "text after it")


@torch.no_grad()
def test_hooks_and_replaced_methods_of_the_pretrained_model_run_while_it_is_decoded():
    model = attached(layers=[1])
    state = read_rows(model, (30,))
    decoder, ids = AttachedDecoder(model, state), torch.tensor([5])
    module = model.base.model.layers[0].mlp
    hook = module.register_forward_hook(lambda _, given, output: output + 1)
    expected, state = model(ids.unsqueeze(1), state)
    assert_close(expected[:, 0], decoder.step(ids), 1e-9, "hooked")
    hook.remove()
    module.forward = lambda x: x * 2
    expected, state = model(ids.unsqueeze(1), state)
    assert_close(expected[:, 0], decoder.step(ids), 1e-9, "replaced")
    del module.forward
    own = model.memories["1"].register_forward_hook(lambda _, given, output: (output[0] * 2, *output[1:]))
    assert "hooks" in unsupported(model)
    expected, state = model(ids.unsqueeze(1), state)
    assert_close(expected[:, 0], decoder.step(ids), 1e-9, "hooked memory")
    own.remove()


def test_what_cannot_be_decoded_in_place_says_why():
    assert "grows" in unsupported(remanence.attach(base("llama")).model)
    assert "kNN" in unsupported(remanence.attach(base("llama"), window=24, kind="knn").model)
    assert "answers" in unsupported(sentence_model(), "off")


def opened(seed=0, turns=2):
    """Tokens up to the start of an answer."""
    return torch.cat([chat(seed, turns), torch.tensor([[3, 4, 50, 51, 52, 10, 6, 7, 3, 5]])], 1)


@pytest.mark.parametrize("mode", ["on", "frozen"])
@torch.no_grad()
def test_decoding_an_answer_is_calling_the_model(mode):
    """Through the end of an answer, plain text, the next answer, and the largest length of an answer."""
    model = sentence_model()
    state = model(opened(), memory_mode=mode)[1]
    decoder = SentenceDecoder(model, state, mode)
    assert decoder.inner is not None
    rng, in_place = np.random.default_rng(0), 0
    end = [6, 7, 3, 4, 20, 21, 10, 6, 7, 3, 5]
    text = [*rng.integers(13, 130, 9).tolist(), *end, *rng.integers(13, 130, 30).tolist(), *end]
    for token in text:
        ids = torch.tensor([token])
        expected, state = model(ids.unsqueeze(1), state, memory_mode=mode)
        assert_close(expected[:, 0], decoder.step(ids), 1e-9, "logits")
        in_place += decoder.inner is not None and any(decoder.tokens)
        assert_close(state, decoder.state, 1e-9, "state")
    assert in_place > 20
    assert model.stored(state) == model.stored(decoder.state)


@torch.no_grad()
def test_an_answer_after_a_sentence_was_removed_is_decoded_in_place():
    model = sentence_model()
    first = model(opened()[:, :-4])[1]
    state = model(opened()[:, -4:], model.without(first, [0]))[1]
    decoder = SentenceDecoder(model, state)
    for token in (20, 30, 40, 21):
        expected, state = model(torch.tensor([[token]]), state)
        assert_close(expected[:, 0], decoder.step(torch.tensor([token])), 1e-9, "logits")
    assert decoder.inner is not None
    assert_close(state, decoder.state, 1e-9, "state")


@torch.no_grad()
def test_rows_of_answers_are_decoded_together():
    model = sentence_model()
    first, second = opened(0)[0], opened(1, 1)[0]
    mask = torch.zeros(2, max(len(first), len(second)), dtype=torch.bool)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    for row, each in enumerate((first, second)):
        ids[row, : len(each)], mask[row, : len(each)] = each, True
    state = model(ids, mask=mask)[1]
    decoder, rng = SentenceDecoder(model, state), np.random.default_rng(0)
    for step in range(12):
        new, active = torch.tensor(rng.integers(13, 130, 2)), torch.tensor([step % 3 > 0, True])
        expected, state = model(new.unsqueeze(1), state, mask=active.unsqueeze(1))
        assert_close(expected[active, 0], decoder.step(new, active)[active], 1e-9, "logits")
    assert decoder.inner is not None
    assert_close(state, decoder.state, 1e-9, "state")
    assert [row[0] for row in state.blocks[-1].scan.tolist()] == [ANSWER, ANSWER]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_follows_its_parameters_and_is_off_outside_of_answers(dtype):
    """Its converted weights are kept between calls without gradients."""
    model = sentence_model(torch.float32)
    model.base.to(dtype)
    x = torch.randint(13, 130, (1, 9))
    with torch.no_grad():
        plain = model.attached(x)[0]
        with model.adapter.active():
            first = model.attached(x)[0]
            for parameter in model.adapter.up.values():
                parameter.mul_(2)
            second = model.attached(x)[0]
    with model.adapter.active():
        with_gradients = model.attached(x)[0]
    assert not torch.equal(plain, first) and not torch.equal(first, second)
    assert_close(with_gradients.float(), second.float(), 1e-5 if dtype == torch.float32 else 0.1, "logits")
    with torch.no_grad():
        assert torch.equal(model.attached(x)[0], plain)


class NoHostValues(TorchDispatchMode):
    """Raises an error if a value is read on the host, or copied from it, which a CUDA graph cannot do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = {
            "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero",
            "aten::lift_fresh",
        }  # fmt: skip
        assert function.name() not in names, function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["an answer", *NARROWED])
@torch.no_grad()
def test_a_step_reads_no_value_on_the_host_and_keeps_its_buffers(case):
    """What a captured step needs, checked where there is no GPU."""
    if case == "an answer":
        model = sentence_model(torch.float32)
        decoder = SentenceDecoder(model, model(opened())[1]).inner
    else:
        model = attached(case, torch.float32, layers=[1])
        decoder = AttachedDecoder(model, read_rows(model, (5, 40)))
    slots = [layer.window for layer in decoder.decoders]
    fixed = [x for each in slots for x in (each.k, each.v)] + [
        decoder.position,
        decoder.tokens,
        decoder.active,
    ]
    before = [x.data_ptr() for x in fixed]
    decoder.step(torch.full_like(decoder.tokens, 20))
    with NoHostValues():
        decoder._forward()
    assert before == [x.data_ptr() for x in fixed]
    assert not decoder._altered()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@torch.no_grad()
def test_a_captured_step_is_its_steps(dtype, tolerance):
    model = sentence_model(dtype).cuda()
    state = model(opened().cuda())[1]
    graph, plain = SentenceDecoder(model, state), SentenceDecoder(model, state, graph=False)
    assert graph.inner is not None and graph.inner.captures
    for step in range(15):
        ids = torch.tensor([13 + 7 * step], device="cuda")
        logits = graph.step(ids)
        assert_close(plain.step(ids), logits, tolerance, f"step {step}")
        expected, state = model(ids.unsqueeze(1), state)
        assert_close(expected[:, 0], logits, 10 * tolerance, f"step {step} of the model")
    assert_close(plain.state, graph.state, tolerance, "state")
