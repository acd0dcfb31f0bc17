"""Runs one Python file in this process with limits, for `bench.quality`: python -I guard.py FILE SECONDS BYTES ISOLATION < nonce

Prints the nonce if the file ran to its end: a file that calls sys.exit early does not. Memory, CPU time, file sizes and open files
are limited; network and mounts are taken away by namespaces of Linux (ISOLATION "namespace"; exit status 97 where they cannot be
had); an audit hook refuses processes, sockets, ctypes, and changes to files outside the current folder. This stops what careless
code does. It is no wall against code written to break out: for that, take a container or a virtual machine.
"""

from __future__ import annotations

import os
import runpy
import sys

NO_NAMESPACE = 97
NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000  # CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET of sched.h
REFUSED = ("socket.", "ctypes.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "pty.", "webbrowser.")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.truncate", "os.link", "os.symlink", "os.mkdir", "shutil.")
MOST_WRITTEN = 100  # times that a file may be opened for writing; each can hold a MiB
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def leave_the_network() -> bool:
    """This process alone gets a network without devices."""
    import ctypes

    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        return False
    return unshare(NEW_NETWORK | NEW_MOUNTS) == 0 or unshare(NEW_USER | NEW_NETWORK | NEW_MOUNTS) == 0


def limit(seconds: int, memory: int) -> None:
    """CPU seconds and bytes of address space; no core files, small files, few of them."""
    import resource

    limits = {"RLIMIT_CPU": seconds, "RLIMIT_AS": memory, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 2**20, "RLIMIT_NOFILE": 32}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def refuse(folder: str):
    """An audit hook (PEP 578) that cannot be taken out again."""

    def inside(path) -> bool:
        path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None
        return path is not None and os.path.realpath(path).startswith(folder + os.sep)

    opened = iter(range(MOST_WRITTEN))

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(REFUSED) or (event.startswith(CHANGES) and not inside(arguments[0])):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, mode, flags = arguments
            if (flags or 0) & WRITING and not inside(path):
                raise PermissionError("writing outside the temporary folder is not allowed")
            if (flags or 0) & WRITING and next(opened, None) is None:
                raise PermissionError(f"no more than {MOST_WRITTEN} files may be written")

    return hook


def main() -> None:
    path, seconds, memory, isolation = sys.argv[1:]
    nonce = sys.stdin.readline().strip()
    if isolation == "namespace" and not leave_the_network():
        raise SystemExit(NO_NAMESPACE)
    limit(int(seconds), int(memory))
    sys.addaudithook(refuse(os.path.realpath(os.getcwd())))
    runpy.run_path(path, run_name="__main__")
    print(f"\n{nonce}", flush=True)


if __name__ == "__main__":
    main()
