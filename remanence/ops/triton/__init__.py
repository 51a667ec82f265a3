"""Triton kernels and their launches: the only package that imports Triton."""
