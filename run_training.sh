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
#   #SBATCH --requeue --signal=B:USR1@300
#   ./run_training.sh train_args/train_config_fp8.json
#
# or `sbatch --nodes=4 ... run_training.sh CONFIG` from the repository's root. Without Slurm, the same on each node:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host-of-rank-0 ./run_training.sh CONFIG
#
# On SIGTERM or SIGUSR1 the run finishes its step, saves and stops: with status 75 here, requeued in a Slurm job (the
# line with --signal asks Slurm for that signal 300 seconds before the time limit), where it goes on by itself. When a
# process dies, the training is started again from the last checkpoint, as often as MAX_RESTARTS says and as long as
# each start has come further than the one before.
#
# Exit status: 0 done; 75 stopped on request, the same command goes on; 2 it cannot be done as it is configured, or the
# numbers went wrong; else it crashed.
#
# Settings: NPROC (processes a node; default: its GPUs, or 2), MASTER_PORT, MAX_RESTARTS (default 3), REQUEUE (0: the
# Slurm job is not requeued), DEMO_PROMPT, and those of scripts/setup_env.sh.
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
# statuses of train/train.py
STOPPED=75
NOT_AS_IT_IS=2
MAX_RESTARTS="${MAX_RESTARTS:-3}"
REQUEUE="${REQUEUE:-1}"
[[ "$MAX_RESTARTS" =~ ^[0-9]+$ ]] || die "MAX_RESTARTS=$MAX_RESTARTS: a number is expected"
LAUNCHER="" SIGNALLED="" STOP_ASKED="" INTERRUPTED=""

read_run_info() {
  local lines key value
  # train.py's own checks, before any process is started; its message is already on the terminal when it fails
  lines="$("$PY" "$ROOT/scripts/run_info.py" "${ARGUMENTS[@]}")" || exit "$NOT_AS_IT_IS"
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

# The command that starts the training on all nodes that this script is responsible for: LAUNCH.
choose_launcher() {
  local processes="$1" launch
  launch=("$PY" "$ROOT/train/launch.py" --nproc "$processes")

  if [[ -n "${SLURM_JOB_ID:-}" && "${SLURM_NNODES:-1}" -gt 1 && -z "${NNODES:-}" ]]; then
    local master port
    master="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
    master="${master%%$'\n'*}" # the first of them
    port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
    say "training: $SLURM_NNODES nodes x $processes processes (Slurm job $SLURM_JOB_ID, rank 0 at $master:$port)"
    LAUNCH=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1
      "${launch[@]}" --nnodes "$SLURM_NNODES" --master_addr "$master" --master_port "$port")
  elif [[ "${NNODES:-1}" -gt 1 ]]; then
    : "${NODE_RANK:?NNODES needs NODE_RANK too: 0 to NNODES - 1}" "${MASTER_ADDR:?NNODES needs MASTER_ADDR: the host of node 0}"
    say "training: node $NODE_RANK of $NNODES, $processes processes"
    LAUNCH=("${launch[@]}" --nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR"
      --master_port "${MASTER_PORT:-29500}")
  else
    say "training: $processes processes"
    LAUNCH=("${launch[@]}" ${MASTER_PORT:+--master_port "$MASTER_PORT"})
  fi
}

# What has become of the run so far: its newest checkpoint, and the last step in its metrics.
newest_checkpoint() {
  local manifest newest=""
  for manifest in "${RUN[output_dir]}"/checkpoints/step-*/manifest.json; do
    if [[ -f "$manifest" ]]; then newest="$manifest"; fi
  done
  printf '%s\n' "$newest"
}

last_step() {
  local metrics="${RUN[output_dir]}/metrics.jsonl"
  if [[ ! -f "$metrics" ]]; then
    echo 0
    return
  fi
  awk 'match($0, /"step": *[0-9]+/) {
         step = substr($0, RSTART + 7, RLENGTH - 7) + 0
         if (step > last) last = step
       }
       END { print last + 0 }' "$metrics"
}

# Runs when a signal arrives, also while `wait` waits. srun is given USR1, which it passes on to its tasks like any
# other signal; SIGTERM could be meant for srun itself.
pass_on() {
  SIGNALLED=1
  if [[ "$1" == INT ]]; then INTERRUPTED=1; else STOP_ASKED=1; fi
  local signal="$1"
  if [[ "$signal" == TERM && "${LAUNCH[0]}" == srun ]]; then signal=USR1; fi
  if [[ -n "$LAUNCHER" ]]; then kill -s "$signal" "$LAUNCHER" 2>/dev/null || true; fi
}

