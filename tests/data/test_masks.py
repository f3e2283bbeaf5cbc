"""The user's own masks, and the effect of masks on the user's data."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import ArrayLike

from fourfold.config.loss_masks import GoldfishConfig, MasksConfig
from fourfold.data.dataset import Windows
from fourfold.data.goldfish import Goldfish
from fourfold.data.mask_preview import MaskStatistics, longest_run, preview
from fourfold.data.masks import answers_only, build_masks, document_boundary, labels_of
from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError


def windows_of(*rows: list[int], documents: list[list[int]] | None = None) -> Windows:
    tokens = np.array(rows)
    return Windows(tokens, np.zeros_like(tokens) if documents is None else np.array(documents), np.arange(len(rows)))


def no_ones(windows: Windows) -> np.ndarray:
    return windows.tokens[:, 1:] != 1


def broken(windows: Windows) -> np.ndarray:
    return windows.tokens


def fills_the_disk(windows: Windows) -> np.ndarray:
    raise OSError(errno.ENOSPC, "No space left on device", "cache.npy")


def test_masks_of_the_run_file() -> None:
    config = MasksConfig(
        goldfish=GoldfishConfig(strategy="hash"),
        functions=[f"{__name__}:no_ones"],
    )
    masks, goldfish = build_masks(config, ByteTokenizer(), 32, 4)
    assert masks[:2] == [document_boundary, answers_only]
    labels = labels_of(windows_of([65, 58, 1, 2, 10, 3], documents=[[0, 0, 0, 0, 1, 1]]), masks)
    assert labels.tolist() == [[58, -100, 2, -100, 3]]
    assert goldfish.exempt == (256,)
    assert goldfish.look_back == 13


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:mask", "'nowhere:mask' cannot be imported"),
        ("json:mask", "'json:mask' cannot be imported"),
        ("json", "is not a function; write it as 'module:function'"),
        (":x", "cannot be imported"),
        ("json:__name__", "is not a function"),
    ],
)
def test_names_that_are_not_functions_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_masks(MasksConfig(functions=[name]), None, 32, 4)


def test_a_function_that_does_not_return_a_mask_is_refused() -> None:
    masks, _ = build_masks(MasksConfig(functions=[f"{__name__}:broken"]), None, 32, 4)
    with pytest.raises(UserError, match=r"broken' returned int64 \(1, 3\); a mask must be bool \(1, 2\)"):
        labels_of(windows_of([1, 2, 3]), masks)


def test_an_os_error_in_a_users_function_names_the_function() -> None:
    masks, _ = build_masks(MasksConfig(functions=[f"{__name__}:fills_the_disk"]), None, 32, 4)
    with pytest.raises(UserError, match=r"masks\.functions: '.*fills_the_disk' failed: .*No space left .* 'cache.npy'"):
        labels_of(windows_of([1, 2, 3]), masks)


def test_longest_run() -> None:
    assert longest_run(np.array([[1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=bool)) == 3
    assert longest_run(np.zeros((2, 0), dtype=bool)) == 0
    assert longest_run(np.ones((1, 5), dtype=bool)) == 5


@dataclass
class AsSamples:
    """Stands for a corpus's samples, and always returns the windows that a test gives it."""

    windows: Windows
    seq_length: int = 1000
    look_back: int = 0

    def read(self, numbers: ArrayLike) -> Windows:
        return self.windows


def statistics_of(windows: Windows, config: GoldfishConfig, first_sample: int = 0) -> MaskStatistics:
    mask = Goldfish(config, (), first_sample)
    found = preview(AsSamples(windows), [document_boundary], mask, samples=0, tokens=10_000).statistics
    assert found is not None
    return found


def test_statistics_and_warnings() -> None:
    tokens = np.random.default_rng(0).integers(0, 5000, (10, 1001))
    windows = Windows(tokens, np.zeros_like(tokens), np.arange(10))
    good = statistics_of(windows, GoldfishConfig(strategy="hash", start_step=9), 90)
    assert good.trainable == good.tokens == 10_000
    assert good.drop_rate == pytest.approx(0.25, abs=0.02)
    assert 15 < good.longest_undropped_span < 60
    assert good.warnings() == []
    # Each document has 20 tokens. With h = 13, its first 13 tokens are never dropped.
    packed = Windows(tokens, np.arange(1001)[None] // 20 + np.zeros((10, 1), dtype=np.int64), np.arange(10))
    short = statistics_of(packed, GoldfishConfig(strategy="hash"))
    assert short.drop_rate < 0.1
    assert len(short.warnings()) == 1
    assert "not 1/4 = 25.00%" in short.warnings()[0]
    repeated = MaskStatistics(k=4, tokens=10_000, trainable=10_000, dropped=2500, longest_undropped_span=500)
    assert "keeps 500 tokens in a row, but chance would keep about 27" in repeated.warnings()[0]
