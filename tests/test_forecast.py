"""Forecasting networks and the Forecaster: causal to the bit, saved and loaded to the bit, in one's own units."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from series import MODEL, network, shape, waves, written

from remanence.backbone import Backbone
from remanence.forecast import Forecaster
from remanence.forecast.network import NETWORKS, WindowBatch, load_network, make_network
from remanence.forecast.online import SHIFTS, roll
from remanence.io.files import add_digest, check_digest
from remanence.train import OptimizerConfig

QUICK = {"lookback": 24, "horizon": 8, "device": "cpu", "patch": 8, "stride": 4, "steps": 8, "batch": 8}
QUICK |= {"validate_every": 4, "model": {"dim": 16, "heads": 2, "ffn": 16, "memory": MODEL.memory}}


def stream(rows=200, seed=0):
    return torch.from_numpy(waves(rows, seed=seed)).float() / 4 - 1


class TestNetworks:
    def test_dlinear_is_its_definition(self):
        made, x = network(network="dlinear").double(), stream().double()[:48].view(2, 24, 3)
        trend = torch.empty_like(x)
        for t in range(24):
            near = [min(max(t + offset, 0), 23) for offset in range(-12, 13)]
            trend[:, t] = x[:, near].mean(1)
        maps = (made.rest_proj, x - trend), (made.trend_proj, trend)
        wanted = sum(
            torch.einsum("ht,btc->bhc", layer.weight, part) + layer.bias[:, None] for layer, part in maps
        )
        torch.testing.assert_close(made(x), wanted, rtol=1e-12, atol=1e-12)

    def test_the_memory_network_is_its_parts_put_together(self):
        made, x = network(linear=True, cycle=5).double(), stream().double()[:24].unsqueeze(0)
        rows = torch.stack([made.season[(7 + t) % 5] for t in range(32)])
        z = x[0] - rows[:24]
        mean, std = z.mean(0), (z.var(0, unbiased=False) + 1e-5).sqrt()
        z = (z - mean) / std
        found = []
        for channel in range(3):
            padded = torch.cat([z[:, channel], z[-1:, channel].expand(4)])
            tokens = torch.stack([made.patch_proj(padded[at : at + 8]) for at in range(0, 21, 4)])
            tokens = tokens + made.position + made.channel[channel]
            features, _ = made.backbone(tokens.unsqueeze(0))
            found.append(made.head_proj(features.flatten()) + made.time_proj(z[:, channel]))
        wanted = torch.stack(found, 1) * std + mean + rows[24:]
        torch.testing.assert_close(made(x, torch.tensor([7]))[0], wanted, rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="first: expected the index of each look-back's first row"):
            made(x)

    @pytest.mark.parametrize("name", NETWORKS)
    def test_channels_and_rows_never_meet(self, name):
        made, x = network(network=name), stream()[:96].view(4, 24, 3)
        other = x.clone()
        other[1], other[2, :, 0] = 7.0, -3.0
        before, after = made(x), made(other)
        assert torch.equal(before[[0, 3]], after[[0, 3]]) and torch.equal(before[2, :, 1:], after[2, :, 1:])
        assert not torch.equal(before[1], after[1])

    def test_each_look_back_is_forecast_from_what_came_before_it(self):
        """Several look-backs in one call: the same numbers as in several calls whose state goes on, to the bit."""
        made, x = network(), stream()[:96].unsqueeze(0)
        changed = x.clone()
        changed[:, 48:] += 5
        with torch.no_grad():
            whole, trace = made.read(x)
            assert torch.equal(whole[:, :2], made.read(changed)[0][:, :2])
            state, parts = None, []
            for part in x.split(24, 1):
                found, piece = made.read(part, state)
                state = piece.state
                parts.append(found)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
        assert torch.equal(state.position, trace.state.position)
        alone = made(x[:, 72:])
        assert not torch.allclose(alone, whole[:, -1], atol=1e-4), (
            "the memory tells what came before the look-back"
        )

    def test_the_losses_are_their_definitions(self):
        x, y = stream()[:48].view(2, 24, 3), stream(seed=1)[:16].view(2, 1, 8, 3)
        batch = WindowBatch(x, y, torch.tensor([0, 5]))
        for name in ("mse", "mae", "decay"):
            made = network(loss=name)
            miss = made(x) - y[:, 0]
            weights = torch.arange(1, 9) ** -0.5
            wanted = {
                "mse": F.mse_loss(made(x), y[:, 0]),
                "mae": miss.abs().mean(),
                "decay": (miss.abs() * (weights / weights.mean())[:, None]).mean(),
            }
            torch.testing.assert_close(made.loss(batch)[0], wanted[name])

    def test_constant_and_large_look_backs_stay_finite(self):
        made = network()
        flat, large = torch.full((1, 24, 3), 2.0), 1e4 * stream()[:24].unsqueeze(0)
        assert made(flat).sub(2).abs().max() < 0.1 and bool(made(large).isfinite().all())

    def test_memory_modes(self):
        made, x = network(), stream()[:24].unsqueeze(0)
        found = {}
        for mode in ("on", "off", "frozen", "fresh"):
            made.memory_mode = mode
            found[mode] = made(x)
        assert not torch.allclose(found["on"], found["off"], atol=1e-5)
        assert not torch.allclose(found["on"], found["frozen"], atol=1e-5)
        plain = network(network="dlinear")
        with pytest.raises(
            ValueError,
            match="memory_mode: expected 'on', because the network 'dlinear' has no memory, got 'off'",
        ):
            plain.memory_mode = "off"

    def test_a_forward_changes_no_parameter(self):
        made = network()
        before = {name: value.clone() for name, value in made.state_dict().items()}
        made.read(stream()[:96].unsqueeze(0))
        assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())


class TestFolders:
    def test_what_is_saved_is_loaded_to_the_bit(self, tmp_path):
        made, x = network(cycle=3), stream()[:24].unsqueeze(0)
        made.save(tmp_path / "m")
        again = load_network(tmp_path / "m").eval()
        assert again.config == made.config
        assert torch.equal(again(x, torch.tensor([1])), made(x, torch.tensor([1])))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"horizon": 9}, r"head_proj.bias': expected shape \[9\], got \[8\]"),
            ({"horizon": "x"}, "horizon: expected an integer of at least 1, got 'x'"),
            ({"names": ["a"]}, r"expected shape \[1, 16\], got \[3, 16\]"),
            ({"scaler": {"mean": [1.0], "std": [1.0]}}, "scaler: expected a mean and std for 3 channels"),
            ({"forecast": 3}, "forecast: expected a field of a forecasting network, got 3"),
        ],
    )
    def test_a_strangers_folder_is_judged_in_one_line(self, tmp_path, change, message):
        network().save(tmp_path / "m")
        path = tmp_path / "m" / "config.json"
        data = json.loads(path.read_text())
        data["remanence"] = add_digest({**check_digest(path, data["remanence"]), **change})
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message) as error:
            load_network(tmp_path / "m")
        assert "\n" not in str(error.value)

    def test_a_language_model_is_no_network(self, tmp_path):
        from remanence import Model, preset

        Model(preset("tiny", "lmm")).save(tmp_path / "m")
        with pytest.raises(ValueError, match="expected a forecasting network"):
            load_network(tmp_path / "m")
        with pytest.raises(
            ValueError, match=r"forecast.network: expected one of memory, linear, dlinear, got 'linaer'"
        ):
            make_network(shape(network="linaer"))


class TestOnline:
    @pytest.mark.parametrize("mode", ["on", "frozen", "fresh", "off"])
    def test_no_forecast_depends_on_what_comes_after_its_origin(self, mode):
        """To the bit: the later part of a stream is changed, and only forecasts made in it change."""
        made, values = network(), stream(240)
        seen, read = [], made.read

        def recorded(x, state, first, **mode):
            seen[-1].append(read(x, state, first, **mode))
            return seen[-1][-1]

        made.read = recorded
        changed = values.clone()
        changed[168:] += torch.randn(72, 3)
        for each in (values, changed):
            seen.append([])
            roll(made, each, 72, memory_mode=mode, warm=2, phases=1)
        origins = [24 * (step + 1) for step in range(len(seen[0]))]
        for origin, (one, _), (two, _) in zip(origins, *seen, strict=True):
            assert torch.equal(one, two) == (origin <= 168), origin

    def test_each_mode_is_what_it_says(self):
        made, values = network(), stream(240)
        with torch.no_grad():
            first = made.read(values[:72].unsqueeze(0))[1].state
            state, carried, frozen, fresh = first, [], [], []
            after = first
            for start in range(72, 240 - 24 - 8 + 1, 24):
                x, y = values[start : start + 24].unsqueeze(0), values[start + 24 : start + 32]
                found, trace = made.read(x, state)
                state = trace.state
                carried.append((found[0, -1] - y).square().mean())
                made.memory_mode = "frozen"
                found, trace = made.read(x, after)
                after = trace.state
                frozen.append((found[0, -1] - y).square().mean())
                made.memory_mode = "on"
                fresh.append((made(x)[0] - y).square().mean())
        for mode, wanted in (("on", carried), ("frozen", frozen), ("fresh", fresh)):
            rolled = roll(made, values, 96, memory_mode=mode, warm=3, phases=1)
            torch.testing.assert_close(rolled.mse, torch.stack(wanted), rtol=1e-4, atol=1e-6)
            assert rolled.origins.tolist() == list(range(96, 240 - 8 + 1, 24))
        assert made.memory_mode == "on"

    def test_phases_are_streams_of_their_own(self):
        made, values = network(), stream(240)
        rolled = roll(made, values, 96, warm=2, phases=3)
        assert sorted(rolled.origins.tolist()) == list(range(96, 96 + 3 * 8 * (len(rolled.origins) // 3), 8))
        late = roll(made, values, 104, warm=2, phases=1)
        own = {int(at): float(value) for at, value in zip(rolled.origins, rolled.mse, strict=True)}
        for at, value in zip(late.origins.tolist(), late.mse.tolist(), strict=True):
            if at in own:
                assert own[at] == pytest.approx(value, rel=1e-4)

    def test_shifts_leave_what_was_before_them(self):
        values = stream(100)
        before = values.clone()
        for name, shift in SHIFTS.items():
            found = shift(values, 60)
            assert torch.equal(values, before) and torch.equal(found[:60], values[:60]), name
        assert torch.equal(SHIFTS["level"](values, 60)[60:], values[60:] + 2)
        assert torch.equal(SHIFTS["amplitude"](values, 60)[60:], values[60:] * 2)
        assert torch.equal(SHIFTS["frequency"](values, 60)[60:], values[60::2])

    def test_a_stream_that_is_too_short_is_refused(self):
        with pytest.raises(
            ValueError, match="expected at least 24 rows before the first forecast and 8 after it"
        ):
            roll(network(), stream(100), 10)
        with pytest.raises(ValueError, match="mode: expected one of on, off, frozen, fresh"):
            roll(network(), stream(100), 48, memory_mode="slow")


@pytest.fixture(scope="module")
def fitted():
    return Forecaster(**QUICK).fit(waves(300))


class TestForecaster:
    def test_it_is_the_same_from_any_source_and_with_the_same_seed(self, fitted, tmp_path):
        values = waves(300)
        path = written(tmp_path / "s.csv", values)
        other = Forecaster(**QUICK).fit(path)
        assert np.array_equal(other.predict(values), fitted.predict(values)) and other.names == (
            "a",
            "b",
            "c",
        )
        assert np.array_equal(other.predict(path), other.predict(values))
        third = Forecaster(**QUICK, seed=1).fit(values)
        assert not np.array_equal(third.predict(values), fitted.predict(values))

    def test_a_forecast_is_of_the_last_look_back_in_the_datas_units(self, fitted):
        values = waves(300)
        found = fitted.predict(values)
        assert found.shape == (8, 3) and np.array_equal(found, fitted.predict(values[-24:]))
        scaler = fitted.network.scaler
        x = torch.from_numpy(((values[-24:] - scaler.mean) / scaler.std).astype(np.float32)).unsqueeze(0)
        wanted = fitted.network(x)[0].detach().double().numpy() * scaler.std + scaler.mean
        assert np.allclose(found, wanted, rtol=1e-6)
        assert np.allclose(scaler.mean, values[:210].mean(0)), "the training part alone"

    def test_its_score_is_the_protocols(self, fitted):
        values = waves(300)
        scaler, miss = fitted.network.scaler, []
        standard = scaler.standardize(values)
        for start in range(240 - 24, 300 - 24 - 8 + 1):
            found = scaler.standardize(fitted.predict(values[: start + 24]))
            miss.append(found - standard[start + 24 : start + 32])
        score = fitted.score(values)
        assert score.mse == pytest.approx(np.square(miss).mean(), rel=1e-4)
        assert score.mae == pytest.approx(np.abs(miss).mean(), rel=1e-4)
        assert score.windows == len(miss)

    def test_saved_and_loaded_it_is_the_same_to_the_bit(self, fitted, tmp_path):
        fitted.save(tmp_path / "m")
        again = Forecaster.load(tmp_path / "m", device="cpu")
        assert np.array_equal(again.predict(waves(300)), fitted.predict(waves(300)))
        assert again.score(waves(300)) == fitted.score(waves(300))
        with pytest.raises(ValueError, match="folder: expected a new or empty folder"):
            fitted.save(tmp_path / "m")

    def test_it_learns(self):
        """Far better than the last value again, on waves."""
        values = waves(500, noise=0.02)
        faster = OptimizerConfig(lr=5e-3, warmup=10)
        fields = {**QUICK, "steps": 100, "validate_every": 50, "dropout": 0.0, "optimizer": faster}
        made = Forecaster(**fields).fit(values)
        standard = made.network.scaler.standardize(values)
        again = [standard[at + 1 : at + 9] - standard[at] for at in range(399, 491)]
        assert made.score(values).mse < 0.1 * np.square(again).mean()

    def test_it_rolls_on_and_plots(self, fitted, tmp_path):
        rolled = fitted.roll(waves(300), 240, warm=2, phases=2)
        assert bool(rolled.mse.isfinite().all()) and int(rolled.origins.min()) == 240
        path = fitted.plot(waves(300)[:280], tmp_path / "f.png", truth=waves(300)[280:], channels=("1",))
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_wrong_turns_are_one_line(self, fitted, tmp_path):
        for act, message in (
            (lambda: Forecaster().predict(waves()), "forecaster: expected a fitted or loaded forecaster"),
            (lambda: fitted.predict(waves(10)), "data: expected at least the look-back's 24 rows, got 10"),
            (
                lambda: fitted.predict(waves(30)[:, :2]),
                "data: expected 3 columns, as in the fitted data, got 2",
            ),
            (lambda: fitted.predict(np.full((30, 3), np.nan)), "column '0': expected a number in every row"),
            (
                lambda: fitted.plot(waves(), tmp_path / "x.png", channels=("z",)),
                "channels: expected one of 0, 1, 2",
            ),
            (lambda: Forecaster(**QUICK).fit(waves(20)), "data: expected at least 32 rows to train"),
            (lambda: Forecaster(split="x"), "split: expected one of ett-hour, ett-minute, 7/1/2, got 'x'"),
            (lambda: Forecaster(missing="drop"), "missing: expected one of refuse, previous, got 'drop'"),
            (lambda: Forecaster(stepps=3), "stepps: expected one of .*; did you mean 'steps'"),
        ):
            with pytest.raises(ValueError, match=message) as error:
                act()
            assert "\n" not in str(error.value)

    def test_a_backbone_of_another_kind_is_an_entry(self):
        made = Forecaster(**{**QUICK, "model": {**QUICK["model"], "pattern": ("attention",)}}).fit(waves(300))
        assert isinstance(made.network.backbone, Backbone) and not made.network.has_memory
        with pytest.raises(ValueError, match="memory_mode: expected 'on'"):
            made.predict(waves(300), memory_mode="off")
