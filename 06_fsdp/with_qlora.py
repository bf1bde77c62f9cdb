"""LoRA and QLoRA with FSDP: a frozen base model, in 4 bits or not, and low-rank adapters, which are trained and saved.

bitsandbytes stores each linear layer of the base in 4 bits (nf4), peft puts an adapter beside it, and Accelerate calls
fully_shard on the blocks. The base is a folder as `save_pretrained` writes it, or without --base a Llama-shaped model
made from the configuration, with random weights: nothing is downloaded.

    pip install -r requirements-engines.txt
    python with_qlora.py --config ../configs/engines/fsdp_qlora_small.yaml --make-base my-base
    torchrun --nproc_per_node=2 with_qlora.py --config ../configs/engines/fsdp_qlora_small.yaml --base my-base \\
        --out my-adapters
    python with_qlora.py --config ../configs/engines/fsdp_qlora_small.yaml --base my-base \\
        --adapter my-adapters --merge merged
    python with_qlora.py --config ../configs/engines/fsdp_qlora.yaml --check 4    # 7B: bytes by part
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.fsdp.qlora_command import read_command

    command = read_command(__doc__)

import argparse
import contextlib
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common.vision  # noqa: F401  first: peft imports torchvision

# isort: split
from common import quiet_engines  # noqa: F401  before they are imported

# isort: split
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from bitsandbytes.nn import Linear4bit, Params4bit
from bitsandbytes.optim import PagedAdamW8bit
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from common.constants import VOCABULARY
from common.data import Text, global_batch, training_text, validation_text
from common.errors import UserError, one_line_errors
from common.learning_rate import learning_rate
from common.ranks import environment, process_group
from common.reshard import reshard
from course.fsdp.with_accelerate import on_cpu


@contextlib.contextmanager
def settings_of(part: str):
    """What a library cannot make of this part of the settings is one line. Raises UserError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{part}: {first_line(error)}") from error


def quantized(layer: nn.Linear, how: dict) -> Linear4bit:
    """The layer with its weight in 4 bits; on the meta device, with a weight that is still to be quantized."""
    dtypes = {name: getattr(torch, how[name]) for name in ("quant_storage", "compute_dtype")}
    options = {"compress_statistics": how["compress_statistics"], "quant_type": how["quant_type"]}
    has_bias = layer.bias is not None
    small = Linear4bit(layer.in_features, layer.out_features, bias=has_bias, device="meta", **options, **dtypes)
    storage = {"quant_storage": dtypes["quant_storage"]}
    small.weight = Params4bit(layer.weight.detach(), requires_grad=False, module=small, **options, **storage)
    if has_bias:
        small.bias = layer.bias
    return small if layer.weight.is_meta else small.to(layer.weight.device)  # `to` quantizes


def make_base(settings: dict, base: str = "", device: str | torch.device = "cpu", quantize: bool = True) -> Any:
    """The model that is fine-tuned: from a folder, or made from the settings; frozen, and with `quantization` among the
    settings, the linear layers of its blocks in 4 bits, unless `quantize` is False. Raises UserError."""
    dtype = getattr(torch, settings["training"]["dtype"])
    if base:
        if not Path(base, "config.json").is_file():  # without this question transformers would ask the network for it
            raise UserError(f"--base {base}: no model that transformers can load: there is no config.json in it")
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"--base {base}: no model that transformers can load: {first_line(error)}") from error
        model = model.to(device)
    else:
        torch.manual_seed(settings["training"]["seed"])
        with torch.device(device), settings_of("model"):
            model = LlamaForCausalLM(LlamaConfig(**settings["model"])).to(dtype)
    model.train().requires_grad_(False)
    if settings["quantization"] and quantize:
        for block in blocks(model):
            for module in list(block.modules()):
                for name, child in module.named_children():
                    if type(child) is nn.Linear:
                        with settings_of("quantization"):
                            setattr(module, name, quantized(child, settings["quantization"]))
        model.is_loaded_in_4bit = True  # what from_pretrained would have noted, and peft asks
    return model


