"""Published runs, as layouts with what was measured, from planner/published/*.csv, whose README names the sources."""

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.axes import AXES
from planner import models
from planner.hardware import Cluster, cluster
from planner.layout import Layout, make_layout
from planner.models import Model

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Run:
    """One row. seconds: of a step, None where it ran out of memory or crashed; gib: peak memory, None where it was not
    said; crashed: nobody knows why; assumed: the source is silent about an input that matters."""

    source: str
    name: str
    model: Model
    cluster: Cluster
    layout: Layout
    seconds: float | None
    gib: float | None = None
    crashed: bool = False
    assumed: bool = False

    @property
    def out_of_memory(self) -> bool:
        """It says so; of runs that crashed, nobody knows."""
        return self.seconds is None and self.gib is None and not self.crashed


def rows(name: str) -> list[dict[str, str]]:
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


def megatron() -> list[Run]:
    """Narayanan et al. 2021, table 1: everything recomputed, no sequence parallelism, attention's scores stored,
    gradients of fp16 added up and reduced after the backward pass."""
    found = []
    for row in rows("megatron_sc21_table1.csv"):
        model = models.Model(
            f"Megatron {row['params_B']}B", int(row["layers"]), int(row["hidden"]), int(row["heads"]),
            int(row["vocab"]), positions=2048, tied=True, bias="all",
        )  # fmt: skip
        gpus = cluster("a100-80gb", int(row["gpus"]), int(row["gpus_per_node"]), "infiniband-200", 8)
        chunks = int(row["virtual_pp_chunks"])
        layout = make_layout(
            model, gpus, {"pipeline": int(row["pp"]), "data": int(row["dp"]), "tensor": int(row["tp"])},
            batch_size=int(row["global_batch"]), micro_batch=int(row["micro_batch"]), sequence=int(row["seq"]),
            stages_per_rank=chunks, recompute="full", precision="fp16-mixed", sequence_parallel=False, flash=False,
            dropout=True, overlap_gradients=False,
        )  # fmt: skip
        seconds = float(row["derived_iter_time_s(eq3/(n*tflops))"])
        found.append(Run("Megatron-LM 2021", f"{row['params_B']}B on {row['gpus']}", model, gpus, layout, seconds))
    return found


def korthikanti() -> list[Run]:
    """Korthikanti et al. 2022, tables 3 and 5, and the run with eight replicas of section 6.3."""
    found = []
    for row in rows("korthikanti22_table3_5_itertime.csv"):
        model = models.Model(
            f"Megatron {row['model']}", int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["vocab"]),
            positions=2048, tied=True, bias="all",
        )  # fmt: skip
        gpus = cluster("a100-80gb", int(row["gpus"]), 8, "infiniband-200", 8)
        layout = make_layout(
            model, gpus, {"pipeline": int(row["pp"]), "data": int(row["dp"]), "tensor": int(row["tp"])},
            batch_size=int(row["global_batch"]), micro_batch=int(row["micro_batch"]), sequence=int(row["seq"]),
            stages_per_rank=int(row["interleave_m"]), precision="fp16-mixed", flash=False, dropout=True,
            recompute={"selective": "attention"}.get(row["recompute"], row["recompute"]),
            sequence_parallel=row["seq_parallel"] == "yes", overlap_gradients=False,
        )  # fmt: skip
        name = f"{row['model']} on {row['gpus']}, {row['recompute']}"
        found.append(Run("Korthikanti 2022", name, model, gpus, layout, float(row["iter_time_s"])))
    return found


TITAN = {  # our name of the source -> tables of the file
    "torchtitan 2024-12": ("T1", "T2", "T3", "T4", "T5", "T6"), "torchtitan 2025-06": ("asyncTP",),
    "torchtitan H200": ("trainy",), "torchtitan 2024-04": ("2024-04",), "torchtitan 2024-08": ("2024-08",),
}  # fmt: skip
RECOMPUTE = {"selective": "operators", "per-op selective": "operators", "selective op": "operators",
             "selective layer": "every-second", "llama3_8b.toml default (selective)": "operators"}  # fmt: skip


