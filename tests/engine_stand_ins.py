"""Stand-ins for the engines' libraries, which `make test` does not have: they do what the documentation of each says,
and note what they are asked for. tests/strategies/test_engines.py has the libraries themselves."""

import functools
import importlib
import os
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from common import strategy as contract
from common.lab import equality
from common.model import GPT, cross_entropy

SCRIPTS = ("ddp.with_accelerate", "ddp.with_fabric", "fsdp.with_accelerate", "fsdp.with_deepspeed",
           "fsdp.with_trainer", "fsdp.with_qlora")  # fmt: skip


class Optimizer:
    """Steps, and forgets gradients, when `last()` says that gradients are whole."""

    def __init__(self, optimizer, last=lambda: True):
        self.optimizer, self.last = optimizer, last
        self.param_groups = optimizer.param_groups

    def step(self):
        if self.last():
            self.optimizer.step()

    def zero_grad(self):
        if self.last():
            self.optimizer.zero_grad()


class Library:
    """What both have in common: it notes the settings that it is given, and what it is asked to do."""

    scaler = None

    def __init__(self, **settings):
        type(self).settings, type(self).last, self.inside, self.reduced = settings, self, False, []
        self.synchronised = []  # for each micro-batch: whether its gradients are sent

    @contextmanager
    def autocast(self):
        self.inside = True
        yield
        self.inside = False

    def reduce(self, loss, reduction):
        self.reduced.append(reduction)
        return loss


class Accelerator(Library):
    gradient_accumulation_steps = 1
    passes = 0
    device, num_processes, process_index = torch.device("cpu"), 1, 0

    def __init__(self, **settings):
        super().__init__(**settings)
        self.state = SimpleNamespace(distributed_type="MULTI_CPU", fsdp_plugin=None)
        self.mixed_precision = settings.get("mixed_precision", "no")
        self.sync_gradients = True

    def prepare(self, model, optimizer):
        model.register_forward_pre_hook(lambda *_: self.outside.append(not self.inside))
        self.outside = []
        return model, Optimizer(optimizer, lambda: self.sync_gradients)

    @contextmanager
    def accumulate(self, model):
        self.passes += 1
        self.sync_gradients = self.passes % self.gradient_accumulation_steps == 0
        self.synchronised.append(self.sync_gradients)
        yield

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()

    def clip_grad_norm_(self, parameters, max_norm):
        return clip_grad_norm_(parameters, max_norm)


class Fabric(Library):
    launched = False
    _precision = SimpleNamespace(scaler="the scaler of Fabric's precision")

    def launch(self):
        self.launched = True

    def setup(self, model, optimizer):
        assert self.launched, "Fabric is set up before it is launched"
        return model, Optimizer(optimizer)

    @contextmanager
    def no_backward_sync(self, model, enabled):
        self.synchronised.append(not enabled)
        yield

    def backward(self, loss):
        loss.backward()

    def clip_gradients(self, model, optimizer, max_norm):
        return clip_grad_norm_(model.parameters(), max_norm)

    def all_reduce(self, loss, reduce_op):
        return self.reduce(loss, reduce_op)


def prepare_data_loader(loader, device, **how):
    """The slices that a process gets of each batch."""
    prepare_data_loader.how = how | {"device": device}
    assert how["split_batches"], "a batch of the loader is the global one"
    for batch in loader:
        yield tuple(part.chunk(how["num_processes"])[how["process_index"]] for part in batch)


class Plugin:
    """Accelerate's FullyShardedDataParallelPlugin."""

    mixed_precision = None

    def __init__(self, **settings):
        self.settings = settings

    def set_mixed_precision(self, precision):
        self.mixed_precision = precision


