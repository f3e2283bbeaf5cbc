"""Shard weights with torch's FSDP2. The axis z always shards the weights. With ``zero`` = 1, 2, or 3 in the run file,
the axes dp and cp shard them too."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor

from fourfold.parallel.data.data_parallel import DataParallel, StepTypes, Units
from fourfold.parallel.data.fsdp_in_levels import GatherInLevels, SumInLevels, SumOfOneShard, in_levels
from fourfold.parallel.data.fsdp_on_gloo import GatherInBackground, SumInBackground, replicas_in_background
from fourfold.parallel.grid.communicate import by_all_to_all
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.state import LocalShard, replicas_of_tile
from fourfold.parallel.tensor.sharding import Tile, chunk, tile_table


class FullySharded(DataParallel):
    """Gathers the weights of each unit when the unit runs, and sums gradients while the backward pass continues.

    - ``zero`` 0: the shard group is z. The ranks of dp·cp are replicas. Gradients are all-reduced over them once per
      step.
    - ``zero`` 1 and 2: the shard group is dp·cp·z. Weights are gathered over it for the forward pass. From then until
      the backward pass, the weights are split only over z, so each rank keeps larger shards. With z = 1, each rank
      keeps full weights until the step ends. ``zero`` 2 reduce-scatters gradients in each backward pass.
      ``zero`` 1 does so only in the last backward pass of a step, and keeps unsharded gradients until then.
    - ``zero`` 3: the shard group is dp·cp·z. Weights are gathered for each forward pass and for each backward pass.
    """

    def __init__(
        self, model: nn.Module, units: Units, grid: Grid, types: StepTypes, prefetch: int, per_node: int = 1
    ) -> None:
        """Shard a model.

        Args:
            model: A model on the meta device.
            units: The model's units.
            grid: The grid.
            types: The dtypes of a step.
            prefetch: Number of blocks whose weights are gathered ahead of time.
            per_node: Number of ranks per node in a shard group. If it is above 1, groups that span several nodes
                communicate in two levels.
        """
        super().__init__(model, units, grid, types)
        policy = MixedPrecisionPolicy(
            param_dtype=types.working,
            reduce_dtype=types.reduced,
            # Do not cast inputs. Activations already have the right dtype, and the tables of rotary embeddings must
            # stay in float32.
            cast_forward_inputs=False,
        )
        zero, z = grid.sizes.zero, grid.z.size
        self._on_gloo = by_all_to_all(grid.axis("z").group)
        self.sums = SumInBackground()
        if zero == 0:
            mesh = self._replicas_in_background(in_levels(grid.hybrid_mesh, grid.shards("z", per_node)))
        else:
            mesh = in_levels(grid.tokens_mesh, grid.shards("dp_cp_z", per_node))
        self._shards = mesh.get_group(mesh.ndim - 1)
        reshard = z > 1 or zero == 3
        self.keeps_weights_for_the_step = zero in (1, 2) and z == 1

        tiles = tile_table(model)
        whole = {parameter for name, parameter in model.named_parameters() if not tiles[name].sharded}
        self._expert_shards = grid.shards_of_experts
        self._experts = self._shard_experts(policy)

        def shard(module: nn.Module | list[nn.Module], reshard_after_forward: bool) -> None:
            fully_shard(
                module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, ignored_params=whole
            )

        # Keep the head's weights gathered after the forward pass, because the backward pass needs them first. A tied
        # embedding shares the head's weights, so put both into one unit.
        last = list(units.last)
        of_last = {parameter for module in last for parameter in module.parameters()}
        for embedding in units.embeddings:
            if of_last.isdisjoint(embedding.parameters()):
                shard(embedding, reshard)
                # FSDP2 need not gather an embedding for the backward pass, because the backward pass does not read the
                # embedding's weights.
                _fsdp(embedding).set_unshard_in_backward(False)
            else:
                last.append(embedding)
        for block in units.blocks:
            shard(block, reshard)
        if last:
            shard(last, False)
        shard(model, False)
        if zero in (1, 2) and z > 1:
            self._keep_z_shards_after_forward(in_levels(grid.hybrid_mesh, grid.shards("z", per_node)))
        self._sum_without_division(mesh)
        _prefetch(model, units, self._experts, prefetch)
        for module in units.last[:1]:
            module.register_forward_pre_hook(self._free_summed)
        self._is_complete = True
        self._fsdp_parameters: dict[nn.Parameter, Any] = {}

    def materialize(self, device: torch.device) -> None:
        super().materialize(device)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                # With None, torch accepts gradients in any dtype. FSDP2 may sum gradients in a dtype that differs from
                # the weight's dtype.
                parameter.grad_dtype = None

    def shard(self, name: str, parameter: nn.Parameter, tile: Tile) -> LocalShard:
        grid, zero, of_experts = self.grid, self.grid.sizes.zero, tile.ep is not None and self.grid.ep.size > 1
        if not tile.sharded:
            shape = tile.global_shape(tuple(parameter.shape), grid)
            replicas = replicas_of_tile(tile, grid) * grid.tokens.size
            return LocalShard(name, parameter, parameter.detach(), tile, shape, tile.slices(shape, grid), replicas)
        assert isinstance(parameter, DTensor), f"{name} is not sharded by FSDP2"
        global_shape = tile.global_shape(tuple(tile.as_tile(parameter).shape), grid)
        slices, dim = list(tile.slices(global_shape, grid)), tile.sharded_dim
        shards, copies = (self._expert_shards, grid.expert_copies) if of_experts else (self._shards, grid.replicas)
        pieces, piece = (shards.size, shards.rank) if isinstance(shards, Axis) else (shards.size(), shards.rank())
        slices[dim] = chunk(slices[dim], pieces, piece)
        replicas = replicas_of_tile(tile, grid) * (copies.size if zero == 0 else 1)
        local = tile.as_tile(parameter.to_local().detach())
        return LocalShard(name, parameter, local, tile, global_shape, tuple(slices), replicas)

    def begin_backward(self, last: bool) -> None:
        model, self._is_complete = _fsdp(self.model), last
        self.sums.finish()
        groups = self.fsdp_groups()
        # If sums of earlier micro-batches exist, FSDP2 adds the next sums to them immediately. So the next sums must be
        # complete.
        self.sums.at_once = any(p.sharded_param.grad is not None for group in groups for p in group.fsdp_params)
        self.sums.at_once_over_shards = any(g._partial_reduce_output is not None for g in groups)
        for group in groups:
            # With this dtype, FSDP2 sums the gradients of micro-batches in reduce_dtype, not in the weights' dtype.
            group._orig_dtype = self.types.reduced
        model.set_is_last_backward(last)
        if self.keeps_weights_for_the_step:
            model.set_reshard_after_backward(last)
        if self.grid.sizes.zero == 0:
            # Sum over z after each backward pass, but over dp·cp only after the last.
            model.set_requires_all_reduce(last)
        elif self.grid.sizes.zero == 1:
            # Keep unsharded gradients until the last backward pass.
            model.set_requires_gradient_sync(last)

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        super().add_gradient(parameter, gradient)
        if parameter not in self._fsdp_parameters:
            every = (p for group in self.fsdp_groups() for p in group.fsdp_params)
            self._fsdp_parameters = {p._unsharded_param: p for p in every}
        fsdp_parameter = self._fsdp_parameters[parameter]
        # If a sum in reduce_dtype exists, the first call below adds the gradient to this sum. Otherwise the second call
        # starts a sum.
        fsdp_parameter.accumulate_unsharded_grad_if_needed()
        fsdp_parameter.to_accumulated_grad_if_needed()

    def finish_gradients(self) -> None:
        """Finish the gradients.

        Usually FSDP2 has already started all sums over ranks in the last backward pass. But some pipeline schedules
        compute weight gradients after this pass. In this case, this method starts the sums.
        """
        if not self._is_complete:
            self.begin_backward(last=True)
            for group in self.fsdp_groups():
                group.post_backward()
            _fsdp(self.model)._get_fsdp_state()._root_post_backward_final_callback()
        self.sums.finish()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(self.types.gradient)

    def _free_summed(self, *_: object) -> None:
        """Free gradients that FSDP2 has sent but still keeps. This hook runs before the head computes the next logits.

        The unit that came last in the backward pass is usually the embedding, so its gradients are large. FSDP2 would
        keep them until the next micro-batch's backward pass.
        """
        context: Any = _fsdp(self.model)._get_fsdp_state()._comm_ctx
        if hasattr(context, "reduce_scatter_states"):
            sent = context.reduce_scatter_states
            context.reduce_scatter_states = []
        else:  # torch before 2.13 keeps only one state.
            sent = [context.reduce_scatter_state] if context.reduce_scatter_state else []
            context.reduce_scatter_state = None
        for state in sent:
            if state.event is not None:
                torch.accelerator.current_stream().wait_event(state.event)

    def publish(self) -> None:
        """Do nothing, because FSDP2 casts the updated weights when it gathers them."""

    def free_gathered(self) -> None:
        for module in self._units():
            module.reshard()

    def gathered(self) -> list[Tensor]:
        outputs = [parameter.all_gather_outputs for group in self.fsdp_groups() for parameter in group.fsdp_params]
        return [tensor for tensors in outputs for tensor in tensors]

    def partial_gradients(self) -> list[Tensor]:
        found: list[Tensor] = []
        for group in self.fsdp_groups():
            if group._partial_reduce_output is not None:
                found.append(group._partial_reduce_output)
            for parameter in group.fsdp_params:
                if parameter.unsharded_accumulated_grad is not None:
                    found.append(parameter.unsharded_accumulated_grad_data)
                # The tensor does not exist before the first gather.
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    found.append(whole.grad)
        return found

    def _replicas_in_background(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh (replicas, shards). On gloo, all-reduces over its first dim run in the background."""
        return replicas_in_background(mesh, self.sums) if self._on_gloo else mesh

    def _sum_without_division(self, mesh: DeviceMesh) -> None:
        """Make FSDP2 sum gradients instead of averaging them.

        Also replace FSDP2's collectives in two cases: on gloo, so that they run in the background, and if the grid has
        groups with two levels.
        """
        grid = self.grid
        gathers, sums = (GatherInBackground(), self.sums) if self._on_gloo else (GatherInLevels(), SumInLevels())
        for module in self._units():
            if self._on_gloo or grid.levels:
                # torch has no public base class for custom collectives, so these classes only have the methods that
                # torch calls.
                module.set_custom_all_gather(gathers)  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(sums)  # type: ignore[arg-type]
            if module in self._experts and self._expert_shards.size == 1:
                module.set_custom_reduce_scatter(SumOfOneShard())  # type: ignore[arg-type]
            # Do not let FSDP2 divide the gradients, because the loss is already divided by the number of tokens in the
            # whole step. Force plain sums, because gloo cannot scale a sum.
            if (grid.expert_replicas.size if module in self._experts else mesh.size()) > 1:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _shard_experts(self, policy: MixedPrecisionPolicy) -> list[FSDPModule]:
        """Shard the experts that are split over ep.

        A shard group consists of ranks with the same experts. In each block, the experts are a separate unit.
        """
        split, zero = self.split_experts(), self.grid.sizes.zero
        modules = [m for m in self.model.modules() if not split.isdisjoint(m.parameters(recurse=False))]
        mesh = self.grid.expert_mesh(hybrid=zero == 0) if modules else None
        if mesh is not None and zero == 0:
            mesh = self._replicas_in_background(mesh)
        for module in modules:
            reshard = zero == 3 or self.grid.expert_shards.size > 1
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        return [_fsdp(module) for module in modules]

    def _keep_z_shards_after_forward(self, z_mesh: DeviceMesh) -> None:
        """After the forward pass, keep 1/z of each tile instead of 1/(dp·cp·z), so that the backward pass gathers only
        over z.

        FSDP2 has an argument for this (``reshard_after_forward=N``), but this argument makes FSDP2 create process
        groups. With x, y, or pp, there are several shard groups, and creating groups in each of them would deadlock.
        """
        z_shards = HSDPMeshInfo(z_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        of_experts = self.groups_of(self._experts)
        if of_experts:
            mesh = self.grid.expert_mesh(hybrid=True)
            expert_shards = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for group in self.fsdp_groups():
            if group.post_forward_mesh_info is not None:
                shards = expert_shards if group in of_experts else z_shards
                group.post_forward_mesh_info = shards
                for parameter in group.fsdp_params:
                    parameter.post_forward_mesh_info = shards
                    whole = torch.empty(parameter._orig_size, device="meta")
                    parameter._init_sharded_post_forward_param_metadata(whole)

    def _units(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def fsdp_groups(self) -> list[Any]:
        """Return all of FSDP2's parameter groups in the model."""
        return self.groups_of(self._units())

    @staticmethod
    def groups_of(units: Iterable[FSDPModule]) -> list[Any]:
        """Return FSDP2's parameter groups of some modules. Since torch 2.13, a module can have more than one group."""
        groups: list[Any] = []
        for unit in units:
            state = unit._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                groups += state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                groups.append(state._fsdp_param_group)
        return groups


def _fsdp(module: nn.Module) -> FSDPModule:
    """Tell the type checker that ``fully_shard`` has converted this module."""
    assert isinstance(module, FSDPModule)
    return module


def _prefetch(model: nn.Module, units: Units, experts: Sequence[FSDPModule], depth: int) -> None:
    """Gather weights ahead of time: while a block computes, gather its experts and the next ``depth`` blocks. The AxoNN
    paper calls this OAG.

    Set explicitly what each unit prefetches in the backward pass. By default, FSDP2 would prefetch the unit that ran
    before this unit in the forward pass. But that unit may have run for another micro-batch. If a unit has nothing to
    prefetch, we let it prefetch the root. This costs nothing, because the root's weights are still gathered.
    """
    layers, nothing = [_fsdp(block) for block in units.blocks], [_fsdp(model)]
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_modules_to_backward_prefetch(nothing)
    inside = [
        [unit for unit in block.modules() if isinstance(unit, FSDPModule) and unit in experts] for block in units.blocks
    ]
    if units.last and depth > 0 and layers:
        _fsdp(units.last[0]).set_modules_to_backward_prefetch([*layers[-1:], *inside[-1]])
    for i, layer in enumerate(layers):
        after, before = range(i + 1, min(i + 1 + depth, len(layers))), range(i - 1, max(i - depth, 0) - 1, -1)
        own = inside[i] if depth else []
        layer.set_modules_to_forward_prefetch([*own, *(each for j in after for each in (layers[j], *inside[j]))])
        layer.set_modules_to_backward_prefetch([each for j in before for each in (layers[j], *inside[j])] or nothing)
