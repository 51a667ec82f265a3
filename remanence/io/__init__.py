"""File access: atomic writes, digests, safetensors files, migration of earlier formats, included models."""
