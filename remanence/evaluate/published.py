"""Results published in the Titans paper, for plots and tables.

The source is arXiv 2501.00663v1, which reports no seeds or error bars. The values of Figures 6 and 7 were
read off the plots. Accuracies are in percent, lengths in tokens.
"""

from __future__ import annotations

Numbers = tuple[float | None, ...]
"""Values of a line, one per length. None: not published."""
Points = list[tuple[int, float]]
"""Points of a line: (length in tokens, value)."""

TABLE5 = {
    "base": 27.01,
    "linear": 28.49,
    "no_conv": 28.73,
    "no_momentum": 28.98,
    "no_forget": 29.04,
    "no_persistent": 27.63,
}
"""Perplexity of an LMM with 400M parameters and of its ablations (Table 5). The keys are the variants of the
task ``ablate``.
"""

# Figure 6: BABILong. The paper states neither the number of few-shot examples nor which tasks are averaged.
# In the second panel Titans, Mamba and RMT are fine-tuned; the large models are not.
FIGURE6_LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 524_288, 1_048_576, 10_485_760)
"""Lengths in Figure 6, in tokens."""
FIGURE6: dict[str, dict[str, Numbers]] = {
    "few-shot": {
        "Titans (MAC)": (76, 76, 74, 73, 71, 70, 66, 64, 61, 53, None),
        "GPT-4": (81, 77, 74, 71, 64, 53, 43, 36, None, None, None),
        "GPT4o-mini": (72, 71, 65, 62, 60, 54, 45, 43, None, None, None),
        "Llama3.1-8B": (68, 66, 66, 62, 60, 56, 49, 39, None, None, None),
        "Gemma-9B": (71, 69, 64, 0, None, None, None, None, None, None, None),
        "RecurrentGemma-9B": (59, 57, 21, 14, 8, None, None, None, None, None, None),
        "RWKV-6-7B": (55, 48, 35, 7, None, None, None, None, None, None, None),
        "Mamba2.8B": (52, 35, 9, 0, None, None, None, None, None, None, None),
    },
    "fine-tuned": {
        "Titans (MAC)-FT": (99, 99, 99, 98, 99, 99, 97, 98, 95, 94, 69),
        "Mamba-FT": (99, 99, 99, 99, 99, 98, 96, 92, None, None, None),
        "RMT-FT": (97, 95, 92, 90, 86, 78, 70, 59, 46, 43, 34),
        "Qwen2.5-72B": (78, 76, 75, 73, 71, 68, 66, 58, None, None, None),
        "Llama3.1-70B": (81, 78, 74, 70, 65, 59, 53, 45, None, None, None),
        "GPT-4": (81, 77, 74, 71, 64, 53, 43, 36, None, None, None),
        "GPT4o-mini": (72, 71, 65, 62, 60, 54, 45, 43, None, None, None),
        "Llama3.1-8B + RAG": (48, 47, 46, 45, 45, 44, 42, 45, 42, 39, 37),
    },
}
"""Accuracy in percent by panel and model, one value for each of `FIGURE6_LENGTHS`."""


def figure6(panel: str) -> dict[str, Points]:
    """Return the lines of a panel of Figure 6, "few-shot" or "fine-tuned", by model name. Each line is a list
    of (tokens, accuracy in percent).
    """
    return _points(FIGURE6_LENGTHS, FIGURE6[panel])


# Figure 7: perplexity on a part of the Pile by length, for memories of one to four layers.
FIGURE7_PARAMETERS = {"170M": 170e6, "360M": 360e6, "760M": 760e6}
"""Number of parameters of each model size in Figure 7."""
FIGURE7_LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
"""Lengths in Figure 7, in tokens."""
FIGURE7: dict[str, dict[str, Numbers]] = {
    "170M": {
        "Mamba": (16.26, 16.2, 16.35, 16.6, 17.8),
        "depth 1": (16.02, 15.89, 15.83, 15.85, 16.1),
        "depth 2": (15.5, 15.37, 15.33, 15.4, 15.47),
        "depth 3": (15.3, 15.24, 15.19, 15.22, 15.29),
        "depth 4": (15.28, 15.27, 15.23, 15.25, 15.27),
    },
    "360M": {
        "Mamba": (13.18, 13.05, 12.82, 13.14, 13.44),
        "depth 1": (13.19, 13.02, 12.7, 12.71, 12.75),
        "depth 2": (13.22, 12.85, 12.49, 12.48, 12.51),
        "depth 3": (13.21, 12.81, 12.35, 12.33, 12.41),
        "depth 4": (13.26, 12.8, 12.31, 12.29, 12.3),
    },
    "760M": {
        "Mamba": (10.61, 10.42, 10.39, 10.53, 10.64),
        "depth 1": (10.52, 10.24, 10.04, 9.94, 9.95),
        "depth 2": (10.49, 10.15, 9.8, 9.66, 9.64),
        "depth 3": (10.49, 10.05, 9.74, 9.62, 9.6),
        "depth 4": (10.5, 10.02, 9.7, 9.63, 9.59),
    },
}
"""Perplexity by model size and line, one value for each of `FIGURE7_LENGTHS`."""


def figure7(size: str) -> dict[str, Points]:
    """Return the lines of a panel of Figure 7, "170M", "360M" or "760M", by name. Each line is a list of
    (tokens, perplexity).
    """
    return _points(FIGURE7_LENGTHS, FIGURE7[size])


def nearest_figure7(parameters: float) -> str:
    """Return the model size in Figure 7 that is nearest to this number of parameters."""
    return min(FIGURE7_PARAMETERS, key=lambda size: abs(FIGURE7_PARAMETERS[size] - parameters))


def _points(lengths: tuple[int, ...], lines: dict[str, Numbers]) -> dict[str, Points]:
    """Pair each value with its length, by line name. Lengths without a published value (None) are left out."""
    return {
        name: [(length, cell) for length, cell in zip(lengths, cells, strict=True) if cell is not None]
        for name, cells in lines.items()
    }
