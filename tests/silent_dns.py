"""Runs a command where DNS hears all and never answers: `unshare --net python -m tests.silent_dns COMMAND...`.

The new network has no link but loopback, which gets the addresses of this machine's nameservers.  The last line is the
number of questions; the exit code is the command's.
"""

import socket
import subprocess
import sys
import threading
from pathlib import Path

RESOLV_CONF = Path("/etc/resolv.conf")


def main() -> int:
    lines = [line.split() for line in RESOLV_CONF.read_text().splitlines()]
    nameservers = [words[1] for words in lines if words[:1] == ["nameserver"] and ":" not in words[1]]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in {address for address in nameservers if not address.startswith("127.")}:
        subprocess.run(["ip", "address", "add", address, "dev", "lo"], check=True)
    questions: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dns:
        dns.bind(("", 53))
        threading.Thread(target=lambda: listen(dns, questions), daemon=True).start()
        code = subprocess.run(sys.argv[1:], check=False).returncode
        print(len(questions), flush=True)
    return code


def listen(dns: socket.socket, questions: list[bytes]) -> None:
    while True:
        questions.append(dns.recv(512))


if __name__ == "__main__":
    sys.exit(main())
