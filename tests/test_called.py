"""What is called is what runs: hooks, subclasses and replaced modules are honoured by every schedule, by decoding and
by captured graphs, or switch them off. The results are those of the plain path.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrize

from remanence import Model, Sampling, preset
from remanence.backbone import Backbone, Block
from remanence.inference import reader
from remanence.inference.decoder import Decoder, in_place, unsupported
from remanence.inference.generate import Generation
from remanence.inference.graphs import uncaptured_code_reason
from remanence.layers import GateProjection, Linear, RMSNorm, ShortConv
from remanence.layers.attention import SegmentAttention
from remanence.memory.neural import NeuralMemory
from remanence.mixers import MAC, MAG, MixerOutput, wavefront
from remanence.mixers.base import ForwardDecoder
from remanence.mixers.mac import MACDecoder
from remanence.mixers.memory import Memory
from remanence.runtime.module import Watch, alteration_reason, is_unmodified, modules_of, overridden_method
from remanence.testing import assert_close
from remanence.train.graphed import Graphed

pytestmark = pytest.mark.sample(3)

SEGMENT = 16
TOKENS = 4 * SEGMENT
VARIANTS = ["mac", "mag", "mal", "lmm", "window", "attention", "conv_window", "knn"]


def model(variant="mac", **fields):
    torch.manual_seed(0)
    shape = {"dim": 32, "heads": 2, "vocab_size": 50, "segment": SEGMENT, "window": 8, "memory": {"chunk": 8}}
    return Model(preset("tiny", variant, **{**shape, **fields})).double()


def text(rows=1, tokens=TOKENS):
    torch.manual_seed(1)
    return torch.randint(50, (rows, tokens))


def with_class(module, kind):
    """The same module, of a subclass."""
    module.__class__ = kind
    return module


def logits_and_grads(subject, tokens):
    subject.zero_grad()
    logits, _ = subject(tokens)
    logits.sin().sum().backward()
    return [logits.detach(), *[parameter.grad for parameter in subject.parameters()]]


def decoded(subject, tokens, count=3):
    """Logits of the last `count` tokens, one by one by a decoder, behind a call with those before."""
    with torch.no_grad():
        _, state = subject(tokens[:, :-count])
        decoder = Decoder(subject, state)
        return torch.stack([decoder.step(token) for token in tokens[:, -count:].unbind(1)], 1), decoder.state


class CalledError(RuntimeError):
    pass


def raising(self, *inputs, **named):
    raise CalledError


class Doubled(Linear):
    """An override that changes the result, in a way that tells if it ran."""

    def forward(self, x):
        return 2 * super().forward(x)


PATHS = {
    "segments": lambda subject: subject(text()),
    "part of a segment": lambda subject: subject(text()[:, :10]),
    "layers": lambda subject: (setattr(subject, "schedule", "layers"), subject(text())),
    "packed": lambda subject: subject.trace(text(), offsets=[0, 20, TOKENS], keep=False),
    "masked": lambda subject: subject(text(), mask=torch.arange(TOKENS)[None] < 50),
    "read": lambda subject: reader.read(subject, text()),
    "decoded": lambda subject: Decoder(subject, subject.start(1)).step(text()[:, 0]),
    "checkpointed": lambda subject: (setattr(subject.train(), "checkpointing", True), subject(text())),
}


@pytest.mark.parametrize(
    "where", ["mixer", "block", "segment", "attention", "memory", "layer", "ffn", "q_proj"]
)
@pytest.mark.parametrize("path", PATHS)
def test_an_override_is_what_runs(path, where):
    """A subclass whose method raises, raises."""
    subject = model()
    block = subject.blocks[1]
    mixer = block.mixer
    parts = {"mixer": mixer, "segment": mixer, "block": block, "attention": mixer.attention, "memory": mixer.memory,
             "layer": mixer.memory.layer, "ffn": block.ffn, "q_proj": mixer.memory.layer.q_proj}  # fmt: skip
    kind = type(parts[where])
    method = "segment" if where == "segment" else "forward"
    with_class(parts[where], type(f"Other{kind.__name__}", (kind,), {method: raising}))
    with pytest.raises(CalledError):
        PATHS[path](subject)


@pytest.mark.parametrize("path", ["segments", "part of a segment", "layers", "packed", "decoded"])
def test_a_method_replaced_in_a_module_is_what_runs(path):
    subject = model()
    subject.blocks[1].mixer.segment = lambda *inputs: raising(None)
    with pytest.raises(CalledError):
        PATHS[path](subject)


def places(subject):
    """The modules that a call of the model calls, by name."""
    named = [(name, module) for name, module in subject.named_modules() if not isinstance(module, Model)]
    return {name: each for name, each in named if type(each).forward is not nn.Module.forward}


def counting(subject, register):
    """How often each module's hook has run."""
    counts = dict.fromkeys(places(subject), 0)

    def hook(name):
        def count(*_):
            counts[name] += 1

        return count

    handles = [getattr(module, register)(hook(name)) for name, module in places(subject).items()]
    return counts, handles


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
@pytest.mark.parametrize("variant", ["mac", "mag", "lmm", "knn"])
def test_every_hook_runs(variant, register):
    """On every module that has a `forward`, with whole segments, parts of them and packed documents."""
    plain_model, tokens = model(variant), text(2)
    expected = logits_and_grads(plain_model, tokens)
    for inputs, options in ((tokens, {}), (tokens[:, :10], {}), (tokens[:1], {"offsets": [0, 20, TOKENS]})):
        subject = model(variant)
        counts, _ = counting(subject, register)
        subject(inputs, **options)[0].sin().sum().backward()
        quiet = {name for name, count in counts.items() if not count}
        assert not {name for name in quiet if not (variant == "knn" and name.endswith("mixer.attention"))}
    for a, b in zip(expected, logits_and_grads(subject, tokens), strict=True):
        assert_close(a, b, 1e-9)


