import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samestep.errors import PlacementError
from samestep.placement.launchers import FIELDS
from samestep.placement.place import exports, place


def recorded(text):
    return dict(line.split("=", 1) for line in text.split())


# What each way in really sets: recorded from Slurm 22.05, torchrun 2.13, Open MPI 4.1.4 and MPICH 4.0.2;
# PALS, and srun with pmix and cray_shasta as their sources and users show them.
SRUN = recorded("""
    SLURM_JOBID=1 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=1
    SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=h[1-2] SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=1
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
    SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_TASKS_PER_NODE=2,1 SLURM_CPUS_ON_NODE=2 SLURM_GTIDS=0,1
""")
SRUN_SECOND_NODE = SRUN | recorded("SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=2 SLURM_GTIDS=2")
SRUN_IN_SBATCH = recorded("""
    SLURM_JOBID=2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=h[1-3] SLURM_JOB_NUM_NODES=3 SLURM_LOCALID=0
    SLURM_NNODES=3 SLURM_NODEID=2 SLURM_NODELIST=h[1-3] SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=3
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[1-3] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=4
    SLURM_STEP_TASKS_PER_NODE=2,1(x2) SLURM_TASKS_PER_NODE=2,1(x2) SLURM_CPUS_PER_TASK=1 SLURM_GTIDS=3
    SLURM_JOB_CPUS_PER_NODE=2,1(x2) SLURM_DISTRIBUTION=block
""")
SBATCH = recorded("""
    SLURM_JOBID=2 SLURM_JOB_ID=2 SLURM_JOB_NODELIST=h[1-3] SLURM_JOB_NUM_NODES=3 SLURM_LOCALID=0
    SLURM_NNODES=3 SLURM_NODEID=0 SLURM_NODELIST=h[1-3] SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=2,1(x2) SLURM_CPUS_PER_TASK=1 SLURM_CPUS_ON_NODE=2 SLURM_GTIDS=0
""")
SALLOC = recorded("""
    SLURM_JOBID=3 SLURM_JOB_ID=3 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2
    SLURM_NODELIST=h[1-2] SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_TASKS_PER_NODE=2,1 SLURM_JOB_NAME=interactive
""")
SALLOC_SHELL_ON_THE_NODE = recorded("""
    SLURM_JOBID=5 SLURM_JOB_ID=5 SLURM_JOB_NODELIST=h1 SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0 SLURM_NNODES=1
    SLURM_NODEID=0 SLURM_NODELIST=h1 SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_PTY_PORT=45789
    SLURM_STEPID=4294967290 SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=h1 SLURM_STEP_NUM_NODES=1
    SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=3 SLURM_MPI_TYPE=none
""")
SRUN_PTY = recorded("""
    SLURM_JOBID=4 SLURM_JOB_ID=4 SLURM_JOB_NODELIST=h1 SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0 SLURM_NNODES=1
    SLURM_NODEID=0 SLURM_NODELIST=h1 SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_PTY_PORT=37511
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1 SLURM_GPUS_ON_NODE=4
""")
SRUN_PMI2 = recorded("""
    PMI_FD=11 PMI_JOBID=2.1 PMI_RANK=1 PMI_SIZE=2 SLURM_MPI_TYPE=pmi2 SLURM_JOB_ID=2 SLURM_LOCALID=0
    SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=h[1-2]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)
""")
SRUN_PMIX = SRUN | recorded("PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.1.0")
SRUN_CRAY = SRUN | recorded("""
    PALS_RANKID=1 PALS_NODEID=0 PALS_LOCAL_RANKID=1 PALS_APID=7 PMI_RANK=1 PMI_SIZE=3 PMI_LOCAL_RANK=1
    PMI_LOCAL_SIZE=2
""")
TORCHRUN = recorded("""
    RANK=2 LOCAL_RANK=2 WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 GROUP_RANK=0 GROUP_WORLD_SIZE=1 ROLE_NAME=default
    ROLE_RANK=2 ROLE_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none
    TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=True
    TORCH_NCCL_ASYNC_ERROR_HANDLING=1
""")
SRUN_TORCHRUN = recorded("""
    SLURM_JOB_ID=2 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=h[1-3] SLURM_NTASKS=2
    SLURM_PROCID=1 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=h[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=1(x2) RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1
    GROUP_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=35145 TORCHELASTIC_RUN_ID=7
    TORCHELASTIC_RESTART_COUNT=0
""")
OPEN_MPI = recorded("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_MCA_ess_base_jobid=2058223617 PMIX_RANK=1
    PMIX_NAMESPACE=2058223617 PMIX_ID=2058223617.1 OMPI_UNIVERSE_SIZE=2
""")
OPEN_MPI_IN_SBATCH = recorded("""
    OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=0
    OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 PMIX_NAMESPACE=1492320257 PMIX_RANK=2 SLURM_JOB_ID=6
    SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=1
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=1(x2)
""")
HYDRA = recorded("""
    MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1 PMI_SIZE=2 HYDI_CONTROL_FD=7
    MPIR_CVAR_CH3_INTERFACE_HOSTNAME=vm
""")
HYDRA_IN_SBATCH = recorded("""
    MPI_LOCALNRANKS=2 MPI_LOCALRANKID=0 PMI_FD=5 PMI_RANK=2 PMI_SIZE=4 SLURM_JOB_ID=6 SLURM_LOCALID=0
    SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=1 SLURM_STEP_ID=1
    SLURM_STEP_NODELIST=h[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)
""")
PALS = recorded("""
    PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_APID=8f2e PALS_DEPTH=1 PMI_RANK=3
    PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PMI_UNIVERSE_SIZE=4
""")
PALS_PMIX = recorded("""
    PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_APID=8f2e PMIX_RANK=3
    PMIX_NAMESPACE=8f2e WORLD_SIZE=4
""")
MEETING = {"MASTER_ADDR": "node7", "MASTER_PORT": "12345"}
RECORDED = {name: env for name, env in globals().items() if name.isupper() and isinstance(env, dict)}


def who(p):
    return f"{p.rank}/{p.size} {p.local_rank}/{p.local_size} {p.node}/{p.nodes} {p.launcher} {p.master_addr}"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "0/1 0/1 0/1 alone None"),
        (SRUN, "1/3 1/2 0/2 slurm h1"),
        (SRUN_SECOND_NODE, "2/3 0/1 1/2 slurm h1"),
        (SRUN_IN_SBATCH, "3/4 0/1 2/3 slurm h1"),
        (SBATCH, "0/1 0/1 0/1 alone None"),
        (SALLOC, "0/1 0/1 0/1 alone None"),
        (SALLOC_SHELL_ON_THE_NODE, "0/1 0/1 0/1 alone None"),
        (SALLOC_SHELL_ON_THE_NODE | {"PMIX_RANK": "0", "PMI_RANK": "0"}, "0/1 0/1 0/1 alone None"),
        (SRUN_PTY, "0/1 0/1 0/1 alone None"),
        (SRUN | {"SLURM_PTY_PORT": "37511"}, "1/3 1/2 0/2 slurm h1"),
        (SRUN_PMI2, "1/2 0/1 1/2 slurm h1"),
        (SRUN_PMIX, "1/3 1/2 0/2 slurm h1"),
        (SRUN_CRAY, "1/3 1/2 0/2 slurm h1"),
        (SRUN | MEETING, "1/3 1/2 0/2 slurm node7"),
        (TORCHRUN, "2/3 2/3 0/1 torchrun 127.0.0.1"),
        (TORCHRUN | {"SAMESTEP_RUN": "/runs/1"}, "2/3 2/3 0/1 samestep 127.0.0.1"),
        (SRUN_TORCHRUN, "3/4 1/2 1/2 torchrun localhost"),
        (OPEN_MPI, "1/2 1/2 0/1 openmpi 127.0.0.1"),
        (OPEN_MPI_IN_SBATCH, "2/4 0/2 1/2 openmpi None"),
        (OPEN_MPI_IN_SBATCH | MEETING, "2/4 0/2 1/2 openmpi node7"),
        (HYDRA, "1/2 1/2 0/1 mpich 127.0.0.1"),
        (HYDRA_IN_SBATCH, "2/4 0/2 1/2 mpich None"),
        (PALS, "3/4 1/2 1/2 pals None"),
        (PALS_PMIX, "3/4 1/2 1/2 pals None"),
        ({"PMIX_RANK": "1", "WORLD_SIZE": "2", "PMIX_NAMESPACE": "p@1"}, "1/2 1/2 0/1 pmix 127.0.0.1"),
    ],
)
def test_the_variables_of_every_launcher_give_rank_size_and_node(env, expected):
    assert who(place(env)) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3"} | MEETING, "1/3 1/3 0/1 torchrun node7"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "0/1 0/1 0/1 torchrun None"),
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"} | MEETING,
            "5/6 1/2 2/3 torchrun node7",
        ),
        # `srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS ...'`
        (SRUN_SECOND_NODE | {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}, "2/3 0/1 1/2 slurm h1"),
        (SRUN | {"WORLD_SIZE": "3"} | MEETING, "1/3 1/2 0/2 slurm node7"),
        # a launcher unknown to us, one for each node, under srun
        (SRUN | {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"} | MEETING,
         "5/6 1/2 2/3 torchrun node7"),
        (PALS | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | MEETING, "3/4 1/2 1/2 pals node7"),
        (SALLOC | {"RANK": "1", "WORLD_SIZE": "2"} | MEETING, "1/2 1/2 0/1 torchrun node7"),
    ],
)  # fmt: skip
def test_variables_set_by_hand_are_completed_from_the_launcher_around_them(env, expected):
    assert who(place(env)) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "4"},
         "WORLD_SIZE is 4 but RANK is not set; start this with `samestep run` or set both"),
        ({"RANK": "0"}, "RANK is 0 but WORLD_SIZE is not set; start this with `samestep run` or set both"),
        (SBATCH | {"WORLD_SIZE": "4"},
         "WORLD_SIZE is 4 but RANK is not set; start this with `samestep run` or set both"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 but WORLD_SIZE is 4; count from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is -1, which is below 0; count from 0"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK is one, which is not a whole number; set one or unset RANK"),
        ({"RANK": "1_0", "WORLD_SIZE": "40"}, "RANK is 1_0, which is not a whole number; set one or unset RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 but WORLD_SIZE is 0; count from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "99999999"},
         "WORLD_SIZE is 99999999, which is more than 1048576 processes; set the real number"),
        (TORCHRUN | {"LOCAL_RANK": "3"},
         "LOCAL_RANK is 3 but LOCAL_WORLD_SIZE is 3; count from 0 to LOCAL_WORLD_SIZE - 1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"},
         "LOCAL_WORLD_SIZE is 4 and GROUP_WORLD_SIZE is 1, but WORLD_SIZE is 3; make the three agree"),
        (TORCHRUN | {"MASTER_PORT": "65536"},
         "MASTER_PORT is 65536, which is not a port; set one from 1 to 65535"),
        (TORCHRUN | {"MASTER_ADDR": "a b"},
         "MASTER_ADDR is a b, which is not a host name; set a name or an address"),
        ({"RANK": "0", "WORLD_SIZE": "2"},
         "WORLD_SIZE is 2 but MASTER_ADDR is not set; "
         "start this with `samestep run` or set both MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0"} | MEETING,
         "RANK is 4 and LOCAL_RANK is 0, so there are several nodes, but LOCAL_WORLD_SIZE is not set; "
         "set it to the number of processes on this node"),
        (SRUN | {"WORLD_SIZE": "4"},
         "WORLD_SIZE is 4 but SLURM_STEP_NUM_TASKS is 3; unset WORLD_SIZE or make them agree"),
        (SRUN | {"RANK": "1", "WORLD_SIZE": "4"} | MEETING,
         "WORLD_SIZE is 4 but SLURM_STEP_NUM_TASKS is 3; unset WORLD_SIZE or make them agree"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "3"} | MEETING,
         "RANK is 0 but SLURM_PROCID is 1; unset RANK or make them agree"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
         "SLURM_STEP_NUM_TASKS is 3 but SLURM_STEP_TASKS_PER_NODE is 2(x2), 4 in all; start this with srun"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID is 2 but SLURM_STEP_NUM_NODES is 2; "
         "count from 0 to SLURM_STEP_NUM_NODES - 1"),
        (SRUN | {"SLURM_STEP_NODELIST": "h[1-999999999]"},
         "the node list h[1-999999999] names more than 65536 nodes; write it like node[01-03,07],gpu5"),
        ({"PMIX_RANK": "1"},
         "PMIX_RANK is 1 but nothing says how many processes there are; set RANK and WORLD_SIZE"),
        ({"MPI_LOCALRANKID": "1"},
         "MPI_LOCALRANKID is 1 but nothing says which of them this is; set RANK and WORLD_SIZE"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_in_one_sentence(env, message):
    with pytest.raises(PlacementError) as raised:
        place(env)
    assert str(raised.value) == message
    assert raised.value.variable is None or raised.value.variable in message


@pytest.mark.parametrize(
    ("env", "note"),
    [
        *(
            (env, f"this process runs alone in Slurm job {job}; `srun python ...` starts one for each task, "
             "and `samestep run ...` one for each device")
            for job, env in ((2, SBATCH), (3, SALLOC), (5, SALLOC_SHELL_ON_THE_NODE), (4, SRUN_PTY))
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"} | MEETING,
         "nothing says which process of its node this is, so all are taken to be on one node; "
         "set LOCAL_RANK and LOCAL_WORLD_SIZE where there are several"),
    ],
)  # fmt: skip
def test_what_may_surprise_is_said_in_one_note(env, note):
    assert place(env).notes == (note,)


@pytest.mark.parametrize("env", [{}, SRUN, TORCHRUN, SRUN_TORCHRUN, OPEN_MPI, SRUN | MEETING])
def test_what_is_as_it_should_be_is_not_commented(env):
    assert place(env).notes == ()


@pytest.mark.slow
def test_steps_and_jobs_in_a_row_meet_at_different_ports():
    ports = {
        place(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(4_711_000, 4_711_290)
        for step in range(64)
    }
    assert len(ports) == 290 * 64
    assert min(ports) >= 10_000
    assert max(ports) < 29_000  # below torch's own, and below Linux' ephemeral ports


def test_two_runs_of_one_launcher_meet_at_different_ports():
    assert place(OPEN_MPI).master_port != place(OPEN_MPI | {"PMIX_NAMESPACE": "2058223618"}).master_port
    assert place(HYDRA, run="one").master_port != place(HYDRA, run="two").master_port


def test_all_ranks_of_a_step_meet_at_one_place():
    first, second = place(SRUN), place(SRUN_SECOND_NODE)
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)


def test_every_value_says_where_it_comes_from():
    assert place(SRUN).origin == {
        "rank": "SLURM_PROCID=1",
        "size": "SLURM_STEP_NUM_TASKS=3",
        "local_rank": "SLURM_LOCALID=1",
        "local_size": "SLURM_STEP_TASKS_PER_NODE=2,1",
        "node": "SLURM_NODEID=0",
        "nodes": "SLURM_STEP_NUM_NODES=2",
        "master_addr": "SLURM_STEP_NODELIST=h[1-2]",
        "master_port": "SLURM_JOB_ID=1 SLURM_STEP_ID=0",
    }


@pytest.mark.parametrize("env", RECORDED.values(), ids=RECORDED)
def test_what_is_exported_places_the_process_again(env):
    p = place(env | MEETING) if place(env, run="x").size > 1 else place(env)
    again = place(exports(p))
    assert [getattr(again, name) for name in FIELDS] == [getattr(p, name) for name in FIELDS]
    assert again.master_port == p.master_port


def test_exports_are_those_of_torchrun_without_its_store():
    assert exports(place(TORCHRUN)).keys() == TORCHRUN.keys() - {"TORCHELASTIC_USE_AGENT_STORE"}


def test_exports_keep_what_torchrun_says_of_its_restarts():
    restarted = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2", "ROLE_NAME": "trainer"}
    assert exports(place(restarted), restarted).items() <= restarted.items()


def test_what_a_rank_exported_before_it_called_sbatch_does_not_place_the_new_jobs_ranks():
    old = SRUN | exports(place(SRUN | {"SLURM_PROCID": "0"})) | MEETING
    new = old | {"SLURM_JOB_ID": "9", "SLURM_JOBID": "9"}
    assert who(place(new)) == "1/3 1/2 0/2 slurm h1"
    said = exports(place(new), new)
    assert (said["RANK"], said["ROLE_RANK"], said["TORCHELASTIC_RUN_ID"]) == ("1", "1", "job 9.0")
    # and what a rank starts below itself finds it as before
    assert who(place(old)) == "0/3 1/2 0/2 torchrun node7"
    assert who(place(new | TORCHRUN)) == "2/3 2/3 0/1 torchrun 127.0.0.1"
    spawned = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert place(new | spawned | {"GROUP_WORLD_SIZE": "1"}).size == 2


def test_placement_needs_no_torch():
    told = "import samestep.placement.place, sys; print([name for name in sys.modules if 'torch' in name])"
    assert subprocess.check_output([sys.executable, "-c", told], text=True) == "[]\n"


NAMES = sorted({name for env in RECORDED.values() for name in env} | {"SAMESTEP_RUN", "SLURM_CPUS_PER_TASK"})
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", " ", "\n", "1\n2", "٣", "1e3", "1_0", "4(x2)", "a[1-2]b[3]", "[", "4294967290"]),
    st.integers(-(10**30), 10**30).map(str),
    st.text(max_size=30),
)  # fmt: skip
ENVIRONMENTS = st.builds(
    lambda base, changes, removed: {k: v for k, v in (base | changes).items() if k not in removed},
    st.sampled_from([{}, *RECORDED.values()]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    st.sets(st.sampled_from(NAMES), max_size=4),
)


@settings(max_examples=400, deadline=None)
@given(ENVIRONMENTS)
@example({"RANK": "0", "WORLD_SIZE": "9" * 5000})
@example(SRUN | {"SLURM_STEP_NODELIST": "[1-65535]" * 10_000})
@example(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"})
@example(OPEN_MPI | {"PMIX_NAMESPACE": "\udce9"})
def test_any_environment_is_a_placement_or_one_sentence(env):
    try:
        p = place(env, usable=1, cores=64)
    except PlacementError as refused:
        sentence = str(refused)
    else:
        sentence = ""
        hold_what_a_placement_promises(p)
    assert not sentence or (sentence.isprintable() and ";" in sentence)


def hold_what_a_placement_promises(p):
    assert 0 <= p.local_rank < p.local_size <= p.size
    assert 0 <= p.rank < p.size
    assert 0 <= p.node < p.nodes <= p.size
    assert (p.nodes == 1) == (p.local_size == p.size)
    assert p.master_port is None or 0 < p.master_port < 65536
    assert all(line.isprintable() for line in (*p.notes, *p.origin.values()))
    assert place(exports(p) | MEETING).rank == p.rank
