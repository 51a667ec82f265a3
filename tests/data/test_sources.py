"""Tables, datasets and limits: the same documents give the same shards, however they come and however often it is
stopped.
"""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import unquote, urlparse

import numpy as np
import pytest

from remanence import cli
from remanence.data import Tokens, prepare, shards, streams
from remanence.data.shards import RemainingLimit, truncate_shard, write_shard

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("datasets")

CHANCE = random.Random(0)
TEXTS = [
    [chr(CHANCE.randrange(40, 400)) * CHANCE.randrange(1, 60) for _ in range(CHANCE.randrange(20, 40))]
    for _ in range(3)
]
"""Of three files."""


def table(path, texts, group=7, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"text": texts, "id": list(range(len(texts))), **columns}), path, row_group_size=group
    )


@pytest.fixture
def dataset(tmp_path):
    """A dataset's folder as it comes from the hub."""
    folder = tmp_path / "set"
    for number, texts in enumerate(TEXTS):
        table(folder / "data" / "CC-MAIN-2024-10" / f"train-{number:05d}-of-00003.parquet", texts)
    (folder / "README.md").write_text("# About this dataset\n")
    return folder


def documents(folder):
    data = Tokens(folder)
    return [bytes(data[i][:-1].astype(np.uint8)).decode() for i in range(len(data))]


def content(folder):
    """Every listed shard and the index, byte for byte."""
    names = [shard["name"] for shard in json.loads((folder / "tokens.json").read_text())["shards"]]
    paths = [
        folder / "tokens.json",
        *(folder / f"{name}{suffix}" for name in names for suffix in (".bin", ".ends")),
    ]
    return {path.name: path.read_bytes() for path in paths}


def flat(texts):
    return [text for part in texts for text in part]


class TestParquet:
    def test_a_folder_of_tables_is_what_lines_are(self, dataset, tmp_path):
        for number, texts in enumerate(TEXTS):
            (tmp_path / f"{number}.jsonl").write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in texts)
            )
        told = prepare([dataset], tmp_path / "out")
        assert told == prepare([tmp_path / f"{number}.jsonl" for number in range(3)], tmp_path / "lines")
        assert content(tmp_path / "out") == content(tmp_path / "lines")
        assert documents(tmp_path / "out") == flat(TEXTS), "without the README"

    def test_rows_without_a_text_are_counted_and_bytes_kept(self, tmp_path):
        table(tmp_path / "a.parquet", ["a", None, "", "b", None])
        (tmp_path / "b.jsonl").write_text('{"text": "c"}\n{"text": null}\n')
        broken = pa.array([b"a\xff\xfeb"], pa.large_binary()).view(pa.large_string())
        table(tmp_path / "c.parquet", broken)
        table(tmp_path / "d.parquet", pa.array([], pa.string()))
        told = prepare([tmp_path], tmp_path / "out")
        assert told == {"files": 4, "documents": 4, "tokens": 2 + 2 + 2 + 5, "nulls": 3}
        assert Tokens(tmp_path / "out")[3].tolist() == [97, 255, 254, 98, 256]

    def test_bad_tables_are_named(self, tmp_path, monkeypatch):
        path, out = tmp_path / "t.parquet", tmp_path / "out"
        table(path, ["a" * 500] * 90)
        with pytest.raises(
            ValueError, match=r"t\.parquet: expected a column 'body', got text, id; --field names another"
        ):
            prepare([path], out, field="body")
        with pytest.raises(
            ValueError, match=r"t\.parquet: column 'id': expected texts, got int64; --field names another"
        ):
            prepare([path], out, field="id")
        whole = path.read_bytes()
        for damage in (whole[:-20], b"", b"PAR1" + bytes(200) + whole[204:]):
            path.write_bytes(damage)
            with pytest.raises(ValueError, match=r"t\.parquet: damaged, or not a parquet file \(.+\)$"):
                prepare([path], out)
        assert not [name for name in os.listdir(out) if name.startswith("0") or name.endswith(".tmp")], (
            "nothing half made"
        )
        path.rename(tmp_path / "t.parquet.gz")
        with pytest.raises(
            ValueError, match=r"t\.parquet\.gz: expected a parquet file as it is, got a compressed one"
        ):
            prepare([tmp_path / "t.parquet.gz"], out)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        path.write_bytes(whole)
        with pytest.raises(
            ValueError, match=r"reading \.parquet needs the extra 'data'; pip install 'remanence\[data\]'"
        ):
            prepare([path], out)


