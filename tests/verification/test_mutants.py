"""Parity catches every planted fault."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutants import Mutant
from mutants_of_dtypes import DTYPES
from mutants_of_experts import EXPERTS
from mutants_of_families import FAMILIES
from mutants_of_gpt_oss import GPT_OSS_FAULTS
from mutants_of_latents import LATENTS
from mutants_of_layers import LAYERS
from mutants_of_linear_attention import LINEAR_ATTENTION
from mutants_of_multi_token import MULTI_TOKEN
from mutants_of_optimizers import OPTIMIZERS
from mutants_of_parallelism import PARALLELISM
from mutants_of_preferences import PREFERENCES
from mutants_of_runs import RUNS
from mutants_of_steps import STEPS
from mutation import mutated
from pool import Pool
from published_faults import PUBLISHED
from tiny_runs import tiny_run
from tuned_products import parity_on_cpu

from fourfold.config.run import RunConfig
from fourfold.verification.parity_report import ParityReport

FAULTS = [
    *LAYERS,
    *PARALLELISM,
    *STEPS,
    *EXPERTS,
    *OPTIMIZERS,
    *FAMILIES,
    *GPT_OSS_FAULTS,
    *LATENTS,
    *LINEAR_ATTENTION,
    *MULTI_TOKEN,
    *PREFERENCES,
    *RUNS,
    *DTYPES,
]


def mutant_body(rank: int, world_size: int, run: RunConfig, mutant: Mutant) -> ParityReport | None:
    with mutated(f"fourfold.{mutant.module}", mutant.old, mutant.new):
        return parity_on_cpu(run, steps=2, against=mutant.against)


def run_of(mutant: Mutant, folder: Path) -> RunConfig:
    return tiny_run(mutant.model, mutant.grid, output_dir=str(folder), **mutant.sections)


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.fault)
def test_a_fault_changes_the_function_that_it_names(mutant: Mutant) -> None:
    """If this fails, the code that the fault changes was rewritten. Define the fault for the new code."""
    module, _, function = mutant.module.partition(":")
    with mutated(f"fourfold.{mutant.module}", mutant.old, mutant.new) as changed:
        assert changed == [function], f"write the place as {module}:{changed[0]}"


def test_no_two_faults_have_one_name() -> None:
    assert [fault for fault, count in Counter(mutant.fault for mutant in FAULTS).items() if count > 1] == []


def test_every_published_bug_has_a_fault() -> None:
    assert {fault for fault, _ in PUBLISHED.values()} <= {mutant.fault for mutant in FAULTS}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.fault)
def test_parity_catches(mutant: Mutant, pool: Pool, tmp_path: Path) -> None:
    run = run_of(mutant, tmp_path)
    report = pool.run(run.parallel.world_size, mutant_body, run, mutant)[0]
    assert not report.ok, report.record()
