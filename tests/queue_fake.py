"""A job of a queue without an engine: `queue_fake.py NAME FOLDER IMPORT_S RUN_S CODE [child | stays]`.

Stands by after IMPORT_S, and at a line of standard input runs for RUN_S; FOLDER/NAME.<what> hold times. child: starts a
process that would outlive it, whose number FOLDER/NAME.child holds. dies: ends while it stands by, the first time.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

name, folder, import_s, run_s, code, *rest = sys.argv[1:]


def mark(what: str) -> None:
    with Path(folder, f"{name}.{what}").open("a") as stream:
        stream.write(f"{time.time()}\n")


mark("started")
time.sleep(float(import_s))
mark("stands")
if "dies" in rest and len(Path(folder, f"{name}.started").read_text().split()) == 1:
    sys.exit(9)
if not sys.stdin.readline():
    sys.exit(130)
mark("goes")
if "child" in rest:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
    Path(folder, f"{name}.child").write_text(str(child.pid))
Path(folder, f"{name}.env").write_text(os.environ.get("SPARSIGHT_SHOTS_AFTER", "") + os.environ.get("MARK", ""))
print("measured", flush=True)
time.sleep(float(run_s))
mark("ends")
if int(code):
    print("error: it went wrong\nlater noise", file=sys.stderr)
sys.exit(int(code))
