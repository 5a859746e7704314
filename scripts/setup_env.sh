# shellcheck shell=bash
# Choose a Python environment and install missing packages. run_training.sh and run_tests.sh source this file, set
# ROOT to the repository root, and call
#
#   setup_env [dev]
#
# With dev, setup_env also installs the packages for the tests and missing optional packages.
#
# setup_env sets PY (the Python to use) and HAS_GPU (0 or 1), and puts the folder of PY first on PATH. PY is the
# Python in the active environment (venv or conda). Without an active environment, PY is a Python that has all
# packages. If there is none, PY is the Python in ROOT/.venv, which the first run creates. In an active environment
# other than ROOT/.venv, missing packages are installed, but installed packages are not replaced.
#
# Environment variables:
#   SETUP_REPLACE         set to 1 to allow replacing packages in the active environment
#   PYTHON                path of the Python that creates .venv
#   TORCH_INDEX_URL       package index for torch on a host without a GPU. By default, torch's index of CPU builds is
#                         used if it is reachable and pip has no other index. pip's default wheel for Linux installs 5 GB
#                         of CUDA packages.
#   PIP_*                 options of pip
#   TORCH_EXTENSIONS_DIR  folder for DeepSpeed's compiled extensions; default: torch_extensions in the environment

MIN_PYTHON="3.11"
# Tested versions of torch. Transformer Engine 2.20.2 was measured with torch 2.11 on an H200.
TORCH_CPU="2.13.0"
TORCH_GPU="2.11.0"
CPU_BUILDS="https://download.pytorch.org/whl/cpu"
ANSWER_S=8 # timeout in seconds for the index of CPU builds

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "set-up: bash >= 4.4 is required, but this is bash $BASH_VERSION" >&2
  exit 1
fi

say() { printf '%s\n' "$*" || true; } # ignore errors if standard output is closed

die() {
  printf 'set-up: %s\n' "$*" >&2
  exit 1
}

python_is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the path of the Python in the active environment, or nothing. Ignores the base environment of conda.
active_python() {
  if [[ -n "${VIRTUAL_ENV:-}" ]]; then
    printf '%s\n' "$VIRTUAL_ENV/bin/python"
  elif [[ -n "${CONDA_PREFIX:-}" && "${CONDA_DEFAULT_ENV:-}" != "base" ]]; then
    printf '%s\n' "$CONDA_PREFIX/bin/python"
  elif python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
    command -v python3 # a virtual environment that is first on PATH without being activated
  fi
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13 python; do
    if command -v "$candidate" >/dev/null 2>&1 && python_is_new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  candidate="$(python3 --version 2>/dev/null || true)"
  die "Python >= $MIN_PYTHON is required (found: ${candidate:-none}). Install Python, or run PYTHON=/path/to/python3.12 $0"
}

has_torch() {
  "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
}

# Prints the requirements in the given files that pip must install. Prints remarks to standard error.
missing_requirements() {
  "$PY" "$ROOT/scripts/check_requirements.py" ${EXACT:+"$EXACT"} ${OPTIONAL:+"$OPTIONAL"} "$@"
}

need_compiler() {
  local compiler
  for compiler in ${CXX:+"$CXX"} c++ g++ clang++; do
    if command -v "$compiler" >/dev/null 2>&1; then
      export CXX="$compiler" # by default, torch uses c++ to build extensions
      return
    fi
  done
  die "no C++ compiler found. DeepSpeed requires a compiler for its CPU communication op. Run apt-get install g++, or set CXX"
}

need_python_headers() {
  local include
  include="$("$PY" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  [[ -f "$include/Python.h" ]] ||
    die "$include/Python.h is missing. DeepSpeed's build requires the Python headers. Run apt-get install python3-dev"
}

# torch cannot build extensions if the path of its libraries contains a space, because it does not quote the path.
need_path_without_space() {
  [[ "$1" != *[[:space:]]* ]] ||
    die "the path $1 contains white space, so torch cannot build extensions. Activate an environment" \
      "in a path without white space (python3 -m venv /path/to/env; . /path/to/env/bin/activate)$2, and try again"
}

