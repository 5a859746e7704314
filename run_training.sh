#!/usr/bin/env bash
# The main job: sets up what is missing, prepares the embedded corpus if it is used and not there, trains, and
# generates a few lines from the result.
#
#   ./run_training.sh                                            a tiny model on the embedded corpus
#   ./run_training.sh train_args/train_config_fp8.json           all GPUs of this machine
#   ./run_training.sh CONFIG --learning_rate 1e-4 --max_steps 500    any key of CONFIG; relative paths: from here
#
# Run again, it goes on from the newest checkpoint; --resume_from_checkpoint never starts anew. Without a GPU it
# trains with two processes on the CPU reference of the FP8 modules: slowly, but the same job.
#
# Several nodes, in a Slurm job (on a shared file system; one launcher a node is started by srun):
#
#   #SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --exclusive
#   ./run_training.sh train_args/train_config_fp8.json
#
# or `sbatch --nodes=4 ... run_training.sh CONFIG` from the repository's root. Without Slurm, the same on each node:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host-of-rank-0 ./run_training.sh CONFIG
#
# Settings: NPROC (processes a node; default: its GPUs, or 2), MASTER_PORT, DEMO_PROMPT, and those of
# scripts/setup_env.sh.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Slurm runs a copy of a batch script from its spool folder; the repository is where sbatch was called.
if [[ ! -f "$ROOT/train/train.py" && -n "${SLURM_SUBMIT_DIR:-}" ]]; then ROOT="$SLURM_SUBMIT_DIR"; fi
if [[ ! -f "$ROOT/scripts/setup_env.sh" ]]; then
  echo "run_training.sh: $ROOT is not the repository's root; call it (or sbatch) from there" >&2
  exit 1
fi
# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"

case "${1:-}" in
  -h | --help)
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$ROOT/run_training.sh"
    exit 0
    ;;
  "" | --*) CONFIG="$ROOT/train_args/train_config_tiny.json" ;;
  *)
    CONFIG="$1"
    shift
    ;;
esac
ARGUMENTS=("$CONFIG" "$@")

read_run_info() {
  local lines key value
  # train.py's own checks, before any process is started; its message is already on the terminal when it fails
  lines="$("$PY" "$ROOT/scripts/run_info.py" "${ARGUMENTS[@]}")" || exit 1
  declare -gA RUN=()
  while IFS='=' read -r key value; do RUN["$key"]="$value"; done <<<"$lines"
}

prepare_corpus() {
  local folder="$1" tokenizer
  tokenizer="$(dirname "$folder")/tokenizer-4096"
  install_requirements "$ROOT/requirements-prep.txt"
  say "data: preparing the embedded corpus (the Python standard library's own text) in $folder"
  if [[ ! -f "$tokenizer/tokenizer_config.json" ]]; then
    "$PY" "$ROOT/train/train_tokenizer.py" --input python-stdlib --vocab_size 4096 --output "$tokenizer"
  fi
  "$PY" "$ROOT/train/prepare_data.py" --input python-stdlib --tokenizer "$tokenizer" --output "$folder" \
    --eval_fraction 0.05 # of about 600 files: enough of them for the evaluation to mean something
}

# Of several nodes that start on one shared folder, one prepares and the others wait.
prepare_corpus_once() {
  local lock
  mkdir -p "$(dirname "$1")"
  if command -v flock >/dev/null 2>&1; then
    exec {lock}>"$(dirname "$1")/.lock"
    flock "$lock"
    [[ -f "$1/manifest.json" ]] || prepare_corpus "$1"
    exec {lock}>&-
  else
    prepare_corpus "$1"
  fi
}

