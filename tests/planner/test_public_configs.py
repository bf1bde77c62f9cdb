"""42 public configurations of six engines: `explain` reads each as what its authors wrote, and `emit` leads back.

public_configs.json has of each file the settings that say how it trains (with source, commit and licence), what is
given with it on the command line, and what it means, written down by hand.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import refused

from common.errors import UserError
from planner import emit, explain_file, models, read_config, stages
from planner.__main__ import main
from planner.estimate import estimate
from planner.hardware import cluster
from planner.layout import make_layout

PUBLIC = json.loads(Path(__file__).with_name("public_configs.json").read_text())
NAMES = ["-".join([one["engine"], *Path(one["source"].split(":")[1]).parts[-2:]]) for one in PUBLIC]


def written(one: dict, folder: Path) -> Path:
    """The settings as a file of the engine's kind; with the DeepSpeed JSON that one of Accelerate's names."""
    kind, values = Path(one["source"].split(":")[1]).suffix, one["values"]
    if kind == ".sh":
        text = "\n".join(f"    --{name} {value}" for name, value in values.items())
    elif one["engine"] == "megatron":
        text = yaml.safe_dump({"MODEL_ARGS": {f"--{name}": value for name, value in values.items()}})
    else:
        text = {".json": json.dumps, ".toml": emit.in_toml}.get(kind, yaml.safe_dump)(values)
    file = folder / "inner" / f"config{kind}"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    if beside := values.get("deepspeed_config", {}).get("deepspeed_config_file"):
        other = file.parent / beside
        other.parent.mkdir(exist_ok=True)
        other.write_text(json.dumps(next(o["values"] for o in PUBLIC if o["source"].endswith(other.name))))
    return file


def meant(one: dict, file: Path):
    """(model, cluster, layout) of a file."""
    given = dict(one["given"])
    config = read_config.read(str(file))
    model = models.find(given.pop("model")) if "model" in given else config.model
    nodes = cluster("h100-80gb", given.pop("gpus", config.gpus), 8)
    return model, nodes, explain_file.layout_of(config, model, nodes, given)


@pytest.mark.parametrize("one", PUBLIC, ids=NAMES)
def test_a_public_file_is_read_as_it_is_meant(one, tmp_path):
    model, _, layout = meant(one, written(one, tmp_path))
    says = dict(one["says"])
    assert {axis: size for axis, size in layout.mesh if size > 1} == says.pop("mesh"), "the mesh"
    assert model.parameters == pytest.approx(says.pop("parameters", model.parameters), rel=5e-4), "parameters"
    assert {name: getattr(layout, name) for name in says} == says


BACK = {"torchtitan": "torchtitan.toml", "deepspeed": "deepspeed.json", "accelerate": "accelerate.yaml",
        "megatron": "megatron.sh", "nanotron": "nanotron.yaml"}  # fmt: skip
# What of a layout both files say, and explain reads.
SAME = ("mesh", "zero_stage", "micro_batch", "micro_batches", "schedule", "stages_per_rank", "sequence", "kept",
        "recompute_share", "precision", "offload", "ends")  # fmt: skip


def differences(layout, again) -> list[str]:
    return [f"{what}: {getattr(layout, what)}, then {getattr(again, what)}" for what in SAME
            if getattr(again, what) != getattr(layout, what)]  # fmt: skip


def test_what_was_read_is_emitted_for_the_same_engine(tmp_path):
    """And read again as the same layout, or refused where the tool lacks something."""
    refused = []
    for one in (one for one in PUBLIC if one["engine"] in BACK):
        model, nodes, layout = meant(one, written(one, tmp_path))
        try:
            files = emit.emit(estimate(model, nodes, layout, max_memory_gib=9999), one["engine"]).files
        except UserError:
            refused.append(Path(one["source"]).name)
            continue
        file = tmp_path / BACK[one["engine"]]
        file.write_text(files[file.name])
        config, given = read_config.read(str(file)), {}
        if one["engine"] == "accelerate":  # its script has these
            given = {name: getattr(layout, name) for name in ("batch_size", "micro_batch")}
        again = explain_file.layout_of(config, model, nodes, given)
        assert not differences(layout, again), one["source"]
        if one["engine"] == "torchtitan":
            assert (again.fused, again.fused_loss) == (layout.fused, layout.fused_loss), one["source"]
        if config.model:
            assert config.model.parameters == pytest.approx(model.parameters, rel=0.01), one["source"]
    # A model that torchtitan's flavours don't have; ZeRO-1, 8 bits and tensor parallelism by Accelerate's train.py.
    assert refused == ["llama4_17bx16e.toml", "deepspeed.yaml", "fp8.yaml", "tp_hsdp.yaml"]


def test_embedding_and_head_are_counted_as_megatron_counts_them(tmp_path):
    """Ten layers on six ranks, one to four layers each: 1 + 2 x 4 + 1. On twelve ranks the ends are alone. Megatron-LM
    says for both that they count; on five ranks it needs not, and on four it deals layers out so, too."""
    model = replace(models.find("llama-7b"), layers=10)
    flag = "--account-for-embedding-in-pipeline-split"
    for pipeline, ends, counted in ((6, True, True), (12, False, True), (5, False, False), (4, False, True)):
        nodes = cluster("h100-80gb", pipeline, pipeline)
        layout = make_layout(model, nodes, {"pipeline": pipeline}, batch_size=16, ends=ends, framework="megatron")
        found = estimate(model, nodes, layout, max_memory_gib=999)
        text = emit.emit(found, "megatron").files["megatron.sh"]
        assert (flag in text) is counted, pipeline
        (tmp_path / "megatron.sh").write_text(text)
        again = explain_file.layout_of(read_config.read(str(tmp_path / "megatron.sh")), model, nodes, {})
        assert stages.shares(model, again) == stages.shares(model, layout), pipeline
        with refused("--format nanotron", "embedding and head") if layout.ends else nullcontext():
            emit.emit(found, "nanotron")


def test_a_file_that_names_another_one_needs_it(tmp_path, capsys):
    one = next(one for one in PUBLIC if "deepspeed_config_file" in json.dumps(one["values"]))
    file = written(one, tmp_path)
    main(["explain", str(file), "--gpu", "h100", "--model", "gpt2", "--batch-size", "16", "--json"])
    assert json.loads(capsys.readouterr().out)["zero_stage"] == 1, "the stage is that of the file beside it"
    beside = tmp_path / "deepspeed_config_templates/zero_stage1_config.json"
    beside.write_text(json.dumps({"x": 10**400}))
    with refused(file.name, "x", "too large"):
        read_config.read(str(file))
    beside.unlink()
    with pytest.raises(UserError, match="deepspeed_config.deepspeed_config_file: .*zero_stage1_config.json"):
        read_config.read(str(file))
