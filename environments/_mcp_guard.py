"""Runs an MCP server on this process's own stdin and stdout, and ends it with its client, however that one ends.

    python _mcp_guard.py npx -y some-mcp-server

A client that is killed can't end its server, and some servers do not mind that their stdin has ended. So a process
stands between that does: once stdin has ended and the server has had its time, it kills their process group. The client
has made that one (`mcp` does). Nothing of this project is imported here: a guard starts with each rollout.
"""

import os
import select
import signal
import sys
import threading
import time

GRACE = 6.0
"""Seconds for a server to end by itself. A client that is alive takes 4 to end it."""


def main() -> int:
    """The server's exit status; 127 where it can't be started."""
    try:
        server = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server has got it as well, and may take its time
    threading.Thread(target=kill_after_client, daemon=True).start()
    _, status = os.waitpid(server, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_after_client() -> None:
    """Waits until nobody can write to stdin any more. What is written stays there: it is the server's to read."""
    client = select.poll()
    client.register(0, select.POLLRDHUP)  # and POLLHUP, which is always told
    client.poll()
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
