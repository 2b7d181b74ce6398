"""`tidegate doctor URL`: is this gate, and are its engines, set up so that it can do its work?

Each check says what it found and, if that is not well, what to do. `fail` keeps the gate from working, `warn` makes it
work with less knowledge. The engines are asked directly, so they must be reachable from here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import aiohttp
import click
from msgspec import Struct, to_builtins

from tidegate.cli.top import read_state
from tidegate.config.engines import EnginesConfig
from tidegate.engines import detect
from tidegate.engines.base import EngineAdapter
from tidegate.engines.control import call, control_session
from tidegate.engines.discovery import host_of
from tidegate.engines.prometheus import parse

Grade = Literal["ok", "warn", "fail"]
MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}
TIMEOUT_S = 5.0
MANY_TOKENS = 10_000  # of prompts, after which no cached one is no accident

KV_EVENTS_REMEDY = (
    """vLLM: --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'; """
    "without them the resident KV of a session is estimated"
)

PLUGIN_REMEDIES = {
    "absent": "install tidegate beside vLLM and start it with VLLM_PLUGINS=tidegate; see docs/vllm-plugin.md",
    "unauthorized": "engines.plugin_key_file: a file with the engine's API key",
    "protocol": "install the gate's own release of tidegate beside vLLM",
    "off_in_engine": "see docs/vllm-plugin.md; all else works without it",
}


class Finding(Struct, frozen=True):
    where: str
    grade: Grade
    what: str
    remedy: str = ""


@click.command()
@click.argument("url", default="http://127.0.0.1:30000")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
def doctor(url: str, as_json: bool) -> None:
    """Check a running gate and its engines. Ends with 1 if a check failed."""
    findings = asyncio.run(examine(url))
    if as_json:
        click.echo(json.dumps(to_builtins(findings), indent=2))
    else:
        for finding in findings:
            click.echo(f"{MARKS[finding.grade]} {finding.where}: {finding.what}")
            if finding.remedy:
                click.echo(f"    {finding.remedy}")
    sys.exit(any(finding.grade == "fail" for finding in findings))


async def examine(url: str) -> list[Finding]:
    state = await asyncio.to_thread(read_state, url)
    findings = gate_findings(url, state)
    async with control_session(EnginesConfig()) as client:
        findings += await usage_findings(client, url if "://" in url else f"http://{url}")
        for replica in state["replicas"]:
            findings += await engine_findings(client, replica)
    return findings


def gate_findings(url: str, state: dict[str, Any]) -> list[Finding]:
    findings = [Finding(url, "ok", f"tidegate {state['version']}, policy {state['policy']}")]
    usable = [replica for replica in state["replicas"] if replica["ready"]]
    if not state["replicas"]:
        findings.append(Finding(url, "fail", "no replicas are listed", "POST /workers, or --worker-urls"))
    elif not usable:
        findings.append(Finding(url, "fail", "no replica is usable", "see the replicas below"))
    if state["paused"]:
        findings.append(Finding(url, "warn", "the pool is paused", "POST /resume, unless a weight update runs"))
    findings += [Finding(url, "warn", f"alarm: {alarm}") for alarm in state["alarms"]]
    record = state.get("record")
    if record and record["dropped"]:
        findings.append(
            Finding(url, "warn", f"{record['dropped']} lines of the decision log were dropped", "use a faster disk")
        )
    unlabelled = state["classes"].get("unlabelled")
    if unlabelled and (unlabelled["live"] or unlabelled["completed"]) and len(state["classes"]) == 1:
        findings.append(
            Finding(url, "warn", "no request has a workload class", "send X-Workload-Class: caps are learned per class")
        )
    return findings


async def usage_findings(client: aiohttp.ClientSession, url: str) -> list[Finding]:
    """Whether replies tell what was cached."""
    metrics = await call(client, url.rstrip("/"), "GET", "/metrics", timeout_s=TIMEOUT_S)
    names = ("tidegate_prompt_tokens_total", "tidegate_cached_prompt_tokens_total")
    samples = parse(metrics.body if isinstance(metrics.body, str) else "", frozenset(names))
    prompt, cached = (sum(sample.value for sample in samples[name]) for name in names)
    if prompt < MANY_TOKENS or cached:
        return []
    what = f"none of {prompt:.0f} prompt tokens was reported as cached"
    return [Finding(url, "warn", what, "start vLLM with --enable-prompt-tokens-details")]


