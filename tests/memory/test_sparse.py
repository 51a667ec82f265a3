"""A memory of sparse features: what it computes, its laws, capacity, decoding, files, training."""

import pytest
import torch
import torch.nn.functional as F

from remanence import Model, NeuralMemory, Session, preset
from remanence.inference import memfile
from remanence.inference.decoder import unsupported
from remanence.layers import SparseFeatures
from remanence.ops import NETS, RULES, Gates, Sparse, memorize, query, start
from remanence.testing import (
    assert_causal,
    assert_close,
    assert_contracts,
    assert_gradients_reach,
    assert_packed,
    assert_padding_inert,
    assert_pure,
    assert_rows_isolated,
    assert_split,
)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Four features of 24 instead of 32 of 1,024."""
    for name, learned in (("sparse", True), ("sparse_random", False)):
        monkeypatch.setitem(NETS, name, Sparse(expansion=3.0, keep=4, learned=learned))


def layer(**fields):
    return NeuralMemory(**{"dim": 16, "heads": 2, "net": "sparse", "chunk": 4, **fields}).double()


def test_features_keep_the_largest_products():
    features = SparseFeatures(2, 8, 24, 4).double()
    x = F.normalize(torch.randn(3, 5, 2, 8, dtype=torch.float64), dim=-1)
    found = features(x)
    products = torch.einsum("bthi,hio->btho", x, features.expansion)
    for own, z in zip(found.flatten(0, 2), products.flatten(0, 2), strict=True):
        order = z.argsort(descending=True)[:4]
        wanted = (z[order] - z[order[-1]] / 2).relu()
        assert_close(own[order], wanted / wanted.norm(), 1e-10)
        assert own.count_nonzero() == 4
    few = F.normalize(torch.zeros(1, 1, 2, 8), dim=-1)
    assert SparseFeatures(2, 8, 24, 4)(few).norm(dim=-1).max() <= 1  # no key: no features


@pytest.mark.parametrize("rule", ["gated_delta", "wide_delta", "kda"])
def test_the_laws(rule):
    own, x = layer(rule=rule), torch.randn(3, 14, 16, dtype=torch.float64)
    assert_causal(own, x)
    assert_rows_isolated(own, x)
    assert_split(own, x, [1, 7, 0, 6])
    assert_packed(own, [x[0, :7], x[1, :0], x[2]])
    assert_padding_inert(own, x, torch.arange(14).expand(3, -1) >= torch.tensor([[0], [5], [2]]))
    assert_pure(own, x)
    draw = lambda count: torch.randn(1, count, 16, dtype=torch.float64)
    for text in (draw(48), draw(1).expand(1, 48, 16).contiguous()):
        assert_contracts(own, (draw(9), draw(9)), text)


def test_the_layer_is_the_reference_on_its_features():
    own, x = layer(), torch.randn(2, 11, 16, dtype=torch.float64)
    q, k, v, gates, _ = own.prepare(x, own.start(2, torch.float64).conv)
    state = own.start(2, torch.float64).memory
    y, after, _ = memorize(q, k, v, gates, state, net=own.net, rule=own.rule, chunk=4, backend="reference")
    assert_close(own(x)[0], own.output(q, y, own.g_proj(x)), 1e-10)
    assert_close(own(x)[1].memory.layers, after.layers, 1e-10)
    assert own(x)[1].memory.weights[0].shape == (2, 2, 24, 8)


def test_gradients_reach_a_learned_expansion_only():
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    assert_gradients_reach(layer(), x)
    fixed = layer(net="sparse_random")
    assert_gradients_reach(fixed, x)
    assert not fixed.features.expansion.requires_grad
    assert "features.expansion" in fixed.state_dict()


def test_sparse_features_hold_more_pairs_and_linear_ones_do_not():
    """200 pairs of width 32, written once and asked with noisy keys: at 1,024 features of which 32 are kept (32K
    numbers), and at a random linear map of the keys to 2,048 channels (64K numbers).
    """
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(200, 32), dim=-1)
    values = F.normalize(torch.randn(200, 32), dim=-1)
    asked = F.normalize(keys + 0.1 * torch.randn(200, 32), dim=-1)
    wide = torch.randn(32, 2048)
    maps = {
        "sparse": SparseFeatures(1, 32, 1024, 32, learned=False),
        "matrix": lambda x: F.normalize(x @ wide, dim=-1),
    }
    right = {}
    for name, phi in maps.items():
        k, q = (phi(x.view(1, 200, 1, 32)) for x in (keys, asked))
        state = start((torch.zeros(1, k.shape[-1], 32),), 1, rule=RULES["delta"], chunk=50, keys=k.shape[-1])
        options = {"net": NETS["linear"], "rule": RULES["delta"], "chunk": 50}
        _, state, _ = memorize(
            k, k, values.view(1, 200, 1, 32), Gates(torch.zeros(1, 200, 1)), state, **options
        )
        answers = query(q, state.weights, net=NETS["linear"])[0, :, 0]
        right[name] = float(((answers @ values.T).argmax(-1) == torch.arange(200)).float().mean())
    assert right["sparse"] > 0.75 and right["matrix"] < 0.2


@torch.no_grad()
@pytest.mark.parametrize("net", ["sparse", "sparse_random"])
def test_decoding_and_memory_files(net, tmp_path):
    torch.manual_seed(0)
    fields = {"dim": 16, "heads": 2, "num_layers": 2, "vocab_size": 257, "memory": {"net": net, "chunk": 4}}
    model = Model(preset("tiny", "lmm", **fields)).eval()
    assert unsupported(model) is None
    session = Session(model)
    ids, text = list(b"What"), session.generate("What", max_tokens=9, temperature=0.0)
    for _ in range(9):
        ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    assert session.tokenizer.decode(ids[4:]) == text
    memfile.save(tmp_path / "a.mem", model, session.state)
    assert_close(memfile.load(tmp_path / "a.mem", model), session.state, 0.0)
    model.save(tmp_path / "m")
    again = Model.load(tmp_path / "m")
    assert_close(again(torch.tensor([ids]))[0], model(torch.tensor([ids]))[0], 0.0)


@torch.no_grad()
@pytest.mark.parametrize("net", ["sparse", "sparse_random"])
def test_layers_of_mac_have_expansions_of_their_own(net):
    """The wavefront schedule, which calls the first layer's modules for all layers, must not be used."""
    fields = {"dim": 16, "heads": 2, "num_layers": 2, "vocab_size": 257, "memory": {"net": net, "chunk": 4}}
    model = Model(preset("tiny", "mac", segment=8, window=8, **fields)).double().eval()
    x = torch.randint(257, (1, 33))
    state, pieces = None, []
    for token in x.split(1, 1):
        logits, state = model(token, state)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), model(x)[0], 1e-10)


def test_the_defaults(monkeypatch):
    monkeypatch.setitem(NETS, "sparse", Sparse())
    config = NeuralMemory(dim=256, net="sparse").config
    assert (config.rule, config.chunk, config.forget_bias, config.shape) == (
        "gated_delta",
        64,
        -6.0,
        (2, 128),
    )
    assert NeuralMemory(dim=256, net="sparse", expansion=2.0).key_dim == 256
    with pytest.raises(ValueError, match="depth: expected None, as the net 'sparse' has no depth, got 2"):
        NeuralMemory(dim=16, net="sparse", depth=2)
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        Sparse(keep=0)
