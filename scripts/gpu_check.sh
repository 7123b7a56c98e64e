#!/usr/bin/env bash
# What only a machine with a GPU can tell, from a fresh clone: the tests that need one, what forwards cost by their rows,
# and whether drafted and plain decoding say the same, and how fast. Exit codes: 0, 1 (something is wrong), 2 (no GPU).
#
#   scripts/gpu_check.sh
#   MODEL=./my-model PYTHON=/opt/venv/bin/python scripts/gpu_check.sh
#
# MODEL: any that `foretell --model` takes. PYTHON: one that has foretell's dependencies; by default .venv is made.
set -euo pipefail
cd "$(dirname "$0")/.."

no_gpu() {
    echo "gpu_check: $1" >&2
    exit 2
}

nvidia-smi -L 2>/dev/null | grep -q '^GPU' || no_gpu "there is no GPU here: nvidia-smi lists none"
if [ -z "${PYTHON:-}" ]; then
    make --silent .venv/tests || exit 1
    PYTHON=.venv/bin/python
fi
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    no_gpu "PyTorch sees no GPU here: install a build of it for this driver, or set PYTHON"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
model="${MODEL:-smollm2-135m-instruct}"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
foretell() { "$PYTHON" -c 'from foretell.cli import main; main()' "$@"; }
failed=0

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$PYTHON" -m pytest -m cuda tests/models tests/engine/test_invariance.py || failed=1
foretell bench forward --model "$model" --device cuda --rows 1,4,8,16,32,64,128,256 --json >"$results/forward" || failed=1
foretell bench decode --model "$model" --device cuda --kind question --kind code --kind list --json >"$results/greedy" ||
    failed=1
foretell bench decode --model "$model" --device cuda --kind question --kind code --kind list --temperature 0.8 --json \
    >"$results/sampled" || failed=1
"$PYTHON" scripts/gpu_report.py "$results"/forward "$results"/greedy "$results"/sampled || failed=1
exit $failed
