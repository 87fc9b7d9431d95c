#!/usr/bin/env bash
# Checks the import contracts of .importlinter on a wheel install in a folder of its own.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
python=$(cd "$root" && realpath -s "$(command -v "$python")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" .
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/wheel/*.whl
cd "$work"
cp "$root/.importlinter" .
# -S leaves out .pth files, and with them the import hook of an editable install that would shadow the wheel.
libraries=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH="$work/site:$libraries"
"$python" -S -c 'import deepinfer, sys; assert deepinfer.__file__.startswith(sys.argv[1]), deepinfer.__file__' "$work"
"$python" -S -c 'import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())'
