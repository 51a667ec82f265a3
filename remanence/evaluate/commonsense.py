"""Commonsense benchmarks of Table 1, run by lm-evaluation-harness on local jsonl files or datasets of the
hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from remanence.data.texts import lines
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Result, Row, Setting, Task, check_minimum, share
from remanence.runtime.choices import check_choice

Entry = dict[str, Any]
"""One line of a data file, as a JSON object, or a task definition of the harness."""


class Benchmark(NamedTuple):
    """A benchmark of lm-evaluation-harness."""

    harness: str
    """Name of the task in the harness."""
    files: tuple[str, ...]
    """Prefixes of the names of local files."""
    metrics: tuple[str, ...]
    """Names of the metrics in the harness."""
    read: Callable[[Entry], Entry]
    """Function that converts a line of a local file."""


def _multiple_choice(entry: Entry) -> Entry:
    """Convert a multiple-choice question of llm-foundry to the prompt of the harness ("... Answer:")."""
    query = entry["query"].strip().removeprefix("Passage: ")
    return {
        "query": query if query.endswith("Answer:") else f"{query}\nAnswer:",
        "choices": entry["choices"],
        "gold": entry["gold"],
    }


def _piqa(entry: Entry) -> Entry:
    """Convert a line of PIQA from the Hugging Face or llm-foundry format to query, choices and gold index."""
    if "goal" not in entry:
        return _multiple_choice(entry)
    return {
        "query": f"Question: {entry['goal']}\nAnswer:",
        "choices": [entry["sol1"], entry["sol2"]],
        "gold": int(entry["label"]),
    }


def _arc(entry: Entry) -> Entry:
    """Convert a line of ARC from the Hugging Face or llm-foundry format to query, choices and gold index."""
    if "question" not in entry:
        return _multiple_choice(entry)
    choices, gold = entry["choices"]["text"], entry["choices"]["label"].index(entry["answerKey"])
    return {"query": f"Question: {entry['question']}\nAnswer:", "choices": choices, "gold": gold}


def _siqa(entry: Entry) -> Entry:
    """Convert a line of SIQA from the Hugging Face or llm-foundry format to query, choices and gold index."""
    if "answerA" not in entry:
        return _multiple_choice(entry)
    choices = [entry["answerA"], entry["answerB"], entry["answerC"]]
    return {
        "query": f"Q: {entry['context']} {entry['question']}\nA:",
        "choices": choices,
        "gold": int(entry["label"]) - 1,
    }


def _boolq(entry: Entry) -> Entry:
    """Convert a line of BoolQ from the Hugging Face or llm-foundry format to query, choices and gold index."""
    if "passage" not in entry:
        return _multiple_choice(entry)
    query = f"{entry['passage']}\nQuestion: {entry['question']}?\nAnswer:"
    gold = int(entry.get("label", entry.get("answer")))  # type: ignore[arg-type]
    return {"query": query, "choices": ["no", "yes"], "gold": gold}


def _hellaswag(entry: Entry) -> Entry:
    """Convert a line of HellaSwag from the Hugging Face or llm-foundry format to query, choices and gold
    index.
    """
    if "endings" not in entry:
        return {"query": entry["query"], "choices": entry["choices"], "gold": entry["gold"]}

    def plain(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = plain(f"{entry['activity_label']}: {entry['ctx_a']} {entry['ctx_b'].capitalize()}")
    return {
        "query": query,
        "choices": [plain(ending) for ending in entry["endings"]],
        "gold": int(entry["label"]),
    }


def _winogrande(entry: Entry) -> Entry:
    """Convert a line of WinoGrande to the two contexts, their common ending and the index of the right
    context.
    """
    if "context_options" in entry:
        return {
            "contexts": entry["context_options"],
            "end": entry["continuation"].strip(),
            "gold": entry["gold"],
        }
    before, after = entry["sentence"].split("_", 1)
    return {
        "contexts": [before + entry["option1"], before + entry["option2"]],
        "end": after.strip(),
        "gold": int(entry["answer"]) - 1,
    }


def _lambada(entry: Entry) -> Entry:
    """Convert a line of LAMBADA to the context and the last word."""
    if "text" in entry:
        before, word = entry["text"].rsplit(" ", 1)
        return {"query": before, "end": f" {word}"}
    return {"query": entry["context"], "end": f" {entry['continuation'].lstrip()}"}


def _check_gold(where: str, entry: Entry) -> None:
    """Raise an error if the index of the correct choice is out of range. The harness would read -1 as the
    last choice.
    """
    gold, choices = entry.get("gold"), entry.get("choices", entry.get("contexts"))
    if choices is not None and (type(gold) is not int or not 0 <= gold < len(choices)):
        raise ValueError(f"{where}: gold: expected one of {len(choices)} choices, from 0 on, got {gold!r}")


BENCHMARKS = {
    "lambada": Benchmark("lambada_openai", ("lambada",), ("perplexity", "acc"), _lambada),
    "piqa": Benchmark("piqa", ("piqa",), ("acc",), _piqa),
    "hellaswag": Benchmark("hellaswag", ("hellaswag",), ("acc_norm",), _hellaswag),
    "winogrande": Benchmark("winogrande", ("winogrande",), ("acc",), _winogrande),
    "arc_easy": Benchmark("arc_easy", ("arc_easy", "arc-easy"), ("acc",), _arc),
    "arc_challenge": Benchmark("arc_challenge", ("arc_challenge", "arc-challenge"), ("acc_norm",), _arc),
    "siqa": Benchmark("social_iqa", ("siqa", "social_iqa"), ("acc",), _siqa),
    "boolq": Benchmark("boolq", ("boolq",), ("acc",), _boolq),
}
"""The benchmarks of Table 1 by name."""


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Discard standard error, because the harness prints progress bars, and git errors outside a repository."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


ACCURACY_METRICS = [{"metric": "acc", "aggregation": "mean"}, {"metric": "acc_norm", "aggregation": "mean"}]
"""Accuracy and length-normalised accuracy, as task definitions of the harness list them."""
MULTIPLE_CHOICE: Entry = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": ACCURACY_METRICS,
}
"""Fields of the harness's task definition that all multiple-choice benchmarks share."""
TASK_TEMPLATES: dict[str, Entry] = {
    "choice": {**MULTIPLE_CHOICE, "doc_to_text": "{{query}}"},
    "winogrande": {
        **MULTIPLE_CHOICE,
        "doc_to_text": "gold",
        "doc_to_choice": "contexts",
        "doc_to_target": "end",
        "metric_list": ACCURACY_METRICS[:1],
    },
    "lambada": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{end}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, ACCURACY_METRICS[0]],
    },
}
"""Task definitions of the harness for local files whose lines were converted."""


