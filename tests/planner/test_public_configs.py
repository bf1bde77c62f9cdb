"""42 public configurations of six engines: `explain` reads each as what its authors wrote.

public_configs.json has of each file the settings that say how it trains (with source, commit and licence), what is
given with it on the command line, and what it means, written down by hand.
"""

import json
from pathlib import Path

import pytest
import yaml
from helpers import refused
from planner_cases import say_json

from common.errors import UserError
from planner import emit, explain_file, models, read_config
from planner.hardware import cluster

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


def test_a_file_that_names_another_one_needs_it(tmp_path):
    one = next(one for one in PUBLIC if "deepspeed_config_file" in json.dumps(one["values"]))
    file = written(one, tmp_path)
    said = say_json(f"explain {file} --gpu h100 --model gpt2 --batch-size 16")
    assert said["zero_stage"] == 1, "the stage is that of the file beside it"
    beside = tmp_path / "deepspeed_config_templates/zero_stage1_config.json"
    beside.write_text(json.dumps({"x": 10**400}))
    with refused(file.name, "x", "too large"):
        read_config.read(str(file))
    beside.unlink()
    with pytest.raises(UserError, match="deepspeed_config.deepspeed_config_file: .*zero_stage1_config.json"):
        read_config.read(str(file))
