# PYTHON_ARGCOMPLETE_OK
"""The command `ashlar-lab`: reruns storage studies on this machine, and says what came out.

Exit status: 0 done, 1 refused or failed (with the fix), 2 usage, 130 interrupted.
"""

import argparse
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

import argcomplete

from demo.engine import EngineError
from demo.guest_image import BuildError
from demo.vm import VmError
from lab import devices, paths
from lab import study as studies
from lab.ledger import LedgerError, Stayed
from lab.loads import LoadError
from lab.results import Results, ResultsError, to_go_on
from lab.run import Incomplete, Refusal, Run, RunError, Session
from lab.side import SideError
from lab.study import Study, StudyError, Where

REFUSED, USAGE, INTERRUPTED = 1, 2, 130
FAILURES = (
    Refusal, StudyError, RunError, SideError, LoadError, VmError, EngineError, ResultsError,
    Stayed, BuildError, LedgerError, OSError,
)  # fmt: skip
EXAMPLES = """examples:
  ashlar-lab list
  ashlar-lab run postgres-host --quick              minutes: the whole chain, no figures of use
  ashlar-lab run postgres-host --sides ashlar,btrfs
  ashlar-lab run postgres-vm --where guest          array and load both in one guest
  ashlar-lab run postgres-host --set drives.size=8G --set 'pgbench.clients=[10, 100]'
  ashlar-lab run --resume results/postgres-host-2026-01-31-1200
  ashlar-lab report results/postgres-host-2026-01-31-1200

Exit status: 0 done, 1 refused or failed (with the fix), 2 usage, 130 interrupted.
ASHLAR is the program to measure (target/release/ashlar), ASHLAR_CACHE where drive files, guests and
the ledger are kept (.cache). For completion: eval "$(register-python-argcomplete ashlar-lab)"
"""


class Usage(Exception):
    """Words that do not go together; the message says which do."""


class Interrupted(BaseException):
    """SIGTERM or SIGHUP: ends like Ctrl-C, with everything taken down."""


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    argcomplete.autocomplete(parser)
    given = sys.argv[1:] if arguments is None else arguments
    # what `plan` takes is its own to understand
    words, rest = parser.parse_known_args(given[:1] if given[:1] == ["plan"] else given)
    if rest:
        values = [word for word in rest if "=" in word and not word.startswith("-")]
        hint = "; each KEY=VALUE takes a --set of its own" if values else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    words.arguments = given[1:]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return words.run(words) or 0
    except (KeyboardInterrupt, Interrupted):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except Usage as error:
        print(f"ashlar-lab: {error}", file=sys.stderr)
        return USAGE
    except FAILURES as error:
        for line in "\n".join(reasons(error)).splitlines():
            print(f"ashlar-lab: {line}", file=sys.stderr)
        return REFUSED


def reasons(error: BaseException) -> list[str]:
    """What went wrong first comes first: taking down what is broken may fail, too."""
    earlier = error.__context__ if not error.__suppress_context__ else None
    told = isinstance(error, (*FAILURES, Interrupted))
    return (reasons(earlier) if earlier else []) + ([str(error)] if told else [repr(error)])


def interrupt(number: int, frame) -> None:
    raise Interrupted()


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ashlar-lab",
        description=__doc__.split("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    command("list", list_studies, "the studies that are there")
    check = command("check", check_study, "whether this machine can run a study; starts nothing")
    what_to_run(check)
    run = command("run", run_study, "run a study; results go to a directory, cell by cell")
    what_to_run(run)
    run.add_argument("--no-report", action="store_true", help="only measure")
    report = command("report", make_report, "make the report of a directory of results, again")
    report.add_argument("results", type=Path, metavar="DIR")
    command("plan", make_plan, "what a server would do, from figures of its drives")
    command("clean", clean, "remove what a run has left behind that was killed")
    return parser


def what_to_run(parser: argparse.ArgumentParser) -> None:
    study = parser.add_argument("study", nargs="?", help="a name of `list`, or a TOML file")
    study.completer = lambda **_: [path.stem for path in paths.STUDIES.glob("*.toml")]
    parser.add_argument(
        "--quick", action="store_true", help="check the whole chain in minutes, with less of all"
    )
    parser.add_argument(
        "--where", choices=list(map(str, Where)),
        help="array and load there, without the words that the study has for another place: host, "
        "both in one guest, or the load in machines of its own (vm)",
    )  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on where a run was stopped")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="change the study: drives.size=8G, pgbench.clients=[10,50], side.ashlar.policy=bitmap",
    )  # fmt: skip
    parser.add_argument("--sides", metavar="A,B", help="only these sides, in this order")
    parser.add_argument(
        "--unequal", action="store_true", help="compare sides of unlike protection; the report says"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="all that drives of kind `block` carry may go"
    )
    parser.add_argument(
        "--skip-missing", action="store_true", help="leave out what this machine cannot run"
    )


