#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# samestep submit --profile gpu-node --scale '-n 1,2,4 --repeat 3' --python python train.py --lr 0.1

export SRUN_CPUS_PER_TASK=8
export OMP_NUM_THREADS=8

python -m samestep scale -n 1,2,4 --repeat 3 train.py --lr 0.1
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
