"""Types for the by-hand classes: does spmd_types refuse a step of theirs, on one process with pretended ranks?

Their code is not changed. What it does not say is said from outside: which parameters, inputs and losses are the same
on all ranks (R, or I where their gradient is, too), differ (V), or are parts of a sum (P), what the operators that
differ forward and backward take and give, and what the helpers of common/collectives.py ask of their tensors. Types are
those of https://meta-pytorch.org/spmd_types/.
"""

import contextlib
import functools
import importlib
import importlib.util
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import data
from common.lab import equality
from common.mesh import axis, in_order, make_mesh, resolve
from common.strategy import Setup

CANNOT = {  # what is not checked, and why
    "ThreadedDataParallelByHand": "threads of one process, no ranks",
    "SplitLayers": "ranks run different programs, and messages have no types",
    "PipelineByHand": "ranks run different programs, and messages have no types",
    "PipelineDDPByHand": "ranks run different programs, and messages have no types",
    "HSDPByHand": "two axes at once",
    "Executor": "ranks run different programs, and messages have no types",
}


def check(strategy_class, right, ranks: int) -> tuple[str, float]:
    """What the types said of one step ("" is: nothing), or "-"; and seconds of processor time."""
    if right.__name__ in CANNOT or importlib.util.find_spec("spmd_types") is None:
        return "-", 0.0
    begin = time.process_time()
    verdict = _step(strategy_class, right, ranks)
    return verdict, time.process_time() - begin


def _step(strategy_class, right, ranks: int) -> str:
    import spmd_types as spmd
    from spmd_types import checker

    case = next(case for case in equality.CASES if case.accumulate == (3 if equality.BATCH % (3 * ranks) == 0 else 1))
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            mesh = make_mesh(in_order(resolve(getattr(right, "preset", {"data": -1}), ranks)))
            torch.manual_seed(0)
            model = case.make_model(equality.model_class_of(strategy_class))
            strategy = strategy_class(model, case.make_optimizer, Setup(mesh, None, max_norm=case.max_norm))
            (name,) = mesh.mesh_dim_names or ()
            group = axis(mesh, name).group
            declare = TypeDeclarations(spmd, strategy, group, right)
            namespaces = {id(space): space for space in _namespaces(strategy_class)}.values()
            for namespace in namespaces:
                for function, stand_in in declare.stand_ins(namespace).items():
                    stack.enter_context(mock.patch.dict(namespace, {function: stand_in}))
                declare.operators(namespace)
            indices = data.global_batch(equality.SEED, 0, equality.BATCH, equality.Batches.size)
            place = strategy.data_rank, strategy.data_size
            batches = data.micro_batches(equality.Batches(), indices, *place, case.accumulate, "cpu")
            stack.enter_context(declare.sums())
            with spmd.set_current_mesh(mesh), checker.typecheck(strict_mode="permissive"):
                declare.parameters()
                declare.batches(batches)
                strategy.optimizer.step = lambda *_, **__: declare.gradients()
                strategy.step(batches)
        except spmd.SpmdTypeError as refusal:
            return str(refusal).splitlines()[0][:120]
        except Exception as error:  # the planted mistake may end in any
            if strategy_class is right:
                raise
            return f"error: {type(error).__name__}"
    return ""


def _namespaces(strategy_class):
    """The globals of the modules that the class's own methods are written in."""
    for part in strategy_class.__mro__:
        for value in vars(part).values():
            space = getattr(value, "__globals__", None)
            if space and not space.get("__name__", "").startswith(("torch", "common")):
                yield space
                for other in list(space.values()):
                    inner = getattr(other, "__globals__", None) or getattr(
                        getattr(other, "forward", None), "__globals__", None
                    )
                    if inner and str(inner.get("__name__", "")).startswith("course"):
                        yield inner


