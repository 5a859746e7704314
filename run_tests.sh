#!/usr/bin/env bash
# The tests: sets up what is missing, checks format, lint, types and the links of the documentation, runs pytest.
#
#   ./run_tests.sh [pytest arguments]          what a person runs: one whole proof of each kind
#   ./run_tests.sh --all [pytest arguments]    all that a machine without a GPU can run
#   ./run_tests.sh --reliability [arguments]   the tests of faults, with many trials of each
#   ./run_tests.sh --downstream [arguments]    other people's packages, installed for it, with what is exported
#   ./run_tests.sh --gpu [pytest arguments]    what needs a Hopper GPU; a skipped test fails the run
#
# With several GPUs, --gpu also runs what needs them. Without arguments it writes what ran to
# test_fp8/results/gpu_tests.json (one GPU: gpu_tests_one_gpu.json); commit that.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$ROOT"
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh

mode="cpu"
case "${1:-}" in
  -h | --help)
    sed -n '2,11p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'
    exit 0
    ;;
  --gpu | --all | --reliability | --downstream)
    mode="${1#--}"
    shift
    ;;
esac

lint() {
  "$PY" -m ruff format --check .
  "$PY" -m ruff check .
  "$PY" -m mypy
}

has_module() { "$PY" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)" "$1"; }

if [[ "$mode" == gpu ]]; then
  setup_env
  has_module pytest || die "pytest is missing: $PY -m pip install -r requirements-dev.txt"
  has_module datatrove || die "the tests prepare data: $PY -m pip install -r requirements-prep.txt"
  has_module torchao || die "the tests of torchao need it: $PY -m pip install -c requirements.txt torchao"
  gpus="$("$PY" -c 'import torch; print(torch.cuda.device_count())')"
  ((gpus > 0)) || die "--gpu needs a CUDA device and torch sees none"
  if has_module ruff && has_module mypy; then lint; else say "no ruff or mypy here: lint and types are not checked"; fi
  if ((gpus > 1)); then marks="gpu or multi_gpu"; else marks="gpu and not multi_gpu"; fi
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  # Files without such a test are not imported: what they need, a GPU node may lack.
  files="$(grep -rlE 'pytest\.mark\.(multi_)?gpu\b' tests --include='test_*.py' | tr '\n' ' ')"
  # What ran is written down where all of it was asked for.
  if (($# == 0)); then set -- --results=test_fp8/results; fi
  # A test waits for Python's imports more than for the GPU: a worker for each 40 GiB of memory.
  if has_module xdist; then
    workers="$("$PY" -c 'import torch; f = torch.cuda.get_device_properties
print(sum(f(i).total_memory // (40 * 2**30) for i in range(torch.cuda.device_count())))')"
    set -- -n "$((workers > 1 ? workers : 0))" "$@"
  fi
  # The root is given: an argument with a path elsewhere would move it there, away from pyproject.toml's settings.
  exec "$PY" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" -p scripts.pytest_gpu_run \
    -o "testpaths=$files" -m "$marks" -rs "$@"
fi

setup_env dev
"$PY" -m ruff format --check .
"$PY" -m ruff check .
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
  *) marks+=" and not reliability and not downstream" ;;
esac
# Three workers share the cores, as ranks wait for each other and for the disk; more torch threads than that only get in
# each other's way.
cores="$(nproc 2>/dev/null || sysctl -n hw.ncpu)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}"
status=0
"$PY" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 -m "$marks" "$@" || status=$?
if ! wait $!; then ((status != 0)) || status=1; fi
cat "$types"
exit "$status"
