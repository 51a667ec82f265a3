"""A text of one's own: what is held out of it, how it is cut for the rows of a run, and what the run ends with."""

import json
import lzma
import math

import numpy as np
import pytest
import torch

from remanence import Model
from remanence.data import prepare
from remanence.data.own import HELD, LEAST, OwnText, OwnTokens, read_text
from remanence.recipes import load_recipe
from remanence.tokenizers.tokens import ByteTokenizer
from remanence.train import override, resolve_config, text
from tests.train.runs import losses

SMALL = (
    "--init_from=none", "--model.dim=16", "--model.num_layers=1", "--model.pattern=lmm", "--model.heads=2",
    "--device=cpu", "--model.memory.head_dim=8", "--data.length=64", "--log_every=1",
)  # fmt: skip


@pytest.fixture
def book(tmp_path):
    draw = np.random.default_rng(0)
    words = ["whale", "ship", "précis", "sea", "captain", "nobody", "harbor", "silent"]
    path = tmp_path / "book.txt"
    path.write_text(" ".join(draw.choice(words, 2000)), encoding="utf-8")
    return path


class TestHeldOut:
    def test_the_last_tenth_of_one_file_from_the_start_of_a_character(self, tmp_path):
        data = ("é" * 5000).encode()
        (tmp_path / "a.txt").write_bytes(data[:-1] + b"x")  # the border would be inside a character
        found = read_text("text", str(tmp_path / "a.txt"))
        assert found.cut and b"".join(found.train + found.held) == data[:-1] + b"x"
        assert len(found.held[0]) in (1000, 1001) and found.held[0].startswith("é".encode())

    def test_the_last_documents_of_several_and_never_more_than_is_soon_measured(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"a" * 9000)
        (tmp_path / "b.txt").write_bytes(b"b" * 1000)
        found = read_text("text", str(tmp_path))
        assert found == OwnText([b"a" * 9000], [b"b" * 1000], False)
        (tmp_path / "b.txt").write_bytes(b"b" * (20 * HELD))
        assert len(read_text("text", str(tmp_path)).held[0]) == HELD

    @pytest.mark.parametrize(
        ("content", "why"),
        [(b"", "which is empty"), (b"too short", f"at least {LEAST:,} bytes, got 9 in")],
    )
    def test_a_text_without_enough_in_it_is_refused(self, tmp_path, content, why):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=f"text: expected a text of .*{why}"):
            read_text("text", str(tmp_path / "a.txt"))

    def test_a_prepared_folder_is_refused_with_what_reads_it(self, tmp_path, book):
        prepare([str(book)], tmp_path / "tokens")
        with pytest.raises(ValueError, match=r"got the prepared folder .*--data\.kind=documents"):
            read_text("text", str(tmp_path / "tokens"))

    def test_the_measure_is_that_of_one_forward_over_all_of_it(self, book):
        torch.manual_seed(1)
        model = Model(override(load_recipe("text"), dict(each[2:].split("=") for each in SMALL)).model).eval()
        found = read_text("text", str(book))
        told = text.held_out(model, ByteTokenizer(), found)
        whole = b"".join(found.train)[-text.BEFORE :] + found.held[0]
        tokens = torch.tensor([list(whole)])
        with torch.no_grad():
            logits, _ = model(tokens[:, :-1])
        nats = torch.nn.functional.cross_entropy(logits[0].double(), tokens[0, 1:], reduction="none")
        size = len(found.held[0])
        assert told.bytes == size
        assert told.model == pytest.approx(float(nats[-size:].sum()) / math.log(2) / size, rel=1e-5)
        packed = [
            len(lzma.compress(part, preset=9)) for part in (found.train[0] + found.held[0], found.train[0])
        ]
        assert told.xz_after == 8 * (packed[0] - packed[1]) / size
        assert told.xz_alone == 8 * len(lzma.compress(found.held[0], preset=9)) / size


class TestTokens:
    def test_stretches_are_the_text_in_order_at_least_one_for_each_row_and_none_longer_than_its_share(self):
        found = OwnText([b"a" * 700, b"b" * 11, b"c" * 301], [b"x"], True)
        for rows in (1, 2, 5, 8):
            tokens = OwnTokens(found, ByteTokenizer(), rows)
            pieces = [tokens.piece(index, 0, 10**6) for index in range(len(tokens))]
            assert len(tokens) >= rows and max(map(len, pieces)) <= max(1, 1014 // rows)
            joined = bytes(
                np.where(np.concatenate(pieces) == 256, 10, np.concatenate(pieces)).astype(np.uint8)
            )
            assert joined == b"a" * 700 + b"\n" + b"b" * 11 + b"\n" + b"c" * 301  # the last one goes on
            assert not any(len(set(piece.tolist()) - {256}) > 1 for piece in pieces)  # none crosses a border

    def test_other_texts_and_other_borders_have_other_digests(self):
        found = [OwnText(parts, [b"x"], True) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"ab", b"d"])]
        assert len({OwnTokens(each, ByteTokenizer()).digest for each in found}) == 3


