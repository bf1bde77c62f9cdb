"""Mistakes to plant in what a learner or an instructor meets. tests/planting.py explains the fields."""

from planting import Mistake

MISTAKES = [
    Mistake(
        "common/generate.py", "checkpoint_of(run, step)", "checkpoint_of(run, None)",
        "--step is not heard: the newest checkpoint writes",
        "tests/common/test_generate.py::test_it_is_what_the_trained_model_writes",
        "an earlier checkpoint is another model",
    ),
    Mistake(
        "common/did_you_mean.py", "name.lower() in names and option in known", "option in known",
        "the first option there is is suggested for every unknown name",
        "tests/common/test_errors.py::test_names_of_other_programs_are_understood",
        "unknown option --epochs; did you mean --steps",
    ),
    Mistake(
        "common/learning_rate.py", "max(1, config.steps - warm_up)", "max(1, config.steps)",
        "the cosine does not reach its end",
        "tests/common/test_trainer.py::test_the_learning_rate_of_each_step",
        "0.1",
    ),
    Mistake(
        "common/meter.py", "12 * config.layers * config.width * config.context", "6 * config.layers * config.width",
        "attention is not counted",
        "tests/common/test_trainer.py::test_operations_are_those_of_the_formula",
        "operations(",
    ),
    Mistake(
        "common/sample.py", "tokens[-context:]", "tokens[:context]",
        "every byte is drawn from the beginning of the text",
        "tests/common/test_trainer.py::test_a_sample_is_what_the_model_says",
        "abcdef",
    ),
    Mistake(
        "common/grading/values.py", "text[: MOST_PRINTED - len(self.text)]", "text",
        "who prints gigabytes fills the memory of the checker",
        "tests/classroom/test_learner.py::test_of_what_is_printed_the_beginning_is_kept",
        "assert",
    ),
    Mistake(
        "common/grading/feedback.py", 'lines += column_of("input", result.inputs)', "pass",
        "a learner does not see the input",
        "tests/classroom/test_check.py::test_table_tells_what_is_wrong_and_what_is_next",
        "input     rank 0: global_mean([1])",
    ),
    Mistake(
        "common/grading/classes.py", '("=", "+", "-", "@")', '("=", "+", "@")',
        "a cell can be a formula",
        "tests/classroom/test_class.py::test_no_cell_is_a_formula",
        "assert",
    ),
    Mistake(
        "common/grading/sandbox.py", "torch.load(io.BytesIO(data), weights_only=True)",
        "__import__('pickle').loads(data)",
        "a submission's answer can run code where it is judged",
        "tests/classroom/test_class.py::test_an_answer_that_is_none_is_refused",
        "reading an answer has run what was in it",
    ),
    Mistake(
        "common/grading/engine.py", "if problem is None and seal.broken():", "if False:",
        "a file may replace the ledger while it is loaded",
        "tests/classroom/test_learner.py::test_files_that_replace_functions_of_the_checker_earn_nothing",
        "not graded",
    ),
    Mistake(
        "common/grading/fresh.py", "return value * factor if value.is_floating_point() else value", "return value",
        "a class is graded with the known inputs",
        "tests/classroom/test_class.py::test_every_exercise_of_a_class_has_inputs_that_nobody_has_seen",
        "it has no arguments; all others have fresh ones",
    ),
    Mistake(
        "common/doctor.py", 'text.replace(str(ROOT), "COURSE")', "text",
        "the report names the folder of the course",
        "tests/common/test_doctor_report.py::test_the_report_names_nobody",
        "COURSE/runs",
    ),
]  # fmt: skip