# If KEEP is set, pip gets the installed versions as constraints. It then fails instead of replacing a package.
pip_install() {
  { [[ -z "${KEEP:-}" ]] || "$PY" -m pip list --format=freeze --disable-pip-version-check; } |
    "$PY" -m pip install --use-pep517 --disable-pip-version-check -c /dev/stdin "$@" ||
    die "pip could not install $*. See the messages above. Check the network, or set PIP_INDEX_URL to a mirror${KEEP:+. $KEEP}"
}

# Returns success if a package index is configured for pip. torch is then installed from this index too.
pip_is_configured() {
  [[ "$("$PY" -m pip config list 2>/dev/null)" =~ \.(index-url|extra-index-url|find-links|no-index)= ]]
}

# Returns success if the URL $1 is reachable. The alarm also limits the time for the DNS lookup.
answers() {
  "$PY" -c '
import signal, sys, urllib.request
signal.alarm(int(sys.argv[2]))
urllib.request.urlopen(sys.argv[1]).close()' "$1" "$ANSWER_S" 2>/dev/null
}

install_torch() {
  has_torch "$PY" && return
  if ((HAS_GPU)); then
    say "set-up: installing torch $TORCH_GPU (CUDA)"
    pip_install "torch==$TORCH_GPU"
    return
  fi
  local index="${TORCH_INDEX_URL:-}"
  if [[ -z "$index" && "$OSTYPE" == linux* ]] && ! pip_is_configured; then
    if answers "$CPU_BUILDS/torch/"; then
      index="$CPU_BUILDS"
    else
      say "set-up: $CPU_BUILDS is not reachable; installing pip's default build of torch with up to 5 GB of CUDA packages"
    fi
  fi
  say "set-up: installing torch $TORCH_CPU${index:+ from $index}"
  # among equal versions, pip prefers a version with a local part, such as 2.13.0+cpu
  pip_install "torch==$TORCH_CPU" ${index:+--extra-index-url "$index"}
}

make_venv() {
  local site=()
  if "$PY" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then
    site=(--system-site-packages) # keep the torch installed in the image
  fi
  say "set-up: creating .venv with $("$PY" --version)"
  "$PY" -m venv "${site[@]}" "$ROOT/.venv" || {
    rm -rf "$ROOT/.venv" # without pip, the next start could not use it
    die "$PY could not create .venv. See the messages above"
  }
}

# Sets PY, EXACT and KEEP, and creates .venv if necessary. EXACT is "--exact" if PY is in .venv, which has pinned
# versions. KEEP is the reason why installed packages must not be replaced.
choose_environment() {
  local files=("$@") prefix
  EXACT="" KEEP=""
  PY="$(active_python)"
  prefix="${PY%/bin/*}"
  if [[ -n "$PY" && ! "$prefix" -ef "$ROOT/.venv" ]]; then
    python_is_new_enough "$PY" ||
      die "the active environment has $("$PY" --version 2>&1 || true), but Python >= $MIN_PYTHON is required"
    need_path_without_space "$prefix" ""
    if [[ "${SETUP_REPLACE:-}" == 1 ]]; then return; fi
    KEEP="Packages in the active environment $prefix are not replaced. Deactivate it to use $ROOT/.venv, or set SETUP_REPLACE=1"
    "$PY" "$ROOT/scripts/check_requirements.py" --keep "${files[@]}" ||
      die "package versions in the active environment do not match; see the list above. $KEEP"
    return
  fi
  if [[ ! -x "$ROOT/.venv/bin/python" ]]; then
    PY="$(find_python)"
    if has_torch "$PY" && [[ -z "$(missing_requirements "${files[@]}" 2>/dev/null)" ]]; then
      return # an image or a node on which all packages are installed
    fi
  fi
  need_path_without_space "$ROOT/.venv" ", or clone the repository into such a path"
  [[ -x "$ROOT/.venv/bin/python" ]] || make_venv
  PY="$ROOT/.venv/bin/python"
  python_is_new_enough "$PY" || die ".venv is damaged, or its Python is older than $MIN_PYTHON. Remove .venv and try again"
  if ! grep -q 'include-system-site-packages = true' "$ROOT/.venv/pyvenv.cfg"; then EXACT="--exact"; fi
}

