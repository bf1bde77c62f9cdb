"""`planner explain`: each setting of a configuration file, what it is where it is missing, and its other spellings: as
the tool's documentation has it. (Whole files: test_public_configs.py; those of `emit`: test_there_and_back.py.)
"""

import copy
import json

import pytest
import yaml

from planner import emit, explain_file, models, read_config
from planner.hardware import cluster

GPUS = 8
BASES = {
    "deepspeed.json": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}},
    "accelerate.yaml": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": GPUS,
                        "mixed_precision": "bf16", "fsdp_config": {}},
    "training.json": {"per_device_train_batch_size": 2},
    "titan.toml": {"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 2, "seq_len": 2048},
                   "parallelism": {}},
    "megatron.sh": {"num-layers": 8, "hidden-size": 512, "num-attention-heads": 8, "micro-batch-size": 2,
                    "global-batch-size": 64, "seq-length": 2048, "bf16": ""},
    "nanotron.yaml": {"model": {}, "optimizer": {}, "parallelism": {"dp": GPUS}, "tokens": {"micro_batch_size": 2}},
    "config.json": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                    "vocab_size": 99},
    "course.yaml": {"mesh": f"data={GPUS}", "batch-size": 64},
}  # fmt: skip
AXES = ("data", "shard", "context", "tensor", "pipeline", "expert")
OFFLOAD = {"offload": True}
VIRTUAL = {"schedule": "interleaved", "stages_per_rank": 2}
SETTINGS = [  # file, what is changed in it (None: it is missing), and what of the layout follows; "a b": either
    ("deepspeed.json", {}, {"zero_stage": 2, "shard": 8, "precision": "float32", "offload": False, "micro_batches": 4}),
    ("deepspeed.json", {"zero_optimization": None}, {"zero_stage": 0, "data": 8}),
    *[("deepspeed.json", {"zero_optimization.stage": stage}, {"zero_stage": stage}) for stage in (0, 1, 3)],
    ("deepspeed.json", {"zero_optimization.stage": "auto"}, {"zero_stage": 0}),
    *[("deepspeed.json", {"zero_optimization.offload_optimizer": {"device": device}}, {"offload": device != "none"})
      for device in ("none", "cpu", "nvme")],
    ("deepspeed.json", {"zero_optimization.overlap_comm": False}, {"overlap_gradients": False}),
    *[("deepspeed.json", {f"{name}.enabled": value}, {"precision": f"{name}-mixed" if value else "float32"})
      for name in ("bf16", "fp16") for value in (True, "auto", False)],
    ("deepspeed.json", {"train_batch_size": None, "gradient_accumulation_steps": 3}, {"batch_size": 48}),
    ("deepspeed.json", {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, {"batch_size": 16}),
    ("deepspeed.json", {"train_micro_batch_size_per_gpu": None}, {"micro_batch": 8}),
    ("deepspeed.json", {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4},
     {"micro_batch": 2}),
    ("deepspeed.json", {"tensor_parallel": {"autotp_size": 2}}, {"tensor": 2, "shard": 4}),
    ("accelerate.yaml", {}, {"zero_stage": 3, "shard": 8, "precision": "bf16-mixed", "offload": False, "kept": "none"}),
    *[("accelerate.yaml", {"fsdp_config.fsdp_sharding_strategy": name}, {"zero_stage": stage}) for name, stage in (
        ("FULL_SHARD", 3), (1, 3), ("SHARD_GRAD_OP", 2), (2, 2), ("NO_SHARD", 0), (3, 0), ("HYBRID_SHARD", 3), (4, 3),
        ("full_shard", 3), ("shard_grad_op", 2))],
    *[("accelerate.yaml", {"fsdp_config.fsdp_reshard_after_forward": again}, {"zero_stage": stage})
      for again, stage in ((True, 3), (False, 2))],
    ("accelerate.yaml", {"fsdp_config.fsdp_offload_params": True}, OFFLOAD),
    ("accelerate.yaml", {"fsdp_config.fsdp_activation_checkpointing": True}, {"kept": "full"}),
    *[("accelerate.yaml", {"mixed_precision": name}, {"precision": precision}) for name, precision in (
        (None, "float32"), ("no", "float32"), ("fp16", "fp16-mixed"))],
    *[("accelerate.yaml", {"distributed_type": name}, {"zero_stage": 0, "data": 8})
      for name in ("MULTI_GPU", "NO", None)],
    ("accelerate.yaml", {"distributed_type": "DEEPSPEED"}, {"zero_stage": 2, "offload": False}),
    *[("accelerate.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}},
       {"zero_stage": stage}) for stage in (0, 1, 3)],
    *[("accelerate.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": device}},
       {"offload": device != "none"}) for device in ("none", "cpu", "nvme")],
    *[("accelerate.yaml", {f"parallelism_config.parallelism_config_{name}_size": 2}, {axis: 2, "shard": 4})
      for name, axis in (("dp_replicate", "data"), ("cp", "context"), ("tp", "tensor"))],
    ("training.json", {}, {"zero_stage": 0, "data": 8, "batch_size": 16, "precision": "float32", "kept": "none"}),
    ("training.json", {"gradient_accumulation_steps": 4}, {"batch_size": 64, "micro_batches": 4}),
    ("training.json", {"bf16": True}, {"precision": "bf16-mixed"}),
    ("training.json", {"fp16": True, "bf16": False}, {"precision": "fp16-mixed"}),
    ("training.json", {"gradient_checkpointing": True}, {"kept": "full"}),
    ("training.json", {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, {"kept": "full", "shard": 8}),
    *[("training.json", {"fsdp": words}, {"zero_stage": stage, "offload": "offload" in str(words)})
      for words, stage in ((True, 3), (False, 0), ("", 0), ("full_shard auto_wrap", 3), ("full_shard offload", 3),
                           ("shard_grad_op", 2), (["shard_grad_op", "offload"], 2), ("no_shard", 0))],
    ("training.json", {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, {"zero_stage": 2}),
    ("titan.toml", {}, {"zero_stage": 3, "shard": 8, "batch_size": 16, "micro_batch": 2, "kept": "every-second",
                        "precision": "bf16-mixed", "fused": False, "fused_loss": False, "async_tensor": False}),
    *[("titan.toml", {"training.global_batch_size": size}, {"batch_size": batch})
      for size, batch in ((64, 64), (-1, 16))],
    ("titan.toml", {"training.enable_cpu_offload": True}, OFFLOAD),
    ("titan.toml", {"training.mixed_precision_param": "float32"}, {"precision": "float32"}),
    ("titan.toml", {"training.local_batch_size": None, "training.batch_size": 4}, {"micro_batch": 4}),  # its old name
    ("titan.toml", {"model.converters": ["float8"]}, {"precision": "fp8-mixed"}),
    *[("titan.toml", {"activation_checkpoint": {"mode": mode} | more}, {"kept": kept}) for mode, more, kept in (
        ("none", {}, "none"), ("full", {}, "full"), ("selective", {}, "every-second"), ("selective", {
            "selective_ac_option": "op"}, "operators"), ("selective", {"selective_ac_option": "2"}, "every-second"))],
    ("titan.toml", {"compile": {"enable": True}}, {"fused": True, "fused_loss": True}),
    ("titan.toml", {"compile": {"enable": True, "components": ["model"]}}, {"fused": True, "fused_loss": False}),
    ("titan.toml", {"compile": {"enable": False, "components": ["model"]}}, {"fused": False}),
    *[("titan.toml", {f"parallelism.{name}_degree": 2}, {axis: 2, "shard": 4}) for name, axis in (
        ("tensor_parallel", "tensor"), ("context_parallel", "context"), ("data_parallel_replicate", "data"))],
    ("titan.toml", {"parallelism.data_parallel_replicate_degree": 8, "parallelism.data_parallel_shard_degree": 1},
     {"zero_stage": 0, "data": 8}),
    *[("titan.toml", {"parallelism.fsdp_reshard_after_forward": when}, {"zero_stage": stage})
      for when, stage in (("always", 3), ("never", 2), ("default", 3))],
    ("titan.toml", {"parallelism.pipeline_parallel_degree": 2}, {
        "pipeline": 2, "schedule": "1f1b", "micro_batch": 1, "micro_batches": 2, "stages_per_rank": 1, "ends": True}),
    ("titan.toml", {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": 8,
                                    **{f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}}},
     {"stages_per_rank": 2, "ends": False}),
    *[("titan.toml", {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": name}, {
        "schedule": "interleaved", "stages_per_rank": 2}) for name in ("Interleaved1F1B", "interleaved1f1b")],
    # embedding and output count as a layer each, beside 32
    *[("titan.toml", {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_layers_per_stage":
       each}, {"stages_per_rank": stages}) for each, stages in ((17, 1), (9, 2), (6, 3), (5, 3), (1, 17))],
    ("titan.toml", {"parallelism.enable_async_tensor_parallel": True}, {"async_tensor": True}),
    ("megatron.sh", {}, {"zero_stage": 0, "data": 8, "precision": "bf16-mixed", "kept": "none", "dropout": True,
                         "overlap_gradients": False, "sequence_parallel": False, "async_tensor": False}),
    *[("megatron.sh", {name: ""}, {"zero_stage": stage, "shard": 8}) for name, stage in (
        ("use-distributed-optimizer", 1), ("use-torch-fsdp2", 3))],
    *[("megatron.sh", {"use-megatron-fsdp": "", "data-parallel-sharding-strategy": name}, {"zero_stage": stage})
      for stage, name in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params"))],
    *[("megatron.sh", {name: ""}, {field: True}) for name, field in (
        ("sequence-parallel", "sequence_parallel"), ("overlap-grad-reduce", "overlap_gradients"), ("tp-comm-overlap",
        "async_tensor"), ("use-flash-attn", "flash"))],
    *[("megatron.sh", {"attention-backend": name}, {"flash": name == "flash"})
      for name in ("flash", "unfused", "local")],
    *[("megatron.sh", {"hidden-dropout": rate}, {"dropout": rate == 0.1}) for rate in (0.1, 0, "0.0")],
    *[("megatron.sh", again, {"kept": kept}) for again, kept in (
        ({"recompute-activations": ""}, "attention"), ({"recompute-granularity": "selective"}, "attention"),
        ({"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}, "full"))],
    ("megatron.sh", {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 2},
     {"recompute_share": 2 / 8}),
    *[("megatron.sh", more, {"precision": name}) for more, name in (
        ({"bf16": None}, "float32"), ({"bf16": None, "fp16": ""}, "fp16-mixed"), ({"grad-reduce-in-bf16": ""},
        "bf16-mixed-16"), ({"fp8-format": "hybrid"}, "fp8-mixed"), ({"fp8-hybrid": ""}, "fp8-mixed"))],
    *[("megatron.sh", {f"{name}-parallel-size": 2}, {axis: 2, "data": 4}) for name, axis in (
        ("tensor-model", "tensor"), ("pipeline-model", "pipeline"), ("context", "context"))],
    ("megatron.sh", {"tensor_model_parallel_size": 2}, {"tensor": 2}),
    ("megatron.sh", {"use-distributed-optimizer": "", "num-distributed-optimizer-instances": 2},
     {"data": 2, "shard": 4}),
    ("megatron.sh", {"pipeline-model-parallel-size": 2, "num-layers-per-virtual-pipeline-stage": 2}, VIRTUAL),
    ("megatron.sh", {"pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2}, VIRTUAL),
    *[("megatron.sh", {"num-experts": 4} | more, {"expert_width": width, "top_k": k, "shared_experts": shared})
      for more, width, k, shared in (({}, 2048, 2, 0), ({"ffn-hidden-size": 96, "moe-router-topk": 1}, 96, 1, 0), (
        {"ffn-hidden-size": 96, "moe-ffn-hidden-size": 32, "moe-shared-expert-intermediate-size": 64}, 32, 2, 2))],
    *[("megatron.sh", more, {"tied": tied, "bias": bias, "mlp": mlp, "positions": positions, "kv_heads": kv})
      for more, tied, bias, mlp, positions, kv in (
        ({"max-position-embeddings": 99, "num-query-groups": 2}, True, "all", "gelu", 99, None), (
        {"untie-embeddings-and-output-weights": "", "disable-bias-linear": "", "swiglu": "", "position-embedding-type":
         "rope", "group-query-attention": "", "num-query-groups": 2}, False, "none", "swiglu", 0, 2))],
    ("nanotron.yaml", {}, {"zero_stage": 0, "data": 8, "precision": "bf16-mixed", "kept": "none", "batch_size": 16,
                           "sequence_parallel": False}),
    ("nanotron.yaml", {"optimizer.zero_stage": 1}, {"zero_stage": 1, "shard": 8}),
    ("nanotron.yaml", {"tokens.batch_accumulation_per_replica": 3}, {"batch_size": 48, "micro_batches": 3}),
    ("nanotron.yaml", {"parallelism.recompute_layer": True}, {"kept": "full"}),
    *[("nanotron.yaml", {"parallelism.tp_mode": name}, {"sequence_parallel": name == "REDUCE_SCATTER"})
      for name in ("REDUCE_SCATTER", "ALL_REDUCE")],
    *[("nanotron.yaml", {"model.dtype": name}, {"precision": precision}) for name, precision in (
        ("float32", "float32"), ("bfloat16", "bf16-mixed"), ("float16", "fp16-mixed"))],
    ("nanotron.yaml", {"optimizer.accumulate_grad_in_fp32": False}, {"precision": "bf16"}),
    *[("nanotron.yaml", {"parallelism.dp": 4, "parallelism.pp": 2} | more, {"pipeline": 2, "data": 4, "schedule": name})
      for more, name in (({}, "1f1b"), ({"parallelism.pp_engine": "afab"}, "gpipe"))],
    ("nanotron.yaml", {"parallelism.dp": 4, "parallelism.tp": 2}, {"tensor": 2, "data": 4}),
    ("nanotron.yaml", {"parallelism.dp": 4, "parallelism.context_parallel_size": 2}, {"context": 2, "data": 4}),
    *[("config.json", {"model_type": kind} | more, {"tied": tied, "mlp": mlp, "bias": bias, "parallel": parallel})
      for kind, more, tied, mlp, bias, parallel in (
          ("llama", {}, False, "swiglu", "none", False), ("llama", {"tie_word_embeddings": True}, True, "swiglu",
          "none", False), ("gpt2", {}, True, "gelu", "all", False), ("gpt2", {"tie_word_embeddings": False}, False,
          "gelu", "all", False), ("gemma2", {}, True, "swiglu", "none", False),
          ("gpt_neox", {}, False, "gelu", "all", True), ("gpt_neox", {"use_parallel_residual": False}, False, "gelu",
          "all", False),
          ("falcon", {"parallel_attn": True}, True, "gelu", "all", True))],
    *[("config.json", more, {"kv_heads": kv, "hidden": hidden, "query": query}) for more, kv, hidden, query in (
        ({}, None, 256, 64), ({"num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 32}, 2, 80, 128),
        ({"kv_n_heads": 1, "ffn_hidden_size": 96}, 1, 96, 64), ({"n_inner": None}, None, 256, 64))],
    *[("config.json", {"model_type": kind, "max_position_embeddings": 512}, {"positions": positions, "context": 512})
      for kind, positions in (("llama", 0), ("opt", 512), ("gpt_neox", 0))],
    *[("config.json", {name: 4, "intermediate_size": 80} | more, {"experts": 4, "top_k": k, "expert_width": width,
       "shared_experts": shared, "dense_layers": dense}) for name, more, k, width, shared, dense in (
        ("num_local_experts", {"num_experts_per_tok": 2}, 2, 80, 0, 0), ("num_experts", {"moe_intermediate_size": 16,
        "moe_top_k": 3, "enable_shared_expert": True}, 3, 16, 1, 0), ("n_routed_experts", {"n_shared_experts": 2,
        "first_k_dense_replace": 1}, 1, 80, 2, 1))],
    ("course.yaml", {}, {"zero_stage": 0, "data": 8, "precision": "float32", "kept": "none", "micro_batch": 8}),
    ("course.yaml", {"accumulation-steps": 2}, {"micro_batch": 4}),
    *[("course.yaml", {"mesh": None, "batch-size": None, "strategy": name}, {  # as distributed_training.py has them
        "batch_size": 32, "sequence": 128, "zero_stage": stage, axis: 8}) for name, stage, axis in (
        ("ddp", 0, "data"), ("fsdp", 3, "shard"), ("zero2", 2, "shard"), ("tensor", 0, "tensor"))],
    *[("course.yaml", {"mesh": "pipeline=8", "schedule": name} | more, {"stages_per_rank": stages, "schedule": name})
      for name, more, stages in (("1f1b", {}, 1), ("zbv", {}, 2), ("interleaved", {"stages-per-rank": 4}, 4))],
    ("course.yaml", {"mesh": None, "strategy": "pipeline+ddp"}, {"data": 2, "pipeline": 4, "micro_batches": 4}),
    ("course.yaml", {"mesh": "pipeline=2,data=4", "microbatches": 4, "schedule": "gpipe"}, {
        "micro_batch": 4, "micro_batches": 4, "schedule": "gpipe"}),
    *[("course.yaml", {"mesh": "shard=8", "strategy": name}, {"zero_stage": stage})
      for name, stage in (("zero1", 1), ("zero2", 2), ("fsdp", 3), (None, 3))],
    ("course.yaml", {"precision": "bf16", "offload": True, "recompute": "full"}, OFFLOAD | {
        "precision": "bf16-mixed", "kept": "full"}),
]  # fmt: skip


def written(file, changes: dict) -> read_config.Config:
    """The base of a file's name, with what is changed, as it is read."""
    table = copy.deepcopy(BASES[file.name])
    for name, value in changes.items():
        *outer, last = name.split(".")
        inside = table
        for one in outer:
            inside = inside.setdefault(one, {})
        inside[last] = value
        if value is None:
            del inside[last]
    write = {".json": json.dumps, ".yaml": yaml.safe_dump, ".toml": emit.in_toml, ".sh": lambda words: " ".join(
        f"--{name} {value}" for name, value in words.items())}[file.suffix]  # fmt: skip
    file.write_text(write(table))
    return read_config.read(str(file))


@pytest.mark.parametrize("name", BASES)
def test_each_setting_is_read_as_it_is_meant(name, tmp_path):
    model, nodes = models.find("llama-3-8b"), cluster("h100-80gb", GPUS)
    for file, changes, expected in SETTINGS:
        if file != name:
            continue
        config = written(tmp_path / file, changes)
        given = {} if "batch_size" in config.layout or config.local else {"batch_size": 16}
        shape = config.model if name in ("megatron.sh", "config.json") else model
        layout = explain_file.layout_of(config, shape, nodes, given)
        of_layout = {} if name == "config.json" else vars(layout) | {axis: layout.size(axis) for axis in AXES}
        of_layout |= {what: getattr(layout, what) for what in ("kept", "micro_batches")} if of_layout else {}
        found = {what: of_layout[what] if what in of_layout else getattr(shape, what) for what in expected}
        assert found == expected, f"{name} with {changes}"
        assert ("auto" in changes.values()) == ("'auto'" in str(config.notes)), f"{name} with {changes}"
