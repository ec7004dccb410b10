"""What the benchmark shows as text."""

from __future__ import annotations

from minikv.command import text_table
from minikv.report.titles import title


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:{form}}"


def _spread(found: dict | None, form: str, scale: float = 1) -> str:
    """Median (least to greatest), without the brackets where there is one value."""
    if found is None:
        return "-"
    middle = f"{found['median'] * scale:{form}}"
    return middle if found["n"] == 1 else f"{middle} ({found['min'] * scale:{form}}-{found['max'] * scale:{form}})"


def figures(rows: list[dict]) -> str:
    """A line for each participant, method and length."""
    head = ("participant", "method", "tokens", "n", "prefill tok/s", "prefill s", "first token s", "selection ms")
    lines = [(*head, "decode tok/s", "ms/token", "peak MB", "KV MB", "prefill bound", "decode bound")]
    for row in rows:
        cells = [row["participant"], title(row["method"]), str(row["length"]), str(row["n"])]
        cells.append(_number(row["prefill_tokens_s"], ".0f"))
        cells += [_spread(row[name], ".3g") for name in ("prefill_s", "first_token_s")]
        share = "" if row["selection_share"] is None else f" ({row['selection_share']:.1%})"
        cells.append(_number(row["selection_s"] and row["selection_s"]["median"], ".3g", 1e3) + share)
        cells += [_number(row["decode_tokens_s"], ".1f"), _spread(row["decode_s"], ".1f", 1e3)]
        cells += [_number(row["peak_bytes"], ".0f", 1e-6), _number(row["kv_bytes"], ".1f", 1e-6)]
        lines.append((*cells, *(_number(row[f"{name}_share_of_bound"], ".0%") for name in ("prefill", "decode"))))
    return text_table(lines)


def against(rows: list[dict]) -> str:
    """A line for each of ours beside each peer."""
    lines = [("ours", "method", "peer", "its method", "tokens", "rounds", "prefill", "first token", "decode")]
    for row in rows:
        names = (row["ours"], title(row["method"]), row["peer"], title(row["peer_method"]), str(row["length"]))
        rounds = str(row["prefill_s"]["n"]) if row["prefill_s"] else "0"
        cells = (_spread(row[name], ".2f") for name in ("prefill_s", "first_token_s", "decode_s"))
        lines.append((*names, rounds, *cells))
    return text_table(lines)


def short_form(machine: dict, rates: dict, participants: list[dict]) -> str:
    """Machine, its rates, and the participants' versions, in three lines."""
    memory = f", {machine['memory_bytes'] / 1e9:.0f} GB" if machine["memory_bytes"] else ""
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    products = rates["multiply_adds_per_second"].items()
    speeds = ", ".join(f"{rate / 1e9:.1f} G multiply-adds/s in {dtype}" for dtype, rate in products)
    versions = []
    for participant in participants:
        apart = ("version", "weight_bytes")
        facts = (f"{name} {value}" for name, value in participant["facts"].items() if name not in apart)
        versions.append(f"{participant['name']} {participant['facts']['version']} ({', '.join(facts)})")
    return "\n".join([
        f"{machine['processor']}, {machine['cores']} cores{memory}{gpu}; {machine['threads']} threads.",
        f"Best measured between the rounds: {rates['bytes_per_second'] / 1e9:.1f} GB/s read, {speeds}.",
        "; ".join(versions) + ".",
    ])