async def engine_findings(client: aiohttp.ClientSession, replica: dict[str, Any]) -> list[Finding]:
    url = replica["url"]
    metrics = await call(client, url, "GET", "/metrics", timeout_s=TIMEOUT_S)
    if metrics.status is None:
        return [
            Finding(url, "fail", f"not reachable from here: {metrics.error}", "is the engine up, and the URL right?")
        ]
    adapter = await detect.detect(client, url, TIMEOUT_S)
    if adapter is None:
        what = "it answers, and is neither vLLM nor SGLang as far as can be seen"
        return [Finding(url, "warn", what, "start it with its metrics on; SGLang: --enable-metrics")]
    findings = [Finding(url, "ok", f"{adapter.name} answers")]
    if not isinstance(metrics.body, str) or metrics.status != 200:
        remedy = "SGLang: --enable-metrics" if adapter.name == "sglang" else "leave vLLM's metrics on"
        findings.append(Finding(url, "warn", f"/metrics answered {metrics.status}", remedy))
    else:
        findings += reading_findings(url, adapter, metrics.body)
    findings.append(await pause_finding(client, url, adapter))
    findings.append(await kv_events_finding(client, url, adapter))
    if adapter.name == "vllm":
        findings.append(plugin_finding(url, replica.get("plugin") or {}))
    return findings


def reading_findings(url: str, adapter: EngineAdapter, text: str) -> list[Finding]:
    reading = adapter.read(parse(text, adapter.metric_names))
    if reading.kv_capacity_tokens is None:
        capacity = Finding(url, "warn", "its KV capacity cannot be read", "set engines.kv_capacity_tokens")
    else:
        capacity = Finding(url, "ok", f"KV capacity {reading.kv_capacity_tokens} tokens")
    findings = [capacity]
    if adapter.name == "vllm" and 'enable_prefix_caching="False"' in text:
        findings.append(Finding(url, "fail", "prefix caching is off", "start it with --enable-prefix-caching"))
    if adapter.name == "vllm" and reading.cached_tokens_total is None and reading.prompt_tokens_total:
        findings.append(Finding(url, "warn", "it does not count cached prompt tokens", "use a later vLLM"))
    return findings


async def pause_finding(client: aiohttp.ClientSession, url: str, adapter: EngineAdapter) -> Finding:
    answer = await call(client, url, "GET", adapter.pause_probe_path, timeout_s=TIMEOUT_S)
    if answer.status in (200, 503):
        return Finding(url, "ok", "it can be paused, and tells whether it is")
    return Finding(
        url,
        "warn",
        f"it has no pause: {adapter.pause_probe_path} answered {answer.status}",
        "start vLLM with VLLM_SERVER_DEV_MODE=1 if weights are to be updated through the gate",
    )


def plugin_finding(url: str, plugin: dict[str, Any]) -> Finding:
    """As the gate sees it, which has the key for it."""
    reason, detail = plugin.get("reason", "not_asked"), plugin.get("detail") or ""
    if plugin.get("used"):
        return Finding(url, "ok", f"its plugin {plugin['version']} is told which sessions ended")
    what = f"it evicts KV without regard to sessions: plugin {reason}" + (f" ({detail})" if detail else "")
    return Finding(url, "ok" if reason == "switched_off" else "warn", what, PLUGIN_REMEDIES.get(reason, ""))


async def kv_events_finding(client: aiohttp.ClientSession, url: str, adapter: EngineAdapter) -> Finding:
    answer = await call(client, url, "GET", adapter.kv_sources_path, timeout_s=TIMEOUT_S)
    body = json.dumps(answer.body).encode() if isinstance(answer.body, (dict, list)) else b"{}"
    try:
        sources = adapter.kv_sources(body, host_of(url)) if answer.ok else []
    except ValueError:
        sources = []
    if sources:
        return Finding(url, "ok", f"it publishes KV events at {', '.join(source.endpoint for source in sources)}")
    return Finding(
        url,
        "warn",
        "it publishes no KV events",
        KV_EVENTS_REMEDY,
    )
