"""What can be set is listed by --help with its value and meaning, and typed: an editor and mypy know every name."""

import inspect
import pydoc
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import remanence
from remanence import Model, ModelConfig, NeuralMemory, Rule, Session, preset
from remanence.cli.fields import Field, all_fields, format_fields, format_value
from remanence.config import KnnConfig, MemoryConfig, ModelFields
from remanence.evaluate import TASKS
from remanence.inference.sampling import Sampling, SamplingFields
from remanence.runtime.keywords import KnnFields, MemoryFields
from remanence.runtime.overrides import parse_value
from remanence.train import TrainConfig, override

ROOT = Path(__file__).parent.parent
LISTS = {"train": [TrainConfig()], **{name: [task.Settings()] for name, task in TASKS.items()}}


class TestHelp:
    def test_train_lists_every_field_with_its_default_and_its_meaning(self, command):
        lines = command("train", "--help").splitlines()
        for name, value, description in all_fields(TrainConfig()):
            assert f"  --{name}={format_value(value)}".rstrip() in [line.rstrip() for line in lines]
            assert description.split()[0] in " ".join(lines)

    def test_eval_lists_every_setting_of_every_task(self, command):
        said = command("eval", "--help")
        for task in TASKS.values():
            for name, value, _ in all_fields(task.Settings(), f"{task.name}."):
                assert f"  --{name}={format_value(value)}\n" in said

    @pytest.mark.parametrize("name", LISTS)
    def test_every_field_has_a_meaning(self, name):
        for config in LISTS[name]:
            assert [each.name for each in all_fields(config) if not each.description] == []

    def test_names_on_one_line_share_its_meaning(self):
        found = [Field("a", 1, "both"), Field("b", None, "both"), Field("c", (1, 2), "alone")]
        assert list(format_fields(found)) == [
            "  --a=1",
            "  --b=none",
            "      both",
            "  --c=1,2",
            "      alone",
        ]

    def test_what_is_shown_can_be_given(self):
        listed = {each.name: each for each in all_fields(TrainConfig())}
        same = {name: format_value(each.value) for name, each in listed.items() if name != "model.memory.dim"}
        assert override(TrainConfig(), same) == TrainConfig()
        for task in TASKS.values():
            hints = typing.get_type_hints(task.Settings)
            for name, value, _ in all_fields(task.Settings()):
                assert parse_value(hints[name], format_value(value), name) == value


def parameters(function):
    return inspect.signature(function).parameters