class TypeDeclarations:
    """What the code does not declare."""

    def __init__(self, spmd, strategy, group, right):
        self.spmd, self.strategy, self.group, self.right = spmd, strategy, group, right
        self.axis = spmd.normalize_axis(group)
        self.reads = strategy.data_size > 1  # do ranks read different slices?
        self.cut = getattr(strategy, "cut", None) or {}
        self.buckets = getattr(getattr(strategy, "reducer", None), "flat", [])
        self.context = "Context" in right.__name__  # each rank takes its part of each sequence by its number
        self.flats = getattr(strategy, "flats", None) or [
            flat for _, unit in getattr(strategy, "pairs", []) for flat in unit.flats
        ]
        whole = spmd.R if self.reads or getattr(strategy, "sequence", False) or self.context else spmd.I
        self.types = {p: spmd.V if p in self.cut else whole for p in strategy.model.parameters()}

    def of_gradient(self, parameter):
        """A type belongs to a Python object. A gradient that is a view of a bucket has the bucket's."""
        memory = parameter.grad.untyped_storage().data_ptr()
        bucket = next((bucket for bucket in self.buckets if bucket.untyped_storage().data_ptr() == memory), None)
        return self.of(parameter.grad if bucket is None else bucket)

    def of(self, tensor):
        return self.spmd.get_local_type(tensor).get(self.axis) if self.spmd.has_local_type(tensor) else None

    def refuse(self, text):
        raise self.spmd.SpmdTypeError(text)

    def parameters(self):
        """And what loss.backward() begins with: a part of the sum over all ranks, where each has a loss of its own."""
        scale, spmd = self.strategy.scaler.scale, self.spmd

        def scaled(loss):
            loss = scale(loss)
            return spmd.reinterpret(loss, self.group, src=spmd.V, dst=spmd.P) if self.of(loss) is spmd.V else loss

        self.strategy.scaler.scale = scaled
        if self.context:
            self.strategy.model.register_forward_pre_hook(
                lambda _, inputs: [self.put(x, spmd.V) for x in inputs][:0] or None
            )
        reducer = getattr(self.strategy, "reducer", None)
        for name in ("average_bucket", "reduce"):
            if hasattr(reducer, name):
                setattr(reducer, name, functools.partial(self.in_backward, getattr(reducer, name)))
        for flat in self.flats:
            for tensor, kind in ((flat.vector, spmd.R), (flat.part, spmd.V), (flat.shard, spmd.V)):
                if tensor is not None:
                    self.put(tensor, kind)
            flat.allocate_gradient = functools.partial(self.allocate, flat, flat.allocate_gradient)
        for parameter, kind in self.types.items():
            self.spmd.assert_type(parameter, {self.group: kind})
            if parameter.requires_grad and not self.buckets:
                parameter.register_post_accumulate_grad_hook(self.gradient)

    def gradient(self, parameter):
        if parameter.grad is not None and self.of(parameter.grad) is None:
            self.put(parameter.grad, self.types[parameter].backward_type())

    def in_backward(self, send, bucket):
        """What autograd calls runs outside of the checker's mode; a bucket is what autograd has added to."""
        if isinstance(bucket, torch.Tensor):
            self.put(bucket, self.spmd.P)
        with importlib.import_module("spmd_types._checker")._current_mode():
            return send(bucket)

    def allocate(self, flat, real):
        real()
        for tensor in (flat.gradient, *(flat.gradient_of or {}).values()):
            if tensor is not None:
                self.put(tensor, self.spmd.P)

    def put(self, tensor, kind):
        from spmd_types.runtime import _set_local_type

        known = dict(self.spmd.get_local_type(tensor)) if self.spmd.has_local_type(tensor) else {}
        _set_local_type(tensor, known | {self.axis: kind})

    def batches(self, batches):
        for batch in batches:
            for tensor in batch:
                self.spmd.assert_type(tensor, {self.group: self.spmd.V if self.reads else self.spmd.R})

    def gradients(self):
        """What the optimizer asks of gradients: no part of a sum; whole where the parameter is whole."""
        for parameter in self.types:
            if parameter.grad is not None:
                kind = self.of_gradient(parameter)
                if kind is self.spmd.P or (kind is self.spmd.V and parameter not in self.cut):
                    self.refuse(f"the optimizer takes a gradient that is {kind}")
        for flat in self.flats:
            kind = None if flat.shard.grad is None else self.of(flat.shard.grad)
            if flat.requires_grad and kind not in (self.spmd.V, None):
                self.refuse(f"the optimizer takes a shard's gradient that is {kind}")

    def stand_ins(self, namespace):  # noqa: C901  one for each helper
        """What stands for helpers of common/collectives.py and PyTorch: the types that they ask for and give."""
        found: dict[str, Any] = {}
        if "all_reduce_together" in namespace:
            real = namespace["all_reduce_together"]

            def all_reduce_together(tensors, group):
                along = self.spmd.normalize_axis(group) == self.axis
                for tensor in tensors if along else ():
                    if self.of(tensor) not in (self.spmd.P, None):
                        self.refuse(f"all_reduce_together takes P, and gets {self.of(tensor)}")
                with self.spmd.no_typecheck():
                    real(tensors, group)
                for tensor in tensors if along else ():
                    self.put(tensor, self.spmd.R)

            found["all_reduce_together"] = all_reduce_together
        if "global_norm" in namespace:

            def global_norm(parts, device):
                for tensors, groups in parts:
                    over = any(self.spmd.normalize_axis(group) == self.axis for group in groups)
                    for tensor in tensors:
                        kind = self.of(tensor)
                        if kind is not None and (kind is self.spmd.P or (kind is self.spmd.V) != over):
                            self.refuse(f"global_norm {'with' if over else 'without'} the axis gets {kind}")
                total = torch.ones((), device=device)
                self.put(total, self.spmd.R)
                return total

            found["global_norm"] = global_norm
        for name in ("clip_grads_with_norm_", "clip_grad_norm_"):
            if name in namespace:

                def clip(parameters, *_):
                    for parameter in parameters:
                        if parameter.grad is not None and self.of_gradient(parameter) is self.spmd.P:
                            self.refuse("the norm of a gradient that is a part of a sum")
                    total = torch.ones(())
                    self.put(total, self.spmd.R)
                    return total

                found[name] = clip
        if self.context and "cross_entropy" in namespace:
            real_loss = namespace["cross_entropy"]

            def cross_entropy(logits, targets, *others, **named):
                self.put(targets, self.spmd.V)
                return real_loss(logits, targets, *others, **named)

            found["cross_entropy"] = cross_entropy
        return found

    def sums(self):
        """dist.all_reduce takes what differs for a part of a sum: nothing in the code says that it is one."""
        rules = importlib.import_module("spmd_types._raw_dist").RAW_DIST_RULES
        real = rules[dist.all_reduce]

        def all_reduce(func, args, kwargs):
            tensor = args[0] if args else kwargs["tensor"]
            if self.of(tensor) is self.spmd.V:
                self.put(tensor, self.spmd.P)
            return real(func, args, kwargs)

        return mock.patch.dict(rules, {dist.all_reduce: all_reduce})

    def operators(self, namespace):
        """Typing rules of the chapter's autograd functions."""
        spmd = self.spmd
        from spmd_types import rules

        def typed(x, takes, gives, what, dims=None):
            rules._touch(x)
            kind = self.of(x)
            if kind is not None and kind not in takes:
                self.refuse(f"{what} takes {takes[0]}, and gets {kind}")
            known = dict(spmd.get_local_type(x)) if spmd.has_local_type(x) else {}
            return rules._make(x.ndim if dims is None else dims, known | {self.axis: gives}, None)

        pairs = {
            ("same", "all_reduce"): ((spmd.I,), spmd.R),
            ("all_reduce", "same"): ((spmd.P, spmd.V), spmd.I),  # nothing in the code says that V is a part of a sum
            ("all_gather", "reduce_scatter"): ((spmd.V,), spmd.R),
            ("reduce_scatter", "all_gather"): ((spmd.P, spmd.V), spmd.V),
        }

        def conjugate(*, x, group, forward, backward):  # noqa: ARG001
            names = forward.__name__, backward.__name__
            if names not in pairs:
                self.refuse(f"no types have {names[0]} forward and {names[1]} backward")
            return typed(x, *pairs[names], names[0])

        def loss(*, logits, targets, group):  # noqa: ARG001
            rules._touch(targets)
            return typed(logits, (spmd.V,), spmd.I, "a loss over cut logits", 1)

        def rows(*, rows, group, sent, received):  # noqa: ARG001
            return typed(rows, (spmd.V,), spmd.V, "all_to_all")

        for name, rule in (("Conjugate", conjugate), ("VocabularyParallelCrossEntropy", loss), ("AllToAll", rows)):
            if name in namespace:
                namespace[name].spmd_typecheck = staticmethod(rule)
