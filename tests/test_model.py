"""Every variant keeps every law: causal to the bit, any split, rows, padding, packing, decoding, taking back, modes."""

import gc

import pytest
import torch
import torch.nn.functional as F
from models import MEMORIES, STORES, VARIANTS, config, model, tokens
from torch import nn
from torch.autograd.graph import get_gradient_edge

from remanence import Model, ModelConfig
from remanence.config import MODES
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


def told(variant, **fields):
    """The model; for full attention without the state, whose rows stand further right if another row is longer."""
    subject = model(variant, **fields)
    if "attention" not in VARIANTS[variant]:
        return subject
    return lambda *args, **kwargs: (subject(*args, **kwargs)[0], ())


COUNT = 29  # more than three segments of 8, seven chunks of 4, five windows of 5, and a rest of each


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
class TestLaws:
    def test_causal(self, variant):
        for dtype in (torch.float64, torch.float32):
            subject = model(variant, dtype)
            for mode in (subject.train(), subject.eval()):
                assert_causal(mode, tokens(2, COUNT))

    def test_any_split_is_the_whole(self, variant):
        for sizes in ([1] * COUNT, [8, 8, 13], [3, 1, 0, 20, 5], [17, 12]):
            assert_split(model(variant), tokens(2, COUNT), sizes, 1e-9)

    def test_prefill_and_decode_is_the_whole(self, variant):
        subject, x = model(variant), tokens(2, COUNT)
        whole, end = subject(x)
        logits, state = subject(x[:, :11])
        pieces = [logits]
        for t in range(11, COUNT):
            logits, state = subject(x[:, t : t + 1], state)
            pieces.append(logits)
        assert_close(torch.cat(pieces, 1), whole, 1e-9)
        assert_close(state, end, 1e-9)

    def test_nothing_of_a_step_outlives_it(self, variant):
        """A graph that stays holds a step's memory for ever, and no later step of the parameters can be captured."""
        subject = model(variant, torch.float32)
        trained = [each for each in subject.parameters() if each.requires_grad]
        nodes = [get_gradient_edge(each).node for each in trained]
        for node in nodes:
            node.metadata["of this step"] = True
        seen = subject.trace(tokens(2, COUNT))
        subject.logits(seen.hidden).sum().backward()
        state = seen.state.detach()
        del nodes, node, seen
        gc.collect()
        assert state is not None
        assert not [each for each in trained if get_gradient_edge(each).node.metadata]

    def test_rows_are_isolated(self, variant):
        assert_rows_isolated(model(variant), tokens(3, COUNT))

    @pytest.mark.parametrize("padding", [-100, 10**6])
    def test_padding_may_be_any_number(self, variant, padding):
        subject, x = model(variant), tokens(2, 12)
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[0, :5], mask[1, 9:] = False, False
        odd = x.masked_fill(~mask, padding)
        logits, state = subject(x, mask=mask)
        other, after = subject(odd, mask=mask)
        assert torch.equal(logits[mask], other[mask])
        assert_close(state, after, 0.0)
        with pytest.raises(ValueError, match=f"tokens: expected numbers from 0 to 10 .*, got {padding}"):
            subject(odd)
        with pytest.raises(ValueError, match=f"tokens: expected numbers from 0 to 10 .*, got {padding}"):
            subject(odd, mask=torch.ones_like(mask))

    def test_padding_is_inert(self, variant):
        mask = torch.ones(4, COUNT, dtype=torch.bool)
        mask[0, :7] = False  # left
        mask[1, 15:] = False  # right
        mask[2, [3, 4, 11, 12, 13, 20]] = False  # in between
        assert_padding_inert(told(variant), tokens(4, COUNT), mask, 1e-9)

    def test_packed_documents_are_documents_alone(self, variant):
        assert_packed(told(variant), [tokens(1, n)[0] for n in (6, 1, 0, 26, 8, 2)], 1e-9)

    def test_nothing_in_is_nothing_out(self, variant):
        """No rows, from a start and carried, masked, or packed documents of which there are none."""
        subject = model(variant)
        modes = ("on", "off", "frozen", "fresh") if subject.has_memory else ("on",)
        for mode in modes:
            state = None
            for count in (7, COUNT, 0):
                x = tokens(0, count)
                logits, state = subject(x, state, memory_mode=mode)
                features, end = subject.backbone(subject.embed(x), state, memory_mode=mode)
                masked, _ = subject(x, state, mask=x > 0, memory_mode=mode)
                assert list(logits.shape) == list(masked.shape) == [0, count, 11]
                assert list(features.shape) == [0, count, 16]
                logits.sum().backward()
            packed, other = subject(tokens(1, 0), state, offsets=[0], memory_mode=mode)
            assert list(packed.shape) == [1, 0, 11]
            for empty in (state, end, other, subject.start(2).rows([])):
                assert_close(empty, subject.start(0), 0.0)
        x, joined = tokens(1, 12), type(state).concat([state, subject.start(1)])
        assert_close(subject(x, joined), subject(x, subject.start(1)), 0.0)

    def test_pure(self, variant):
        assert_pure(model(variant), tokens(2, COUNT))

    def test_gradient_reaches_every_parameter(self, variant):
        for tie in (True, False):
            assert_gradients_reach(model(variant, tie=tie), tokens(2, COUNT))

    def test_rows_that_stand_at_different_places_read_on(self, variant):
        """A padded batch, then plain calls: each row goes on where its own document stands."""
        subject, x = model(variant), tokens(3, COUNT)
        mask = torch.ones(3, 12, dtype=torch.bool)
        mask[0, :5] = False
        mask[2, :1] = False
        _, state = subject(x[:, :12], mask=mask)
        assert state.position.tolist() == [7, 12, 11]
        first, state = subject(x[:, 12:13], state)
        rest, state = subject(x[:, 13:], state)
        for row in range(3):
            alone = torch.cat([x[row, :12][mask[row]], x[row, 12:]])[None]
            logits, end = subject(alone)
            assert_close(torch.cat([first, rest], 1)[row], logits[0, -(COUNT - 12) :], 1e-9)
            assert state.position[row] == end.position[0]

    def test_rows_can_be_chosen_and_joined(self, variant):
        subject, x = model(variant), tokens(3, COUNT)
        _, state = subject(x[:, :14])
        swapped = type(state).concat([state.rows([2]), state.rows([0])])
        y, _ = subject(x[:, 14:], state)
        z, _ = subject(x[[2, 0], 14:], swapped)
        assert_close(y[[2, 0]], z, 1e-12)

    def test_tokens_can_be_taken_back_within_the_open_chunk(self, variant):
        subject, x = model(variant), tokens(2, COUNT)
        if subject.config.knn.write == "surprise":
            pytest.skip("such a state goes by the last token read")
        # Of a window of 5 that is open, or the last token of one that has just ended.
        for read, back in (
            ((14, 2), (19, 1), (15, 2), (10, 2))
            if variant in STORES
            else ((11, 3), (19, 1), (15, 2), (10, 2))
        ):
            _, state = subject(x[:, :read])
            logits, _ = subject(x[:, read - back :], state.crop(back))
            whole, _ = subject(x)
            assert_close(logits, whole[:, read - back :], 1e-9, f"{read} read, {back} taken back")

    def test_state_is_constant_in_size_unless_attention_is_full(self, variant):
        subject = model(variant, torch.float32)
        sizes = [subject(tokens(1, n))[1].nbytes for n in (5, 29, 90)]
        if "attention" in VARIANTS[variant]:
            assert sizes[0] < sizes[1] < sizes[2]
        else:
            assert sizes == [subject.start(1).nbytes] * 3

    def test_checkpointing_changes_nothing_but_memory(self, variant):
        subject, x = model(variant).train(), tokens(2, COUNT)
        grads = []
        for subject.checkpointing in (False, True):
            subject.zero_grad()
            logits, _ = subject(x)
            logits.square().mean().backward()
            grads.append([p.grad.clone() for p in subject.parameters() if p.requires_grad])
        assert_close(grads[0], grads[1], 1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", MEMORIES)
class TestModes:
    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_keeps_the_streaming_laws(self, variant, mode):
        subject = model(variant)
        subject.memory_mode = mode
        assert_causal(subject, tokens(2, COUNT), [0, 8, 13, 28])
        for sizes in ([1] * COUNT, [3, 1, 0, 20, 5], [16, 13]):
            assert_split(subject, tokens(2, COUNT), sizes, 1e-9)
        assert_rows_isolated(subject, tokens(3, COUNT))
        if "attention" not in VARIANTS[variant]:
            assert_packed(subject, [tokens(1, n)[0] for n in (6, 26, 8)], 1e-9)

    def test_frozen_reads_and_never_writes(self, variant):
        subject, x = model(variant), tokens(2, COUNT)
        _, state = subject(x[:, :14])
        _, after = subject(x[:, 14:], state, memory_mode="frozen")
        from remanence.model import memories

        for before, now in zip(memories(state), memories(after), strict=True):
            assert_close(before, now, 0.0)
        fresh, _ = subject(x[:, 14:], memory_mode="frozen")
        kept, _ = subject(x[:, 14:], state, memory_mode="frozen")
        assert not torch.equal(fresh, kept), "a frozen memory is still read"
        assert after.position.tolist() == [COUNT] * 2

    def test_off_ignores_what_the_memory_holds(self, variant):
        """Whatever is in the memories, off gives the same; on does not."""
        from remanence.memory.store import StoreState
        from remanence.ops import MemoryState

        subject, x = model(variant), tokens(2, COUNT)
        _, state = subject(x[:, :14])

        def other(node):
            if isinstance(node, MemoryState):
                return node._replace(layers=tuple(torch.randn_like(layer) for layer in node.layers))
            if isinstance(node, StoreState):
                return node._replace(v=torch.randn_like(node.v))
            if isinstance(node, tuple):
                children = [other(child) for child in node]
                return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
            return node

        changed = other(state)
        assert torch.equal(
            subject(x[:, 14:], state, memory_mode="off")[0], subject(x[:, 14:], changed, memory_mode="off")[0]
        )
        assert not torch.equal(subject(x[:, 14:], state)[0], subject(x[:, 14:], changed)[0])

    def test_fresh_remembers_nothing_beyond_a_segment(self, variant):
        """The pure memory model: what stood in earlier segments changes nothing (but the convolution's few tokens)."""
        subject, x = (
            model(variant, num_layers=1, pattern=MEMORIES[variant][:1], window=2, knn={"size": 64}),
            tokens(1, 32),
        )
        other = x.clone()
        other[:, :8] = (x[:, :8] + 1) % 11
        near, far = (subject(y, memory_mode="fresh")[0][:, 27:] for y in (x, other))
        assert torch.equal(near, far)
        near, far = (subject(y, memory_mode="on")[0][:, 27:] for y in (x, other))
        assert not torch.equal(near, far)


def test_modes_are_checked():
    with pytest.raises(
        ValueError,
        match="memory_mode: expected one of on, off, frozen, fresh, got 'frosen'; did you mean 'frozen'",
    ):
        model("lmm").memory_mode = "frosen"
    for variant in ("attention", "window"):
        with pytest.raises(ValueError, match="have no memory, got 'off'"):
            model(variant).memory_mode = "off"
        with pytest.raises(ValueError, match="have no memory, got 'frozen'"):
            model(variant)(tokens(), memory_mode="frozen")


def test_taking_back_more_than_a_window_holds_is_refused():
    subject, x = model("window"), tokens(1, COUNT)
    _, state = subject(x)
    state = state.crop(2).crop(1)
    with pytest.raises(ValueError, match="tokens: expected at most 0, as the window is not longer, got 1"):
        state.crop(1)
    _, state = subject(x[:, :2], state)
    assert_close(
        subject(x[:, 5:], state.crop(2))[0],
        subject(torch.cat([x[:, :-3], x[:, 5:]], 1))[0][:, COUNT - 3 :],
        1e-9,
    )
    _, state = model("attention")(x)
    assert state.crop(20).position.tolist() == [COUNT - 20]


def test_a_state_holds_no_more_memory_than_it_says():
    for variant in ("window", "mac", "mag"):
        _, state = model(variant, torch.float32)(tokens(1, 200))
        assert all(
            t.untyped_storage().nbytes() <= 2 * t.nbytes for t in state.detach().tensors() if t.nbytes > 64
        )


@pytest.mark.parametrize("variant", ["attention", "window", "mac", "lmm"])
def test_one_token_after_taking_back_or_leaving_a_longer_row(variant):
    """Places in front of a row that nothing was read into are not seen, by one query as by several."""
    subject, x = model(variant), tokens(2, COUNT)
    _, state = subject(x[:1, :11])
    assert_close(subject(x[:1, 8:9], state.crop(3))[0], subject(x[:1, :9])[0][:, -1:], 1e-9)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :5] = False
    _, state = subject(x[:, :12], mask=mask)
    assert_close(subject(x[1:, 12:13], state.rows(1))[0], subject(x[1:, 5:13])[0][:, -1:], 1e-9)
    _, other = subject(x[:1, :3])
    joined = type(state).concat([other, state.rows(0)])
    y, _ = subject(x[:, 20:], joined)
    assert_close(y[:1], subject(x[:1, 20:], other)[0], 1e-9)


