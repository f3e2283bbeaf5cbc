"""The 4D linear layer computes what ``nn.Linear`` computes. If its steps run one by one, the result is
bit-identical."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from fourfold.config.run import OverlapConfig, ParallelConfig
from fourfold.overlap_order import Steps, run_batch_parts
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import Linear4D, LinearGroup, OverY
from fourfold.parallel.tensor.linear_steps import PostponedGradients, Schedule, linear_steps

HIDDEN, INNER, SEQUENCES, TOKENS = 8, 12, 2, 6
PLACEMENTS: tuple[OverY, ...] = ("replicate", "features", "batch", "sequence")
GRIDS = [{}, {"x": 2}, {"y": 2}, {"z": 2}, {"x": 2, "y": 2}]


class Layers(nn.Module):
    """Two MLPs, each with the layers gate, up, and down."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        widths = {"gate": INNER, "up": INNER}
        self.ups = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(HIDDEN, inner, dtype=dtype) for name, inner in widths.items()})
            for _ in range(2)
        )
        self.downs = nn.ModuleList(nn.Linear(INNER, HIDDEN, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            gate, value = (linear(x) for linear in up.values()) if isinstance(up, nn.ModuleDict) else up(x)
            x = down(gate * value)
        return x

    def on(self, grid: Grid, over_y: OverY, overlap: OverlapConfig, gather_again: bool) -> Layers:
        """Return the same layers as tiles of this rank."""
        tiled = Layers(self.downs[0].weight.dtype)
        for number in range(2):
            tiled.ups[number] = LinearGroup(self.ups[number], grid, over_y, "up", overlap)
            tiled.downs[number] = Linear4D(self.downs[number], grid, over_y, "down", overlap, transposed=True)
        tiled.to_empty(device="cpu")
        for name, parameter in tiled.named_parameters():
            parameter.data.copy_(tile_of(tiled, name, self.get_parameter(name), grid))
        for module in tiled.modules():
            if isinstance(module, Linear4D):
                module.gather_again = gather_again
        return tiled

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Run tiled layers in steps. The first ``down`` computes the weight gradients of the second ``up``."""
        later = PostponedGradients(self.ups[1].layers()) if self.downs[0].writes.axis.size > 1 else None
        schedules = [
            (Schedule(), Schedule(gather_follows=True, computes_weight_gradients_of=later)),
            (Schedule(leaves_weight_gradients_to=later), Schedule(waits_before_matmul=True)),
        ]
        for up, down, (of_up, of_down) in zip(self.ups, self.downs, schedules, strict=True):
            gate, value = yield from linear_steps(x, up.layers(), of_up)
            (x,) = yield from linear_steps(gate * value, [down], of_down)
        return x


def tile_of(tiled: nn.Module, name: str, whole: Tensor, grid: Grid) -> Tensor:
    parent, _, key = name.rpartition(".")
    return whole[tiled.get_submodule(parent).tiles[key].slices(tuple(whole.shape), grid)]


def share_of(whole: Tensor, grid: Grid) -> Tensor:
    """Return this rank's tokens and channels of the residual stream."""
    return whole.chunk(grid.x.size, 1)[grid.x.rank].chunk(grid.y.size, 2)[grid.y.rank].contiguous()


def results(layers: Layers, x: Tensor, grad: Tensor, stepped: bool = False) -> dict[str, Tensor]:
    """Return the output, and the gradients of the input and of the weights. Gradients of biases are left out, because
    other code sums them over ranks."""
    x = x.clone().requires_grad_()
    (out,) = run_batch_parts([layers.steps(x)], runs_ahead=False) if stepped else [layers(x)]
    out.backward(grad)
    weights = {name: p.grad for name, p in layers.named_parameters() if name.endswith("weight")}
    return {"output": out.detach(), "input gradient": x.grad} | weights


def against_one_process_body(rank: int, world_size: int, axes: dict[str, int]) -> None:
    grid, whole = Grid(ParallelConfig(**axes), "cpu"), Layers(torch.float64)
    x, grad = torch.randn(2, SEQUENCES, TOKENS, HIDDEN, dtype=torch.float64).unbind()
    expected = results(whole, x, grad)
    for over_y in PLACEMENTS:
        tiled = whole.on(grid, over_y, OverlapConfig(), gather_again=False)
        for name, found in results(tiled, share_of(x, grid), share_of(grad, grid)).items():
            is_weight = name.endswith("weight")
            want = tile_of(tiled, name, expected[name], grid) if is_weight else share_of(expected[name], grid)
            assert torch.allclose(found, want, rtol=1e-12, atol=1e-12), (over_y, name)


def bits_body(rank: int, world_size: int, axes: dict[str, int], overlaps: bool, gather_again: bool) -> list[str]:
    """Return what differs between the layers in one piece and the layers in steps."""
    grid, whole = Grid(ParallelConfig(**axes), "cpu"), Layers(torch.float32)
    x, grad = (share_of(t, grid) for t in torch.randn(2, SEQUENCES, TOKENS, HIDDEN))
    overlap, differ = OverlapConfig(input_gradients=overlaps, gate_sum=overlaps), list[str]()
    for over_y in PLACEMENTS:
        plain, stepped = (
            results(whole.on(grid, over_y, overlap, gather_again), x, grad, stepped) for stepped in (False, True)
        )
        differ += [f"{over_y}: {name}" for name in plain if not torch.equal(plain[name], stepped[name])]
    return differ


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_tiles_compute_what_whole_layers_compute(pool: Pool, axes: dict[str, int]) -> None:
    pool.run(ParallelConfig(**axes).world_size, against_one_process_body, axes)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("gather_again", [False, True], ids=["kept", "gathered again"])
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_steps_compute_the_same_bits(pool: Pool, axes: dict[str, int], overlaps: bool, gather_again: bool) -> None:
    found = pool.run(ParallelConfig(**axes).world_size, bits_body, axes, overlaps, gather_again)
    assert not any(found), found
