"""Measurements to medians, ratios to peers, shares of what the machine could do, and where no gain is expected."""

from __future__ import annotations

from statistics import median

from minikv.benchmark import roofline
from minikv.config import Config

FIGURES = ("prefill_s", "first_token_s", "decode_s")


def spread(values: list[float | None]) -> dict | None:
    """Median, least, greatest and number of values; None where nothing could be measured."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def summarize(measurements: list[dict], selections: dict[tuple, list[float]]) -> list[dict]:
    """A row for each participant, method and length, in the order in which they were first measured."""
    groups: dict[tuple, list[dict]] = {}
    for measurement in measurements:
        key = tuple(measurement[name] for name in ("participant", "method", "dtype", "length"))
        groups.setdefault(key, []).append(measurement)
    rows = []
    for (participant, method, dtype, length), group in sorted(groups.items(), key=lambda item: item[0][3]):
        row = {"participant": participant, "method": method, "dtype": dtype, "length": length, "n": len(group)}
        row |= {name: spread([measurement[name] for measurement in group]) for name in FIGURES}
        row["prefill_tokens_s"] = length / row["prefill_s"]["median"]
        row["decode_tokens_s"] = row["decode_s"] and 1 / row["decode_s"]["median"]
        row["selection_s"] = spread(selections.get((participant, method, length), []))
        row["selection_share"] = row["selection_s"] and row["selection_s"]["median"] / row["prefill_s"]["median"]
        first = group[0]  # later runs find pages that the allocator kept
        rows.append(row | {name: first[name] for name in ("peak_bytes", "kv_bytes", "kept_entries")})
    return rows


def ratios(measurements: list[dict]) -> list[dict]:
    """How many times faster each of ours is than each peer, round by round: above 1 is faster.

    Peers of another dtype are left out, those apart that have only their own, such as llama.cpp's quantized file.
    """
    by_round: dict[tuple, dict[int, dict]] = {}
    for found in measurements:
        key = (found["participant"], found["method"], found["dtype"], found["length"])
        by_round.setdefault(key, {})[found["round"]] = found
    ours = [key for key in by_round if key[0].startswith("minikv")]
    peers = [key for key in by_round if not key[0].startswith("minikv")]
    rows = []
    for own in ours:
        for peer in peers:
            if own[3] == peer[3] and peer[2] in (own[2], "quantized"):
                common = by_round[own].keys() & by_round[peer].keys()
                pairs = [(by_round[own][number], by_round[peer][number]) for number in common]
                row = {"ours": own[0], "method": own[1], "peer": peer[0], "peer_method": peer[1], "length": own[3]}
                for name in FIGURES:
                    row[name] = spread([b[name] / a[name] if a[name] and b[name] else None for a, b in pairs])
                rows.append(row)
    return rows


def add_bounds(rows: list[dict], config: Config, rates, new_tokens: int, weight_bytes: dict[str, int]) -> None:
    """The least time of each row on this machine, and the share that it is of the measured one.

    `rates` are the machine's (machine.Rates); `weight_bytes` those of participants that hold weights of their own form.
    Arithmetic on weights of such a form has no rate that was measured, so its prefill has no bound.
    """
    for row in rows:
        size = roofline.ELEMENT_BYTES.get(row["dtype"], 2)  # a quantized file's cache is float16
        weights = weight_bytes.get(row["participant"], roofline.weight_bytes_read(config, size))
        entries = roofline.entries_read(row["kept_entries"], config.layers, max(new_tokens - 1, 0))
        row["decode_weight_bytes"], row["decode_cache_bytes"] = weights, entries * roofline.entry_bytes(config, size)
        row["prefill_multiply_adds"] = roofline.prefill_multiply_adds(config, row["length"])
        row["decode_bound_s"] = _over(weights + row["decode_cache_bytes"], rates.bytes_per_second)
        row["prefill_bound_s"] = _over(row["prefill_multiply_adds"], rates.multiply_adds_per_second.get(row["dtype"]))
        for name in ("decode", "prefill"):
            bound, found = row[f"{name}_bound_s"], row[f"{name}_s"]
            row[f"{name}_share_of_bound"] = bound / found["median"] if bound and found else None


def _over(work: float, rate: float | None) -> float | None:
    return work / rate if rate else None


def remarks(rows: list[dict]) -> list[str]:
    """Where compression can bring little, from the bytes and times of these rows; and where the bounds cannot be right."""
    lines = []
    full = {(row["participant"], row["length"]): row for row in rows if row["method"] == "full"}
    for row in rows:
        base = full.get((row["participant"], row["length"]))
        if row["method"] == "full" or base is None:
            continue
        where = f"{row['participant']} {row['method']} at {row['length']} tokens"
        weights, all_entries, kept = base["decode_weight_bytes"], base["decode_cache_bytes"], row["decode_cache_bytes"]
        most = (weights + all_entries) / (weights + kept)
        sizes = f"{weights / 1e6:.0f} MB of weights and {kept / 1e6:.1f} MB of cache instead of {all_entries / 1e6:.1f} MB"
        hope = "hardly any gain can be expected, " if most < 1.1 else ""
        measured = f"; measured {base['decode_s']['median'] / row['decode_s']['median']:.2f}x" if row["decode_s"] else ""
        lines.append(f"{where}: a decode step reads {sizes}: {hope}at most {most:.2f}x{measured}.")
        times = f"{row['prefill_s']['median'] / base['prefill_s']['median']:.2f}x its time"
        share = f", its selection alone {row['selection_share']:.1%} of it" if row["selection_share"] else ""
        lines.append(f"{where}: the prefill computes all that the full one does and selects besides: {times}{share}.")
    if any((row[f"{name}_share_of_bound"] or 0) > 1 for row in rows for name in ("prefill", "decode")):
        lines.append(
            "Shares above 100%: the machine was busier when its own rates were measured than in the rounds; more --repeats"
            " help."
        )
    return lines
