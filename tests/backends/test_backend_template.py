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
DOCS, TEMPLATE = ROOT / "docs", ROOT / "examples" / "backend_template"
GUIDES = ("backends.md", "backends.zh.md")
NATIVE = ("logical_to_slot", "rms_norm", "topk_select")

RUN = """
import json, sys
from deepinfer import LLM, SamplingParams
settings = json.loads(sys.argv[2])
with LLM(sys.argv[1], backend="acme", max_model_len=256, max_num_seqs=2, **settings) as llm:
    results = llm.generate([[5, 6, 7, 8, 9, 10, 11], [12]], SamplingParams(max_tokens=3, temperature=0))
    rows = llm.session.engine._ops.rows()
errors = [str(r.error) for r in results if r.error]
print(json.dumps({"tokens": [r.outputs[0].token_ids for r in results], "errors": errors, "rows": rows}))
"""

SUITE = """
import json, sys
from deepinfer.conformance.suite import open_session, run_suite
from deepinfer.ops.registry import find_backend
outcome = {}
for op in sys.argv[1:]:
    report = run_suite(open_session(find_backend("acme"), level=1, ops=op))
    outcome[op] = [report.ok, sorted({case.implementation for case in report.results if case.level == 1})]
print(json.dumps(outcome))
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


def install(source, site):
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    subprocess.run([*pip, *options, str(source)], check=True, timeout=240)
    return site


def runner(site, tmp_path_factory):
    """Runs Python with an installed backend in sight; returns what it printed."""
    folder = tmp_path_factory.mktemp("run")
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "DEEPINFER_CACHE_DIR": str(folder / "cache"), "COLUMNS": "200"}
    environment.pop("DEEPINFER_OPS", None)

    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def conformance(python, op, report):
    chosen = ("--backend", "acme", "--level", "1", "--op", op, "--report", report)
    return python("-m", "deepinfer.entrypoints.cli", "conformance", *chosen)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    shutil.copytree(TEMPLATE, folder / "source")  # building leaves files beside the source
    return runner(install(folder / "source", folder / "site"), tmp_path_factory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_tiny(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def generated(python, checkpoint):
    """What a run of the engine on the template gave."""
    return json.loads(python("-c", RUN, checkpoint, "{}"))


def test_it_stays_under_a_hundred_lines():
    assert sum(len(path.read_text().splitlines()) for path in TEMPLATE.rglob("*.py")) < 100


def test_it_is_found_by_its_entry_point(python):
    found = json.loads(python("-m", "deepinfer.entrypoints.cli", "backends", "--json"))
    rows = {row["name"]: row for row in found}
    assert rows["acme"]["available"] and rows["acme"]["priority"] < rows["cpu"]["priority"]


def test_level_1_passes_and_its_table_tells_native_ops_from_references(python, tmp_path):
    table = conformance(python, "[lrt]*[tm]", tmp_path)  # the three, and rms_norm_quant
    report = json.loads((tmp_path / "report.json").read_text())
    cases = [case for case in report["results"] if case["level"] == 1]
    native = {case["op"]: case["implementation"] for case in cases if case["native"]}
    assert report["ok"] and native == {op: f"acme.{op}" for op in NATIVE}
    assert all(name in table for name in native.values())
    assert {case["implementation"] for case in cases if case["op"] not in native} == {"reference"}
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_a_whole_model_runs_with_three_native_ops_and_the_rest_from_the_reference(generated):
    assert generated["errors"] == [] and [len(tokens) for tokens in generated["tokens"]] == [3, 3]
    native = {op: implementation for op, _, implementation in generated["rows"] if implementation != "reference"}
    assert native == {op: f"acme.{op}" for op in NATIVE}


def test_an_override_puts_an_op_back_on_the_reference(python, checkpoint, generated):
    found = json.loads(python("-c", RUN, checkpoint, json.dumps({"ops": "topk_select=reference"})))
    assert {i for op, _, i in found["rows"] if op == "topk_select"} == {"reference"}
    assert found["tokens"] == generated["tokens"]  # an exact op


def test_strict_refuses_once_and_names_every_gap(python, checkpoint, generated):
    gaps = {op for op, _, implementation in generated["rows"] if implementation == "reference"}
    refusal = json.loads(python("-c", REFUSE, checkpoint))
    assert set(refusal["missing"]) >= gaps and not set(refusal["missing"]) & set(NATIVE)
    assert len(gaps) > 20 and all(name in refusal["message"] for name in gaps)


def test_the_package_that_the_guide_builds_passes_level_1(tmp_path, tmp_path_factory):
    """Its code blocks whose first line names a file are that package."""
    for path, text in re.findall(r"```\w+\n# (\S+\.(?:py|toml))\n(.*?)```", (DOCS / GUIDES[0]).read_text(), re.S):
        if path != "waivers.toml":
            (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / path).write_text(text)
    python = runner(install(tmp_path / "source", tmp_path / "site"), tmp_path_factory)
    assert json.loads(python("-c", SUITE, "gather_rows", "logical_to_slot", "rms_norm")) == {
        "gather_rows": [True, ["acme.gather_rows"]],
        "logical_to_slot": [True, ["acme.logical_to_slot"]],
        "rms_norm": [True, ["acme.rms_norm", "acme.rms_norm_by_32"]],
    }


def test_both_languages_of_the_guide_show_the_same_code_and_commands():
    blocks = [
        re.findall(r"^```.*?^```|(?:^    \S[^\n]*\n)+", (DOCS / name).read_text(), re.S | re.M) for name in GUIDES
    ]
    assert len(blocks[0]) > 20 and blocks[0] == blocks[1]


def test_every_command_of_the_guide_exists():
    from typer.main import get_command

    from deepinfer.entrypoints.cli import app

    known = get_command(app).commands
    lines = re.findall(r"^    (?:DEEPINFER_OPS=\S+ )?deepinfer (.*)$", (DOCS / GUIDES[0]).read_text(), re.M)
    assert len(lines) > 10
    for line in lines:
        name, *words = line.split("#")[0].split()
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
