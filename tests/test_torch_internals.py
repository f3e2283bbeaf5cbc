"""Test each function of the adapter for torch's private names. A new version of torch that breaks one fails by name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fourfold.torch_internals import (
    END_OF_TRANSFERS,
    GROUP_METHODS,
    FakeTensorMode,
    MeshWithGroups,
    TorchDispatchMode,
    run_forward_hooks,
    run_forward_pre_hooks,
    schedule_actions,
    tensors_in,
    timeout_of,
    unsaved_buffers,
)
from fourfold.verification.trace import fake_processes


@pytest.fixture
def gloo() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, with a timeout of 77 seconds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_dispatch_mode_sees_every_operation_by_name() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(f"{func.namespace}.{func.overloadpacket.__name__}")
            return func(*args, **(kwargs or {}))

    with Names() as names:
        torch.ones(2, 3) @ torch.ones(3, 2)
    assert names.seen == ["aten.ones", "aten.ones", "aten.mm"]


def test_fake_tensors_have_shapes_but_no_data() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        product = torch.empty(1 << 30, 1 << 20) @ torch.ones(1 << 20, 4)
    assert product.shape == (1 << 30, 4)


@pytest.mark.parametrize("is_fake", [False, True])
def test_storage_keeps_its_python_object_as_long_as_a_tensor_uses_it(is_fake: bool) -> None:
    """The optimizer compares storages with ``is``, and the recorder identifies them by ``id``."""
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad():
        tensor = torch.empty(4)
        key = id(tensor.untyped_storage())
        elsewhere = [torch.empty(4).untyped_storage() for _ in range(100)]
    assert id(tensor.view(2, 2)[1:].untyped_storage()) == key
    assert key not in map(id, elsewhere)


def test_fake_processes_need_no_other_process() -> None:
    with fake_processes(4, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 4)
        dist.all_reduce(torch.ones(2))


def test_mesh_with_groups_replaces_the_groups_of_some_dims() -> None:
    rows: Any = object()
    columns: Any = object()
    with fake_processes(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        one = MeshWithGroups(mesh, {1: columns})
        both = MeshWithGroups(one, {0: rows})
        assert one.get_group(1) is both.get_group(1) is columns
        assert one.get_group(0) is mesh.get_group(0) and both.get_group(0) is rows
        assert (both.shape, both.mesh_dim_names) == (mesh.shape, mesh.mesh_dim_names)


def test_timeout_of_a_group_is_the_one_it_was_given(gloo: dist.ProcessGroup) -> None:
    assert timeout_of(gloo, "cpu") == timedelta(seconds=77)
    other = dist.new_group([0], timeout=timedelta(seconds=5))
    assert timeout_of(other, "cpu") == timedelta(seconds=5)
    other.set_timeout(timedelta(seconds=6))
    assert timeout_of(other, "cpu") == timedelta(seconds=6)


def test_every_operation_is_a_method_of_process_groups() -> None:
    found = {operation for method, operation in GROUP_METHODS.items() if hasattr(dist.ProcessGroup, method)}
    assert found == set(GROUP_METHODS.values())
    assert hasattr(dist.ProcessGroup, END_OF_TRANSFERS)


def test_hooks_run_as_in_a_call_of_the_module() -> None:
    """Torch's call is the reference: both call the same hooks, with the same arguments, in the same order."""
    module, calls = nn.Identity(), list[tuple[str, Any]]()

    def double(_: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        calls.append(("double", (args[0].item(), kwargs)))
        return (2 * args[0],), kwargs

    def note(_: nn.Module, args: tuple[Tensor]) -> None:
        calls.append(("note", args[0].item()))

    module.register_forward_pre_hook(double, with_kwargs=True)
    module.register_forward_pre_hook(note)
    module.register_forward_hook(lambda _, args, out: calls.append(("after", out)))
    module.register_forward_hook(lambda _, args, kwargs, out: calls.append(("last", (kwargs, out))), with_kwargs=True)
    out = module(torch.tensor(3.0))
    of_torch, calls[:] = list(calls), []
    entered = run_forward_pre_hooks(module, torch.tensor(3.0))
    run_forward_hooks(module, out)
    assert entered.item() == out.item() == 6
    assert calls == of_torch


def test_hooks_of_batch_parts_must_not_change_the_outputs() -> None:
    module = nn.Identity()
    module.register_forward_hook(lambda _, args, outputs: [2 * out for out in outputs])
    with pytest.raises(AssertionError, match="already in the next block"):
        run_forward_hooks(module, [torch.ones(2)])


def test_schedule_of_torch_lists_every_pass_of_every_stage() -> None:
    ranks = schedule_actions("Interleaved1F1B", ranks=2, micro_batches=4, stages_per_rank=2)
    passes = [
        {(a.stage_index, a.computation_type.value, a.microbatch_index) for a in actions if a is not None}
        for actions in ranks
    ]
    for rank in range(2):
        assert passes[rank] == {(stage, kind, i) for stage in (rank, rank + 2) for kind in "FB" for i in range(4)}
    assert all(a is None or a.sub_actions is None for actions in ranks for a in actions)


def test_tensors_in_containers_are_found_in_order() -> None:
    a, b, c = torch.ones(3, 1).unbind()
    assert [id(found) for found in tensors_in([a, {"b": (b, 1, None)}, "text", c])] == [id(a), id(b), id(c)]
    assert tensors_in(a) == [a] and tensors_in(None) == []


def test_tensors_in_the_outputs_of_transformers_are_found() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    logits, state = torch.ones(2), torch.zeros(2)
    found = tensors_in(outputs.CausalLMOutput(logits=logits, hidden_states=(state,)))
    assert [id(each) for each in found] == [id(logits), id(state)]


def test_unsaved_buffers_are_the_buffers_that_the_state_dict_lacks() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("computed", torch.ones(1), persistent=False)
    module.inner = nn.Module()
    module.inner.register_buffer("also_computed", torch.ones(1), persistent=False)
    assert (
        unsaved_buffers(module)
        == {"computed"}
        == dict(module.named_buffers(recurse=False)).keys() - module.state_dict()
    )
