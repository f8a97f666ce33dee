import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import UsageError
from samestep.start.profiles import Profile, load_profile, profile_paths
from samestep.start.slurm import Job, batch_script, output_of

SCRIPTS = Path(__file__).with_name("scripts")
EMPTY = {"HOME": "/nonexistent"}

ASKED = {
    "idris-v100": "--profile idris-v100 --nodes 2 --account abc@v100 --module pytorch/2 train.py --epochs 3",
    "idris-a100": "--profile idris-a100 --account abc@a100 --module pytorch-gpu/py3 train.py",
    "idris-h100": "--profile idris-h100 --account abc@h100 --python /py train.py",
    "lumi-g": "--profile lumi-g --nodes 2 --account project_1 --container a.sif train.py",
    "snellius-h100": "--profile snellius-h100 --module 2024 --setup '. ./venv/bin/activate' train.py",
    "laptop": "--profile laptop --python /py train.py",
    "leonardo-booster": "--profile leonardo-booster --nodes 4 --account EUHPC_1 --container a.sif train.py",
    "torchrun": "--profile gpu-node --nodes 2 --launcher torchrun --python python train.py --lr 0.1",
    "mail": "--profile gpu-node --mem 64G --reservation course --exclusive --mail-user me@x.org --mail-type END,FAIL "
    "--gpu-option gpus-per-node --label --launcher samestep --nodes 2 --wait 60 --python python train.py",
    "scale": "--profile gpu-node --scale '-n 1,2,4 --repeat 3' --python python train.py --lr 0.1",
    "array": "--profile one-gpu --array 0-3%2 --python python --env 'NOTE=two words' sweep.py",
    "array-ranks": "--profile gpu-node --array-ranks --python python train.py",
    "cpu-node": "--profile cpu-node --setup '. ./venv/bin/activate' --option --exclusive --time 5 -m my.fit",
}


def _samestep(*words: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "XDG"))}
    command = [str(Path(sys.executable).with_name("samestep")), *words]
    return subprocess.run(
        command, cwd=cwd, env=clean | {"HOME": str(cwd)} | env, capture_output=True, text=True
    )


