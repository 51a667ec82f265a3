"""The proof of the interface: an architecture in one class and one registration gets everything else for nothing."""

import runpy
from pathlib import Path

import pytest
import torch

from remanence import Model, Session, preset
from remanence.backbone import Backbone
from remanence.inference import memfile
from remanence.inference.decoder import Decoder, unsupported
from remanence.mixers import MIXERS, Mixer
from remanence.testing import assert_close
from remanence.train.plan import flops_per_token, plan

# One file with one registration, which is undone here for the tests beside these.
OWN = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_mixer.py"))
EMA, EMAState = OWN["EMA"], OWN["EMAState"]
MIXERS.pop("ema")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "ema", EMA)


def made(dtype=torch.float64, pattern=("ema", "lmm"), **fields):
    torch.manual_seed(0)
    config = preset("tiny", pattern, dim=16, heads=2, window=8, segment=8, vocab_size=257, **fields)
    return Model(config).to(dtype).eval()


@pytest.fixture
def tokens():
    """Made in each test: the default device is set only then."""
    return torch.randint(257, (2, 21), generator=torch.Generator(torch.get_default_device()).manual_seed(1))


@torch.no_grad()
def test_the_laws(tokens):
    """Cut anywhere, packed, padded, in rows of its own: the same; and no token sees a later one."""
    subject = made()
    whole, end = subject(tokens)
    state, pieces = None, []
    for piece in tokens.split([1, 7, 13], 1):
        logits, state = subject(piece, state)
        pieces.append(logits)
    assert_close(whole, torch.cat(pieces, 1), 1e-10)
    assert_close(end, state, 1e-10)
    packed, _ = subject(tokens.flatten().unsqueeze(0), offsets=[0, 21, 42])
    assert_close(whole.flatten(0, 1).unsqueeze(0), packed, 1e-10)
    padded, _ = subject(torch.cat([tokens[:, :3] * 0, tokens], 1), mask=torch.arange(24).expand(2, -1) >= 3)
    assert_close(whole, padded[:, 3:], 1e-10)
    assert end.crop(0).position.tolist() == [21, 21]
    with pytest.raises(
        ValueError, match="tokens: expected 0, as EMAState does not know what it was before, got 2"
    ):
        made(pattern=("ema",))(tokens)[1].crop(2)
    changed = tokens.clone()
    changed[:, 10] += 1
    assert torch.equal(subject(changed)[0][:, :10], whole[:, :10])


@torch.no_grad()
def test_decoding(tokens):
    subject = made()
    assert unsupported(subject) is None
    _, state = subject(tokens)
    decoder, active = Decoder(subject, state), torch.tensor([True, False])
    logits = decoder.step(tokens[:, 0], active)
    expected, after = subject(tokens[:1, :1], state.rows(0))
    assert_close(expected[:, 0], logits[:1], 1e-10)
    assert_close(after, decoder.state.rows(0), 1e-10)
    assert_close(state.rows(1), decoder.state.rows(1), 1e-10)
    assert len(Session(subject.float()).generate("What", max_tokens=4, temperature=0.0)) > 0


@torch.no_grad()
def test_memory_files(tokens, tmp_path):
    subject = made(torch.float32)
    _, state = subject(tokens)
    memfile.save(tmp_path / "a.mem", subject, state)
    assert_close(state, memfile.load(tmp_path / "a.mem", subject), 0.0)
    bad = state._replace(blocks=(EMAState(state.blocks[0].mean[:, :3]), *state.blocks[1:]))
    with pytest.raises(ValueError, match=r"blocks\.0\.mean: expected shape \[2, 16\], got \[2, 3\]"):
        memfile.save(tmp_path / "b.mem", subject, bad)
    with pytest.raises(ValueError, match=r"state: expected one of this model \(EMAState\)"):
        subject(tokens, made(torch.float32, ("lmm",))(tokens)[1])
    session = Session(subject)
    session.read("some text")
    session.save(tmp_path / "c.mem")


