"""A PostgreSQL that is started for tests, where its programs are installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path


def programs():
    """The folder of the server's programs; None if there are none."""
    known = shutil.which("initdb")
    folders = [Path(known).parent] if known else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders and sys.platform != "win32" else None


@contextmanager
def cluster():
    """Start a server, and yield its URL, or None. It listens at a socket in a folder of its own."""
    if (bin := programs()) is None:
        yield None
        return
    folder, user = Path(tempfile.mkdtemp(prefix="postgres-")), []
    if os.geteuid() == 0:  # it refuses to run as root
        user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        shutil.chown(folder, "nobody", "nogroup")
    data, quiet = folder / "data", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
    run = lambda *command: subprocess.run([*user, *map(str, command)], check=True, timeout=60, **quiet)
    try:
        run(bin / "initdb", "-D", data, "-U", "tests", "-A", "trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run(bin / "pg_ctl", "-D", data, "-w", "-o", options, "-l", folder / "log", "start")
        try:
            yield f"postgresql://tests@/postgres?host={folder}"
        finally:
            run(bin / "pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def emptied(url):
    """A database without any rows."""
    from remanence.serve.postgres import PostgresDatabase

    database = PostgresDatabase(url)
    with database._transaction() as connection:
        connection.execute("TRUNCATE memories, versions, keys, answers")
    return database
