"""Files that ship with the package."""

from __future__ import annotations

from pathlib import Path

CODING_AGENT_TRACE = Path(__file__).with_name("coding_agent.jsonl")
