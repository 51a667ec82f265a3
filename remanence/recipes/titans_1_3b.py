"""Pre-train Titans (MAC) with 1.3B parameters on 100 billion tokens of FineWeb-Edu, as in the papers.

Another variant is selected by --model.pattern=mag (mal, lmm, attention, gated_delta, ...).

remanence data prepare hf:HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer tokenizer.json --out out/fineweb \\
    --workers 16
remanence train titans_1_3b --dry-run --gpus 8 --gpu H100
torchrun --nproc-per-node 8 -m remanence train titans_1_3b --out out/titans_1_3b --data.path=out/fineweb

The memory network is "deep", which trains stably (docs/results/dynamics.md). The network of the paper, whose
gradients exploded in our runs on text, is selected by --model.memory.net=titans.

tokenizer.json is the tokenizer of Llama-2, which is available from Meta on request.
"""

from remanence.train import TrainConfig, pretraining


def recipe() -> TrainConfig:
    """Return the config of the run."""
    return pretraining("1.3b", lr=7e-4, billions=100)
