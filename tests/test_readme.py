"""What the README shows must work as it stands."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fasteagle_lite.__main__ import _parser
from fasteagle_lite.bench import summary

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.M | re.S)
COMMANDS = [line for _, body in BLOCKS for line in body.splitlines() if line.startswith("python -m fasteagle_lite")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command):
    options = _parser().parse_args(shlex.split(command, comments=True)[3:])
    assert callable(options.run)


def test_there_are_commands_and_a_python_example():
    assert len(COMMANDS) >= 4
    assert any(kind == "python" for kind, _ in BLOCKS)


@pytest.mark.real
@pytest.mark.parametrize("code", [body for kind, body in BLOCKS if kind == "python"])
def test_python_examples_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "tokens in" in capsys.readouterr().out


def test_the_table_is_the_recorded_results():
    results = json.loads((ROOT / "assets" / "results" / "cpu-greedy.json").read_text())
    assert summary(results) in README
    assert results["environment"]["device"] in README


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link):
    assert link.startswith("https://") or (ROOT / link).exists(), link


@pytest.mark.parametrize("name", re.findall(r"`([\w/]+\.py)`", README))
def test_named_files_exist(name):
    assert (ROOT / name).exists() or list((ROOT / "fasteagle_lite").rglob(name)), name
