"""Describe a machine for the planner: the rates and memory of one device, and the links between devices.

Machines are TOML files (``fourfold/planning/machines``). Comments in a file give the source of each value, or say that
the value is an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.parsing import parse_toml
from fourfold.planning.array_fields import ArrayFields, Number
from fourfold.planning.machines.constants import NAMES
from fourfold.planning.machines.names import FOLDER, machine_names, similar_machines
from fourfold.untrusted_files import read_text_file


@dataclass(frozen=True)
class Machine(ArrayFields):
    """Constants of one machine, in SI units (bytes, seconds, FLOP/s).

    - gpus_per_node: number of devices per node.
    - domain: number of devices that the fast links connect. The domain is larger than a node if these links connect
      several nodes (NVL72).
    - peak, achieved, achieved_fp8, achieved_fp32: dense matmul rates. ``peak`` is the advertised bf16 rate. The
      achieved rates are the rates of the best shape.
    - units: number of processors of a device, over which the tiles of a matmul are divided.
    - attention: rate of the fastest fused attention kernel for long sequences. The kernel reaches half of this rate at
      attention_half tokens.
    - flash2, flash2_half: the same two values for FlashAttention-2. flash2 is 0 if FlashAttention-2 is the fastest
      kernel.
    - memory, memory_bandwidth: size of a device's memory, and bandwidth of this memory.
    - intra2, intra4, intra8: bandwidth, in one direction, from a device to the other members of a group of at most 2,
      4, or 8 neighbors.
    - intra_far: bandwidth in a group of two devices of a node that are not neighbors.
    - host: bandwidth from a device to the host's memory, in one direction. 0 if unknown.
    - node: bandwidth from a node to the network, over all of its adapters (injection bandwidth).
    - base: latency of a collective, in addition to the steps of its ring.
    - intra_hop, inter_hop: latency of each step of the ring, inside a node and between nodes.
    - ring_hop: measured latency per rank in rings that leave a node. If this is 0, the planner computes the latency
      from intra_hop and inter_hop.
    - ring_floor: least time of one step of a ring that leaves a node. 0 if no such bound is known.
    - launch: host time of a kernel launch.
    - reserved: bytes of a device's memory that the runtime takes, such as the CUDA context and NCCL's buffers.
    - nn: fraction of the achieved rate that matmuls reach if both operands are used as stored (a linear layer's input
      gradient).
    - nt: the same for matmuls with a transposed second operand (a linear layer's output).
    - tn: the same for matmuls with a transposed first operand (a linear layer's weight gradient).
    - spread: relative standard deviation of the devices' times for the same matmul. 0 if it was not measured.
    - price_per_gpu_hour, watts_per_gpu, mtbf_gpu_hours (mean time between failures of one GPU), checkpoint_bandwidth
      (from one GPU to storage): inputs of ``budget.costs``. None if unknown.
    """

    name: str
    gpus_per_node: Number
    domain: Number
    units: Number
    peak: Number
    achieved: Number
    achieved_fp8: Number
    achieved_fp32: Number
    attention: Number
    memory: Number
    memory_bandwidth: Number
    intra2: Number
    intra4: Number
    intra8: Number
    intra_far: Number
    node: Number
    base: Number
    intra_hop: Number
    inter_hop: Number
    launch: Number
    reserved: Number
    host: Number = 0.0
    ring_hop: Number = 0.0
    ring_floor: Number = 0.0
    attention_half: Number = 640.0
    flash2: Number = 0.0
    flash2_half: Number = 640.0
    nn: Number = 1.0
    nt: Number = 1.0
    tn: Number = 1.0
    spread: Number = 0.0
    price_per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    mtbf_gpu_hours: float | None = None
    checkpoint_bandwidth: float | None = None
    efficiency: tuple[tuple[str, float], ...] = ()
    """Pairs of a constant's name (``constants.Constants``) and a factor on the median of its prior, from ``fourfold
    machine calibrate``. Empty if the machine was not calibrated."""
    calibrated_range: tuple[tuple[str, tuple[float, float]], ...] = ()
    """Pairs of a feature's name (``range_features``) and its smallest and largest value among the workloads of the
    calibration. A prediction outside this range is an extrapolation."""


SECTIONS = {
    "device": ("units", "peak", "achieved", "achieved_fp8", "achieved_fp32", "attention",
               "attention_half", "flash2", "flash2_half", "memory", "memory_bandwidth", "reserved", "spread"),
    "layouts": ("nn", "nt", "tn"),
    "node": ("gpus_per_node", "domain", "intra2", "intra4", "intra8", "intra_far", "host"),
    "network": ("node",),
    "latency": ("base", "intra_hop", "inter_hop", "ring_hop", "ring_floor", "launch"),
    "costs": ("price_per_gpu_hour", "watts_per_gpu", "mtbf_gpu_hours", "checkpoint_bandwidth"),
}  # fmt: skip
LEAST, MOST = 1e-12, 1e24
"""Bounds of every value in a machine file: from a trillionth of a second to a million exaFLOP/s."""
_WHOLE = ("gpus_per_node", "domain", "units")
_OPTIONAL = {field.name for field in fields(Machine) if field.default is not MISSING}


def load_machine(name: str, given_as: str = "--machine") -> Machine:
    """Return the constants of a built-in machine or of a machine file.

    Args:
        name: Name of a built-in machine, or path of a file that ends in .toml.
        given_as: The option or key that gave the name, for error messages.

    Raises:
        UserError: The name is unknown, or the file cannot be read or has a wrong key or value.
    """
    if name.endswith(".toml"):
        text = read_text_file(Path(name), given_as, "give a machine file, or a built-in machine such as dgx-h100")
        return parse_machine(text, where=name)
    if name not in machine_names():
        near = " or ".join(f"'{similar}'" for similar in similar_machines(name))
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(machine_names())}."
        raise UserError(f"{given_as} {name} is unknown; {hint} The name of a machine file ends in .toml.")
    return parse_machine((FOLDER / f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


@cache
def parse_machine(text: str, where: str) -> Machine:
    """Parse the text of a machine file. ``where`` names the file in error messages. Raise ``UserError`` if a key or a
    value is wrong."""
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from None
    values: dict[str, Any] = {"name": table.pop("name", Path(where).stem)}
    if not isinstance(values["name"], str) or not values["name"].isprintable():
        raise UserError(f"{where}: name = {values['name']!r} must be text of one line, such as 'laptop'")
    table.pop("sources", None)
    efficiency = _numbers(table, "efficiency", NAMES, where)
    extent = _extent(_section(table, "calibrated_range", where), where)
    for section, keys in SECTIONS.items():
        given = _numbers(table, section, keys, where)
        if missing := [key for key in keys if key not in given and key not in _OPTIONAL]:
            raise UserError(f"{where}: {section}.{missing[0]} is missing; machines/dgx-h100.toml shows every key")
        for key, value in given.items():
            if key in _WHOLE and value != int(value):
                raise UserError(f"{where}: {section}.{key} = {value!r} must be a whole number, such as 8")
            if section == "layouts" and value > 1:
                raise UserError(f"{where}: {section}.{key} = {value!r} must be a fraction of at most 1, such as 0.9")
        values |= given
    if table:
        raise UserError(f"{where}: unknown section '{next(iter(table))}'; choose from {', '.join(SECTIONS)}")
    if values["achieved"] > values["peak"]:
        raise UserError(
            f"{where}: device.achieved = {values['achieved']:g} must be at most device.peak = {values['peak']:g}; "
            f"device.achieved = {values['peak'] / 2:g} works"
        )
    return Machine(**values, efficiency=tuple(efficiency.items()), calibrated_range=extent)


def check_positive(value: Any, what: str) -> None:
    """Check that a value from a file is a number from ``LEAST`` to ``MOST``.

    Args:
        value: The value to check.
        what: Name of the value, for the error message.

    Raises:
        UserError: The value is not a number, or is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{what} = {str(value)[:40]} must be a number above 0, such as 1")
    if not LEAST <= value <= MOST:
        raise UserError(f"{what} = {str(value)[:40]} must be from {LEAST:g} to {MOST:g}, such as 1")


def _section(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    section = table.pop(name, {})
    if not isinstance(section, dict):
        raise UserError(f"{where}: {name} = {str(section)[:40]} must be a section, [{name}]")
    return section


def _numbers(table: dict[str, Any], name: str, keys: Sequence[str], where: str) -> dict[str, float]:
    """Return the values of a section. Raise ``UserError`` for a key that is not in ``keys``, or a value that is not a
    plausible number."""
    section = _section(table, name, where)
    for key, value in section.items():
        if key not in keys:
            raise UserError(f"{where}: unknown key '{name}.{key}'; choose from {', '.join(keys)}")
        check_positive(value, f"{where}: {name}.{key}")
    return {key: float(value) for key, value in section.items()}


def _extent(table: dict[str, Any], where: str) -> tuple[tuple[str, tuple[float, float]], ...]:
    for name, ends in table.items():
        if not isinstance(ends, list) or len(ends) != 2:
            raise UserError(f"{where}: calibrated_range.{name} = {ends!r} must be two numbers, such as [1, 8]")
        for end in ends:
            check_positive(end, f"{where}: calibrated_range.{name}")
        if ends[0] > ends[1]:
            raise UserError(f"{where}: calibrated_range.{name} = {ends!r} must be ascending, such as {ends[::-1]}")
    return tuple((name, (float(low), float(high))) for name, (low, high) in table.items())
