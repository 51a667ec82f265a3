"""Series are read alike from wherever they come, and what is no series is refused by name in one line."""

import gzip
import lzma
import zipfile

import numpy as np
import pytest
import torch
from series import waves, written

from remanence.forecast.series import Series, read_series


class Table:
    """What a DataFrame of any library has: columns, and each of them by name."""

    def __init__(self, columns):
        self.own, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self.own[name]


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "index", ",Unnamed: 0"])
@pytest.mark.parametrize(
    "labels", [range(30), range(7, 67, 2), [f"2020-01-{day:02d}" for day in range(1, 31)]]
)
def test_an_index_as_pandas_writes_it_is_no_channel(tmp_path, name, labels):
    values = waves(30)
    twice = name.count(",")
    lines = [f"{name},date,a,b,c"]
    for label, row in zip(labels, values, strict=True):
        lines.append(",".join([str(label)] * (1 + twice) + ["2020-01-01", *map(repr, row.tolist())]))
    (tmp_path / "s.csv").write_text("\n".join(lines))
    found = read_series(tmp_path / "s.csv")
    assert found.names == ("a", "b", "c") and np.array_equal(found.values, values)
    table = Table({name: list(labels), "date": ["x"] * 30} | dict(zip("abc", values.T, strict=True)))
    if not twice:
        assert read_series(table).names == ("a", "b", "c")


def test_a_first_column_that_is_no_index_stays(tmp_path):
    for name, cells in (
        ("", [0.5, 1.5, 2.5]),
        ("Unnamed: 0", [3, 1, 2]),
        ("a", [0, 1, 2]),
        ("index2", [0, 1, 2]),
    ):
        (tmp_path / "s.csv").write_text(f"{name},b\n" + "".join(f"{cell},7\n" for cell in cells))
        assert read_series(tmp_path / "s.csv").names == (name, "b")
    (tmp_path / "s.csv").write_text(",b\n0,7\n1,8\n")
    assert read_series(tmp_path / "s.csv", columns=("",)).names == ("",), "chosen by name"
    (tmp_path / "s.csv").write_text("index\n0\n1\n")
    assert read_series(tmp_path / "s.csv").names == ("index",), "all that there is"


def test_every_source_gives_the_same_numbers(tmp_path):
    values = waves(30)
    path = written(tmp_path / "s.csv", values)
    text = path.read_bytes()
    (tmp_path / "s.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "s.csv.xz").write_bytes(lzma.compress(text))
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("inner/s.csv", text)
        archive.writestr("inner/readme.txt", "no series")
    sources = [path, str(path), *(tmp_path / name for name in ("s.csv.gz", "s.csv.xz", "bom.csv", "one.zip"))]
    sources += [tmp_path / "one.zip" / "s.csv", tmp_path / "one.zip" / "inner" / "s.csv"]
    table = Table({"Date": ["x"] * 30, **{name: values[:, i] for i, name in enumerate("abc")}})
    for source in (*sources, table, read_series(path)):
        found = read_series(source)
        assert found.names == ("a", "b", "c"), source
        assert np.array_equal(found.values, values), source
    for source in (values, torch.tensor(values), values.tolist()):
        assert np.array_equal(read_series(source).values, values)
        assert read_series(source).names == ("0", "1", "2")
    assert read_series(values[:, 0]).values.shape == (30, 1)
    chosen = read_series(path, columns=("c", "a"))
    assert chosen.names == ("c", "a") and np.array_equal(chosen.values, values[:, [2, 0]])
    assert np.array_equal(read_series(Series(values, tuple("abc")), columns=("b",)).values, values[:, [1]])


def test_a_header_in_latin_1_is_read(tmp_path):
    (tmp_path / "w.csv").write_bytes("date,T (°C),SWDR (W/m²)\n1,2.5,3\n2,3.5,4\n".encode("latin-1"))
    found = read_series(tmp_path / "w.csv")
    assert found.names == ("T (°C)", "SWDR (W/m²)") and found.values.tolist() == [[2.5, 3], [3.5, 4]]


def test_missing_values_are_refused_or_filled_from_the_row_before(tmp_path):
    path = tmp_path / "g.csv"
    path.write_text("date,a,b\n1,1,5\n2,,6\n3,NA,7\n4,4,nan\n")
    with pytest.raises(
        ValueError, match=r"g.csv: column 'a': expected a number in every row, got 2 missing, the first"
    ):
        read_series(path)
    filled = read_series(path, missing="previous")
    assert filled.values.tolist() == [[1, 5], [1, 6], [1, 7], [4, 7]]
    with pytest.raises(
        ValueError, match=r"data: column '0': expected a number in row 0, which has no row before it"
    ):
        read_series([np.nan, 1.0], missing="previous")
    with pytest.raises(ValueError, match="missing: expected one of refuse, previous, got 'drop'"):
        read_series([1.0], missing="drop")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date,a,b\n1,2,x\n", r"line 2: column 'b': expected a number, got 'x'"),
        ("date,a\n1,2\n3\n", r"line 3: expected 2 cells, got 1"),
        ("date,a,a\n1,2,3\n", r"expected each column's name once, got 'a' twice"),
        ("1,2,3\n4,5,6\n", r"line 1: expected the columns' names, got numbers"),
        ("", r"expected a CSV file with the columns' names in its first line, got none"),
        ("date,a\n", r"expected at least one column and one row of numbers, got none"),
        ("date,a\n1,inf\n", r"column 'a': expected finite numbers, got inf in row 0"),
    ],
)
def test_a_file_that_is_no_series_is_one_line(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_series(tmp_path / "bad.csv")
    assert str(error.value).startswith(str(tmp_path / "bad.csv")) and "\n" not in str(error.value)


def test_other_sources_that_are_no_series_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.csv: no such file"):
        read_series("nowhere.csv")
    with pytest.raises(ValueError, match="expected a CSV file, got a folder"):
        read_series(tmp_path)
    (tmp_path / "b.zip").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"b.zip: damaged, or not a .zip file"):
        read_series(tmp_path / "b.zip")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.csv", "x\n1\n")
        archive.writestr("b.csv", "x\n1\n")
    with pytest.raises(
        ValueError, match=r"expected the name of one CSV file inside two.zip, which has a.csv, b.csv"
    ):
        read_series(tmp_path / "two.zip")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"date,a\n1,2\n" * 99)[:30])
    with pytest.raises(ValueError, match=r"cut.csv.gz: damaged"):
        read_series(tmp_path / "cut.csv.gz")
    table = Table({"a": [1.0], "city": ["Jena"]})
    with pytest.raises(ValueError, match=r"frame: column 'city': expected numbers, got values like 'Jena'"):
        read_series(table, name="frame")
    with pytest.raises(ValueError, match=r"data: column: expected one of a, city, got 'b'"):
        read_series(table, columns=("b",))
    with pytest.raises(ValueError, match=r"expected numbers \[t\] or \[t, channels\], got shape \[1, 1, 1\]"):
        read_series(np.zeros((1, 1, 1)))
    with pytest.raises(ValueError, match="data: expected a path, numbers"):
        read_series(object())
