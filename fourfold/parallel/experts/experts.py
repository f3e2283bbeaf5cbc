"""A mixture-of-experts (MoE) layer on the grid. The axis ep splits the experts, and the tensor axes x and y split the
matrices of each expert as in the dense MLP.

Each token is sent to K experts, so it becomes K rows. Shapes: T tokens of this rank, h = H/y channels, E experts, K
experts per token, N rows, f = F/x (this rank's share of an expert's inner width F).
"""

import math
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.run import OverlapConfig
from fourfold.models.grouped import Groups, add_biases, grouped_matmul
from fourfold.models.mixture import Experts, Mixture, Order, combine, order_by_expert, take_rows
from fourfold.models.recomputation import recomputable, remembered
from fourfold.parallel.experts.dispatch import Dispatch
from fourfold.parallel.experts.router import ParallelRouter, within_capacity_of_sequences
from fourfold.parallel.grid.communicate import sum_gradient, sum_of
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import Linear4D, LinearGroup
from fourfold.parallel.tensor.sharding import Tile, Tiled


class ParallelMixture(nn.Module):
    """An MoE layer: router, experts, and shared expert. It maps this rank's tokens [B, T, h] to outputs [B, T, h].

    The router sends no padding to experts.
    """

    def __init__(self, mixture: Mixture, grid: Grid, overlap: OverlapConfig, layer: int) -> None:
        super().__init__()
        self.grid, self.capacity_factor = grid, mixture.capacity_factor
        self.gate = ParallelRouter(mixture.gate, grid, layer)
        self.dispatch = Dispatch(grid, self.gate.num_experts)
        self.experts = ParallelExperts(mixture.experts, grid)
        self.shared_expert = mixture.shared_expert
        if (shared := self.shared_expert) is not None:
            shared.add_module("up", LinearGroup(shared.up, grid, "replicate", "shared up", overlap))
            down = Linear4D(shared.down_proj, grid, "replicate", "shared down", overlap, transposed=True)
            shared.add_module("down_proj", down)
        gate = mixture.shared_expert_gate
        self.shared_expert_gate = None if gate is None else SharedExpertGate(gate, grid)

    def forward(self, x_BTh: Tensor, is_data_BS: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            x_BTh: This rank's tokens.
            is_data_BS: False for padding. The mask covers the tokens of all x ranks, not only of this rank.
        """
        out_BTh = self._routed(x_BTh, is_data_BS)
        return out_BTh if self.shared_expert is None else out_BTh + self._shared(x_BTh)

    def _routed(self, x_BTh: Tensor, is_data_BS: Tensor | None) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token."""
        x_Th, experts = x_BTh.flatten(0, 1), self.gate.num_experts
        is_data_T = None
        if is_data_BS is not None:
            is_data_T = is_data_BS.chunk(self.grid.x.size, dim=1)[self.grid.x.rank].flatten()
        routing, kept_TK = self.gate(x_Th, is_data_T), None
        # Experts have a capacity limit only in training. In evaluation, a document's score must not depend on the other
        # documents of the batch.
        if self.capacity_factor and self.training:
            experts_BTK = routing.experts_TK.unflatten(0, x_BTh.shape[:2])
            kept_BTK = within_capacity_of_sequences(experts_BTK, experts, self.capacity_factor, self.grid)
            kept_TK = kept_BTK.flatten(0, 1)
            self.gate.count_dropped(kept_TK | (routing.experts_TK == experts))
        order = order_by_expert(routing.experts_TK, kept_TK, experts, is_data_T is not None)
        weights_TK = sum_gradient(routing.weights_TK, self.grid.y, "router: weights' gradient")
        # Do not assign the experts' outputs to a variable, because the variable would keep them in memory.
        return combine(self._outputs(x_Th, order), order, weights_TK).view_as(x_BTh)

    def _outputs(self, x_Th: Tensor, order: Order) -> Tensor:
        """Return the experts' outputs, [N, h]: one for each row of ``order``, sorted by expert."""
        load = self.gate.load
        planned = load.planned_rows(len(order.place_N)) if load is not None and load.planned is not None else None
        if self.grid.ep.size * self.grid.x.size == 1 and planned is None:
            groups = Groups(order.sizes_E)
            outputs_Nh: Tensor = self.experts(take_rows(x_Th, order, order.taken(groups)), groups)
            return outputs_Nh
        counts = remembered(self.dispatch, lambda: self.dispatch.exchange_counts(order.sizes_E))
        # Start to copy the rows before the host waits for the counts. Otherwise the GPU would be idle during the wait.
        rows_Nh = take_rows(x_Th, order, len(order.place_N)) if order.given is None else None
        traffic = self.dispatch.traffic(counts, planned)
        if rows_Nh is None:
            rows_Nh = take_rows(x_Th, order, sum(traffic.sent))
        rows_Nh = self.dispatch.to_experts(rows_Nh, traffic)
        return self.dispatch.from_experts(self.experts(rows_Nh, traffic.groups), traffic)

    def _shared(self, x_BTh: Tensor) -> Tensor:
        assert self.shared_expert is not None
        out_BTh: Tensor = self.shared_expert(x_BTh)
        return out_BTh if self.shared_expert_gate is None else out_BTh * self.shared_expert_gate(x_BTh)


class ParallelExperts(Tiled):
    """The experts on this rank. Their weights are [E/ep, F/x, H/y] for gate and up, and [E/ep, H/y, F/x] for down.

    FSDP2 splits the first dim of a stored weight. If the size of this dim is not divisible by the number of ranks,
    FSDP2 pads it. If experts came first, a rank could hold fewer experts than other ranks, or none. So a weight is
    stored with its second dim first if FSDP2 then pads less.
    """

    gate_proj: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_proj_bias: nn.Parameter | None
    up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, experts: Experts, grid: Grid) -> None:
        super().__init__()
        self.activation, self.x, self.y = experts.activation, grid.x, grid.y
        tiles = {
            "gate_proj": Tile(ep=0, x=1, y=2), "up_proj": Tile(ep=0, x=1, y=2), "down_proj": Tile(ep=0, x=2, y=1),
            "gate_proj_bias": Tile(ep=0, x=1), "up_proj_bias": Tile(ep=0, x=1),
            "down_proj_bias": Tile(ep=0, y=1, partial_over=("x",)),
        }  # fmt: skip
        for name, tile in tiles.items():
            weight = getattr(experts, name)
            turned = weight is not None and _is_second_dim_sharded(tile.local_shape(tuple(weight.shape), grid), grid)
            self.add_tile(name, weight, replace(tile, turned=turned), grid)

    def weight(self, name: str) -> Tensor:
        """Return the parameter ``name`` in the shape of its tile."""
        return self.tiles[name].as_tile(getattr(self, name))

    def weight_and_bias(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a weight and its biases in the shape of their tiles. Without biases, the second value is None."""
        bias = f"{name}_bias"
        return self.weight(name), self.weight(bias) if bias in self.tiles else None

    def forward(self, rows_Nh: Tensor, groups: Groups) -> Tensor:
        """Run each expert on its group of rows. Each x rank returns a partial sum of the outputs."""
        gate_Nf, up_Nf = (
            add_biases(sum_of(grouped_matmul(rows_Nh, weight, groups), self.y, "experts: outputs of up"), bias, groups)
            for weight, bias in map(self.weight_and_bias, ("gate_proj", "up_proj"))
        )
        return self.down(gate_Nf, up_Nf, groups)

    @recomputable
    def down(self, gate_Nf: Tensor, up_Nf: Tensor, groups: Groups) -> Tensor:
        """Apply the activation, and project to the hidden size. The outputs will be summed over x, so only the first x
        rank adds the biases."""
        active_Nf = sum_gradient(self.activation(gate_Nf, up_Nf), self.y, "experts: input gradient of down")
        weight, bias = self.weight_and_bias("down_proj")
        out_Nh = grouped_matmul(active_Nf, weight, groups)
        if bias is None or self.x.rank == 0:
            return add_biases(out_Nh, bias, groups)
        # Add zeros. All ranks must have a gradient for the biases, because the gradients are summed over x.
        return add_biases(out_Nh, 0 * bias, groups)


def _is_second_dim_sharded(shape: tuple[int, ...], grid: Grid) -> bool:
    """Return whether the ranks that hold the same experts should shard the second dim of a weight instead of the first
    dim, the experts. They should if FSDP2 then pads the weight less.

    Args:
        shape: Shape of the weight on a rank, before it is sharded.
        grid: The grid.
    """
    shards = grid.shards_of_experts.size
    experts, others = (math.ceil(size / shards) / size for size in shape[:2])
    return others < experts


class SharedExpertGate(Tiled):
    """Computes the gate sigmoid(x · w) of each token, [B, T, 1]. The weight w has shape [1, H/y]."""

    weight: nn.Parameter

    def __init__(self, gate: nn.Linear, grid: Grid) -> None:
        super().__init__()
        self.y = grid.y
        self.add_tile("weight", gate.weight, Tile(y=1, partial_over=("x",)), grid)

    def forward(self, x_BTh: Tensor) -> Tensor:
        logits_BT1 = sum_of(F.linear(x_BTh.float(), self.weight.float()), self.y, "shared expert: gate")
        return sum_gradient(logits_BT1.sigmoid(), self.y, "shared expert: gate's gradient").to(x_BTh.dtype)
