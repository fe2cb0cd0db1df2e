"""Runs in a process of its own: generates tasks with the unpacked package `reasoning-gym`, as JSON lines.

`python gym_worker.py FOLDER COUNT SEED math|reasoner`. The package's own `__init__` imports all of its
tasks and with them packages that this corpus does not need, so empty parent modules stand in for it. Each
line has `document`, `question` and `answer`; the answer is worked out where the task's own metadata allow
it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

Entry = dict[str, Any]
_FOLDERS = ("algebra", "algorithmic", "arithmetic", "arithmetic.gsm_symbolic", "cognition", "graphs", "logic")
_BLOCK = 25  # tasks of consecutive seeds that make up one document


def stand_in(folder: Path) -> None:
    """Make `reasoning_gym` and its folders importable without running their `__init__`."""
    for name in ("reasoning_gym", *(f"reasoning_gym.{folder}" for folder in _FOLDERS)):
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module


def math_problems(count: int, seed: int) -> Iterator[Entry]:
    """Word problems with worked answers. A document is a template: held-out problems are of unseen kinds."""
    importlib.import_module("reasoning_gym.coaching")
    tasks = importlib.import_module("reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic").tasks_ok
    for number in tasks:
        part = "generators_00_49" if number < 50 else "generators_50_99"
        module = importlib.import_module(f"reasoning_gym.arithmetic.gsm_symbolic.{part}")
        generate = getattr(module, f"generate_{number}")
        for i in range(count // len(tasks)):
            entry = generate(Random(f"{seed} {number} {i}"), 1.0)
            worked, _, result = entry["metadata"]["answer_cot"].rpartition("####")
            yield {
                "document": f"template {number}",
                "question": " ".join(entry["question"].split()),
                "answer": f"{worked.strip()}\nAnswer: {result.strip()}",
            }


def reasoning_tasks(count: int, seed: int) -> Iterator[Entry]:
    """Small problems of logic, arithmetic and language. A document is a task with a range of seeds."""
    importlib.import_module("reasoning_gym.coaching")
    factory_tasks = list(TASKS)
    each = count // len(factory_tasks)
    for name in factory_tasks:
        module, options, work = TASKS[name]
        importlib.import_module(f"reasoning_gym.{module}")
        factory = importlib.import_module("reasoning_gym.factory")
        for block in range(each // _BLOCK):
            data = factory.create_dataset(name, size=_BLOCK, seed=seed * 1_000_000 + block * 1000, **options)
            for i in range(_BLOCK):
                entry = data[i]
                yield {
                    "document": f"{name} seeds {block * 1000} to {block * 1000 + _BLOCK - 1}",
                    "question": _question(name, entry),
                    "answer": work(entry["metadata"], str(entry["answer"]).strip()),
                }


def _question(task: str, entry: Entry) -> str:
    """Without requests for a bare answer, since the answers here are worked out; and with proper plurals."""
    if task == "leg_counting":
        listed = [_plural(number, name) for name, number in entry["metadata"]["animals"].items()]
        return f"How many legs do {', '.join(listed[:-1])} and {listed[-1]} have in total?"
    text = re.sub(r"\s*(?:Provide|Give) only [^.]*\.", "", entry["question"])
    text = re.sub(r"\s*Answer with (?:a number|a single word)\.", "", text)
    text = text.replace("Respond only with the word that describes their relationship.", "")
    text = text.replace(
        "State the final answer to the following arithmetic problem:", "Work out step by step:"
    )
    return text.strip()


def _plural(number: int, name: str) -> str:
    if number == 1:
        return f"one {name}"
    if name.endswith("y"):
        return f"{number} {name[:-1]}ies"
    return f"{number} {name}{'es' if name.endswith(('s', 'ch', 'sh', 'x')) else 's'}"


def _plain(meta: Entry, answer: str) -> str:
    return f"Answer: {answer}"


def _chain_sum(meta: Entry, answer: str) -> str:
    total, *rest = meta["expression"].split(" ")
    steps = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = int(total) + int(term) * (1 if sign == "+" else -1)
        steps.append(f"{total} {sign} {term} = {result}")
        total = str(result)
    return "\n".join([*steps, f"Answer: {answer}"])


def _legs(meta: Entry, answer: str) -> str:
    animals = sys.modules["reasoning_gym.arithmetic.leg_counting"].ANIMALS
    counted = [(number, name, animals[name]) for name, number in meta["animals"].items()]
    lines = [f"{name}: {number} x {legs} = {number * legs}" for number, name, legs in counted]
    total = " + ".join(str(number * legs) for number, _, legs in counted)
    return "\n".join([*lines, f"{total} = {answer}", f"Answer: {answer}"])


def _gcd(meta: Entry, answer: str) -> str:
    a, b = sorted(meta["numbers"], reverse=True)
    steps = []
    while b:
        steps.append(f"{a} = {a // b} x {b} + {a % b}")
        a, b = b, a % b
    assert a == gcd(*meta["numbers"])
    return "\n".join([*steps, f"Answer: {answer}"])


def _letters(meta: Entry, answer: str) -> str:
    letter = meta["target_letter"]
    found = [(word, word.lower().count(letter)) for word in meta["span"] if letter in word.lower()]
    lines = ", ".join(f"{word}: {number}" for word, number in found) or "no word has it"
    return f"{lines}\nAnswer: {answer}"


def _base(meta: Entry, answer: str) -> str:
    return (
        f"{meta['source_repr']} in base {meta['source_base']} is {meta['decimal_value']} in base 10, "
        f"which is {meta['target_repr']} in base {meta['target_base']}.\nAnswer: {answer}"
    )


def _cipher(meta: Entry, answer: str) -> str:
    return f"Each letter is shifted back by {meta['rotation']}.\nAnswer: {answer}"


def _family(meta: Entry, answer: str) -> str:
    return f"{meta['person1']} is the {answer} of {meta['person2']}.\nAnswer: {answer}"


def _sequence(meta: Entry, answer: str) -> str:
    return f"The rule is: {meta['rule']}.\nAnswer: {answer}"


TASKS: dict[str, tuple[str, Entry, Callable[[Entry, str], str]]] = {
    "knights_knaves": ("logic.knights_knaves", {}, _plain),
    "aiw": ("logic.aiw", {}, _plain),
    "family_relationships": ("graphs.family_relationships", {}, _family),
    "color_cube_rotation": ("cognition.color_cube_rotation", {}, _plain),
    "number_sequence": ("cognition.number_sequences", {"max_complexity": 2}, _sequence),
    "calendar_arithmetic": ("arithmetic.calendar_arithmetic", {}, _plain),
    "chain_sum": ("arithmetic.chain_sum", {"max_digits": 3}, _chain_sum),
    "leg_counting": ("arithmetic.leg_counting", {"max_animals": 6}, _legs),
    "gcd": ("arithmetic.gcd", {}, _gcd),
    "letter_counting": ("algorithmic.letter_counting", {}, _letters),
    "base_conversion": ("algorithmic.base_conversion", {}, _base),
    "caesar_cipher": ("algorithmic.caesar_cipher", {"max_words": 10}, _cipher),
    "word_sorting": ("algorithmic.word_sorting", {}, _plain),
}
"""Name in reasoning-gym, its module, options that keep a task short, and how the answer is written.

Left out after reading samples: syllogism (some of its answers are wrong), sentence_reordering (stray
quotation marks).
"""


def main(folder: str, count: str, seed: str, kind: str) -> None:
    """Print `count` tasks or a few less."""
    stand_in(Path(folder))
    sys.path.insert(0, folder)
    generate = {"math": math_problems, "reasoner": reasoning_tasks}[kind]
    for entry in generate(int(count), int(seed)):
        sys.stdout.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