@pytest.mark.parametrize("name", ["blocks.1", "blocks.1.mixer", "blocks.1.mixer.attention", "blocks.1.mixer.memory",
                                  "blocks.1.mixer.memory.layer", "blocks.1.ffn.down", "blocks.1.mixer.join",
                                  "blocks.0.mixer.memory.layer.q_conv", "norm"])  # fmt: skip
def test_a_hook_that_changes_what_a_module_gets(name):
    """The same with whole segments as with the schedule "layers", decoded as called, and not as without it."""
    subject, tokens = model(), text()
    without = subject(tokens)[0]
    changes = lambda module, inputs: (inputs[0] + inputs[0].roll(1, -1), *inputs[1:])
    handle = subject.backbone.get_submodule(name).register_forward_pre_hook(changes)
    found = logits_and_grads(subject, tokens)
    subject.schedule = "layers"
    for a, b in zip(found, logits_and_grads(subject, tokens), strict=True):
        assert_close(a, b, 1e-9)
    assert (found[0] - without).abs().max() > 1e-3
    one_by_one, state = decoded(subject, tokens)
    assert_close(one_by_one, found[0][:, -3:], 1e-9)
    assert state.position.tolist() == [TOKENS]
    handle.remove()
    assert_close(subject(tokens)[0], without, 1e-9)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_global_hooks_run_for_every_layer(register):
    subject, seen = model(), set()
    handle = register(lambda module, *_: seen.add(module))
    try:
        subject(text())
    finally:
        handle.remove()
    assert set(places(subject).values()) <= seen
    handle = register_module_full_backward_hook(lambda *_: None)
    try:
        assert "global" in wavefront.unsupported_reason(list(subject.blocks))
        assert not is_unmodified(subject.blocks[0].ffn.up, Linear)
    finally:
        handle.remove()
    assert wavefront.unsupported_reason(list(subject.blocks)) is None


def test_replaced_and_parametrized_modules():
    """As LoRA and weight norm put them there: the same as with the schedule "layers"."""

    class Scaled(nn.Module):
        def forward(self, weight):
            return weight * weight.new_tensor([[3.0]])

    def parametrized(subject):
        parametrize.register_parametrization(subject.blocks[1].ffn.up, "weight", Scaled())

    def wrapped(subject):
        subject.blocks[1].mixer.attention.q_proj = with_class(
            subject.blocks[1].mixer.attention.q_proj, Doubled
        )

    def normed(subject):
        subject.blocks[1].norm_ffn.eps = 0.5

    def gated(subject):
        subject.blocks[1].mixer.memory.layer.gate_names = list(
            subject.blocks[1].mixer.memory.layer.gate_names
        )
        subject.blocks[1].mixer.norm_written.eps = 0.5

    for change in (parametrized, wrapped, normed, gated):
        subject, tokens = model(), text()
        before = subject(tokens)[0]
        change(subject)
        assert wavefront.unsupported_reason(list(subject.blocks)) is not None
        found = logits_and_grads(subject, tokens)
        subject.schedule = "layers"
        for a, b in zip(found, logits_and_grads(subject, tokens), strict=True):
            assert_close(a, b, 1e-9)
        assert (before - found[0]).abs().max() > 1e-4
        assert_close(decoded(subject, tokens)[0], found[0][:, -3:], 1e-9)