def test_taking_back_without_a_convolution():
    subject, x = model("mac", memory={"conv": 0}), tokens(1, COUNT)
    _, state = subject(x[:, :6])
    assert_close(subject(x[:, 5:], state.crop(1))[0], subject(x)[0][:, 5:], 1e-9)
    for variant in ("attention", "lmm"):
        with pytest.raises(ValueError, match="tokens: expected at most the 29 tokens read, got -2"):
            model(variant)(x)[1].crop(-2)


def test_a_segment_begun_with_the_memory_off_has_the_weights_of_its_beginning():
    subject, x = model("mac", num_layers=1), tokens(1, 11)
    _, first = subject(x[:, :8])
    _, state = subject(x[:, 8:10], first, memory_mode="off")
    now = subject.blocks[0].mixer.memory.layer.current_weights(first.blocks[0].memory)
    assert_close(state.blocks[0].weights, now, 0.0)


def test_rounding_is_not_amplified():
    """The gates begin where a memory's dynamics are tame: with a forget bias of -3 instead of -10 this error is 1."""
    torch.manual_seed(0)
    exact = Model(config("lmm", dim=64, num_layers=4, vocab_size=64)).double()
    x = torch.randint(64, (1, 1024))
    with torch.no_grad():
        truth, _ = exact(x)
        rounded, _ = exact.float()(x)
    assert ((rounded.double() - truth).std() / truth.std()).item() < 1e-4


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_gradients_are_tame_over_thousands_of_tokens(depth):
    """A net's layers multiply what each of them forgets: with a forget bias of -8 instead of -10, depth 4 comes to 215
    here.
    """
    torch.manual_seed(0)
    memory = {"depth": depth, "heads": 1, "expansion": 2.0, "chunk": 64}
    subject = Model(
        ModelConfig(vocab_size=64, dim=32, num_layers=1, heads=2, pattern=("lmm",), memory=memory)
    )
    x = (64 * torch.rand(1, 4096) ** 3).long()
    F.cross_entropy(subject(x)[0][0, :-1], x[0, 1:]).backward()
    assert nn.utils.get_total_norm([p.grad for p in subject.parameters() if p.grad is not None]) < 10


