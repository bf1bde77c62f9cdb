"""What each wrong answer that only calculates gives for every input of its exercise: written down, not computed.

tests/test_check.py asks why the checker refuses a wrong answer, which is its first mistake. Here its other inputs are
looked at too: a wrong answer is wrong in one way, which its name or docstring says, and right wherever that does not
matter. So an edit that makes it wrong in another way is seen, and so is an input that an exercise has lost.
"""

import copy

import pytest
import torch

from common import check
from common.grading import engine, values

CHAPTERS = ("01_intro", "02_data_parallel", "03_ddp")
NEED_RANKS = {"mean_over_the_ranks", "sampler_told_by_rank_0"}
# exercise -> inputs that it has
INPUTS = {
    "ring_bytes": 19, "all_reduce_seconds": 9, "slice_sizes": 6, "mean_of_slices": 3, "add_up": 4,
    "gradients_of_copies": 4, "running_mean": 4, "bytes_held": 4, "bytes_copied": 4, "best_devices": 6,
    "learning_rate": 5, "assign_buckets": 4, "launch_order": 4, "sampler_indices": 5, "examples_of_step": 4,
    "speedup_and_efficiency": 4, "overlapped_seconds": 6,
}  # fmt: skip
# exercise -> wrong answer -> what it gives, or the error it raises, for each input for which it is wrong (from 0)
GIVES = {
    "ring_bytes": {
        "bytes_as_if_even": {
            4: 60, 6: 60, 8: 21, 9: 21, 10: 21, 11: 3510, 12: 3510, 14: 3510, 15: 3510, 16: 3510, 17: 3510,
        },
        "bytes_of_reduce_scatter_only": {
            0: 24, 1: 24, 2: 24, 3: 24, 4: 24, 5: 24, 6: 24, 7: 24, 8: 0, 9: 0, 10: 0, 11: 1750, 12: 1750, 13: 1750,
            14: 1750, 15: 1750, 16: 1750, 17: 1750, 18: 1750,
        },
        "bytes_of_whole_tensors": {
            0: 192, 1: 192, 2: 192, 3: 192, 4: 240, 5: 240, 6: 240, 7: 240, 8: 64, 9: 64, 10: 64, 11: 28084,
            12: 28084, 13: 28084, 14: 28084, 15: 28084, 16: 28084, 17: 28084, 18: 28084,
        },
        "elements_not_bytes": {
            0: 12, 1: 12, 2: 12, 3: 12, 4: 14, 5: 15, 6: 16, 7: 15, 8: 2, 9: 3, 10: 3, 11: 1754, 12: 1754, 13: 1755,
            14: 1756, 15: 1756, 16: 1756, 17: 1756, 18: 1755,
        },
        "bytes_without_own_chunk_twice": {5: 56, 7: 64, 9: 16, 10: 32, 13: 3508, 18: 3512},
        "bytes_of_a_neighbour_past_the_end": {7: 64, 10: 32, 18: 3512},
        "bytes_of_an_element_at_least": {8: 32, 9: 32, 10: 32},
        "bytes_of_float32_at_least": {11: 7016, 12: 7016, 13: 7020, 14: 7024, 15: 7024, 16: 7024, 17: 7024, 18: 7020},
    },
    "all_reduce_seconds": {
        "seconds_with_one_latency": {0: 14.0, 1: 14.0, 2: 14.0, 3: 14.8, 4: 14.0, 5: 16.0, 6: 2.0, 7: 2.0, 8: 2.0},
        "seconds_of_whole_tensors_in_the_ring": {0: 60.0, 1: 44.0},
        "seconds_of_half_tensors_only": {4: 24.0, 5: 36.0},
        "seconds_with_fractional_rounds": {3: 46.4386},
        "seconds_of_a_round_at_least": {7: 20.0},
        "seconds_on_a_power_of_two": {1: 25.5},
        "seconds_of_the_reduce_alone": {2: 20.0, 3: 30.0},
        "seconds_of_quarters_to_the_end": {5: 28.0},
        "seconds_in_a_ring_of_two_at_least": {6: 12.0},
        "seconds_of_two_halves_at_least": {8: 12.0},
    },
    "slice_sizes": {
        "sizes_as_even_as_can_be": {2: [3, 2, 2, 2]},
        "sizes_without_the_remainder": {1: [2, 2, 2], 2: [2, 2, 2, 2], 3: [0, 0, 0, 0], 5: [5000000000, 5000000000]},
        "sizes_of_slices_only": {2: [3, 3, 3], 3: [1, 1]},
        "sizes_below_zero": {3: [1, 1, 0, -1]},
        "sizes_with_one_too_many": {0: [3, 3, 2, 0]},
        "sizes_in_float32": {5: [5000000000, 5000000000]},
    },
    "mean_of_slices": {
        "mean_of_means": {1: 5.25, 2: 2.33333},
        "mean_of_what_is_there": {1: 5.25, 2: 3.5},
        "mean_without_looking": {2: "TypeError"},
        "sum_of_losses": {0: 8.0, 1: 45.0, 2: 9.0},
    },
    "add_up": {
        "add_up_in_place": {},
        "add_up_averages": {
            0: [[5.5, 5.5], [55.0, 55.0]], 1: [[33.6667, 33.6667], [6.66667, 6.66667]], 2: [[5.5, 5.5], None],
        },
        "add_up_zeros": {2: [[11.0, 11.0], [0.0, 0.0]], 3: [[1.0, 1.0], [0.0, 0.0]]},
        "add_up_overwrites": {
            0: [[10.0, 10.0], [100.0, 100.0]], 1: [[100.0, 100.0], [10.0, 10.0]], 2: [[10.0, 10.0], None],
        },
        "add_up_skips_what_one_lacks": {1: [None, None]},
        "add_up_by_device": {1: "TypeError", 2: "TypeError", 3: "TypeError"},
        "add_up_by_pairs": {3: [None, None]},
    },
    "gradients_of_copies": {
        "gradients_of_own_means": {
            0: [[3.0, -2.0], [-7.0, -23.0]], 1: [[-1.33333, -1.33333], [4.0, -4.0], [18.0, 0.0]],
            2: [[0.0, 0.0], [4.0, -12.0]],
        },
        "gradients_as_if_even": {
            1: [[-0.444444, -0.444444], [1.33333, -1.33333], [6.0, 0.0]], 2: [[0.0, 0.0], [1.33333, -4.0]],
        },
        "gradient_of_the_sum": {
            0: [[-2.0, -12.5], [-2.0, -12.5]], 1: [[5.5, -2.0], [5.5, -2.0], [5.5, -2.0]],
            2: [[2.0, -6.0], [2.0, -6.0], [2.0, -6.0]],
        },
        "gradients_by_switching_the_weight_on": {
            0: [[-2.0, -12.5], [-2.0, -12.5]], 1: [[5.5, -2.0], [5.5, -2.0], [5.5, -2.0]],
            2: [[2.0, -6.0], [2.0, -6.0], [2.0, -6.0]],
        },
        "gradients_of_detached_copies": {0: "RuntimeError", 1: "RuntimeError", 2: "RuntimeError", 3: "RuntimeError"},
        "gradients_of_copies_left_over": {2: "RuntimeError"},
        "gradients_of_the_weight_itself": {},
    },
    "running_mean": {
        "running_mean_of_whole_batches": {0: [23.9583, 24.0], 1: [32.6667, 30.0], 2: [23.9583, 24.0]},
        "running_mean_of_all_slices": {0: [53.5625, 53.875], 1: [90.0, 90.0], 2: [52.5938, 52.0547]},
        "running_mean_the_other_way": {1: [0.0, 0.0], 3: [0.0, 0.0]},
        "running_mean_that_starts_with_the_first": {0: [2.5, 1.0], 2: [1.5, 0.0]},
    },
    "bytes_held": {
        "held_with_a_copy_of_its_own": {0: 2440, 3: 71},
        "held_with_moments_everywhere": {1: 340, 2: 340},
        "held_with_one_share_of_outputs": {0: 840},
        "held_without_log_probabilities": {0: 1340, 3: 44},
        "held_alone_without_gathering": {3: 44},
    },
    "bytes_copied": {
        "copied_one_way": {0: 3306, 1: 3396, 2: 72},
        "copied_with_gradients_of_the_frozen": {1: 6786, 2: 134},
        "copied_without_the_outputs_gradient": {0: 3606, 1: 3696, 2: 122},
        "copied_to_itself_too": {0: 8808, 1: 8928, 2: 248, 3: 8238},
        "copied_by_all_reduce": {0: 600, 1: 600, 2: 100},
        "copied_alone_too": {3: 4234},
    },
    "best_devices": {
        "best_is_all": {0: 8, 2: 8, 3: 8, 4: 8, 5: 8},
        "best_without_the_lock": {0: 8, 3: 6, 4: 7, 5: 4},
        "best_one_after_the_other": {0: 8, 2: 8, 3: 8, 4: 8, 5: 8},
        "best_of_the_square_root": {4: 2},
        "best_but_the_larger": {3: 3},
        "best_power_of_two": {1: 2, 4: 2},
        "best_never_alone": {2: 2},
        "best_with_a_start_of_one_second": {5: 4},
    },
    "learning_rate": {
        "rate_from_zero": {0: 0.0, 1: 0.16, 4: 0.0},
        "rate_a_step_early": {0: 0.16, 1: 0.28},
        "rate_that_never_stops": {3: 6.1, 4: 0.1},
        "rate_by_square_root": {1: 0.14, 2: 0.2, 3: 0.2, 4: 0.173205},
        "rate_without_asking_for_a_warmup": {4: "ZeroDivisionError"},
    },
    "assign_buckets": {
        "buckets_forward": {0: [[0], [1, 2], [3, 4]], 1: [[0, 1], [2, 3], [4], [5, 6]], 2: [[0, 1, 2]], 3: [[0], [1]]},
        "buckets_with_one_cap": {0: [[4, 3], [2, 1], [0]], 1: [[6, 5], [4], [3, 2], [1], [0]], 2: [[2], [1], [0]]},
        "buckets_never_over_their_cap": {0: [[4], [3], [2, 1], [0]], 1: [[6], [5], [4], [3, 2], [1], [0]]},
        "buckets_with_an_empty_one": {3: [[1], [0], []]},
        "buckets_with_large_ones_alone": {1: [[6], [5], [4], [3, 2], [1], [0]]},
        "buckets_with_the_smaller_cap_first": {2: [[2], [1], [0]]},
    },
    "launch_order": {
        "launched_when_complete": {1: [[1], [], [0], [2]], 2: [[], [2], [0], [1]], 3: [[2], [1], [], [0]]},
        "launched_one_at_a_time": {1: [[], [], [0], [1]], 2: [[], [], [0], [1]], 3: [[], [], [], [0]]},
        "launched_at_the_end": {0: [[], [], [], [0, 1, 2]], 1: [[], [], [], [0, 1, 2]], 2: [[], [], [], [0, 1, 2]]},
        "launched_at_the_first_gradient": {
            0: [[0], [], [1], [2]], 1: [[1], [0], [], [2]], 2: [[0], [2], [], [1]], 3: [[2], [1], [0], []],
        },
        "launched_two_at_most": {3: [[], [], [], [0, 1]]},
    },
    "sampler_indices": {
        "sampler_without_set_epoch": {1: [4, 6, 0], 2: [0, 3, 1, 5, 8], 3: [2], 4: [0, 3, 4]},
        "sampler_in_blocks": {0: [2, 5, 1, 6], 1: [0, 7, 4], 2: [2, 8, 3, 1, 4], 4: [5, 3, 4]},
        "sampler_without_padding": {1: [1, 8], 2: [0, 5, 2, 3], 3: []},
        "sampler_that_drops": {1: [1, 8], 2: [0, 5, 2, 3], 3: [], 4: [5, 6]},
        "sampler_padded_once": {3: []},
        "sampler_padded_with_the_last": {1: [1, 8, 0], 2: [0, 5, 2, 3, 1], 3: [2]},
        "sampler_seeded_by_rank": {0: [4, 6, 3, 0], 1: [6, 9, 5], 2: [8, 3, 1, 5, 0]},
    },
    "examples_of_step": {
        "examples_of_whole_batches": {1: [1, 2], 2: [6, 2], 3: []},
        "examples_by_turns": {0: [1, 5], 1: [2, 6], 2: [4, 0], 3: [9, 4, 3, 5, 6, 2]},
        "examples_with_a_batch_for_each_rank": {
            0: [3, 9, 0, 8], 1: [8, 7, 1, 5], 2: [2, 4, 6, 7, 9, 1],
            3: [1, 3, 6, 5, 2, 9, 0, 3, 8, 4, 7, 1, 5, 8, 7, 0, 4, 9, 6, 2, 3, 1, 1, 2],
        },
        "examples_of_one_epoch": {1: [4, 1], 2: [0, 7], 3: [3, 7, 8, 5, 1, 9]},
        "examples_of_epoch_0": {1: [4, 1], 2: [6, 0], 3: [1, 2, 0, 8, 9, 3]},
        "examples_of_seed_0": {2: [0, 4], 3: [9, 6, 7, 3, 2, 8]},
        "examples_of_two_epochs": {3: []},
    },
    "speedup_and_efficiency": {
        "speedup_always_strong": {2: [0.8, 0.2], 3: [1.0, 0.5]},
        "speedup_always_weak": {0: [12.8, 3.2], 1: [2.0, 1.0]},
        "speedup_of_the_step_alone": {2: [0.8, 0.8], 3: [1.0, 1.0]},
        "speedup_upside_down": {0: [0.3125, 0.078125], 2: [5.0, 1.25]},
    },
    "overlapped_seconds": {
        "seconds_not_overlapped": {0: [9.0, 6.0], 1: [7.0, 2.0], 2: [11.0, 5.0], 5: [10.0, 5.0]},
        "seconds_of_the_longer": {0: [6.0, 3.0], 1: [5.0, 0.0], 2: [6.0, 0.0], 3: [3.0, 0.0], 5: [5.0, 0.0]},
        "seconds_all_at_once": {0: [5.0, 2.0], 5: [7.0, 2.0]},
        "seconds_that_stop_the_computation": {2: [9.0, 3.0]},
        "seconds_exposed_in_all": {0: [7.0, 6.0], 1: [6.0, 2.0], 2: [7.0, 5.0], 5: [8.0, 5.0]},
        "seconds_without_a_pause_of_the_network": {5: [6.0, 1.0]},
        "seconds_of_two_buckets_at_least": {3: [3.0, 0.0]},
    },
}


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def given(function, arguments):
    try:
        return values.plain(function(*copy.deepcopy(arguments)))
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", GIVES)
def test_a_wrong_answer_is_wrong_in_one_way(name):
    (chapter,) = (c for c in CHAPTERS if name in [exercise.name for exercise in check.exercises_of(c)])
    (exercise,) = check.chosen_from(chapter, name)
    cases = list(exercise.check(2))
    assert (len(cases), list(exercise.check(3))) == (INPUTS[name], []), f"{name}: inputs on 2 ranks, and on 3"
    table = engine.load(check.ROOT / chapter / "classroom" / "solutions.py").WRONG
    functions = {function.__name__: function for function, _ in table[name] if function.__name__ not in NEED_RANKS}
    assert functions.keys() == GIVES[name].keys()
    for wrong, function in functions.items():
        got = [given(function, case.arguments[0]) for case in cases]
        differs = {n: plain(g) for n, g in enumerate(got) if values.difference(cases[n].expected[0], g)}
        assert differs.keys() == GIVES[name][wrong].keys(), f"{wrong}: wrong for inputs {[*differs]}, {differs}"
        for number, value in GIVES[name][wrong].items():
            assert about(differs[number], value), f"{wrong}: {cases[number].what}: {differs[number]}, not {value}"


def about(one, other) -> bool:
    """Whether two results are equal, numbers to five digits."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(about, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one == pytest.approx(other, rel=1e-5)
    return one == other
