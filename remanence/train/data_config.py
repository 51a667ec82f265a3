"""Configurations of training data: one frozen dataclass for each kind of data.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_type_hints

from remanence.io.migrations import FLAT_DATA, accepts_old_names, current_field, current_value
from remanence.runtime.choices import check_choice
from remanence.runtime.overrides import parse_value
from remanence.train.checks import check_between, check_positive, check_types
from remanence.verticals import Registry, data_configs

PATHS = ("path", "held_out", "books")
"""The names of fields that hold a path or ``hf:NAME``, for all kinds of data."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The base class of all kinds of data. ``DataConfig(kind="recall", pairs=8)`` is ``RecallData(pairs=8)``.

    To add a kind of data, write a frozen subclass with a default for `kind`, and register it together with
    the function that makes its source of batches: `remanence.train.register_data`.

    Class attributes describe the kind:

    - ``carries``: whether its rows continue from step to step; ``max_carried_steps``: the largest number of
      steps over which a row continues, or None if there is no limit;
    - ``causal_lm``: whether ``TrainConfig.model`` describes the entire model, a causal language model;
    - ``train_fields``: the fields of `TrainConfig` that apply to this kind only;
    - ``required``: the fields of `TrainConfig` that must have a certain value with this kind, and that value;
    - ``recorded``: the fields of this dataclass that are written to the trained model's folder;
    - ``evaluation``: the arguments of ``remanence eval`` that evaluate models of this kind, for the model
      card.

    Attributes:
        kind: the name by which the class is registered (`remanence.train.DATA_KINDS`).
        length: the number of tokens of a row.
    """

    kind: str = "packed"
    length: int = 256

    carries: ClassVar[bool] = False
    max_carried_steps: ClassVar[int | None] = None
    causal_lm: ClassVar[bool] = True
    train_fields: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[Mapping[str, object]] = {}
    recorded: ClassVar[tuple[str, ...]] = ()
    evaluation: ClassVar[str | None] = None

    def __new__(cls, **given: object) -> DataConfig:
        if cls is DataConfig:
            kind = current_value("data.kind", given.get("kind", cls.kind), warn=False)
            cls = data_class(kind)
            cls.check_names(given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "kind", current_value("data.kind", self.kind))
        if self.kind != type(self).kind:
            raise ValueError(
                f"kind: expected {type(self).kind!r} of {type(self).__name__}, got {self.kind!r}"
            )
        check_positive(length=self.length)

    @property
    def stages(self) -> tuple[int, ...]:
        """The lengths of texts in the stages of a curriculum, in tokens, or () if every row has `length`
        tokens.
        """
        return ()

    def without_schedule(self) -> Self:
        """Return a copy without a ramp or a curriculum, which describes the data at the end of a run."""
        return self

    def map_paths(self, change: Callable[[str | None], str | None]) -> Self:
        """Return a copy with `change` applied to every field that holds a path (`PATHS`)."""
        present = [name for name in PATHS if name in self.field_names()]
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in present}
        return replace(self, **changed)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain data.

        A `held_out` of None is omitted, as in the files of earlier versions.
        """
        plain = {name: getattr(self, name) for name in self.field_names()}
        return {name: value for name, value in plain.items() if name != "held_out" or value is not None}

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> DataConfig:
        """Build the config from a file's data.

        Fields of other kinds (written by earlier versions) are ignored.
        """
        kind = current_value("data.kind", data.get("kind", DataConfig.kind), warn=False)
        cls = data_class(kind)
        own = cls.field_names()
        given = {cls.current_field(name): value for name, value in data.items()}
        given = {name: value for name, value in given.items() if name in own or name not in FLAT_DATA}
        return cls.from_fields({**given, "kind": kind})

    @classmethod
    def from_fields(cls, given: Mapping[str, object]) -> Self:
        """Build the config from the fields in a file; lists become tuples."""
        cls.check_names(given)
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        return cls(**values)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the dataclass fields of this kind."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def current_field(cls, name: str) -> str:
        """Return the current name of a field of this kind that was renamed; any other name is returned
        unchanged.
        """
        current = current_field("data", name)
        return current if name not in cls.field_names() and current in cls.field_names() else name

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raise an error for a field that this kind lacks, with the kinds that have it or the nearest field
        name.
        """
        for name in names:
            if cls.current_field(name) in cls.field_names():
                continue
            name = current_field("data", name)
            owners = [kind for kind, other in DATA_KINDS.items() if name in other.field_names()]
            if owners:
                expected = " or ".join(map(repr, owners))
                raise ValueError(
                    f"data.{name}: expected only with data.kind={expected}, got it with {cls.kind!r}"
                )
            check_choice(f"data.{name}: field of {cls.__name__}", name, cls.field_names())

    def override(self, changes: Mapping[str, str]) -> DataConfig:
        """Return a copy with fields changed; values are text.

        If the kind changes, the common fields are kept.
        """
        kind = current_value("data.kind", changes.get("kind", self.kind))
        cls = data_class(kind)
        cls.check_names(changes)
        changes = {cls.current_field(name): text for name, text in changes.items()}
        kept = {name: getattr(self, name) for name in self.field_names() if name in cls.field_names()}
        return cls(**{**kept, **cls.parse_fields(changes), "kind": kind})

    @classmethod
    def parse_fields(cls, changes: Mapping[str, str]) -> dict[str, Any]:
        """Convert the values of fields from text to the types of the fields."""
        hints = get_type_hints(cls)
        return {name: parse_value(hints[name], text, f"data.{name}") for name, text in changes.items()}


@dataclass(frozen=True, kw_only=True, init=False)
class UnregisteredData(DataConfig):
    """A kind of data that has no dataclass in this process.

    Either only its source is registered (in `SOURCES`), or the run was made by a program that registered the
    kind. It accepts any fields. The fields that every kind had in earlier versions have default values.

    Attributes:
        values: the fields by name.
    """

    values: Mapping[str, Any]

    def __init__(
        self, *, kind: str, length: int = 256, values: Mapping[str, object] | None = None, **given: object
    ) -> None:
        for name, value in (("kind", kind), ("length", length), ("values", {**(values or {}), **given})):
            object.__setattr__(self, name, value)
        check_positive(length=length)

    def __getattr__(self, name: str) -> Any:
        values = {**FLAT_DATA, **self.__dict__.get("values", {})}
        if name not in values:
            raise AttributeError(f"data of kind {self.__dict__.get('kind')!r} has no field {name!r}")
        return values[name]

    def map_paths(self, change: Callable[[str | None], str | None]) -> Self:
        paths = {name: change(value) for name, value in self.values.items() if name in PATHS}
        return replace(self, values={**self.values, **paths})

    def to_dict(self) -> dict[str, object]:
        return {"kind": self.kind, "length": self.length, **self.values}

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Accept every name: only the code that reads the fields knows which ones are valid."""

    @classmethod
    def parse_fields(cls, changes: Mapping[str, str]) -> dict[str, Any]:
        """Parse values by the types that these fields have in other kinds.

        Fields that no kind has stay text.
        """
        own = [get_type_hints(data) for data in (DataConfig, *DATA_KINDS.values())]
        hints = {name: hint for found in own for name, hint in found.items()}
        return {
            name: parse_value(hints.get(current_field("data", name), str), text, f"data.{name}")
            for name, text in changes.items()
        }