free_port() { "$PY" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

processes_per_node() {
  if [[ -n "${NPROC:-}" ]]; then
    [[ "$NPROC" =~ ^[1-9][0-9]*$ ]] || die "NPROC=$NPROC: a number of processes is expected"
    echo "$NPROC"
  elif ((HAS_GPU)); then
    local count
    count="$("$PY" -c 'import torch; print(torch.cuda.device_count())')"
    ((count > 0)) || die "there is a GPU, but torch sees none (CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-unset})"
    echo "$count"
  else
    echo 2
  fi
}

train() {
  local processes="$1" torchrun
  torchrun=("$PY" -m torch.distributed.run --nproc_per_node "$processes")

  if [[ -n "${SLURM_JOB_ID:-}" && "${SLURM_NNODES:-1}" -gt 1 && -z "${NNODES:-}" ]]; then
    local master port
    master="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
    master="${master%%$'\n'*}" # the first of them
    port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
    say "training: $SLURM_NNODES nodes x $processes processes (Slurm job $SLURM_JOB_ID, rendezvous at $master:$port)"
    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
      "${torchrun[@]}" --nnodes "$SLURM_NNODES" --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d \
      --rdzv_endpoint "$master:$port" "$ROOT/train/train.py" "${ARGUMENTS[@]}"
  elif [[ "${NNODES:-1}" -gt 1 ]]; then
    : "${NODE_RANK:?NNODES needs NODE_RANK too: 0 to NNODES - 1}" "${MASTER_ADDR:?NNODES needs MASTER_ADDR: the host of node 0}"
    say "training: node $NODE_RANK of $NNODES, $processes processes"
    "${torchrun[@]}" --nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" \
      --master_port "${MASTER_PORT:-29500}" "$ROOT/train/train.py" "${ARGUMENTS[@]}"
  elif [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
    # deepspeed's launcher drops this variable as soon as it is given a number of GPUs, and cannot read UUIDs
    say "training: $processes processes (torchrun)"
    "${torchrun[@]}" --standalone "$ROOT/train/train.py" "${ARGUMENTS[@]}"
  else
    say "training: $processes processes (deepspeed)"
    # quiet: the launcher's own messages; train.py's stay
    deepspeed --quiet --num_gpus "$processes" --master_port "${MASTER_PORT:-$(free_port)}" \
      "$ROOT/train/train.py" "${ARGUMENTS[@]}"
  fi
}

generate() {
  say ""
  say "demo: python fp8_inference_demo/fp8_inference.py --model ${RUN[output_dir]} --prompt ..."
  "$PY" "$ROOT/fp8_inference_demo/fp8_inference.py" --model "${RUN[output_dir]}" --precision "${RUN[precision]}" \
    --recipe "${RUN[recipe]}" --prompt "${DEMO_PROMPT:-def __init__(self, }" --max_new_tokens 96 \
    --temperature 0.8 --top_k 50 --seed 1 --ignore_eos
}

# The repository's root is where output/ and data/ belong when the script is called from elsewhere without a CONFIG.
if [[ "$CONFIG" == "$ROOT/train_args/train_config_tiny.json" ]]; then cd "$ROOT"; fi
setup_env
read_run_info
PROCESSES="$(processes_per_node)"
cores="$(nproc 2>/dev/null || sysctl -n hw.ncpu)"
# Each process would otherwise start a thread a core; with several of them that is many times slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > PROCESSES ? cores / PROCESSES : 1))}"
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
if [[ -n "${RUN[missing_corpus]}" ]]; then prepare_corpus_once "${RUN[missing_corpus]}"; fi
case "${RUN[state]}" in
  finished)
    say "training: ${RUN[output_dir]} is finished (${RUN[resumes_from]}), nothing to train. To start anew:" \
      "--resume_from_checkpoint never; elsewhere: --output_dir DIR"
    ;;
  resume)
    say "training: ${RUN[output_dir]} goes on from ${RUN[resumes_from]}" \
      "(to start anew: --resume_from_checkpoint never)"
    train "$PROCESSES"
    ;;
  *) train "$PROCESSES" ;;
esac
if [[ "${NODE_RANK:-0}" == 0 && -n "${RUN[saves]}" ]]; then generate; fi
