"""`deepinfer conformance`, `verify` and `backends`: the commands of backend authors and the curious.

The suite is imported when a command runs, so that `--help` answers at once. Exit status: 0 conforms, 1 does not,
2 could not start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deepinfer.ops.backend import Backend
    from deepinfer.ops.runtime import Runtime

app = typer.Typer(help="Hold a backend against the op contracts.", no_args_is_help=True, add_completion=False)

_BackendName = Annotated[str, typer.Option("--backend", "-b", help="An installed backend.", metavar="NAME")]


@app.command()
def conformance(
    backend: _BackendName,
    level: Annotated[int, typer.Option(min=0, max=6, help="Run levels 0 to N.", metavar="N")] = 1,
    op: Annotated[str, typer.Option(help="Only ops that fit one of these.", metavar="GLOB[,GLOB]")] = "*",
    case: Annotated[str, typer.Option("--case", help="One case alone: op/name, or a saved file.", metavar="CASE")] = "",
    real: Annotated[bool, typer.Option("--real", help="Also cases with the model's own shapes.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write report.json, report.html and failing cases here.", metavar="DIR")
    ] = None,
    waivers: Annotated[Path | None, typer.Option(help="TOML or JSON file of waivers.", metavar="FILE")] = None,
    write_proof: Annotated[bool, typer.Option("--write-proof", help="Record what passed in proof.json.")] = False,
    emulate: Annotated[bool, typer.Option("--emulate", help="Interpret the kernels on the host, no device.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line per case.")] = False,
) -> None:
    """Run the conformance suite: L0 loads, L1 ops, L2 layers, L3 to L5 engine, L6 performance sheet."""
    raise typer.Exit(
        _guarded(lambda: _conformance(backend, level, op, case, real, report, waivers, write_proof, emulate, quiet))
    )


@app.command()
def verify(
    backend: _BackendName = "auto",
    op: Annotated[str, typer.Option(help="Only ops that fit one of these.", metavar="GLOB[,GLOB]")] = "*",
) -> None:
    """Run every kernel's own cases on this device and remember the verdicts."""
    raise typer.Exit(_guarded(lambda: _verify(backend, op)))


_LEGEND = (
    "proven, hardware: passed all its cases on such a device; emulated: in an interpreter or a twin; compiled: no more "
    "is known, or its source was edited since. What is not proven on hardware runs its cases on this device before its "
    "first use; `deepinfer verify` does it for all at once."
)


