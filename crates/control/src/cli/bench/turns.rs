//! A against B in turns: A B A B …, in one run, so that what the machine does in between happens to
//! both.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use ashlar_bench::compare::{self, Comparison, compare};
use ashlar_bench::engine::Asked;
use ashlar_bench::report::{Report, Round};
use ashlar_bench::vhost::{InitiatorSpec, Neighbour};
use serde::Serialize;

use crate::cli::bench::progress::Progress;
use crate::cli::bench::{at_socket, text};
use crate::cli::output::{Output, rows, show, table};
use crate::refusal::{Answer, Refusal};

pub const ROUNDS_USUAL: u32 = 5;
/// Of clap, for what it does not understand.
const STATUS_USAGE: i32 = 2;

/// What both came to.
#[derive(Serialize)]
struct Turns {
    a: Side,
    b: Side,
    comparison: Vec<Comparison>,
}

#[derive(Serialize)]
struct Side {
    /// The program, the socket, or its neighbour.
    name: String,
    #[serde(flatten)]
    report: Report,
}

/// This program against another one, each turn a process of its own with the same options.
pub fn programs(other: &Path, rounds: u32, output: Output) -> Answer<()> {
    let own = std::env::current_exe()
        .map_err(|error| Refusal::failed(format!("this program does not find itself: {error}")))?;
    let arguments = child_arguments(std::env::args_os().skip(1));
    let programs = [own.as_path(), other];
    let names = programs.map(|program| program.display().to_string());
    take_turns(&names, rounds, output, |side| run_program(programs[side], &arguments))
}

/// Two back ends, each connected to anew for each turn.
pub fn sockets(
    sockets: [&Path; 2],
    spec: &InitiatorSpec,
    rounds: u32,
    output: Output,
) -> Answer<()> {
    let spec = InitiatorSpec { asked: Asked { rounds: 1, ..spec.asked }, ..*spec };
    let names = sockets.map(|socket| socket.display().to_string());
    take_turns(&names, rounds, output, |side| at_socket(sockets[side], &spec, None))
}

/// One back end beside a neighbour that asks as much as it is asked itself, its fair share, and
/// beside a noisy one.
pub fn neighbours(
    socket: &Path,
    spec: &InitiatorSpec,
    noisy: Neighbour<'_>,
    rounds: u32,
    output: Output,
) -> Answer<()> {
    let spec = InitiatorSpec { asked: Asked { rounds: 1, ..spec.asked }, ..*spec };
    let fair = Neighbour { spec, ..noisy };
    let names = ["beside its like", "beside a noisy neighbour"].map(str::to_owned);
    let neighbours = [fair, noisy];
    take_turns(&names, rounds, output, |side| at_socket(socket, &spec, Some(neighbours[side])))
}

/// `turn`: of the first or the second side.
fn take_turns(
    names: &[String; 2],
    rounds: u32,
    output: Output,
    turn: impl Fn(usize) -> Answer<Report>,
) -> Answer<()> {
    let mut reports: [Option<Report>; 2] = [None, None];
    for number in 1..=rounds {
        for (side, report) in reports.iter_mut().enumerate() {
            let letter = ["A", "B"][side];
            let progress = Progress::of(&format!("{letter} of round {number} of {rounds}: "));
            progress.say(&names[side]);
            let measured = turn(side);
            progress.end();
            let named = |its: Refusal| Refusal { error: format!("{letter}: {}", its.error), ..its };
            let measured = measured.map_err(named)?;
            match report {
                Some(report) => report.rounds.extend(measured.rounds),
                None => *report = Some(measured),
            }
        }
    }
    let [Some(a), Some(b)] = reports else {
        return Err(Refusal::invalid("nothing was compared").fix("use --rounds 5"));
    };
    let comparison = compare(&a.rounds, &b.rounds);
    let side = |name: &String, report| Side { name: name.clone(), report };
    let turns = Turns { a: side(&names[0], a), b: side(&names[1], b), comparison };
    show(output, &turns, turns_text)
}

fn turns_text(turns: &Turns) -> String {
    let side =
        |letter: &str, side: &Side| format!("{letter} = {}\n{}", side.name, text(&side.report));
    let mut shown = table(&compare::HEADS);
    shown.add_rows(turns.comparison.iter().map(Comparison::row));
    let compared = rows(&shown, "nothing can be compared: no requests were measured");
    format!("{}\n\n{}\n\n{compared}", side("A", &turns.a), side("B", &turns.b))
}

/// The same options for one turn of a child: without those of the comparison and of the output.
fn child_arguments(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const WITH_VALUE: [&str; 4] = ["--against", "--rounds", "--output", "-o"];
    let mut kept = Vec::new();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy();
        if WITH_VALUE.contains(&&*text) {
            arguments.next();
            continue;
        }
        let joined = |option: &&str| {
            text.strip_prefix(*option)
                .is_some_and(|rest| rest.starts_with('=') || (*option == "-o" && !rest.is_empty()))
        };
        if text == "--json" || WITH_VALUE.iter().any(joined) {
            continue;
        }
        drop(text);
        kept.push(argument);
    }
    kept.extend(["--rounds", "1", "--output", "json"].map(OsString::from));
    kept
}

fn run_program(program: &Path, arguments: &[OsString]) -> Answer<Report> {
    let shown = program.display();
    let ran = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| {
        Refusal::failed(format!("{shown} cannot be run: {error}"))
            .fix("name an ashlar program, such as target/release/ashlar of another tree")
    })?;
    let said = String::from_utf8_lossy(&ran.stderr);
    let said = said.lines().next().unwrap_or("it said nothing").trim_start_matches("error: ");
    if ran.status.code() == Some(STATUS_USAGE) {
        return Err(Refusal::failed(format!("{shown} does not understand these options: {said}"))
            .fix("build it from a commit that has them, or leave them out"));
    }
    if !ran.status.success() {
        return Err(Refusal::failed(format!("{shown} failed ({}): {said}", ran.status)));
    }
    serde_json::from_slice::<Report>(&ran.stdout)
        .ok()
        .filter(|report: &Report| report.rounds.iter().all(|round: &Round| round.seconds > 0.0))
        .ok_or_else(|| {
            Refusal::failed(format!("what {shown} printed is no report"))
                .fix("name an ashlar program")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_get_the_same_options_but_those_of_the_comparison() {
        let line = "bench engine --against /x/ashlar --rw randwrite --rounds=7 -o json -ojson \
                    --json --output=table --depth 4 --against=/y --output json --rounds 3";
        let kept = child_arguments(line.split_whitespace().map(OsString::from));
        let expected = "bench engine --rw randwrite --depth 4 --rounds 1 --output json";
        assert_eq!(kept, expected.split(' ').map(OsString::from).collect::<Vec<_>>());
    }
}
