#!/usr/bin/env bash
# Install missing packages, check format, lint, types and documentation links, and run the tests.
#
#   ./run_tests.sh [pytest arguments]          the default tests: each behavior once
#   ./run_tests.sh --all [pytest arguments]    all tests that need no GPU
#   ./run_tests.sh --reliability [arguments]   many trials of injected faults
#   ./run_tests.sh --downstream [arguments]    exported folders in other packages, which are installed for it
#   ./run_tests.sh --downstream --gpu          exported folders in vLLM on a GPU (test_fp8/check_exports.py)
#   ./run_tests.sh --docs [pytest arguments]   the commands of README.md and docs/ in fresh clones
#   ./run_tests.sh --gpu [pytest arguments]    tests that need a Hopper GPU; a skipped test fails the run
#
# With several GPUs, --gpu also runs the multi-GPU tests. Without arguments it writes a report to
# test_fp8/results/gpu_tests.json (one GPU: gpu_tests_one_gpu.json); commit that file.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$ROOT"
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh

mode="cpu"
case "${1:-}" in
  -h | --help)
    sed -n '2,13p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'
    exit 0
    ;;
  --gpu | --all | --reliability | --downstream | --docs)
    mode="${1#--}"
    shift
    ;;
esac

if [[ "$mode" == downstream && "${1:-}" == --gpu ]]; then
  shift
  setup_env
  exec "$PY" test_fp8/check_exports.py --output test_fp8/results/exports.json "$@"
fi

style() {
  "$PY" -m ruff format --check .
  "$PY" -m ruff check .
}

has_module() { "$PY" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)" "$1"; }

if [[ "$mode" == gpu ]]; then
  setup_env
  has_module pytest || die "pytest is missing: $PY -m pip install -r requirements-dev.txt"
  has_module datatrove || die "datatrove is missing: $PY -m pip install -r requirements-prep.txt"
  has_module torchao || die "torchao is missing: $PY -m pip install -c requirements.txt torchao"
  gpus="$("$PY" -c 'import torch; print(torch.cuda.device_count())')"
  ((gpus > 0)) || die "--gpu needs a CUDA device, but torch finds none"
  if has_module ruff && has_module mypy; then
    style
    "$PY" -m mypy
  else
    say "ruff or mypy is missing: skipping lint and types"
  fi
  if ((gpus > 1)); then marks="gpu or multi_gpu"; else marks="gpu and not multi_gpu"; fi
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  # Only import files with GPU tests: a GPU node may lack the packages that other files need.
  files="$(grep -rlE 'pytest\.mark\.(multi_)?gpu\b' tests --include='test_*.py' | tr '\n' ' ')"
  # Write a report only for a complete run.
  if (($# == 0)); then set -- --results=test_fp8/results; fi
  # Tests spend more time on Python imports than on the GPU: use one worker per 40 GiB of GPU memory.
  if has_module xdist; then
    workers="$("$PY" -c 'import torch; f = torch.cuda.get_device_properties
print(sum(f(i).total_memory // (40 * 2**30) for i in range(torch.cuda.device_count())))')"
    set -- -n "$((workers > 1 ? workers : 0))" "$@"
  fi
  # Set the root explicitly: a path argument elsewhere would move it away from the settings in pyproject.toml.
  exec "$PY" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" -p scripts.pytest_gpu_run \
    -o "testpaths=$files" -m "$marks" -rfEs "$@"
fi

setup_env dev
style
"$PY" -m codespell_lib *.md docs examples fp8_inference_demo model scripts test_fp8 tests train -- *.sh
scripts/build_docs.sh "$PY"
types="$(mktemp)"
trap 'rm -f "$types"' EXIT
"$PY" -m mypy >"$types" 2>&1 &
marks="not gpu and not multi_gpu"
if [[ "$mode" == cpu ]]; then marks+=" and not slow"; fi
case "$mode" in
  reliability) set -- tests/reliability "$@" ;;
  downstream)
    marks="downstream"
    set -- tests/train/test_downstream.py "$@"
    ;;
  docs)
    marks="docs"
    set -- tests/test_docs_commands.py "$@"
    ;;
  *) marks+=" and not reliability and not downstream and not docs" ;;
esac
# Three workers share the cores, since ranks often wait for each other and for the disk. More torch threads would
# compete for the cores.
cores="$(nproc 2>/dev/null || sysctl -n hw.ncpu)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}"
status=0
"$PY" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 -m "$marks" "$@" || status=$?
if ! wait $!; then ((status != 0)) || status=1; fi
cat "$types"
exit "$status"
