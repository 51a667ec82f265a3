"""The protocol: borders as they are counted by hand, units of the training part alone, errors over every window."""

import numpy as np
import pytest
import torch
from series import waves

from remanence.forecast.protocol import PARTS, Protocol, Scaler, compute_errors
from remanence.forecast.series import Series


def series(rows, channels=1):
    return Series(np.arange(float(rows * channels)).reshape(rows, channels), tuple(map(str, range(channels))))


@pytest.mark.parametrize(
    ("split", "rows", "borders"),
    [
        ("ett-hour", 17420, (8640, 11520, 14400)),  # 12, 16 and 20 months of 30 days of 24 hours
        ("ett-minute", 69680, (34560, 46080, 57600)),
        ("7/1/2", 52696, (36887, 42157, 52696)),  # weather: 36887.2, and the last 10539 of 10539.2
        ("7/1/2", 26304, (18412, 21044, 26304)),  # electricity
        ("7/1/2", 11, (7, 9, 11)),
    ],
)
def test_borders_are_those_counted_by_hand(split, rows, borders):
    assert tuple(Protocol.from_series(series(rows), split).borders) == borders


@pytest.mark.parametrize(
    ("split", "rows", "horizon", "counts"),
    [
        ("ett-hour", 17420, 96, (8449, 2785, 2785)),  # the field's own counts, for a look-back of 96
        ("ett-hour", 17420, 720, (7825, 2161, 2161)),
        ("ett-minute", 69680, 96, (34369, 11425, 11425)),
        ("7/1/2", 52696, 96, (36696, 5175, 10444)),
        ("7/1/2", 52696, 720, (36072, 4551, 9820)),
    ],
)
def test_every_part_has_as_many_windows_as_the_field_has(split, rows, horizon, counts):
    protocol = Protocol.from_series(series(rows), split)
    assert tuple(protocol.windows(part, 96, horizon).num_windows for part in PARTS) == counts


def test_windows_of_each_part_forecast_that_part_alone():
    protocol, lookback, horizon = (
        Protocol.from_series(series(100), "7/1/2", Scaler(np.zeros(1), np.ones(1))),
        10,
        5,
    )
    ends = (0, *protocol.borders)
    for index, part in enumerate(PARTS):
        windows = protocol.windows(part, lookback, horizon)
        x, y = windows.take(torch.arange(windows.num_windows))
        assert torch.equal(y[:, 0], x[:, -1] + 1) and x.shape[1:] == (lookback, 1)
        first = ends[index] + (lookback if index == 0 else 0)
        assert y.min() == first, f"{part}: every row is forecast, from the first that can be"
        assert y.max() == ends[index + 1] - 1
    longer = protocol.windows("test", 60, horizon)
    assert longer.num_windows == protocol.windows("test", 10, horizon).num_windows, (
        "a longer look-back tests the same rows"
    )


def test_units_are_the_training_parts_alone():
    values = waves(200)
    other = values.copy()
    other[140:] = 1e6 * np.random.default_rng(1).standard_normal((60, 3))
    one, two = (Protocol.from_series(Series(each, ("a", "b", "c"))) for each in (values, other))
    assert all(np.array_equal(x, y) for x, y in zip(one.scaler, two.scaler, strict=True))
    assert torch.equal(one.values[:140], two.values[:140])
    assert np.allclose(one.values[:140].mean(0), 0, atol=1e-6) and np.allclose(
        one.values[:140].std(0, unbiased=False), 1
    )
    assert np.allclose(one.scaler.inverse(one.values.double().numpy()), values, atol=1e-5)


def test_a_constant_column_keeps_its_unit():
    values = np.stack([np.full(50, 0.1), np.arange(50.0)], 1)
    protocol = Protocol.from_series(Series(values, ("still", "moves")))
    assert protocol.scaler.std[0] == 1 and bool(protocol.values.isfinite().all())
    assert protocol.values[:, 0].abs().max() < 1e-6


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("every", [1, 3])
def test_errors_are_those_of_a_loop_over_all_windows(size, every):
    protocol = Protocol.from_series(Series(waves(200), ("a", "b", "c")))
    windows = protocol.windows("test", 12, 5)
    forecast = lambda x, first: x[:, -1:].repeat(1, 5, 1) * 0.9 + first[:, None, None] * 1e-3
    values, squared, absolute = protocol.values.numpy().astype(np.float64), [], []
    for start in range(160 - 12, 200 - 12 - 5 + 1, every):
        guess = values[start + 11] * 0.9 + start * 1e-3
        for step in range(5):
            squared += list((guess - values[start + 12 + step]) ** 2)
            absolute += list(np.abs(guess - values[start + 12 + step]))
    found = compute_errors(forecast, windows, every=every, size=size)
    assert found.mse == pytest.approx(np.mean(squared), rel=1e-5)
    assert found.mae == pytest.approx(np.mean(absolute), rel=1e-5)
    assert found.windows == len(squared) // 15


def test_what_is_too_short_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"data.split: expected at least 14,400 rows for 'ett-hour', got 100"
    ):
        Protocol.from_series(series(100), "ett-hour")
    with pytest.raises(
        ValueError, match=r"data.split: expected one of ett-hour, ett-minute, 7/1/2, got 'thirds'"
    ):
        Protocol.from_series(series(100), "thirds")
    protocol = Protocol.from_series(series(100))
    with pytest.raises(
        ValueError, match=r"expected at least 80 rows to train with a look-back of 60 and a horizon"
    ):
        protocol.windows("train", 60, 20)
    with pytest.raises(
        ValueError, match=r"expected at least 20 rows to val with a look-back of 10 and .* got 10"
    ):
        protocol.windows("val", 10, 20)
