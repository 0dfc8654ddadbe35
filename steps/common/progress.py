"""Progress of long work as plain log lines, which show in a terminal, in a log file and in Prefect's UI alike."""

import re
import time

FORM = re.compile(r"(\d+)/(\d+) \S+(?: · |$)")


class Progress:
    """Prints `12/64 rollouts · reward 0.61 · 0:41 left` at most once every `every` seconds, and at the end."""

    def __init__(self, total: int, unit: str, every: float = 5.0) -> None:
        self.total, self.unit, self.every = total, unit, every
        self.started = self.printed = time.monotonic()

    def show(self, done: int, **facts: str) -> None:
        """`done` of the total, and whatever else is worth a glance, as `name=text`."""
        now = time.monotonic()
        if now - self.printed < self.every and done < self.total:
            return
        self.printed = now
        left = (now - self.started) / max(done, 1) * (self.total - done)
        parts = [f"{done}/{self.total} {self.unit}", *(f"{name} {text}" for name, text in facts.items())]
        if done < self.total:
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        print(" · ".join(parts), flush=True)


def share_done(line: str) -> float | None:
    """How much of the whole is done, from 0 to 1, by a line of `Progress`; None for any other line."""
    told = FORM.match(line)
    if told is None or not 0 < int(told[2]) >= int(told[1]):
        return None
    return int(told[1]) / int(told[2])
