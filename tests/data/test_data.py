"""Every document comes through, in tokens, with its borders; every token is read once an epoch; any step can be made
again.
"""

import gzip
import json
import lzma

import numpy as np
import pytest
import torch

from remanence.data import Documents, Packed, Tokens, prepare
from remanence.data.sources import File
from remanence.io.files import read_json, write_json
from remanence.tokenizers.tokens import ByteTokenizer

TEXTS = [
    "Call me Ishmael.",
    "é" * 40,
    "x",
    "It was the best of times, it was the worst of times. " * 6,
    "end\n",
]


@pytest.fixture
def corpus(tmp_path):
    """The texts in five kinds of file, one of them with two documents and one with none."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "b.txt.xz").write_bytes(lzma.compress(TEXTS[1].encode()))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[2:4]) + "\n")
    (folder / "deep" / "d.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": TEXTS[4]}).encode()))
    (folder / "e.txt").write_text("")
    (folder / "ignored.bin").write_bytes(b"\0")
    return folder


def read_all(data):
    return sorted(ByteTokenizer().decode(document) for document in (data[i] for i in range(len(data))))


@pytest.mark.parametrize("workers", [1, 2])
def test_every_document_comes_through(corpus, tmp_path, workers):
    told = prepare([corpus], tmp_path / "out", workers=workers)
    data = Tokens(tmp_path / "out")
    assert told == {
        "files": 5,
        "documents": 5,
        "tokens": sum(len(text.encode()) + 1 for text in TEXTS),
        "nulls": 0,
    }
    assert read_all(data) == sorted(TEXTS)
    assert all(data[i][-1] == 256 for i in range(5)), "each ends with the end of a document"
    assert data.lengths.sum() == told["tokens"]


def test_an_interrupted_preparation_goes_on(corpus, tmp_path, monkeypatch):
    out, calls = tmp_path / "out", []
    real = File.documents

    def stopping(file, *rest):
        calls.append(file.path.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(file, *rest)

    monkeypatch.setattr(File, "documents", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare([corpus], out)
    assert not (out / "tokens.json").exists(), "nothing says that it is whole"
    prepare([corpus], out)
    assert len(calls) == 3 + 3, "two were done already"
    assert read_all(Tokens(out)) == sorted(TEXTS)
    (corpus / "a.txt").write_text("changed")
    prepare([corpus], out, overwrite=True)
    assert len(calls) == 7 and "changed" in read_all(Tokens(out)), "only what changed is done again"
    (out / "00001.bin").unlink()
    prepare([corpus], out)
    assert len(calls) == 8 and len(read_all(Tokens(out))) == 5, "and what is lost"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', r"c\.jsonl: line 2: expected a text in 'text'"),
        ('{"text": "a"}\n{"text": 3}\n', r"c\.jsonl: line 2: expected a text in 'text'"),
        ('{"text": "a"}\n{broken\n', r"c\.jsonl: line 2: expected a JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / "c.jsonl"], tmp_path / "out")


def test_bad_sources_and_damaged_shards(corpus, tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected text, jsonl, parquet or FASTA files"):
        prepare([tmp_path / "empty"], tmp_path / "out")
    (tmp_path / "x.txt.xz").write_bytes(lzma.compress(b"abc" * 100)[:-9])
    with pytest.raises(ValueError, match=r"x\.txt\.xz: damaged"):
        prepare([tmp_path / "x.txt.xz"], tmp_path / "out")
    with pytest.raises(ValueError, match="data: expected a folder made by"):
        Tokens(tmp_path)
    (tmp_path / "no.txt").write_text("")
    prepare([tmp_path / "no.txt"], tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected at least one token in .*, got an empty corpus"):
        Tokens(tmp_path / "none")
    prepare([corpus], tmp_path / "out")
    shard = tmp_path / "out" / "00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"00000\.bin: damaged: its size does not fit the index"):
        Tokens(tmp_path / "out")
    shard.unlink()
    with pytest.raises(ValueError, match=r"00000\.bin: no such file; prepare the data again"):
        Tokens(tmp_path / "out")


def test_zstandard(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "z.txt.zst").write_bytes(zstandard.compress(b"abc"))
    prepare([tmp_path / "z.txt.zst"], tmp_path / "out")
    assert Tokens(tmp_path / "out")[0].tolist() == [97, 98, 99, 256]
    lines = [zstandard.compress(b'{"text": "a"}\n' * count) for count in (3, 40_000)]
    (tmp_path / "z.jsonl.zst").write_bytes(b"".join(lines))
    assert prepare([tmp_path / "z.jsonl.zst"], tmp_path / "lines")["documents"] == 40_003, "of both frames"
    (tmp_path / "z.jsonl.zst").write_bytes(b"".join(lines)[:-3])
    with pytest.raises(ValueError, match=r"z\.jsonl\.zst: damaged \(it ends in the middle\)"):
        prepare([tmp_path / "z.jsonl.zst"], tmp_path / "cut")


def test_invalid_utf8_is_read_as_bytes(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"a\xff\xfeb")
    prepare([tmp_path / "x.txt"], tmp_path / "out")
    assert Tokens(tmp_path / "out")[0].tolist() == [97, 255, 254, 98, 256]


@pytest.fixture
def data(tmp_path):
    """Forty documents of random lengths; token i of document d tells both, so that a stray one is seen."""
    chance = np.random.default_rng(0)
    lengths = [1, 2, *chance.integers(3, 90, 38)]
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"text": chr(33 + d) * int(n)}) + "\n" for d, n in enumerate(lengths))
    )
    prepare([tmp_path / "t.jsonl"], tmp_path / "out")
    return Tokens(tmp_path / "out")


class TestPacked:
    def test_an_epoch_reads_every_token_once(self, data):
        packed = Packed(data, length=16, batch=4)
        seen = torch.cat([packed.step(n).tokens[0] for n in range(packed.per_epoch)])
        whole = np.bincount(np.concatenate([data[i] for i in range(len(data))]), minlength=257)
        missing = whole - np.bincount(seen.numpy(), minlength=257)
        assert (missing >= 0).all() and missing.sum() < 4 * 16 + 1

    def test_borders_and_targets(self, data):
        """Inside a document the target is the next token; at its end and where a row ends nothing crosses."""
        packed = Packed(data, length=16, batch=4)
        for n in (0, 3, packed.per_epoch, 2 * packed.per_epoch + 1):
            batch = packed.step(n)
            tokens, targets = batch.tokens[0], batch.targets[0]
            assert (
                batch.offsets[0] == 0
                and batch.offsets[-1] == 64
                and set(range(0, 65, 16)) <= set(batch.offsets)
            )
            for a, b in zip(batch.offsets, batch.offsets[1:], strict=False):
                assert a < b
                inside = tokens[a:b]
                assert len(set(inside.tolist()) - {256}) <= 1, "one document between two borders"
                assert 256 not in inside[:-1], "whose end is at its end"
                assert torch.equal(targets[a : b - 1], tokens[a + 1 : b])
                assert (
                    targets[b - 1] == -100 if tokens[b - 1] == 256 else targets[b - 1] in (tokens[b - 1], 256)
                )

    def test_any_step_again_and_every_epoch_anew(self, data):
        one, other = Packed(data, 16, 4, seed=3), Packed(data, 16, 4, seed=3)
        for n in (9, 0, 5):
            assert torch.equal(one.step(n).tokens, other.step(n).tokens)
        assert not torch.equal(one.step(0).tokens, one.step(one.per_epoch).tokens)
        assert not torch.equal(one.step(0).tokens, Packed(data, 16, 4, seed=4).step(0).tokens)

    def test_two_processes_read_what_one_reads(self, data):
        one = Packed(data, 16, 4)
        two = [Packed(data, 16, 2, rank=rank, world_size=2) for rank in range(2)]
        for n in range(one.per_epoch):
            assert torch.equal(one.step(n).tokens, torch.cat([each.step(n).tokens for each in two], 1))

    def test_too_little_is_told(self, data):
        with pytest.raises(ValueError, match=r"data: expected 40,961 tokens for one step, got"):
            Packed(data, 1024, 40)


class TestDocuments:
    def test_rows_read_documents_from_beginning_to_end(self, data):
        order = Documents(data, length=16, batch=3)
        texts = {ByteTokenizer().decode(data[i]) for i in range(len(data))}
        running, finished = [""] * 3, []
        for n in range(60):
            batch = order.step(n)
            for row in range(3):
                inputs = batch.tokens[row][batch.mask[row]]
                if batch.begins[row]:
                    finished += [running[row]] if running[row] else []
                    running[row] = ""
                running[row] += ByteTokenizer().decode(inputs.tolist())
                asked = batch.targets[row] >= 0
                assert torch.equal(batch.targets[row][asked][:-1], inputs[1:]), "targets are the next tokens"
                assert not (batch.targets[row][~batch.mask[row]] >= 0).any()
        assert len(finished) > 20 and set(finished) <= texts

    def test_any_step_again_on_any_number_of_processes(self, data):
        one = Documents(data, 16, 4)
        two = [Documents(data, 16, 2, rank=rank, world_size=2) for rank in range(2)]
        for n in (0, 7, 150, 31):
            for part in ("tokens", "targets", "mask", "begins"):
                parts = torch.cat([getattr(each.step(n), part) for each in two])
                assert torch.equal(getattr(one.step(n), part), parts)

    def test_a_document_longer_than_anything(self, tmp_path):
        (tmp_path / "t.txt").write_text("ab" * 5000)
        prepare([tmp_path / "t.txt"], tmp_path / "out")
        order = Documents(Tokens(tmp_path / "out"), 64, 1)
        pieces = -(-10_000 // 64)
        assert sum(int((order.step(n).targets >= 0).sum()) for n in range(pieces)) == 10_000
        assert [n for n in range(3 * pieces) if order.step(n).begins[0]] == [0, pieces, 2 * pieces], (
            "and again, anew"
        )

    def test_every_document_is_read_to_its_end_whatever_the_others_lengths(self, tmp_path):
        lengths = (10, 50, 500, 1000)
        for length in lengths:
            (tmp_path / f"{length}.txt").write_text("x" * length)
        prepare([tmp_path / f"{length}.txt" for length in lengths], tmp_path / "out")
        order = Documents(Tokens(tmp_path / "out"), 10, 4)
        furthest = [0] * 4
        for n in range(250):
            for row in range(4):
                document, piece = order.locate(row, n)
                furthest[document] = max(furthest[document], piece)
        assert furthest == [length // 10 - (length % 10 == 0) + 0 for length in lengths]

    def test_too_few_documents(self, data):
        with pytest.raises(
            ValueError, match="data: expected at least 50 documents, one for each row, got 40"
        ):
            Documents(data, 16, 50)


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": None},
        {"vocabulary": "257"},
        {"dtype": "<f4"},
        {"shards": None},
        {"shards": [{}]},
        {"shards": [3]},
    ],
)
def test_an_index_that_is_damaged(data, change):
    index = read_json(data.folder / "tokens.json")
    write_json(data.folder / "tokens.json", {**index, **change})
    with pytest.raises(ValueError, match=r"tokens.json: damaged: .*; prepare the data again"):
        Tokens(data.folder)
