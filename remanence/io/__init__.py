"""Files: atomic writes, digests, safetensors, migrations of earlier formats, shipped models."""
