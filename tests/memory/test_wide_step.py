"""Steps of up to 2: reflections, which track parity; in the layer, in decoding, and with every other law."""

import math

import pytest
import torch

from remanence import Model, NeuralMemory, Session, preset
from remanence.inference.decoder import unsupported
from remanence.ops import NETS, RULES, Gates, LinearRule, memorize, start
from remanence.testing import assert_causal, assert_close, assert_contracts, assert_split


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_reflections_track_parity(backend):
    """A value is written once; then a bit of 1 is a step of 2 at its key with the value 0, a bit of 0 no step."""
    count = 33 if backend == "reference" else 5000
    bits = torch.randint(2, (count,)).double()
    bits[0] = 1
    k = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, count, 1, 2)
    v = torch.zeros_like(k).index_fill(1, torch.tensor([0]), 3.0)
    step = (2 * bits).index_fill(0, torch.tensor([0]), 1.0).log().view(1, count, 1)
    options = {"net": NETS["linear"], "rule": RULES["wide_delta"], "chunk": 16}
    state = start((torch.zeros(1, 2, 2).double(),), 1, rule=RULES["wide_delta"], chunk=16)
    y, _, _ = memorize(k, k, v, Gates(step, None, torch.zeros_like(step)), state, backend=backend, **options)
    assert_close(y[0, :, 0, 0], 3 * (-1) ** (bits.cumsum(0) - 1), 1e-12)


def test_the_layer_and_its_laws():
    layer = NeuralMemory(dim=12, heads=3, rule="wide_delta", chunk=4).double()
    plain = NeuralMemory(dim=12, heads=3, rule="gated_delta", chunk=4).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    assert_close(layer.log_gates(x).log_step, plain.log_gates(x).log_step + math.log(2), 1e-12)
    assert_causal(layer, x)
    assert_split(layer, x, [3, 7, 1])
    with torch.no_grad():
        layer.gates.bias[:3] = 9.0  # steps of almost 2, and no forgetting
        layer.gates.bias[3:] = -20.0
    draw = lambda count: torch.randn(1, count, 12, dtype=torch.float64)
    for text in (draw(64), draw(1).expand(1, 64, 12).contiguous()):
        assert_contracts(layer, (draw(9), draw(9)), text)
    assert layer(5 * draw(3000))[1].memory.weights[0].abs().max() < 1e4


def test_steps_that_are_skipped_stay_skipped():
    layer = NeuralMemory(
        dim=8, heads=1, rule="wide_delta", threshold=0.6
    )  # steps start at 0.5 of the largest
    assert not layer.log_gates(torch.zeros(1, 1, 8)).log_step.exp().any()


@torch.no_grad()
def test_decoding_in_place_is_the_forward_pass():
    torch.manual_seed(0)
    memory = {"rule": "wide_delta", "chunk": 4}
    model = Model(preset("tiny", "lmm", memory=memory, dim=16, heads=2, num_layers=1, vocab_size=257))
    model = model.double().eval()
    assert unsupported(model) is None
    session, ids = Session(model), list(b"What")
    text = session.generate("What", max_tokens=9, temperature=0.0)
    for _ in range(9):
        ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    assert session.tokenizer.decode(ids[4:]) == text


def test_a_step_above_2_is_refused():
    with pytest.raises(ValueError, match=r"max_step: expected a number above 0 and at most 2, got 2\.5"):
        LinearRule(max_step=2.5)
