"""Tokenizers in a model's folder: damage is noticed, and what others have written is taken if it can be used."""

import pytest
from models import pairs_tokenizer

from remanence.io.files import read_json, write_json
from remanence.tokenizers.tokens import ByteTokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    pairs_tokenizer(tmp_path / "pairs.json").save(tmp_path / "folder")
    return tmp_path / "folder"


def accepted(folder):
    """Without the digest, as after a change that was meant."""
    settings = read_json(folder / "tokenizer_config.json")
    del settings["remanence_digest"]
    write_json(folder / "tokenizer_config.json", settings)
    return folder


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (7, "eos_token: expected a text, or null for none, got 7"),
        ([], r"eos_token: expected a text, or null for none, got \[\]"),
        ({"id": 7}, "eos_token: expected a text, or null for none, got {'id': 7}"),
        ("<none>", "expected a token for the end of a text .eos_token. '<none>', got none"),
        ("", "expected a token for the end of a text .eos_token. '', got none"),
    ],
)
def test_an_odd_end_of_texts_is_refused(folder, end, message):
    plain = accepted(folder)
    write_json(plain / "tokenizer_config.json", {"eos_token": end})
    with pytest.raises(ValueError, match=message):
        load_tokenizer(plain)
    for good in (None, {"content": "<|end|>"}):
        write_json(plain / "tokenizer_config.json", {"eos_token": good})
        assert load_tokenizer(plain).end == (good and 257)


def test_a_damaged_tokenizer_is_noticed(folder):
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole.replace('"me": 256', '"mf": 256').replace('"e"]', '"f"]'))
    with pytest.raises(
        ValueError, match=r"tokenizer.json: damaged, or changed by hand, .*remove .*remanence_digest"
    ):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text(whole)
    assert load_tokenizer(folder).encode("me") == [256]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json: no such file, but a tokenizer_config.json"):
        load_tokenizer(folder)
    ByteTokenizer().save(folder)
    assert isinstance(load_tokenizer(folder), ByteTokenizer)


def test_texts_are_neither_padded_nor_cut(folder):
    plain = accepted(folder)
    data = read_json(plain / "tokenizer.json")
    data["padding"] = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    data["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    write_json(plain / "tokenizer.json", data)
    assert load_tokenizer(plain).encode("me too") == [256, *b" too"]
