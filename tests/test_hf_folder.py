"""A folder in Hugging Face's hands: found without an import, in a process of its own; a memory file to go on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import greedy, transformers, wrapped
from models import model, tokens

from remanence import Model, Session, cli
from remanence.folder import AUTO
from remanence.hf import RemanenceCache, RemanenceConfig
from remanence.inference import memfile
from remanence.io.shipped import FOLDER
from remanence.testing import assert_close
from remanence.tokenizers.tokens import ByteTokenizer

pytestmark = pytest.mark.skipif(
    os.environ.get("REMANENCE_TEST_DEVICE", "cpu") != "cpu", reason="loads folders to the CPU"
)
ROOT = Path(__file__).parent.parent
AutoModel = transformers.AutoModelForCausalLM


@pytest.fixture
def alone(tmp_path):
    """Python in a process of its own, which has no network and keeps Hugging Face's files in the test's folder."""

    def alone(*arguments, code=0):
        places = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | places,
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if not code else done.stderr

    return alone


@pytest.fixture
def folder(tmp_path):
    native = model("hybrid", torch.float32, vocab_size=257)
    native.save(tmp_path / "m")
    ByteTokenizer().save(tmp_path / "m")
    return native, tmp_path / "m"


class TestWithoutAnImport:
    @pytest.mark.slow
    def test_in_a_process_of_its_own(self, folder, alone, tmp_path):
        """And what is saved there is such a folder again, without a copy of our source in it."""
        native, place = folder
        text = "Grüße, world"
        expected = greedy(native, torch.tensor([ByteTokenizer().encode(text)]), 5)[0].tolist()
        program = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in ({str(place)!r}, {str(tmp_path / "again")!r}):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer({text!r}, return_tensors="pt")
    print(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist())
    if folder == {str(place)!r}:
        model.save_pretrained({str(tmp_path / "again")!r})
        tokenizer.save_pretrained({str(tmp_path / "again")!r})
"""
        assert alone("-c", program).splitlines() == [str(expected)] * 2
        assert [path.read_text() for path in (tmp_path / "again").glob("*.py")] == [AUTO.code]
        assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == AUTO.names
        assert Model.load(tmp_path / "again").config == native.config
        given = f"{str(place)!r}, trust_remote_code=False"
        refused = f"import transformers; transformers.AutoConfig.from_pretrained({given})"
        assert "trust_remote_code=True" in alone("-c", refused, code=1)

    @pytest.mark.slow
    @torch.no_grad()
    def test_lm_eval_at_its_own_command_line(self, folder, alone, tmp_path):
        """``lm_eval --model hf`` finds the log-likelihood that the native model gives."""
        native, place = folder
        (tmp_path / "d.jsonl").write_text(json.dumps({"text": "North or", "end": " south"}) + "\n")
        (tmp_path / "own.yaml").write_text(
            f"task: own\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'd.jsonl'}\n"
            "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{end}}'\n"
            "target_delimiter: ''\nmetric_list:\n  - metric: perplexity\n"
        )
        settings = f"pretrained={place},trust_remote_code=True,dtype=float32"
        out = tmp_path / "results"
        alone(
            *(
                "-m",
                "lm_eval",
                "--model",
                "hf",
                "--model_args",
                settings,
                "--tasks",
                "own",
                "--device",
                "cpu",
            ),
            *("--include_path", tmp_path, "--output_path", out),
        )
        (found,) = out.rglob("results*.json")
        perplexity = json.loads(found.read_text())["results"]["own"]["perplexity,none"]
        text, start = torch.tensor([ByteTokenizer().encode("North or south")]), len("North or")
        chances = native(text)[0][0, start - 1 : -1].log_softmax(-1)
        told = -chances.gather(-1, text[0, start:, None]).sum()
        assert perplexity == pytest.approx(float(told.exp()), rel=1e-3)

    def test_we_never_run_what_lies_in_a_folder(self, folder, tmp_path, monkeypatch, capsys):
        """Neither natively nor, with our classes at hand, through Hugging Face's Auto classes."""
        _, place = folder
        (place / "modeling_remanence.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        Session(place).generate("a", max_tokens=1)
        cli.main(["inspect", str(place)])
        AutoModel.from_pretrained(place)
        assert not (tmp_path / "ran").exists()

    def test_the_shipped_model_has_it_too(self):
        assert (FOLDER / "remanence-small" / "modeling_remanence.py").read_text() == AUTO.code
        config = json.loads((FOLDER / "remanence-small" / "config.json").read_text())
        assert config["auto_map"] == AUTO.names == RemanenceConfig().auto_map


class TestAMemoryFile:
    @pytest.fixture
    def read(self, tmp_path):
        """A model, and what it has read before: as a state and as a file."""
        outer, x = wrapped("mag"), tokens(1, 40)
        _, state = outer.model(x)
        memfile.save(tmp_path / "book.mem", outer.model, state)
        return outer, x, tmp_path / "book.mem"

    @torch.no_grad()
    def test_generate_goes_on_from_it_with_the_prompt_alone(self, read):
        outer, x, path = read
        prompt = tokens(1, 7)
        expected = greedy(outer.model, torch.cat([x, prompt], 1), 6)[:, 40:]
        for fields in ({}, {"attention_mask": torch.ones_like(prompt)}, {"prefill_chunk_size": 3}):
            cache = RemanenceCache.from_file(path, outer)
            found = outer.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False, **fields)
            assert torch.equal(found, expected), fields
        # A second question goes on where the first answer ended.
        more = torch.cat([found, tokens(1, 4)], 1)
        again = outer.generate(more, past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert torch.equal(again, greedy(outer.model, torch.cat([x, more], 1), 3)[:, 40:])
        assert cache.state.position.tolist() == [40 + again.shape[1] - 1]

    @torch.no_grad()
    def test_it_serves_a_batch_and_beams(self, read):
        outer, x, path = read
        prompts, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
        mask[1, :3] = 0
        cache = RemanenceCache.from_file(path, outer)
        fields = {"max_new_tokens": 5, "do_sample": False}
        found = outer.generate(prompts, attention_mask=mask, past_key_values=cache, **fields)
        for row, cut in ((0, 0), (1, 3)):
            own = torch.cat([x, prompts[row : row + 1, cut:]], 1)
            assert torch.equal(found[row : row + 1, 7:], greedy(outer.model, own, 5)[:, -5:])
        whole = outer.generate(torch.cat([x, prompts[:1]], 1), num_beams=3, **fields)
        cache = RemanenceCache.from_file(path, outer)
        beams = outer.generate(prompts[:1], past_key_values=cache, num_beams=3, **fields)
        assert torch.equal(beams, whole[:, 40:])

    def test_what_it_holds_can_be_saved_again(self, read, tmp_path):
        outer, _, path = read
        cache = RemanenceCache.from_file(path, outer)
        outer(tokens(1, 3), past_key_values=cache)
        memfile.save(tmp_path / "more.mem", outer.model, cache.state)
        assert_close(RemanenceCache.from_file(tmp_path / "more.mem", outer).state, cache.state, 0.0)

    def test_another_models_is_refused(self, read, tmp_path):
        _, _, path = read
        with pytest.raises(ValueError, match=r"book\.mem: "):
            RemanenceCache.from_file(path, wrapped("lmm"))
