"""An architecture of your own, in one class and one registration: an exponential moving average of the past.

It then trains, streams, decodes, is saved in memory files and planned for like any other: ``preset("tiny", "ema")``.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from remanence import MIXERS, Backbone, Mixer, Model, ModelConfig, Session, preset
from remanence.layers import Linear, assign
from remanence.mixers import Context, MixerOutput
from remanence.ops.layout import from_rows, to_rows
from remanence.runtime.state import TensorTuple


class _EMAState(NamedTuple):
    mean: Tensor


class EMAState(_EMAState, TensorTuple):
    """The mean of what each row has read ``[r d]``. Two classes, because a NamedTuple can have no other base."""

    __slots__ = ()


class EMA(Mixer):
    State: ClassVar[type] = EMAState

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.i_proj, self.o_proj = Linear(config.dim, config.dim), Linear(config.dim, config.dim)
        self.decay = nn.Parameter(torch.empty(config.dim))
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        assign(self.decay, torch.linspace(-2.0, 4.0, len(self.decay)))

    def start(self, rows: int) -> EMAState:
        return EMAState(self.decay.detach().new_zeros(rows, len(self.decay)))

    def forward(self, x: Tensor, state: EMAState | None, ctx: Context) -> MixerOutput:
        rows, back = to_rows(self.i_proj(x), ctx.offsets)  # each document a row of its own, packed or not
        mean = self.start(len(rows)).mean if state is None else state.mean
        offsets = [0, rows.shape[1]] if ctx.offsets is None else ctx.offsets
        counts = torch.tensor(offsets, device=x.device).diff()
        keep, means = torch.sigmoid(self.decay), []
        for index in range(rows.shape[1]):
            new = keep * mean + (1 - keep) * rows[:, index]
            mean = torch.where((index < counts).unsqueeze(-1), new, mean)
            means.append(mean)
        return MixerOutput(self.o_proj(from_rows(torch.stack(means, 1), back)), EMAState(mean))


MIXERS["ema"] = EMA

if __name__ == "__main__":
    torch.manual_seed(0)
    backbone = Backbone(preset("tiny", ("ema", "lmm"))).eval()  # features in, features out
    x = torch.randn(2, 20, 128)
    with torch.no_grad():
        y, _ = backbone(x)
        first, state = backbone(x[:, :7])
        rest, _ = backbone(x[:, 7:], state)
    print("one call equals two calls:", torch.allclose(y, torch.cat([first, rest], 1), atol=1e-5))
    session = Session(Model(preset("tiny", ("ema", "lmm"))))
    session.read("Something to remember. " * 20)
    print(repr(session.generate("And then", max_tokens=8, seed=1)))
