"""A prepared folder is of one corpus, and gives the tokens that were written or a line that says why not."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from remanence.data import Documents, Packed, Tokens, prepare, shards
from remanence.data.sources import File
from remanence.io.files import locked, read_json, write_json
from remanence.train.sources import corpus

V1 = Path(__file__).parents[1] / "fixtures" / "v1" / "corpus"
CHANCE = random.Random(0)
TEXTS = ["".join(CHANCE.choices("abcdef ", k=CHANCE.randrange(1, 400))) for _ in range(24)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(shards, "BLOCK", 256)


@pytest.fixture
def texts(tmp_path):
    """Three files of eight documents each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[number::3]]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def out(texts, tmp_path):
    prepare([texts], tmp_path / "out")
    return tmp_path / "out"


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def read_all(folder):
    """Every token by every way that training reads, and the tokenizer."""
    data = Tokens(folder)
    packed, documents = Packed(data, 16, 2), Documents(data, 16, 2)
    found = [torch.from_numpy(data[number].astype(np.int64)) for number in range(len(data))]
    found += [packed.step(step).tokens[0] for step in range(packed.per_epoch)]
    found += [documents.step(step).tokens.flatten() for step in range(40)]
    found += corpus(packed)
    return torch.cat(found).tolist(), data.tokenizer.encode("so it is"), data.tokenizer.end


def damage(folder, chance):
    """One file, or two, as no preparation leaves them."""
    names = sorted(os.listdir(folder))
    path, other = (folder / name for name in chance.sample(names, 2))
    size = path.stat().st_size
    kind = chance.choice(["flip", "truncate", "extend", "delete", "swap"])
    if kind == "flip":
        flip(path, chance.randrange(size), chance.randrange(8))
    elif kind == "truncate":
        os.truncate(path, chance.randrange(size))
    elif kind == "extend":
        path.write_bytes(path.read_bytes() + chance.choice([b"\n", b"\0", chance.randbytes(8)]))
    elif kind == "delete":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    return f"{kind} {path.name} {other.name}"


