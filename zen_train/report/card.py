"""README.md of a delta artifact: a model card in Hugging Face form.

Contract: `model_card` returns valid YAML front matter and Markdown, whatever the names and texts contain.
Does not write the file and reads nothing but the results.
"""

import json
import re
from typing import Any

from zen_train.report import units
from zen_train.report.commands import apply_command
from zen_train.report.results import RunResults

_HUB_LICENCES = frozenset({"apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "llama3.1", "llama3.2", "gemma"})
"""Licence names that the Hub knows and that SPDX writes alike but for the case; others become `other`."""


def model_card(results: RunResults) -> str:
    """The card's text, ending in a newline."""
    parts = [
        _front_matter(results),
        f"# {_inline(results.variant)}, {_kind(results)} of {_inline(results.base.name)}\n",
        f"This folder holds what fine-tuning changed, as {results.size.held_as}, not a whole model. "
        "It works only with the exact base model named below; readers check its fingerprint.\n",
        "## Measured quality\n\n" + _quality(results),
        "## Use\n\n" + _use(results),
        "## Training\n\n" + _training(results),
    ]
    if results.samples:
        parts.append("## Sample\n\n" + _sample(results))
    parts.append("## Provenance\n\n" + _provenance(results))
    return "\n".join(parts)


def _kind(results: RunResults) -> str:
    return "a delta" if _directions(results) else "a one-bit delta"


def _directions(results: RunResults) -> bool:
    return "directions" in results.size.held_as


def _front_matter(results: RunResults) -> str:
    fields: dict[str, Any] = {"library_name": "zen_train"}
    if results.base.hub_id is not None:
        fields |= {"base_model": results.base.hub_id, "base_model_relation": "adapter"}
    code = ["delta-compression"] if _directions(results) else ["bitdelta", "one-bit-delta"]
    fields["tags"] = ["zen_train", *code, results.variant]
    if results.base.licence is not None:
        known = results.base.licence.lower() in _HUB_LICENCES
        fields["license"] = results.base.licence.lower() if known else "other"
        if not known:
            fields["license_name"] = results.base.licence
    if results.language:
        fields["language"] = list(results.language)
    fields["pipeline_tag"] = "text-generation"
    # JSON scalars and lists are valid YAML, and quote every character that YAML would read as its own.
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---", ""])


def _quality(results: RunResults) -> str:
    losses, artifact = results.losses, results.size
    rows = [
        ("base", losses.base, losses.perplexity("base"), None),
        ("fine-tune", losses.fine_tune, losses.perplexity("fine_tune"), artifact.bf16_model_bytes),
        ("base + this delta", losses.delta, losses.perplexity("delta"), artifact.stored_bytes),
    ]
    table = ["| model | held-out loss per token | perplexity | size |", "|---|---:|---:|---:|"]
    table += [
        f"| {name} | {units.loss_text(loss)} | {units.perplexity_text(power)} | {units.bytes_text(size)} |"
        for name, loss, power, size in rows
    ]
    share = losses.share_kept
    kept = (
        f"No share of the gain can be stated: {losses.share_kept_reason}."
        if share is None
        else f"The delta keeps **{units.share_text(share)}** of what the fine-tune gained, "
        "(base - delta) / (base - fine-tune)."
    )
    text = [
        *table,
        "",
        f"Natural-log loss over {losses.tokens} held-out tokens. {kept} "
        f"It is {units.ratio_text(artifact.ratio)} smaller than the bf16 model"
        + (
            f", at {units.bits_text(artifact.bits_per_compressed_weight)} bits for each compressed weight."
            if artifact.bits_per_compressed_weight is not None
            else "."
        ),
    ]
    text += [f"\n**Warning.** {_inline(warning)}" for warning in results.all_warnings()]
    return "\n".join(text) + "\n"


def _use(results: RunResults) -> str:
    return (
        "Write the whole fine-tuned model, which transformers loads like any other:\n\n"
        + _fenced(apply_command(".", base="BASE_FOLDER", output=f"../{results.variant}-full"), "sh")
        + "\nOr serve the base and any number of such deltas from one process:\n\n"
        + _fenced("python -m zen_train.serve variants=..", "sh")
    )


def _training(results: RunResults) -> str:
    lines = [f"- {results.steps} optimizer steps over {results.tokens} tokens inside the loss"]
    if results.merge is not None and results.merge.method != "none":
        merges = results.curves.merges
        accepted = sum(merge.accepted for merge in merges)
        every = "" if results.merge.every_n_steps is None else f" every {results.merge.every_n_steps} steps"
        lines.append(
            f"- Merged by `{results.merge.method}`{every}: {accepted} of {len(merges)} merges accepted"
        )
    if results.data:
        lines += ["", "| source | version | licence |", "|---|---|---|"]
        lines += [
            "| " + " | ".join(_inline(cell) for cell in (s.name, s.version or units.DASH, s.licence)) + " |"
            for s in results.data
        ]
    return "\n".join(lines) + "\n"


def _sample(results: RunResults) -> str:
    sample = results.samples[0]
    named = (
        ("Prompt", sample.prompt),
        ("Base", sample.base),
        ("Fine-tune", sample.fine_tune),
        ("Delta", sample.delta),
    )
    return "\n".join(f"{name}:\n\n{_fenced(text, 'text')}" for name, text in named)


def _provenance(results: RunResults) -> str:
    made, base = results.provenance, results.base
    facts = [
        ("base", base.name),
        ("base revision", base.revision),
        ("base licence", base.licence),
        ("base fingerprint", base.fingerprint),
        ("commit", made.commit),
        ("command", made.command),
        ("seed", None if made.seed is None else str(made.seed)),
        ("device", made.device),
        ("started", made.started_at),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
    ]
    return "\n".join(f"- {name}: {_code(value)}" for name, value in facts if value) + "\n"


def _inline(text: str) -> str:
    """Text on one line in which Markdown and HTML see no markup."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """An inline code span, whatever backticks the text contains."""
    text = " ".join(text.split())
    fence = "`" * (_longest_backticks(text) + 1)
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _longest_backticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"
