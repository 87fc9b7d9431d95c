import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import deepinfer
from deepinfer.core.errors import ConfigError
from deepinfer.core.speculation import SpeculationStats
from deepinfer.entrypoints.cli import app
from deepinfer.entrypoints.llm import LLM
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.errors import BackendUnavailableError

GOLDEN_CONFIG = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": {}}


@pytest.fixture
def cli(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return call


@pytest.fixture
def fake_llm(monkeypatch, make_llm):
    """`deepinfer run` with the scripted engine; gives the settings it was asked for."""
    asked = []

    def build(config, **_):
        asked.append(config)
        return make_llm(max_num_seqs=config.max_num_seqs)

    monkeypatch.setattr("deepinfer.entrypoints.llm.LLM", build)
    return asked


def test_help_needs_no_torch() -> None:
    code = "import sys, deepinfer, deepinfer.entrypoints.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", [(), ("run",), ("inspect",), ("make-tiny",), ("backends",), ("version",)])
def test_every_command_explains_itself(cli, command) -> None:
    result = cli(*command, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout


def test_version(cli) -> None:
    assert cli("version").stdout.strip() == deepinfer.__version__


def test_public_names_resolve() -> None:
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        deepinfer.nothing  # noqa: B018


def test_run_says_what_became_of_drafts(cli, fake_llm, write_input, lines, tmp_path, monkeypatch) -> None:
    found = SpeculationStats([4, 2, 0], [3, 1, 0], [3.2, 1.5, 0.0], [3.0, 0.8, 0.0])
    stats = SimpleNamespace(num_generated_tokens=4, num_running=0, speculation=found)
    monkeypatch.setattr(LLM, "stats", property(lambda llm: stats))
    source = write_input([lines.chat("a")])
    result = cli("run", source, "-o", tmp_path / "out.jsonl", "--model", "tiny")
    assert result.exit_code == 0, result.stderr
    words = [line.split() for line in result.stdout.splitlines()]
    assert [line for line in words if line[:1] in (["place"], ["1"], ["2"], ["3"])] == [
        ["place", "verified", "accepted", "confidence", "forecast"],
        ["1", "4", "0.750", "0.800", "0.750"],
        ["2", "2", "0.500", "0.750", "0.400"],
    ]


def test_run_answers_and_summarises(cli, fake_llm, write_input, lines, tmp_path, read_output) -> None:
    output = tmp_path / "out.jsonl"
    source = write_input([lines.chat("a"), lines.completion("b"), lines.completion("c")])
    result = cli("run", source, "-o", output, "--model", "tiny", "--limit", 2, "--max-num-seqs", 3)
    assert result.exit_code == 0, result.stderr
    assert [r["custom_id"] for r in read_output(output)] == ["a", "b"]
    assert "answered" in result.stdout and "2/2 requests, 8 tokens" in result.stderr
    assert (fake_llm[0].model, fake_llm[0].max_num_seqs) == ("tiny", 3)
    assert "confidence" not in result.stdout
    again = cli("run", source, "-o", output, "--model", "tiny")
    assert again.exit_code == 0 and "2 items have a line already" in again.stderr
    assert len(read_output(output)) == 3


def test_run_counts_failed_items_in_its_status(cli, fake_llm, write_input, lines, tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    source = write_input([lines.chat("a"), b"broken", lines.chat("b", foo=1)])
    result = cli("run", source, "-o", output, "--model", "tiny")
    assert result.exit_code == 1
    assert "invalid_json" in result.stdout and "unknown_parameter" in result.stdout
    assert cli("run", source, "-o", output, "--model", "tiny").exit_code == 1
    quiet = cli("run", source, "-o", output, "--model", "tiny", "-q")
    assert (quiet.exit_code, quiet.output) == (1, "")


def test_run_takes_settings_from_options_then_file_then_environment(
    cli, fake_llm, write_input, lines, tmp_path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("seed = 2\nmax_num_seqs = 2\n")
    result = cli(
        *("run", write_input([lines.chat("a")]), "-o", tmp_path / "out.jsonl"),
        *("--config", file, "--seed", 1, "--no-kv-rounding", "--kv-memory-bytes", "1GiB"),
        DEEPINFER_MODEL="from-environment",
        DEEPINFER_MAX_NUM_SEQS="9",
        DEEPINFER_NCCL_NUM_SMS="9",
    )
    assert result.exit_code == 0, result.stderr
    config = fake_llm[0]
    assert (config.model, config.seed, config.max_num_seqs) == ("from-environment", 1, 2)
    assert config.kv_rounding is False and config.kv_memory_bytes == 1 << 30
    assert "warning: DEEPINFER_NCCL_NUM_SMS is not supported" in result.stderr


def test_run_takes_any_setting_by_name_and_flags_go_before(cli, fake_llm, write_input, lines, tmp_path) -> None:
    result = cli(
        *("run", write_input([lines.chat("a")]), "-o", tmp_path / "out.jsonl", "--seed", 5),
        *("--set", "model=named", "--set", "draft_schedule=fixed", "--set", "seed=9", "--set", "prefix_caching=no"),
    )
    assert result.exit_code == 0, result.stderr
    config = fake_llm[0]
    assert (config.model, config.seed, config.draft_schedule, config.prefix_caching) == ("named", 5, "fixed", False)
    wrong = cli("run", tmp_path / "in.jsonl", "-o", tmp_path / "x", "--set", "draft_schedul=fixed")
    assert wrong.exit_code == 2 and "did you mean draft_schedule" in wrong.stderr


def test_run_and_eval_take_speculation_in_our_words_and_in_those_of_vllm(
    cli, fake_llm, write_input, lines, tmp_path, monkeypatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "deepinfer.entrypoints.evaluation.EvalCommand.run", lambda work: asked.append(work.settings) or 0
    )
    config = '{"method": "mtp", "num_speculative_tokens": 3}'
    for flags, wanted in (
        (("--speculation", "rejection"), ("rejection", None)),
        (("--speculation", "coupled", "--num-drafts", 2), ("coupled", 2)),
        (("--speculation", "coupled", "--num-speculative-tokens", 2), ("coupled", 2)),
        (("--speculative-config", config), ("coupled", 3)),
        (("--speculative-config", "{}"), ("coupled", None)),
        (("--speculative-config", config, "--num-drafts", 1, "--speculation", "rejection"), ("rejection", 1)),
        ((), ("off", None)),
    ):
        result = cli(
            "run", write_input([lines.chat("a")]), "-o", tmp_path / "o.jsonl", "--overwrite", "-m", "x", *flags
        )
        assert result.exit_code == 0, result.stderr
        assert (fake_llm[-1].speculation, fake_llm[-1].num_drafts) == wanted, flags
        assert cli("eval", "-m", "x", *flags).exit_code == 0
        assert (asked[-1].get("speculation", "off"), asked[-1].get("num_drafts")) == wanted, flags


@pytest.mark.parametrize("command", ["run", "eval"])
def test_speculation_stands_in_the_help(cli, command) -> None:
    said = cli(command, "--help").stdout
    for words in ("--speculation", "[off|coupled|rejection]", "--num-speculative-tokens", "--speculative-config"):
        assert words in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--speculation", "on"), "speculation must be one of 'off', 'coupled', 'rejection', got 'on'"),
        (("--num-drafts", 0), "num_drafts must be an integer of at least 1"),
        (("--speculative-config", "mtp"), "is no JSON"),
        (("--speculative-config", "[3]"), "must be a JSON object, got [3]"),
        (("--speculative-config", '{"method": "eagle"}'), "method 'eagle' is not there"),
        (("--speculative-config", '{"method": ["mtp"]}'), "method ['mtp'] is not there"),
        (("--speculative-config", '{"model": "small"}'), "'model' has no meaning here"),
        (("--speculative-config", '{"num_speculative_tokens": "3"}'), "num_drafts must be an integer of at least 1"),
    ],
)
def test_speculation_that_cannot_be_is_refused_by_name(
    cli, fake_llm, write_input, lines, tmp_path, flags, said
) -> None:
    result = cli("run", write_input([lines.chat("a")]), "-o", tmp_path / "o.jsonl", "-m", "x", *flags)
    words = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and said in words
    assert fake_llm == []


def test_run_that_cannot_start_says_why_and_changes_nothing(cli, fake_llm, write_input, lines, tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    source = write_input([lines.chat("a")])
    cases = [
        ((tmp_path / "absent", "-o", output, "-m", "x"), "no such file of requests"),
        ((source, "-o", source, "-m", "x"), "same file"),
        ((source, "-o", output), "no model"),
        ((source, "-o", output, "-m", "x", "--dtype", "fp4"), "dtype must be one of"),
        ((source, "-o", tmp_path / "absent" / "o", "-m", "x"), "cannot be opened"),
        ((source, "-o", output, "-m", "x", "--kv-memory-bytes", "lots"), "not a number of bytes"),
    ]
    before = source.read_bytes()
    for arguments, message in cases:
        result = cli("run", *arguments)
        assert result.exit_code == 2, arguments
        assert message in " ".join(result.stderr.split())
    assert not output.exists() and source.read_bytes() == before and fake_llm == []


def test_overwrite_keeps_old_results_until_the_model_is_loaded(
    cli, fake_llm, write_input, lines, tmp_path, read_output, monkeypatch
) -> None:
    output = tmp_path / "out.jsonl"
    source = write_input([lines.chat("a")])
    output.write_text("old\n")
    assert cli("run", source, "-o", output, "-m", "x").exit_code == 2
    assert cli("run", source, "-o", output, "-m", "x", "--overwrite").exit_code == 0
    assert len(read_output(output)) == 1
    monkeypatch.undo()
    before = output.read_bytes()
    assert cli("run", source, "-o", output, "-m", tmp_path / "absent", "--overwrite").exit_code == 2
    assert output.read_bytes() == before


def test_run_reports_a_model_that_cannot_be_loaded(cli, write_input, lines, tmp_path) -> None:
    result = cli("run", write_input([lines.chat("a")]), "-o", tmp_path / "o.jsonl", "-m", tmp_path / "absent")
    assert result.exit_code == 2 and "is no folder" in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_backends_are_listed_with_reasons(cli, monkeypatch) -> None:
    found = {
        "here": Backend("here", "cpu", lambda: Availability(True)),
        "gone": Backend("gone", "npu", lambda: Availability(False, "acme_rt is not installed"), priority=9),
    }
    monkeypatch.setattr("deepinfer.ops.registry.discover_backends", lambda: found)
    result = cli("backends")
    assert result.exit_code == 0
    assert result.stdout.index("here") < result.stdout.index("gone")
    assert "acme_rt is not installed" in result.stdout
    assert json.loads(cli("backends", "--json").stdout)[1]["available"] is False

    def broken():
        raise BackendUnavailableError("entry point x failed")

    monkeypatch.setattr("deepinfer.ops.registry.discover_backends", broken)
    result = cli("backends")
    assert result.exit_code == 2 and "error: entry point x failed" in result.stderr


def test_verify_of_no_kernel_is_no_success(cli) -> None:
    result = cli("verify", "--backend", "cpu", "--op", "no_such_op")
    assert result.exit_code == 2
    assert "no kernel of backend 'cpu' implements an op that fits --op 'no_such_op'" in result.stderr


def test_make_tiny_spares_full_folders_and_inspect_reads_what_it_wrote(cli, tmp_path) -> None:
    folder = tmp_path / "tiny"
    assert cli("make-tiny", folder, "--seed", 3, "--no-quant").exit_code == 0
    before = (folder / "config.json").read_bytes()
    refused = cli("make-tiny", folder)
    assert refused.exit_code == 2 and str(folder) in refused.stderr
    assert (folder / "config.json").read_bytes() == before
    assert cli("make-tiny", folder, "--force").exit_code == 0
    assert (folder / "config.json").read_bytes() != before

    result = cli("inspect", folder, "--memory", "1GiB")
    assert result.exit_code == 0 and "all tensors are there" in result.stdout
    facts = json.loads(cli("inspect", folder, "--memory", "1GiB", "--json").stdout)
    assert facts["problems"] == [] and facts["memory"]["fits"][0]["num_tokens"] > 0
    assert all(row["expected"] == row["found"] for row in facts["tensors"].values())


def test_inspect_lists_what_is_wrong_with_the_weights(cli, tmp_path) -> None:
    folder = tmp_path / "tiny"
    cli("make-tiny", folder)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    result = cli("inspect", folder)
    assert result.exit_code == 1 and lost.name in result.stdout


def test_inspect_names_broken_fields(cli, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN_CONFIG))
    result = cli("inspect", tmp_path)
    assert result.exit_code == 2 and "text_config" in result.stderr
    assert cli("inspect", tmp_path / "absent").exit_code == 2


def test_errors_without_a_remedy_are_not_hidden(cli, monkeypatch) -> None:
    def bug():
        raise ZeroDivisionError

    monkeypatch.setattr("deepinfer.ops.registry.discover_backends", bug)
    assert isinstance(cli("backends").exception, ZeroDivisionError)
    assert issubclass(ConfigError, Exception)