def torchtitan() -> list[Run]:
    """torchtitan's reports. Pipelines ran as many micro-batches as ranks at that time, whatever the schedule (its pull
    request 781). Since 2025 the loss is compiled as well. Scaling in 8 bit by rows is left out: it is another method,
    at half of the speed."""
    source_of = {table: source for source, tables in TITAN.items() for table in tables}
    found = []
    for row in rows("torchtitan_published.csv"):
        if row["float8"] == "rowwise":
            continue
        gpu = "a100-80gb" if "A100" in row["hardware"] else "h200" if "H200" in row["hardware"] else "h100-96gb"
        model = models.find(row["model"].lower().replace("llama3.1", "llama-3").replace("llama3", "llama-3").replace(
            "llama2", "llama-2"))  # fmt: skip
        gpus = cluster(gpu, int(row["gpus"]), 8)
        columns = {"shard": "dp_shard", "tensor": "tp", "pipeline": "pp", "context": "cp"}
        mesh = {axis: int(row[column]) for axis, column in columns.items()}
        local = int(row["local_batch"])
        interleaved = row["pp_schedule"] == "Interleaved1F1B"
        layout = make_layout(
            model, gpus, mesh, zero_stage=3, batch_size=local * mesh["shard"], sequence=int(row["seq"]),
            micro_batch=max(1, local // mesh["pipeline"]) if mesh["pipeline"] > 1 else local,
            stages_per_rank=2 if interleaved else 1, recompute=RECOMPUTE.get(row["activation_ckpt"],
                                                                             row["activation_ckpt"]),
            precision="bf16-mixed" if row["float8"] == "n" else "fp8-mixed", fused=row["compile"] != "n",
            async_tensor=row["async_tp"] == "y", fused_loss=row["table"] in ("asyncTP", "trainy"),
        )  # fmt: skip
        oom = row["tokens_per_s_per_gpu"] == "OOM"
        seconds = None if oom else local * int(row["seq"]) * mesh["shard"] / gpus.gpus / float(
            row["tokens_per_s_per_gpu"])  # fmt: skip
        gib = float(row["peak_mem_GiB"]) if row["peak_mem_GiB"].replace(".", "").isdigit() else None
        what = f"{layout.describe()}, {row['float8']}" + (", compiled" if row["compile"] == "y" else "")
        found.append(Run(source_of[row["table"]], f"{row['model']} {what}", model, gpus, layout, seconds, gib))
    return found


# word in the column "flags" of runs.csv -> the field of Layout that it sets, and to what; "lora-8": adapters of rank 8
FLAGS: dict[str, tuple[str, Any]] = {
    "whole-stream": ("sequence_parallel", False), "scores-stored": ("flash", False), "dropout": ("dropout", True),
    "gradients-last": ("overlap_gradients", False), "unfused": ("fused", False), "nf4": ("nf4", True),
    "offload": ("offload", True), "on-qkv": ("lora_on", "qkv"), "whole-experts": ("whole_experts", True),
}  # fmt: skip


def flag(word: str) -> tuple[str, Any]:
    return ("lora", int(word[5:])) if word.startswith("lora-") else FLAGS[word]


def table() -> list[Run]:
    """Rows of runs.csv, whose columns are the planner's own fields. Its README says what was assumed where a source is
    silent; those rows have "assumed"."""
    found = []
    for row in rows("runs.csv"):
        whole: dict[str, Any] = {name: int(row[name]) for name in ("layers", "width", "heads", "vocabulary")}
        more = ("kv_heads", "mlp_width", "positions", "experts", "top_k", "expert_width", "shared_experts",
                "dense_layers", "head_width", "attention")  # fmt: skip
        whole |= {name: int(row[name]) for name in more if row[name]}
        model = models.Model(
            row["model"], **whole, mlp=row["mlp"], tied=row["tied"] == "yes", bias=row["bias"] or "none"
        )
        gpus = cluster(row["gpu"], int(row["gpus"]), int(row["per_node"]), row["network"], int(row["adapters"]))
        mesh = {axis: int(row[axis]) for axis in AXES if row[axis]}
        numbers = {name: int(row[name]) for name in ("batch_size", "micro_batch", "sequence", "zero_stage")}
        layout = make_layout(
            model, gpus, mesh, **numbers, recompute=row["recompute"], precision=row["precision"],
            stages_per_rank=int(row["stages_per_rank"] or 1), framework=row["framework"],
            **dict(flag(word) for word in row["flags"].split()),
        )  # fmt: skip
        name = f"{model.name} {layout.describe()} [{row['where']}]"
        found.append(Run(
            row["source"], name, model, gpus, layout, float(row["seconds"]) if row["seconds"] else None,
            float(row["gib"]) if row["gib"] else None, row["status"].startswith("crashed"),
            bool(row["assumed"]),
        ))  # fmt: skip
    return found


@lru_cache
def runs() -> tuple[Run, ...]:
    return (*megatron(), *korthikanti(), *torchtitan(), *table())
