"""The layer: the operator's laws again, now through projections, convolutions and gates; dtypes; other people's
frameworks.
"""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remanence import NETS, Gates, MemoryConfig, NeuralMemory, NeuralMemoryState
from remanence.memory.observation import observing_memories
from remanence.testing import (
    assert_causal,
    assert_close,
    assert_gradients_reach,
    assert_packed,
    assert_padding_inert,
    assert_pure,
    assert_rows_isolated,
    assert_split,
)

pytestmark = pytest.mark.sample(4)

KINDS = {
    "default": {},
    "titans": {"net": "titans"},
    "no momentum": {"net": "titans", "rule": "no_momentum", "depth": 3, "bias": True},
    "deep with momentum": {"rule": "titans", "depth": 3},
    "gated delta": {"net": "linear", "rule": "gated_delta"},
    "linear": {"net": "linear"},
    "threshold": {"threshold": 0.5},
    "titans with a threshold": {"net": "titans", "threshold": 0.05},
    "no conv": {"net": "titans", "conv": 0, "rule": "no_forget"},
    "large chunk": {"net": "swiglu", "rule": "large_chunk"},
    "large chunk of a deep memory": {"rule": "large_chunk"},
    "swiglu": {"net": "swiglu"},
}


def layer(kind="default", dtype=torch.float64, **fields):
    torch.manual_seed(1)
    memory = NeuralMemory(**{"dim": 12, "heads": 2, "chunk": 4, "expansion": 2.0, **KINDS[kind], **fields})
    if memory.features is not None:  # as if trained: they start as nothing
        for _, down in memory.features.layers:
            torch.nn.init.normal_(down)
    return memory.to(dtype)


def tokens(batch=2, count=21, dtype=torch.float64):
    return torch.randn(batch, count, 12, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
class TestLaws:
    def test_causal(self, kind):
        assert_causal(layer(kind), tokens())
        assert_causal(layer(kind, torch.float32).eval(), tokens(dtype=torch.float32))

    def test_split(self, kind):
        for sizes in ([1] * 21, [5, 16], [2, 1, 0, 18]):
            assert_split(layer(kind), tokens(), sizes, 1e-10)

    def test_rows_isolated(self, kind):
        assert_rows_isolated(layer(kind), tokens(3))

    def test_packed(self, kind):
        assert_packed(layer(kind), [tokens(1, n)[0] for n in (6, 1, 0, 13, 2)], 1e-10)

    def test_padding(self, kind):
        mask = torch.ones(3, 21, dtype=torch.bool)
        mask[0, :7] = False  # left
        mask[1, 15:] = False  # right
        mask[2, [3, 4, 11]] = False  # in between
        assert_padding_inert(layer(kind), tokens(3), mask, 1e-10)

    def test_pure(self, kind):
        assert_pure(layer(kind), tokens())

    def test_gradients_reach(self, kind):
        assert_gradients_reach(layer(kind), tokens())

    def test_read_asks_and_changes_nothing(self, kind, monkeypatch):
        """Reading = forward with gates that write nothing (no step, no past, all kept); the state stays what it was."""
        memory = layer(kind)
        x = tokens()
        _, state = memory(x[:, :10])
        before = state.clone()
        y = memory.read(x[:, 10:], state)
        assert_close(state, before, 0.0)
        mask = torch.ones(2, 11, dtype=torch.bool)
        assert_close(memory.read(x[:, 10:], state, mask=mask), y, 1e-12)
        none, all_ = (
            torch.full((2, 11, 2), -torch.inf, dtype=torch.float64),
            torch.zeros(2, 11, 2, dtype=torch.float64),
        )
        still = Gates(none, none if memory.rule.momentum else None, all_ if memory.rule.forget else None)
        monkeypatch.setattr(memory, "log_gates", lambda x: still)
        # A rule that reads at the chunk's start writes the two tokens of the open chunk at its end.
        count = 2 if memory.rule.read == "chunk" else 11
        assert_close(memory(x[:, 10:], state)[0][:, :count], y[:, :count], 1e-10)


def test_a_padded_batch_continues_at_each_rows_own_place():
    memory = layer()
    x = tokens(2, 20)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    _, state = memory(x[:, :9], mask=mask)
    assert state.memory.position.tolist() == [5, 9]
    y, _ = memory(x[:, 9:], state)
    for row in range(2):
        alone, _ = memory(torch.cat([x[row, :9][mask[row]], x[row, 9:]])[None])
        assert_close(y[row], alone[0, -11:], 1e-10)


def test_a_row_of_padding_only_is_left_alone():
    memory = layer()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1] = True
    y, state = memory(tokens(2, 5), mask=mask)
    assert state.memory.position.tolist() == [0, 5]
    assert not y[0].any()