def test_subclasses_of_block_and_backbone():
    calls = []

    class Counted(Block):
        def forward(self, x, state, ctx):
            calls.append(x.shape[1])
            return super().forward(x, state, ctx)

    class Halved(Backbone):
        def forward(self, x, state=None, **settings):
            hidden, state, *_ = super().forward(x, state, **settings)
            return hidden / 2, state

    subject, tokens = model(), text()
    expected = subject(tokens)[0]
    with_class(subject.blocks[0], Counted)
    assert_close(subject(tokens)[0], expected, 1e-9)
    assert calls == [TOKENS]
    assert_close(decoded(subject, tokens)[0], expected[:, -3:], 1e-9)
    assert calls == [TOKENS, TOKENS - 3, 1, 1, 1]
    with_class(subject.backbone, Halved)
    assert_close(subject(tokens)[0], expected / 2, 1e-9)
    assert "Halved" in unsupported(subject)


def test_a_hook_on_the_backbone_of_a_model():
    subject, tokens = model(), text()
    before = subject.trace(tokens)
    subject.backbone.register_forward_hook(lambda module, inputs, output: (2 * output[0], *output[1:]))
    after = subject.trace(tokens)
    assert_close(after.hidden, 2 * before.hidden, 1e-9)
    assert_close(after.surprise, before.surprise, 1e-9)
    assert "hooks" in unsupported(subject)


def test_a_hook_on_the_head():
    subject, calls = model(tie=False), []
    subject.head.register_forward_hook(lambda *_: calls.append(1))
    subject(text())
    assert calls == [1]


def test_a_subclass_that_overrides_nothing_that_counts_stays_fast():
    class Named(MAC):
        """Another cost, and one more method."""

        def flops(self, length):
            return 0.0

        def extra(self):
            return None

    subject = model()
    for block in subject.blocks:
        with_class(block.mixer, Named)
    assert (
        wavefront.unsupported_reason(list(subject.blocks)) is None and uncaptured_code_reason(subject) is None
    )
    assert all(in_place(block) for block in subject.blocks)


class Louder(MAC):
    def forward(self, x, state, ctx):
        y, state, trace = super().forward(x, state, ctx)
        return MixerOutput(2 * y, state, trace)


class LouderDecoder(MACDecoder):
    def step(self, x, now):
        return 2 * super().step(x, now)


class LouderInPlace(Louder):
    def decoder(self, state, mode):
        return LouderDecoder(self, state, mode)


class LouderStill(LouderInPlace):
    def forward(self, x, state, ctx):
        y, state, trace = super().forward(x, state, ctx)
        return MixerOutput(2 * y, state, trace)


@pytest.mark.parametrize(("kind", "own"), [(Louder, False), (LouderInPlace, True), (LouderStill, False)])
@pytest.mark.parametrize("mode", ["on", "frozen", "off"])
def test_a_mixer_is_decoded_by_its_own_decoder_or_called(kind, own, mode):
    subject, tokens = model(), text(2)
    for block in subject.blocks:
        with_class(block.mixer, kind)
    subject.memory_mode = mode
    assert [in_place(block) for block in subject.blocks] == [own] * len(subject.blocks)
    assert_close(decoded(subject, tokens)[0], subject(tokens)[0][:, -3:], 1e-9)


