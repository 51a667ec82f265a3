"""Files are whole or not there, one process writes at a time, and damage to what we wrote is noticed."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from remanence.io.files import (
    _temporary_folder,
    add_digest,
    locked,
    read_json,
    replacing,
    replacing_folder,
    write_json,
)
from remanence.io.tensors import read_header, read_tensors, write_tensors


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def fail(path: Path) -> None:
    path.write_text("half")
    raise KeyError


def test_nothing_is_there_until_all_of_it_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyError), replacing(path) as temporary:
        fail(temporary)
    assert path.read_text() == "before" and not hidden(tmp_path)
    with replacing(path) as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after" and not hidden(tmp_path)
    with pytest.raises(KeyError), replacing_folder(tmp_path / "folder") as temporary:
        fail(temporary / "x")
    assert not (tmp_path / "folder").exists() and not hidden(tmp_path)
    with replacing_folder(tmp_path / "folder") as temporary:
        (temporary / "x").write_text("whole")
    assert os.listdir(tmp_path / "folder") == ["x"]


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path):
    program = (
        "import os, pathlib, sys; from remanence.io.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "a.txt"
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    assert len(hidden(tmp_path)) == 1 and not path.exists()
    with _temporary_folder(path) as mine:
        assert hidden(tmp_path) == [mine.name]  # the leftover is gone
        with replacing(path) as temporary:
            temporary.write_text("beside")
        assert mine.is_dir()  # and what is being written is not
        with replacing(tmp_path / "a.txt.b") as temporary:
            temporary.write_text("another")
    assert not hidden(tmp_path)


def test_a_folder_is_for_one_process(tmp_path):
    out = tmp_path / "deep" / "run"
    with locked(out, "a training run"):
        (out / "file").write_text("")
        with pytest.raises(ValueError, match="run: in use by a training run"), locked(out, "a training run"):
            pass
    with locked(out, "a training run"):
        assert (out / "file").exists()
    with pytest.raises(KeyError), locked(tmp_path / "new", "a training run"):
        raise KeyError
    assert not (tmp_path / "new").exists()


def test_a_lock_dies_with_its_process(tmp_path):
    program = (
        "import os, pathlib, sys; from remanence.io.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), 'a run'):\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "run")], **pipes) as other:
        assert other.stdout.read(2) == b"in"
        with pytest.raises(ValueError, match="in use"), locked(tmp_path / "run", "a run"):
            pass
        other.kill()
    with locked(tmp_path / "run", "a run"):
        pass


def test_a_sealed_object_is_read_back_or_refused(tmp_path):
    path, data = tmp_path / "a.json", {"step": 100, "shape": [1, 2], "name": "é"}
    write_json(path, add_digest(data))
    assert read_json(path) == data
    text = path.read_text()
    path.write_text(text.replace("100", "900"))
    with pytest.raises(ValueError, match=r"a\.json: damaged, or changed by hand"):
        read_json(path)
    path.write_text(text.replace("digest", "aigest"))
    with pytest.raises(ValueError, match=r"a\.json: damaged, or changed by hand"):
        read_json(path)
    write_json(path, data)
    assert read_json(path) == data
    path.write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(ValueError, match=r"a\.json: not a JSON file"):
        read_json(path)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(3, 5, generator=generator, device="cpu")
    return {
        "a": floats,
        "b": floats.bfloat16(),
        "c": torch.arange(4, device="cpu"),
        "empty": torch.empty(0, 7, device="cpu"),
        "flag": torch.tensor([True, False], device="cpu"),
    }


def test_what_a_file_holds_is_known_before_it_is_read(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors, {"format": "pt"})
    header = read_header(path)
    assert {name: list(entry.shape) for name, entry in header.entries.items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert {name: entry.nbytes for name, entry in header.entries.items()} == {
        name: tensor.nbytes for name, tensor in tensors.items()
    }
    assert all(f"torch.{entry.dtype}" == str(tensors[name].dtype) for name, entry in header.entries.items())
    stored = read_tensors(path)
    assert stored.metadata == {"format": "pt"}
    assert all(torch.equal(stored.tensors[name], tensor) for name, tensor in tensors.items())


def test_any_damaged_byte_of_a_file_is_noticed(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors, {"format": "pt"})
    whole, choose = path.read_bytes(), random.Random(0)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.safetensors: "):
            read_tensors(path)
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.safetensors: "):
            read_tensors(path)


def test_a_file_that_others_have_written_is_taken_as_it_is(tmp_path, tensors):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(read_tensors(path).tensors["a"], tensors["a"])


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"x": 1}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": []}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": null}}',
        b'{"__metadata__": {}}',
        b"[" * 100_000,
    ],
)
def test_headers_that_cannot_be_true_are_refused(tmp_path, header):
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"a\.safetensors: damaged, or not a safetensors file"):
        read_header(path)


def test_a_file_of_holes_costs_nothing(tmp_path):
    path, count = tmp_path / "a.safetensors", 100 * 2**30
    header = json.dumps({"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count)
    assert read_header(path).entries["a"].nbytes == count


def test_a_product_of_sizes_takes_no_time(tmp_path):
    path = tmp_path / "a.safetensors"
    shape = [999_999_999_999] * 50_000
    header = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="a shape that no tensor has"):
        read_header(path)


def test_links_are_followed_and_permissions_kept(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to(real)
    write_tensors(link, {"a": torch.ones(1, device="cpu")}, {})
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert torch.equal(read_tensors(real).tensors["a"], torch.ones(1, device="cpu"))
    write_tensors(tmp_path / "new", {"a": torch.ones(1, device="cpu")}, {})
    real.unlink()
    real.write_text("")
    assert (tmp_path / "new").stat().st_mode == real.stat().st_mode
    long = tmp_path / ("x" * 250)
    with replacing(long) as temporary:
        temporary.write_text("long")
    assert long.read_text() == "long" and not hidden(tmp_path)
    mine = tmp_path / ".long.backup.tmp"
    mine.mkdir()
    with replacing(tmp_path / "long") as temporary:
        temporary.write_text("")
    assert mine.is_dir()


def test_a_child_does_not_hold_what_its_parent_has_locked(tmp_path):
    with locked(tmp_path / "run", "a run"):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
        os.close(reads)
    try:
        with locked(tmp_path / "run", "a run"):
            pass
    finally:
        os.close(writes)
        os.waitpid(child, 0)
