"""The table of sources of variance: every axis of verify is in it, and every file it names exists."""

import re
from pathlib import Path

from hf_batchinv.verify.cases import AXES

PAGE = Path(__file__).resolve().parents[1] / "hf_batchinv" / "verify" / "SOURCES.md"


def rows():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert lines[0] == "| axis | stock code | here | file |" and set(lines[1]) == {"|", "-"}
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_axis_has_a_row_and_every_row_an_axis():
    assert {row[0] for row in rows()} == set(AXES)
    assert list(dict.fromkeys(row[0] for row in rows())) == list(AXES), "in the order of verify"


def test_every_row_says_what_varies_what_is_done_and_where():
    for axis, stock, fix, files in rows():
        links = re.findall(r"\[([^]]+)\]\(([^)]+)\)", files)
        assert stock and fix and links, axis
        for name, link in links:
            target = (PAGE.parent / link).resolve()
            assert target.is_file() and target.name == name, f"{axis}: {link}"
