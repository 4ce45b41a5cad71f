#!/usr/bin/env bash
# sbatch slurm/train_8b.sh [option=value …]: a model of 8 billion parameters on one node of 8 GPUs.
# bash slurm/train_8b.sh --dry-run [option=value …]: the commands alone. See docs/howto/cluster.md.
#SBATCH --job-name=train_8b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
set -euo pipefail

# Under sbatch this file is a copy elsewhere, and the checkout is where sbatch was called.
if [ -z "${CHECKOUT:-}" ]; then
  if [ -n "${SLURM_JOB_ID:-}" ]; then CHECKOUT=$SLURM_SUBMIT_DIR; else CHECKOUT=$(dirname "$0")/..; fi
fi
exec "$CHECKOUT/slurm/run.sh" experiment=train_8b "$@"
