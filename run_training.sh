#!/usr/bin/env bash
# The main job: sets up what is missing, prepares the embedded corpus if it is used and not there, trains, and
# generates a few lines from the result.
#
#   ./run_training.sh                                            a tiny model on the embedded corpus, two GPUs at most
#   ./run_training.sh train_args/train_config_fp8.json           all GPUs of this machine
#   ./run_training.sh CONFIG --learning_rate 1e-4 --max_steps 500    any key of CONFIG; relative paths: from here
#
# Without CONFIG all relative paths, as of output/ and data/, are in the repository, wherever it is called from.
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
#   HOSTFILE=hosts ./run_training.sh CONFIG            lines of "name slots=8", as DeepSpeed has them; the first has rank 0
#
# On Ctrl-C the run finishes its step, saves and stops, with status 75; on the second, or while no training is under way,
# it ends at once, with status 130. SIGTERM, SIGUSR1 and SIGHUP stop it in the same way: with status 75 here, requeued in a
# Slurm job (the line with --signal asks Slurm for that signal 300 seconds before the time limit), where it goes on by
# itself. When a process dies, the training is started again from the last checkpoint, as often as MAX_RESTARTS says and
# as long as each start comes further than the one before; one that does not is repeated once, after 30 seconds.
#
# Exit status: 0 done; 75 stopped on request, the same command goes on; 130 ended by Ctrl-C, without a save; 2 it cannot
# be done as it is configured, as on a full or read-only disk, or the numbers went wrong; else it crashed.
#
# Settings: NPROC (processes a node; default: its GPUs, or 2), MASTER_PORT, MAX_RESTARTS (default 3), REQUEUE (0: the
# Slurm job is not requeued), DEMO_PROMPT, and those of scripts/setup_env.sh. In a Slurm job with Pyxis: CONTAINER_IMAGE
# (for srun --container-image; the ranks run there, this script and what it prepares here), CONTAINER_MOUNTS (FROM:TO,...
# beside the repository and the working folder), CONTAINER_PYTHON (default python3).
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
  "" | --*)
    cd "$ROOT"
    ;;
esac
setup_env
# in this process: the signals of Slurm's --signal=B: are for it
exec "$PY" -u "$ROOT/train/launch.py" --supervise "$@"
