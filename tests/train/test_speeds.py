"""What a run is said to take on GPUs that are not here: from what was measured, and told as that."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from remanence.config import change, preset
from remanence.model import matched
from remanence.train import DataConfig, TrainConfig, speeds
from remanence.train.plan import PEAKS, flops_per_token, plan
from remanence.train.speeds import speed_of

BENCH = Path(__file__).parents[2] / "benchmarks"


def run(variant, size="340m", length=4096, **changes):
    given = {
        "precision": "bfloat16",
        "checkpointing": True,
        "batch": 8,
        "data": DataConfig(length=length),
        **changes,
    }
    return TrainConfig(model=preset(size, variant), **given)


def row(variant, length, share, net="deep", chunk=64, **others):
    return {"variant": variant, "length": length, "share": share, "net": net, "chunk": chunk, **others}


@pytest.fixture
def made_up(monkeypatch):
    rows = [
        row("attention", 1024, 0.4),
        row("attention", 4096, 0.1),
        row("lmm", 4096, 0.2),
        row("lmm", 4096, 0.08, "titans", 64),
        row("lmm", 4096, 0.02, "titans", 16),
        row("mag", 4096, 0.05),
        row("mac", 4096, 0.01, checkpointing=True),
    ]
    monkeypatch.setattr(speeds, "table", lambda: {"gpu": "H200", "preset": "340m", "rows": rows})
    monkeypatch.setattr("remanence.train.plan.table", speeds.table)


@pytest.mark.slow
def test_the_table_is_what_its_speeds_come_to():
    """By the operations that are counted today: whoever counts others makes the table again."""
    table = speeds.table()
    assert {"attention", "lmm", "mag", "mac"} <= {row["variant"] for row in table["rows"]}
    for row in table["rows"]:
        memory = (
            {"net": "titans", "expansion": 2.0, "chunk": row["chunk"]} if row.get("net") == "titans" else {}
        )
        config = matched(preset(table["preset"], row["variant"], memory=memory))
        share = flops_per_token(config, row["length"]) * row["tokens_per_s"] / PEAKS[table["gpu"]]
        assert row["share"] == pytest.approx(share, rel=0.02) and 0.001 < share < 0.8 and row["from"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", ["attention", "lmm", "mag", "mal", "mac", "gated_delta", "window", "knn"])
def test_a_plan_says_what_it_comes_from(variant):
    one = plan(run(variant), 1)
    assert (
        "from the 340m preset on one H200" in one.basis
        and "% of the peak" in one.basis
        and variant in one.basis
    )
    assert "other sizes and GPUs differ" in one.basis and "exchange" not in one.basis
    eight = plan(run(variant), 8)
    assert eight.rate == pytest.approx(8 * one.rate) and "exchange is not counted" in eight.basis
    assert plan(run(variant, "760m"), 1).rate < one.rate < plan(run(variant, "170m"), 1).rate
    assert plan(run(variant), 1, "A100").rate < one.rate


def test_a_small_model_is_said_to_be_slower_than_that():
    assert "likely slower" in plan(run("mag", "small"), 1).basis
    assert "likely slower" not in plan(run("mag", "170m"), 1).basis


def test_a_memory_is_not_said_to_be_as_fast_as_attention():
    rate = {name: plan(run(name), 8).rate for name in ("attention", "lmm", "mag", "mac")}
    assert max(rate, key=rate.get) == "attention"


def test_between_lengths_lies_what_is_between(made_up):
    c = preset("340m", "attention")
    shares = [speed_of("attention", c, length).share for length in (256, 1024, 2048, 4096, 65536)]
    assert shares == pytest.approx([0.4, 0.4, 0.2, 0.1, 0.1])
    assert "1,024 and 4,096 tokens" in speed_of("attention", c, 2048).description
    assert "at 4,096 tokens" in speed_of("attention", c, 65536).description


def test_the_nearest_net_and_chunk_count_and_are_told(made_up):
    paper = lambda **given: preset("340m", "lmm", memory={"net": "titans", **given})
    found = {chunk: speed_of("lmm", paper(chunk=chunk), 4096) for chunk in (8, 16, 64, 128)}
    assert [each.share for each in found.values()] == pytest.approx([0.02, 0.02, 0.08, 0.08])
    assert "chunks of 16" in found[8].description and "chunks" not in found[16].description
    assert speed_of(
        "lmm", change(paper(), {"memory": {"net": "residual", "chunk": 64}}), 4096
    ).share == pytest.approx(0.08)
    for config in (preset("340m", "lmm"), change(paper(), {"memory": {"net": "linear", "chunk": 64}})):
        assert speed_of("lmm", config, 4096).share == pytest.approx(0.2)
    told = speed_of("mag", preset("340m", "mag", memory={"net": "titans"}), 4096).description
    assert "measured with the net deep in chunks of 64" in told


def test_kinds_that_were_not_measured_take_the_nearest(made_up):
    c = preset("340m", "mag")
    for kind, share in {"mal": 0.05, "gated_delta": 0.2, "someone's own": 0.2}.items():
        found = speed_of(kind, c, 4096)
        assert found.share == pytest.approx(share) and found.description.startswith(f"{kind} as ")
    # A window of 2,048 is what full attention sees of 4,096 tokens; a short one, of fewer.
    assert speed_of("window", c, 65536).share == pytest.approx(0.1)
    assert speed_of("knn", change(c, {"window": 512}), 65536).share == pytest.approx(0.4)


def test_a_hybrid_takes_the_mean_of_its_blocks_times(made_up):
    hours = {
        name: plan(run(name, checkpointing=False, batch=1), 1, "H200").hours
        for name in ("mag", "knn", ("mag", "knn"))
    }
    assert hours[("mag", "knn")] == pytest.approx((hours["mag"] + hours["knn"]) / 2)
    told = plan(run(("mag", "knn")), 1).basis
    assert "mag 5 %" in told and "knn as attention 10 %" in told


def test_recomputing_costs_a_forward_unless_it_was_measured_so(made_up):
    for variant, more in {"mag": 4 / 3, "mac": 1.0}.items():
        small = run(variant, "170m")
        with_it, without = (
            plan(small, 1, "H200"),
            plan(replace(small, checkpointing=False, batch=1), 1, "H200"),
        )
        assert without.rate / with_it.rate == pytest.approx(more)
        assert ("a third more" in with_it.basis) == (more > 1)


def test_a_run_of_the_benchmark_makes_the_table(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    same = {"part": "c", "variant": "mag", "net": "deep", "chunk": 64, "flops_per_token": 1e9}
    rows = [
        {**same, "length": 4096, "tokens_per_s": 98_900.0},
        {**same, "length": 16384, "tokens_per_s": 9_890.0, "checkpointing": True},
        {**same, "length": 32768, "note": "out of memory"},
        {**same, "variant": "attention", "length": 4096, "tokens_per_s": 1000.0},
        {"part": "b", "what": "remanence", "tokens_per_s": 1.0},
    ]
    measure_rate, out = tmp_path / "gpu.json", tmp_path / "speeds.json"
    measure_rate.write_text(json.dumps({"device": "NVIDIA H200", "torch": "2.9", "rows": rows}))
    old = {"tokens_per_s": 5.0, "share": 0.5, "from": "before"}
    kept = {"variant": "mag", "net": "titans", "chunk": 64, "length": 4096, **old}
    gone = {"variant": "mag", "net": "deep", "chunk": 64, "length": 2048, **old}
    out.write_text(json.dumps({"gpu": "H200", "preset": "340m", "rows": [kept, gone]}))
    command = [sys.executable, str(BENCH / "speeds.py"), str(measure_rate), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=BENCH.parent)
    made = json.loads(out.read_text())
    assert (
        made["gpu"] == "H200" and kept in made["rows"] and gone not in made["rows"] and len(made["rows"]) == 4
    )
    found = {
        (row["variant"], row["length"]): row
        for row in made["rows"]
        if row is not kept and row["from"] != "before"
    }
    assert found["mag", 4096]["share"] == pytest.approx(0.1) and found["mag", 16384]["checkpointing"]
    assert (
        "gpu.py --parts c, torch 2.9" in found["attention", 4096]["from"]
        and "net" not in found["attention", 4096]
    )
    script = __import__("speeds")
    with pytest.raises(ValueError, match="peak is known"):
        script.speeds({"device": "cpu", "rows": rows}, {})
    with pytest.raises(ValueError, match="expected the table's H200, got NVIDIA A100"):
        script.speeds({"device": "NVIDIA A100", "rows": rows}, made)