def list_studies(words) -> None:
    for path in sorted(paths.STUDIES.glob("*.toml")):
        study = tomllib.loads(path.read_text())
        sides = ", ".join(side.get("name", side["kind"]) for side in study["side"])
        print(f"{path.stem:16} {study['title']} ({sides})")
        if study.get("about"):
            print(f"{'':16} {study['about']}")


def check_study(words) -> None:
    study, home = asked(words)[:2]
    with Session(paths.cache()) as session:
        session.refuse_leftovers()
        run = Run(study, Results.open(home), session, words.skip_missing, words.overwrite)
        run.prepare()
        run.place.close()
    for name, why in run.skipped.items():
        print(f"left out: {name}: {why}")
    print(f"{study.title}: nothing stands in its way")


def run_study(words) -> None:
    study, home, text = asked(words)
    with Session(paths.cache()) as session:
        session.refuse_leftovers()
        run = Run(study, Results.open(home), session, words.skip_missing, words.overwrite)
        run.prepare()
        if not words.resume:
            write_study(home, study, text)
        incomplete = None
        try:
            run.run()
        except Incomplete as error:
            incomplete = error
        except BaseException:
            print(f"to go on: {again(words, home)}", file=sys.stderr)
            raise
    print(f"results: {home}")
    try:
        if not words.no_report:
            words.results = home
            make_report(words)
    finally:
        if incomplete:
            print(f"to try again what failed: {again(words, home)}", file=sys.stderr)
            raise incomplete


def again(words, home: Path) -> str:
    given = ["--skip-missing"] * words.skip_missing + ["--overwrite"] * words.overwrite
    return to_go_on(home, given)


def asked(words) -> tuple[Study, Path, str]:
    """The study, where its results go, and its text."""
    if words.resume:
        given = [words.study, words.quick, words.changes, words.sides, words.out, words.unequal]
        if any([*given, words.where]):
            raise Usage("--resume goes on with what was asked before: give nothing else")
        return studies.as_run(words.resume / "study.json"), words.resume, ""
    if not words.study:
        raise Usage("say which study: `ashlar-lab list` shows them")
    path = paths.study_file(words.study)
    changes = [*words.changes, *(["unequal=true"] if words.unequal else [])]
    study = studies.load(path, words.quick, changes, words.where and Where(words.where))
    if words.sides:
        study = studies.only(study, words.sides.split(","))
    study = study.model_copy(update={"drives": devices.identified(study.drives)})
    home = words.out or Path("results") / f"{path.stem}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise StudyError(f"{home} is not empty: --resume {home}, or say another --out")
    return study, home, path.read_text()


def write_study(home: Path, study: Study, text: str) -> None:
    """As it was written, and as it is run: with `quick` and what was `--set`. Once: a run that goes
    on reads it."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "study.toml").write_text(text)
    draft = home / "study.draft"
    draft.write_text(study.model_dump_json(indent=2) + "\n")
    draft.rename(home / "study.json")


def make_report(words) -> None:
    from lab import report

    print(f"report: {report.make(words.results)}")


def make_plan(words) -> int | None:
    from lab import plan

    return plan.main(words.arguments)


def clean(words) -> None:
    with Session(paths.cache()) as session:
        lines = list(session.ledger.clean())
    print("\n".join(lines) if lines else "there is nothing to remove")


if __name__ == "__main__":
    sys.exit(main())
