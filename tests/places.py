"""Tensors that lie where torch would never put them, so that every machine meets what only some files and processors
show.
"""

import torch

from remanence.io.tensors import ALIGNMENT


def unaligned(tensor, by=8):
    """A copy whose memory begins `by` bytes after a multiple of 64."""
    room = torch.empty(tensor.nbytes + 2 * ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -room.data_ptr() % ALIGNMENT + by
    return room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def misplace(path, by=8):
    """Make a safetensors file's tensors begin `by` bytes after a multiple of 64: its header may end in any number of
    spaces.
    """
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = whole[8:start].rstrip(b" ")
    header += b" " * ((by - 8 - len(header)) % ALIGNMENT)
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[start:])


def misaligned(tensors):
    """How many bytes after a multiple of 64 each begins, of those that do not begin at one."""
    return [tensor.data_ptr() % ALIGNMENT for tensor in tensors if tensor.data_ptr() % ALIGNMENT]
