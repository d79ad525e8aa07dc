"""One rank that runs plans one after the other, as lines on its standard input name compiled folders.

One start of the processes serves many runs: a process group takes seconds to come up, a run of a tiny model does not.
"""

import sys
import traceback
from pathlib import Path

import torch

from dsft.errors import DsftError
from dsft.plan.record import from_json
from dsft.train import world as worlds
from dsft.train.run import run

joined = None
linear = torch.nn.functional.linear
for line in sys.stdin:
    directory = Path(line.strip())
    plan = from_json((directory / "plan.json").read_text())
    try:
        worlds.check(plan, directory)
        joined = joined or worlds.join(plan)
        run(plan, directory, joined)
        print("@@done", flush=True)
    except DsftError as error:
        print(f"@@failed {error.problems[0].kind}", flush=True)
    except Exception:  # noqa: BLE001 - whatever it is, the next line is served
        traceback.print_exc(file=sys.stdout)
        print("@@crashed", flush=True)
    torch.nn.functional.linear = linear  # ZeRO-3 puts its own there for good: the next run may be another engine's
worlds.leave()