class TestSized:
    def fit_time_budget(self, path, monkeypatch, rate, **changes):
        monkeypatch.setattr(text, "measure_rate", lambda config, device: rate)
        return text.fit_time_budget(
            override(load_recipe("text"), {"data.path": str(path), "init_from": "none", **changes})
        )

    def test_steps_are_what_there_is_time_for_but_a_few_readings_at_most(self, book, monkeypatch):
        step, size = 4 * 512, read_text("text", str(book)).size
        slow = self.fit_time_budget(book, monkeypatch, 30 * step / text.SECONDS)
        assert slow.steps == 30 or slow.steps == text.READINGS * size // step < 30
        assert self.fit_time_budget(book, monkeypatch, 1e9).steps == max(
            text.FEWEST, text.READINGS * size // step
        )
        assert self.fit_time_budget(book, monkeypatch, 1e-3).steps == text.FEWEST

    def test_long_documents_are_carried_and_short_ones_packed(self, book, tmp_path, monkeypatch):
        assert self.fit_time_budget(book, monkeypatch, 1.0).carry
        lines = tmp_path / "lines.jsonl"
        lines.write_text("".join(json.dumps({"text": f"line {n} " * 10}) + "\n" for n in range(200)))
        assert not self.fit_time_budget(lines, monkeypatch, 1.0).carry

    def test_processes_that_would_time_their_own_are_refused(self, book, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="steps: expected --steps=N with several processes"):
            self.fit_time_budget(book, monkeypatch, 1.0)


class TestCommand:
    def test_a_text_becomes_a_model_and_the_run_ends_with_bits_per_byte_beside_xz(
        self, command, book, tmp_path
    ):
        out = tmp_path / "run"
        said = command("train", "--text", book, "--out", out, *SMALL, "--steps=4")
        told = json.loads((out / "held-out.json").read_text())
        assert f"held out: {told['model']:.3f} bits per byte of the last {told['bytes']:,} bytes" in said
        assert f"xz -9 {told['xz_after']:.3f} after the text before it, {told['xz_alone']:.3f} alone" in said
        assert sorted(losses(out)) == [1, 2, 3, 4]
        assert Model.load(out / "model").config.dim == 16

    def test_a_run_that_goes_on_has_the_losses_of_one_that_never_stopped(self, command, book, tmp_path):
        command("train", "--text", book, "--out", tmp_path / "a", *SMALL, "--steps=4", "--save_every=2")
        command("train", "--text", book, "--out", tmp_path / "b", *SMALL, "--steps=4", "--save_every=2")
        run = tmp_path / "b"
        for path in (run / "checkpoints" / "00000004").iterdir():
            path.unlink()
        (run / "checkpoints" / "00000004").rmdir()
        said = command("train", "--out", run, "--resume")
        assert losses(run) == losses(tmp_path / "a") and "held out: " in said

    def test_short_documents_are_packed(self, command, tmp_path):
        lines = tmp_path / "lines.jsonl"
        lines.write_text("".join(json.dumps({"text": f"line {n} " * 4}) + "\n" for n in range(400)))
        said = command(
            "train",
            "text",
            f"--data.path={lines}",
            "--out",
            tmp_path / "run",
            *SMALL,
            "--carry=false",
            "--steps=2",
        )
        assert "held out: " in said

    def test_what_cannot_be_is_one_line_and_leaves_nothing(self, command, book, tmp_path):
        out = tmp_path / "run"
        assert "--text: expected the recipe text" in command(
            "train", "recall", "--text", book, "--out", out, code=2
        )
        assert "data.path: expected a text file" in command("train", "--out", out, code=2)
        assert "which is not there" in command("train", "--text", tmp_path / "no", "--out", out, code=2)
        book.write_text("")
        assert "is empty" in command("train", "--text", book, "--out", out, code=2)
        assert not out.exists()


def test_the_recipe_begins_from_the_model_that_comes_with_the_package(book):
    config = resolve_config(override(load_recipe("text"), {"data.path": str(book)}))
    assert config.init_from.endswith("remanence-small") and config.model.vocab_size == 257 and config.carry


class TestRefusals:
    def test_too_few_documents_name_the_flags_that_help(self, command, book, tmp_path):
        prepare([str(book)], tmp_path / "tokens")
        said = command(
            "train",
            "books_small",
            f"--data.path={tmp_path / 'tokens'}",
            "--out",
            tmp_path / "run",
            "--device=cpu",
            code=2,
        )
        assert "expected at least 8 documents, one for each row, got 1; --batch=1 " in said
        assert "remanence train --text FILE" in said and "--data.kind=packed --carry=false" in said

    def test_carrying_what_does_not_go_on_names_the_flags_that_help(self, command, tmp_path):
        said = command("train", "books_small", "--data.kind=packed", "--out", tmp_path / "run", code=2)
        assert "'documents' or 'text'" in said and "got 'packed'; --carry=false carries nothing" in said
