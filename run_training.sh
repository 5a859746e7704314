#!/usr/bin/env bash
# Train a model. The script installs missing packages, prepares the built-in corpus if the configuration uses it,
# trains the model, and generates a few lines of text with it.
#
#   ./run_training.sh                                            train a tiny model on the built-in corpus
#   ./run_training.sh train_args/train_config_fp8.json           train on all GPUs of this host
#   ./run_training.sh CONFIG --learning_rate 1e-4 --max_steps 500    override any key of CONFIG
#   ./run_training.sh --version                                  print the version
#
# Without CONFIG, the script uses at most two GPUs. Relative paths are then relative to the repository root. With
# CONFIG, they are relative to the current folder.
#
# Run the same command again to resume from the newest checkpoint. To start from scratch, pass
# --resume_from_checkpoint never.
#
# Without a GPU, two processes train with the CPU reference implementation of the FP8 modules. This is slow, but it runs
# the same training job.
#
# To train on several nodes in a Slurm job, put the repository on a shared file system. srun starts one launcher per
# node:
#
#   #SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --exclusive
#   #SBATCH --requeue --signal=B:USR1@300
#   ./run_training.sh train_args/train_config_fp8.json
#
# You can also run `sbatch --nodes=4 ... run_training.sh CONFIG` in the repository root. Without Slurm, run this
# command on each node:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host-of-rank-0 ./run_training.sh CONFIG
#
# Pods of Kubeflow and Vertex AI already have MASTER_ADDR: pass NNODES=$WORLD_SIZE NODE_RANK=$RANK.
#
# Ctrl-C finishes the current step, saves a checkpoint and exits with status 75. A second Ctrl-C, or Ctrl-C outside
# training, exits immediately with status 130. SIGTERM, SIGUSR1 and SIGHUP also save a checkpoint and exit with status
# 75. A Slurm job is then requeued and resumes. In the example, --signal=B:USR1@300 makes Slurm send SIGUSR1 300
# seconds before the time limit.
#
# If a process crashes, the training restarts from the last checkpoint, at most MAX_RESTARTS times until it saves the next
# checkpoint. A restart without progress is repeated only once, after 30 seconds.
#
# CONFIG is read once. Restarts, and requeues of the same Slurm job, use this configuration even if CONFIG is edited. To
# apply a change, stop the training and run the command again.
#
# Exit status:
#   0    The training is complete.
#   2    The configuration or the disk must be fixed first, or the training diverged.
#   75   The training was stopped on request. The same command resumes it.
#   130  The training was stopped by Ctrl-C without a checkpoint.
# Any other status means that the training crashed.
#
# Environment variables:
#   NPROC             number of processes per node; default: number of GPUs, or 2 without a GPU
#   MASTER_PORT       port of the process with rank 0
#   MAX_RESTARTS      maximum number of restarts between two checkpoints; default: 3
#   REQUEUE           set to 0 to not requeue the Slurm job
#   DEMO              set to 0 to not generate text after the training
#   DEMO_PROMPT       prompt for this text
# scripts/setup_env.sh lists more variables. For a Slurm job with Pyxis:
#   CONTAINER_IMAGE   image for srun --container-image; only the ranks run in the container
#   CONTAINER_MOUNTS  mounts FROM:TO,... in addition to the repository and the working folder
#   CONTAINER_PYTHON  Python in the container; default: python3
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Slurm runs a copy of the batch script from its spool folder. The repository is the folder where sbatch was called.
if [[ ! -f "$ROOT/train/train.py" && -n "${SLURM_SUBMIT_DIR:-}" ]]; then ROOT="$SLURM_SUBMIT_DIR"; fi
if [[ ! -f "$ROOT/scripts/setup_env.sh" ]]; then
  echo "run_training.sh: $ROOT is not the repository root; run the script (or sbatch) in the repository root" >&2
  exit 1
fi
# shellcheck source=scripts/setup_env.sh
source "$ROOT/scripts/setup_env.sh"

case "${1:-}" in
  -h | --help)
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$ROOT/run_training.sh"
    exit 0
    ;;
  --version)
    sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/pyproject.toml"
    exit 0
    ;;
  "" | --*)
    cd "$ROOT"
    ;;
esac
setup_env
# exec, because Slurm's --signal=B: signals this process
exec "$PY" -u "$ROOT/train/launch.py" --supervise "$@"