class TestShards:
    def test_documents_are_written_as_they_come(self, tmp_path):
        """Five million tokens pass through in a few of their megabytes."""
        piece = list(range(1000))
        tracemalloc.start()
        told = write_shard(
            tmp_path, "s", ((piece for _ in range(100)) for _ in range(50)), np.dtype("<u2"), end=7
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert told["tokens"] == 50 * 100_001 and peak < 2e6
        assert (
            np.fromfile(tmp_path / "s.bin", "<u2").reshape(50, -1)[:, [0, 1, -2, -1]].tolist()
            == [[0, 1, 999, 7]] * 50
        )
        assert np.fromfile(tmp_path / "s.ends", "<i8").tolist() == [100_001 * n for n in range(1, 51)]

    @pytest.mark.parametrize(
        "room",
        [
            RemainingLimit(25),
            RemainingLimit(24),
            RemainingLimit(None, 3),
            RemainingLimit(25, 1),
            RemainingLimit(3),
            RemainingLimit(4),
            RemainingLimit(9),
        ],
    )
    @pytest.mark.parametrize("block", [4, 12, shards.BLOCK])
    def test_a_shard_cut_is_one_that_had_no_room(self, tmp_path, monkeypatch, room, block):
        monkeypatch.setattr(shards, "BLOCK", block)
        texts = [[[1, 2, 3]], None, [[4] * 4], [], [[5] * 5, [6] * 5], [[7]]]
        whole, cut = (write_shard(tmp_path, name, texts, np.dtype("<u4"), end=9) for name in ("whole", "cut"))
        made = write_shard(tmp_path, "made", texts, np.dtype("<u4"), end=9, remaining=room)
        if room.allows(whole["tokens"], whole["documents"]):
            assert made == whole | {"name": "made"}
            return
        cut = truncate_shard(tmp_path, cut, np.dtype("<u4"), room)
        assert {**cut, "name": "made", "rows": 0, "nulls": 0} == {**made, "rows": 0, "nulls": 0}
        for suffix in (".bin", ".ends"):
            assert (tmp_path / f"cut{suffix}").read_bytes() == (tmp_path / f"made{suffix}").read_bytes()


class TestStreams:
    def test_any_number_of_processes_makes_the_same(self, dataset, tmp_path):
        source = f"hf:{dataset}"
        told = [prepare([source], tmp_path / f"{w}", workers=w, shard_tokens=200) for w in (1, 2)]
        assert told[0] == told[1] and told[0]["files"] == 3
        assert content(tmp_path / "1") == content(tmp_path / "2") and documents(tmp_path / "1") == flat(TEXTS)
        assert len(content(tmp_path / "1")) > 1 + 2 * 9, "in many shards"

    def test_a_second_time_nothing_is_read(self, dataset, tmp_path, monkeypatch):
        source, out = f"hf:{dataset}::train", tmp_path / "out"
        limited = {"max_tokens": 1500, "shard_tokens": 200}
        prepare([source], out, **limited)
        before = content(out)
        opened = []
        real = streams.Part.documents
        monkeypatch.setattr(
            streams.Part, "documents", lambda part, *rest: opened.append(part.number) or real(part, *rest)
        )
        for workers in (1, 2):
            prepare([source], out, workers=workers, **limited)
            assert content(out) == before and not opened
        prepare([source], out, max_tokens=1700, shard_tokens=200)
        assert len(opened) == 1, "with more room it goes on"
        table(dataset / "data" / "CC-MAIN-2024-10" / "train-00002-of-00003.parquet", ["another"])
        prepare([source], out, shard_tokens=200, overwrite=True)
        assert documents(out) == flat([*TEXTS[:2], ["another"]]), "a changed dataset is read again"

    def test_wrong_names_columns_and_splits(self, dataset, tmp_path, monkeypatch):
        out = tmp_path / "out"
        table(tmp_path / "file.parquet", ["a"])
        for source, message in (
            ("hf:", "expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"),
            ("hf:a:b:c:d", "expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"),
            (f"hf:{tmp_path}/nowhere", "no such folder"),
            (f"hf:{tmp_path}/file.parquet", "got a file, which is given without 'hf:'"),
            (f"hf:{dataset}::tset", r"\(Bad split: tset. Available splits: \['train'\]\)"),
            (f"hf:{dataset}:small", r"\(BuilderConfig 'small' not found. Available: \['default'\]\)"),
            ("hf:a/b/c", "not a dataset's name"),
        ):
            with pytest.raises(ValueError, match=message) as caught:
                prepare([source], out)
            assert str(caught.value).startswith(source) and "\n" not in str(caught.value)
        assert not out.exists()
        with pytest.raises(ValueError, match="expected a column 'body', got text, id; --field names another"):
            prepare([f"hf:{dataset}"], out, field="body", workers=2)
        with pytest.raises(ValueError, match="column 'id': expected texts, got int; --field names another"):
            prepare([f"hf:{dataset}"], out, field="id")
        broken = dataset / "data" / "CC-MAIN-2024-10" / "train-00001-of-00003.parquet"
        broken.write_bytes(broken.read_bytes()[:-30])
        with pytest.raises(
            ValueError, match=r"reading stopped at row 1 of file 2 of 3 \(.*\); the same command goes on"
        ):
            prepare([f"hf:{dataset}"], out)
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(
            ValueError, match=r"reading datasets needs the extra 'data'; pip install 'remanence\[data\]'"
        ):
            prepare([f"hf:{dataset}"], out)


class TestLimits:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_first_documents_that_have_room(self, dataset, tmp_path, workers):
        """Of files and streams, begun anew or after another limit."""
        texts, sizes = flat(TEXTS), np.cumsum([len(text.encode()) + 1 for text in flat(TEXTS)])
        for kind, source in (("files", str(dataset)), ("stream", f"hf:{dataset}")):
            kept = tmp_path / f"kept-{kind}"
            for tokens, number in ((900, None), (2000, 12), (int(sizes[40]), 99), (int(sizes[40]) - 1, None)):
                limits = {"max_tokens": tokens, "max_documents": number, "shard_tokens": 250}
                fresh = tmp_path / f"{kind}-{tokens}-{number}"
                room = min(int(np.searchsorted(sizes, tokens or 10**9, "right")), number or 10**9)
                for out in (fresh, kept):
                    assert prepare([source], out, workers=workers, **limits)["documents"] == room
                assert content(fresh) == content(kept) and documents(fresh) == texts[:room]
            prepare([source], kept, workers=workers, shard_tokens=250)
            assert documents(kept) == texts

    def test_wrong_limits(self, dataset, tmp_path):
        for name in ("max_tokens", "max_documents", "workers"):
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: expected at least 1, got 0"):
                prepare([dataset], tmp_path / "out", **{name: 0})


@pytest.mark.slow
@pytest.mark.parametrize(("prefix", "workers"), [("", 1), ("hf:", 2)])
def test_killed_at_any_moment_it_goes_on_to_the_same(tmp_path, prefix, workers):
    """Killed without warning, its other processes end too; started again the result is as if nothing had happened."""
    for number in range(2 if prefix else 40):
        table(
            tmp_path / "set" / f"{number:03d}.parquet", [f"{n} " * 150 for n in range(150 if prefix else 10)]
        )
    source, out = f"{prefix}{tmp_path / 'set'}", tmp_path / "out"
    whole = prepare([source], tmp_path / "whole", shard_tokens=4000)
    code = f"from remanence.data import prepare; prepare([{source!r}], {str(out)!r}, workers={workers}, shard_tokens=4000)"  # noqa: E501
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    running = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, env=environment, stderr=subprocess.PIPE
    )
    enough = CHANCE.randrange(1, 9)
    while len(list(out.glob("0*.json"))) < enough and running.poll() is None:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    said = running.communicate()[1]
    assert running.returncode == -signal.SIGKILL, said
    assert not (out / "tokens.json").exists(), "nothing says that it is whole"
    for _ in range(100):
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process is still there")
    assert prepare([source], out, workers=workers, shard_tokens=4000) == whole
    assert content(out) == content(tmp_path / "whole")
    assert not list(out.glob(".*")), "nothing is left behind"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a dataset needs: its revision, newer whenever it is asked for, its files, and their
    bytes.
    """

    folder, revisions = None, count(1)
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        if found := re.fullmatch(r"/api/datasets/some/set(?:/revision/(\w+))?", path):
            self.answer(
                {
                    "id": "some/set",
                    "sha": found[1] or f"{next(self.revisions):040d}",
                    "siblings": [],
                    "tags": [],
                }
            )
        elif found := re.fullmatch(r"/api/datasets/some/set/tree/\w+/?(.*)", path):
            inside = (self.folder / found[1]).glob("**/*" if "recursive=true" in self.path.lower() else "*")
            self.answer([self.entry(path) for path in sorted(inside)])
        elif (found := re.fullmatch(r"/datasets/some/set/resolve/(\w+)/(.+)", path)) and (
            self.folder / found[2]
        ).is_file():
            data = (self.folder / found[2]).read_bytes()
            headers = {"X-Repo-Commit": found[1], "ETag": hashlib.sha1(data).hexdigest()}
            if asked := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
                part = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
                self.answer(data[first : last + 1], 206, headers | part)
            else:
                self.answer(data, 200, headers)
        else:
            missing = "EntryNotFound" if "/some/set/" in path else "RepoNotFound"
            self.answer(b"", 404, {"X-Error-Code": missing})

    def do_HEAD(self):
        self.do_GET()

    def entry(self, path):
        name = path.relative_to(self.folder).as_posix()
        kind = "directory" if path.is_dir() else "file"
        return {
            "type": kind,
            "path": name,
            "size": path.stat().st_size,
            "oid": hashlib.sha1(name.encode()).hexdigest(),
        }

    def answer(self, body, code=200, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(dataset, tmp_path):
    """A hub of one dataset on this machine, and a way to run the command with it."""
    (dataset / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: data/**\n"
        "- config_name: large\n  data_files:\n  - split: train\n    path: data/**\n---\n"
    )
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("OneHub", (Hub,), {"folder": dataset, "revisions": count(1)})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
    }

    def run(*sources):
        """Several preparations in one process, as each start takes seconds: what they print, or their errors."""
        code = (
            "import sys\nfrom remanence import cli\n"
            "for source in sys.argv[2:]:\n"
            "    try:\n        cli.main(['data', 'prepare', source, '--out', sys.argv[1], '--workers', '2'])\n"
            "    except SystemExit as stop:\n        print('code', stop.code, flush=True)\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "out"), *sources]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout.splitlines(), done.stderr.splitlines()

    yield run
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_dataset_of_the_hub(hub, dataset, tmp_path):
    said, errors = hub(
        "hf:some/set:small", "hf:some/set", "hf:some/set:small:test", "hf:other/set", "hf:some/set:small"
    )
    assert "from 3 files" in said[0] and said[1:] == ["code 2"] * 3 + said[:1], errors
    assert documents(tmp_path / "out") == flat(TEXTS)
    assert (
        "Config name is missing. Please pick one among the available configs: ['small', 'large']" in errors[0]
    )
    assert "Bad split: test. Available splits: ['train']" in errors[1]
    assert (
        errors[2]
        == "remanence: error: hf:other/set: no such dataset or folder, or a private one: then `hf auth login` first"
    )
    assert len(errors) == 3
    notes = [json.loads(path.read_text())["from"]["revision"] for path in (tmp_path / "out").glob("0*.json")]
    assert notes == [f"{1:040d}"] * 3, "the hub has newer revisions, but this was begun with the first"


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as stop:
        cli.main(["data", "prepare", "hf:some/set", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert said.startswith("remanence: error: hf:some/set: the hub cannot be reached (")
    assert (
        "run `hf download some/set --repo-type dataset --local-dir FOLDER`, and give FOLDER instead" in said
    )
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_did(tmp_path, capsys):
    table(tmp_path / "t.parquet", ["abc", None, "de", "f"])
    cli.main(
        [
            "data",
            "prepare",
            str(tmp_path / "t.parquet"),
            "--out",
            str(tmp_path / "out"),
            "--max-documents",
            "2",
        ]
    )
    assert capsys.readouterr().out.endswith(
        "out: 7 tokens in 2 documents from 1 files; 1 without a text skipped\n"
    )
