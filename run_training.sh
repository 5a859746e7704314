#!/usr/bin/env bash
# Train a model: install missing packages, prepare the embedded corpus if the configuration uses it, train, and generate
# a few lines with the result.
#
#   ./run_training.sh                                            a tiny model on the embedded corpus, at most two GPUs
#   ./run_training.sh train_args/train_config_fp8.json           all GPUs of this machine
#   ./run_training.sh CONFIG --learning_rate 1e-4 --max_steps 500    override any key of CONFIG
#
# With CONFIG, relative paths start at the current folder. Without CONFIG, they start at the repository's root.
# The same command resumes from the newest checkpoint; to start from scratch, pass --resume_from_checkpoint never.
# Without a GPU, two processes train with the CPU reference of the FP8 modules. This is slow, but it is the same job.
#
# Several nodes in a Slurm job (on a shared file system; srun starts one launcher per node):
#
#   #SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --exclusive
#   #SBATCH --requeue --signal=B:USR1@300
#   ./run_training.sh train_args/train_config_fp8.json
#
# or `sbatch --nodes=4 ... run_training.sh CONFIG` from the repository's root. Without Slurm, run the command on each node:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host-of-rank-0 ./run_training.sh CONFIG
#
# Ctrl-C: the run finishes its step, saves and stops with status 75. A second Ctrl-C, or one outside training, ends it at
# once with status 130. SIGTERM, SIGUSR1 and SIGHUP also save and stop it. The status is then 75; a Slurm job is requeued
# and resumes. (The line with --signal asks Slurm to send the signal 300 seconds before the time limit.)
# If a process crashes, the training restarts from the last checkpoint, at most MAX_RESTARTS times and while each start
# makes progress. A start without progress is repeated once, after 30 seconds.
#
# Exit status: 0 done; 75 stopped on request, the same command resumes; 130 ended by Ctrl-C without a save; 2 the
# configuration or the disk must be fixed first, or the training diverged; anything else is a crash.
#
# Settings: NPROC (processes per node; default: its GPUs, or 2), MASTER_PORT, MAX_RESTARTS (default 3), REQUEUE (0: do
# not requeue the Slurm job), DEMO_PROMPT, and the settings of scripts/setup_env.sh. In a Slurm job with Pyxis:
# CONTAINER_IMAGE (for srun --container-image; only the ranks run in the container), CONTAINER_MOUNTS (FROM:TO,... in
# addition to the repository and the working folder), CONTAINER_PYTHON (default python3).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Slurm runs a copy of the batch script from its spool folder. The repository is the folder where sbatch was called.
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
  "" | --*)
    cd "$ROOT"
    ;;
esac
setup_env
# exec, because Slurm's --signal=B: signals this process
exec "$PY" -u "$ROOT/train/launch.py" --supervise "$@"
