"""`python -m planner explain FILE`: what `emit` writes is read back as the layout that it was written for; files of
other tools as their documentation has them; and what is wrong in one line that names the field.
"""

import json
import re

import pytest
from helpers import refused
from other_tools import MEGATRON, NANOTRON, QWEN
from planner_cases import refusal, say, say_json

from planner import explain_file, models, published, read_config
from planner.estimate import estimate
from planner.hardware import cluster
from planner.layout import make_layout


def test_files_of_other_tools(tmp_path):
    """Sizes of models are those of their papers; readers of Megatron-LM are what is left of the GPUs."""
    (tmp_path / "run.sh").write_text(MEGATRON)
    found = say_json(f"explain {tmp_path / 'run.sh'} --gpu a100")
    assert found["gpus"] == 256 and found["mesh"]["shard"] == 2 and found["zero_stage"] == 1
    assert found["micro_batches"] == 768 and found["precision"] == "bf16-mixed" and found["recompute"] == "attention"
    assert any("--sequence-parallel" in risk for risk in found["risks"]), "which the file does not have"
    model = read_config.read(str(tmp_path / "run.sh")).model
    assert model.parameters == pytest.approx(175e9, rel=0.01)

    (tmp_path / "run.yaml").write_text(NANOTRON)
    said = say(f"explain {tmp_path / 'run.yaml'} --gpu h100")
    assert not [number for number in ("64", "h100-80gb", "256", "4,096") if number not in said], "GPUs and batch"
    assert re.search(r"tensor +4 .*\b0 1 2 3\b", said) and re.search(r"shard +8 .*\b0 4 8 12 16 20 24 28\b", said)
    assert re.search(r"rank 1\b.*\b12 layers.*head", said), "who holds what"
    assert any(run.source in said for run in published.runs()), "the nearest published runs"

    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert read_config.read(str(tmp_path / "config.json")).model.parameters == models.find("qwen2.5-7b").parameters
    for name in ("text_config", "attn_config", "ffn_config", "moe_config"):  # DBRX's have an empty model_type
        within = {"model_type": "", "num_key_value_heads": 1, "intermediate_size": 64, "tie_word_embeddings": True}
        (tmp_path / "nested.json").write_text(json.dumps({name: within, "tie_word_embeddings": False} | QWEN))
        both = (read_config.read(str(tmp_path / f"{file}.json")).model for file in ("nested", "config"))
        assert len({*both}) == 1, "what stands outside wins"
    found = say_json(f"explain {tmp_path / 'config.json'} --gpu rtx-4090 --gpus 2")
    assert found["fits"] == "no" and "memory" in found["risks"][0]


def test_the_nearest_published_runs_are_as_many_as_are_asked_for_and_of_different_layouts():
    model, nodes = models.find("llama-3-8b"), cluster("h100-80gb", 8)
    found = estimate(model, nodes, make_layout(model, nodes, {"shard": 8}, batch_size=16, zero_stage=3))
    for count in (1, 3, 12):
        runs = explain_file.alike(found, count)
        assert len({(run.source, run.model.name, run.layout.mesh) for run in runs}) == count == len(runs)
        assert runs == explain_file.alike(found, 12)[:count], "the nearest ones"
    assert runs[0].cluster.gpus == 8 and "8b" in runs[0].model.name.lower()


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.json", '{"train_batch_size": "many"}', "train_batch_size many"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "zero_optimization.stage 3 7"),
        ("a.json", '{"zero_optimization": 3}', "zero_optimization"),
        ("a.json", '{"hidden_size": 64, "num_attention_heads": 4}', "num_hidden_layers"),
        ("a.json", "{", "JSON"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 0.5", "tensor_parallel_degree 0.5"),
        ("a.yaml", "distributed_type: TPU", "distributed_type TPU"),
        ("a.yaml", "- 1", ""),
        ("a.yaml", "strategy: [tensor]", "strategy tensor"),
        ("a.yaml", "strategy: ddp\nprecision: fp8", "precision fp8 bf16"),
        ("a.sh", "echo hello", ""),
        ("a.sh", "--num-layers two", "num-layers two"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_text(text)
    with refused(f"{file}: ", *words.split()):
        read_config.read(str(file))


def test_what_a_file_does_not_say_is_asked_for(tmp_path):
    (tmp_path / "zero.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 3}}')
    for line, says in (("", "--model"), ("--model llama-7b", "--gpus"),
                       ("--model llama-7b --gpus 48", "--batch-size 64")):  # fmt: skip
        assert says in refusal(f"explain {tmp_path / 'zero.json'} --gpu h100 {line}")
