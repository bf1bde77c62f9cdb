"""The pages that are live: what runs in a browser runs without any package, and says what the command line says.

That both give the same numbers in a real browser is for tools/site_live.py."""

import csv
import json
import re
import zipfile

import pytest

from common import ROOT
from common.errors import UserError
from planner import page, scoreboard
from planner.__main__ import main
from planner.compare import PRICES
from tools import site_live, site_runtime
from tools.site_cells import alone

SMALL = {"model": "gpt2", "gpu": "a100-80gb", "gpus": "2", "batch_size": "8", "sequence": "512"}


def test_the_page_says_what_the_command_says(capsys):
    found = json.loads(alone(f"from planner import page; print(page.reply({json.dumps(SMALL)!r}))"))
    words = found["answer"]["command"].split()
    assert words[:4] == ["python", "-m", "planner", "plan"] and found["answer"]["command"] in found["html"]
    main([*words[3:], "--json"])
    told = json.loads(capsys.readouterr().out)
    shown = [{name: one[name] for name in told[0]} for one in found["answer"]["layouts"]]
    assert not [*site_live.unlike(shown, told)] and len(told) > 1
    assert all(f"{one['memory_gib']:.1f} GiB" in found["html"] for one in told)


def test_every_module_of_a_live_page_travels(tmp_path):
    site_runtime.zipped(tmp_path / "course.zip")
    names = set(zipfile.ZipFile(tmp_path / "course.zip").namelist())
    assert {"planner/page.py", "05_pipeline/simulator.py", "course/__init__.py", "06_fsdp/sharding_pictures.py"} < names
    assert {"page_sliders.py", "matplotlib/pyplot.py", "planner/models.csv"} < names
    assert not [name for name in names if ".venv" in name]


def test_a_dropped_file_stays_in_the_address():
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
              "vocab_size": 5000, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    found = page.answer(SMALL | {"config": json.dumps(config)})
    assert "model" not in found["state"]
    assert page.answer(found["state"]) == found
    shape = json.loads(found["state"]["shape"])
    for name in shape:
        for other in ("4", -1, 2**40, 2.5, None):
            if other != "4" or type(shape[name]) is not str:
                with pytest.raises(UserError, match="shape: "):
                    page.model_of({"shape": json.dumps(shape | {name: other})})
    assert page.answer(SMALL)["layouts"][0]["parameters"] != found["layouts"][0]["parameters"]


def test_what_is_shown_with_care_is_numbered_on():
    found = page.answer(dict(model="llama-2-7b", gpu="h100-80gb", gpus="8", batch_size="64", sequence="4096"))
    trusted = [one["trusted"] for one in found["layouts"]].index(False)
    assert re.findall(r'<ol class="layouts"(.*?)>', page.html(found)) == ["", f' start="{trusted + 1}"'] and trusted > 0


def test_the_form_offers_the_gpus_of_the_table_and_no_processor():
    with open(ROOT / "common" / "gpus.csv", newline="") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    (offered,) = re.findall(r'<select name="gpu">(.*?)</select>', page.form())
    assert {*re.findall(r">([^<]+)</option>", offered)} == names - {"cpu"}


def test_a_file_that_needs_more_gpus_stays_while_one_asks_on():
    config = {"model_type": "llama", "hidden_size": 16384, "num_attention_heads": 128, "num_hidden_layers": 126,
              "vocab_size": 128256}  # fmt: skip
    refused = json.loads(page.reply(json.dumps(SMALL | {"config": json.dumps(config)})))
    assert "does not fit" in refused["error"] and "html" not in refused
    assert page.model_of(refused["state"]).layers == 126


def test_a_model_comes_with_the_length_of_its_sequences():
    def tokens(**asked):
        return page.answer(SMALL | {"gpus": "8", "gpu": "h100-80gb", "batch_size": "64"} | asked)["heading"]

    assert "4,096" in tokens(model="llama-2-7b", sequence="") and "8,192" not in tokens(model="llama-2-7b", sequence="")
    longer = tokens(model="llama-2-7b", sequence="8192")
    assert "8,192" in longer and "4,096" in longer, "what is asked, and what the model was trained with"


def test_published_runs_are_predicted_as_on_the_scoreboard():
    asked = SMALL | {"model": "llama-3-8b", "gpu": "h100-80gb", "gpus": "8", "batch_size": "16", "sequence": "8192"}
    shown = [run for run in page.answer(asked)["alike"]["runs"] if not run["source"].startswith("Megatron-Bridge")]
    assert shown, "of sources with few runs"
    for run in shown:
        assert run["predicted"] in [line.seconds for line in scoreboard.lines(True, source=run["source"])]


def test_money_follows_the_prices():
    dear, cheap = (page.answer(SMALL | {"price": price, "electricity": "0.5"})["layouts"][0] for price in ("3", "1"))
    assert dear["dollars"] == pytest.approx(3 * cheap["dollars"])
    for typed, price in (({}, PRICES["h100-80gb"][0]), ({"price": "7"}, 7)):  # which wins
        assert page.answer(SMALL | {"gpu": "h100-80gb"} | typed)["layouts"][0]["price"] == price
    hours = 1e9 / cheap["tokens_per_second_per_gpu"] / 3600
    assert cheap["dollars"] == pytest.approx(hours)
    assert cheap["dollars_of_energy"] == pytest.approx(0.5 * 0.4 * hours)  # an A100 SXM has 400 W


@pytest.mark.parametrize(
    "asked, named",
    [
        ({"gpus": "3.5"}, "gpus: .*'3.5'"),
        ({"gpus": "99999999"}, "gpus: .*4,096"),
        ({"price": "a lot"}, "price: .*'a lot'"),
        ({"price": "-1"}, "price: .*'-1'"),
        ({"config": "{", "file": "mine.json"}, "mine.json"),
        ({"config": "[]"}, "config.json"),
        ({"config": '{"hidden_size": "wide"}'}, "config.json: hidden_size"),
        (
            {"config": '{"vocab_size": 9}', "file": "a.json"},
            "a.json: hidden_size, num_attention_heads, num_hidden_layers",
        ),
        ({"shape": '{"layers": "4"}'}, "shape: "),
        ({"shape": '{"layers": 4, "other": 1}'}, "shape: "),
        ({"gpu": "h1000"}, "h1000"),
    ],
)
def test_what_cannot_be_asked_is_named(asked, named):
    with pytest.raises(UserError, match=named):
        page.answer(SMALL | asked)


def test_a_difference_in_the_seventh_digit_is_rounding_and_in_the_fifth_is_none():
    ours = {"a": [1.0, {"b": 2.0}], "c": "x", "html": "1"}
    assert not [*site_live.unlike(ours, {"a": [1.0, {"b": 2.0000001}], "c": "x", "html": "2"})]
    for other in ({"a": [1.0, {"b": 2.00001}], "c": "x"}, {"a": [1.0], "c": "x"}, {"a": [1.0, {"b": 2.0}]}):
        assert [*site_live.unlike(ours, other)]