def test_taking_back_too_much_is_refused():
    subject, x = model("mac"), tokens(2, COUNT)
    _, state = subject(x[:, :10])
    with pytest.raises(
        ValueError, match="tokens: expected at most 2, the tokens since the last complete chunk, got 3"
    ):
        state.crop(3)
    with pytest.raises(ValueError, match="tokens: expected at most the 10 tokens read, got 11"):
        state.crop(11)
    _, frozen = subject(x[:, 10:13], state, memory_mode="frozen")
    with pytest.raises(ValueError, match="whose memory did not read every token"):
        frozen.crop(1)


class TestBadInput:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (torch.tensor([[0, 11]]), r"tokens: expected numbers from 0 to 10 \(the vocabulary\), got 11"),
            (torch.tensor([[0, -1]]), r"tokens: expected numbers from 0 to 10 \(the vocabulary\), got -1"),
            (
                torch.zeros(1, 2),
                r"tokens: expected integers \[batch, tokens\], got \[1, 2\] torch.float32",
            ),
            (
                torch.zeros(2, dtype=torch.int64),
                r"tokens: expected integers \[batch, tokens\], got \[2\]",
            ),
            ([1, 2], "tokens: expected integers .* got list"),
        ],
    )
    def test_tokens(self, bad, message):
        with pytest.raises(ValueError, match=message):
            model()(bad)

    def test_states_masks_and_offsets(self):
        subject, x = model(), tokens()
        _, state = subject(x)
        with pytest.raises(
            ValueError, match="state: expected the State this model returned, or None, got AttentionState"
        ):
            subject(x, model("window").start(2).blocks[0])
        with pytest.raises(
            ValueError,
            match=r"state: expected one of this model \(MACState\), got another's \(WindowAndMemoryState\)",
        ):
            subject(x, model("mag").start(2))
        with pytest.raises(ValueError, match="state: expected 3 rows, one for each row of the batch, got 2"):
            subject(tokens(3), state)
        with pytest.raises(ValueError, match=r"mask: expected booleans of shape \[2, 29\]"):
            subject(x, mask=torch.ones(2, 29))
        with pytest.raises(ValueError, match="offsets: expected None beside a mask"):
            subject(x, mask=torch.ones(2, 29, dtype=torch.bool), offsets=[0, 3])

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"pattern": ("atention",)},
                "pattern: expected one of mac, .* got 'atention'; did you mean 'attention'",
            ),
            ({"pattern": "mac+"}, "pattern: expected names of blocks, as .* got 'mac\\+'"),
            ({"heads": 3}, "heads: expected a divisor of dim=16"),
            ({"heads": 16}, "heads: expected a divisor of dim=16 that leaves heads of even width, got 16"),
            ({"segment": 6}, r"segment: expected a multiple of the memory's chunk \(4\), got 6"),
            ({"window": 0}, "window: expected an integer of at least 1, got 0"),
            (
                {"memory": {"chnk": 4}},
                "MemoryConfig field: expected one of .*got 'chnk'; did you mean 'chunk'",
            ),
            ({"tie": 1}, "tie: expected True or False, got 1"),
            ({"memory": {"step_bias": "a"}}, "step_bias: expected a finite number, got 'a'"),
            (
                {"memory": {"expansion": "x"}},
                "expansion: expected a number above 0 and at most 2,147,483,647, got 'x'",
            ),
            ({"memory": {"bias": "yes"}}, "bias: expected True, False or None, got 'yes'"),
            ({"memory": {"activation": "tanh"}}, "activation: expected 'gelu', 'silu' or None, got 'tanh'"),
        ],
    )
    def test_configs(self, fields, message):
        with pytest.raises(ValueError, match=message):
            Model(config(**fields))

    def test_no_tokens_are_fine(self):
        subject = model()
        _, state = subject(tokens())
        logits, after = subject(tokens(2, 0), state)
        assert list(logits.shape) == [2, 0, 11]
        assert_close(after, state, 0.0)
