"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from command_line import Cli, Result, exit_code
from forked_starter import ForkedStarter
from hypothesis import HealthCheck, settings
from pool import Pool, prepare_fork_server
from report_pages import chromium
from results_file import ResultsFile
from sampling import Sampling, add_options, mark_long_matrices, wants_gpus
from tiny_corpus import make_corpus

from fourfold.launch import worker_processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Garbage collections take a fifth of the time in which the tests are imported, and find nothing.
gc.disable()
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of ``sampling`` and of ``results_file``. Hide GPUs from all tests unless ``-m gpu`` is given.

    pytest calls this before it imports the conftest.py of subfolders, some of which import Triton.
    """
    if not wants_gpus(pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr):
        # Set this before torch looks for a GPU. Worker processes inherit it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Set this before anything imports Triton.
    add_options(parser)
    parser.addoption("--results", type=Path, metavar="FILE", help="Write a JSON line for every test, as it ends.")


def pytest_configure(config: pytest.Config) -> None:
    """Sample tests and write results if the options ask for it."""
    seed, minutes = config.getoption("--sample"), config.getoption("--minutes")
    if seed is not None or minutes is not None:
        config.pluginmanager.register(Sampling(seed, minutes))
    results = config.getoption("--results")
    if results is not None and not hasattr(config, "workerinput"):  # with xdist, workers report to the first process
        config.pluginmanager.register(ResultsFile(results))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` selects, mark most cases of long parameter lists as slow."""
    mark_long_matrices(items)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections, because every job ends with a collection."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze_what_stays() -> Iterator[None]:
    """Exclude objects that a test file has imported or cached from later garbage collections. There can be a million of
    them."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Include all objects in garbage collections again, so that Python can free them when it exits."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Start worker processes for tests on several ranks, at first use: ``pool.run(world_size, body, *args)``."""
    with contextlib.closing(Pool()) as workers:
        yield workers


@pytest.fixture(autouse=True, scope="session")
def forked_starter() -> Iterator[None]:
    """Fork the local workers of jobs in this process from the server that forks the workers of ``pool``."""
    prepare_fork_server()
    with patch.object(worker_processes, "STARTED_BY", ForkedStarter()):
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread in this process, because the pool's workers need all other cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def heed_interrupts() -> None:
    """Handle Ctrl-C even if the tests run as a background job, because a shell makes background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide environment variables of launchers, in case a launcher has started the tests or another test has set
    them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs the command line in this process."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        return (exit_code(*arguments), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare a tiny corpus of bytes, and return its prefix (its path without the file extension)."""
    return make_corpus(tmp_path_factory.mktemp("corpora"))


# Close the browser at the end of the module, because its event loop would disturb other modules that use asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a headless Chromium. Skip the test if there is none."""
    with chromium() as started:
        yield started


@pytest.fixture
def alone() -> Iterator[None]:
    """Start a default process group that contains only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
