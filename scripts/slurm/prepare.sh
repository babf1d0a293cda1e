#!/bin/bash
# Tokenizes what a run reads, on one node without GPUs:  sbatch scripts/slurm/prepare.sh experiment=2b
#SBATCH --job-name=sparsellm-prepare
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

exec python -m sparsellm.prepare_data "$@"
