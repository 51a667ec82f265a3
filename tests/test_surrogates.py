"""Texts with lone surrogates: bytes that are no UTF-8 stay these bytes, others become U+FFFD, everywhere alike."""

import io
import json
import os
import sys

import pytest
import torch
from models import model, pairs_tokenizer
from safetensors.torch import save_file

from remanence import Session
from remanence.cli import main
from remanence.dna.alphabet import DnaTokenizer
from remanence.inference.chat import Turns
from remanence.io.tensors import read_header
from remanence.tokenizers.tokens import ByteTokenizer

HALF, PAIR, BYTE = "\ud800", "\ud83d\ude00", "\udcff"


@pytest.mark.parametrize(("text", "raw"), [
    (f"a{HALF}b", "a\ufffdb".encode()),
    (f"a{PAIR}b", "a\ufffd\ufffdb".encode()),
    (f"a{BYTE}b", b"a\xffb"),
    (f"{BYTE}{HALF}", b"\xff" + "\ufffd".encode()),
])  # fmt: skip
def test_bytes(text, raw):
    tokenizer = ByteTokenizer()
    assert bytes(tokenizer.encode(text)) == raw
    assert bytes(token for part in tokenizer.stream([text]) for token in part) == raw


def test_other_tokenizers(tmp_path):
    tokenizer = pairs_tokenizer(tmp_path / "pairs.json")
    for text in (f"me{HALF}me", f"me{BYTE}me"):
        assert tokenizer.encode(text) == tokenizer.encode("me\ufffdme")
        assert [token for part in tokenizer.stream([text]) for token in part] == tokenizer.encode(
            "me\ufffdme"
        )
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        DnaTokenizer().encode(f"AC{HALF}")
    assert not isinstance(raised.value, UnicodeError)


def test_a_session_reads_generates_and_chats():
    session = Session(model("lmm", torch.float32, vocab_size=257).eval())
    assert session.read(f"a{HALF}b").tokens == 5
    assert isinstance(session.generate(f"{HALF}", max_tokens=2, stop=(HALF,)), str)
    assert isinstance(session.generate(Turns(session.tokenizer).text(f"a{HALF}"), max_tokens=2), str)


def test_names_of_files(tmp_path):
    session = Session(model("lmm", torch.float32, vocab_size=257).eval())
    session.read("abc")
    with pytest.raises(
        ValueError, match=r"expected a name that a file can have, got one with '\\ud800' at position"
    ):
        session.save(tmp_path / f"{HALF}.mem")
    session.save(tmp_path / f"{BYTE}.mem")
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff.mem"]
    assert session.load(tmp_path / f"{BYTE}.mem").tokens == 3
    with pytest.raises(ValueError, match="no such file"):
        session.load(tmp_path / f"{HALF}.mem")


def test_names_of_tensors(tmp_path):
    save_file({"abcdef": torch.zeros(1)}, tmp_path / "x")
    data = (tmp_path / "x").read_bytes().replace(b"abcdef", b"\\ud800")
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="x: damaged, or not a safetensors file"):
        read_header(tmp_path / "x")


def test_at_the_command_line(tmp_path, capsys, monkeypatch):
    model("lmm", torch.float32, vocab_size=257).save(tmp_path / "m")
    book = tmp_path / f"{BYTE}.txt"
    book.write_text("some text " * 9)
    main(["read", str(tmp_path / "m"), str(book), "--save", str(tmp_path / f"{BYTE}.mem")])
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a pipe
    monkeypatch.setattr(sys, "stdout", out)
    memory = ["--memory-file", str(tmp_path / f"{BYTE}.mem"), "--max-tokens", "2"]
    main(["generate", str(tmp_path / "m"), "--prompt", BYTE, HALF, *memory])
    out.flush()
    lines = [json.loads(line) for line in out.buffer.getvalue().decode().splitlines()]
    assert [line["prompt"] for line in lines] == ["\ufffd", "\ufffd"]
    stdin = io.TextIOWrapper(io.BytesIO(b"hello \xff there\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    main(["chat", str(tmp_path / "m"), "--max-tokens", "2"])