@dataclass(frozen=True, kw_only=True)
class CorpusData(DataConfig):
    """The base class of the kinds of data that are read from files.

    Attributes:
        path: the location of the data: a folder of shards that ``remanence data prepare`` wrote, unless the
            kind of data has another format.
        held_out: data of the same kind and format as `path` that is not trained on, for ``validate_every``.
    """

    path: str | None = None
    held_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class PackedData(CorpusData):
    """Documents of prepared shards, packed into rows without padding."""

    kind: str = "packed"


@dataclass(frozen=True, kw_only=True)
class DocumentsData(CorpusData):
    """Documents of prepared shards.

    Each document is read in order by one row, over as many steps as it needs.
    """

    kind: str = "documents"
    carries: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class TextData(CorpusData):
    """Plain text. Its end is held out for validation unless `held_out` is given.

    Attributes:
        path: a text file, a folder of text files or hf:NAME.
    """

    kind: str = "text"
    carries: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class RecallData(DataConfig):
    """Generated rows for associative recall: key-value pairs, noise, and the same keys again.

    Attributes:
        pairs: the number of key-value pairs of a row.
        rounds: how often each pair occurs in a row.
        keys, noise: the number of different keys (and of different values), and of different noise tokens.
    """

    kind: str = "recall"
    pairs: int = 8
    rounds: int = 2
    keys: int = 32
    noise: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(pairs=self.pairs, rounds=self.rounds, keys=self.keys, noise=self.noise)


@dataclass(frozen=True, kw_only=True)
class NeedleData(DataConfig):
    """Generated bytes: sentences that contain a few numbers. The end of a row asks for one of the numbers.

    Attributes:
        pairs: the number of needles (named numbers) of a row.
    """

    kind: str = "needle"
    pairs: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(pairs=self.pairs)