# Starts the training once and leaves its status in STATUS. In the background: bash takes no signal while it waits for
# a program in the foreground.
start_once() {
  rm -f "${RUN[output_dir]}/stopped.json"
  "${LAUNCH[@]}" "$ROOT/train/train.py" "${ARGUMENTS[@]}" &
  LAUNCHER=$!
  if [[ -n "$STOP_ASKED" ]]; then kill -s USR1 "$LAUNCHER" || true; fi # it came before there was anybody to tell
  while
    SIGNALLED=""
    STATUS=0
    wait "$LAUNCHER" || STATUS=$?
    [[ -n "$SIGNALLED" ]]
  do :; done
  LAUNCHER=""
  # USR1 or TERM ended the launcher itself: it had not yet begun
  if [[ -n "$STOP_ASKED" ]] && ((STATUS == 138 || STATUS == 143)); then STATUS=$STOPPED; fi
  # srun makes one status of several nodes'; what rank 0 wrote is sure
  if ((STATUS != 0)) && [[ -f "${RUN[output_dir]}/stopped.json" ]]; then STATUS=$STOPPED; fi
}

train() {
  local restarts=0 checkpoint step
  choose_launcher "$1"
  trap 'pass_on TERM' TERM
  trap 'pass_on USR1' USR1
  trap 'pass_on INT' INT
  while true; do
    checkpoint="$(newest_checkpoint)" step="$(last_step)"
    start_once
    if ((STATUS == 0)); then break; fi
    if [[ -n "$INTERRUPTED" ]]; then exit 130; fi
    if ((STATUS == STOPPED)); then stopped; fi
    if [[ -n "$STOP_ASKED" ]] || ((STATUS == NOT_AS_IT_IS)); then exit "$STATUS"; fi
    if [[ "$(newest_checkpoint)" == "$checkpoint" ]] && (($(last_step) <= step)); then
      say "training: ended with status $STATUS and came no further than step $step; not started again" >&2
      exit "$STATUS"
    fi
    if ((restarts == MAX_RESTARTS)); then
      say "training: ended with status $STATUS; not started again after $restarts restarts (MAX_RESTARTS)" >&2
      exit "$STATUS"
    fi
    restarts=$((restarts + 1))
    go_on_from_own_checkpoint
    say "training: ended with status $STATUS; restart $restarts of $MAX_RESTARTS from $(newest_name)" >&2
  done
  trap - TERM USR1 INT
}

newest_name() {
  local newest
  newest="$(newest_checkpoint)"
  if [[ -z "$newest" ]]; then
    echo "the beginning"
  else
    basename "${newest%/manifest.json}"
  fi
}

# Another start of the same run must not do again what "--resume_from_checkpoint never" or a path once asked for.
go_on_from_own_checkpoint() {
  if [[ -n "$(newest_checkpoint)" ]]; then ARGUMENTS+=(--resume_from_checkpoint auto); fi
}

# A requeued Slurm job has the command line of its first start. It goes on from what is new since then; an older
# checkpoint was there before this job, which may have ended before it began anew.
of_this_slurm_job() {
  local note="${RUN[output_dir]}/slurm_job" mine
  mine="$SLURM_JOB_ID $(identity_of_newest)"
  if [[ "${SLURM_RESTART_COUNT:-0}" != 0 && -f "$note" && "$(<"$note")" == "$SLURM_JOB_ID "* ]]; then
    if [[ "$(<"$note")" != "$mine" ]]; then
      go_on_from_own_checkpoint
      read_run_info
    fi
  elif [[ "${NODE_RANK:-0}" == 0 ]]; then
    mkdir -p "${RUN[output_dir]}"
    printf '%s\n' "$mine" >"$note"
  fi
}

# The newest checkpoint's name, and the hash that ends its manifest.
identity_of_newest() {
  local newest manifest
  newest="$(newest_checkpoint)"
  if [[ -n "$newest" ]]; then
    manifest="$(<"$newest")"
    printf '%s %s\n' "$newest" "${manifest##*'"sha256": '}"
  fi
}

# The run was stopped on request: in a Slurm job, queue it again.
stopped() {
  if [[ -n "${SLURM_JOB_ID:-}" && "$REQUEUE" != 0 && "${NODE_RANK:-0}" == 0 ]]; then
    if scontrol requeue "$SLURM_JOB_ID"; then
      say "training: stopped on request at $(newest_name); Slurm job $SLURM_JOB_ID is requeued and goes on from there"
    else
      say "training: stopped on request at $(newest_name); Slurm did not requeue job $SLURM_JOB_ID: submit it again" >&2
    fi
  else
    say "training: stopped on request at $(newest_name); the same command goes on from there"
  fi
  exit "$STOPPED"
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
if [[ -n "${SLURM_JOB_ID:-}" ]]; then of_this_slurm_job; fi
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
