//! The tests of the workspace, several programs side by side: most of them wait for a daemon more
//! than they compute, and cargo runs one after the other.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;

use serde_json::Value;

/// Beside as many as there are CPUs, one that waits.
const BESIDE_CPUS: usize = 1;
/// What promises something of pauses wants all CPUs for itself, after the others.
const ALONE: [&str; 1] = ["control resume"];
/// A program that takes longer hangs; what it said until then is what helps.
const SECONDS_MAX: &str = "3600";
/// What the last line of each program counts (libtest).
const COUNTED: [&str; 5] = ["passed", "failed", "ignored", "measured", "filtered out"];

/// One program of tests.
struct Program {
    name: String,
    path: PathBuf,
    /// Where cargo would run it.
    package: PathBuf,
}

/// What is known once programs have ended.
#[derive(Default)]
struct Ended {
    /// As in [`COUNTED`].
    counts: [u64; 5],
    failed: Vec<String>,
}

/// Builds all tests and runs each program once, whichever fail. What one says is printed at its
/// end, in one piece; the sum of all stands last, in the words of each.
pub fn run() -> ExitCode {
    #[expect(clippy::disallowed_methods, reason = "it is the person who waits")]
    let began = std::time::Instant::now();
    let Some(programs) = built() else {
        eprintln!("no tests were built");
        return ExitCode::FAILURE;
    };
    let is_alone = |program: &&Program| ALONE.contains(&program.name.as_str());
    let lanes = thread::available_parallelism().map_or(1, usize::from) + BESIDE_CPUS;
    let beside = Mutex::new(programs.iter().filter(|program| !is_alone(program)));
    let ended = Mutex::new(Ended::default());
    thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                while let Some(program) = next(&beside) {
                    tell(program, ran(program), &ended);
                }
            });
        }
    });
    programs.iter().filter(is_alone).for_each(|program| tell(program, ran(program), &ended));
    let ended = ended.into_inner().unwrap_or_default();
    let is_good = ended.failed.is_empty();
    if !is_good {
        println!("\nfailed: {}", ended.failed.join(", "));
    }
    let counts: Vec<String> =
        ended.counts.iter().zip(COUNTED).map(|(count, what)| format!("{count} {what}; ")).collect();
    println!("\n{} programs, built and run:", programs.len());
    println!(
        "test result: {}. {}finished in {:.2}s",
        if is_good { "ok" } else { "FAILED" },
        counts.concat(),
        began.elapsed().as_secs_f64(),
    );
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All programs of tests, by their names; `None` if they cannot be built, or there are none.
fn built() -> Option<Vec<Program>> {
    let mut cargo = crate::cargo::command();
    cargo.args(["test", "--workspace", "--tests", "--locked", "--no-run"]);
    cargo.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut building = cargo.spawn().ok()?;
    let messages = BufReader::new(building.stdout.take()?).lines().map_while(Result::ok);
    let mut programs: Vec<Program> = messages.filter_map(|line| program(&line)).collect();
    // Cargo tells of them as they are built.
    programs.sort_by(|one, other| (&one.package, &one.name).cmp(&(&other.package, &other.name)));
    let is_built = building.wait().is_ok_and(|status| status.success());
    (is_built && !programs.is_empty()).then_some(programs)
}

/// The program of tests that a message of cargo's names, if it does.
fn program(message: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let package = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
    let name = message["target"]["name"].as_str()?;
    let of = package.file_name()?.to_string_lossy();
    Some(Program { name: format!("{of} {name}"), path, package })
}

fn next<'a>(left: &Mutex<impl Iterator<Item = &'a Program>>) -> Option<&'a Program> {
    left.lock().ok()?.next()
}

/// Runs one to its end, as cargo would. What it says is in a file beside it: who hangs can be
/// looked at, and what outlives a program keeps nobody.
fn ran(program: &Program) -> std::io::Result<(ExitStatus, String)> {
    let path = program.path.with_extension("log");
    let said = File::create(&path)?;
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--kill-after=10", SECONDS_MAX]).arg(&program.path);
    command.current_dir(&program.package).env("CARGO_MANIFEST_DIR", &program.package);
    command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
    let status = command.status()?;
    Ok((status, String::from_utf8_lossy(&std::fs::read(path)?).into_owned()))
}

/// Prints what a program said, and adds it to what is known.
fn tell(program: &Program, ran: std::io::Result<(ExitStatus, String)>, ended: &Mutex<Ended>) {
    let Ok(mut ended) = ended.lock() else {
        return;
    };
    let name = &program.name;
    let is_good = match ran {
        Ok((status, said)) => {
            println!("\n── {name}: {status}\n{said}");
            let counts = said.lines().rev().find_map(counts);
            for (all, its) in ended.counts.iter_mut().zip(counts.unwrap_or_default()) {
                *all += its;
            }
            status.success() && counts.is_some()
        }
        Err(error) => {
            println!("\n── {name}: {} cannot be run: {error}", program.path.display());
            false
        }
    };
    if !is_good {
        ended.failed.push(name.clone());
    }
}

/// The numbers in a line of libtest's about its result.
fn counts(line: &str) -> Option<[u64; 5]> {
    let (_, result) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut counts = [0; 5];
    for (count, what) in counts.iter_mut().zip(COUNTED) {
        let mut parts = result.split("; ").filter_map(|part| part.split_once(' '));
        *count = parts.find(|(_, its)| *its == what)?.0.parse().ok()?;
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted() {
        let line = "test result: FAILED. 61 passed; 2 failed; 1 ignored; 0 measured; \
                    4 filtered out; finished in 0.50s";
        assert_eq!(counts(line), Some([61, 2, 1, 0, 4]));
        assert_eq!(counts("test result_of_none ... ok"), None);
    }

    #[test]
    fn programs_of_tests_are_found_among_what_was_built() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/a/crates/raid/Cargo.toml",
            "target":{"name":"all"},"profile":{"test":true},"executable":"/a/target/all-1"}"#;
        let found = program(message).expect("a program");
        assert_eq!((found.name.as_str(), found.package), ("raid all", "/a/crates/raid".into()));
        assert!(program(&message.replace("\"test\":true", "\"test\":false")).is_none());
        assert!(program("{}").is_none());
    }
}