class TestSignatures:
    """`help` lists every argument with its default."""

    @pytest.mark.parametrize("name", remanence.__all__)
    def test_every_argument_is_written_out(self, name):
        found = getattr(remanence, name)
        if not callable(found) or getattr(found, "_is_protocol", False) or found is remanence.Mixer:
            return  # a protocol has no constructor; that of a mixer is its subclass's
        kinds = {each.kind for each in parameters(found).values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name

    @pytest.mark.parametrize("name", remanence.MIXERS)
    def test_of_mixers(self, name):
        kinds = {each.kind for each in parameters(remanence.MIXERS[name]).values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}

    def test_the_defaults_are_those_of_the_configs(self):
        memory = parameters(NeuralMemory)
        assert list(memory) == ["config", *[each.name for each in fields(MemoryConfig)]]
        assert (memory["dim"].default, memory["net"].default, memory["conv"].default) == (
            inspect.Parameter.empty, "deep", 4
        )  # fmt: skip
        assert parameters(Session.generate)["max_tokens"].default == Sampling().max_tokens
        attach = parameters(remanence.attach)
        assert (attach["head_dim"].default, attach["k"].default) == (128, KnnConfig().k)
        assert list(parameters(Rule)) == list(parameters(type(Rule()))) == [
            "momentum", "forget", "decay_first", "anchor", "loss", "max_step"
        ]  # fmt: skip

    def test_help_shows_them(self):
        said = pydoc.render_doc(NeuralMemory, renderer=pydoc.plaintext)
        assert "heads: 'int | None' = None, head_dim:" in said and "**fields" not in said
        for function, source in ((Model, "config"), (preset, "preset")):
            said = pydoc.render_doc(function, renderer=pydoc.plaintext)
            assert (
                f"window: 'int' = <from {source}>" in said
                and "**fields" not in said
                and "**changes" not in said
            )

    @pytest.mark.parametrize("made", [Model.__init__, preset, NeuralMemory.__init__, Session.stream])
    def test_the_arguments_are_those_that_are_accepted(self, made):
        """What the function itself takes is listed, and nothing else but fields."""
        own = made.__code__.co_varnames[: made.__code__.co_argcount]
        assert tuple(parameters(made))[: len(own)] == own


class TestTypes:
    @pytest.mark.parametrize(("typed", "config"), [(MemoryFields, MemoryConfig), (KnnFields, KnnConfig)])
    def test_typed_fields_are_those_of_the_config(self, typed, config):
        assert typing.get_type_hints(typed) == typing.get_type_hints(config)

    def test_typed_fields_of_a_model_and_of_sampling(self):
        typed, config = typing.get_type_hints(ModelFields), typing.get_type_hints(ModelConfig)
        loose = ("pattern", "memory", "knn")
        assert typed.keys() == config.keys()
        assert {name: typed[name] for name in typed if name not in loose} == {
            name: config[name] for name in config if name not in loose
        }
        assert typing.get_type_hints(SamplingFields).keys() == typing.get_type_hints(Sampling).keys()

    @pytest.mark.slow
    def test_mypy_knows_every_name(self, tmp_path):
        """The repository's own cache is used: after the linter this takes seconds."""
        good = [
            "NeuralMemory(dim=8, heads=2)",
            'preset("tiny", "mag+knn", window=64, memory={"chunk": 64}, knn={"size": 64})',
            'Session("m", write="prompt").generate("a", max_tokens=1, temperature=0.5)',
            'list(Session("m").stream("a", top_k=1))',
            'Model(preset("tiny"), num_layers=1)',
        ]
        bad = {
            "NeuralMemory(dim=8, headz=2)": "headz",
            'preset("tiny", windw=64)': "windw",
            'preset("tiny", memory={"chnk": 64})': "memory",
            'Session("m").generate("a", max_token=1)': "max_token",
            'Session("m").generate("a", max_tokens="1")': "max_tokens",
            'Session("m", wrte="all")': "wrte",
        }
        snippet = tmp_path / "snippet.py"
        head = "from remanence import Model, NeuralMemory, Session, preset\n"
        snippet.write_text(head + "\n".join([*good, *bad]) + "\n")
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", snippet],
            capture_output=True, text=True, cwd=ROOT, timeout=600,
        )  # fmt: skip
        errors = [line for line in done.stdout.splitlines() if "snippet.py" in line and " error: " in line]
        first = 2 + len(good)
        for number, (code, name) in enumerate(bad.items(), first):
            own = [line for line in errors if f"snippet.py:{number}:" in line]
            assert own and name in own[0], f"{code}: {done.stdout}"
        assert len(errors) == len(bad), done.stdout


class TestPatterns:
    def test_names_joined_by_plus_are_a_pattern_wherever_one_is_given(self, command, tmp_path):
        both = preset("tiny", ("mag", "knn"))
        assert preset("tiny", "mag+knn") == both
        assert preset("tiny", pattern="mag+knn") == both
        assert ModelConfig.from_dict({**both.to_dict(), "pattern": "mag+knn"}) == both
        assert ModelConfig.from_dict({**both.to_dict(), "pattern": ["mag+knn"]}) == both
        for given in ("mag+knn", "mag,knn"):
            assert override(TrainConfig(), {"model.pattern": given}).model.pattern == ("mag", "knn")
        said = command("new", "tiny", tmp_path / "m", "--variant", "mag+knn")
        assert "tiny mag+knn" in said and ModelConfig(**{**vars(both), "pattern": "mag+knn"}) == both

    @pytest.mark.parametrize("pattern", ["mag+", "+", "", (), ("mag", ""), 3, None])
    def test_what_is_no_pattern_is_refused(self, pattern):
        with pytest.raises(ValueError, match="pattern: expected names of blocks"):
            preset("tiny", pattern=pattern)