@pytest.mark.parametrize("cases", [50, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_damage_is_told_in_a_line_or_changes_nothing(out, tmp_path, cases):
    wanted, chance, told = read_all(out), random.Random(cases), 0
    for _ in range(cases):
        shutil.copytree(out, tmp_path / "copy")
        what = damage(tmp_path / "copy", chance)
        try:
            found = read_all(tmp_path / "copy")
        except ValueError as error:
            found, told = str(error), told + 1
        line = isinstance(found, str) and "\n" not in found and str(tmp_path / "copy") in found
        assert line or found == wanted, (what, found)
        shutil.rmtree(tmp_path / "copy")
    assert told > cases / 2


def test_every_byte_of_a_shard_is_held_to_its_digest(out):
    path = out / "00001.bin"
    for place in range(0, path.stat().st_size, 97):
        flip(path, place)
        data = Tokens(out)
        block = place // shards.BLOCK * shards.BLOCK // 2
        if block:
            assert len(data.shards[1][:block]) == block, "what comes before it can be read"
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"00001\.bin: damaged: .* remove it and prepare the data again"
            ):
                data.shards[1][place // 2 : place // 2 + 1]
        flip(path, place)
        assert len(data.shards[1][:]) == len(data.shards[1])


def test_other_borders_and_another_end_are_not_taken_for_the_prepared_ones(out):
    """Both can be read: only the digests tell."""
    ends, settings = out / "00000.ends", out / "tokenizer_config.json"
    before = ends.read_bytes()
    flip(ends, 0)
    with pytest.raises(ValueError, match=r"00000\.ends: damaged: its content is not what was prepared"):
        Tokens(out)
    ends.write_bytes(before)
    settings.write_text(settings.read_text().replace("<|end|>", "a"))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: damaged: .* prepare the data again"):
        _ = Tokens(out).tokenizer


def test_a_damaged_shard_is_made_again_once_it_is_removed(texts, out, monkeypatch):
    before = Tokens(out).digest
    flip(out / "00001.bin", 300)
    (out / "00001.bin").unlink()
    opened, real = [], File.documents
    monkeypatch.setattr(File, "documents", lambda file, *rest: opened.append(file) or real(file, *rest))
    prepare([texts], out)
    assert Tokens(out).digest == before and len(opened) == 1
    flip(out / "00002.json", 30)
    prepare([texts], out)
    assert Tokens(out).digest == before and len(opened) == 2, "a damaged note marks nothing"


@pytest.mark.parametrize("name", ["00002.bin", "00002.ends"])
def test_cutting_a_shard_hides_no_damage(texts, out, name):
    """The new digests are those of what was prepared, never of what has become of it."""
    first = sum(Tokens(out).lengths[:16])
    flip(out / name, 8)
    with pytest.raises(ValueError, match=f"{name}: damaged"):
        prepare([texts], out, max_tokens=int(first) + 40 + len(TEXTS[2]))
    prepare([texts], out)
    assert len(read_all(out)[0]), "and is made again"


def test_the_digest_is_the_corpus_s(texts, out, tmp_path):
    digest = Tokens(out).digest
    prepare([texts], tmp_path / "again", workers=2)
    assert Tokens(tmp_path / "again").digest == digest
    others = {digest}
    for number, changes in enumerate(({"max_documents": 23}, {"max_documents": 22})):
        prepare([texts], tmp_path / f"{number}", **changes)
        others.add(Tokens(tmp_path / f"{number}").digest)
    flip(texts / "0.jsonl", 12)
    prepare([texts], tmp_path / "changed")
    assert len(others | {Tokens(tmp_path / "changed").digest}) == 4
    prepare([texts], tmp_path / "0", max_documents=22, overwrite=True)


class TestFoldersOfEarlierVersions:
    @pytest.fixture
    def old(self, tmp_path):
        shutil.copytree(V1, tmp_path / "old")
        return tmp_path / "old"

    def test_they_are_read_and_their_tokens_are_in_range(self, old):
        data = Tokens(old)
        assert data.digest is None and len(data) == 4
        data.verify()
        flip(old / "00000.bin", 101, 3)
        with pytest.raises(ValueError, match=r"00000\.bin: damaged: expected tokens below 257, got "):
            Tokens(old)[0]

    def test_they_are_replaced_only_when_asked(self, texts, old):
        with pytest.raises(
            ValueError, match="old: holds another corpus, prepared by an earlier version; --over"
        ):
            prepare([texts], old)
        assert len(Tokens(old)) == 4
        prepare([texts], old, overwrite=True)
        assert len(Tokens(old)) == 24


INDEX = {"format": shards.FORMAT, "schema": 1, "vocabulary": 257, "dtype": "<u2"}
SHARD = {"name": "00000", "tokens": 3, "documents": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../00000"},
        {"name": "/etc/00000"},
        {"name": "00000/../00000"},
        {"name": "0"},
        {"name": ""},
        {"name": "00000\n"},
        {"name": "\u0660" * 5},
        {"name": 0},
        {"tokens": -3},
        {"tokens": 3.0},
        {"tokens": True},
        {"tokens": 10**30},
        {"documents": -1},
        {"documents": True},
        {"documents": None},
    ],
)
def test_descriptions_that_cannot_be_true(tmp_path, change):
    (tmp_path / "out").mkdir()
    for folder in (tmp_path, tmp_path / "out"):
        np.arange(3, dtype="<u2").tofile(folder / "00000.bin")
        np.array([3], "<i8").tofile(folder / "00000.ends")
    write_json(tmp_path / "out" / "tokens.json", {**INDEX, "shards": [SHARD]})
    assert Tokens(tmp_path / "out")[0].tolist() == [0, 1, 2]
    write_json(tmp_path / "out" / "tokens.json", {**INDEX, "shards": [{**SHARD, **change}]})
    with pytest.raises(ValueError, match=r"tokens\.json: damaged: it does not describe the shards; prepare"):
        Tokens(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": True},
        {"vocabulary": 0},
        {"vocabulary": -5},
        {"vocabulary": 10**30, "dtype": "<u4"},
        {"schema": True},
        {"schema": 3},
        {"schema": [1]},
        {"tokenizer": {"../tokenizer.json": "0"}},
        {"tokenizer": ["tokenizer.json"]},
        {"shards": [{**SHARD, "blocks": [], "ends": ""}], "schema": 2},
        {"shards": [{**SHARD, "blocks": [3], "ends": ""}], "schema": 2},
        {"shards": [{**SHARD, "blocks": ["0"], "ends": None}], "schema": 2},
        {"shards": [SHARD], "schema": 2},
    ],
)
def test_indices_that_cannot_be_true(tmp_path, change):
    write_json(tmp_path / "tokens.json", {**INDEX, "shards": [SHARD], **change})
    with pytest.raises(
        ValueError, match=r"tokens\.json: (damaged|expected remanence-tokens of schema 1 to 2)"
    ):
        Tokens(tmp_path)


