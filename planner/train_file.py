"""A short complete training file for the engines whose configuration `emit` writes: `train.py`.

It makes the model's shape by Transformers, reads a text byte by byte (by default the standard library's own source,
which every Python has), and does what the engine's configuration cannot say.
"""

from planner.estimate import Estimate
from planner.models import Model

HEAD = '''"""{what}

    {command}
"""

import argparse
import sysconfig
from pathlib import Path

{imports}

MODEL = {model}
SEQUENCE, MICRO_BATCH, ACCUMULATE = {sequence}, {micro_batch}, {accumulate}


class Text(torch.utils.data.Dataset):
    """Sequences of bytes. Put your own tokens here: input_ids and labels, which the model shifts by one itself."""

    def __init__(self, path):
        files = sorted(Path(path).glob("*.py")) if Path(path).is_dir() else [Path(path)]
        text = b"".join(file.read_bytes() for file in files)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % MODEL.vocab_size

    def __len__(self):
        return len(self.tokens) // SEQUENCE

    def __getitem__(self, place):
        own = self.tokens[place * SEQUENCE : (place + 1) * SEQUENCE]
        return {{"input_ids": own, "labels": own}}


parser = argparse.ArgumentParser()
parser.add_argument("--data", default=sysconfig.get_path("stdlib"), help="a file, or a folder of Python files")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--learning-rate", type=float, default=3e-4)
'''

ACCELERATE = """args = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE{cpu})
model = AutoModelForCausalLM.from_config(MODEL)
{recompute}optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loader = torch.utils.data.DataLoader(Text(args.data), MICRO_BATCH, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = 0
while step < args.steps:
    for batch in loader:
        with accelerator.accumulate(model){context}:
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.print(f"step {{step}}: loss {{loss.item():.3f}}")
        if step == args.steps:
            break
accelerator.save_state("out")
accelerator.end_training()
"""

DEEPSPEED = """parser.add_argument("--local_rank", type=int)  # which `deepspeed` adds
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
model = AutoModelForCausalLM.from_config(MODEL)
{recompute}optimizer = {optimizer}(model.parameters(), lr=args.learning_rate)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
sampler = torch.utils.data.DistributedSampler(
    data := Text(args.data), groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()
)
loader = torch.utils.data.DataLoader(data, MICRO_BATCH, sampler=sampler, drop_last=True)

while engine.global_steps < args.steps:
    sampler.set_epoch(sampler.epoch + 1)
    for batch in loader:
        before = engine.global_steps
        loss = engine(**{{name: value.to(engine.device) for name, value in batch.items()}}).loss
        engine.backward(loss)
        engine.step()  # does something after ACCUMULATE micro-batches
        if engine.global_steps > before and engine.global_rank == 0:
            print(f"step {{engine.global_steps}}: loss {{loss.item():.3f}}", flush=True)
        if engine.global_steps == args.steps:
            break
engine.save_checkpoint("out")
engine.destroy()
torch.distributed.destroy_process_group()
"""

TRAINER = """args = parser.parse_args()
(training,) = HfArgumentParser(TrainingArguments).parse_json_file("training.json")
training.max_steps, training.learning_rate = args.steps, args.learning_rate
model = AutoModelForCausalLM.from_config(MODEL)
Trainer(model, training, train_dataset=Text(args.data)).train()
"""


def shape(model: Model, sequence: int) -> tuple[str, str]:
    """(Transformers' class of configuration, its call): GPT-2 for two matrices in the MLP, Llama for three, Mixtral for
    a mixture, which here has no shared experts and no dense layers."""
    words = {"vocab_size": max(model.vocabulary, 256)}
    if model.mlp == "gelu" and not model.experts:
        words |= {"n_layer": model.layers, "n_embd": model.width, "n_head": model.heads, "n_inner": model.hidden,
                  "n_positions": max(sequence, model.positions)}  # fmt: skip
        return "GPT2Config", call("GPT2Config", words | {"tie_word_embeddings": model.tied})
    words |= {
        "num_hidden_layers": model.layers, "hidden_size": model.width, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads, "intermediate_size": model.hidden,
        "head_dim": model.query // model.heads, "max_position_embeddings": sequence,
        "tie_word_embeddings": model.tied,
    }  # fmt: skip
    name = "LlamaConfig"
    if model.experts:
        name, words["intermediate_size"] = "MixtralConfig", model.expert_width
        words |= {"num_local_experts": model.experts, "num_experts_per_tok": model.top_k}
    return name, call(name, words)


def call(name: str, words: dict) -> str:
    inner = "".join(f"    {key}={value},\n" for key, value in (words | {"use_cache": False}).items())
    return f"{name}(\n{inner})"


def differences(model: Model) -> list[str]:
    """In what a model is unlike the one that the file makes of its shape."""
    unlike = {
        "attention of its own kind": model.attention is not None,
        f"{model.dense_layers} layers without a mixture": bool(model.experts and model.dense_layers),
        f"{model.shared_experts} shared experts": bool(model.shared_experts),
        "no learned positions": model.mlp == "gelu" and not model.positions,
    }
    return [what for what, is_so in unlike.items() if is_so]


def written(found: Estimate, tool: str, command: str) -> str:
    """The file for one of accelerate, deepspeed and hf-trainer."""
    model, layout = found.model, found.layout
    name, config = shape(model, layout.sequence)
    imports = {
        "accelerate": "import torch\nfrom accelerate import Accelerator\n",
        "deepspeed": "import deepspeed\nimport torch\nfrom deepspeed.utils import groups\n",
        "hf-trainer": "import torch\n",
    }[tool]
    more = ["HfArgumentParser", "Trainer", "TrainingArguments"] if tool == "hf-trainer" else []
    imports += f"from transformers import {', '.join(sorted(['AutoModelForCausalLM', name, *more]))}"
    optimizer = "torch.optim.AdamW"
    if layout.offload and tool == "deepspeed":
        imports = imports.replace("import torch\n", "import torch\nfrom deepspeed.ops.adam import DeepSpeedCPUAdam\n")
        optimizer = "DeepSpeedCPUAdam"
    inside = layout.recompute != "none" and not (tool == "accelerate" and layout.zero_stage)  # else FSDP recomputes
    body = {"accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "hf-trainer": TRAINER}[tool].format(
        recompute="model.gradient_checkpointing_enable()\n" if inside else "",
        optimizer=optimizer,
        cpu=", cpu=True" if found.cluster.gpu.processor else "",
        context=", accelerator.maybe_context_parallel(\n                buffers=list(batch.values()), "
        "buffer_seq_dims=[1] * len(batch), no_restore_buffers=set(batch.values()))" if layout.context > 1 else "",
    )  # fmt: skip
    what = (
        f"Trains a model of the shape of {model.name} ({model.parameters / 1e9:,.2f} billion parameters) from scratch."
    )
    sizes = {"sequence": layout.sequence, "micro_batch": layout.micro_batch, "accumulate": layout.micro_batches}
    return HEAD.format(what=what, command=command, imports=imports, model=config, **sizes) + body
