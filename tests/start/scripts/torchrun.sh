#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# samestep submit --profile gpu-node --nodes 2 --launcher torchrun --python python train.py --lr 0.1

export SRUN_CPUS_PER_TASK=32
export OMP_NUM_THREADS=8
export SAMESTEP_STOPPED=/home/me/runs/train_"$SLURM_JOB_ID".stopped

port=$(python -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
srun --kill-on-bad-exit=1 python \
    -m torch.distributed.run --nnodes=2 --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$(hostname):$port" \
    train.py --lr 0.1
code=$?
if [ -e "$SAMESTEP_STOPPED" ]; then rm "$SAMESTEP_STOPPED"; code=75; fi
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