def test_no_rows_leave_no_rows():
    memory, x = layer(), tokens(0, 5)
    _, state = memory(x)
    for mask in (None, x[..., 0] > 0):
        y, end = memory(x, state, mask=mask)
        assert list(y.shape) == [0, 5, 12]
        assert_close(end, memory.start(0, torch.float64), 0.0)


def test_built_from_fields_or_from_a_config():
    config = MemoryConfig(dim=12, heads=2)
    one, other = NeuralMemory(config, chunk=8), NeuralMemory(dim=12, heads=2, chunk=8)
    assert one.config == other.config
    assert NeuralMemory(dim=512, heads=8).head_dim == 64
    assert NeuralMemory(dim=256).heads == 2, "128 wide heads unless told otherwise"
    assert NeuralMemory(dim=256, net="titans").heads == 4, "or 64 for other nets"
    assert NeuralMemory(dim=200).head_dim == 100, "or as near to it as divides the width"
    for fields in ({"heads": 4}, {"dim": 24}, {"head_dim": 3}):
        given = {"dim": 12, "heads": 2, **fields}
        assert NeuralMemory(config, **fields).config.shape == MemoryConfig(**given).shape, (
            "beside a config, fields mean the same"
        )
    assert NeuralMemory(dim=12, heads=2, net="linear").rule.anchor == "token", "exact where exactness is free"


def test_a_users_own_net_by_name():
    class Square:
        def init(self, heads, width, generator=None):
            return (torch.randn(heads, width, width, generator=generator) / width**0.5,)

        def apply(self, weights, x):
            return x + torch.tanh(x @ weights[0])

    NETS["square"] = Square()
    try:
        memory = NeuralMemory(dim=12, heads=2, chunk=4, net="square").double()
        assert_split(memory, tokens(), [3, 18], 1e-10)
        assert_gradients_reach(memory, tokens())
        with pytest.raises(ValueError, match=r"depth: .*'square'"):
            NeuralMemory(dim=12, heads=2, net="square", depth=2)
    finally:
        del NETS["square"]


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_state_and_gates_stay_float32(how):
    memory = layer(dtype=torch.float32)
    x = tokens(dtype=torch.float32)
    if how == "bfloat16":
        memory, x = memory.bfloat16(), x.bfloat16()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=how == "autocast"):
        seen = memory.trace(x)
        again = memory.trace(x, seen.state)
    assert seen.y.dtype == torch.bfloat16
    for tensor in (
        *seen.gates.tensors(),
        seen.surprise,
        *[t for t in again.state.tensors() if t.is_floating_point()],
    ):
        assert tensor.dtype == torch.float32
    again.y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in memory.parameters())


def test_float32_state_is_not_rounded_by_a_bfloat16_model():
    """Carried in float32, the state of a bf16 model equals the whole's to float32, not to bf16."""
    memory = layer(dtype=torch.bfloat16)
    x = tokens(dtype=torch.bfloat16)
    _, whole = memory(x)
    _, half = memory(x[:, :9])
    _, split = memory(x[:, 9:], half)
    assert_close(split, whole, 1e-5)


