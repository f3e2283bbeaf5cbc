"""Initialize weights. Each value depends only on the seed, the name of the parameter, and the value's row and column.

So all grids start from bit-identical weights. A matrix is drawn in blocks of rows, each with its own random generator.
A process draws only the blocks that contain its rows, and keeps its part of these blocks. So no process needs memory
for a full parameter.
"""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.processes import available_cores

BLOCK_ELEMENTS = 1 << 16
"""Number of normally distributed values in a block. With larger blocks, processes would draw more values that they
discard. With smaller blocks, seeding the generators would take too much time."""

BLOCKS_AT_ONCE = 256
"""Number of blocks that are drawn and copied together, about 64 MiB in total."""

ONES = ("dt_bias", "core.norm.weight")
"""Name suffixes of linear attention's parameters that start as ones, even if the model's norms start as zeros."""

FASTEST_DECAY = 16.0
"""Upper limit of linear attention's initial decay rates (Mamba-2, arXiv 2405.21060)."""

Slices = tuple[slice, ...]


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of a single-device model in place."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        fill_slice(parameter.data, name, shape, tuple(slice(0, n) for n in shape), config, seed)


def fill_slice(out: Tensor, name: str, shape: tuple[int, ...], slices: Slices, config: ModelConfig, seed: int) -> None:
    """Fill ``out`` with this process's part of a parameter's initial values.

    Args:
        shape: the shape of the full parameter.
        slices: the part of the full parameter that ``out`` holds.
    """
    if name.endswith("A_log"):
        out.copy_(_decay_rates(shape, _block_seed(seed, name, 0))[slices].log())
    elif name.endswith(ONES):
        out.fill_(1.0)
    elif name.endswith(("bias", "sinks", "lora_B")):  # With B = 0, a new adapter adds nothing to its layer.
        out.zero_()
    elif len(shape) == 1:
        out.fill_(0.0 if config.zero_centered_norm else 1.0)
    elif len(shape) == 3:
        _fill_stack(out, _std(name, shape, config), name, shape, slices, seed)
    else:
        _fill_normal(out, _std(name, shape, config), name, shape, slices, seed)


def _decay_rates(shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw decay rates uniformly between 0 and ``FASTEST_DECAY``. Raise rates below 0.01 to 0.01."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul_(FASTEST_DECAY).clamp_(min=0.01)


def _std(name: str, shape: tuple[int, ...], config: ModelConfig) -> float:
    """Return the standard deviation of a parameter's initial values.

    Layers that write to the residual stream get smaller values the deeper the model is (GPT-2, Radford et al. 2019).
    LoRA's matrix A has the same variance as in the peft library.
    """
    if name.endswith("lora_A"):
        return 1 / math.sqrt(3 * shape[1])
    writes_to_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return config.initializer_range / (math.sqrt(2 * config.num_hidden_layers) if writes_to_residual else 1.0)


def _fill_normal(out: Tensor, std: float, name: str, shape: tuple[int, ...], slices: Slices, seed: int) -> None:
    """Fill part of a matrix with normally distributed values.

    CPU threads draw the values, so the values do not depend on the device. A GPU copies finished blocks from pinned
    memory while the threads draw the next blocks.
    """
    rows, columns = slices
    rows_per_block = max(1, BLOCK_ELEMENTS // shape[1])
    last_block = math.ceil(rows.stop / rows_per_block)
    threads = _threads()
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(rows.start // rows_per_block, last_block, BLOCKS_AT_ONCE):
            blocks = range(begin, min(begin + BLOCKS_AT_ONCE, last_block))
            first, last = (min(block * rows_per_block, shape[0]) for block in (blocks.start, blocks.stop))
            values = torch.empty(last - first, shape[1], pin_memory=out.is_cuda)
            parts = values.split(rows_per_block)
            run = map if min(threads, len(blocks)) == 1 else pool.map
            for _ in run(_draw, parts, (_block_seed(seed, name, block) for block in blocks)):
                pass
            of_out = slice(max(first, rows.start), min(last, rows.stop))
            part = values.mul_(std)[of_out.start - first : of_out.stop - first, columns]
            out[of_out.start - rows.start : of_out.stop - rows.start].copy_(part, non_blocking=True)


def _draw(out: Tensor, seed: int) -> None:
    torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), out=out)


def _threads() -> int:
    """Return the number of threads that draw values.

    If a launcher has set LOCAL_WORLD_SIZE, this is the process's share of the machine's cores. torchrun limits torch to
    one thread per process, but drawing may use more. Without a launcher, use torch's number of threads.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return max(1, available_cores() // local_world_size) if local_world_size else torch.get_num_threads()


def _fill_stack(out: Tensor, std: float, name: str, shape: tuple[int, ...], slices: Slices, seed: int) -> None:
    """Fill part of a stack of matrices. The values are the same as in one tall matrix that contains these matrices one
    below the other."""
    (matrices, rows, columns), (count, height, width) = slices, shape
    for place, number in enumerate(range(matrices.start, matrices.stop)):
        first = number * height
        of_matrix = (slice(first + rows.start, first + rows.stop), columns)
        _fill_normal(out[place], std, name, (count * height, width), of_matrix, seed)


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
