"""Requests per second through the gate, vllm-router and nginx, on the same replica: part of `make bench`.

Needs nginx and wrk (Debian packages, installed if they are missing) and vllm-router in .venv-bench. Each case is
measured in interleaved rounds, so that the machine's mood falls on all alike, and the figure is the ratio within a
round: median, least and greatest.

    python bench/relay.py [--seconds 4] [--rounds 5] [--bare] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILES = HERE / "relay_files"
ROOT = HERE.parent
CONNECTIONS = 16
GATE = "tidegate"
TARGETS = [  # case, rival, least ratio
    ("0.1 KB", "vllm-router", 1.5),
    ("32k ids", "vllm-router", 12.0),
    ("32k ids", "nginx", 0.7),
]


def cases() -> dict[str, tuple[str, bytes]]:
    """Path and body. Token ids go by three APIs: OpenAI's, vLLM's (verifiers, prime-rl, SkyRL), SGLang's (slime)."""
    ids = [(i * 7919) % 152_000 for i in range(32_768)]
    small = {"model": "m", "prompt": "a" * 30, "max_tokens": 1, "temperature": 1.0}
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 1}
    bodies = {
        "0.1 KB": ("/v1/completions", small),
        "16 KB": ("/v1/completions", small | {"prompt": "a" * 16_000}),
        "32k ids": ("/v1/completions", small | {"prompt": ids}),
        "32k vllm": ("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}),
        "32k sgl": ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}),
        "SSE 50": ("/v1/completions", small | {"stream": True}),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in bodies.items()}


def install() -> None:
    if not shutil.which("wrk") or not (shutil.which("nginx") or Path("/usr/sbin/nginx").exists()):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "nginx", "wrk"], check=True)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if sock.recv(64).split(b" ")[1:2] == [b"200"]:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{process.args!r} does not answer")


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            wait_for(port, process)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def nginx(name: str, directory: Path, **values: object) -> list[str]:
    path = directory / f"{name}-{values['port']}.conf"
    path.write_text((FILES / f"{name}.conf").read_text().format(directory=directory, **values))
    return [shutil.which("nginx") or "/usr/sbin/nginx", "-p", str(directory), "-c", str(path)]


def gate(port: int, replica: str, *, bare: bool) -> list[str]:
    if bare:
        return [sys.executable, str(FILES / "bare_gate.py"), str(port), replica]
    tidegate = str(Path(sys.executable).parent / "tidegate")
    return [tidegate, "serve", "--worker-urls", replica, "--policy", "sticky_least_loaded", "--port", str(port)]


def vllm_router(port: int, replica: str) -> list[str]:
    return [
        str(ROOT / ".venv-bench/bin/vllm-router"),
        *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", replica),
        *("--policy", "sticky_least_loaded", "--log-level", "error"),
        *("--request-id-headers", "x-session-id", "--prometheus-port", str(free_port())),
    ]


def router(name: str, port: int, upstream: int, directory: Path, *, bare: bool) -> list[str]:
    replica = f"http://127.0.0.1:{upstream}"
    if name == "nginx":
        return nginx("proxy", directory, port=port, upstream=upstream)
    return vllm_router(port, replica) if name == "vllm-router" else gate(port, replica, bare=bare)


def load(port: int, path: str, body: Path, seconds: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", "-s", str(FILES / "load.lua"), url]
    text = subprocess.run([*command, "--", path, str(body)], capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert rate is not None, text
    if "Non-2xx" in text or "Socket errors" in text:  # the rate of errors is no figure
        raise SystemExit(f"{path} through port {port}:\n{text}")
    return {"per_s": float(rate[1]), "p99_ms": milliseconds(re.search(r"99%\s+([\d.]+)(us|ms|s)", text))}


def milliseconds(match: re.Match[str] | None) -> float:
    assert match is not None
    return float(match[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[match[2]]


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """User and system time of the process and its children: nginx works in a child."""
    pids = [process.pid]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids += [int(pid) for pid in children.read_text().split()]
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-")))
        fixed, streaming = free_port(), free_port()
        start = lambda command, port: stack.enter_context(running(command, port, directory / f"{port}.log"))  # noqa: E731
        start(nginx("upstream", directory, port=fixed), fixed)
        start([sys.executable, str(FILES / "sse.py"), str(streaming)], streaming)
        routers: dict[int, dict[str, tuple[int, subprocess.Popen[bytes]]]] = {}
        for upstream in (fixed, streaming):
            routers[upstream] = {}
            for name in arguments.only or ("nginx", "vllm-router", GATE):
                port = free_port()
                command = router(name, port, upstream, directory, bare=arguments.bare)
                routers[upstream][name] = (port, start(command, port))
        for case, (path, body) in cases().items():
            if arguments.case and case not in arguments.case:
                continue
            file = directory / "body.json"
            file.write_bytes(body)
            group = routers[streaming if case.startswith("SSE") else fixed]
            results[case] = {name: [] for name in group}
            for turn in range(arguments.rounds):
                for name, (port, process) in group.items():
                    if not turn:
                        load(port, path, file, 1)  # warm
                    before = cpu_s(process)
                    figure = load(port, path, file, arguments.seconds)
                    figure["cpu_us"] = (cpu_s(process) - before) / (figure["per_s"] * arguments.seconds) * 1e6
                    results[case][name].append(figure)
                    print(f"{case:8} {turn} {name:12} {figure}", file=sys.stderr, flush=True)
    return results


def ratios(results: dict[str, list[dict[str, float]]], rival: str) -> list[float]:
    return sorted(ours["per_s"] / theirs["per_s"] for ours, theirs in zip(results[GATE], results[rival], strict=True))


def report(results: dict[str, dict[str, list[dict[str, float]]]]) -> int:
    print(f"\n{'case':8} {'router':12} {'req/s':>9} {'p99 ms':>8} {'CPU us':>8}   ratio: median (least-greatest)")
    for case, routers in results.items():
        for name, figures in routers.items():
            median: dict[str, Any] = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
            line = f"{case:8} {name:12} {median['per_s']:9.0f} {median['p99_ms']:8.2f} {median['cpu_us']:8.0f}"
            if name != GATE and GATE in routers:
                spread = ratios(routers, name)
                line += f"   {statistics.median(spread):.2f} ({spread[0]:.2f}-{spread[-1]:.2f})"
            print(line)
    missed = 0
    for case, rival, least in TARGETS:
        if case in results and {rival, GATE} <= results[case].keys():
            ratio = statistics.median(ratios(results[case], rival))
            missed += ratio < least
            print(f"{'ok' if ratio >= least else 'MISSED'}: {case}, {ratio:.2f} x {rival}, target {least}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="the data path alone, without sessions and policy")
    parser.add_argument("--only", nargs="*", help="routers: nginx, vllm-router, tidegate")
    parser.add_argument("--case", nargs="*", help="cases by name")
    parser.add_argument("--json", type=Path, help="write the raw figures there")
    arguments = parser.parse_args()
    install()
    results = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return report(results)


if __name__ == "__main__":
    sys.exit(main())
