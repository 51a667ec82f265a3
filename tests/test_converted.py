"""Tokenizers of tiktoken and SentencePiece, and by name from a hub: the same tokens as their own libraries give."""

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from models import pairs_tokenizer
from tiktoken._educational import bpe_train

from remanence import Session
from remanence.tokenizers.converted import CL100K, GPT2
from remanence.tokenizers.tokens import load_tokenizer, read_tokenizer, tokenizer_file

ROOT = Path(__file__).parent.parent
TEXT = (
    "It was the best of times, it was the worst of times; it was the age of wisdom, and of 1859 fools.\n"
    "There were a king with a large jaw and a queen with a plain face, on the throne of England's isle.\n"
)
TEXTS = [TEXT, "the kings' isle  was\n\n large, 123456 times; IT'S", "Grüße 世界 🎉", "", " a", "wisdom"]


@pytest.fixture(scope="module")
def ranks():
    """As tiktoken's own trainer makes them."""
    return bpe_train(data=TEXT * 3, vocab_size=310, pat_str=CL100K, visualise=None)


@pytest.mark.parametrize(("name", "pattern", "end"), [("mine", CL100K, 310), ("r50k_base", GPT2, 50_256)])
def test_tiktokens_ranks(name, pattern, end, ranks, tmp_path):
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / f"{name}.tiktoken").write_text("".join(lines))
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = read_tokenizer(tmp_path / f"{name}.tiktoken")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.end == end and ours.vocabulary == end + 1
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode(TEXT) == ours.encode(TEXT) and again.end == end


OPTIONS = {
    "unigram": {"model_type": "unigram", "vocab_size": 90},
    "bpe": {"model_type": "bpe", "vocab_size": 90},
    "bpe with bytes": {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True},
    "unigram with bytes": {"model_type": "unigram", "vocab_size": 330, "byte_fallback": True},
    "as it is written": {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sentencepieces_models(options, tmp_path):
    model = io.BytesIO()
    lines = iter(TEXT.splitlines() * 4)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, minloglevel=2, hard_vocab_limit=False, **options
    )
    (tmp_path / "spm.model").write_bytes(model.getvalue())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ours = read_tokenizer(tmp_path / "spm.model")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)).replace(" ⁇ ", "<unk>")
    assert ours.vocabulary == theirs.vocab_size() and ours.end == theirs.eos_id()
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(TEXT) == ours.encode(TEXT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tiktoken", b"", "a.tiktoken: not a file of tiktoken's ranks .*got none for 256 bytes"),
        ("a.tiktoken", b"!! 3\n", "a.tiktoken: not a file of tiktoken's ranks"),
        ("a.tiktoken", b"YQ==\n", "a.tiktoken: not a file of tiktoken's ranks"),
        ("a.model", b"", "a.model: not a file of a SentencePiece model .*got 0 of kind 1"),
        ("a.model", b"\x0a\xff\xff", "a.model: not a file of a SentencePiece model"),
        ("a.model", b"\x0a\x05abc", "a.model: not a file of a SentencePiece model .expected a whole file"),
        ("a.model", b"not a model at all", "a.model: not a file of a SentencePiece model"),
        ("a.model", b"\x80\x04\x95\x00cos\nsystem\n", "a.model: not a file of a SentencePiece model"),
    ],
)
def test_a_strangers_file_is_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_tokenizer(tmp_path / name)
    assert "\n" not in str(error.value)


class TestByName:
    def run(self, tmp_path, *arguments, code=0):
        """The command, with a hub that is what lies in the test's folder."""
        places = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "remanence", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | places,
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    @pytest.mark.slow
    def test_from_the_hub(self, tmp_path):
        """As Hugging Face keeps what was downloaded; a model that is not there is one line."""
        kept = tmp_path / "hf" / "hub" / "models--someone--words"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / "main").write_text("0" * 40)
        (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
        pairs_tokenizer(tmp_path / "pairs.json").save(kept / "snapshots" / ("0" * 40))
        (tmp_path / "t.txt").write_text(TEXT)
        self.run(tmp_path, "new", "tiny", "m", "--variant", "lmm", "--tokenizer", "someone/words")
        assert Session(tmp_path / "m").tokenizer.encode("me too") == [256, *b" too"]
        self.run(tmp_path, "data", "prepare", "t.txt", "--out", "tokens", "--tokenizer", "someone/words")
        assert load_tokenizer(tmp_path / "tokens").vocabulary == 258
        said = self.run(tmp_path, "new", "tiny", "n", "--tokenizer", "someone/else", code=2)
        assert said.startswith("remanence: error: tokenizer: expected a file, a folder, or a model on")
        assert said.count("\n") == 1 and not (tmp_path / "n").exists()

    def test_files_and_folders(self, tmp_path, monkeypatch):
        pairs_tokenizer(tmp_path / "tokenizer.json")
        assert tokenizer_file(tmp_path) == tokenizer_file(tmp_path / "tokenizer.json")
        for missing in (tmp_path / "no" / "tokenizer", "no.json", "no.model"):
            with pytest.raises(ValueError, match="no such file"):
                read_tokenizer(tokenizer_file(missing))
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ValueError, match=r"someone/words on the hub needs the extra 'hf'; pip install"):
            tokenizer_file("someone/words")
