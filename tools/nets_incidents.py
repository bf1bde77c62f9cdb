"""Types for the incidents of the museum: does spmd_types refuse a run of theirs, on one process with pretended ranks?

As in tools/nets_types.py the programs are not changed, and what they do not say is said from outside. Two incidents are
in a class of chapter 04, which is checked as there. The others are run as they are. What is said of them: parameters
are the same on all ranks, and their gradients parts of a sum, but where all ranks read the same examples; a rank's
slice differs; a mean over the ranks takes what differs, and gives what is the same; the optimizer, a norm that is
logged, and a decision may only take what is the same.
"""

import contextlib
import importlib
import importlib.util
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.model_parallel.by_hand_tensor import CUT
from tools import nets_types

CLASSES = {  # the class that is right but for the mistake
    "experts_twice": ("Experts", "by_hand_experts", "ExpertParallel"),
    "norm_counts_replicas": ("Tensor", "by_hand_tensor", "TensorParallelByHand"),
}
DDP = "DistributedDataParallel reduces in C++, outside of the checker"
MESSAGES = "ranks run different programs, and messages have no types"
NUMBERS = "what ranks have differs by Python numbers, which have no types"
CANNOT = {
    "first_syncs": DDP,
    "nothing_loaded": DDP,
    "past_ddp": DDP,
    "sum_and_mean": DDP,
    "tokens_apart": DDP,
    "stages_alike": MESSAGES,
    "tied_apart": MESSAGES,
    "best_loss": NUMBERS,
    "each_by_itself": NUMBERS,
    "epochs_alike": NUMBERS,
    "leaking_documents": NUMBERS,
    "lost_labels": NUMBERS,
    "padded_test": NUMBERS,
    "replicas_drawn_apart": NUMBERS,
    "state_in_bf16": NUMBERS,
    "streams_end": NUMBERS,
    "file_seen_by_some": "the checker has no types for dist.broadcast",
    "scalers_apart": "the right program asks whether parts of a sum are finite, which types refuse",
    "stale_optimizer": "fully_shard works in hooks, outside of the checker",
}
# Those of tensor parallelism, whose ranks read the same examples, and which of their parameters are parts.
PARTS = {"experts_uncounted": ("experts.",), "one_seed": (*CUT,), "router_alone": ("experts.",)}


def check(incident, program) -> tuple[str, float]:
    """What the types said of the broken or fixed program of an incident, or "-"; and seconds of processor time."""
    if incident.name in CANNOT or importlib.util.find_spec("spmd_types") is None:
        return "-", 0.0
    if incident.name in CLASSES:
        own, module, right = CLASSES[incident.name]
        right = getattr(importlib.import_module(f"course.model_parallel.{module}"), right)
        return nets_types.check(getattr(program, own), right, program.RANKS)
    begin = time.process_time()
    verdict = _run(incident.name, program)
    return verdict, time.process_time() - begin


def _run(name, program) -> str:
    import spmd_types as spmd
    from spmd_types import checker

    dist.init_process_group("fake", rank=0, world_size=program.RANKS, store=FakeStore())
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (program.RANKS,), mesh_dim_names=("ranks",))
        declare = TypeDeclarations(spmd, mesh.get_group(), PARTS.get(name))
        for module in (program, importlib.import_module("course.fsdp.toy")):
            for function, stand_in in declare.stand_ins(vars(module)).items():
                stack.enter_context(mock.patch.dict(vars(module), {function: stand_in}))
        declare.operators(vars(importlib.import_module("course.model_parallel.by_hand_tensor")))
        declare.operators(vars(program))
        stack.enter_context(declare.sums())
        stack.enter_context(mock.patch.object(functional, "cross_entropy", declare.cross_entropy))
        stack.enter_context(mock.patch.object(torch.optim.SGD, "step", declare.step))
        stack.enter_context(mock.patch.object(torch.optim.AdamW, "step", declare.step))
        stack.callback(register_module_forward_pre_hook(declare.forward).remove)
        try:
            with spmd.set_current_mesh(mesh), checker.typecheck(strict_mode="permissive"):
                program.on_rank()
        except spmd.SpmdTypeError as refusal:
            return str(refusal).splitlines()[0][:120]
    return ""


class TypeDeclarations(nets_types.TypeDeclarations):
    def __init__(self, spmd, group, parts):
        self.spmd, self.group, self.parts = spmd, group, parts or ()
        self.whole = spmd.I if parts else spmd.R
        self.axis = spmd.normalize_axis(group)
        self.types, self.cut, self.buckets, self.flats = {}, {}, [], []
        self.context, self.real_cross_entropy = False, functional.cross_entropy

    def forward(self, module, _inputs):
        """Called before any module's forward: first before that of the model, which knows the names."""
        for name, parameter in module.named_parameters():
            if parameter not in self.types:
                apart = any(part in name for part in self.parts)
                self.types[parameter] = self.spmd.V if apart else self.whole
                self.put(parameter, self.types[parameter])
                if apart:
                    self.cut[parameter] = None
                if parameter.requires_grad and parameter.is_leaf:
                    parameter.register_post_accumulate_grad_hook(self.gradient)

    def cross_entropy(self, *arguments, **named):
        """A rank's own loss is a part of a sum over the ranks."""
        loss = self.real_cross_entropy(*arguments, **named)
        return (
            self.spmd.reinterpret(loss, self.group, src=self.spmd.V, dst=self.spmd.P)
            if self.of(loss) is self.spmd.V
            else loss
        )

    def step(self, *_, **__):
        self.gradients()

    @contextlib.contextmanager
    def sums(self):
        """And what a gather writes into is not what it was; a sum over tensor ranks is theirs."""
        from spmd_types._raw_dist import RAW_DIST_RULES as rules

        with super().sums():
            gather, reduce = rules[dist.all_gather_single], rules[dist.all_reduce]

            def all_gather_single(func, args, kwargs):
                self.put(args[0], self.spmd.R)
                return gather(func, args, kwargs)

            def all_reduce(func, args, kwargs):
                reduced = reduce(func, args, kwargs)
                self.put(args[0], self.whole)
                return reduced

            with mock.patch.dict(rules, {dist.all_gather_single: all_gather_single, dist.all_reduce: all_reduce}):
                yield

    def stand_ins(self, namespace):
        found: dict[str, Any] = {}
        if "mine" in namespace:
            real = namespace["mine"]

            def mine(*tensors):
                with self.spmd.no_typecheck():
                    parts = [part.clone() for part in real(*tensors)]
                for part in parts:
                    self.put(part, self.spmd.V)
                return parts

            found["mine"] = mine
        if "mean" in namespace:

            def mean(*tensors):
                for tensor in tensors:
                    self.put(tensor, self.spmd.R)

            found["mean"] = mean
        return found
