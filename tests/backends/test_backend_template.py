"""The out-of-tree template: installed like a stranger's package, found, held to the contracts, and used by an engine.

Everything runs in processes of its own, because backends are found when a process starts and stay loaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "backend_template"
NATIVE = ("logical_to_slot", "rms_norm", "topk_select")

RUN = """
import json, sys
from deepinfer import LLM, SamplingParams
settings = json.loads(sys.argv[2])
with LLM(sys.argv[1], backend="acme", max_model_len=256, max_num_seqs=2, **settings) as llm:
    results = llm.generate([[5, 6, 7, 8, 9, 10, 11], [12]], SamplingParams(max_tokens=3, temperature=0))
    rows = llm.session.engine.op_table()
print(json.dumps({"tokens": [r.outputs[0].token_ids for r in results], "errors": [str(r.error) for r in results if r.error],
                  "rows": rows}))
"""

REFUSE = """
import json, sys
from deepinfer import LLM
from deepinfer.ops.errors import MissingOpsError
try:
    LLM(sys.argv[1], backend="acme", strict=True)
except MissingOpsError as error:
    print(json.dumps({"missing": error.missing, "message": str(error)}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the template installed, and nothing else."""
    folder = tmp_path_factory.mktemp("template")
    shutil.copytree(TEMPLATE, folder / "source")  # building leaves files beside the source
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site"))
    subprocess.run([*pip, *options, str(folder / "source")], check=True, timeout=240)
    return folder / "site"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_tiny(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def python(site, tmp_path_factory):
    """Runs Python with the installed template in sight; returns what it printed."""
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("DEEPINFER_OPS", None)

    def run(*arguments, status=0):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=environment,
            cwd=tmp_path_factory.mktemp("run"),
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    return run


def command(python, *arguments, status=0):
    return python("-m", "deepinfer.entrypoints.cli", *arguments, status=status)


def test_it_stays_under_a_hundred_lines():
    assert sum(len(path.read_text().splitlines()) for path in TEMPLATE.rglob("*.py")) < 100


def test_it_is_found_by_its_entry_point(python):
    rows = {row["name"]: row for row in json.loads(command(python, "backends", "--json"))}
    assert rows["acme"]["available"] and rows["acme"]["priority"] < rows["cpu"]["priority"]


@pytest.mark.parametrize("op", NATIVE)
def test_level_1_passes_natively(python, tmp_path, op):
    table = command(python, "conformance", "--backend", "acme", "--level", "1", "--op", op, "--report", tmp_path)
    assert f"acme.{op}" in table
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    cases = [case for case in report["results"] if case["level"] == 1]
    assert report["ok"] and len(cases) > 10
    assert all(case["native"] and case["implementation"] == f"acme.{op}" for case in cases)
    assert list(tmp_path.glob("*.html"))


def test_a_whole_model_runs_with_three_native_ops_and_the_rest_from_the_reference(python, checkpoint):
    found = json.loads(python("-c", RUN, checkpoint, "{}"))
    assert found["errors"] == [] and [len(tokens) for tokens in found["tokens"]] == [3, 3]
    native = {op for op, _, implementation in found["rows"] if implementation != "reference"}
    assert native == set(NATIVE)
    assert {implementation for *_, implementation in found["rows"]} == {"reference", *(f"acme.{op}" for op in NATIVE)}


def test_an_override_puts_an_op_back_on_the_reference(python, checkpoint):
    settings = json.dumps({"ops": "topk_select=reference"})
    found = json.loads(python("-c", RUN, checkpoint, settings))
    assert found["errors"] == []
    assert {i for op, _, i in found["rows"] if op == "topk_select"} == {"reference"}


def test_strict_refuses_once_and_names_every_gap(python, checkpoint):
    found = json.loads(python("-c", RUN, checkpoint, "{}"))
    gaps = {op for op, _, implementation in found["rows"] if implementation == "reference"}
    refusal = json.loads(python("-c", REFUSE, checkpoint))
    assert set(refusal["missing"]) == gaps and len(gaps) > 20
    assert all(name in refusal["message"] for name in gaps)


def test_both_languages_of_the_guide_show_the_same_code():
    blocks = [re.findall(r"```\w*\n.*?```", (ROOT / "docs" / name).read_text(), re.S) for name in GUIDES]
    assert len(blocks[0]) > 10
    assert [_without_comments(block) for block in blocks[0]] == [_without_comments(block) for block in blocks[1]]


GUIDES = ("backends.md", "backends.zh.md")


def _without_comments(block: str) -> str:
    return re.sub(r"\s*#.*", "", re.sub(r'""".*?"""', "", block, flags=re.S))