@app.command()
def backends(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Also list this one's ops.", metavar="NAME")] = "",
    ops: Annotated[bool, typer.Option("--ops", help="List the ops of every backend that is available.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List installed backends: available or why not, which op comes from where, how far it is proven."""
    raise typer.Exit(_guarded(lambda: _backends(backend, ops, as_json)))


def _guarded(command: Callable[[], int]) -> int:
    from deepinfer.ops.errors import OpError

    try:
        return command()
    except (OpError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _conformance(
    name: str,
    level: int,
    op: str,
    case: str,
    real: bool,
    folder: Path | None,
    waivers: Path | None,
    write_proof: bool,
    emulate: bool,
    quiet: bool,
) -> int:
    from rich.console import Console

    from deepinfer.conformance.claims import read_waivers
    from deepinfer.conformance.report import case_line, print_report, write_report
    from deepinfer.conformance.selfcheck import needs_real_cases, prove
    from deepinfer.conformance.suite import open_session, run_suite
    from deepinfer.ops.errors import OpArgumentError
    from deepinfer.ops.registry import find_backend, find_emulated

    if write_proof and (op != "*" or case or level < 1):
        raise OpArgumentError("--write-proof needs all cases of level 1: leave out --op and --case")
    console = Console()
    excuses = read_waivers(waivers) if waivers is not None else []
    listener = None if quiet else lambda result: console.print(case_line(result), highlight=False)
    target = find_emulated(name) if emulate else find_backend(name)
    if write_proof and needs_real_cases(target) and not real:
        raise OpArgumentError("--write-proof on an accelerator needs the cases with the model's shapes: add --real")
    session = open_session(
        target, level=level, ops=op, case=case, real=real, emulated=emulate, folder=folder, listener=listener
    )
    report = run_suite(session, excuses)
    print_report(report, console)
    if folder is not None:
        for path in write_report(report, folder):
            console.print(f"report: {path}", highlight=False)
    if write_proof:
        for path in prove(session.backend, report.results, "emulated" if emulate else "hardware", report.device):
            console.print(f"proofs: {path}", highlight=False)
    return 0 if report.ok else 1


def _verify(name: str, op: str) -> int:
    from rich.console import Console

    from deepinfer.conformance.selfcheck import gate_for, verify_implementation
    from deepinfer.conformance.subject import open_runtime
    from deepinfer.conformance.suite import fits
    from deepinfer.ops.errors import OpArgumentError
    from deepinfer.ops.proof import proof_level
    from deepinfer.ops.registry import find_backend

    console = Console()
    backend = find_backend(name)
    runtime = open_runtime(backend)
    gate = gate_for(runtime)
    gate.check = lambda implementation, seconds: verify_implementation(implementation, runtime)
    chosen = [i for i in backend.implementations if fits(i.op.name, op)]
    if not chosen:
        raise OpArgumentError(f"no kernel of backend {backend.name!r} implements an op that fits --op {op!r}")
    failed = 0
    for implementation in sorted(chosen, key=lambda i: (i.op.name, i.name)):
        verdict = gate.verify(implementation)
        failed += not verdict.passed
        word = "[green]passes[/]" if verdict.passed else "[bold red]fails[/]"
        proof = proof_level(implementation)
        console.print(f"{implementation.op.name} {implementation.name} {word} ({proof}) ", end="", highlight=False)
        console.print(verdict.detail, style="dim", highlight=False, markup=False)
    console.print(f"verdicts: {gate.file}", highlight=False)
    return 1 if failed else 0


def _backends(name: str, ops: bool, as_json: bool) -> int:
    import json

    from deepinfer.ops.errors import BackendUnavailableError
    from deepinfer.ops.registry import discover_backends

    found = discover_backends()
    if name and name not in found:
        raise BackendUnavailableError(f"no backend named {name!r}; installed: {', '.join(found) or 'none'}")
    rows = [_facts(backend, ops or backend.name == name) for backend in found.values()]
    for row in rows:
        if row["name"] == name and "ops" not in row:
            row["kernels"], row["missing"] = _proofs(found[name])
    rows.sort(key=lambda row: (not row["available"], -row["priority"], row["name"]))
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    _print_backends(rows)
    return 0


def _facts(backend: Backend, with_ops: bool) -> dict[str, Any]:
    """What there is to say about a backend; its kernels are imported only for its ops."""
    answer = backend.probe()
    facts: dict[str, Any] = {
        "name": backend.name,
        "available": answer.available,
        "reason": answer.reason,
        "contract": backend.api_version,
        "priority": backend.priority,
    }
    if answer.available and with_ops:
        from deepinfer.conformance.subject import open_runtime
        from deepinfer.ops.catalog import defined_ops
        from deepinfer.ops.proof import device_facts

        backend.load()
        runtime = open_runtime(backend)
        facts["device"] = device_facts(runtime)
        facts["ops"] = [_op_facts(backend, runtime, op) for op in defined_ops()]
    return facts


def _proofs(backend: Backend) -> tuple[list[dict[str, Any]], str]:
    """How far kernels of a backend whose device is not here are proven; without what they import, what is missing."""
    from deepinfer.ops.proof import proof_level

    try:
        backend.load()
    except ImportError as error:
        return [], str(error)
    kernels = sorted(backend.implementations, key=lambda i: (i.op.name, -i.priority, i.name))
    return [{"op": i.op.name, "implementation": i.name, "proof": proof_level(i)} for i in kernels], ""


def _op_facts(backend: Backend, runtime: Runtime, op: str) -> dict[str, Any]:
    from deepinfer.conformance.selfcheck import gate_for
    from deepinfer.ops.fallback import THROUGH_HOST
    from deepinfer.ops.proof import proof_level

    own = sorted((i for i in backend.implementations if i.op.name == op), key=lambda i: (-i.priority, i.name))
    if not own:
        here = runtime.capabilities.torch_compute
        name = "reference" if here else THROUGH_HOST
        return {"op": op, "implementation": name, "native": False, "proof": "", "verified": None}
    verdict = gate_for(runtime).known(own[0])
    return {
        "op": op,
        "implementation": ", ".join(i.name for i in own),
        "native": True,
        "proof": proof_level(own[0]),
        "verified": None if verdict is None else verdict.passed,
    }


def _print_backends(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="backends", title_justify="left")
    for column in ("name", "here", "contract", "priority"):
        table.add_column(column)
    for row in rows:
        here = "[green]available[/]" if row["available"] else f"[dim]{row['reason'] or 'not available'}[/]"
        table.add_row(row["name"], here, str(row["contract"]), str(row["priority"]))
    console.print(table)
    for row in rows:
        if "ops" in row:
            _print_ops(console, row)
        if "kernels" in row:
            _print_proofs(console, row)


def _print_proofs(console: Any, row: dict[str, Any]) -> None:
    from rich.table import Table

    if row["missing"]:
        console.print(
            f"the kernels of {row['name']} cannot be listed: {row['missing']}; install it, no device is needed",
            highlight=False,
            markup=False,
        )
        return
    table = Table(title=f"kernels of {row['name']}, whose device is not here", title_justify="left")
    for column in ("op", "kernel", "proven"):
        table.add_column(column)
    for kernel in row["kernels"]:
        table.add_row(kernel["op"], kernel["implementation"], kernel["proof"])
    console.print(table)
    counts = {level: sum(kernel["proof"] == level for kernel in row["kernels"]) for level in ("hardware", "emulated")}
    rest = len(row["kernels"]) - sum(counts.values())
    proven = f"{counts['hardware']} proven on hardware, {counts['emulated']} in an interpreter"
    console.print(f"{len(row['kernels'])} kernels: {proven}, {rest} compiled only", highlight=False)
    console.print(_LEGEND, style="dim", highlight=False)


def _print_ops(console: Any, row: dict[str, Any]) -> None:
    from rich.table import Table

    from deepinfer.ops.fallback import THROUGH_HOST

    table = Table(title=f"{row['name']} on {row['device']}", title_justify="left")
    for column in ("op", "comes from", "proven", "on this device"):
        table.add_column(column)
    words = {True: "[green]verified[/]", False: "[bold red]fails[/]", None: ""}
    for op in row["ops"]:
        style = "cyan" if op["native"] else "dim"
        table.add_row(op["op"], f"[{style}]{op['implementation']}[/]", op["proof"], words[op["verified"]])
    console.print(table)
    native = sum(op["native"] for op in row["ops"])
    rest = "through the host" if any(op["implementation"] == THROUGH_HOST for op in row["ops"]) else "on the device"
    console.print(f"{native} of {len(row['ops'])} ops are native; references run {rest}", highlight=False)
    console.print(_LEGEND, style="dim", highlight=False)
