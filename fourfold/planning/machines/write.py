"""Create machine files from a microbenchmark, or from another machine with fitted constants."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.planning.machines.constants import NAMES, PRIORS
from fourfold.planning.machines.machine import SECTIONS, Machine


def machine_toml(machine: Machine, title: str, base: Machine) -> str:
    """Return the text of a machine file, which ``load_machine`` can read.

    A comment after each value says whether the value was measured or comes from ``base``. ``title`` is the file's first
    comment.
    """
    lines = [f"# {title}", f"name = {json.dumps(machine.name)}"]
    for section, keys in SECTIONS.items():
        given = {key: getattr(machine, key) for key in keys if getattr(machine, key)}
        if given:
            lines += ["", f"[{section}]", *(_constant(key, value, base) for key, value in given.items())]
    if machine.efficiency:
        note = "# Factors on the priors of planning/machines/constants.py, fitted by `fourfold machine calibrate`."
        lines += ["", note, "[efficiency]", *(f"{name} = {value:.4f}" for name, value in machine.efficiency)]
    if machine.calibrated_range:
        note = "# Smallest and largest value in the rows of the fit. Predictions outside this range are extrapolations."
        lines += ["", note, "[calibrated_range]"]
        lines += [f'"{name}" = [{low:g}, {high:g}]' for name, (low, high) in machine.calibrated_range]
    return "\n".join(lines) + "\n"


def _constant(key: str, value: float, base: Machine) -> str:
    return f"{key} = {value:.6g} # {f'as {base.name}' if value == getattr(base, key) else 'measured'}"


def with_constants(machine: Machine, name: str, logs: np.ndarray, extent: Mapping[str, tuple[float, float]]) -> Machine:
    """Return a copy of the machine with fitted constants.

    Args:
        machine: The machine to copy.
        name: Name of the copy.
        logs: For each constant, the logarithm of the ratio between the constant and the median of its prior.
        extent: Smallest and largest value of each feature among the workloads of the fit.
    """
    efficiency = tuple(zip(NAMES, np.exp(logs).tolist(), strict=True))
    return replace(machine, name=name, efficiency=efficiency, calibrated_range=tuple(extent.items()))


def measured_machine(measured: Mapping[str, Any], base: Machine, name: str) -> Machine:
    """Return a machine from a microbenchmark's record. Values that the microbenchmark could not measure come from
    ``base``.

    The microbenchmark measures rates that kernels and collectives really reach, so the planner must not lower these
    rates further. The planner multiplies each rate by a constant. This constant is the median of its prior times the
    machine's factor. So this function sets the factor of each measured rate to 1 / median, and the constant becomes 1.
    """
    kinds = measured["matmuls"].values()
    reached = {kind: max(rates[kind] for rates in kinds) for kind in ("NN", "NT", "TN")}
    best = max(reached.values())
    values: dict[str, Any] = {
        "units": measured["units"],
        "peak": max(best, base.peak if measured["device"] != "cpu" else best),
        "achieved": best,
        "achieved_fp8": max(best, base.achieved_fp8 if measured["device"] != "cpu" else best),
        # On a CPU, all matmuls were measured in float32. On a GPU, only NN matmuls (no transposed operand) were
        # measured in float32, so scale the measured rate to the best memory layout.
        "achieved_fp32": best if measured["device"] == "cpu" else measured["fp32_matmul"] * best / reached["NN"],
        **{kind.lower(): rate / best for kind, rate in reached.items()},
        "attention": measured["attention"],
        "memory": measured["memory"],
        "memory_bandwidth": measured["memory_bandwidth"],
        "launch": measured["launch"],
        "gpus_per_node": float(measured["gpus_per_node"]),
        "domain": float(measured["gpus_per_node"]),
    }
    extent: dict[str, tuple[float, float]] = {}
    if measured["all_reduce"]:
        values |= _links(measured)
        extent["gpus"] = (1.0, float(measured["ranks"]))
    done = {"matmul", "attention", "memory"} | ({"intra", "latency"} if measured["all_reduce"] else set())
    if measured["nodes"] > 1:
        done.add("inter")
    logs = np.array([-np.log(PRIORS[n].median) if n in done and PRIORS[n].median != 1 else 0.0 for n in NAMES])
    return with_constants(replace(base, **values), name, logs, extent)


def _links(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the bandwidths and latencies of the machine's links, by key of a machine file. For each group size, both
    are computed from a straight line through the times of the smallest and the largest all-gather: the line's slope
    gives the bandwidth, and its intercept gives the latency."""
    values: dict[str, float] = {}
    per_node, latencies = measured["gpus_per_node"], {}
    for count, times in ((int(c), t) for c, t in measured["all_gather"].items()):
        (small, fast), *_, (large, slow) = sorted((int(size), seconds) for size, seconds in times.items())
        share = (count - 1) / count
        bandwidth = share * (large - small) / max(slow - fast, 1e-9)
        latencies[count] = max(fast - share * small / bandwidth, 1e-7)
        if count <= per_node:
            values["intra2" if count <= 2 else "intra4" if count <= 4 else "intra8"] = bandwidth
        else:
            values["node"] = bandwidth
    inside = {count: t for count, t in latencies.items() if count <= per_node}
    if inside:
        counts = sorted(inside)
        first, last = counts[0], counts[-1]
        hop = (inside[last] - inside[first]) / (last - first) if last > first else inside[first] / (2 * first)
        values["intra_hop"] = max(hop, 1e-7)
        values["base"] = max(inside[first] - hop * (first - 1), 1e-7)
        widest = next(values[key] for key in ("intra8", "intra4", "intra2") if key in values)
        for key in ("intra2", "intra4", "intra8"):
            values.setdefault(key, widest)
        values["intra_far"] = values["intra2"]
    across = [count for count in latencies if count > per_node]
    if across:
        nodes = max(across) / per_node
        values["inter_hop"] = max(latencies[max(across)] / nodes, 1e-7)
    return values
