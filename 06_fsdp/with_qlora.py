"""QLoRA with FSDP: a frozen base model in 4 bits, low-rank adapters that are trained, both sharded.

bitsandbytes stores each linear layer of the base in 4 bits (nf4), peft puts an adapter beside it, and Accelerate calls
fully_shard on the blocks. The model is Llama-shaped and made from its configuration: nothing is downloaded. With a
pretrained one, `from_pretrained(..., quantization_config=...)` takes the place of `quantized`.

    pip install -r requirements-engines.txt
    torchrun --nproc_per_node=2 with_qlora.py --config ../configs/engines/fsdp_qlora_small.yaml
    python with_qlora.py --config ../configs/engines/fsdp_qlora.yaml --check 4    # 7B: bytes by part
"""

import argparse
from collections import Counter

import common.vision  # noqa: F401  first: peft imports torchvision

# isort: split
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from common.data import Text, global_batch
from common.errors import UserError, one_line_errors
from common.ranks import environment, process_group
from course.fsdp.with_accelerate import on_cpu


def quantized(layer: nn.Linear, how: dict) -> Linear4bit:
    """The layer with its weight in 4 bits; on the meta device, with a weight that is still to be quantized."""
    dtypes = {name: getattr(torch, how[name]) for name in ("quant_storage", "compute_dtype")}
    options = {"compress_statistics": how["compress_statistics"], "quant_type": how["quant_type"]}
    small = Linear4bit(layer.in_features, layer.out_features, bias=False, device="meta", **options, **dtypes)
    storage = {"quant_storage": dtypes["quant_storage"]}
    small.weight = Params4bit(layer.weight.detach(), requires_grad=False, module=small, **options, **storage)
    return small if layer.weight.is_meta else small.to(layer.weight.device)  # `to` quantizes


def make_model(settings: dict, device: str | torch.device = "cpu") -> nn.Module:
    """A Llama with the linear layers of its blocks in 4 bits, all else in bfloat16, and LoRA's adapters in float32."""
    torch.manual_seed(settings["training"]["seed"])
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**settings["model"])).to(torch.bfloat16)
        for block in model.model.layers:
            for module in list(block.modules()):
                for name, child in module.named_children():
                    if type(child) is nn.Linear:
                        setattr(module, name, quantized(child, settings["quantization"]))
        model.is_loaded_in_4bit = True  # what from_pretrained would have noted, and peft asks
        return get_peft_model(model, LoraConfig(**settings["lora"], task_type="CAUSAL_LM"))


def bytes_by_part(model: nn.Module, compress: bool = True, ranks: int = 1) -> dict[str, int]:
    """What a rank keeps between steps, in bytes: counted where tensors have data, and from the shapes of a model on the
    meta device; `ranks` share what fully_shard cuts.

    The scales of 4-bit blocks are an attribute of the layer and no parameter of it. So they are not cut, and each rank
    has those of the whole model: one float32 for 64 weights, or (Dettmers et al. 2023, section 3) one byte for 64
    weights, one float32 for 256 of those bytes, and one offset.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            count = parameter.to_local().numel() if isinstance(parameter, DTensor) else -(-parameter.numel() // ranks)
            if isinstance(module, Linear4bit):
                unpacked = parameter.is_meta
                found["base, 4 bits"] += count // 2 if unpacked else count * parameter.element_size()
                found["scales of the 4-bit blocks"] += scales(module, compress)
            elif not parameter.requires_grad:
                found["embedding, norms, head in bfloat16"] += count * parameter.element_size()
            else:
                found["adapters"] += count * parameter.element_size()
                found["their gradients"] += count * parameter.element_size()
                found["their AdamW state"] += 2 * count * parameter.element_size()
    return dict(found)


def scales(layer: Linear4bit, compress: bool) -> int:
    """Bytes of a layer's scales."""
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    if state is None:
        blocks = -(-layer.in_features * layer.out_features // 64)
        return blocks + 4 * -(-blocks // 256) + 4 if compress else 4 * blocks
    nested = [state.offset, state.state2.absmax] if state.nested else []
    return sum(tensor.numel() * tensor.element_size() for tensor in [state.absmax, *nested])


def read(path: str) -> dict:
    """The settings in a YAML file. Raises UserError."""
    try:
        settings = yaml.safe_load(open(path))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: {' '.join(str(error).split())}") from error
    lacking = {"model", "quantization", "lora", "fsdp", "training"} - {*(settings or {})}
    if lacking:
        raise UserError(f"--config {path}: there is no {', '.join(sorted(lacking))}; see configs/engines")
    return settings


def train(settings: dict, device: torch.device) -> tuple[list[float], dict[str, int], nn.Module]:
    """The loss of each step, this rank's bytes by part, and its model."""
    plugin = FullyShardedDataParallelPlugin(**settings["fsdp"])
    accelerator = on_cpu(Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin), plugin)
    model = make_model(settings, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=settings["training"]["lr"]))
    how, losses = settings["training"], []
    data = Text(how["context"])
    for step in range(how["steps"]):
        batch = global_batch(how["seed"], step, how["batch_size"], data.size)
        inputs, targets = data.batch(batch.chunk(accelerator.num_processes)[accelerator.process_index])
        logits = model(input_ids=inputs.to(device)).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().to(device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        accelerator.print(f"step {step + 1}/{how['steps']}  loss {losses[-1]:.4f}")
    return losses, bytes_by_part(model), model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", required=True, help="a file like configs/engines/fsdp_qlora.yaml")
    parser.add_argument("--check", type=int, metavar="RANKS", help="the bytes on each of RANKS, and train nothing")
    line = parser.parse_args()
    settings, ranks = read(line.config), environment()[1]
    if line.check:
        ranks, compress = line.check, settings["quantization"]["compress_statistics"]
        found = bytes_by_part(make_model(settings, "meta"), compress, ranks)
    else:
        with process_group() as here:
            _, found, _ = train(settings, here.device)
            if here.rank > 0:
                return
    print(f"bytes on rank 0 of {ranks}, between steps:")
    for part, size in found.items():
        print(f"  {part:40}{size:16,}")


if __name__ == "__main__":
    with one_line_errors():
        main()
