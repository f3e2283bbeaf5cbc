"""Reading the launcher's variables: every launcher, shells that look like a launcher, and contradictions."""

import pytest

from fourfold.environment import Place, first_host, read_environment, rendezvous
from fourfold.errors import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "4100123",
    "SLURM_JOB_NODELIST": "nid[0003-0004,0012]",
    "SLURM_NTASKS": "20",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = BATCH_SHELL | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_NODELIST": "nid[0003-0004,0012]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
IN_TORCHRUN = Place(5, 1, 8, 4, "torchrun", restarts=2)
IN_SRUN = Place(17, 1, 20, 4, "slurm")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"LOCAL_RANK": "0", "MASTER_ADDR": "host0"}, None, id="leftovers"),
        pytest.param(TORCHRUN, IN_TORCHRUN, id="torchrun"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Place(0, 0, 2, 2, "torchrun"), id="set by hand"
        ),
        pytest.param(SRUN, IN_SRUN, id="srun"),
        pytest.param(SRUN | {"SLURM_RESTART_COUNT": "3"}, Place(17, 1, 20, 4, "slurm", 3), id="requeued"),
        pytest.param(SRUN | {"RANK": "17", "WORLD_SIZE": "20"}, IN_SRUN, id="exported inside srun"),
        pytest.param(SRUN | {"WORLD_SIZE": "20"}, IN_SRUN, id="size exported by the batch script"),
        pytest.param(SRUN | TORCHRUN, IN_TORCHRUN, id="srun starts torchrun"),
        pytest.param(BATCH_SHELL | TORCHRUN, IN_TORCHRUN, id="torchrun in a batch script"),
        pytest.param(BATCH_SHELL, None, id="batch script"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, None, id="salloc on the login node"),
        pytest.param(
            SRUN | ONE_TASK | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "20"},
            None,
            id="salloc's interactive step",
        ),
        pytest.param(SRUN | ONE_TASK | {"SLURM_NTASKS": "1"}, None, id="srun --pty of a shell"),
    ],
)
def test_the_place_is_read_from_each_launchers_variables(environ: dict[str, str], place: Place | None) -> None:
    assert read_environment(environ) == place


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "not RANK"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "not LOCAL_RANK"),
        (TORCHRUN | {"RANK": "first"}, "RANK = 'first' .* not a whole number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK = '-1' .* not a whole number"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "20"}, "RANK = 0 contradicts SLURM, for which this is task 17 of 20"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE = 8 contradicts SLURM"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_environment(environ)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("nid[0003-0007,0012],login1", "nid0003"),
        ("node[001-004,007]", "node001"),
        ("node[9,11]", "node9"),
        ("login1,nid[1-3]", "login1"),
        ("gpu-a.site.org", "gpu-a.site.org"),
        ("rack[2-3]node[05-08]-ib,x", "rack2node05-ib"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_rendezvous() -> None:
    assert rendezvous(TORCHRUN, IN_TORCHRUN) == ("host0", 1234)
    assert rendezvous({"MASTER_ADDR": "host0"}, IN_TORCHRUN) == ("host0", 29500)
    assert rendezvous(SRUN, IN_SRUN) == ("nid0003", 10_000 + 4100123 % 20_000)
    assert rendezvous(SRUN | {"MASTER_ADDR": "nid0004", "MASTER_PORT": "7"}, IN_SRUN) == ("nid0004", 7)
    with pytest.raises(UserError, match="not MASTER_ADDR"):
        rendezvous({}, IN_TORCHRUN)