@dataclass(frozen=True, kw_only=True)
class CommonsenseSettings:
    """Settings of the commonsense benchmarks.

    Attributes:
        data: a folder of jsonl files, compressed or not, named after the benchmarks, with the fields of the
            Hugging Face datasets or of llm-foundry. Default: the tasks of the harness, which download their
            datasets.
        benchmarks: names of the benchmarks: lambada, piqa, hellaswag, winogrande, arc_easy, arc_challenge,
            siqa, boolq.
        samples: number of questions per benchmark, from the start of the file. Default: all.
        batch_size: batch size, in texts.
    """

    data: str | None = None
    benchmarks: tuple[str, ...] = tuple(BENCHMARKS)
    samples: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        check_minimum(1, samples=self.samples, batch_size=self.batch_size)
        if not self.benchmarks:
            raise ValueError("benchmarks: expected at least one, got none")
        for name in self.benchmarks:
            check_choice("benchmarks", name, BENCHMARKS)


class Commonsense(Task):
    """Accuracy on eight benchmarks and its mean, and LAMBADA perplexity. HellaSwag and ARC-challenge use
    length-normalised accuracy, as Table 1 does.
    """

    name = "commonsense"
    Settings = CommonsenseSettings

    def __init__(self, subject: Subject, settings: CommonsenseSettings) -> None:
        super().__init__(subject, settings)
        try:
            import lm_eval  # type: ignore[import-untyped, unused-ignore]  # noqa: F401

            import remanence.hf  # noqa: F401
        except ImportError:
            raise ValueError(
                "commonsense: expected the extra 'eval', which is not installed; pip install 'remanence[eval]'"
            ) from None
        if not (subject.source / "tokenizer.json").is_file():
            raise ValueError(
                f"commonsense: expected a tokenizer.json in the model's folder, got none in {subject.source}"
            )
        self.entries: dict[str, list[Entry]] = {}
        if settings.data is not None:
            self.entries = {
                name: self._read_entries(Path(settings.data), name) for name in settings.benchmarks
            }

    def _read_entries(self, folder: Path, name: str) -> list[Entry]:
        """Read the local file of a benchmark and convert its lines. An error names the file or line."""
        if not folder.is_dir():
            raise ValueError(
                f"commonsense.data: expected a folder of jsonl files, got {folder}, which is not a folder"
            )
        found = sorted(
            path
            for path in folder.iterdir()
            if path.name.lower().startswith(BENCHMARKS[name].files) and ".jsonl" in path.suffixes
        )
        if not found:
            wanted = f"{BENCHMARKS[name].files[0]}.jsonl in {folder}"
            raise ValueError(
                f"commonsense.data: expected {wanted}, got none; without --commonsense.data it comes from the hub"
            )
        entries = lines("commonsense.data", str(found[0]), "jsonl")[: self.settings.samples]
        try:
            read = [BENCHMARKS[name].read(entry) for entry in entries]
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{found[0]}: expected the fields of {name}, as the hub or llm-foundry has them ({error!r})"
            ) from None
        for number, entry in enumerate(read, 1):
            _check_gold(f"{found[0]}: line {number}", entry)
        return read

    @property
    def identity(self) -> Setting:
        return {"samples": self.settings.samples}

    def units(self) -> list[list[Setting]]:
        return [[{"benchmark": name, **self._source_setting([name])}] for name in self.settings.benchmarks]

    def _source_setting(self, names: Sequence[str]) -> Setting:
        """Return a digest of the benchmarks' lines ("hub" without local files).

        For SIQA, also return whether the choices are letters or full answers; letters differ from the paper.
        """
        own = [self.entries[name] for name in names if name in self.entries]
        digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16] if own else "hub"
        if "siqa" not in names:
            return {"digest": digest}
        choices = [choice for entry in self.entries.get("siqa", []) for choice in entry["choices"]]
        letters = bool(choices) and all(re.fullmatch("[A-Z]", choice) for choice in choices)
        return {"digest": digest, "siqa asks": "letters" if letters else "answers"}

    def cost(self, unit: Setting) -> int:
        return sum(len(str(entry)) for entry in self.entries.get(unit["benchmark"], ["hub"]))

    @cached_property
    def harness(self) -> Any:
        """The model as the harness's `HFLM`. Texts are not truncated, because a memory can read any length."""
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped, unused-ignore]

        source, device = str(self.subject.source), str(self.subject.device)
        return HFLM(pretrained=source, device=device, batch_size=self.settings.batch_size, max_length=1 << 20)

    def measure(self, units: list[Setting]) -> list[Result]:
        return [self._measure(unit["benchmark"]) for unit in units]

    def _measure(self, name: str) -> Result:
        """Run one benchmark in the harness. Returns the number of questions and the value of each metric."""
        import datasets  # type: ignore[import-untyped, unused-ignore]
        import lm_eval
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped, unused-ignore]

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        with tempfile.TemporaryDirectory() as folder, _silence_stderr():
            self.harness.model.model.memory_mode = self.subject.memory_mode
            task: str | Entry = BENCHMARKS[name].harness
            if name in self.entries:
                path = Path(folder) / "entries.jsonl"
                path.write_text(
                    "".join(json.dumps(entry) + "\n" for entry in self.entries[name]), encoding="utf-8"
                )
                source = {"data_files": {"test": str(path)}, "cache_dir": folder}
                form = TASK_TEMPLATES.get(name, TASK_TEMPLATES["choice"])
                task = {
                    "task": name,
                    "dataset_path": "json",
                    "dataset_kwargs": source,
                    "test_split": "test",
                    **form,
                }
            try:
                found = lm_eval.simple_evaluate(
                    self.harness,
                    tasks=[task],
                    limit=self.settings.samples,
                    bootstrap_iters=0,
                    log_samples=False,
                    task_manager=TaskManager(include_defaults=isinstance(task, str)),
                )
            except (OSError, ConnectionError, RuntimeError) as error:
                if name in self.entries:
                    raise
                reason = " ".join(str(error).split())[:200]
                hint = "--commonsense.data=FOLDER takes jsonl files"
                raise ValueError(
                    f"commonsense: {name} could not be read from the hub ({reason}); {hint}"
                ) from None
        (values,) = found["results"].values()
        count = next(iter(found["n-samples"].values()))["effective"]
        return {"count": count, **{metric: values[f"{metric},none"] for metric in BENCHMARKS[name].metrics}}

    def rows(self, results: Sequence[tuple[Setting, Result]]) -> list[Row]:
        rows, shares = [], []
        for unit, result in results:
            for metric in BENCHMARKS[unit["benchmark"]].metrics:
                if metric.startswith("acc"):
                    shares.append(result[metric])
                    rows.append(
                        self.row(
                            metric,
                            **share(round(result[metric] * result["count"]), result["count"]),
                            setting=unit,
                        )
                    )
                else:
                    rows.append(self.row(metric, result[metric], unit, count=result["count"]))
        if len(results) == len(BENCHMARKS):
            setting = {"benchmark": "all", **self._source_setting(list(BENCHMARKS))}
            rows.append(self.row("mean accuracy", sum(shares) / len(shares), setting))
        return rows
