"""Take a screenshot of the top of a run's report with Chromium:

fourfold train examples/memorization/tutorial.toml --set name=goldfish --set masks.goldfish.strategy=hash
python docs/figures/report.py runs/goldfish

docs/memorization.md shows how to make the corpus of this run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PICTURE = Path(__file__).with_name("report.png")


def main(run: Path) -> None:
    subprocess.run(["fourfold", "report", str(run)], check=True)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    page = (run / "report.html").resolve().as_uri()
    subprocess.run(["chromium", *options, "--window-size=1180,580", f"--screenshot={PICTURE}", page], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
