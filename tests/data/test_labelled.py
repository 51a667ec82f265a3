"""Sequences with labels: GUE's and GenomicBenchmarks' layouts give the same, and bad rows are named with their line."""

import gzip
import lzma

import pytest

from remanence.dna.alphabet import DnaTokenizer
from remanence.dna.labelled import Labelled, read_labelled

ROWS = [("ACGT", "1"), ("ggtt", "0"), ("ACNNR", "1")]


def table(rows=ROWS, head="sequence,label", end="\n"):
    return end.join([head, *(f"{sequence},{label}" for sequence, label in rows), ""])


def read(path, split="train"):
    data = read_labelled("data.path", str(path), split)
    return [(DnaTokenizer().decode(x), label) for x, label in zip(data.sequences, data.labels, strict=True)]


EXPECTED = [("ACGT", "1"), ("GGTT", "0"), ("ACNNN", "1")]


@pytest.mark.parametrize(
    "text",
    [
        table(),
        table(end="\r\n"),
        "\ufeff" + table(head="Seq,LABEL"),
        table().replace(",", "\t"),
        "id,label,seq\n" + "".join(f"x,{label},{sequence}\n" for sequence, label in ROWS),
        '"sequence","label"\n' + "".join(f'"{sequence}","{label}"\n\n' for sequence, label in ROWS),
    ],
)
def test_tables_of_any_dress(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode())
    assert read(path) == EXPECTED


def test_gue_folders(tmp_path):
    (tmp_path / "train.csv").write_text(table())
    with lzma.open(tmp_path / "dev.csv.xz", "wt") as file:
        file.write(table(ROWS[:1]))
    with gzip.open(tmp_path / "test.csv.gz", "wt") as file:
        file.write(table(ROWS[1:]))
    assert read(tmp_path, "train") == EXPECTED
    assert read(tmp_path, "dev") == EXPECTED[:1]
    assert read(tmp_path, "test") == EXPECTED[1:]


def test_genomic_benchmarks_folders(tmp_path):
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        for number, (sequence, label) in enumerate(rows):
            folder = tmp_path / split / {"0": "negative", "1": "positive"}[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(sequence + "\n" * (number % 2))
    assert read(tmp_path, "train") == [("GGTT", "negative"), ("ACGT", "positive"), ("ACNNN", "positive")]
    assert read(tmp_path, "test") == [("GGTT", "negative"), ("ACGT", "positive")]
    (tmp_path / "train" / "negative" / "1.txt").write_text("ACGT\nMKE")
    with pytest.raises(ValueError, match=r"negative.1\.txt: sequence: expected the letters of DNA, got 'E'"):
        read(tmp_path)
    (tmp_path / "test" / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: expected \.txt files, one sequence each, got none"):
        read(tmp_path, "test")


def test_labels_are_in_the_order_of_numbers():
    data = Labelled([], ["10", "9", "10", "0"], [])
    assert data.names == ["0", "9", "10"]
    assert data._replace(labels=["b", "10", "a"]).names == ["10", "a", "b"]


def test_a_sequence_may_be_longer_than_a_field_of_csv(tmp_path):
    (tmp_path / "x.csv").write_text(table([("ACGT" * 50_000, "0"), ("A", "1")]))
    assert [len(sequence) for sequence, _ in read(tmp_path / "x.csv")] == [200_000, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv: expected a table, got an empty file"),
        ("sequence,label\n", "x.csv: expected sequences with labels, got none"),
        ("a,label\nAC,1\n", "x.csv: line 1: expected a column 'sequence' or 'seq', got 'a', 'label'"),
        ("sequence,x\nAC,1\n", "x.csv: line 1: expected a column 'label' or 'class', got 'sequence', 'x'"),
        (
            table([("ACGT", "1"), ("MKLE", "0")]),
            "x.csv: line 3: sequence: expected the letters of DNA, got 'L', as in",
        ),
        (table([("ACGT", "1"), ("", "0")]), "x.csv: line 3: expected a sequence, got none"),
        (table([("ACGT", ""), ("A", "0")]), "x.csv: line 2: expected a label, got none"),
        ("sequence,label\r\nAC,1\r\nACGT\r\n", "x.csv: line 3: expected 2 columns, got 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"data.path: expected a \.csv table, .*, got none; set it with --data.path=PATH"
    ):
        read_labelled("data.path", None, "train")
    with pytest.raises(ValueError, match=r"data.path: expected .*, got .*nowhere, which does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"data.path: expected a split 'test' .*, got none in"):
        read(tmp_path, "test")
