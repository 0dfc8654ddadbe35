"""(d) Backup and restore of a 200 MB checkpoint against boto3's own transfer, on the same S3 server.

    python benchmarks/backup.py

boto3's `upload_file` and `download_file` move the same files and compare nothing with the run's manifests. The server
is SeaweedFS, on this machine, with its data in a temporary folder.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from s3_fixtures import BUCKET, Weed, environment, make

from steps.backup import backup
from steps.common.artifacts import Manifest, read_manifest
from steps.remote.settings import BucketSettings
from steps.restore import restore

SIZES = {"optimizer.bin": 133_000_000, "adapter.bin": 66_500_000, "trainer.json": 500_000}
PATH, TIMES = "checkpoints/0001", 5


def main(folder: Path) -> None:
    """Prints the medians of each way, taken in turns."""
    weed = Weed(folder / "weed")
    weed.start()
    try:
        seconds = [measure(folder, weed, number) for number in range(TIMES)]
    finally:
        weed.kill()
    table = Table("200 MB", "boto3, MB/s", "ours, MB/s", "ratio", title=f"median of {TIMES}")
    size = sum(SIZES.values()) / 1e6
    for name, plain, ours in (("backup", 0, 1), ("restore", 2, 3)):
        ratios = [row[plain] / row[ours] for row in seconds]
        speeds = [f"{size / statistics.median(row[way] for row in seconds):.0f}" for way in (plain, ours)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add_row(name, *speeds, spread)
    Console().print(table)


def measure(folder: Path, weed: Weed, number: int) -> list[float]:
    """Seconds of boto3's upload, our backup, boto3's download, our restore."""
    os.environ.update(environment(weed.url, f"ours-{number}"))
    settings = BucketSettings.from_environment()
    assert settings
    root, client = folder / f"{number}/night", weed.client()
    make(root, PATH, seed=number, **SIZES)
    manifest = read_manifest(root / PATH)
    assert manifest
    key = f"plain-{number}/{{}}".format
    plain = folder / f"{number}/plain"
    plain.mkdir()

    def up(manifest: Manifest) -> None:
        for name in manifest.files:
            client.upload_file(str(root / PATH / name), BUCKET, key(name))

    def down(manifest: Manifest) -> None:
        for name in manifest.files:
            client.download_file(BUCKET, key(name), str(plain / name))

    return [
        timed(lambda: up(manifest)),
        timed(lambda: backup(root, settings, len)),
        timed(lambda: down(manifest)),
        timed(lambda: restore(settings, "night", folder / f"{number}/empty/night", say=len)),
    ]


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
