"""FASTA: any size of pieces gives what is in the file, and what is no DNA is refused with its line."""

import gzip
import lzma
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remanence.data.sources import documents, files
from remanence.dna.alphabet import BASES, DnaTokenizer, base_tokens, reverse_complement
from remanence.dna.fasta import read_records
from remanence.tokenizers.tokens import load_tokenizer


def written(path, text):
    raw = text if isinstance(text, bytes) else text.encode()
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix, open)
    with opened(path, "wb") as file:
        file.write(raw)
    return Path(path)


def whole(path, size=1 << 18):
    return [
        (record.name, record.line, b"".join(record.pieces).decode()) for record in read_records(path, size)
    ]


def naive(text):
    """The records of a good file, line by line."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if line.startswith(">"):
            found.append([line[1:].strip(), number, ""])
        elif found:
            cleaned = line.upper().replace(" ", "").replace("U", "T")
            found[-1][2] += "".join("N" if letter in "RYSWKMBDHV" else letter for letter in cleaned)
    return [tuple(each) for each in found]


LINES = st.lists(st.text("ACGTNacgtnRyU ", min_size=1, max_size=9).filter(str.strip), min_size=1, max_size=5)
RECORDS = st.lists(st.tuples(st.text("ab >|1", max_size=7), LINES), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.sampled_from(["\n", "\r\n", "\n\n"]), st.booleans(), st.integers(1, 40))
def test_any_size_of_pieces_reads_what_is_there(tmp_path_factory, made, end, closed, size):
    text = end.join(line for name, lines in made for line in (f">{name}", *lines)) + (end if closed else "")
    path = written(tmp_path_factory.mktemp("fasta") / "x.fa", text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert whole(path, size) == whole(path) == naive(text)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_files_may_be_compressed_and_begin_with_a_mark(tmp_path, suffix):
    path = written(tmp_path / f"x.fna{suffix}", "\ufeff>one\nAC\nGT\n>two\nTTTT\n")
    assert whole(path) == [("one", 1, "ACGT"), ("two", 4, "TTTT")]
    assert [b"".join(document) for document in documents(path)] == [b"ACGT", b"TTTT"]
    assert files([tmp_path]) == [path], "found in a folder by its name"


PROTEIN = ">sp|P69905|HBA_HUMAN\nMVLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHF\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected FASTA records, got an empty file"),
        ("\n \r\n", "expected FASTA records, got an empty file"),
        ("ACGT\n>x\nAC\n", "line 1: expected a header that begins with '>', got a line that begins with 'A'"),
        (
            "\n\nnotes\n>x\nAC\n",
            "line 3: expected a header that begins with '>', got a line that begins with 'n'",
        ),
        (">x\nAC\n>y\n>z\nGT\n", "line 3: expected bases after the header 'y', got none"),
        (">x\nAC\n>y\n\n", "line 3: expected bases after the header 'y', got none"),
        (">x", "line 1: expected bases after the header 'x', got none"),
        (">", "line 1: expected bases after the header '', got none"),
        (PROTEIN, r"line 2: expected bases .*, got 'L', as in a protein"),
        (">x\r\nACGT\r\nAC-GT\r\n", "line 3: expected bases .*, got '-'$"),
        (">x\nACGT\nAC>GT\n", "line 3: expected bases .*, got '>'$"),
        (">x\nAC\n\xc3\x89A\n", "line 3: expected bases"),
        (
            "@read\nACGT\n+\nIIII\n",
            "line 1: expected a header that begins with '>', got a line that begins with '@'",
        ),
    ],
)
def test_what_is_no_dna_is_refused_with_its_line(tmp_path, text, message):
    path = written(tmp_path / "x.faa", text)
    for size in (1, 2, 3, 7, 1 << 18):
        with pytest.raises(ValueError, match=message) as error:
            whole(path, size)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_ambiguity_codes_are_counted_and_read_as_n(tmp_path):
    path = written(tmp_path / "x.fa", ">x\nACGTRYry\nnNACU\n")
    with pytest.warns(UserWarning, match="ambiguity codes are read as N: 2 R, 2 Y$"):
        assert whole(path) == [("x", 1, "ACGTNNNNNNACT")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # N itself is a letter like others
        assert whole(written(tmp_path / "y.fa", ">y\nacgtnN\n")) == [("y", 1, "ACGTNN")]


def test_a_record_that_was_not_read_is_passed_over(tmp_path):
    path = written(tmp_path / "x.fa", ">one\nACGT\nACGT\n>two\nTT\n")
    assert [record.name for record in read_records(path, 3)] == ["one", "two"]


def test_a_genome_is_never_held_whole(tmp_path):
    """A single line of 8 million bases: what is held is some pieces."""
    path = written(tmp_path / "x.fa.gz", b">x\n" + b"ACGT" * 2_000_000 + b"\n")
    tracemalloc.start()
    try:
        tokens = sum(
            len(part) for record in read_records(path) for part in DnaTokenizer().stream(record.pieces)
        )
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tokens == 8_000_000 and held < 4_000_000


def test_a_damaged_file_is_named(tmp_path):
    path = written(tmp_path / "x.fa.gz", ">x\n" + "ACGTTGCA" * 5000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"x\.fa\.gz: damaged"):
        whole(path)


# Tokens


def test_tokens_are_the_bases_in_either_case():
    assert base_tokens(b"ACGTN acgtn\r\nUuRk").tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 3, 3, 4, 4]
    with pytest.raises(ValueError, match="expected the letters of DNA, got 'E', as in a protein"):
        DnaTokenizer().encode("ACGE")
    assert DnaTokenizer().decode([0, 1, 2, 3, 4, 5, 6, 7]) == BASES


def test_the_reverse_complement_is_its_own_inverse():
    tokens = np.array(DnaTokenizer().encode("AACGTN"), np.uint8)
    assert DnaTokenizer().decode(reverse_complement(tokens)) == "NACGTT"
    assert (reverse_complement(reverse_complement(tokens)) == tokens).all()


@pytest.mark.parametrize("labels", [(), ("0", "1"), ("negative", "positive"), ("a|>", "<|label:x|>", "ä")])
def test_a_tokenizer_comes_back_with_its_labels_and_transformers_reads_the_same(tmp_path, labels):
    DnaTokenizer(labels).save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, DnaTokenizer) and loaded.labels == labels and loaded.vocabulary == 32
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("ACGTN", "acgtnAC\nGT", "UuRyKmBdHvSwN"):
        assert theirs.encode(text).ids == loaded.encode(text)
    assert theirs.get_vocab_size() == 32 and theirs.token_to_id("<|label|>") == 6


def test_more_labels_than_symbols_are_refused():
    with pytest.raises(ValueError, match="labels: expected at most 25 classes, got 26"):
        DnaTokenizer([str(number) for number in range(26)])
