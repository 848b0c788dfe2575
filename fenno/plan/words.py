"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fenno.kv.words import size as bytes_of
from fenno.units import show_duration

HEADER = ("on the fullest device", "bytes")


def title(plan: Mapping[str, Any]) -> str:
    """What is planned, in a sentence."""
    device, layout, parameters = plan["device"], plan["layout"], plan["parameters"]
    where = f"{device['count']} x {device['name']}" if device["count"] else device["name"]
    cut = ", ".join(f"{name} {size}" for name, size in layout.items() if size > 1)
    computing = "" if parameters["computing"] == parameters["all"] else f", {_count(parameters['computing'])} compute for a token"
    bits = f"{plan['bits']['weights']:g} bits a weight, {plan['bits']['cache']} in the cache"
    return f"{plan['model']}: {_count(parameters['all'])} parameters{computing}; {bits}; {where}{f' ({cut})' if cut else ''}"


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What lies in memory, and what is left."""
    for name, size in plan["weights"].items():
        yield f"weights: {name}", bytes_of(size)
    for name, size in plan["rest"].items():
        yield f"allowance: {name}", bytes_of(size)
    yield "left for the KV cache", bytes_of(plan["cache"]["room"]) if plan["cache"]["room"] > 0 else "nothing"
    yield "of", bytes_of(plan["limit"])


def lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """What it comes to, in sentences."""
    cache = plan["cache"]
    each = f"{bytes_of(cache['token'])} a token, {bytes_of(cache['sequence'])} a sequence of {cache['longest']} at most"
    if plan["fits"]:
        yield f"fits: {cache['sequences']:g} sequences of full length, {cache['tokens']} tokens{_replicas(plan)} ({each})"
    else:
        yield f"does not fit: {bytes_of(plan['lacks'])} are lacking for one sequence of full length ({each})"
        none = "no single change makes it fit: combine a shorter context, FP8 and more GPUs"
        yield "what would make it fit, each alone:" if plan["ways"] else none
        yield from (f"  {way}" for way in plan["ways"])
    yield from _bounds(plan)
    if plan["knobs"]:
        yield "first guess: " + " ".join(f"--{name} {value}" for name, value in plan["knobs"].items())
    yield from plan["notes"]
    yield f"not counted: {plan['left_out']}"


def _replicas(plan: Mapping[str, Any]) -> str:
    """Of what sequences are told, where the model is there several times."""
    return f" on each of {plan['layout']['data']} replicas" if plan["layout"]["data"] > 1 else ""


def _bounds(plan: Mapping[str, Any]) -> Iterator[str]:
    bounds, request = plan["bounds"], plan["request"]
    if not {"prompt", "one"} <= bounds.keys():
        if plan["fits"] and plan["device"]["count"]:
            yield f"no bounds of speed: how fast a {plan['device']['name']} is, is not known; --gpu-type names one that is"
        return
    yield f"bounds, no predictions, for {request['prompt']:g} tokens of prompt and {request['answer']:g} of answer:"
    prompt, each = bounds["prompt"], _replicas(plan)
    sequences = {"one": f"one sequence{each}", "many": f"each of {bounds['batch']} sequences{each}"}
    yield f"  a prompt alone: at least {show_duration(prompt['seconds'])} (by {prompt['by']})"
    yield f"  prompts, as many as wait: at most {prompt['rate']:,.0f} tokens/s"
    for name, what in sequences.items():
        it = bounds[name]
        yield f"  a token of {what}: at least {show_duration(it['seconds'])} (by {it['by']}), at most {it['rate']:,.0f} tokens/s"