install_requirements() {
  local file listed specs
  for file in "$@"; do
    listed="$(missing_requirements "$file")"
    [[ -n "$listed" ]] || continue
    mapfile -t specs <<<"$listed"
    say "set-up: installing ${specs[*]}"
    if [[ "$file" == */requirements-gpu.txt ]]; then
      command -v nvcc >/dev/null 2>&1 ||
        die "nvcc is missing. Transformer Engine requires it to compile its torch extension. Install CUDA, or load the CUDA module"
      # Compile against the installed torch, not against a torch in pip's build environment.
      pip_install setuptools wheel pybind11
      pip_install --no-build-isolation -c "$ROOT/constraints-gpu.txt" "${specs[@]}"
    else
      pip_install "${specs[@]}"
    fi
  done
}

# Makes Transformer Engine load torch's cuDNN. With a system cuDNN, it fails or its attention is 5 times slower.
use_torchs_cudnn() {
  local home
  home="$("$PY" -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])' 2>/dev/null || true)"
  [[ -n "$home" ]] || return 0
  export CUDNN_HOME="$home"
  export LD_LIBRARY_PATH="$home/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# Compiles the DeepSpeed op for communication between CPU ranks, which takes a minute. Each environment has its own
# folder, because torch compiles the op again when the environment changes.
build_communication() {
  local prefix log
  prefix="$(dirname "$(dirname "$PY")")"
  [[ -f "$prefix/pyvenv.cfg" || -d "$prefix/conda-meta" ]] || return 0 # with a system Python, the first run builds the op
  export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$prefix/torch_extensions}"
  if [[ -f "$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm.done" ]]; then return; fi
  say "set-up: building DeepSpeed's CPU communication op; this happens only once and takes about a minute"
  mkdir -p "$TORCH_EXTENSIONS_DIR"
  log="$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm.log"
  PYTHONPATH="$ROOT" "$PY" -c 'from train.engine.process_group import init_distributed; init_distributed()' >"$log" 2>&1 ||
    die "DeepSpeed's CPU communication op could not be built: $(<"$log")"
  : >"$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm.done"
}

setup_env() {
  local files=("$ROOT/requirements.txt")
  HAS_GPU=0 OPTIONAL="${1:+--optional}"
  if [[ "$(nvidia-smi -L 2>/dev/null || true)" == *GPU\ 0:* ]]; then HAS_GPU=1; fi
  if ((HAS_GPU)); then files+=("$ROOT/requirements-gpu.txt"); fi
  if [[ "${1:-}" == dev ]]; then files+=("$ROOT/requirements-prep.txt" "$ROOT/requirements-dev.txt"); fi

  # One of several set-ups in the same folder installs the packages, and the others wait.
  local lock=""
  if command -v flock >/dev/null 2>&1 && { exec {lock}>"$ROOT/.setup.lock"; } 2>/dev/null; then
    flock -n "$lock" || { say "set-up: waiting for another set-up in $ROOT" && flock "$lock"; } || true
  fi
  choose_environment "${files[@]}"
  need_compiler
  ((HAS_GPU)) || need_python_headers
  PATH="$(dirname "$PY"):$PATH"
  export PATH PY HAS_GPU EXACT KEEP
  install_torch
  install_requirements "${files[@]}"
  command -v ninja >/dev/null 2>&1 || die "the package ninja is installed, but the command ninja is not on PATH. Add its folder to PATH"
  if ((HAS_GPU)); then
    use_torchs_cudnn
  else
    export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
    build_communication
  fi
  if [[ -n "$lock" ]]; then exec {lock}>&-; fi
}
