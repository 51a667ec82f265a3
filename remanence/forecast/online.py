"""Forecasting along a stream: the memory reads look-back after look-back, and goes on learning while it is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from remanence.backbone import State
from remanence.config import MODES, Mode
from remanence.forecast.network import Network
from remanence.runtime.choices import check_choice


class Rolled(NamedTuple):
    """Errors along a stream, per forecast: the number of the first row forecast ``[n]``, and the mean squared and the
    mean absolute error over its horizon and all channels.
    """

    origins: Tensor
    mse: Tensor
    mae: Tensor

    def between(self, first: int, last: int) -> tuple[float, float]:
        """The mean errors of forecasts made from row `first` on, before row `last`."""
        inside = (self.origins >= first) & (self.origins < last)
        return float(self.mse[inside].mean()), float(self.mae[inside].mean())


def level(values: Tensor, at: int) -> Tensor:
    """All values are 2 higher, in standard deviations of the training part."""
    return torch.cat([values[:at], values[at:] + 2])


def amplitude(values: Tensor, at: int) -> Tensor:
    """All values are twice as far from the training part's mean."""
    return torch.cat([values[:at], 2 * values[at:]])


def frequency(values: Tensor, at: int) -> Tensor:
    """Everything happens twice as fast: every other row is left out."""
    return torch.cat([values[:at], values[at::2]])


SHIFTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "none": lambda values, at: values,
    "level": level,
    "amplitude": amplitude,
    "frequency": frequency,
}
"""What may change in a stream from a row on: made in memory, from standardised values. A new shift is an entry."""


@torch.no_grad()
def roll(
    network: Network, values: Tensor, start: int, *, mode: Mode = "on", warm: int = 8, phases: int = 4
) -> Rolled:
    """Forecast again and again from row `start` on, `phases` times in a look-back.

    Each phase is a stream of its own, which begins `warm` look-backs earlier: look-back after look-back is read once,
    and a forecast is made at the end of each. Mode "on": the memory goes on from look-back to look-back and is written.
    "frozen": as it was when the first forecast is made, and not written any more. "fresh": every look-back begins with
    an empty memory. "off": no memory.
    """
    check_choice("mode", mode, MODES)
    lookback, horizon = network.config.lookback, network.config.horizon
    phases = max(1, min(phases, lookback))
    offsets = torch.arange(phases, device=values.device) * (lookback // phases)
    warm = min(warm, start // lookback - 1)
    if warm < 0 or start + int(offsets[-1]) + horizon > len(values):
        raise ValueError(
            f"data: expected at least {lookback} rows before the first forecast and {horizon} after it, "
            f"got {start} and {len(values) - start}"
        )
    steps = (len(values) - start - int(offsets[-1]) - horizon) // lookback + 1
    span = torch.arange(lookback, device=values.device)
    ahead = torch.arange(horizon, device=values.device)
    state: State | None = None
    found = []
    with evaluating(network):
        for step in range(-warm, steps):
            origins = start + step * lookback + offsets
            first = origins - lookback
            now: Mode = "on" if mode == "fresh" or (mode == "frozen" and step < 0) else mode
            forecast, trace = network.read(values[first[:, None] + span], state, first, memory_mode=now)
            state = trace.state if mode in ("on", "frozen") and network.has_memory else None
            if step >= 0:
                miss = forecast[:, -1].float() - values[origins[:, None] + ahead]
                found.append(
                    torch.stack([origins.float(), miss.square().mean((1, 2)), miss.abs().mean((1, 2))])
                )
    origins, mse, mae = torch.cat(found, 1).cpu()
    return Rolled(origins.long(), mse, mae)


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode from before."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
