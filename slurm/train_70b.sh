#!/usr/bin/env bash
# sbatch slurm/train_70b.sh [option=value …]: a model of 70 billion parameters on 16 nodes of 8 GPUs.
# bash slurm/train_70b.sh --dry-run [option=value …]: the commands alone. See docs/howto/cluster.md.
#SBATCH --job-name=train_70b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --open-mode=append
set -euo pipefail

# A checkpoint has 1 TB (14 bytes a parameter), which takes these seconds at 2 GB/s; hence the 600 s above.
export SAVE_SECONDS=${SAVE_SECONDS:-510}

# Under sbatch this file is a copy elsewhere, and the checkout is where sbatch was called.
if [ -z "${CHECKOUT:-}" ]; then
  if [ -n "${SLURM_JOB_ID:-}" ]; then CHECKOUT=$SLURM_SUBMIT_DIR; else CHECKOUT=$(dirname "$0")/..; fi
fi
exec "$CHECKOUT/slurm/run.sh" experiment=train_70b "$@"
