"""Memory files: what comes back is what was saved, to the bit; what does not fit is refused, and nothing is half
loaded.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from math import prod

import pytest
import torch
from damage import damaged
from models import VARIANTS, model
from safetensors.torch import load_file, save_file

from remanence import Model, Session
from remanence.inference import memfile
from remanence.io.tensors import Stored, describe, read_header, read_tensors
from remanence.testing import assert_close

pytestmark = pytest.mark.sample(2)

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


def session(variant="mac", dtype=torch.float32, **fields):
    return Session(model(variant, dtype, vocab_size=257, **fields).eval())


def saved(tmp_path, variant="mac"):
    subject = session(variant)
    subject.read(TEXT)
    path = tmp_path / "a.mem"
    subject.save(path)
    return subject, path


def rewrite(path, change):
    """The file with tensors and header changed, and a checksum that fits again: a forgery, not an accident."""
    stored = read_tensors(path)
    tensors, header = change(dict(stored.tensors), dict(stored.metadata))
    header.pop("checksum")
    save_file(tensors, path, {**header, "checksum": memfile._checksum(tensors, header)})


def forge(path, described):
    """A file of holes with these tensors, [dtype, *shape] each, and a header that says so."""
    sizes = {"float32": ("F32", 4), "int64": ("I64", 8), "bool": ("BOOL", 1)}
    header, end = {"__metadata__": {**read_header(path).metadata, "state": json.dumps(described)}}, 0
    for name, (dtype, *shape) in described.items():
        kind, size = sizes[dtype]
        begin, end = end, end + size * prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading_saving_loading_generating_is_doing_it_in_one_go(variant, tmp_path):
    subject, path = saved(tmp_path, variant)
    other = Session(subject.model).load(path)
    assert_close(other.state, subject.state, 0.0)
    assert other.generate("Then", max_tokens=24, temperature=1.0, seed=3) == subject.generate(
        "Then", max_tokens=24, temperature=1.0, seed=3
    )
    assert_close(other.state, subject.state, 0.0)


def test_a_file_says_what_it_is_and_holds_no_text(tmp_path):
    subject, path = saved(tmp_path)
    header, tensors = memfile.read_file(path)
    assert header["tokens"] == [len(TEXT)]
    assert header["schema"] == memfile.SCHEMA
    assert header["config"] == subject.model.config.to_dict()
    assert header["state"].keys() == tensors.keys()
    raw = path.read_bytes()
    assert not any(word.encode() in raw for word in ("times", "wisdom", "best"))
    assert os.listdir(tmp_path) == ["a.mem"], "no temporary file is left"


def test_fingerprint_does_not_depend_on_the_dtype():
    subject = model("mac", torch.float32)
    prints = {
        memfile.fingerprint(subject.to(dtype))
        for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16)
    }
    assert len(prints) == 1
    with torch.no_grad():
        subject.backbone.norm.weight[0] += 0.1
    assert memfile.fingerprint(subject) not in prints


def test_a_memory_moves_to_a_model_of_another_dtype(tmp_path):
    subject, path = saved(tmp_path)
    rounded = Session(subject.model.bfloat16()).load(path)
    assert {t.dtype for t in rounded.state.tensors() if t.is_floating_point()} == {
        torch.bfloat16,
        torch.float32,
    }
    assert rounded.generate("a", max_tokens=3) is not None


def test_other_weights_need_force(tmp_path):
    subject, path = saved(tmp_path)
    torch.manual_seed(99)
    other = Session(Model(subject.model.config))
    with pytest.raises(
        ValueError, match=r"a\.mem: made by the same configuration with other weights; --force"
    ):
        other.load(path)
    assert other.tokens == 0, "nothing is half loaded"
    assert other.load(path, force=True).tokens == len(TEXT)


def test_another_architecture_is_named(tmp_path):
    _, path = saved(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"another configuration: memory\.chunk is 4 in the file, 8 in the model; segment is 8",
    ):
        session(memory={"chunk": 8}, segment=16).load(path)
    with pytest.raises(ValueError, match=r"pattern is \['mac'\] in the file, \['lmm'\] in the model"):
        session("lmm").load(path, force=True)


def test_newer_schemas_are_refused_and_older_ones_migrated(tmp_path, monkeypatch):
    subject, path = saved(tmp_path)
    rewrite(path, lambda tensors, header: (tensors, {**header, "schema": "2"}))
    with pytest.raises(ValueError, match="expected schema 1 or older, got 2; a newer remanence can read it"):
        session().load(path)

    def older(tensors, header):  # a made-up past: the tokens were one number under another name
        header["count"] = str(json.loads(header.pop("tokens"))[0])
        return tensors, {**header, "schema": "0"}

    subject.save(path)
    rewrite(path, older)
    with pytest.raises(ValueError, match="schema 0 cannot be brought to schema 1"):
        session().load(path)

    def migrate(stored):
        header = dict(stored.metadata)
        return Stored(stored.tensors, {**header, "tokens": json.dumps([int(header.pop("count"))])})

    monkeypatch.setitem(memfile.MIGRATIONS, 0, migrate)
    assert_close(Session(subject.model).load(path).state, subject.state, 0.0)


class TestDamage:
    def test_every_truncation(self, tmp_path):
        subject, path = saved(tmp_path, "lmm")
        whole = path.read_bytes()
        for size in {0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=r"a\.mem: (damaged, or not a safetensors file|altered)"):
                Session(subject.model).load(path)

    @pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.exhaustive)])
    def test_any_damage(self, tmp_path, count):
        """Also the memory of another model in its place."""
        subject, path = saved(tmp_path, "lmm")
        whole, other = path.read_bytes(), session("mac")
        other.read(TEXT)
        other.save(path)
        others = [path.read_bytes()]
        for seed in range(count):
            changed = damaged(random.Random(seed), whole, others)
            if changed == whole:
                continue
            path.unlink(missing_ok=True)
            if changed is not None:
                path.write_bytes(changed)
            with pytest.raises(ValueError, match=r"^[^\n]*a\.mem: [^\n]*$"):
                Session(subject.model).load(path)

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("blocks.0.asked", [1, 2**25, 16], r"blocks\.0\.asked: expected shape \[1, 6, 16\]"),
            ("more", [2**31], "a tensor 'more', for which this model has no place"),
            ("blocks.0.asked", [1, 100 * 2**28, 16], "fits into this machine's|blocks.0.asked: expected"),
        ],
    )
    def test_nothing_is_read_of_what_cannot_fit(self, tmp_path, monkeypatch, name, shape, message):
        """A forged file of a few KB on the disk, which says that it holds gigabytes."""
        subject, path = saved(tmp_path)
        described = {key: describe(tensor) for key, tensor in read_tensors(path).tensors.items()}
        forge(path, {**described, name: ["float32", *shape]})
        assert path.stat().st_blocks < 1000

        def read(*_, **__):
            raise AssertionError("a tensor was read")

        monkeypatch.setattr(memfile, "read_tensors", read)
        with pytest.raises(ValueError, match=message):
            Session(subject.model).load(path)
        with pytest.raises(ValueError, match=message):
            memfile.read_file(path)

    def test_a_header_of_a_million_layers(self, tmp_path):
        _, path = saved(tmp_path)

        def grow(tensors, header):
            config = json.loads(header["config"])
            return tensors, {**header, "config": json.dumps({**config, "num_layers": 1_000_000})}

        rewrite(path, grow)
        with pytest.raises(ValueError, match="does not describe its content: 1,000,000 layers"):
            memfile.read_file(path)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_numbers_that_are_none(self, tmp_path, value):
        subject, path = saved(tmp_path)

        def poison(tensors, header):
            tensors["blocks.1.memory.memory.layers.0"].flatten()[5] = value
            return tensors, header

        rewrite(path, poison)
        with pytest.raises(
            ValueError,
            match=r"blocks\.1\.memory\.memory\.layers\.0: expected finite numbers, got 1 infinite or NaN",
        ):
            Session(subject.model).load(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop("position"), "header does not describe"),
            (lambda t: t.update(more=torch.zeros(1)), "header does not describe"),
        ],
    )
    def test_content_that_the_header_does_not_tell(self, tmp_path, change, message):
        subject, path = saved(tmp_path)

        def forge(tensors, header):
            change(tensors)
            return tensors, header

        rewrite(path, forge)
        with pytest.raises(ValueError, match=message):
            Session(subject.model).load(path)

    @pytest.mark.parametrize(
        ("name", "forged", "message"),
        [
            ("position", None, "expected a tensor 'position', which is missing"),
            ("more", torch.zeros(1), "a tensor 'more', for which this model has no place"),
            (
                "blocks.0.asked",
                torch.zeros(1, 3, 16),
                r"blocks\.0\.asked: expected shape \[1, 6, 16\], got \[1, 3, 16\]",
            ),
            (
                "blocks.0.segment.position",
                torch.tensor([1.0]),
                r"segment\.position: expected int64, got float32",
            ),
            (
                "blocks.0.segment.position",
                torch.tensor([9]),
                r"do not agree on the tokens read, .*\(SegmentState\)",
            ),
            (
                "blocks.1.memory.memory.position",
                torch.tensor([2**62]),
                r"do not agree on the tokens read, .*\(MemoryState\)",
            ),
            ("blocks.1.memory.memory.diverged", torch.tensor([True]), r"or it has diverged \(MemoryState\)"),
            (
                "blocks.0.asked",
                torch.zeros(1, 6, 16).to(torch.float8_e4m3fn),
                r"asked: expected float32, got float8",
            ),
            ("position", torch.tensor(110), r"position: expected a count for each document, got shape \[\]"),
            (
                "position",
                torch.arange(3000),
                r"blocks\.0\..*: expected shape \[3000.*\], got \[1.*\]",
            ),
            ("position", torch.tensor([-5]), r"do not agree on the tokens read"),
        ],
    )
    def test_forgeries_that_tell_themselves_well(self, tmp_path, name, forged, message):
        subject, path = saved(tmp_path)

        def forge(tensors, header):
            if forged is None:
                del tensors[name]
            else:
                tensors[name] = forged
            return tensors, {
                **header,
                "state": json.dumps({key: describe(t) for key, t in tensors.items()}),
            }

        rewrite(path, forge)
        with pytest.raises(ValueError, match=message):
            Session(subject.model).load(path)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("fingerprint", "5"),
            ("fingerprint", '{"a": 1, "b": 2}'),
            ("tokens", "[true]"),
            ("config", '"[/red]"'),
            ("notes", "[]"),
            ("config", "[" * 100_000 + "]" * 100_000),
        ],
    )
    def test_headers_that_are_not_ours(self, tmp_path, name, text):
        subject, path = saved(tmp_path)
        rewrite(path, lambda tensors, header: (tensors, {**header, name: text}))
        with pytest.raises(ValueError, match=r"its header (does not describe its content|is not complete)"):
            Session(subject.model).load(path)

    def test_full_attention_must_hold_what_was_read(self, tmp_path):
        subject, path = saved(tmp_path, "attention")

        def shorten(tensors, header):
            for name in ("blocks.0.k", "blocks.0.v"):
                tensors[name] = tensors[name][:, 1:].contiguous()
            return tensors, {
                **header,
                "state": json.dumps({key: describe(t) for key, t in tensors.items()}),
            }

        rewrite(path, shorten)
        with pytest.raises(
            ValueError, match=r"blocks\.\d\.[kv]: expected an entry for each of the 110 tokens read, got "
        ):
            Session(subject.model).load(path)
        _, state = subject.model(torch.tensor([[1, 2, 3]]), subject.state)
        memfile.save(path, subject.model, state.crop(2))
        assert_close(memfile.load(path, subject.model), state.crop(2), 0.0)

    def test_a_state_of_another_model_is_not_saved(self, tmp_path):
        subject, _ = saved(tmp_path, "mac")
        with pytest.raises(
            ValueError,
            match=r"state: expected a tensor 'blocks\.0\.memory\.memory\.layers\.0', which is missing",
        ):
            memfile.save(tmp_path / "b.mem", subject.model, session("window").state)
        assert not (tmp_path / "b.mem").exists()

    def test_where_nothing_can_be_written(self, tmp_path):
        subject, path = saved(tmp_path)
        with pytest.raises(ValueError, match="expected a file to write, got a folder or a device"):
            subject.save(tmp_path)
        with pytest.raises(ValueError, match="expected a file, got a folder"):
            subject.load(tmp_path)
        with pytest.raises(ValueError, match="expected its folder to exist"):
            subject.save(tmp_path / "no" / "a.mem")
        assert sorted(os.listdir(tmp_path)) == [path.name]

    def test_other_files(self, tmp_path):
        subject, path = saved(tmp_path)
        save_file({"a": torch.zeros(2)}, tmp_path / "b.safetensors")
        with pytest.raises(
            ValueError, match="expected a memory file, got a safetensors file of another kind"
        ):
            Session(subject.model).load(tmp_path / "b.safetensors")
        with pytest.raises(ValueError, match="nowhere: no such file"):
            Session(subject.model).load(tmp_path / "nowhere")
        assert load_file(path)

    def test_a_diverged_memory_is_not_saved(self, tmp_path):
        subject, path = saved(tmp_path)
        before = path.read_bytes()
        memory = subject.state.blocks[0].memory.memory
        bad = memory._replace(diverged=torch.ones_like(memory.diverged))
        block = subject.state.blocks[0]
        block = block._replace(memory=block.memory._replace(memory=bad))
        subject.state = subject.state._replace(blocks=(block, *subject.state.blocks[1:]))
        with pytest.raises(ValueError, match="a memory that has diverged; it was not saved"):
            subject.save(path)
        assert path.read_bytes() == before


KILLED = """
import sys, torch
from remanence import Model, Session, preset
torch.manual_seed(0)
session = Session(Model(preset("tiny", "lmm")))
session.read("abc" * 20)
print("ready", flush=True)
while True:
    session.read("more")
    session.save(sys.argv[1])
