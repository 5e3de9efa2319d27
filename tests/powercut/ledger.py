"""What the database must still know after a power cut, kept outside of it.

Sessions number their transactions. A session says a number only after COMMIT has returned, and goes
on only when that was said: so after a cut the database has every number that was said, and at most
one more of each session. What a transaction writes follows from seed, session and number, so the
host works out the whole content of both tables and compares.

Each transaction moves money between two accounts, from the lower half to the upper one or back.
"""

import hashlib
import shlex
from collections import Counter
from dataclasses import dataclass, field

SESSIONS = 4
ACCOUNTS = 16000  # in pages: about three times what the server may keep in memory
HALF = ACCOUNTS // 2
FILLER_BYTES = 250
MODULUS = 1_000_003  # products stay exact in awk's floating point numbers

SCHEMA = f"""
CREATE TABLE account (id int PRIMARY KEY, amount bigint, filler text) WITH (fillfactor = 80);
INSERT INTO account
    SELECT id, 0, repeat('x', {FILLER_BYTES}) FROM generate_series(1, {ACCOUNTS}) id;
CREATE TABLE ledger (
    session int, number int, low int, high int, moved int, payload text,
    PRIMARY KEY (session, number));
CREATE INDEX ON ledger (payload);
CREATE EXTENSION amcheck;
"""

# One line of a session, and then one of every account.
CONTENT = r"""
SELECT 'session', session, count(*), max(number), md5(string_agg(payload, '' ORDER BY number)),
    sum(moved) FROM ledger GROUP BY session;
SELECT 'accounts', count(*), sum(amount), md5(string_agg(amount::text, ',' ORDER BY id))
    FROM account;
"""


@dataclass(frozen=True)
class Transaction:
    low: int
    high: int
    moved: int
    payload: str


def transaction(seed: int, session: int, number: int) -> Transaction:
    """The same as in `SCRIPT`, which runs in the guest."""
    x = (number * 7919 + session * 104729 + seed) % MODULUS
    y = (x * 31 + number) % MODULUS
    payload = hashlib.md5(f"{seed}.{session}.{number}".encode()).hexdigest() * (x % 16 + 1)
    return Transaction(x % HALF + 1, HALF + y % HALF + 1, x % 1000 - 500, payload)


SCRIPT = r"""{
    for (n = first; ; n++) {
        x = (n * 7919 + s * 104729 + seed) % M; y = (x * 31 + n) % M
        low = x % H + 1; high = H + y % H + 1; moved = x % 1000 - 500
        printf "BEGIN\\; UPDATE account SET amount = amount - %d WHERE id = %d\\; ", moved, low
        printf "UPDATE account SET amount = amount + %d WHERE id = %d\\; ", moved, high
        printf "INSERT INTO ledger VALUES (%d, %d, %d, %d, %d, ", s, n, low, high, moved
        printf "repeat(md5('%d.%d.%d'), %d))\\; COMMIT;\n", seed, s, n, x % 16 + 1
        printf "\\echo %d %d\n", s, n
    }
}"""


def session_script(seed: int, session: int, first: int, psql: str) -> str:
    """A shell script that commits and says `first`, the next, and so on until it is killed."""
    values = f"-v seed={seed} -v s={session} -v first={first} -v M={MODULUS} -v H={HALF}"
    return f"echo | mawk {values} {shlex.quote(SCRIPT)} | stdbuf -oL {psql} -q -v ON_ERROR_STOP=1"


@dataclass
class Ledger:
    seed: int
    said: Counter = field(default_factory=Counter)  # highest number of each session

    def take(self, line: str) -> bool:
        """False if a session says anything but its next number."""
        session, _, number = line.partition(" ")
        if not (session.isdigit() and number.isdigit()):
            return False
        if int(number) != self.said[int(session)] + 1:
            return False
        self.said[int(session)] = int(number)
        return True

    def judge(self, content: str) -> list[str]:
        """Everything that is wrong with what the database answers to `CONTENT`."""
        rows = [line.split("|") for line in content.split()]
        found = {int(row[1]): row[2:] for row in rows if row[0] == "session"}
        wrong, last = [], {}
        for session in range(SESSIONS):
            row = found.pop(session, ["0", "0", "", "0"])
            said, last[session] = self.said[session], int(row[1])
            name = f"session {session}"
            if last[session] < said:
                wrong.append(f"{name}: {said} was committed and {row[1]} is the last one there")
            if last[session] > said + 1:
                wrong.append(f"{name}: {row[1]} is there and only {said} was committed")
            made = [transaction(self.seed, session, n) for n in range(1, last[session] + 1)]
            payloads = "".join(each.payload for each in made)
            digest = hashlib.md5(payloads.encode()).hexdigest() if made else ""
            if [int(row[0]), row[2]] != [len(made), digest]:
                wrong.append(f"{name}: {row[0]} rows up to {row[1]}, or not with what was inserted")
        wrong += [f"rows of a session {session} that never was" for session in found]
        wrong += self.judge_accounts([row[1:] for row in rows if row[0] == "accounts"], last)
        # What was committed and not said counts from now on.
        self.said = Counter(last)
        return wrong

    def judge_accounts(self, rows: list[list[str]], last: dict[int, int]) -> list[str]:
        amounts = Counter()
        for session, number in last.items():
            for n in range(1, number + 1):
                each = transaction(self.seed, session, n)
                amounts[each.low] -= each.moved
                amounts[each.high] += each.moved
        listed = ",".join(str(amounts[id]) for id in range(1, ACCOUNTS + 1))
        right = [[str(ACCOUNTS), "0", hashlib.md5(listed.encode()).hexdigest()]]
        return [] if rows == right else [f"accounts: count, sum, md5 are {rows}, not {right}"]