@pytest.mark.parametrize("kind", ["random", "constant", "huge", "repeated"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_finite_in_bf16_over_16k_tokens(depth, kind):
    """Law 6 for the layer as it starts: random weights, default gates, bf16 parameters and inputs, forward and
    backward.
    """
    memory = NeuralMemory(dim=16, heads=2, depth=depth, chunk=64).bfloat16()
    x = torch.randn(1, 16_384, 16)
    x = {
        "random": x,
        "constant": torch.ones_like(x),
        "huge": 1e4 * x,
        "repeated": x[:, :8].repeat(1, 2048, 1),
    }[kind]
    x = x.bfloat16().requires_grad_()
    y, state = memory(x)
    (y.float() * torch.randn_like(y, dtype=torch.float32)).mean().backward()
    assert y.isfinite().all()
    assert not state.diverged.any()
    assert x.grad.isfinite().all()
    for name, parameter in memory.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_gates_start_where_the_config_says():
    gates = layer(dtype=torch.float32).trace(torch.zeros(1, 1, 12)).gates
    assert gates.log_momentum is None
    assert_close(gates.log_step.exp(), torch.full((1, 1, 2), 0.5), 1e-4)
    assert_close(1 - gates.log_keep.exp(), torch.full((1, 1, 2), 2.47e-3), 1e-3)
    memory = layer("titans", dtype=torch.float32)
    gates = memory.trace(torch.zeros(1, 1, 12)).gates
    assert_close(gates.log_step.exp(), torch.full((1, 1, 2), 1 / 21), 1e-4)
    assert_close(gates.log_momentum.exp(), torch.full((1, 1, 2), 0.5), 1e-4)
    assert_close(1 - gates.log_keep.exp(), torch.full((1, 1, 2), 4.54e-5), 1e-6)


def _resets(module):
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def test_initialisation_from_the_meta_device():
    with torch.device("meta"):
        empty = NeuralMemory(dim=48, heads=2)
    assert all(p.is_meta for p in empty.parameters())
    device = torch.zeros(()).device
    made = empty.to_empty(device=device)
    _resets(made)
    ordinary = NeuralMemory(dim=48, heads=2)
    assert torch.equal(made.gates.bias, ordinary.gates.bias)
    for name, parameter in made.named_parameters():
        other = ordinary.get_parameter(name)
        assert parameter.isfinite().all()
        assert abs(parameter.std() - other.std()) <= 0.3 * other.std() + 1e-6, name
    assert made(torch.randn(1, 5, 48))[0].isfinite().all()


@pytest.mark.parametrize("conv", [2, 4, 16])
def test_with_induction_keys_begin_as_the_query_of_the_token_before(conv):
    memory = NeuralMemory(dim=24, heads=2, conv=conv, induction=True)
    x = torch.randn(2, 40, 24)
    for again in (False, True):
        if again:
            _resets_parts_first(memory)
        q, k, *_ = memory.prepare(x, memory.start(2).conv)
        # But for a twentieth of their own, which a document's first token is left with.
        assert torch.cosine_similarity(k[:, 1:], q[:, :-1], dim=-1).mean() > 0.98
        assert torch.cosine_similarity(k[:, 1:], q[:, 1:], dim=-1).abs().mean() < 0.5


def test_with_induction_a_documents_first_token_has_a_gradient_of_the_others_size():
    """Its key was nothing, brought to unit length: the gradient there was as large as that nothing is small."""
    memory = NeuralMemory(dim=24, heads=2, induction=True)
    memory(torch.randn(2, 40, 24))[0].square().sum().backward()
    norms = {name: float(weight.grad.norm()) for name, weight in memory.named_parameters()}
    assert norms["k_conv.weight"] < 10 * max(norm for name, norm in norms.items() if name != "k_conv.weight")


def test_with_induction_an_untrained_memory_knows_what_followed():
    """Where a text comes again, the nearest of its values to an answer is that of the token that followed."""
    torch.manual_seed(0)
    x, shares, seen = torch.randn(1, 24, 64), {}, {}
    for induction in (True, False):
        gates = {"step_bias": 9.0, "forget_bias": -20.0}
        memory = NeuralMemory(dim=64, heads=1, induction=induction, **gates)
        with observing_memories(lambda _, values, answers: seen.update(values=values, answers=answers)):
            memory(torch.cat([x, x], 1))
        answers, values = seen["answers"][0, 27:47, 0], seen["values"][0, :24, 0]
        nearest = torch.cosine_similarity(answers[:, None], values[None], -1).argmax(-1)
        shares[induction] = float((nearest == torch.arange(4, 24)).float().mean())
    assert shares[True] == 1 and shares[False] < 0.3


def test_induction_needs_a_convolution():
    with pytest.raises(ValueError, match="induction: expected conv of at least 2"):
        NeuralMemory(dim=8, conv=1, induction=True)
    with pytest.raises(ValueError, match="induction: expected True or False, got 'yes'"):
        NeuralMemory(dim=8, induction="yes")


def _resets_parts_first(module):
    for part in reversed(list(module.modules())):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def test_gate_biases_survive_hugging_face_initialisation():
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "remanence-test"

    class Model(transformers.PreTrainedModel):
        config_class = Config
        base_model_prefix = "model"

        def __init__(self, config):
            super().__init__(config)
            self.before = nn.Linear(12, 12)
            self.memory = NeuralMemory(dim=12, heads=2)
            nn.init.ones_(self.before.bias)
            self.post_init()

        def _init_weights(self, module):
            super()._init_weights(module)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    model = Model(Config())
    assert not model.before.bias.any(), "the initialiser ran"
    expected = NeuralMemory(dim=12, heads=2).gates.bias
    assert torch.equal(model.memory.gates.bias, expected)
    assert 0.2 < model.memory.initial.layer0.std() < 0.7, "the initial memory keeps its own scale"
    model.apply(model._init_weights)
    assert torch.equal(model.memory.gates.bias, expected)


def test_hugging_face_loads_a_checkpoint_from_before_the_memory_was_added(tmp_path):
    """Missing keys are made on the meta device and handed to _init_weights; resetting ours there takes one line."""
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "remanence-test"

    class Before(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.before = nn.Linear(12, 12)
            self.post_init()

    class After(Before):
        def __init__(self, config):
            super().__init__(config)
            self.memory = NeuralMemory(dim=12, heads=2)
            self.post_init()

        def _init_weights(self, module):
            if type(module).__module__.startswith("remanence"):
                return module.reset_parameters() if hasattr(module, "reset_parameters") else None
            return super()._init_weights(module)

    with torch.device("cpu"):
        Before(Config()).save_pretrained(tmp_path)
        loaded = After.from_pretrained(tmp_path).memory
        ordinary = NeuralMemory(dim=12, heads=2)
    assert torch.equal(loaded.gates.bias, ordinary.gates.bias)
    for name, parameter in loaded.named_parameters():
        if "_proj" in name:
            continue  # nn.Linear is Hugging Face's to draw
        assert (
            abs(parameter.std() - ordinary.get_parameter(name).std())
            <= 0.5 * ordinary.get_parameter(name).std() + 1e-6
        ), name


def test_saved_parameters_load_into_another_layer():
    memory, other = layer(), layer(dtype=torch.float64)
    _resets(other)
    other.load_state_dict(memory.state_dict())
    x = tokens()
    assert torch.equal(memory(x)[0], other(x)[0])
    assert torch.equal(copy.deepcopy(memory)(x)[0], memory(x)[0])


def test_truncated_backpropagation_through_a_detached_state():
    memory = layer("titans")
    x = tokens()
    _, state = memory(x[:, :10])
    y, _ = memory(x[:, 10:], state.detach())
    y.sum().backward()
    assert memory.k_proj.weight.grad.any()
    assert all(not weight.grad.any() for weight in memory.initial.parameters()), (
        "a detached state owes it nothing"
    )


def test_surprise_falls_as_a_document_repeats():
    memory = layer(dtype=torch.float32, step_bias=-1.0, forget_bias=-9.0)
    x = F.normalize(torch.randn(1, 4, 12), dim=-1).repeat(1, 40, 1)
    surprise = memory.trace(x).surprise.mean((0, 2))
    assert surprise[-8:].mean() < 0.8 * surprise[:8].mean()


class TestBadInput:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"dim": 10, "heads": 3}, "heads: expected a divisor of dim=10, got 3"),
            ({"dim": 0}, "dim: expected an integer of at least 1, got 0"),
            ({"dim": 12, "heads": 2, "chunk": 0}, "chunk: expected an integer of at least 1, got 0"),
            (
                {"dim": 12, "heads": 2, "net": "rnn"},
                "net: expected one of deep, sparse, sparse_random, titans, residual, linear, swiglu, got 'rnn'",
            ),
            ({"dim": 12, "heads": 2, "rule": "sgd"}, "rule: expected one of titans"),
            ({"dim": 12, "heads": 2, "depth": 5}, "depth: expected 1, 2, 3 or 4 layers, got 5"),
            ({"dim": 12, "heads": 2, "chunk": 2.5}, "chunk: expected an integer"),
            (
                {"dim": 12, "heads": 2, "net": "titans", "rule": "delta"},
                "anchor: 'token' .* needs a net linear in its weights",
            ),
            (
                {"dim": 12, "heads": 2, "anchor": "word"},
                "anchor: expected 'chunk', 'token' or None, got 'word'",
            ),
            ({"dim": 12, "heads": 2, "step_bias": float("nan")}, "step_bias: expected a finite number"),
            ({"config": 512}, "config: expected a MemoryConfig, or fields by name"),
            ({"dim": 12, "heads": 2, "conv": -1}, "conv: expected an integer of at least 0, got -1"),
        ],
    )
    def test_configuration(self, fields, message):
        with pytest.raises(ValueError, match=message):
            NeuralMemory(**fields)

    def test_inputs(self):
        memory = layer(dtype=torch.float32)
        x = tokens(dtype=torch.float32)
        with pytest.raises(
            ValueError, match=r"x: expected a floating-point tensor \[batch, tokens, 12\], got \[2, 21, 11\]"
        ):
            memory(x[..., :11])
        with pytest.raises(ValueError, match="x: expected a floating-point"):
            memory(x.long())
        broken = x.clone()
        broken[0, 3, 1] = torch.nan
        if x.device.type == "cpu":
            with pytest.raises(ValueError, match="x: expected finite numbers, got 1 infinite or NaN of 504"):
                memory(broken)
        with pytest.raises(ValueError, match="mask: expected booleans"):
            memory(x, mask=torch.ones(2, 21))
        with pytest.raises(ValueError, match="offsets: expected None beside a mask"):
            memory(x, mask=torch.ones(2, 21, dtype=torch.bool), offsets=[0, 42])
        with pytest.raises(
            ValueError, match="offsets: expected a single batch row of packed documents, got a batch of 2"
        ):
            memory(x, offsets=[0, 10, 21])
        with pytest.raises(ValueError, match="offsets: expected to rise from 0 to 21"):
            memory(x[:1], offsets=[0, 10, 20])

    def test_states(self):
        paper = partial(layer, "titans")
        memory = paper(dtype=torch.float32)
        x = tokens(dtype=torch.float32)
        _, state = memory(x)
        with pytest.raises(ValueError, match="state: expected 3 rows, one for each row of the batch, got 2"):
            memory(tokens(3, dtype=torch.float32), state)
        with pytest.raises(ValueError, match=r"state: expected dtype torch\.float64"):
            paper()(tokens(), state)
        with pytest.raises(ValueError, match="state: expected chunk 8, got chunk 4"):
            paper(dtype=torch.float32, chunk=8)(x, state)
        with pytest.raises(ValueError, match="state: expected weights of shapes"):
            paper(dtype=torch.float32, depth=3)(x, state)
        with pytest.raises(ValueError, match="state: expected one of a rule with momentum=False"):
            paper(dtype=torch.float32, rule="no_momentum")(x, state)
        with pytest.raises(ValueError, match="state: expected one of a rule with forget=False"):
            paper(dtype=torch.float32, rule="no_forget")(x, state)
        with pytest.raises(
            ValueError, match="state: expected the state this layer returned, or None, got dict"
        ):
            memory(x, {})
        with pytest.raises(ValueError, match="state: expected convolution inputs"):
            paper(dtype=torch.float32, conv=2)(x, state)
        assert isinstance(state, NeuralMemoryState)