def _script(profile: Profile, script: str = "train.py", args: tuple[str, ...] = (), **more: object) -> str:
    return batch_script(Job(profile, script, args, **more), ["samestep", "submit"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ASKED)
def test_the_script_is_the_one_that_is_kept(name: str, tmp_path: Path) -> None:
    for script in ("train.py", "sweep.py"):
        (tmp_path / script).write_text("from samestep import Checkpoint\n")
    done = _samestep("submit", "--dry-run", *shlex.split(ASKED[name]), cwd=tmp_path)
    assert done.stderr == ""
    script = done.stdout.replace(str(tmp_path), "/home/me")
    kept = SCRIPTS / f"{name}.sh"
    if os.environ.get("SAMESTEP_REWRITE"):
        kept.write_text(script)
    assert script == kept.read_text()
    assert len(script.splitlines()) < 50


def test_the_page_on_slurm_shows_a_script_as_it_is_written() -> None:
    page = Path(__file__).parents[2] / "docs" / "slurm.md"
    assert f"```bash\n{(SCRIPTS / 'idris-v100.sh').read_text()}```" in page.read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("-n 1 --stepps 9", "--stepps"),
        ("other.py -q", "--scale other.py -q has the word other.py, which is no option; leave it out"),
        ("--vary foo=1,2", "--vary foo=1,2 names no setting"),
        ("-n x", "-n x is not a list"),
    ],
)
def test_a_wrong_option_of_scale_is_found_before_the_job_waits(tmp_path: Path, wrong: str, said: str) -> None:
    (tmp_path / "train.py").touch()
    done = _samestep("submit", "--dry-run", "--scale", wrong, "train.py", cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (2, True)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert _samestep("submit", "--dry-run", "train.py", cwd=tmp_path).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_home_directory_beside_scratch_is_remarked_before_the_job_waits(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    said = _samestep("submit", "train.py", cwd=tmp_path, PATH="", SCRATCH=str(scratch)).stderr
    files = f"samestep submit: the run's files go to {tmp_path}/runs in the home directory; "
    assert f"{files}SAMESTEP_RUN_DIR={scratch} is made for them" in said
    better = {"PATH": "", "SCRATCH": str(scratch), "SAMESTEP_RUN_DIR": str(scratch)}
    assert "home directory" not in _samestep("submit", "train.py", cwd=tmp_path, **better).stderr


def test_without_sbatch_the_script_is_written_and_the_reason_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = _samestep("submit", "train.py", cwd=tmp_path, PATH="")
    assert done.returncode == 2
    (script,) = (tmp_path / "runs").glob("train-*.sh")
    assert f"sbatch is not on this machine; submit runs/{script.name} where it is" in done.stderr


def _shell_words(script: str, folder: Path, **env: str) -> list[list[str]]:
    """What the script's shell gives to srun, with every other program out of its reach."""
    (folder / "srun").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> words\nprintf "\\0\\0" >> words\n')
    (folder / "srun").chmod(0o755)
    (folder / "job.sh").write_bytes(script.encode(errors="surrogateescape"))
    environ = {"PATH": str(folder), **env}
    done = subprocess.run(["/bin/bash", "job.sh"], cwd=folder, env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr
    calls = (folder / "words").read_bytes().split(b"\0\0\0")[:-1]
    (folder / "words").unlink()
    return [[os.fsdecode(word) for word in call.split(b"\0")] for call in calls]


_CANARIES = (
    "$(>canary)",
    "`>canary`",
    ";>canary",
    "|>canary",
    "&>canary",
    "\\",
    "'",
    '"',
    "!",
    "#",
    "~",
    "*",
    "${x}",
)
_WORDS = st.lists(
    st.sampled_from(_CANARIES) | st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8")),
    max_size=4,
).map("".join)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(args=st.lists(_WORDS.filter(bool), max_size=5), value=_WORDS, image=_WORDS)
def test_the_shell_sees_exactly_the_given_words(args: list[str], value: str, image: str) -> None:
    profile = Profile(python="python", container=f"i{image}", env={"GIVEN": value}, gpus_per_node=2)
    script = batch_script(Job(profile, "train.py", tuple(args)), ["samestep", *args, value])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (call,) = _shell_words(script, folder)
        assert not (folder / "canary").exists()
    inside = ["apptainer", "exec", "--nv", f"i{image}", "python", "train.py"]
    assert call == ["--kill-on-bad-exit=1", *inside, *args]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text() | _WORDS, min_size=3, max_size=3))
def test_a_value_is_refused_or_stays_within_its_own_line(texts: list[str]) -> None:
    account, name, argument = texts
    plain = _script(Profile(account="a"), args=("b",), name="c")
    try:
        script = _script(Profile(account=account), args=(argument,), name=name)
    except UsageError:
        return
    assert len(script.split("\n")) == len(plain.split("\n"))
    assert [line.partition("=")[0] for line in script.split("\n")[:5]] == [
        line.partition("=")[0] for line in plain.split("\n")[:5]
    ]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"account": "--uid=0"}, "account '--uid=0' would be read as another option"),
        ({"account": "a\nrm -r x"}, "holds a newline, which would end its line"),
        ({"partition": "a\0b"}, "holds a NUL"),
        ({"setup": ("true\nrm -r x",)}, "setup 'true\\nrm -r x' holds a newline"),
        ({"env": {"A": "1\n2"}}, "env A '1\\n2' holds a newline"),
        ({"env": {"A;x": "1"}}, "env 'A;x' is not a name of a variable"),
        ({"options": ("exclusive",)}, "option 'exclusive' is not an option of sbatch; write it as --name"),
        ({"time": "1:000:0"}, "time '1:000:0' is not a time limit"),
        ({"time": "2h"}, "time '2h' is not a time limit; write minutes, 02:00:00 or 1-12:00:00"),
        ({"signal": "soon"}, "signal 'soon' is not a signal"),
        ({"gpu_option": "gpus"}, "gpu-option 'gpus' is unknown; write gres or gpus-per-node"),
        ({"nodes": 0}, "nodes 0 leaves no node to run on; use at least 1"),
        ({"gpus": 4, "gpus_per_node": 6}, "gpus-per-node 6 is more than the 4 of such a node; use at most 4"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        _script(replace(Profile(), **changed))  # type: ignore[arg-type]
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"script": "-c"}, "script '-c' would be read as another option"),
        ({"args": ("a\nb",)}, "argument 'a\\nb' holds a newline"),
        ({"name": "a/b"}, "name 'a/b' would be read as a directory"),
        ({"array": "all"}, "array 'all' is not a list of array elements"),
        ({"array": "0,5-1"}, "array '0,5-1' counts down from 5 to 1; write 1-5"),
        ({"array": "0-3", "scale": ()}, "scale starts its runs itself; leave --array"),
        (
            {"array": "0-3", "one_run": True},
            "array-ranks makes its own array of single processes; leave array 0-3 out",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_a_sentence(more: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        _script(Profile(), **more)  # type: ignore[arg-type]
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("limit", "signal"),
    [
        ("01:00:00", "USR1@120"),
        ("5", "USR1@90"),
        ("2:30", "USR1@15"),
        ("2", None),
        ("1-0", "USR1@120"),
        ("0:10", None),
    ],
)
def test_the_signal_leaves_half_of_a_short_job(limit: str, signal: str | None) -> None:
    lines = [line for line in _script(Profile(time=limit)).splitlines() if "--signal" in line]
    assert lines == ([f"#SBATCH --signal={signal}"] if signal else [])


@pytest.mark.parametrize(
    ("profile", "changed", "cores"),
    [
        ("idris-v100", {}, 10),
        ("idris-v100", {"gpus_per_node": 1}, 10),
        ("idris-a100", {}, 8),
        ("leonardo-booster", {"gpus_per_node": 2, "tasks_per_node": 1}, 16),
        ("cpu-node", {"tasks_per_node": 3}, 10),
        ("one-gpu", {"cpus_per_task": 2}, 2),
    ],
)
def test_a_process_gets_its_share_of_the_cores(profile: str, changed: dict[str, int], cores: int) -> None:
    script = _script(replace(load_profile(profile, EMPTY), **changed))  # type: ignore[arg-type]
    assert f"#SBATCH --cpus-per-task={cores}\n" in script
    assert f"export SRUN_CPUS_PER_TASK={cores}\n" in script


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("import torch, samestep\nsamestep.init()\n", False),
        ("from samestep import Checkpoint\n", True),
        ("import samestep\nrun = samestep.Checkpoint('ck')\n", True),
        ("import signal\nsignal.signal(signal.SIGUSR1, print)\n", True),
        ("import lightning\n", True),
        ("import beside\n", True),
    ],
)
def test_a_script_without_a_checkpoint_gets_no_signal_that_would_end_it_early(
    tmp_path: Path, source: str, asks: bool
) -> None:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "beside.py").write_text("import samestep\nmake = samestep.Checkpoint\n")
    script = _samestep("submit", "--dry-run", "--profile", "cpu-node", "train.py", cwd=tmp_path).stdout
    assert ("--signal" in script) == asks


