"""Tests that gin files, bindings and file names of any content raise at worst a UserError."""

import contextlib

from fuzzing import fuzzed, mutated
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline import configuration
from pipeline.configuration import statements
from pipeline.utils.errors import UserError

PIECES = st.sampled_from(
    ["include 'agents/dqn.gin'\n", "include '", "import os\n", "from a import b as c\n", "@", "%",
     "a.b = ", "/", "(", "[", "{", "'", '"""', "\\", "\t", "\n", "\x00", "\r", "#", "1_0", "-", "=",
     "~", "a" * 300, ":", ",", "0x", "b''", "nan", "*", "\n  ", "\ufeff", "é"]
)  # fmt: skip
TEXTS = st.lists(st.text(max_size=8) | PIECES, max_size=12).map("".join)
SHIPPED = [path.read_bytes() for path in sorted(statements.shipped_folder().rglob("*.gin"))]


@given(TEXTS.map(str.encode) | st.binary(max_size=60) | st.sampled_from(SHIPPED).flatmap(mutated))
@example(content=b"a.b = 1\x00\n")
@fuzzed
def test_a_gin_file(tmp_path, content):
    (tmp_path / "x.gin").write_bytes(content)
    with contextlib.suppress(UserError):
        configuration.read([str(tmp_path / "x.gin")])


@given(TEXTS | st.builds(lambda bracket, n: "a.b = " + bracket * n, st.sampled_from("([{-"),
                         st.integers(1, 5_000)))  # fmt: skip
@example(text="A\r\x80")
@fuzzed
def test_a_gin_binding(text):
    with contextlib.suppress(UserError):
        configuration.read([], [text])


@given(TEXTS)
@example(text="~\x00")
@fuzzed
def test_the_name_of_a_gin_file(text):
    with contextlib.suppress(UserError):
        configuration.find_config(text)