class TestOtherPeoplesMachinery:
    def test_activation_checkpointing(self):
        from torch.utils.checkpoint import checkpoint

        memory = layer()
        x = tokens().requires_grad_()
        plain = torch.autograd.grad(memory(x)[0].square().sum(), [x, *memory.parameters()])
        y, _ = checkpoint(memory, x, None, use_reentrant=False)
        assert_close(torch.autograd.grad(y.square().sum(), [x, *memory.parameters()]), plain, 1e-12)

    def test_inference_mode(self):
        memory = layer()
        x = tokens()
        expected, _ = memory(x)
        with torch.inference_mode():
            y, state = memory(x)
            memory.read(x, state)
        assert torch.equal(y, expected)

    def test_frozen_parameters_still_pass_gradients_to_the_input(self):
        memory = layer().requires_grad_(False)
        x = tokens().requires_grad_()
        memory(x)[0].sum().backward()
        assert x.grad.any()

    def test_views_and_copies(self):
        memory = layer()
        x = torch.randn(21, 2, 12, dtype=torch.float64).transpose(0, 1)
        assert torch.equal(memory(x)[0], memory(x.contiguous())[0])
        _, state = memory(x)
        assert_close(copy.deepcopy(state.detach()), state, 0.0)
        assert torch.equal(pickle.loads(pickle.dumps(memory))(x)[0], memory(x)[0]), (
            "a module can go to another process"
        )

    @pytest.mark.slow
    def test_compile(self):
        memory = layer(dtype=torch.float32)
        x = tokens(dtype=torch.float32)
        compiled, _ = torch.compile(memory)(x)
        compiled.sum().backward()
        assert_close(compiled, memory(x)[0], 1e-5)
