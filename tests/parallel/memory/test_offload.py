"""Inputs of blocks move to the CPU's memory and back. On simulated streams, no operation reads a tensor before it has
arrived."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from tiny_runs import GPT, tiny_run
from torch import Tensor, nn

from fourfold.parallel.memory import offload
from fourfold.parallel.memory.offload import CopyStream, OffloadedInputs
from fourfold.verification.trace import trace

GPU = torch.device("cuda")


class Device:
    """A simulated GPU. Work on a stream other than the computation's stream runs as early as possible, or only when
    another stream waits for it. So if the code forgets a wait, values are wrong."""

    def __init__(self, early: bool) -> None:
        self.early, self.computation = early, Stream(self)
        self.current = self.computation

    def stream(self, device: torch.device) -> Stream:
        return Stream(self)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """A simulated stream, which runs its work in order. ``run`` runs all work that was issued before a given point."""

    def __init__(self, device: Device) -> None:
        self.device, self.work, self.done = device, list[object](), 0

    def issue(self, work: object) -> None:
        self.work.append(work)
        if self.device.early and self is not self.device.computation:
            self.run()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event((other, len(other.work)))

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        stream, place = event
        self.issue(lambda: stream.run(place))

    def run(self, place: int | None = None) -> None:
        while self.done < (len(self.work) if place is None else place):
            work, self.done = self.work[self.done], self.done + 1
            assert callable(work)
            work()


class Late(Tensor):
    """A tensor whose copies are issued to the current simulated stream, and run when the stream runs."""

    device_of_all: Device

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is Tensor.copy_:
            out, source = (t.as_subclass(Tensor) for t in args[:2])
            cls.device_of_all.current.issue(lambda: out.copy_(source))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture(params=["late", "early"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(early=request.param == "early")
    monkeypatch.setattr(Late, "device_of_all", device, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", device.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.use)
    return device


def late(values: list[float]) -> Late:
    return torch.tensor(values).as_subclass(Late)


def test_a_copy_runs_after_what_was_issued_before_and_before_what_waits_for_it(device: Device) -> None:
    copies, source, out = CopyStream(GPU), late([0.0]), late([0.0])
    device.computation.issue(lambda: source.fill_(1))
    wait = copies.start(out, source)
    wait()
    device.computation.issue(lambda: source.fill_(2))  # later work reuses the source's memory
    device.computation.run()
    assert out.item() == 1


@pytest.mark.parametrize("device", ["late"], indirect=True)
def test_computation_that_does_not_wait_continues(device: Device) -> None:
    copies, source, out = CopyStream(GPU), late([1.0]), late([0.0])
    copies.start(out, source)
    device.computation.run()
    assert out.item() == 0


class Chain(nn.Module):
    """Blocks that each multiply by their own weight, and record when a copy or a matmul runs."""

    def __init__(self, weights: list[float], notes: list[str]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.tensor(weight)) for weight in weights)
        self.notes, self.inputs = notes, OffloadedInputs()

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.weights)):
            x = self.inputs.checkpointed(lambda x, n=number: self.product(n, x), number == 0, x)
        return x

    def product(self, number: int, x: Tensor) -> Tensor:
        self.notes.append(f"block {number}")
        return torch.sin(x * self.weights[number])


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list. Each copy and each matmul adds an entry to the list when it is issued."""
    notes: list[str] = []
    start = CopyStream.start

    def noting(self: CopyStream, out: Tensor, source: Tensor):
        notes.append("copy")
        return start(self, out, source)

    monkeypatch.setattr(offload.CopyStream, "start", noting)
    return notes


def test_an_input_is_on_its_way_before_the_backward_comes_to_it(notes: list[str]) -> None:
    x = torch.tensor([0.3, 0.7], requires_grad=True)
    chain = Chain([0.5, 1.5, 2.5], notes)
    out = chain(x)
    assert notes == ["copy", "block 0", "copy", "block 1", "copy", "block 2"]
    notes.clear()
    out.sum().backward()
    assert notes == ["copy", "copy", "block 2", "copy", "block 1", "block 0"]

    gradients = [x.grad, *(weight.grad for weight in chain.weights)]
    plain = x.detach().requires_grad_()
    expected = plain
    for weight in chain.weights:
        expected = torch.sin(expected * weight)
    for found, wanted in zip(gradients, torch.autograd.grad(expected.sum(), [plain, *chain.weights]), strict=True):
        assert torch.equal(found, wanted)


def test_micro_batches_in_flight_do_not_mix(notes: list[str]) -> None:
    """As in a pipeline, the second micro-batch's forward comes before the first one's backward."""
    chain = Chain([0.5, 1.5], notes)
    xs = [torch.tensor([value], requires_grad=True) for value in (0.3, 0.7)]
    outs = [chain(x) for x in xs]
    for out in outs:
        notes.clear()
        out.sum().backward()
        assert notes == ["copy", "copy", "block 1", "block 0"]
    alone = torch.tensor([0.3], requires_grad=True)
    chain(alone).sum().backward()
    assert torch.equal(xs[0].grad, alone.grad)


def test_evaluation_copies_nothing(notes: list[str]) -> None:
    with torch.no_grad():
        Chain([0.5, 1.5], notes)(torch.ones(2))
    assert notes == ["block 0", "block 1"]


@pytest.mark.slow
def test_the_trace_counts_inputs_that_are_back() -> None:
    """Memory peaks in a block's backward. Then the GPU has this block's input and the input of the block before it,
    however many blocks there are."""
    peaks = {}
    for layers in (3, 5):
        for on_cpu in (False, True):
            run = tiny_run(
                GPT | {"num_hidden_layers": layers}, activation_checkpoint={"mode": "full", "offload": on_cpu}
            )
            peaks[layers, on_cpu] = trace(run, whole=True).memory.activations_peak
    training, model = run.training, run.model
    residual = 4 * training.micro_batch_size * training.seq_length * model.hidden_size
    assert peaks[5, True] == peaks[3, True]
    assert peaks[3, False] - peaks[3, True] == residual
    assert peaks[5, False] - peaks[5, True] == 3 * residual
