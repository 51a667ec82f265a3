"""The package as a whole: imports point one way, start-up is quick, annotated shapes are true."""

import ast
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "remanence"

# What each package may import of remanence; a new package must be added here.
BASE = {"runtime", "io", "tokenizers"}
ALLOWED_IMPORTS = {
    "runtime": set(),
    "io": {"runtime"},
    "verticals": {"io"},
    "tokenizers": {"runtime", "io", "verticals"},
    "config": {"runtime", "io", "tokenizers"},
    "ops": {"runtime"},
    "layers": {"runtime", "ops"},
    "memory": {"runtime", "ops", "layers", "config"},
    "mixers": {"runtime", "ops", "layers", "memory", "config"},
    "trace": {"mixers", "backbone"},
    "backbone": {"runtime", "ops", "layers", "mixers", "config", "trace"},
    "causal_model": {"backbone", "config", "mixers", "tokenizers"},
    "model": {"runtime", "io", "backbone", "causal_model", "folder", "mixers", "config"},
    "folder": {"runtime", "io", "model", "config"},
    "attached": {*BASE, "ops", "layers", "memory", "mixers", "backbone", "model", "folder", "config"},
    "inference": {"", *BASE, "attached", "layers", "memory", "mixers", "backbone", "model", "config"},
    "data": {*BASE, "verticals"},
    "tasks": {*BASE, "data"},
    "serve": {"", "runtime", "io", "tokenizers", "config", "model", "inference"},
    "hf": {"runtime", "io", "attached", "folder", "model", "inference", "config"},
    "lens": {"runtime", "tokenizers", "ops", "layers", "memory", "mixers", "model", "inference"},
    "train": {
        "",
        *BASE,
        *("attached", "ops", "memory", "mixers", "folder", "model", "inference", "backbone", "data", "tasks"),
        *("verticals", "config"),
    },
    "recipes": {"runtime", "tokenizers", "config", "train", "verticals"},
    "evaluate": {
        "",
        *BASE,
        *("attached", "ops", "model", "inference", "data", "tasks", "verticals", "train", "hf", "config"),
    },
    # Verticals: the rest of the package finds them through `verticals` and never imports them.
    "forecast": {"runtime", "io", "config", "backbone", "data", "tasks", "train", "evaluate", "verticals"},
    "dna": {*BASE, "config", "data", "inference", "tasks", "train", "evaluate", "recipes", "verticals"},
    "report": {"", "runtime", "io", "model", "config", "evaluate", "verticals"},
    "shipped": {"hf"},
    "testing": set(),
    "laws": {"testing"},
    "cli": {
        "",
        *BASE,
        *(
            "attached",
            "hf",
            "config",
            "ops",
            "data",
            "inference",
            "laws",
            "lens",
            "mixers",
            "model",
            "recipes",
            "report",
            "serve",
        ),
        *("tasks", "train", "evaluate", "verticals"),
    },
    "core": {*BASE, "cli", "evaluate"},  # a shim for earlier imports; nothing imports it
    "__main__": {"cli"},
    "": {
        "attached",
        "config",
        "hf",
        "inference",
        "memory",
        "mixers",
        "backbone",
        "model",
        "ops",
        "verticals",
    },
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.split(".")[0] == "remanence":
                yield [*name.split("."), ""][1]


def test_imports_point_one_way():
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        package = relative.parts[0] if len(relative.parts) > 1 else relative.stem.replace("__init__", "")
        assert package in ALLOWED_IMPORTS, f"{relative}: a package that is not in ALLOWED_IMPORTS"
        wrong = set(imports(path)) - ALLOWED_IMPORTS[package] - ({package} if package else set())
        assert not wrong, f"{relative} imports {wrong}"


PRINTS = {"runtime/terminal.py", "cli/console.py"}
"""The files that print, and make sure that control characters are shown: nothing else may print by itself."""
HARMLESS = {"rich.table", "rich.progress"}
"""What else may be used of rich: what these make is printed by `cli/console.py: Console`."""


def prints(path):
    """Where a file prints, writes to stdout or stderr, or uses what would print for it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and node.id == "print":
            yield f"line {node.lineno}: print"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write"):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.split(".")[0] == "rich" and name not in HARMLESS)


def test_only_two_files_print():
    for path in sorted(PACKAGE.rglob("*.py")):
        relative, found = path.relative_to(PACKAGE).as_posix(), list(prints(path))
        assert bool(found) == (relative in PRINTS), f"{relative}: {found}; use runtime/terminal.py: echo"


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, **options
    )


@pytest.mark.parametrize(
    "body",
    [
        "def twice(x: int) -> int:\n    return undefined_name * x\n",
        'def twice(x: "UndefinedType") -> int:\n    return 2\n',
    ],
)
def test_the_linters_refuse_an_undefined_name(body, tmp_path):
    """With the project's own configuration: a rule ignored there would show here."""
    planted, config = tmp_path / "planted.py", str(ROOT / "pyproject.toml")
    planted.write_text(body)
    ruff = run("-m", "ruff", "check", "--no-cache", "--config", config, str(planted))
    assert ruff.returncode == 1 and "F821" in ruff.stdout, ruff.stdout + ruff.stderr
    mypy = run("-m", "mypy", "--config-file", config, "--cache-dir", str(tmp_path / "cache"), str(planted))
    assert mypy.returncode == 1 and "[name-defined]" in mypy.stdout, mypy.stdout + mypy.stderr


def test_the_command_line_and_the_package_load_without_torch():
    code = (
        "import sys, remanence.cli, remanence.config; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    assert run("-c", code).returncode == 0


def test_the_package_adds_little_to_torch():
    """No clock: what is imported beyond torch is listed, and must not contain a heavy library."""
    code = """
import sys, torch
before = set(sys.modules)
import remanence
remanence.NeuralMemory
print(*(set(sys.modules) - before))
"""
    added = {name.split(".")[0] for name in run("-c", code).stdout.split()}
    assert "remanence" in added
    assert not added & {"matplotlib", "transformers", "triton", "rich", "tyro", "pandas", "scipy", "beartype"}


def test_help_version_and_info():
    for arguments in (["--help"], ["--version"], ["info", "--device", "cpu"], ["demo", "--help"]):
        done = run("-m", "remanence.cli", *arguments)
        assert done.returncode == 0, done.stderr
        assert "remanence" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmo"], "dmo"),
        (["demo", "--device", "tpu"], "tpu"),
        (["demo", "--seed", "x"], "seed"),
        (["demo", "--sed", "1"], "--seed"),
        ([], ""),
    ],
)
def test_wrong_arguments_end_with_code_2_and_no_traceback(arguments, message):
    done = run("-m", "remanence.cli", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("remanence: error: ") and done.stderr.count("\n") == 1


def test_a_file_in_the_way_is_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = run("-m", "remanence.cli", "demo", "--out", str(blocked))
    assert done.returncode == 2
    assert done.stderr.startswith("remanence: error: out: expected a folder to write into, got the file ")
    assert done.stderr.count("\n") == 1


def test_a_device_that_is_not_there_is_one_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run("-m", "remanence.cli", "demo", "--device", "cuda")
    assert done.returncode == 2
    assert (
        done.stderr
        == "remanence: error: device: 'cuda' is not present on this machine (present: cpu); use --device auto\n"
        or "mps" in done.stderr
    )


def test_annotated_shapes_are_true():
    """jaxtyping's annotations on public functions, checked while they run."""
    beartype = pytest.importorskip("beartype").beartype
    from jaxtyping import jaxtyped

    from remanence import Gates, Model, NeuralMemory, ops, preset
    from remanence.backbone import Backbone, Block
    from remanence.layers import GateProjection, RMSNorm, ShortConv, SwiGLU
    from remanence.layers.attention import Attention, SegmentAttention
    from remanence.mixers.window_and_memory import Join

    def checked(function):
        return jaxtyped(typechecker=beartype)(function)

    for function in (ops.memorize, ops.recall, NeuralMemory.forward, NeuralMemory.read):
        typing.get_type_hints(function)
    memorize, recall = checked(ops.memorize), checked(ops.recall)
    q, k, v = (torch.randn(2, 5, 3, 4) for _ in range(3))
    gates = Gates(*[-torch.rand(2, 5, 3) for _ in range(3)])
    state = ops.start(ops.NETS["titans"].init(3, 4), 2)
    _, state, _ = memorize(q, k, v, gates, state)
    recall(q, state)
    with pytest.raises(Exception, match=r"[Tt]ype"):
        memorize(q[0], k, v, gates, state)
    layer = NeuralMemory(dim=12, heads=2)
    models = [Model(preset("tiny", variant, segment=32, window=8)) for variant in ("mac", "mag", "attention")]
    owners = (
        NeuralMemory,
        RMSNorm,
        ShortConv,
        GateProjection,
        SwiGLU,
        Attention,
        SegmentAttention,
        Block,
        Join,
        Backbone,
        Model,
    )
    for owner in owners:
        owner.forward, owner._unchecked = checked(owner.forward), owner.forward
    try:
        _, state = layer(torch.randn(2, 5, 12))
        layer(torch.randn(2, 5, 12), state, mask=torch.ones(2, 5, dtype=torch.bool))
        layer(torch.randn(1, 5, 12), offsets=[0, 2, 5])
        for model in models:
            _, state = model(torch.randint(257, (2, 40)))
            model(torch.randint(257, (2, 5)), state, mask=torch.arange(5) > torch.tensor([[-1], [1]]))
    finally:
        for owner in owners:
            owner.forward = owner._unchecked
            del owner._unchecked