def test_a_wait_that_has_no_effect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for launcher in ("srun", "torchrun"):
        done = _samestep(
            "submit", "--dry-run", "--wait", "60", "--launcher", launcher, "train.py", cwd=tmp_path
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert f"wait 60 has no effect with launcher {launcher}" in done.stderr
    done = _samestep("submit", "--dry-run", "--wait", "60", "--array-ranks", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_option_that_begins_another_is_answered_with_that(tmp_path: Path) -> None:
    done = _samestep("submit", "--gpus", "4", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "--gpus-per-node" in done.stderr


def test_the_output_is_where_the_user_is_told_to_look() -> None:
    assert output_of(Job(Profile(), "a/train.py"), "12") == "runs/train_12.out"
    assert output_of(Job(Profile(), "train.py", array="3-5"), "12") == "runs/train_12_3.out"
    assert output_of(Job(Profile(), "train.py", run_dir="50%j"), "12") == "50%j/train_12.out"
    assert output_of(Job(Profile(options=("--output=logs/%x.%j",)), "train.py"), "12") == "logs/train.12"
    assert output_of(Job(Profile(options=("--output=logs/%N.out",)), "train.py"), "12") is None


def test_an_output_of_the_users_own_is_asked_for_once() -> None:
    script = _script(Profile(options=("--exclusive", "--output=logs/%x.%j")))
    assert script.count("--output") == 1
    assert "#SBATCH --output=logs/%x.%j\n" in script


def test_a_mistyped_script_is_found_before_it_waits_in_the_queue(tmp_path: Path) -> None:
    done = _samestep("submit", "trian.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"samestep submit: there is no script 'trian.py' in {tmp_path}; write its path\n"


def test_every_shipped_profile_loads_and_says_what_it_is() -> None:
    names = list(profile_paths(EMPTY))
    sites = [
        "idris-a100",
        "idris-h100",
        "idris-v100",
        "leonardo-booster",
        "lumi-g",
        "snellius-a100",
        "snellius-h100",
    ]
    assert names == sorted([*sites, "cpu-node", "gpu-node", "laptop", "one-gpu"])
    assert all(load_profile(name, EMPTY).about for name in names)
    assert all(load_profile(name, EMPTY).source.startswith("http") for name in sites)


@pytest.mark.parametrize("name", ["idris-a100", "idris-h100", "idris-v100"])
def test_the_python_is_that_which_submits_unless_the_user_loads_another(name: str) -> None:
    profile = load_profile(name, EMPTY)
    assert f"srun --kill-on-bad-exit=1 {sys.executable} train.py" in _script(profile)
    assert "srun --kill-on-bad-exit=1 python train.py" in _script(replace(profile, modules=("pytorch/2",)))


def test_a_users_profile_is_found_and_says_only_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "samestep" / "profiles"
    folder.mkdir(parents=True)
    (folder / "ours.toml").write_text('base = "idris-v100"\naccount = "abc@v100"\n[env]\nA = "1"\n')
    (tmp_path / "one-gpu.toml").write_text('about = "ours"\n')
    env = {"XDG_CONFIG_HOME": str(tmp_path), "SAMESTEP_PROFILES": str(tmp_path)}
    ours = load_profile("ours", env)
    assert (ours.account, ours.cores, ours.env) == ("abc@v100", 40, {"A": "1"})
    assert load_profile("one-gpu", env).about == "ours"


def test_a_users_profile_may_have_the_one_it_hides_as_its_base(tmp_path: Path) -> None:
    own = tmp_path / "own"
    site = tmp_path / "site" / "samestep" / "profiles"
    for folder, text in (own, 'account = "abc"'), (site, 'time = "10:00"'):
        folder.mkdir(parents=True)
        (folder / "idris-v100.toml").write_text(f'base = "idris-v100"\n{text}\n')
    env = {"XDG_CONFIG_HOME": str(tmp_path / "site"), "SAMESTEP_PROFILES": str(own)}
    both = load_profile("idris-v100", env)
    assert (both.account, both.time, both.cores) == ("abc", "10:00", 40)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpu = 4\n", "has the key 'gpu', which no profile has; write gpus"),
        ('gpus = "4"\n', "has gpus = '4', which is not a whole number from 0; write one"),
        ("nodes = true\n", "has nodes = True, which is not a whole number"),
        ('modules = "a"\n', "has modules = 'a', which is not a list of texts"),
        ("gpus = \n", "cannot be read as TOML"),
        ('base = "mine"\n', "profile 'mine' is its own base (mine > mine); leave one base out"),
        ('base = "idris"\n', "profile 'idris' is in no profile directory; write"),
    ],
)
def test_a_wrong_profile_is_named_with_what_to_write(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UsageError) as refused:
        load_profile("mine", EMPTY | {"SAMESTEP_PROFILES": str(tmp_path)})
    assert sentence in str(refused.value)


def test_profiles_lists_them_and_explains_one(tmp_path: Path) -> None:
    assert "idris-v100" in _samestep("profiles", cwd=tmp_path).stdout
    explained = _samestep("profiles", "leonardo-booster", cwd=tmp_path).stdout
    assert tomllib.loads(explained.rpartition("\n/")[0])["partition"] == "boost_usr_prod"
    listed = json.loads(_samestep("profiles", "--json", cwd=tmp_path).stdout)
    assert listed["schema_version"] == 1
    assert listed["profiles"]["idris-a100"]["gpus"] == 8
    wrong = _samestep("profiles", "idris-a10", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "write idris-a100 or idris-" in wrong.stderr
    (tmp_path / "mine.toml").write_text("gpus =")
    listed = _samestep("profiles", cwd=tmp_path, SAMESTEP_PROFILES=str(tmp_path))
    assert listed.returncode == 2
    assert "mine.toml cannot be read as TOML" in listed.stderr
    assert "idris-v100" in listed.stdout