def make_model(settings: dict, device: str | torch.device = "cpu", base: str = "") -> Any:
    """The base with new adapters in float32. Raises UserError."""
    model = make_base(settings, base, device)
    with torch.device(device):
        torch.manual_seed(settings["training"]["seed"])  # all ranks make the same adapters
        with settings_of("lora"):
            return get_peft_model(model, LoraConfig(**settings["lora"], task_type="CAUSAL_LM"))


def blocks(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules in a model: its blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(f"--base: {type(model).__name__} has no list of blocks")
    return max(lists, key=len)


def load_adapter(model: Any, adapter: str) -> Any:
    """The base with the adapters of a folder that `save_adapter` or peft has written. Raises UserError."""
    if not Path(adapter, "adapter_config.json").exists():
        raise UserError(f"--adapter {adapter}: there is no adapter_config.json in it")
    try:
        with warnings.catch_warnings():  # peft goes on with new adapters in the place of those that it did not find
            warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
            return PeftModel.from_pretrained(model, adapter)
    except (RuntimeError, ValueError, UserWarning) as error:  # names or shapes that this base does not have
        raise UserError(f"--adapter {adapter}: these are adapters of another base: {first_line(error)}") from error


def save_adapter(model: Any, folder: str, base: str) -> None:
    """Write the adapters as peft does, for `PeftModel.from_pretrained`: rank 0 has them whole for that. Collective."""
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.replace("_checkpoint_wrapped_module.", "")  # of activation checkpointing
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            whole[name] = value.detach().cpu()
    if dist.get_rank() > 0:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.inference_mode = base or None, True
    config.save_pretrained(folder)
    tensors = {name: value.contiguous() for name, value in get_peft_model_state_dict(model, state_dict=whole).items()}
    save_file(tensors, Path(folder, "adapter_model.safetensors"), metadata={"format": "pt"})


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]


