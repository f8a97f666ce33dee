import pytest

from samestep.errors import PlacementError
from samestep.placement.launchers import hosts_of_ranks, port_choices
from samestep.placement.place import place

STEP = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "h[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("env", "run"),
    [
        ({}, "mpirun at login:41000"),
        (STEP, "job 123.4"),
        (STEP | {"SLURM_RESTART_COUNT": "2"}, "job 123.4 after 2 restarts"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "7"}, "run 7"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}, "run 7 after 1 restart"),
        (OPEN_MPI | {"PMIX_NAMESPACE": "2058223617"}, "openmpi run 2058223617"),
        (HYDRA, "mpirun at login:41000"),
    ],
)
def test_every_run_has_a_name_that_only_its_own_processes_know(env, run):
    assert place(env, run="mpirun at login:41000").run == run


def test_where_the_ranks_of_a_step_are_to_run_is_known_for_blocks_and_cycles():
    assert hosts_of_ranks(STEP, 3) == ["h1", "h1", "h2"]
    assert hosts_of_ranks(STEP | {"SLURM_DISTRIBUTION": "cyclic:block"}, 3) == ["h1", "h2", "h1"]
    assert hosts_of_ranks(STEP | {"SLURM_DISTRIBUTION": "plane=2"}, 3) == []
    assert hosts_of_ranks(HYDRA, 2) == []


def test_a_host_file_may_place_rank_0_anywhere_so_no_node_is_taken_for_its():
    here = place(STEP | {"SLURM_DISTRIBUTION": "arbitrary"})
    assert (here.master_addr, here.run) == (None, "job 123.4")
    assert place(STEP | {"SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "h2"}).master_addr == "h2"
    alone = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "h1", "SLURM_STEP_TASKS_PER_NODE": "3"}
    assert place(STEP | alone | {"SLURM_DISTRIBUTION": "arbitrary"}).master_addr == "h1"


def test_a_derived_port_has_others_beside_it_that_no_near_step_begins_with():
    choices = port_choices(place(STEP).master_port)
    assert len(set(choices)) == 8
    assert all(10_000 <= port < 29_000 for port in choices)
    near = {place(STEP | {"SLURM_STEP_ID": str(step)}).master_port for step in range(5, 40)}
    assert not near & set(choices)


@pytest.mark.parametrize(
    ("env", "usable", "cores", "said"),
    [
        (STEP, 1, 16, "slurm lets this process use 1 of 16 cores; write `srun --cpus-per-task=8`"),
        # srun does not read from sbatch what each task was to have
        (STEP | {"SLURM_CPUS_PER_TASK": "8"}, 1, 16,
         "slurm lets this process use 1 of 16 cores; write `srun --cpus-per-task=8`"),
        (STEP | {"SLURM_CPUS_PER_TASK": "8"}, 4, 16,
         "slurm lets this process use 4 of 16 cores; write `srun --cpus-per-task=8`"),
        (OPEN_MPI, 1, 16, "openmpi lets this process use 1 of 16 cores; write `mpirun --map-by slot:PE=8`"),
        (HYDRA, 1, 16, "mpich lets this process use 1 of 16 cores; bind each to 8"),
        (STEP, 1, 2, None),
        (STEP, 8, 16, None),
        (STEP | {"SLURM_CPUS_PER_TASK": "8"}, 8, 16, None),
        (TORCHRUN, 1, 16, None),  # what shares out the cores of a node binds on purpose
    ],
)  # fmt: skip
def test_a_process_with_fewer_cores_than_its_share_or_than_were_asked_for_is_noted(env, usable, cores, said):
    notes = place(env, usable=usable, cores=cores).notes
    assert [note for note in notes if "cores" in note] == ([said] if said else [])


@pytest.mark.parametrize(
    ("left", "note"),
    [
        # left over from a try without Slurm, and `srun --ntasks=3 torchrun --nproc-per-node 2`
        ("RANK=0 WORLD_SIZE=1", "WORLD_SIZE is 1; unset RANK and WORLD_SIZE for one run"),
        ("RANK=0 WORLD_SIZE=2 GROUP_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none",
         "GROUP_WORLD_SIZE is 1; start one torchrun on each node with --nnodes for one run"),
    ],
)  # fmt: skip
def test_a_task_that_runs_by_itself_in_a_step_of_several_is_noted(left, note):
    env = STEP | TORCHRUN | dict(word.split("=") for word in left.split())
    assert place(env).notes[0] == f"task 1 of 3 in this job step runs by itself, for {note}"
    # the first task may be the only one that started torchrun
    assert not any("by itself" in note for note in place(env | {"SLURM_PROCID": "0"}).notes)


@pytest.mark.parametrize("through", ["SLURM_JOB_ID SLURM_PROCID SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_container_that_lets_only_a_part_of_a_step_through_is_no_copy(through):
    env = {name: STEP[name] for name in through.split()}
    with pytest.raises(PlacementError) as raised:
        place(env)
    assert str(raised.value) == (
        "SLURM_PROCID is 1 but SLURM_STEP_ID is not set; let all variables of the step through to this process"
    )
    assert place(env | TORCHRUN | {"LOCAL_RANK": "1"}).rank == 1
    assert place(env | {"SLURM_PROCID": "0"}).size == 1  # as in a batch script


def test_a_step_of_several_nodes_without_its_tasks_per_node_is_told_what_to_set():
    env = {name: value for name, value in STEP.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    with pytest.raises(PlacementError) as raised:
        place(env)
    assert str(raised.value) == (
        "SLURM_STEP_NUM_NODES is 2 but nothing says how many processes this node has; "
        "set RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
    )
    assert place(env | {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}).local_size == 2


@pytest.mark.parametrize(
    ("env", "variable"),
    [
        ({"RANK": "four", "WORLD_SIZE": "4"}, "RANK"),
        ({"WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
    ],
)
def test_an_error_carries_the_variable_to_correct(env, variable):
    with pytest.raises(PlacementError) as raised:
        place(env)
    assert raised.value.variable == variable