@accepts_old_names("data")
@dataclass(frozen=True, kw_only=True)
class FactsData(CorpusData):
    """Facts stated between the sentences of prepared shards and asked for later.

    Attributes:
        weight: the loss weight of a token of the text; a token of an answer has weight 1. 0: only answers
            count.
        distance_ramp: steps over which the distance between a fact and its question grows from a few tokens
            to its final distribution.
        answer_end: whether the token that ends an answer has weight 1. Runs of earlier versions, in which it
            had the weight of the text, are resumed with False.
        facts: "numbers" (numbers of one to seven digits under names of two words, in five wordings) or "broad"
            (numbers, words and names, in many wordings, and questions about what was not stated).
    """

    kind: str = "facts"
    weight: float = 0.1
    distance_ramp: int = 0
    answer_end: bool = True
    facts: Literal["numbers", "broad"] = "numbers"
    carries: ClassVar[bool] = True
    max_carried_steps: ClassVar[int | None] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between(0, 1, weight=self.weight)
        check_between(0, float("inf"), distance_ramp=self.distance_ramp)
        check_choice("data.facts", self.facts, ("numbers", "broad"))

    def without_schedule(self) -> Self:
        return replace(self, distance_ramp=0)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain data.

        ``answer_end=False`` and ``facts="numbers"`` are omitted, as in the files of earlier versions.
        """
        omitted = {"answer_end": False, "facts": "numbers"}
        return {
            name: value
            for name, value in super().to_dict().items()
            if name not in omitted or value != omitted[name]
        }

    @classmethod
    def from_fields(cls, given: Mapping[str, object]) -> Self:
        """Build the config from the fields in a file. Files without `answer_end` get False."""
        return super().from_fields({"answer_end": False, **given})  # files from before the field existed


@dataclass(frozen=True, kw_only=True)
class CurriculumData(CorpusData):
    """The base class of the kinds of data whose texts can become longer during the run.

    Attributes:
        curriculum: the lengths of texts in tokens, from short to long, each used for an equal part of the
            steps. A length that is given twice is used for two parts. Every step has batch x length tokens,
            in rows of the part's length. Empty: every row has `length` tokens.
    """

    curriculum: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for before, after in pairwise((0, *self.curriculum)):
            if after < before or (before and after % before):
                expected = "rising lengths, each a multiple of the one before"
                raise ValueError(f"data.curriculum: expected {expected}, got {after} after {before}")

    @property
    def stages(self) -> tuple[int, ...]:
        return self.curriculum

    def without_schedule(self) -> Self:
        return replace(self, curriculum=())


@accepts_old_names("data")
@dataclass(frozen=True, kw_only=True)
class FactDialoguesData(CurriculumData):
    """Conversations in which facts are stated and asked for, beside the texts of prepared shards.

    Attributes:
        pairs: the largest number of facts in a conversation.
        share: the fraction of the rows that are conversations; the others read texts. During the steps of
            `distance_ramp`, all rows are conversations.
        weight: the loss weight of a token of the text; a token of an answer has weight 1. 0: only answers
            count.
        distance_ramp: steps over which the distance between a fact and its question grows from a few tokens
            to its final distribution.
    """

    kind: str = "fact_dialogues"
    pairs: int = 8
    share: float = 0.5
    weight: float = 0.1
    distance_ramp: int = 0
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(pairs=self.pairs)
        check_between(0, 1, weight=self.weight, share=self.share)
        check_between(0, float("inf"), distance_ramp=self.distance_ramp)

    def without_schedule(self) -> Self:
        return replace(self, distance_ramp=0, curriculum=())


@dataclass(frozen=True, kw_only=True)
class BabilongData(CurriculumData):
    """The stories of bAbI, hidden in the text of books.

    A length of 0 in `curriculum` means stories without other text. Without a curriculum, every row is one
    text with one question.

    Attributes:
        path: the folder or archive of bAbI, or hf:NAME.
        books: the text in which the stories are hidden: a file, a folder or hf:NAME.
        tasks: the bAbI tasks to train on, out of qa1 to qa20.
    """

    kind: str = "babilong"
    books: str | None = None
    tasks: tuple[str, ...] = ("qa1", "qa2", "qa3", "qa4", "qa5")


DATA_KINDS: Registry[type[DataConfig]] = Registry(
    {
        "packed": PackedData,
        "documents": DocumentsData,
        "text": TextData,
        "recall": RecallData,
        "needle": NeedleData,
        "facts": FactsData,
        "fact_dialogues": FactDialoguesData,
        "babilong": BabilongData,
        **data_configs(),
    }
)
"""The dataclass of each kind of data. `remanence.train.register_data` adds a kind."""


def data_class(kind: str) -> type[DataConfig]:
    """Return the dataclass of a kind of data, or `UnregisteredData` if the kind is unknown."""
    return DATA_KINDS.get(kind, UnregisteredData)
