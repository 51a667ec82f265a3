"""Readers of time series: CSV files (also compressed or inside a .zip), arrays, and DataFrames."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from remanence.data.sources import OPENERS, PIECE, read_pieces
from remanence.runtime.choices import check_choice, short_repr

DATE_COLUMNS = ("date", "time", "datetime", "timestamp", "ds")
"""Names of date columns (case-insensitive). They are skipped."""
INDEX_COLUMN = re.compile(r"|unnamed: \d+|index|level_0", re.IGNORECASE)
"""Names of index columns as pandas writes them. Such a column is skipped if it contains increasing integers
or text.
"""
MISSING_CELLS = ("", "nan", "na", "n/a", "null", "none")
"""Texts of a cell that mean a missing value (case-insensitive)."""
MISSING_POLICIES = ("refuse", "previous")
"""Ways to handle missing values: "refuse" raises an error; "previous" repeats the value of the row before, so
that no future value is used.
"""


class Series(NamedTuple):
    """A time series: values ``[rows channels]`` in temporal order, and the names of the channels."""

    values: np.ndarray
    names: tuple[str, ...]

    def head(self, rows: int) -> Series:
        """Return the first rows of the series."""
        return self._replace(values=self.values[:rows])


@runtime_checkable
class DataFrame(Protocol):
    """Interface of tables of any library: they have `columns` and return a column by its name."""

    @property
    def columns(self) -> Sequence[Hashable]: ...

    def __getitem__(self, name: Hashable) -> Sequence[object]: ...


SeriesLike = Series | str | Path | DataFrame | ArrayLike
"""The types that `read_series` accepts: a series, the path of a CSV file, a table, or numbers."""


def read_series(
    source: SeriesLike, *, columns: Sequence[str] = (), missing: str = "refuse", name: str = "data"
) -> Series:
    """Read a series from a CSV file, an array ``[rows]`` or ``[rows channels]``, or a DataFrame.

    Files may be compressed (`.gz`, `.xz`, `.bz2`, `.zst`) or inside a `.zip`: ``file.zip/inner.csv`` is a
    file inside an archive, and ``file.zip`` is enough if the archive has only one CSV file. `columns` selects
    columns by name. If it is empty, date columns (`DATE_COLUMNS`) and index columns at the start
    (`INDEX_COLUMN`) are skipped, and all other columns must contain numbers. `missing` is one of
    `MISSING_POLICIES`. Error messages start with `name` or with the file.
    """
    check_choice(f"{name}: missing", missing, MISSING_POLICIES)
    if isinstance(source, Series):
        found, owner = source, name
    elif isinstance(source, str | Path):
        found, owner = _from_file(Path(source), columns), str(source)
    elif isinstance(source, DataFrame):
        found, owner = _from_table(source, columns, name), name
    else:
        found, owner = _from_array(source, name), name
    return _fill_missing(_select_columns(found, columns, owner), missing, owner)


def _select_columns(series: Series, columns: Sequence[str], owner: str) -> Series:
    """Return the series with only these columns, in this order. All columns if `columns` is empty."""
    if not columns or tuple(columns) == series.names:
        return series
    for column in columns:
        check_choice(f"{owner}: column", column, series.names)
    index = [series.names.index(column) for column in columns]
    return Series(series.values[:, index], tuple(columns))


def _fill_missing(series: Series, missing: str, owner: str) -> Series:
    """Fill missing values, or raise an error that names the column. Infinite values always raise an error."""
    values = series.values
    if np.isinf(values).any():
        row, column = map(int, np.argwhere(np.isinf(values))[0])
        raise ValueError(
            f"{owner}: column {series.names[column]!r}: expected finite numbers, got {values[row, column]} in row {row}"
        )
    gaps = np.isnan(values)
    if not gaps.any():
        return series
    row, column = map(int, np.argwhere(gaps)[0])
    where = f"{owner}: column {series.names[column]!r}"
    if missing == "refuse":
        count = int(gaps[:, column].sum())
        raise ValueError(
            f"{where}: expected a number in every row, got {count} missing, the first in row {row}; "
            "missing='previous' repeats the value before"
        )
    if gaps[0].any():
        first = series.names[int(np.argmax(gaps[0]))]
        raise ValueError(
            f"{owner}: column {first!r}: expected a number in row 0, which has no row before it, got none"
        )
    last = np.maximum.accumulate(np.where(gaps, 0, np.arange(len(values))[:, None]), axis=0)
    return series._replace(values=np.take_along_axis(values, last, axis=0))


def _from_array(source: ArrayLike | DataFrame, name: str) -> Series:
    """Read numbers ``[rows]`` or ``[rows channels]``. Channels are named by their index."""
    try:
        values = np.asarray(source, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}: expected a path, numbers [t] or [t, channels], or a table with columns, got {short_repr(source)}"
        ) from None
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or not values.size:
        raise ValueError(f"{name}: expected numbers [t] or [t, channels], got shape {list(values.shape)}")
    return Series(values, tuple(str(index) for index in range(values.shape[1])))


def _from_table(source: DataFrame, columns: Sequence[str], name: str) -> Series:
    """Read a DataFrame of any library."""
    first = _count_index_columns(
        [str(column) for column in source.columns], lambda at: source[source.columns[at]]
    )
    names = [
        column
        for column in source.columns[first if not columns else 0 :]
        if (str(column) in columns if columns else str(column).strip().lower() not in DATE_COLUMNS)
    ]
    for wanted in columns:
        check_choice(f"{name}: column", wanted, [str(each) for each in source.columns])
    found = []
    for column in names:
        try:
            found.append(np.asarray(source[column], dtype=np.float64))
        except (TypeError, ValueError):
            got = short_repr(next(iter(source[column]), None))
            raise ValueError(
                f"{name}: column {str(column)!r}: expected numbers, got values like {got}; set columns="
            ) from None
    if not found or not len(found[0]):
        raise ValueError(f"{name}: expected at least one column and one row of numbers, got none")
    return Series(np.stack(found, 1), tuple(map(str, names)))


def _from_file(path: Path, columns: Sequence[str]) -> Series:
    """Read a CSV file."""
    text = _read_text(path)
    lines = csv.reader(io.StringIO(text, newline=""))
    header = [each.strip() for each in next(lines, [])]
    if not header:
        raise ValueError(f"{path}: expected a CSV file with the columns' names in its first line, got none")
    if len(set(header)) < len(header):
        twice = next(each for each in header if header.count(each) > 1)
        raise ValueError(f"{path}: expected each column's name once, got {twice!r} twice")
    if all(_parse_number(each) is not None for each in header):
        raise ValueError(
            f"{path}: line 1: expected the columns' names, got numbers: {short_repr(','.join(header))}"
        )
    for column in columns:
        check_choice(f"{path}: column", column, header)
    rows = [row for row in lines if row]
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"{path}: line {number}: expected {len(header)} cells, got {len(row)}")
    first = 0 if columns else _count_index_columns(header, lambda at: [row[at] for row in rows])
    names = [
        each for each in header[first:] if (each in columns if columns else each.lower() not in DATE_COLUMNS)
    ]
    if not rows or not names:
        raise ValueError(f"{path}: expected at least one column and one row of numbers, got none")
    found = [_parse_column(path, name, [row[header.index(name)] for row in rows]) for name in names]
    return Series(np.stack(found, 1), tuple(names))


def _count_index_columns(names: Sequence[str], column: Callable[[int], Iterable[object]]) -> int:
    """Return the number of index columns at the start of a table. `column` returns the cells of a column.

    An index column has an index name, and contains increasing integers or no numbers. The last column is
    never an index.
    """
    count = 0
    while count < len(names) - 1 and INDEX_COLUMN.fullmatch(names[count].strip()):
        values = [_parse_number(str(cell)) for cell in column(count)]
        numbers = [value for value in values if value is not None]
        rising = all(b > a for a, b in pairwise(numbers)) and all(value.is_integer() for value in numbers)
        if not (rising if len(numbers) == len(values) else not numbers):
            break
        count += 1
    return count


def _parse_column(path: Path, name: str, cells: list[str]) -> np.ndarray:
    """Convert the cells of a column to numbers. Missing values become NaN; other text raises an error."""
    try:
        return np.array(cells).astype(np.float64)
    except ValueError:
        values = [_parse_number(cell) for cell in cells]
    for line, (cell, value) in enumerate(zip(cells, values, strict=True), 2):
        if value is None:
            hint = "choose columns of numbers with data.columns"
            raise ValueError(
                f"{path}: line {line}: column {name!r}: expected a number, got {short_repr(cell)}; {hint}"
            )
    return np.array(values, dtype=np.float64)


def _parse_number(cell: str) -> float | None:
    """Return the number in a cell, NaN if the value is missing, or None if the cell is not a number."""
    if cell.strip().lower() in MISSING_CELLS:
        return float("nan")
    try:
        return float(cell)
    except ValueError:
        return None


def _read_text(path: Path) -> str:
    """Read a file as UTF-8, or as Latin-1 if it is not valid UTF-8."""
    data = _read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _read_bytes(path: Path) -> bytes:
    """Read a file, decompressed, or a file inside a .zip archive."""
    archive = next((each for each in (path, *path.parents) if each.suffix == ".zip" and each.is_file()), None)
    if archive is not None:
        return _read_zip_member(archive, path)
    if not path.is_file():
        raise ValueError(
            f"{path}: expected a CSV file, got a folder" if path.is_dir() else f"{path}: no such file"
        )
    with OPENERS.get(path.suffix, lambda p: open(p, "rb"))(path) as file:
        return b"".join(read_pieces(path, lambda: file.read(PIECE)))


def _read_zip_member(archive: Path, path: Path) -> bytes:
    """Read a CSV file inside a .zip archive, given by its path or file name."""
    try:
        with zipfile.ZipFile(archive) as opened:
            inside = [each for each in opened.namelist() if each.lower().endswith(".csv")]
            wanted = path.relative_to(archive).as_posix()
            found = [each for each in inside if wanted in (".", each, Path(each).name)]
            if len(found) != 1:
                names = ", ".join(inside) or "none"
                raise ValueError(
                    f"{path}: expected the name of one CSV file inside {archive.name}, which has {names}"
                )
            return opened.read(found[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"{archive}: damaged, or not a .zip file ({error})") from None
