"""Which CPU of this host each virtual CPU runs on. Pure.

Storage keeps the CPUs that a study gives it, and the virtual machines share out the others: each
virtual CPU has one of its own, or there is no plan.
"""


def cpus_of(text: str) -> list[int]:
    """`0,2-4` is 0, 2, 3, 4: as the sides have them, and as the kernel writes them."""
    found = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def plan(usable: list[int], storage: set[int], machines: int, cpus: int) -> list[list[int]] | None:
    """CPUs of each machine, in order; None where there are too few."""
    free = [cpu for cpu in sorted(usable) if cpu not in storage]
    if len(free) < machines * cpus:
        return None
    return [free[at * cpus : (at + 1) * cpus] for at in range(machines)]