def test_a_mixin_in_front_overrides():
    class Loud:
        def forward(self, x, state, ctx):
            y, state, trace = super().forward(x, state, ctx)
            return MixerOutput(2 * y, state, trace)

    class LoudMAG(Loud, MAG):
        pass

    subject, tokens = model("mag"), text()
    with_class(subject.blocks[0].mixer, LoudMAG)
    assert overridden_method(subject.blocks[0].mixer, "decoder") == "forward"
    assert_close(decoded(subject, tokens)[0], subject(tokens)[0][:, -3:], 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hooks_that_come_while_decoding(variant):
    """And go: from the next token on, on inner modules, on blocks, with rows that are not active."""
    subject, tokens, calls = model(variant), text(2), []
    expected = subject(tokens)[0]
    rows = torch.ones(2, dtype=torch.bool)
    with torch.no_grad():
        _, state = subject(tokens[:, :-6])
        decoder, found = Decoder(subject, state), []
        for index, token in enumerate(tokens[:, -6:].unbind(1)):
            if index == 2:
                mixer = subject.blocks[0].mixer.register_forward_hook(lambda *_: calls.append("mixer"))
            if index == 3:
                block = subject.blocks[1].register_forward_hook(lambda *_: calls.append("block"))
            if index == 5:
                mixer.remove()
                block.remove()
            decoder.step(token, torch.tensor([False, False]))
            found.append(decoder.step(token, rows))
    assert_close(torch.stack(found, 1), expected[:, -6:], 1e-9)
    # States that grow are decoded by calls of the model, which do not read rows that are not active.
    times = 1 if variant == "attention" else 2
    assert calls == times * ["mixer"] + 2 * times * ["mixer", "block"]
    assert decoder.state.position.tolist() == [TOKENS] * 2
    assert not bool(decoder.diverged.any())


def test_a_module_replaced_while_decoding():
    subject, tokens = model(), text()
    with torch.no_grad():
        _, state = subject(tokens[:, :-1])
        decoder = Decoder(subject, state)
        subject.blocks[0].mixer = with_class(copy.deepcopy(subject.blocks[0].mixer), Louder)
        assert_close(decoder.step(tokens[:, -1]), subject(tokens[:, -1:], state)[0][:, 0], 1e-9)


def test_generation_runs_hooks():
    subject, calls = model(vocab_size=257), []
    subject.blocks[1].mixer.register_forward_hook(lambda *_: calls.append(1))
    generation = Generation(subject, ["abc"], Sampling(max_tokens=4, temperature=0.0))
    said = generation.run().tokens
    assert len(calls) == 1 + len(said[0])


@pytest.mark.parametrize("kind", ["forward hook", "pre-hook", "backward hook", "inner hook", "parameter hook",
                                  "subclass", "replaced", "method", "block"])  # fmt: skip
def test_what_a_captured_graph_would_not_run(kind):
    """Hooks and overrides run in Python, which a graph does not repeat."""
    subject = model()
    assert uncaptured_code_reason(subject) is None
    block = subject.blocks[1]
    handle = None
    if kind == "forward hook":
        handle = block.mixer.register_forward_hook(lambda *_: None)
    if kind == "pre-hook":
        handle = block.register_forward_pre_hook(lambda *_: None)
    if kind == "backward hook":
        handle = subject.backbone.register_full_backward_hook(lambda *_: None)
    if kind == "inner hook":
        handle = block.ffn.up.register_forward_hook(lambda *_: None)
    if kind == "parameter hook":
        handle = block.ffn.up.weight.register_hook(lambda grad: None)
    if kind == "subclass":
        with_class(block.mixer, Louder)
    if kind == "replaced":
        block.ffn.up = nn.Sequential(block.ffn.up)
    if kind == "method":
        block.ffn.up.forward = lambda x: x
    if kind == "block":
        with_class(block, type("Other", (Block,), {}))
    assert uncaptured_code_reason(subject) is not None
    if handle is not None:
        handle.remove()
        assert uncaptured_code_reason(subject) is None


def test_a_mixer_that_says_it_can_be_captured_can():
    class Said(Louder):
        def capture_unsupported_reason(self, carries):
            return None

    subject = model()
    with_class(subject.blocks[0].mixer, Said).extra = nn.Dropout(0.0)
    assert uncaptured_code_reason(subject) is None


def test_captured_steps_are_dropped_when_a_hook_comes():
    """What was captured before is not replayed: the next call is captured anew, or refused."""
    graphed = Graphed(model())
    graphed.captured_steps["key"] = None
    assert not graphed.watch.changed()
    graphed.model.blocks[0].register_forward_hook(lambda *_: None)
    assert graphed.watch.changed()
    with pytest.raises(ValueError, match="model: expected one whose step can be captured, but"):
        graphed(text(), text())
    assert not graphed.captured_steps and not graphed.watch.changed()


class TestAttentionOfKnn:
    """A kNN layer needs the queries, keys and values of its attention, and still calls it."""

    def test_hooks_run(self):
        subject, tokens, calls = model("knn"), text(), []
        expected = subject(tokens)[0]
        attention = subject.blocks[1].mixer.attention
        attention.register_forward_pre_hook(lambda *_: calls.append("before"))
        handle = attention.register_forward_hook(lambda *_: calls.append("after"))
        assert_close(subject(tokens)[0], expected, 0.0)
        assert calls == ["before", "after"]
        handle.remove()
        attention.register_forward_hook(lambda module, inputs, output: (0 * output[0], output[1]))
        changed = subject(tokens)[0]
        assert float((changed - expected).abs().max()) > 1e-3
        assert_close(decoded(subject, tokens)[0], changed[:, -3:], 1e-9)

    def test_an_override_is_what_runs(self):
        subject, tokens = model("knn"), text()
        attention = subject.blocks[1].mixer.attention
        expected = subject(tokens)[0]

        class Halved(type(attention)):
            def forward(self, *inputs, **named):
                y, state = super().forward(*inputs, **named)
                return 0.5 * y, state

        with_class(attention, Halved)
        halved = subject(tokens)[0]
        assert float((halved - expected).abs().max()) > 1e-3
        with torch.no_grad():
            attention.o_proj.weight.mul_(2)
        assert_close(subject(tokens)[0], expected, 1e-9)

    def test_an_override_without_the_store_is_refused(self):
        subject = model("knn")
        kind = type(subject.blocks[0].mixer.attention)
        window = lambda self, x, state, offsets, **_: kind.forward(self, x, state, offsets)
        with_class(subject.blocks[0].mixer.attention, type("Window", (kind,), {"forward": window}))
        with pytest.raises(ValueError, match=r"attention: expected Window.forward to call fuse"):
            subject(text())


def test_what_is_watched():
    subject = model()
    watch = Watch(subject)
    assert not watch.changed()
    handle = subject.blocks[0].ffn.up.register_forward_pre_hook(lambda *_: None)
    assert watch.changed()
    handle.remove()
    assert not watch.changed()
    subject.blocks[0].ffn.up.forward = lambda x: x
    assert watch.changed()
    del subject.blocks[0].ffn.up.forward
    up = subject.blocks[0].ffn.up
    subject.blocks[0].ffn.up = copy.deepcopy(up)
    assert watch.changed()
    subject.blocks[0].ffn.up = up
    assert not watch.changed()
    with_class(up, Doubled)
    assert watch.changed()


def test_plain():
    """What a fused path asks before it takes the weights of a module instead of calling it."""
    layer = model().blocks[0].mixer.memory.layer
    for part, kind in (
        (layer.q_proj, Linear),
        (layer.q_conv, ShortConv),
        (layer.gates, GateProjection),
        (layer.norm, RMSNorm),
        (layer, NeuralMemory),
    ):
        assert is_unmodified(part, kind) and not is_unmodified(part, nn.Module)
        for register in (part.register_forward_hook, part.register_forward_pre_hook,
                         part.register_full_backward_hook, part.register_full_backward_pre_hook):  # fmt: skip
            handle = register(lambda *_: None)
            assert not is_unmodified(part, kind)
            handle.remove()
            assert is_unmodified(part, kind)
        with_class(part, type("Other", (kind,), {}))
        assert not is_unmodified(part, kind)


@pytest.mark.slow
def test_compiled_layers_run_hooks_and_overrides():
    """torch.compile takes the operators of ops/layer_cpu.py, which are given weights."""
    torch.manual_seed(0)
    layer, x = NeuralMemory(dim=16, heads=2, chunk=4), torch.randn(1, 8, 16)
    layer.norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    with_class(
        layer.q_conv,
        type("Other", (ShortConv,), {"forward": lambda self, x, past, offsets=None: (x + 1, past)}),
    )
    expected = layer(x)[0]
    torch.compiler.reset()
    assert_close(torch.compile(layer, backend="eager")(x)[0], expected, 1e-5)


def test_nothing_is_altered_at_first():
    for variant in VARIANTS:
        subject = model(variant)
        assert alteration_reason(modules_of(subject)) is None and uncaptured_code_reason(subject) is None
        assert all(in_place(block) for block in subject.blocks)
    assert isinstance(ForwardDecoder(subject.blocks[0], subject.start(1).blocks[0], "on").is_capturable, bool)
    assert is_unmodified(model().blocks[0].mixer.memory, Memory)
    assert is_unmodified(model().blocks[0].mixer.attention, SegmentAttention)


def test_sharded_blocks_are_read_in_a_wavefront():
    """FSDP makes subclasses, hooks and wrapped methods that change no result; other hooks beside them count."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        subject, tokens = model(), text()
        expected = subject(tokens)[0]
        for block in subject.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
            register_fsdp_forward_method(block, "start")
        assert wavefront.unsupported_reason(list(subject.blocks)) is None
        assert_close(subject(tokens)[0], expected, 1e-9)
        subject.blocks[0].register_forward_hook(lambda *_: None)
        assert "hooks" in wavefront.unsupported_reason(list(subject.blocks))
    finally:
        dist.destroy_process_group()