class Engine:
    """DeepSpeed's, on ranks that all read what this one reads."""

    def __init__(self, model, optimizer, config):
        self.model, self.config, self.passes, self.norm = model, config, 0, None
        self.optimizer = SimpleNamespace(optimizer=optimizer, clip_grad=None)
        self.accumulation = config["gradient_accumulation_steps"]

    def __call__(self, inputs):
        return self.model(inputs)

    def train_micro_batch_size_per_gpu(self):
        return self.config["train_micro_batch_size_per_gpu"]

    def set_train_batch_size(self, examples):
        each = self.train_micro_batch_size_per_gpu() * 4
        assert examples % each == 0, f"DeepSpeed refuses a global batch of {examples}: 4 ranks read {each} at a time"
        self.accumulation = examples // each

    def backward(self, loss):
        (loss / self.accumulation).backward()

    def step(self):
        self.passes += 1
        if self.passes % self.accumulation == 0:
            self.norm = float(clip_grad_norm_(self.model.parameters(), self.optimizer.clip_grad or torch.inf))
            self.optimizer.optimizer.step()
            self.optimizer.optimizer.zero_grad()

    def get_global_grad_norm(self):
        return self.norm


class DeepSpeed(ModuleType):
    """The package: what holds when it is imported, and when its parts are."""

    ops = SimpleNamespace(__compatible_ops__={})
    comm = SimpleNamespace(all_reduce=lambda tensor: tensor.mul_(4))

    @staticmethod
    def initialize(model, optimizer, config):
        engine = Engine(model, optimizer, config)
        return engine, engine.optimizer, None, None


class Parts(ModuleType):
    """deepspeed.utils: what is asked for is a tensor that says what it is of."""

    def __getattr__(self, name):
        if name.startswith("safe_get_local_"):
            Parts.told = os.environ.get("DS_ACCELERATOR"), DeepSpeed.ops.__compatible_ops__
            return getattr(Parts, name.removeprefix("safe_get_local_"))
        raise AttributeError(name)

    @staticmethod
    def fp32_param(parameter):
        return parameter.of_this_rank

    @staticmethod
    def optimizer_state(parameter, key):
        return {"exp_avg": parameter.of_this_rank * 10, "exp_avg_sq": parameter.of_this_rank * 100}[key]


class TrainingArguments(SimpleNamespace):
    """With the defaults of Transformers for what the loop below reads."""

    per_device_train_batch_size, gradient_accumulation_steps, max_grad_norm = 8, 1, 1.0
    train_sampling_strategy, logging_steps = "random", 500

    def __init__(self, **settings):
        super().__init__(**settings)
        TrainingArguments.settings = settings
        self.fsdp_plugin_args = {"made of": settings["fsdp_config"]} if settings["fsdp"] else None


class PrinterCallback:
    pass


class Trainer:
    """The loop of Transformers on one process: its stations, and what it does where nobody says otherwise."""

    is_fsdp_enabled = False

    def __init__(self, model, args, train_dataset, data_collator):
        self.model, self.args, self.callbacks, self.optimizer = model, args, [PrinterCallback()], None
        self.train_dataset, self.data_collator = train_dataset, data_collator
        self.create_accelerator_and_postprocess()

    def create_accelerator_and_postprocess(self):
        self.accelerator = Accelerator()
        self.accelerator.num_processes = 4 if self.args.fsdp else 1

    def remove_callback(self, kind):
        self.callbacks = [one for one in self.callbacks if not isinstance(one, kind)]

    def add_callback(self, one):
        self.callbacks.append(one)

    def call(self, event, **more):
        for one in self.callbacks:
            assert not isinstance(one, PrinterCallback), "each step is printed twice: by the run and by the Trainer"
            getattr(one, event)(self.args, self.state, self.control, model=self.model, **more)

    def train(self):
        args, self.state = self.args, SimpleNamespace(global_step=0)
        self.control = SimpleNamespace(should_training_stop=False)
        optimizer = self.create_optimizer()
        self.create_scheduler(num_training_steps=args.max_steps, optimizer=optimizer)
        shuffled = args.train_sampling_strategy != "sequential"
        loader = DataLoader(self.train_dataset, args.per_device_train_batch_size, shuffled,
                            collate_fn=self.data_collator)  # fmt: skip
        batches = iter(loader)
        self.call("on_train_begin", optimizer=optimizer, lr_scheduler=self.lr_scheduler)
        while self.state.global_step < args.max_steps and not self.control.should_training_stop:
            told = 0.0
            for _ in range(args.gradient_accumulation_steps):
                loss = self.compute_loss(self.model, next(batches), num_items_in_batch=None)
                (loss / args.gradient_accumulation_steps).backward()
                told += loss.item() / args.gradient_accumulation_steps
            norm = clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
            optimizer.step()
            self.lr_scheduler.step()
            optimizer.zero_grad()
            self.state.global_step += 1
            if self.state.global_step % args.logging_steps == 0:
                self.call("on_log", logs={"loss": told, "grad_norm": norm.item()})
        self.call("on_log", logs={"train_runtime": 1.0})


