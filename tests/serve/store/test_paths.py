"""No name in a request reaches a file outside of the root."""

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zen_train.serve.errors import BadRequestError
from zen_train.serve.store import resolve_inside


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A root with folders and links, beside a folder whose name begins like the root's."""
    top = tmp_path_factory.mktemp("tree")
    for folder in ("root/a/b", "root/%2e%2e", "root/．．", "root-evil/secret", "outside"):
        (top / folder).mkdir(parents=True)
    (top / "root/file").write_text("")
    (top / "root/in").symlink_to("a")
    (top / "root/out").symlink_to(top / "outside")
    (top / "root/up").symlink_to("..")
    (top / "root/a/back").symlink_to("../../root/a")
    (top / "root/loop").symlink_to("loop")
    (top / "root/dangling").symlink_to("nowhere")
    return top


PLAIN = [
    "a",
    "b",
    "in",
    "out",
    "up",
    "back",
    "loop",
    "dangling",
    "file",
    "root",
    "root-evil",
    "secret",
    "outside",
    "etc",
    ".",
    "..",
    "...",
    "~",
    "%2e%2e",
    "．．",
    "‥",
    "∕",
    "／",
]
segments = st.sampled_from([*PLAIN, "", "..\\..", "\0", "\n", "a\0b", "a" * 300, "\ud800"])
asked = st.one_of(
    st.text(max_size=40),
    st.lists(segments, max_size=8).map("/".join),
    st.lists(segments, max_size=8).map(lambda parts: "/" + "/".join(parts)),
)


@given(text=asked)
@example(text="a/" * 5000)
@example(text="/" * 5000)
@settings(max_examples=1500, deadline=None)
def test_whatever_is_asked_the_answer_is_a_folder_inside_or_a_refusal(tree, text):
    refused = None
    try:
        found = resolve_inside(tree / "root", text)
    except BadRequestError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        assert len(str(refused)) < 1500
        return
    assert found.is_dir()
    assert os.path.realpath(found) == str(found)
    assert os.path.commonpath([found, (tree / "root").resolve()]) == str((tree / "root").resolve())


@pytest.mark.parametrize("text", ["a", "a/b", "./a", "a//b", "in/b", "a/back/b", "%2e%2e", "．．", "."])
def test_folders_inside_are_found(tree, text):
    assert resolve_inside(tree / "root", text).is_dir()
    assert resolve_inside(tree / "root", f"{tree}/root/{text}").is_dir()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("..", "holds '..'"),
        ("a/../a", "holds '..'"),
        ("/etc", "outside of"),
        ("/", "outside of"),
        ("out", "outside of"),
        ("up", "outside of"),
        ("up/root-evil/secret", "outside of"),
        ("a\0", "control characters"),
        ("a\nb", "control characters"),
        ("\ud800", "not valid text"),
        ("a" * 256, "too long"),
        ("a/" * 2500, "too long"),
        ("file", "no folder"),
        ("loop", "no folder"),
        ("dangling", "no folder"),
        ("~", "no folder"),
        ("..\\..\\etc", "no folder"),
    ],
)
def test_everything_else_is_refused_with_its_reason(tree, text, message):
    with pytest.raises(BadRequestError, match=message) as raised:
        resolve_inside(tree / "root", text)
    assert raised.value.param == "lora_path"


def test_a_sibling_whose_name_begins_like_the_root_is_outside(tree):
    with pytest.raises(BadRequestError, match="outside of"):
        resolve_inside(tree / "root", f"{tree}/root-evil/secret")


def test_what_lies_outside_is_not_told(tree):
    """The same words for a folder that exists and one that does not: a request cannot look around."""
    told = []
    for text in (f"{tree}/outside", f"{tree}/absent!"):
        with pytest.raises(BadRequestError) as raised:
            resolve_inside(tree / "root", text)
        told.append(str(raised.value).replace(text, "X"))
    assert told[0] == told[1]
