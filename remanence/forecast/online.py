"""Rolling forecasts on a stream: the memory reads one look-back after another and is updated during the test."""

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


class RollingErrors(NamedTuple):
    """Errors of rolling forecasts. Each error is the mean over the horizon and all channels."""

    origins: Tensor
    """Index of the first forecast row ``[n]``."""
    mse: Tensor
    """Mean squared error of each forecast ``[n]``."""
    mae: Tensor
    """Mean absolute error of each forecast ``[n]``."""

    def between(self, first: int, last: int) -> tuple[float, float]:
        """Return the mean errors (mse, mae) of the forecasts whose first row is at least `first` and below
        `last`.
        """
        inside = (self.origins >= first) & (self.origins < last)
        return float(self.mse[inside].mean()), float(self.mae[inside].mean())


def raise_level(values: Tensor, first_row: int) -> Tensor:
    """Add 2 standard deviations of the training part to all values from row `first_row` on."""
    return torch.cat([values[:first_row], values[first_row:] + 2])


def double_amplitude(values: Tensor, first_row: int) -> Tensor:
    """Double the distance of all values from the training mean from row `first_row` on."""
    return torch.cat([values[:first_row], 2 * values[first_row:]])


def double_frequency(values: Tensor, first_row: int) -> Tensor:
    """Double the speed from row `first_row` on: keep every second row."""
    return torch.cat([values[:first_row], values[first_row::2]])


SHIFTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "none": lambda values, first_row: values,
    "level": raise_level,
    "amplitude": double_amplitude,
    "frequency": double_frequency,
}
"""Distribution shifts by name. Each changes standardised values ``[rows channels]`` from a given row on. Add
an entry for a new shift.
"""


@torch.no_grad()
def roll(
    network: Network, values: Tensor, start: int, *, memory_mode: Mode = "on", warm: int = 8, phases: int = 4
) -> RollingErrors:
    """Return the errors of rolling forecasts of `values` ``[rows channels]`` from row `start` on.

    Each of the `phases` streams starts `warm` look-backs before `start`, offset by a fraction of a look-back.
    It reads one look-back after another and makes a forecast at the end of each. Memory modes: "on" carries
    the state between look-backs and writes to the memory. "frozen" stops writing before the first forecast
    that is measured. "fresh" starts every look-back with an empty memory. "off" uses no memory.
    """
    check_choice("memory_mode", memory_mode, MODES)
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
    lookback_rows = torch.arange(lookback, device=values.device)
    horizon_rows = torch.arange(horizon, device=values.device)
    state: State | None = None
    errors = []
    with eval_mode(network):
        for step in range(-warm, steps):
            origins = start + step * lookback + offsets
            first = origins - lookback
            step_mode: Mode = (
                "on" if memory_mode == "fresh" or (memory_mode == "frozen" and step < 0) else memory_mode
            )
            forecast, trace = network.read(
                values[first[:, None] + lookback_rows], state, first, memory_mode=step_mode
            )
            state = trace.state if memory_mode in ("on", "frozen") and network.has_memory else None
            if step >= 0:
                difference = forecast[:, -1].float() - values[origins[:, None] + horizon_rows]
                errors.append(
                    torch.stack(
                        [origins.float(), difference.square().mean((1, 2)), difference.abs().mean((1, 2))]
                    )
                )
    origins, mse, mae = torch.cat(errors, 1).cpu()
    return RollingErrors(origins.long(), mse, mae)


@contextmanager
def eval_mode(network: Network) -> Iterator[None]:
    """Context manager that switches the network to evaluation mode and restores the previous mode at the end."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