@pytest.mark.parametrize("ends", [[2, 1, 3], [-1, 3], [2**63 - 1, -2, 3], [3, 3, 2], [4, 3]])
def test_documents_that_do_not_follow_each_other(tmp_path, ends):
    np.arange(3, dtype="<u2").tofile(tmp_path / "00000.bin")
    np.array(ends, "<i8").tofile(tmp_path / "00000.ends")
    write_json(tmp_path / "tokens.json", {**INDEX, "shards": [{**SHARD, "documents": len(ends)}]})
    with pytest.raises(ValueError, match=r"00000\.ends: damaged: expected the ends of documents, in order"):
        Tokens(tmp_path)


class TestOneCorpus:
    def content(self, folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    @pytest.mark.parametrize("stopped", [False, True])
    def test_another_one_is_refused(self, texts, tmp_path, monkeypatch, stopped):
        """Whether the one that is there is complete or not; the folder stays as it is."""
        out, real = tmp_path / "out", File.documents

        def stopping(file, *rest):
            if stopped and file.path.name == "2.jsonl":
                raise KeyboardInterrupt
            return real(file, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(File, "documents", stopping)
            with pytest.raises(KeyboardInterrupt) if stopped else monkeypatch.context():
                prepare([texts], out)
        before = self.content(out)
        assert ("tokens.json" in before) != stopped
        (tmp_path / "emma.txt").write_text("Emma Woodhouse, handsome, clever, and rich")
        (tmp_path / "own.json").write_text((V1 / "tokenizer.json").read_text() + " ")
        there = "out: holds another corpus, of 0.jsonl, 1.jsonl, 2.jsonl"
        for sources, changes, message in (
            ([tmp_path / "emma.txt"], {}, there),
            ([texts, tmp_path / "emma.txt"], {}, there),
            ([texts / "0.jsonl"], {}, there),
            ([texts], {"field": "body"}, f"{there}, with --field text;"),
            ([texts], {"tokenizer": tmp_path / "own.json"}, f"{there}, with another tokenizer;"),
        ):
            with pytest.raises(ValueError, match=message + r".*--overwrite replaces it, another --out keeps"):
                prepare(sources, out, **changes)
            assert self.content(out) == before
        prepare([texts], out, max_documents=5)
        prepare([texts], out)
        assert len(Tokens(out)) == 24, "the same one goes on, with any limits"
        flip(texts / "1.jsonl", 12)
        with pytest.raises(ValueError, match=rf"{there}, before 1\.jsonl changed;"):
            prepare([texts], out)

    def test_another_end_of_documents_makes_another_one(self, texts, tmp_path):
        """The same tokenizer.json, with other settings beside it."""
        pytest.importorskip("tokenizers")
        own, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
        tokenizer = read_json(V1 / "tokenizer.json")
        tokenizer["decoder"]["trim_offsets"] = False
        write_json(own, tokenizer)
        write_json(settings, {"eos_token": "<|end|>"})
        prepare([texts], tmp_path / "out", tokenizer=own)
        prepare([texts], tmp_path / "out", tokenizer=own)
        write_json(settings, {"eos_token": "a"})
        with pytest.raises(
            ValueError, match=r"holds another corpus, .*, with another tokenizer; --overwrite"
        ):
            prepare([texts], tmp_path / "out", tokenizer=own)

    def test_overwriting_leaves_nothing_of_it(self, texts, out, tmp_path):
        """As if it had been prepared into a new folder."""
        (tmp_path / "emma.txt").write_text("Emma Woodhouse, handsome, clever, and rich")
        prepare([tmp_path / "emma.txt"], out, overwrite=True)
        prepare([tmp_path / "emma.txt"], tmp_path / "new")
        assert self.content(out) == self.content(tmp_path / "new")

    def test_what_made_nothing_holds_nothing(self, texts, tmp_path):
        with pytest.raises(ValueError, match="--field names another"):
            prepare([texts], tmp_path / "out", field="body")
        prepare([texts], tmp_path / "out")
        assert len(Tokens(tmp_path / "out")) == 24

    @pytest.mark.parametrize(
        "name", ["thesis.tex", "00000.bin", "tokenizer.json", "tokens.json", "prepare.json"]
    )
    def test_a_folder_with_files_by_others_is_left_alone(self, texts, tmp_path, name):
        """Also with files that are named as ours are."""
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / name).write_text('{"format": "mine"}')
        for overwrite in (False, True):
            with pytest.raises(
                ValueError, match=rf"home.*(got {name} in it|another file); choose another --out"
            ):
                prepare([texts], tmp_path / "home", overwrite=overwrite)
        assert self.content(tmp_path / "home") == {name: b'{"format": "mine"}'}

    def test_files_by_others_are_never_deleted(self, texts, out, tmp_path):
        (out / "notes.md").write_text("mine")
        (out / ".hidden").write_text("mine")
        with pytest.raises(ValueError, match=r"got notes\.md in it; choose another --out"):
            prepare([texts / "0.jsonl"], out, overwrite=True)
        assert len(Tokens(out)) == 24
        (out / "notes.md").unlink()
        prepare([texts / "0.jsonl"], out, overwrite=True)
        assert len(Tokens(out)) == 8 and (out / ".hidden").read_text() == "mine"

    def test_one_preparation_at_a_time(self, texts, out):
        message = "out: in use by another preparation"
        with locked(out, "another preparation"), pytest.raises(ValueError, match=message):
            prepare([texts], out)
        prepare([texts], out, workers=2)

    def test_what_killed_ones_left_is_removed(self, texts, out):
        names = (".00007.bin.0123456789abcdef.tmp", ".tokens.json.0123456789abcdef.tmp", ".other.tmp")
        left = [out / name for name in names]
        for folder in left:
            folder.mkdir()
            (folder / "half").write_text("")
        prepare([texts], out)
        assert [folder.exists() for folder in left] == [False, False, True]


def test_the_command_verifies(command, texts, out):
    said = command("data", "verify", out)
    data = Tokens(out)
    assert f"{data.lengths.sum():,} tokens in 24 documents, as prepared, digest {data.digest}" in said
    assert "4 documents, in order; it has no digests" in command("data", "verify", V1)
    flip(out / "00002.bin", 700)
    assert "00002.bin: damaged" in command("data", "verify", out, code=2)
    assert "expected a folder made by" in command("data", "verify", code=2)
    assert "expected a folder made by" in command("data", "verify", texts, code=2)


def test_the_command_overwrites(command, texts, out):
    assert "--overwrite replaces it" in command("data", "prepare", texts / "0.jsonl", "--out", out, code=2)
    assert "8 documents" in command("data", "prepare", texts / "0.jsonl", "--out", out, "--overwrite")
    assert "--out: expected a folder for the shards, got none" in command("data", "prepare", texts, code=2)


def test_the_index_is_sealed(out):
    index = read_json(out / "tokens.json")
    assert index["schema"] == 2 and sorted(index["tokenizer"]) == sorted(shards.TOKENIZER)
    text = (out / "tokens.json").read_text()
    (out / "tokens.json").write_text(text.replace('"vocabulary": 257', '"vocabulary": 258'))
    with pytest.raises(ValueError, match=r"tokens\.json: damaged, or changed by hand"):
        Tokens(out)
