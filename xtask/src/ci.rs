//! What CI runs: one list, run from the top, stopped at the first failure.

use std::process::{Command, ExitCode};

/// A fixed budget of seeds; kept seeds and planted bugs are among the simulator's own tests.
const SIM: &str = "cargo xtask sim --seeds 2000";
/// Single faults at every 51st operation of small workloads: about a minute.
const SINGLE_FAULTS: &str = "cargo xtask sim --enumerate 51";

/// Real kernels, and PostgreSQL on this one, on the release build. By hand: the rest of
/// `tests.test_nvme`, `tests.test_migrate` (it needs a newer QEMU than Debian's own),
/// `tests.test_powercut.Cut`, and what needs a newer kernel (`tests.test_ublk`,
/// `tests.test_nvme_tcp.Authentication`).
const GUESTS: &str = "python3 -W ignore -m unittest -v tests.test_guest tests.test_host \
                      tests.test_resume tests.test_remote \
                      tests.test_nvme.Nvme.test_one_array_two_ways_to_it \
                      tests.test_nvme_tcp.NvmeTcp tests.test_powercut.Judge";

/// Name of a step, and its command line. What fails fastest stands first.
const STEPS: [(&str, &str); 11] = [
    ("format", "cargo fmt --all --check"),
    ("house rules", "cargo xtask tidy"),
    ("clippy", "cargo clippy --workspace --all-targets --locked -- -D warnings"),
    ("licences and sources", "cargo deny --log-level error check bans licenses sources"),
    ("release build", "cargo build --release -p ashlar-control --locked"),
    ("clients for guests", "cargo build --release -p xtask --examples --locked"),
    ("simulator", SIM),
    ("single faults", SINGLE_FAULTS),
    ("guests", GUESTS),
    // All studies of the lab, shortened, beside its own tests.
    ("lab", "make -s test-lab"),
    // Last, so that the test runner's own summary ends the output. Of benchmarks, only their own
    // tests.
    ("tests", "cargo test --workspace --tests --locked"),
];

/// Runs all steps, and says how long each took. Stops at the first failure.
pub fn run() -> ExitCode {
    for (name, line) in STEPS {
        println!("── {name}: {line}");
        #[expect(clippy::disallowed_methods, reason = "it is the person who waits")]
        let began = std::time::Instant::now();
        let mut words = line.split(' ');
        let program = words.next().unwrap_or_default();
        // Tests that need something of the machine say so, elsewhere; here it has to be there.
        let status = Command::new(program).args(words).env("ASHLAR_CI", "1").status();
        println!("── {name}: {} s", began.elapsed().as_secs());
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("── {name} failed");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