def test_cost():
    from remanence.train.config import DataConfig, TrainConfig

    config = made().config
    more = flops_per_token(config, 64) - flops_per_token(made(pattern=("window", "lmm")).config, 64)
    assert more < 0  # two matrices instead of four, and no attention
    run = TrainConfig(model=config, data=DataConfig(kind="recall", length=64, pairs=4), batch=2)
    assert plan(run, gpus=1).hours > 0


def test_training_and_the_command_line(tmp_path, command):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from remanence.config import preset\n"
        "from remanence.train.config import DataConfig, TrainConfig\n"
        "def recipe():\n"
        "    model = preset('tiny', ('ema',), dim=16, heads=2, vocab_size=257)\n"
        "    return TrainConfig(model=model, data=DataConfig(kind='recall', length=32, pairs=2), batch=2, steps=2)\n"
    )
    command("train", recipe, "--out", tmp_path / "run")
    command("export", tmp_path / "run", tmp_path / "model")
    assert isinstance(Model.load(tmp_path / "model").mixers[0], EMA)
    command("new", "tiny", tmp_path / "new", "--variant", "ema+window")
    (tmp_path / "text.txt").write_text("something to read")
    command("read", tmp_path / "new", tmp_path / "text.txt", "--save", tmp_path / "text.mem")
    assert '"ema"' in command("inspect", tmp_path / "text.mem")


def test_features_in_features_out(tokens):
    """The backbone alone, on numbers that are no tokens."""
    backbone = Backbone(made().config).double().eval()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    with torch.no_grad():
        y, end = backbone(x)
        first, state = backbone(x[:, :5])
        second, state = backbone(x[:, 5:], state)
    assert_close(y, torch.cat([first, second], 1), 1e-10)
    assert_close(end, state, 1e-10)
    with pytest.raises(
        ValueError, match=r"x: expected floating-point features \[batch, tokens, 16\], got \[2, 3, 4\]"
    ):
        backbone(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"x: expected .* torch.int64"):
        backbone(tokens)


def test_what_the_defaults_say(monkeypatch):
    """A layer that waits for all others, or whose state grows, is not decoded in place; a memory inside is a memory."""
    assert not made(pattern=("ema",)).has_memory and made().has_memory
    monkeypatch.setattr(EMA, "stride", 4)
    assert unsupported(made()) == "EMA layers wait for all other layers"
    monkeypatch.undo()
    monkeypatch.setitem(MIXERS, "ema", EMA)
    monkeypatch.setattr(EMAState, "growing", lambda self: ("mean",))
    assert unsupported(made()) == "the state of EMA layers grows"


@torch.no_grad()
def test_layers_that_wait_for_each_other_read_in_common_steps(tokens, monkeypatch):
    """Each sees the tokens of its own part, once; what is read is the same."""
    subject, seen = made(), []
    expected, _ = subject(tokens)
    stride, finish = iter([4, 6] * 99), []
    monkeypatch.setattr(EMA, "stride", property(lambda self: next(stride)))
    monkeypatch.setattr(
        EMA, "finish", lambda self, begun, state, hidden, ctx: finish.append(hidden.shape[1]) or state
    )
    forward = EMA.forward

    def watch(self, x, state, ctx):
        seen.append((x.shape[1], ctx.text.tokens.shape[1]))
        return forward(self, x, state, ctx)

    monkeypatch.setattr(EMA, "forward", watch)
    both = made(pattern=("ema", "ema"))
    both(tokens)
    assert seen == [(2, 2)] * 20 + [(1, 1)] * 2 and finish == [2] * 20 + [1] * 2
    monkeypatch.setattr(EMA, "stride", 4)
    assert_close(expected, subject(tokens)[0], 1e-10)


def test_weights_by_their_first_names():
    subject = made()
    old = {name.replace("backbone.", ""): weight.clone() for name, weight in subject.state_dict().items()}
    assert "blocks.0.mixer.decay" in old
    made().load_state_dict(old)


def test_earlier_names_of_methods_are_honoured_with_a_warning():
    with pytest.warns(DeprecationWarning, match="undecodable is deprecated: use decode_unsupported_reason"):

        class Old(Mixer):
            def undecodable(self, mode):
                return "it cannot"

    assert Old.__dict__["decode_unsupported_reason"] is Old.__dict__["undecodable"]
