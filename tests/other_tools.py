"""Files of other tools, as their documentation has them."""

MEGATRON = """#!/bin/bash
GPUS=8   # of a node
ARGS=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 1 --global-batch-size 1536 --bf16  # and not --fp16
    --tensor-model-parallel-size 8 \\
    --pipeline-model-parallel-size 16 --use-distributed-optimizer --recompute-granularity selective
)
torchrun --nproc_per_node $GPUS --nnodes 32 pretrain_gpt.py ${ARGS[@]}
"""
NANOTRON = """
model: {dtype: bfloat16, model_config: {hidden_size: 2048, num_hidden_layers: 24, num_attention_heads: 16,
        num_key_value_heads: 4, intermediate_size: 8192, vocab_size: 49152, tie_word_embeddings: true}}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
parallelism: {dp: 8, pp: 2, tp: 4, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 16, sequence_length: 4096}
"""
QWEN = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
