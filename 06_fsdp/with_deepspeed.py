"""ZeRO by DeepSpeed: an engine in the place of model, optimizer and loss scaling, made from a JSON of settings.

`engine.backward` scales, sends and shards; `engine.step` clips, steps and zeroes, and does nothing before the last
micro-batch. Which stage it is, is a number in the JSON.

    pip install -r requirements-engines.txt
    torchrun --nproc_per_node=2 with_deepspeed.py --distributed                        # stage 3
    torchrun --nproc_per_node=2 with_deepspeed.py --distributed --strategy zero1
    deepspeed --no_local_rank --num_gpus=2 with_deepspeed.py --distributed \\
        --deepspeed-config ../configs/engines/zero3.json
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("fsdp", "deepspeed")

import math
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from common.launcher import environment
from common.ranks import choose

if choose(processes=environment()[3])[0] == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed picks its accelerator when it is imported

import deepspeed  # isort: split

# ruff: noqa: E402  what follows has to be told before DeepSpeed's parts are imported
# On CPUs it would compile an all-reduce of its own first, for which it wants a compiler, a minute, and a lock in
# ~/.cache/torch_extensions: whoever is killed meanwhile leaves the lock, and every later start waits for it forever.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # names that it still uses

from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

from common import engine_files
from common.config import take_over
from common.errors import UserError
from common.model import cross_entropy
from common.options import StrategyOptions, option
from common.state import Part, interval, whole
from common.strategy import Strategy


class Zero3WithDeepSpeed(Strategy):
    """Every rank has its part of parameters, gradients and optimizer state."""

    preset = {"shard": -1}
    stage = 3

    @dataclass
    class Options(StrategyOptions):
        offload: bool = option(False, "keep the optimizer, and at stage 3 the parameters, in host memory")
        deepspeed_config: str = option("", "a JSON of DeepSpeed's settings, which become those of the run")

    @classmethod
    def require(cls, config, axes):
        if config.options.deepspeed_config:
            adopt(config, engine_files.deepspeed(config.options.deepspeed_config), cls.stage, math.prod(axes.values()))
        if config.resume and config.precision == "fp16":
            raise UserError(
                "--resume: a checkpoint has no loss scale of DeepSpeed's; --implementation pytorch takes it up in fp16"
            )
        if config.resume and config.options.offload and torch.cuda.is_available():
            raise UserError(
                "--resume: what DeepSpeed has offloaded is not written to; leave --offload out, or --implementation "
                "pytorch takes it up"
            )

    def settings(self) -> dict:
        """What `deepspeed.initialize` is told. Its batch sizes are counts: the loop below feeds the engine itself."""
        zero: dict[str, object] = {"stage": self.stage}
        if self.options.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.max_norm if math.isfinite(self.max_norm) else 0.0,
            "bf16": {"enabled": self.precision == "bf16"},  # weights in bf16 beside float32 ones, no autocast
            "fp16": {"enabled": self.precision == "fp16"},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,  # an optimizer of PyTorch's instead of DeepSpeed's own
            "zero_force_ds_cpu_optimizer": False,
        } | (engine_files.deepspeed(self.options.deepspeed_config) if self.options.deepspeed_config else {})

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.model = model
        self.names = {}  # parameter -> its names: what is tied has several
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter, []).append(name)
        self.sizes = {parameter: whole(parameter) for parameter in self.names}
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        # It also sends rank 0's parameters to all, at each stage, unless a model was made under zero.Init.
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.settings()
        )

    def step(self, micro_batches):
        engine, loss = self.engine, 0.0
        examples = engine.train_micro_batch_size_per_gpu() * self.data_size  # as it counts them, see settings()
        engine.set_train_batch_size(len(micro_batches) * examples)  # sets gradient_accumulation_steps
        for inputs, targets in micro_batches:
            part = cross_entropy(engine(inputs), targets)
            engine.backward(part)  # divides by gradient_accumulation_steps
            engine.step()
            loss += part.detach().float() / len(micro_batches)
        deepspeed.comm.all_reduce(loss)
        return loss / self.data_size, torch.as_tensor(engine.get_global_grad_norm())

    # What follows says where DeepSpeed keeps what, for the course's checkpoints and proofs. Training needs none of it.

    def parts(self):
        """DeepSpeed cuts each parameter, flattened, into equal intervals, the last of which may be filled up."""
        found = []
        for parameter, (name, *aliases) in self.names.items():
            size, where = parameter.ds_tensor.ds_numel, self.sizes[parameter]
            begin = min(self.data_rank * size, where.stop)
            end = min(begin + size, where.stop)
            there = safe_get_local_fp32_param(parameter) if parameter.requires_grad else parameter.ds_tensor.detach()
            owner = parameter if parameter.requires_grad else None
            own, span = interval(where, begin, end), slice(0, end - begin)
            found.append(Part(name, there[span], own, owner, span, tuple(aliases)))
        return found

    def optimizer_state(self):
        inner, found = self.optimizer.optimizer.state, {}
        for parameter in self.model.parameters():
            for flat_state in list(inner.values())[:1]:
                found[parameter] = {
                    key: value if value.dim() == 0 else safe_get_local_optimizer_state(parameter, key)
                    for key, value in flat_state.items()
                    if torch.is_tensor(value) and parameter.requires_grad
                }
        self.asked = found
        return found

    # A checkpoint is read into the float32 values and the optimizer's state, which are there after a step.

    def before_loading(self, first_batch):
        self.step(first_batch())

    def after_loading(self):
        """Numbers of steps are read into what `optimizer_state` gave, and what computes is a copy of float32 values."""
        read = next((state for state in self.asked.values() if state), {})
        for state in self.optimizer.optimizer.state.values():
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim() == 0 and key in read:
                    value.copy_(read[key])
        self.compute_with_what_was_loaded()

    def compute_with_what_was_loaded(self):
        for number in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(number)  # as after a step
        small = self.optimizer.persistent_parameters  # which are whole on each rank
        if small:
            small[0].partition(small)
            small[0].all_gather(small)


class Zero2WithDeepSpeed(Zero3WithDeepSpeed):
    """Every rank has all parameters, and its part of gradients and optimizer state."""

    stage = 2

    def parts(self):
        """DeepSpeed puts all parameters behind one another, and cuts that: a rank has a piece of some of them."""
        found = []
        for parameter, (name, *aliases) in self.names.items():
            piece, where = getattr(parameter, "_hp_mapping", None), self.sizes[parameter]
            if not parameter.requires_grad:
                found.append(Part(name, parameter.detach().flatten(), where, aliases=tuple(aliases)))
            elif piece is not None:
                at = piece.lp_fragment_address
                own, span = interval(where, at.start, at.start + at.numel), slice(0, at.numel)
                found.append(Part(name, piece.get_hp_fragment().detach(), own, parameter, span, tuple(aliases)))
        return found

    def optimizer_state(self):
        scalars = {
            key: value
            for state in list(self.optimizer.optimizer.state.values())[:1]
            for key, value in state.items()
            if torch.is_tensor(value) and value.dim() == 0
        }
        self.asked = {
            parameter: scalars | (parameter._hp_mapping.optim_fragment or {})
            for parameter in self.model.parameters()
            if getattr(parameter, "_hp_mapping", None) is not None
        }
        return self.asked

    def compute_with_what_was_loaded(self):
        self.optimizer.update_lp_params()


class Zero1WithDeepSpeed(Zero2WithDeepSpeed):
    """Every rank has all parameters and gradients, and its part of the optimizer state."""

    stage = 1


def adopt(config, settings: dict, stage: int, ranks: int) -> None:
    """Make what a file sets the run's own settings, which config.json records. Raises UserError for a file that
    contradicts an option, or sets what the script makes itself."""
    file, zero = f"--deepspeed-config {config.options.deepspeed_config}", settings.get("zero_optimization", {})
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise UserError(f"{file}: the script makes the {name} itself; take it out of the file")
    if zero.get("stage", 0 if zero else stage) != stage:
        raise UserError(f"{file} has stage {zero.get('stage', 0)}, and --strategy {config.strategy} is stage {stage}")
    if config.options.offload and zero and "offload_optimizer" not in zero:
        raise UserError(
            f"{file} has no offload_optimizer, and its zero_optimization replaces --offload; give one of them"
        )
    config.options.offload |= "offload_optimizer" in zero
    found: dict[str, Any] = {}
    for kind in ("bf16", "fp16"):
        if settings.get(kind, {}).get("enabled"):
            found["precision"] = kind
        elif kind in settings and config.precision == kind:
            found.setdefault("precision", "fp32")
    if "gradient_clipping" in settings:
        found["max_norm"] = float(settings["gradient_clipping"]) or math.inf  # DeepSpeed's 0 is no clipping
    if "gradient_accumulation_steps" in settings:
        found["accumulation_steps"] = settings["gradient_accumulation_steps"]
    micro, count = settings.get("train_micro_batch_size_per_gpu"), config.accumulation_steps
    if "train_batch_size" in settings:
        found["batch_size"] = settings["train_batch_size"]
    elif micro:
        found["batch_size"] = micro * found.get("accumulation_steps", count) * ranks
    take_over(config, found, file)


if __name__ == "__main__":
    start()
