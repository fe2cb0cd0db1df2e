"""`scripts/simulate_cache.py`: the comparison runs, and says what the README says."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "simulate_cache.py"


def test_the_simulation_compares_all_policies_and_plots_them(tmp_path):
    plot = tmp_path / "figure.png"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--requests", "600", "--seeds", "1", "--plot", str(plot)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {line["case"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    for trace in ("zipf 1.0, 16 on 8", "rotation, 16 on 8", "conversations", "mixed sizes"):
        loads = {policy: found[f"{trace}: {policy}"] for policy in ("offline", "ours", "LRU", "LFU", "GDSF")}
        assert loads["offline"] <= min(loads.values())
        assert all(0.0 < value <= 1.0 for value in loads.values())
    assert found["rotation, 16 on 8: LRU"] == 1.0
    assert found["rotation, 16 on 8: ours"] < 0.7
    assert found["timed rotation, residency 0.25 s: loads"] < 1.0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "loads per request" in done.stderr
