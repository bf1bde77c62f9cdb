"""Bytes that this course's strategies hold on a device, of a model of width 4,096: as many as accelerators that are not
there had, within 3% at the moments of a step (test_accelerator.py) and 5% at its peak
(test_planner_course.py), for all strategies in `make test-all`. What is allowed there is more than many a part of
the sums, so the sums themselves are here.
"""

import pytest
from accelerator_cases import FIRST, KINDS, LAST, Case, sizes

from planner.strategies import SAYS, peak

TOKENS = 8192
# Strategy, implementation and ranks: MB at the moments of construction, and at those of a step, by its states; and at
# the peak of a step of two micro-batches. The device is the first of 4, or the last of 8.
MEGABYTES = {
    "single pytorch 8": ([809.959424], [4049.79712], 6326.84544),
    "dp pytorch 8": ([809.959424], [5128.192], 5128.192),
    "dp by-hand 8": ([809.959424], [7007.240192], 7007.240192),
    "ddp pytorch 8": ([1619.918848], [4318.232576, 4049.79712], 7136.804864),
    "ddp by-hand 8": ([1619.918848], [4049.79712], 6326.84544),
    "model pytorch 8": ([809.926656], [4049.63328], 6326.714368),
    "model by-hand 8": ([809.69728], [4048.4864], 6325.796864),
    "tensor pytorch 8": ([739.229696], [1011.79392], 2822.701056),
    "tensor by-hand 8": ([202.358784], [1011.79392], 2688.483328),
    "sequence by-hand 4": ([404.226048], [2021.13024], 3495.952384),
    "sequence by-hand 8": ([202.358784], [1011.79392], 2218.72128),
    "context by-hand 4": ([809.959424], [4049.79712], 4212.916224),
    "context by-hand 8": ([809.959424], [4049.79712], 4049.79712),
    "ulysses by-hand 8": ([809.959424], [4049.79712], 4049.79712),
    "expert by-hand 4": ([2421.080064], [12905.545728, 12105.40032], 13979.287552),
    "expert by-hand 8": ([1347.1744], [6999.310336, 6735.872], 8073.05216),
    "pipeline pytorch 4": ([809.926656], [4049.63328], 5957.615616),
    "pipeline pytorch 8": ([809.69728], [4048.4864], 4182.704128),
    "pipeline by-hand 4": ([809.926656], [4049.63328], 5823.397888),
    "pipeline by-hand 8": ([809.69728], [4048.4864], 4048.4864),
    "pipeline+ddp pytorch 4": ([1619.853312], [4049.63328], 4883.873792),
    "pipeline+ddp pytorch 8": ([1619.39456], [4048.4864], 4182.704128),
    "pipeline+ddp by-hand 4": ([809.926656], [4049.63328], 4749.656064),
    "pipeline+ddp by-hand 8": ([809.69728], [4048.4864], 4048.4864),
    "pipeline+fsdp pytorch 4": ([1214.889984], [3103.178752, 2024.81664], 5720.424448),
    "pipeline+fsdp pytorch 8": ([1214.54592], [3102.375936, 2024.2432], 3941.236736),
    "zero1 pytorch 8": ([4841.79968], [8068.530176, 5647.89248], 15249.89952),
    "zero1 by-hand 8": ([4841.79968], [5749.63712], 12828.99968),
    "zero2 pytorch 8": ([1108.082688], [5242.290176], 11013.3248),
    "zero2 by-hand 8": ([2420.89984], [4167.59808, 3631.34976], 10710.71232),
    "fsdp pytorch 8": ([1108.082688], [4432.330752, 1513.0624], 10203.365376),
    "fsdp by-hand 8": ([1108.082688], [4801.449984, 4633.698304, 1513.0624], 11008.835584),
    "hsdp pytorch 8": ([1410.695168], [5844.148224, 3026.1248], 11413.815296),
    "hsdp by-hand 8": ([1410.695168], [6112.58368, 6045.515776, 3026.1248], 12219.285504),
    "tensor+fsdp pytorch 8": ([504.274944, 940.425216], [2017.099776, 1514.16832], 4835.442688),
    "mesh pytorch 4": ([1008.156672, 1343.635456], [4234.018816, 3026.86208], 7790.460928),
    "mesh pytorch 8": ([607.371264, 941.785088], [1551.417344, 1012.28544], 2558.050304),
    "mesh by-hand 4": ([1008.156672], [4368.236544, 4435.410944, 3026.86208], 8193.245184),
    "mesh by-hand 8": ([404.914176], [2024.57088], 2626.289664),
}


@pytest.mark.parametrize("who", KINDS, ids="-".join)
def test_bytes_of_a_strategy(who):
    rows = [(size, rank) for size, rank in (FIRST, LAST) if f"{' '.join(who)} {size}" in MEGABYTES]
    assert rows, f"a row of {' '.join(who)}"
    for size, rank in rows:
        case = Case(*who, size, rank)
        construction, step = ([sum(said.values()) / 1e6 for said in moments] for moments in SAYS[who](sizes(case)))
        expected = MEGABYTES[f"{' '.join(who)} {size}"]
        assert construction == pytest.approx(expected[0], rel=1e-9), f"MB of states in construction, {case}"
        assert step == pytest.approx(expected[1], rel=1e-9), f"MB of states at moments of a step, {case}"
        assert peak(sizes(case), TOKENS) / 1e6 == pytest.approx(expected[2], rel=1e-9), f"MB at a step's peak, {case}"
