"""Fields from the command line: split from the arguments, parsed as their types, refused with the argument's name."""

from dataclasses import asdict, dataclass, field
from typing import Literal

import pytest

from remanence.runtime.overrides import (
    apply_overrides,
    by_owner,
    format_length,
    parse_length,
    parse_value,
    split_overrides,
    split_prefix,
)


@dataclass(frozen=True)
class Inner:
    size: int = 3
    kind: Literal["cat", "dog"] = "cat"


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    names: tuple[str, ...] = ()
    rate: float | None = None

    def to_dict(self):
        return asdict(self)


def test_a_commands_own_options_stay():
    arguments = [
        "train",
        "recall",
        "--out",
        "x",
        "--model.dim=32",
        "--out=y",
        "-h",
        "--steps=3",
        "--steps=a=b",
    ]
    rest, overrides = split_overrides(arguments, ("out",), "the config")
    assert rest == ["train", "recall", "--out", "x", "--out=y", "-h"]
    assert overrides == (("model.dim", "32"), ("steps", "3"), ("steps", "a=b"))
    assert split_prefix(overrides, "model.") == ({"dim": "32"}, [("steps", "3"), ("steps", "a=b")])
    for wrong in ("--steps", "-s=3", "-1"):
        with pytest.raises(
            ValueError, match=f"^{wrong}: expected --field=value for a field of the config(;|$)"
        ):
            split_overrides(["train", wrong], ("out",), "the config")


def test_settings_go_to_the_tasks_that_have_them():
    settings = {"a": ("x", "y"), "b": ("x",)}
    assert by_owner([("x", "1"), ("b.x", "2"), ("y", "3")], settings) == {
        "a": {"x": "1", "y": "3"},
        "b": {"x": "2"},
    }
    with pytest.raises(ValueError, match=r"--c\.x: task: expected one of a, b, got 'c'"):
        by_owner([("c.x", "1")], settings)
    with pytest.raises(ValueError, match="--z: setting: expected one of x, y, got 'z'"):
        by_owner([("z", "1")], settings)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "4K", 4096),
        (int, "-7", -7),
        (float, "3e-4", 3e-4),
        (bool, "Yes", True),
        (bool, "0", False),
        (str, "4K", "4K"),
        (str | None, "None", None),
        (int | None, "1M", 2**20),
        (tuple[int, ...], "1K, 2K,", (1024, 2048)),
        (tuple[int, ...] | None, "5", (5,)),
        (tuple[str, ...], "", ()),
        (Literal["a", "b"] | None, "b", "b"),
        (int | float, "0.5", 0.5),
    ],
)
def test_values_are_parsed_as_their_types(kind, text, value):
    parsed = parse_value(kind, text, "x")
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, "four", r"x: expected an integer \(1K is 1,024, 1M is 1K times 1K\), got 'four'"),
        (int, "K", "x: expected an integer"),
        (float | None, "much", "x: expected a number, got 'much'"),
        (bool, "maybe", "x: expected true or false, got 'maybe'"),
        (tuple[int, ...], "1,b", "x: expected an integer .* got 'b'"),
        (Literal["cat", "dog"], "dig", "x: expected one of cat, dog, got 'dig'; did you mean 'dog'"),
        (Inner, "3", "x: expected Inner, got '3'"),
    ],
)
def test_wrong_values_are_refused(kind, text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_value(kind, text, "x")


def test_dotted_fields_are_applied_to_nested_data():
    changed = apply_overrides(Outer(), {"inner.size": "1K", "names": "a,b", "rate": "0.5"})
    assert changed == {"inner": {"size": 1024, "kind": "cat"}, "names": ("a", "b"), "rate": 0.5}
    for name, message in (
        (
            "inner.sise",
            r"inner\.sise: field of Inner: expected one of size, kind, got 'sise'; did you mean 'size'",
        ),
        ("iner.size", r"iner\.size: field of Outer: .* did you mean 'inner'"),
        ("rate.more", r"rate\.more: expected a field, got something inside 'rate', which has none"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_overrides(Outer(), {name: "1"})


def test_lengths_as_people_write_them():
    assert [parse_length(text) for text in ("7", "4K", "10m", "1M")] == [7, 4096, 10 * 2**20, 2**20]
    assert [format_length(number) for number in (7, 4096, 10 * 2**20, 1500)] == ["7", "4K", "10M", "1500"]
    assert format_length(2000.0, ",") == "2,000"
