//! Goal: a guest whose front end keeps what is in flight never sees the daemon die: no error, no
//! wrong data, each request answered once, whenever it is killed.
//! Method: our own initiator, which verifies every block it reads and every answer it gets, while
//! the daemon is killed again and again. `ASHLAR_KILL_SECONDS` makes it longer.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use ashlar_reactor::prng::Prng;
use daemon::Daemon;
use serde_json::Value;

/// Of load, for each kind of ring.
const SECONDS_USUAL: u64 = 6;
/// Fewer kills in that time would mean little.
const KILLS_MIN: u64 = 3;
/// Beyond this a guest's own limits come near.
const GAP_MS_MAX: u64 = 10_000;

fn seconds() -> u64 {
    let told = std::env::var("ASHLAR_KILL_SECONDS").ok();
    told.map_or(SECONDS_USUAL, |told| told.parse().expect("seconds"))
}

/// Kills the daemon at random moments as long as the load lasts.
fn kill_under(ring: &str, more: &str) {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 32M");
    daemon.ok("export create e --volume v");
    let seconds = seconds();
    let mut load = daemon.run_beside(
        seconds + 60,
        &format!(
            "bench vhost --socket @/export/e.sock --force --rw randrw --verify --size 8M \
             --queues 3 --depth 32 --ring {ring} {more} --resume 30 --seconds {seconds} --json"
        ),
    );
    daemon.wait_for("export show e", |export| export["queues_active"] == 3);
    let mut prng = Prng::from_seed(seconds);
    while load.try_wait().unwrap().is_none() {
        // Each look takes some milliseconds.
        for _ in 0..prng.below(30) {
            daemon.json("export show e");
        }
        daemon.kill();
        daemon.start_again();
    }
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{ring}: {said}\n{}", daemon.log());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (setup, round) = (&report["setup"], &report["rounds"][0]);
    let count = |number: &Value| number.as_u64().unwrap();
    let number = |text: &Value| text.as_str().unwrap().parse::<u64>().unwrap();
    let (times, gap_ms) = (number(&setup["resumed"]), number(&setup["resumed_gap_ms_max"]));
    let (reads, verified) = (count(&round["reads"]["requests"]), count(&round["reads_verified"]));
    println!("{ring} {more}: {times} kills, {verified} reads verified, longest gap {gap_ms} ms");
    assert!(times >= KILLS_MIN, "{times} kills");
    assert!(gap_ms > 0 && gap_ms < GAP_MS_MAX, "{gap_ms} ms");
    // Where counting begins, one may be verified before and answered after.
    assert!(verified.abs_diff(reads) <= 1, "{verified} of {reads}");
    assert!(!daemon.log().contains("was stopped"), "{}", daemon.log());
}

/// One after the other: each wants two CPUs for itself.
#[test]
fn rings_go_on_after_kills() {
    kill_under("split", "");
    kill_under("packed", "--descriptors direct --segments 3 --block 12K");
}
