"""What sides without redundancy have in common: a drive by itself for each load, as it is or behind
a program that serves it.
"""

from contextlib import ExitStack
from pathlib import Path

from lab import place as places
from lab import states
from lab import study as studies
from lab.place import Place, Running
from lab.side import Drive, Protection, SideError
from lab.sides.blocks import drives_of_model, too_many_loads
from lab.study import State


class Alone:
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.chosen, self.study, self.place = chosen, study, place
        self.name = chosen.name
        self.home = work / chosen.name
        self.protection = Protection(0, "none")
        self.cleanup = ExitStack()

    def missing(self) -> str | None:
        return drives_of_model(self.study) or too_many_loads(self.study)

    def capacity_bytes(self, drives: list[Drive]) -> int:
        return drives[0].bytes

    def dealt(self, drives: list[list[Drive]], count: int) -> list[Drive]:
        """As disks are dealt out to arrays: in turn."""
        return [drives[at % len(drives)][at // len(drives)] for at in range(count)]

    def pull(self, array: int, member: int) -> None:
        raise SideError("one drive alone cannot lose one")

    def replace(self, array: int, member: int) -> None:
        raise SideError("one drive alone has nothing to rebuild from")

    def states(self) -> list[str]:
        return [State.HEALTHY]

    def rebuild_error(self) -> str | None:
        return None

    def pids(self) -> list[int]:
        return []

    def logs(self) -> list[str]:
        return []

    def stop(self) -> None:
        self.cleanup.close()


class Served(Alone):
    """Behind a program: its pid and what it says are kept in `home`."""

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        super().__init__(chosen, study, place, work)
        self.server: Running | None = None
        self.pid = 0

    def serve(self, command: str) -> None:
        self.server = self.place.spawn(
            f"echo $$ >{self.home}/pid; exec {command} >{self.home}/log 2>&1"
        )
        self.cleanup.callback(self.stop_server)

    def note_pid(self) -> None:
        """Once it has answered."""
        self.pid = int(self.place.check(f"cat {self.home}/pid"))

    def stop_server(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            places.stop(server)

    def version(self, program: str) -> str:
        said = self.place.run(f"{program} --version").text.splitlines()
        return said[0] if said else ""

    def states(self) -> list[str]:
        is_up = self.server is not None and self.server.running
        return [State.HEALTHY if is_up else states.FAILED]

    def pids(self) -> list[int]:
        return [self.pid] if self.pid else []

    def logs(self) -> list[str]:
        return [f"{self.home}/log"]