class PagedAdamW8bitOnShards:
    """bitsandbytes' AdamW, which knows no DTensors, on this rank's part of each parameter.

    It keeps the moments in 8 bits, those of small parameters aside, in memory that is moved to the host while a GPU has
    too little (Dettmers et al. 2023, section 3). On CPUs nothing is moved.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float):
        mine = [(parameter, nn.Parameter(local(parameter.detach()))) for parameter in parameters]
        self.mine = [(parameter, own) for parameter, own in mine if own.numel()]  # the same memory twice
        self.inner = PagedAdamW8bit([own for _, own in self.mine], lr=lr, weight_decay=weight_decay)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:
        for parameter, own in self.mine:
            own.grad = None if parameter.grad is None else local(parameter.grad)
        self.inner.step()

    def zero_grad(self) -> None:
        for parameter, own in self.mine:
            parameter.grad = own.grad = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moments(count: int, optimizer: str) -> int:
    """Bytes of both of AdamW's for `count` numbers in float32. In 8 bits, each 256 of them share a scale in float32."""
    if optimizer == "adamw" or count < 4096:  # bitsandbytes leaves these in float32 (min_8bit_size)
        return 2 * 4 * count
    return 2 * (count + 4 * -(-count // 256))


def bytes_by_part(model: nn.Module, compress: bool = True, ranks: int = 1, optimizer: str = "adamw") -> dict[str, int]:
    """What a rank keeps between steps, in bytes: counted where tensors have data, and from the shapes of a model on the
    meta device; `ranks` share what fully_shard cuts.

    The scales of 4-bit blocks are an attribute of the layer and no parameter of it. So they are not cut, and each rank
    has those of the whole model: one float32 for 64 weights, or (Dettmers et al. 2023, section 3) one byte for 64
    weights, one float32 for 256 of those bytes, and one offset.
    """
    found: Counter[str] = Counter()
    rest = "embedding, norms, head" if any(isinstance(m, Linear4bit) for m in model.modules()) else "base"
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            count = parameter.to_local().numel() if isinstance(parameter, DTensor) else -(-parameter.numel() // ranks)
            if isinstance(module, Linear4bit):
                unpacked = parameter.is_meta
                found["base, 4 bits"] += count // 2 if unpacked else count * parameter.element_size()
                found["scales of the 4-bit blocks"] += scales(module, compress)
            elif not parameter.requires_grad:
                found[f"{rest} in {str(parameter.dtype).removeprefix('torch.')}"] += count * parameter.element_size()
            else:
                found["adapters"] += count * parameter.element_size()
                found["their gradients"] += count * parameter.element_size()
                found["their AdamW state"] += moments(count, optimizer)
    return dict(found)


def scales(layer: Linear4bit, compress: bool) -> int:
    """Bytes of a layer's scales."""
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    if state is None:
        blocks = -(-layer.in_features * layer.out_features // 64)
        return blocks + 4 * -(-blocks // 256) + 4 if compress else 4 * blocks
    nested = [state.offset, state.state2.absmax] if state.nested else []
    return sum(tensor.numel() * tensor.element_size() for tensor in [state.absmax, *nested])


class Data:
    """Text to train on and to evaluate with: by the base's tokenizer, or, where it has none, byte by byte."""

    def __init__(self, context: int, base: str, vocabulary: int, text: str = ""):
        self.parts = [training_text(context, text), validation_text(context, text)]
        tokenizer = Path(base, "tokenizer_config.json").exists() and AutoTokenizer.from_pretrained(base)
        known = len(tokenizer) if tokenizer else VOCABULARY
        if known > vocabulary:
            raise UserError(
                f"--base {base}: {'its tokenizer' if tokenizer else 'bytes, without a tokenizer,'} can make {known} "
                f"different tokens, and the model knows {vocabulary}"
            )
        if tokenizer:
            self.parts = [self.encoded(part, tokenizer, context) for part in self.parts]

    @staticmethod
    def encoded(part: Text, tokenizer, context: int) -> Text:
        """The same text in tokens of the tokenizer. Raises UserError for less than one context."""
        numbers = tokenizer(bytes(part.tokens.numpy()).decode(errors="replace"))["input_ids"]
        part.tokens, part.size = torch.tensor(numbers), (len(numbers) - 1) // context
        if part.size < 1:
            raise UserError(f"--text has {len(numbers)} tokens of this tokenizer, fewer than one context of {context}")
        part.windows = part.tokens.unfold(0, context + 1, context)
        return part


def loss_of(model: nn.Module, examples: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> torch.Tensor:
    inputs, targets = examples
    logits = model(input_ids=inputs.to(device)).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(device))


def evaluate(model: nn.Module, data: Text, how: dict, device: torch.device) -> float:
    """The mean loss on the first batches of a text; each rank reads an equal part of each. Collective.

    Without dropout, but not by `model.eval()`: on CPUs with AVX-512, a 4-bit layer of bitsandbytes 0.50 that is not in
    training packs its weight anew, which spoils what fully_shard has gathered: the loss would be wrong. So those stay
    in training, and all others leave it, since attention drops out by a number that no nn.Dropout applies.
    """
    training = [module for module in model.modules() if module.training and not isinstance(module, Linear4bit)]
    for module in training:
        module.training = False
    rank, size, count = dist.get_rank(), dist.get_world_size(), min(how["batch_size"], data.size)
    count -= count % size
    if not count:
        raise UserError(f"the text for evaluation has {data.size} examples, fewer than {size} ranks")
    losses = []
    for number in range(how["evaluation_batches"]):
        batch = torch.arange(number * count, (number + 1) * count) % data.size
        with torch.no_grad():
            losses.append(loss_of(model, data.batch(batch.chunk(size)[rank]), device))
    mean = torch.stack(losses).mean() / size
    dist.all_reduce(mean)
    for module in training:
        module.training = True
    reshard(model)
    return mean.item()


def train(settings: dict, device: torch.device, base: str = "", out: str = "", text: str = "") -> tuple:
    """The loss of each step, this rank's bytes by part, its model, and the loss on the text for evaluation."""
    how = settings["training"]
    with settings_of("fsdp"):
        plugin = FullyShardedDataParallelPlugin(**settings["fsdp"])
    accelerator = on_cpu(Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin), plugin)
    ranks, micro_batches = accelerator.num_processes, how["accumulation_steps"]
    if how["batch_size"] % (ranks * micro_batches):
        raise UserError(
            f"batch_size {how['batch_size']} does not divide by {ranks} ranks x {micro_batches} accumulation_steps"
        )
    model = make_model(settings, device, base)
    training, evaluation = Data(how["context"], base, model.config.vocab_size, text).parts
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=how["lr"], weight_decay=how["weight_decay"])
    with settings_of("fsdp"):  # a class to wrap that this base doesn't have
        model, optimizer = accelerator.prepare(model, optimizer)
    trained, losses = [parameter for parameter in model.parameters() if parameter.requires_grad], []
    if how["optimizer"] == "paged_adamw_8bit":  # in the place of PyTorch's, without which `prepare` takes no model
        optimizer = PagedAdamW8bitOnShards(trained, how["lr"], how["weight_decay"])
    for step in range(how["steps"]):
        batch = global_batch(how["seed"], step, how["batch_size"], training.size)
        mine, mean = batch.chunk(ranks)[accelerator.process_index], 0.0
        for part in mine.chunk(micro_batches):
            loss = loss_of(model, training.batch(part), device) / micro_batches
            accelerator.backward(loss)  # shards of gradients add up
            mean += loss.detach()
        nn.utils.clip_grad_norm_(trained, how["max_norm"])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SimpleNamespace(**how), step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(mean, reduction="mean").item())
        accelerator.print(f"step {step + 1}/{how['steps']}  loss {losses[-1]:.4f}")
        if how["evaluate_every"] and (step + 1) % how["evaluate_every"] == 0 and step + 1 < how["steps"]:
            accelerator.print(f"loss on the text for evaluation {evaluate(model, evaluation, how, device):.4f}")
    evaluated = evaluate(model, evaluation, how, device)
    accelerator.print(f"loss on the text for evaluation {evaluated:.4f}")
    if out:
        save_adapter(accelerator.unwrap_model(model), out, base)
        accelerator.print(f"adapters: {out}")
    return losses, bytes_by_part(model, optimizer=how["optimizer"]), model, evaluated


def evaluate_saved(
    settings: dict, device: torch.device, base: str, adapter: str, merge: str = "", text: str = ""
) -> dict:
    """The loss of the base with saved adapters, and with `merge`, of the model that has them in its own weights, which
    is written there as `from_pretrained` reads it."""
    how = settings["training"]
    model = load_adapter(make_base(settings, base, device), adapter)
    evaluation = Data(how["context"], base, model.config.vocab_size, text).parts[1]
    found = {"base with adapters": evaluate(model, evaluation, how, device)}
    if merge:
        # Into the weights as they were before 4 bits: the sum could not be stored in 4 bits without another rounding.
        merged = load_adapter(make_base(settings, base, device, quantize=False), adapter).merge_and_unload()
        merged.save_pretrained(merge)
        if Path(base, "tokenizer_config.json").exists():
            AutoTokenizer.from_pretrained(base).save_pretrained(merge)
        again = make_base(settings, merge, device, quantize=False)
        found["merged, and loaded again"] = evaluate(again, evaluation, how, device)
    return found


def main(line: argparse.Namespace, settings: dict) -> None:
    ranks = environment()[1]
    if line.make_base:
        make_base(settings, quantize=False).save_pretrained(line.make_base)
        print(f"a base with random weights: {line.make_base}")
        return
    if line.check:
        ranks, compress = line.check, (settings["quantization"] or {}).get("compress_statistics", True)
        model, optimizer = make_model(settings, "meta", line.base), settings["training"]["optimizer"]
        found = bytes_by_part(model, compress, ranks, optimizer)
    else:
        with process_group() as here:
            if line.adapter:
                kept = (line.base, line.adapter, line.merge, line.text)
                for which, loss in evaluate_saved(settings, here.device, *kept).items():
                    print(f"{which}: loss on the text for evaluation {loss:.4f}")
                return
            found = train(settings, here.device, line.base, line.out, line.text)[1]
            if here.rank > 0:
                return
    print(f"bytes on rank 0 of {ranks}, between steps:")
    for part, size in found.items():
        print(f"  {part:40}{size:16,}")


if __name__ == "__main__":
    with one_line_errors():
        main(*command)