def stand_in(monkeypatch, name: str, **names) -> None:
    found = ModuleType(name)
    vars(found).update(names)
    monkeypatch.setitem(sys.modules, name, found)


def settings(**given) -> dict:
    return given


def on_rank_1_of_4(monkeypatch) -> None:
    everyone = SimpleNamespace(rank=1, size=4, group="the group of four")
    meshes = SimpleNamespace(device_of=lambda mesh: torch.device("cpu"), axis=lambda mesh, *names: everyone)
    monkeypatch.setattr(contract, "meshes", meshes)
    monkeypatch.setattr("course.ddp.options.axis", meshes.axis)


def scripts(monkeypatch):
    """Yields what imports a script, such as "ddp.with_fabric", with stand-ins in place of its library."""
    module = functools.partial(stand_in, monkeypatch)
    module("accelerate", Accelerator=Accelerator)
    module("accelerate.data_loader", prepare_data_loader=prepare_data_loader)
    module(
        "accelerate.utils",
        DistributedType=SimpleNamespace(FSDP="FSDP"),
        FullyShardedDataParallelPlugin=Plugin,
        GradientAccumulationPlugin=settings,
    )
    module("common.vision")  # which would import torchvision, as the libraries do
    module("lightning")
    module("lightning.fabric", Fabric=Fabric)
    module("lightning.fabric.strategies", DDPStrategy=settings)
    monkeypatch.setattr(DeepSpeed.ops, "__compatible_ops__", {"deepspeed_shm_comm": True})
    monkeypatch.setitem(sys.modules, "deepspeed", DeepSpeed("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", Parts("deepspeed.utils"))
    callback = type("TrainerCallback", (), {"on_log": None})
    of_transformers = {"Trainer": Trainer, "TrainingArguments": TrainingArguments, "PrinterCallback": PrinterCallback}
    module("transformers", TrainerCallback=callback, **of_transformers)
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, f"course.{name}", raising=False)

    def load(name):
        script = importlib.import_module(f"course.{name}")
        if hasattr(script, "axis"):
            monkeypatch.setattr(script, "axis", contract.meshes.axis)
        return script

    yield load
    for name in SCRIPTS:
        sys.modules.pop(f"course.{name}", None)


def steps(number: int, count: int) -> list:
    tokens = torch.randint(64, (number, count, 4, 9), generator=torch.Generator().manual_seed(0))
    return [[(part[:, :-1], part[:, 1:]) for part in step] for step in tokens]


def alone(max_norm: float) -> tuple[list[float], list[float], dict]:
    """Two steps of three micro-batches, as one process does them on whole batches: losses, norms, weights."""
    torch.manual_seed(0)
    model, losses, norms = equality.tied(GPT), [], []
    optimizer = equality.sgd(model.parameters())
    for step in steps(2, 3):
        inputs, targets = (torch.cat(parts) for parts in zip(*step, strict=True))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()
