"""What older code wrote opens as what it was: models, memories, runs and prepared data, with the results they
had then.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from remanence import Model, Session
from remanence.data import Documents, Packed, Tokens
from remanence.inference import memfile
from remanence.io.files import read_json, write_json
from remanence.io.migrations import current_fields
from remanence.io.tensors import read_tensors
from remanence.train import export, fit

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.skipif(
        os.environ.get("REMANENCE_TEST_DEVICE", "cpu") != "cpu", reason="loads folders to the CPU"
    ),
]

GENERATIONS = sorted((Path(__file__).parent / "fixtures").glob("v*"))
VARIANTS = {
    f"{path.parent.name}/{path.name}": path
    for each in GENERATIONS
    for path in sorted(each.iterdir())
    if (path / "run").is_dir()
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def folder(request):
    return request.param


def expected(folder):
    return read_tensors(folder / "expected.safetensors").tensors


def texts(folder):
    """The text of a fixture: what had been read when its memory was saved, and the rest."""
    text, read = expected(folder)["text"], memfile.read_file(folder / "text.mem")[0]["notes"]["read"]
    return text[:, :read], text[:, read:]


def agree(came, wanted, **tolerance):
    torch.testing.assert_close(came, wanted, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


def test_nothing_is_missing():
    assert {
        "v1/mac",
        "v1/mag",
        "v1/mal",
        "v1/lmm",
        "v1/gated_delta",
        "v1/ttt",
        "v1/knn",
        "v1/explicit",
    } <= VARIANTS.keys()
    assert (
        sum(path.stat().st_size for each in GENERATIONS for path in each.rglob("*") if path.is_file()) < 2**20
    )


@torch.no_grad()
def test_a_model_answers_as_it_did(folder):
    wanted, model = expected(folder), Model.load(folder / "model")
    agree(model(texts(folder)[0])[0][:, -wanted["logits"].shape[1] :], wanted["logits"])
    surprise = model.trace(wanted["text"]).surprise
    agree(torch.zeros(1, 0) if surprise is None else surprise, wanted["surprise"])


def test_a_model_keeps_its_configuration(folder):
    """Every field that was written says what it said, by its present name; saved again it is the same file in other
    words.
    """
    written = current_fields("model", read_json(folder / "model" / "config.json")["remanence"])
    now = Model.load(folder / "model").config.to_dict()
    parts = [(written, now), *((written[name], now[name]) for name in ("memory", "knn"))]
    for then, today in parts:
        given = {
            name: value for name, value in then.items() if value is not None and not isinstance(value, dict)
        }
        assert given == {name: today[name] for name in given}


@torch.no_grad()
def test_a_memory_goes_on(folder):
    wanted, model = expected(folder), Model.load(folder / "model")
    state, (read, more) = memfile.load(folder / "text.mem", model), texts(folder)
    assert state.position.tolist() == [read.shape[1]]
    logits, end = model(more, state)
    agree(logits[:, -wanted["more"].shape[1] :], wanted["more"])
    assert end.position.tolist() == [wanted["text"].shape[1]]


def test_a_memory_is_the_one_that_the_model_would_have_now(folder):
    """Not the answers alone: what the text leaves in a memory, tensor by tensor."""
    model = Model.load(folder / "model")
    state = memfile.load(folder / "text.mem", model)
    with torch.no_grad():
        _, again = model(texts(folder)[0])
    for (name, came), (_, wanted) in zip(
        memfile.named_tensors(again), memfile.named_tensors(state), strict=True
    ):
        agree(came, wanted, msg=lambda text, name=name: f"{name}: {text}")


def test_a_session_opens_both():
    for path in (path for path in VARIANTS.values() if (path / "model" / "tokenizer.json").is_file()):
        session = Session(path / "model").load(path / "text.mem", verify=True)
        before = session.tokens
        assert session.read("and so on").tokens == 9 and session.tokens == before + 9
        assert isinstance(session.generate("So", max_tokens=2), str)


def taken_along(folder, tmp_path):
    """A copy of a run, which may be written to; its corpus is where the fixtures are now."""
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    config = read_json(run / "config.json")
    if config["data"]["path"] is not None:
        config["data"]["path"] = str(folder.parent / config["data"]["path"])
        write_json(run / "config.json", config)
    return run


def test_a_run_goes_on(folder, tmp_path, recwarn):
    run, wanted = taken_along(folder, tmp_path), expected(folder)["losses"]
    before = [
        json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    fit(None, run, resume=True)
    after = [
        json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert after[: len(before)] == before, "the log goes on, too"
    agree(torch.tensor(after[len(before) :], dtype=torch.float64), wanted)
    assert Model.load(run / "model").config == Model.load(folder / "model").config
    changed = [str(each.message) for each in recwarn if "changed since" in str(each.message)]
    assert all(" data.path " in line and " -> " not in line.partition(" -> ")[2] for line in changed), changed


def test_a_stopped_run_can_be_exported(folder, tmp_path):
    run = taken_along(folder, tmp_path)
    carries = read_json(run / "config.json")["carry"]
    export(run, tmp_path / "model", tmp_path / "row.mem" if carries else None)
    model = Model.load(tmp_path / "model")
    if carries:
        assert memfile.load(tmp_path / "row.mem", model).position.item() > 0


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda path: path.name)
def test_a_corpus_gives_the_same_tokens(generation):
    wanted, data = read_tensors(generation / "corpus.safetensors").tensors, Tokens(generation / "corpus")
    found = {f"document.{i}": torch.tensor(data[i].astype("int64")) for i in range(len(data))}
    for name, kind in (("packed", Packed), ("documents", Documents)):
        for step in (0, 3):
            batch = kind(data, 16, 2, seed=5).step(step)
            found |= {f"{name}.{step}.tokens": batch.tokens, f"{name}.{step}.targets": batch.targets}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "best of times" in data.tokenizer.decode(found["document.0"].tolist())


@torch.no_grad()
def test_transformers_open_it(folder):
    transformers = pytest.importorskip("transformers")
    import remanence.hf  # noqa: F401  # for its registration

    wanted, outer = expected(folder), transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    agree(outer(texts(folder)[0]).logits[:, -wanted["logits"].shape[1] :], wanted["logits"])
