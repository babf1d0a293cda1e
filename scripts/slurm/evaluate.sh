#!/bin/bash
# Scores a run's last checkpoint on the GPUs of one node:  sbatch scripts/slurm/evaluate.sh checkpoint=runs/large
#SBATCH --job-name=sparsellm-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

exec python -m torch.distributed.run --standalone --nproc-per-node="$SLURM_GPUS_ON_NODE" -m sparsellm.evaluate "$@"
