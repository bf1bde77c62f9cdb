"""What the course uses of PyTorch's inside is still there, each thing asked for by itself: so where a new release of
PyTorch has changed something, the name of the test that fails is the name of what it was."""

import ast
import inspect
import re
import subprocess
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.backend_registration
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import PipelineStage

from common import ROOT
from common.lab.fake_patches import PATCHES, Patch


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.at)
def test_what_a_patch_replaces_is_there(patch):
    assert not patch.broken(), f"{patch.at}, which is replaced because: {patch.why}. But {patch.broken()}"


def a_function(one, two):
    """What a patch stands for in the next test."""


@pytest.mark.parametrize(
    "patch, says",
    [
        (Patch("torch.nn:Module.no_such_method", "", None), "gone"),
        (Patch("torch.no_such_module:function", "", None), "gone"),
        (Patch("torch._C:_scatter_in_vain", "", None, called_by="torch.nn.parallel.comm:scatter"), "does not call"),
        (Patch(f"{__name__}:a_function", "", None, ("one",)), "takes one, two"),
        (Patch(f"{__name__}:a_function", "", None, ("one", "two")), ""),
    ],
)
def test_a_patch_tells_what_has_changed(patch, says):
    assert says in patch.broken() and bool(says) == bool(patch.broken())


def alone(read: Callable) -> Any:
    """Something of a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return read(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def a_mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def a_type() -> object:
    return alone(lambda group: group.boxed()._type)


C10D, REGISTRATION = "torch.distributed.distributed_c10d:", "torch.utils.backend_registration:"
LOCAL, LOCAL_C10D = "torch.distributed._local_tensor:", "torch.distributed._local_tensor._c10d:"
PIPELINING, BINDINGS = "torch.distributed.pipelining.stage:", "torch._C._distributed_c10d:"
# Name -> where it is, or how to come by it; and the names of its parameters, where Python can tell them.
INSIDE: dict[str, tuple[str | Callable[[], object], str | None]] = {
    "DataDependentOutputException": ("torch._subclasses.fake_tensor:DataDependentOutputException", None),
    "FSDPMemTracker": ("torch.distributed._tools.fsdp2_mem_tracker:FSDPMemTracker", "mod optm"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore", None),
    "FakeTensor": ("torch._subclasses.fake_tensor:FakeTensor", None),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", None),
    "PythonCallbackWork": (BINDINGS + "PythonCallbackWork", None),
    "TorchDispatchMode": ("torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__", None),
    "_Action": ("torch.distributed.pipelining.schedules:_Action.from_str", "action_string"),
    "_DummyBackendModule": (REGISTRATION + "_DummyBackendModule", ""),
    "_LocalDeviceMesh": (LOCAL + "_LocalDeviceMesh.get_coordinate", "self"),
    "_StorageInfo": (
        "torch.distributed.checkpoint.filesystem:_StorageInfo", "relative_path offset length transform_descriptors"
    ),
    "_StageBackwardMeta": (PIPELINING + "_StageBackwardMeta", "backward_metas"),
    "_StageForwardMeta": (PIPELINING + "_StageForwardMeta", "forward_metas"),
    "FSDPParamGroup": ("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.__init__", None),
    "_add_unshard_reshard": (
        "torch.distributed.pipelining.schedules:_add_unshard_reshard", "compute_actions max_active_stages"
    ),
    "_clear_sharding_prop_cache": ("torch.distributed.tensor.debug:_clear_sharding_prop_cache", ""),
    "_for_each_rank_run_func": (LOCAL + "_for_each_rank_run_func", "func ranks args kwargs alias"),
    "_gen_transform_infos": ("torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear", None),
    "_get_constant_bool_symnode": ("torch._C:_get_constant_bool_symnode", None),
    "_get_default_group": (C10D + "_get_default_group", ""),
    "_get_rng_state": (LOCAL + "_get_rng_state", ""),
    "_int_on_rank": (LOCAL + "_int_on_rank", "i r"),
    "_is_in_fake_tensor_mode": (LOCAL + "_is_in_fake_tensor_mode", ""),
    "_layout": (lambda: alone(a_mesh)._layout, None),
    "_local_broadcast_": (
        LOCAL_C10D + "_local_broadcast_", "tensors process_group_so root_rank root_tensor async_op timeout"
    ),
    "_local_ints": (lambda: LocalIntNode({0: 1, 1: 2})._local_ints, None),
    "_local_reduce": (LOCAL_C10D + "_local_reduce", "reduce_op tensors"),
    "_local_scalar_dense": (lambda: torch.ops.aten._local_scalar_dense.default, None),
    "_local_scatter_": (
        LOCAL_C10D + "_local_scatter_", "output_tensors input_tensors process_group_so root_rank async_op timeout"
    ),
    "_local_tensors": (lambda: LocalTensor({0: torch.ones(1)})._local_tensors, None),
    "_map_to_rank_local_val": (LOCAL + "_map_to_rank_local_val", "val rank"),
    "_no_grad_trunc_normal_": ("torch.nn.init:_no_grad_trunc_normal_", "tensor mean std a b generator"),
    "_prepare_collective_groups": (LOCAL_C10D + "_prepare_collective_groups", "process_group_so"),
    "_set_rng_state": (LOCAL + "_set_rng_state", "cpu_state accelerator_states"),
    "no_dispatch": ("torch.utils._mode_utils:no_dispatch", None),
    "_buffers": (lambda: torch.nn.Module()._buffers, None),
    "_c10d_functional": (lambda: torch.ops._c10d_functional.all_reduce.default, None),
    "_cdata": (lambda: torch.UntypedStorage(1)._cdata, None),
    "_coordinate_cache": (lambda: LocalTensorMode(2)._coordinate_cache, None),
    "_create_work_from_future": (BINDINGS + "_create_work_from_future", None),
    "_derive_grad_metas": (PIPELINING + "_derive_grad_metas", "tensor_metas"),
    "_disable_current_modes": ("torch.utils._python_dispatch:_disable_current_modes", ""),
    "_dump_fr_trace_json": (BINDINGS + "_dump_fr_trace_json", None),
    "_flatten": ("torch.distributed.device_mesh:DeviceMesh._flatten", "self mesh_dim_name backend_override"),
    "_get_backend": (lambda: alone(lambda group: group._get_backend(torch.device("cpu"))), None),
    "_get_default_store": (C10D + "_get_default_store", ""),
    "_rank_map": (lambda: alone(a_mesh)._rank_map, None),
    "_resolve_process_group": (C10D + "_resolve_process_group", None),
    "_scaled_dot_product_flash_attention_for_cpu": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default, None
    ),
    "_scaled_dot_product_flash_attention": (lambda: torch.ops.aten._scaled_dot_product_flash_attention.default, None),
    "_scaled_dot_product_flash_attention_backward": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward.default, None
    ),
    "_set_pg_timeout": (C10D + "_set_pg_timeout", "timeout group"),
    "_setup_privateuseone_for_python_backend": (
        REGISTRATION + "_setup_privateuseone_for_python_backend", "rename backend_module hook device_guard"
    ),
    "_stage_meta": (lambda: inspect.getsource(PipelineStage.__mro__[1].__init__).index("self._stage_meta"), None),
    "_sync_params": ("torch.distributed.optim:ZeroRedundancyOptimizer._sync_params", "self"),
    "_timeout": (lambda: alone(lambda group: group._get_backend(torch.device("cpu")).options._timeout), None),
    "_to_copy": (lambda: torch.ops.aten._to_copy.default, None),
    "_type": (a_type, None),
    "_wrap_tensor_autograd": (lambda: torch.ops._c10d_functional._wrap_tensor_autograd.default, None),
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        "global_shape mesh placements skip_offset",
    ),
    "fake_pg": ("torch.testing._internal.distributed.fake_pg", None),
    "get_schedule_ops": (
        "torch.distributed.pipelining._schedule_visualizer:get_schedule_ops",
        "schedule pp_degree num_microbatches num_stages_per_rank add_spacing with_comms defer_pp_recv",
    ),
    "tree_leaves": ("torch.utils._pytree:tree_leaves", "tree is_leaf"),
    "tree_map_only": ("torch.utils._pytree:tree_map_only", None),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor:unset_fake_temporarily", ""),
}  # fmt: skip
# Modules; what is of others than PyTorch (Python, argparse, the engines); what builds with NCCL have; ends of names.
NAMES_ELSEWHERE = {
    "_C", "_c10d", "_distributed_c10d", "_local_tensor", "_pytree", "_redistribute", "_dynamo", "torch._dynamo",
    "_exit", "_getframe", "_option_string_actions", "_has_ops", "_hp_mapping", "_precision",
    "_dump_nccl_trace_json", "_dir", "_site",
    "_reassign_or_swap_out_partitioned_parameters", "_validate_launch_command",
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_the_course_uses_of_the_inside_is_there(name):
    where, parameters = INSIDE[name]
    found = resolve_name(where) if isinstance(where, str) else where()
    if parameters is not None:
        assert list(inspect.signature(found).parameters) == parameters.split()


def test_nothing_else_of_the_inside_is_used():
    """Each name that begins with an underscore, is nowhere made in the course, and is read of something else there; and
    each that stands in quotation marks, as where something is put in its place."""
    listed = subprocess.run(
        ["git", "ls-files", "common", "course", "planner", "0*/*.py"], cwd=ROOT, capture_output=True
    )
    files = [ROOT / name for name in listed.stdout.decode().split() if name.endswith(".py")]
    trees = [ast.parse(file.read_text()) for file in files if not {"classroom", "mistakes"} & {*file.parts}]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    ends = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}  # of a name: no name
    quoted = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in ends]
    read |= {text for text in quoted if isinstance(text, str) and re.fullmatch(r"_[A-Za-z]\w+", text)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            path = (getattr(node, "module", None) or "").split(".")
            for alias in node.names:
                if any(part.startswith("_") for part in [*path, *alias.name.split(".")] if part != "__future__"):
                    read.add(alias.name)
    read = {name for name in read - made if not name.startswith("__")}
    patched = {patch.name for patch in PATCHES}
    assert read - NAMES_ELSEWHERE - patched <= {*INSIDE}, "list what is new in INSIDE"
    assert {*INSIDE} <= read | patched, "take what is not used any more out of INSIDE"
