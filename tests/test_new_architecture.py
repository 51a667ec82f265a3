"""The proof of the interface: an architecture in one class and one registration gets everything else for nothing."""

from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from remanence import Model, ModelConfig, Session, preset
from remanence.backbone import Backbone
from remanence.core.state import TensorTuple
from remanence.inference import memfile
from remanence.inference.decoder import Decoder, unsupported
from remanence.layers import Linear
from remanence.mixers import MIXERS, Context, Mixer, MixerOutput
from remanence.ops.layout import from_rows, to_rows
from remanence.testing import assert_close
from remanence.train.plan import flops_per_token, plan

# One file: an exponential moving average of the past, with a learned decay for each channel.


class _EMAState(NamedTuple):
    mean: Tensor


class EMAState(_EMAState, TensorTuple):
    __slots__ = ()


class EMA(Mixer):
    State: ClassVar[type] = EMAState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.i_proj, self.o_proj = Linear(config.dim, config.dim), Linear(config.dim, config.dim)
        self.decay = nn.Parameter(torch.linspace(-2.0, 4.0, config.dim))

    def start(self, rows: int) -> EMAState:
        return EMAState(self.decay.detach().new_zeros(rows, len(self.decay)))

    def forward(self, x: Tensor, state: EMAState | None, ctx: Context) -> MixerOutput:
        rows, back = to_rows(self.i_proj(x), ctx.offsets)
        mean = self.start(len(rows)).mean if state is None else state.mean
        counts = (
            torch.full((len(rows),), rows.shape[1])
            if ctx.offsets is None
            else torch.tensor(ctx.offsets).diff()
        )
        keep, out = torch.sigmoid(self.decay), []
        for index in range(rows.shape[1]):
            mean = torch.where(
                (index < counts).unsqueeze(-1), keep * mean + (1 - keep) * rows[:, index], mean
            )
            out.append(mean)
        return MixerOutput(self.o_proj(from_rows(torch.stack(out, 1), back)), EMAState(mean))


# One registration.


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "ema", EMA)


def made(dtype=torch.float64, pattern=("ema", "lmm"), **fields):
    torch.manual_seed(0)
    config = preset("tiny", pattern, dim=16, heads=2, window=8, segment=8, vocabulary=257, **fields)
    return Model(config).to(dtype).eval()


TOKENS = torch.randint(257, (2, 21), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_laws():
    """Cut anywhere, packed, padded, in rows of its own: the same; and no token sees a later one."""
    subject = made()
    whole, end = subject(TOKENS)
    state, pieces = None, []
    for piece in TOKENS.split([1, 7, 13], 1):
        logits, state = subject(piece, state)
        pieces.append(logits)
    assert_close(whole, torch.cat(pieces, 1), 1e-10)
    assert_close(end, state, 1e-10)
    packed, _ = subject(TOKENS.flatten().unsqueeze(0), offsets=[0, 21, 42])
    assert_close(whole.flatten(0, 1).unsqueeze(0), packed, 1e-10)
    padded, _ = subject(torch.cat([TOKENS[:, :3] * 0, TOKENS], 1), mask=torch.arange(24).expand(2, -1) >= 3)
    assert_close(whole, padded[:, 3:], 1e-10)
    assert end.crop(0).position.tolist() == [21, 21]
    with pytest.raises(
        ValueError, match="tokens: expected 0, as EMAState does not know what it was before, got 2"
    ):
        made(pattern=("ema",))(TOKENS)[1].crop(2)
    changed = TOKENS.clone()
    changed[:, 10] += 1
    assert torch.equal(subject(changed)[0][:, :10], whole[:, :10])


@torch.no_grad()
def test_decoding():
    subject = made()
    assert unsupported(subject) is None
    _, state = subject(TOKENS)
    decoder, active = Decoder(subject, state), torch.tensor([True, False])
    logits = decoder.step(TOKENS[:, 0], active)
    expected, after = subject(TOKENS[:1, :1], state.rows(0))
    assert_close(expected[:, 0], logits[:1], 1e-10)
    assert_close(after, decoder.state.rows(0), 1e-10)
    assert_close(state.rows(1), decoder.state.rows(1), 1e-10)
    assert len(Session(subject.float()).generate("What", max_tokens=4, temperature=0.0)) > 0


@torch.no_grad()
def test_memory_files(tmp_path):
    subject = made(torch.float32)
    _, state = subject(TOKENS)
    memfile.save(tmp_path / "a.mem", subject, state)
    assert_close(state, memfile.load(tmp_path / "a.mem", subject), 0.0)
    bad = state._replace(blocks=(EMAState(state.blocks[0].mean[:, :3]), *state.blocks[1:]))
    with pytest.raises(ValueError, match=r"blocks\.0\.mean: expected shape \[2, 16\], got \[2, 3\]"):
        memfile.save(tmp_path / "b.mem", subject, bad)
    with pytest.raises(ValueError, match=r"state: expected one of this model \(EMAState\)"):
        subject(TOKENS, made(torch.float32, ("lmm",))(TOKENS)[1])
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
        "    model = preset('tiny', ('ema',), dim=16, heads=2, vocabulary=257)\n"
        "    return TrainConfig(model=model, data=DataConfig(kind='recall', length=32, pairs=2), batch=2, steps=2)\n"
    )
    command("train", recipe, "--out", tmp_path / "run")
    command("export", tmp_path / "run", tmp_path / "model")
    assert isinstance(Model.load(tmp_path / "model").mixers[0], EMA)
    command("new", "tiny", tmp_path / "new", "--variant", "ema+window")
    (tmp_path / "text.txt").write_text("something to read")
    command("read", tmp_path / "new", tmp_path / "text.txt", "--save", tmp_path / "text.mem")
    assert '"ema"' in command("inspect", tmp_path / "text.mem")


def test_features_in_features_out():
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
        backbone(TOKENS)
