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
PYTHONPATH="$work/site" "$python" -c 'import deepinfer, sys; assert deepinfer.__file__.startswith(sys.argv[1])' "$work"
PYTHONPATH="$work/site" "$(dirname "$python")/lint-imports" --config .importlinter
