"""The kernels, and what launches them: the only room that imports Triton."""