"""


@pytest.mark.slow
def test_kill_9_never_leaves_a_broken_file(tmp_path):
    """Killed at random moments of an endless save loop, the file is always one that loads."""
    path = tmp_path / "a.mem"
    torch.manual_seed(0)
    from remanence import preset

    subject = Model(preset("tiny", "lmm"))
    for wait in (0.05, 0.11, 0.2, 0.33):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while not path.exists():  # the first file may take its time
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert Session(subject).load(path).tokens >= 64


class TestModelFolders:
    @pytest.mark.parametrize("variant", ["mac", "attention hybrid"])
    def test_a_model_comes_back(self, tmp_path, variant):
        for tie in (True, False):
            subject = model(variant, torch.float32, tie=tie)
            subject.save(tmp_path / str(tie))
            other = Model.load(tmp_path / str(tie))
            assert other.config == subject.config
            x = torch.randint(11, (2, 20))
            assert torch.equal(other(x)[0], subject(x)[0])
            assert memfile.fingerprint(other) == memfile.fingerprint(subject)
        assert Model.load(tmp_path / "True", dtype=torch.bfloat16).embed.weight.dtype == torch.bfloat16

    def test_faults_are_named(self, tmp_path):
        model("mac", torch.float32).save(tmp_path)
        path = tmp_path / "model.safetensors"
        whole = load_file(path)
        name = "model.backbone.blocks.0.ffn.up.weight"
        faults = {
            "expected a tensor 'backbone.blocks.0.ffn.up.weight', which is missing": {
                k: v for k, v in whole.items() if k != name
            },
            "blocks.0.ffn.up.weight: expected shape": {**whole, name: torch.zeros(2, 2)},
            "a tensor 'other' that a model of this configuration has not": {
                **whole,
                "model.other": torch.zeros(2),
            },
        }
        for message, tensors in faults.items():
            save_file(tensors, path)
            with pytest.raises(ValueError, match=message):
                Model.load(tmp_path)
        save_file({**whole, name: whole[name].to(torch.int64)}, path)
        with pytest.raises(ValueError, match=r"blocks\.0\.ffn\.up\.weight: expected float16, .*, got int64"):
            Model.load(tmp_path)
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
            Model.load(tmp_path)
        path.unlink()
        with pytest.raises(ValueError, match=r"model\.safetensors: no such file"):
            Model.load(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json: not a JSON file"):
            Model.load(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ValueError, match=r"config\.json: expected model_type 'remanence', got 'llama'"):
            Model.load(tmp_path)
        with pytest.raises(ValueError, match=r"model: expected a folder with config\.json"):
            Model.load(tmp_path / "nowhere")
