//! What CI runs: one list, run from the top, stopped at the first failure. And what takes a night.

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

/// A fixed budget of seeds; kept seeds and planted bugs are among the simulator's own tests.
const SIM: &str = "cargo xtask sim --seeds 2000";
/// Single faults at every 101st operation of small workloads: two minutes of two CPUs.
const SINGLE_FAULTS: &str = "cargo xtask sim --enumerate 101";

/// Real kernels, and PostgreSQL on this one, on the release build. By hand: the rest of
/// `tests.test_nvme`, `tests.test_migrate` (it needs a newer QEMU than Debian's own), and
/// `tests.test_powercut.Cut`.
const GUESTS: &str = "python3 -W ignore -m unittest -v tests.test_guest tests.test_host \
                      tests.test_memory tests.test_resume tests.test_remote \
                      tests.test_nvme.Nvme.test_one_array_two_ways_to_it \
                      tests.test_nvme_tcp tests.test_ublk tests.test_powercut.Judge";

/// Name of a step, and its command line.
type Step<'a> = (&'a str, &'a str);

/// Those of one line run side by side. What fails fastest stands first.
const STEPS: [&[Step<'static>]; 10] = [
    &[("format", "cargo fmt --all --check")],
    &[("house rules", "cargo xtask tidy")],
    &[("clippy", "cargo clippy --workspace --all-targets --locked -- -D warnings")],
    &[("licences and sources", "cargo deny --log-level error check bans licenses sources")],
    &[("release build", "cargo build --release -p ashlar-control --locked")],
    &[("clients for guests", "cargo build --release -p xtask --examples --locked")],
    &[("simulator", SIM)],
    &[("single faults", SINGLE_FAULTS)],
    // Each uses half of two CPUs. The lab runs all its studies, shortened, beside its own tests.
    &[("guests", GUESTS), ("lab", "make -s test-lab")],
    // Last, so that the test runner's own summary ends the output. Of benchmarks, only their own
    // tests.
    &[("tests", "cargo xtask test")],
];

/// What CI has no time for, after what it runs: the same for longer, with other seeds each night,
/// and what is run by hand elsewhere.
const NIGHTLY: [(&str, &str); 9] = [
    ("many seeds", "cargo xtask sim --seeds 200000"),
    ("many single faults", "cargo xtask sim --enumerate 7"),
    ("kills", "cargo test -p ashlar-control --test resume --locked"),
    ("hostile clients", "cargo xtask fuzz --seconds 600"),
    ("ways through vhost", "cargo xtask fuzz --guided vhost --seconds 600"),
    ("ways through NVMe/TCP", "cargo xtask fuzz --guided nvme_tcp --seconds 600"),
    ("ways through NBD", "cargo xtask fuzz --guided nbd --seconds 600"),
    (
        "more guests",
        "python3 -W ignore -m unittest -v tests.test_resume tests.test_nvme tests.test_nvme_tcp \
         tests.test_ublk tests.test_migrate tests.test_powercut",
    ),
    ("power cuts", "cargo xtask powercut --rounds 50"),
];
/// How long, or how often, tests do what they do for moments otherwise.
const LONGER: [(&str, &str); 3] =
    [("ASHLAR_KILL_SECONDS", "120"), ("ASHLAR_KILLS", "50"), ("ASHLAR_RESUMES", "50")];
/// What steps say that run side by side.
const LOGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target");

/// Runs all steps, and says how long each took. Stops at the first failure.
pub fn run(is_nightly: bool) -> ExitCode {
    let nightly = |&(name, line): &Step| {
        run_step((name, &format!("{line}{}", started_at(line))), is_nightly, None)
    };
    let is_good = STEPS.iter().all(|steps| run_beside(steps, is_nightly))
        && (!is_nightly || NIGHTLY.iter().all(nightly));
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One step as it is; of several, what each says once all have ended.
fn run_beside(steps: &[Step], is_nightly: bool) -> bool {
    if let [step] = steps {
        return run_step(*step, is_nightly, None);
    }
    let log = |name: &str| Path::new(LOGS).join(format!("ci-{name}.log"));
    let run = |step: Step| run_step(step, is_nightly, Some(&log(step.0)));
    let ended: Vec<bool> = thread::scope(|scope| {
        let runs: Vec<_> = steps.iter().map(|step| scope.spawn(move || run(*step))).collect();
        runs.into_iter().map(|run| run.join().unwrap_or(false)).collect()
    });
    for (name, _) in steps {
        println!("── {name} said:\n{}", std::fs::read_to_string(log(name)).unwrap_or_default());
    }
    ended.into_iter().all(|is_good| is_good)
}

/// `log`: where what it says goes.
fn run_step((name, line): Step, is_nightly: bool, log: Option<&Path>) -> bool {
    println!("── {name}: {line}");
    #[expect(clippy::disallowed_methods, reason = "it is the person who waits")]
    let began = std::time::Instant::now();
    let mut words = line.split_whitespace();
    let mut step = Command::new(words.next().unwrap_or_default());
    // Tests that need something of the machine say so, elsewhere; here it has to be there.
    step.args(words).env("ASHLAR_CI", "1").envs(LONGER.into_iter().filter(|_| is_nightly));
    let status = match log {
        Some(log) => File::create(log).and_then(|said| {
            step.stdout(said.try_clone()?).stderr(said);
            step.status()
        }),
        None => step.status(),
    };
    println!("── {name}: {} s", began.elapsed().as_secs());
    match status {
        Ok(status) if status.success() => return true,
        Ok(_) => eprintln!("── {name} failed"),
        Err(error) => eprintln!("── {name} cannot be run: {error}"),
    }
    false
}

/// Seeds, and small workloads, that no other night had.
fn started_at(line: &str) -> String {
    if !line.contains("xtask sim") {
        return String::new();
    }
    #[expect(clippy::disallowed_methods, reason = "it is another night")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    format!(" --start {}000", now.map_or(0, |now| now.as_secs()))
}
