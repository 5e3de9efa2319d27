//! Goal: a guest whose front end keeps what is in flight never sees the daemon die: no error, no
//! wrong data, each request answered once, whenever it is killed; and no guest at all sees another
//! program take its place.
//! Method: our own initiator, which verifies every block it reads and every answer it gets, while
//! the daemon is killed again and again. `ASHLAR_KILL_SECONDS` makes it longer.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ashlar_reactor::prng::Prng;
use daemon::Daemon;
use serde_json::Value;

/// Of load, for each kind of ring.
const SECONDS_USUAL: u64 = 6;
const UPGRADE_SECONDS: u64 = 8;
/// Fewer kills in that time would mean little,
const KILLS_MIN: u64 = 3;
const UPGRADES_MIN: usize = 2;
/// and on a busy machine it takes so many times as long until there were as many.
const LONGER: [u64; 3] = [1, 3, 10];
/// Beyond this a guest's own limits come near. A lease that took long to be written is watched for
/// ten seconds and a half.
const GAP_MS_MAX: u64 = 25_000;
/// What is promised, on a machine that lets the daemon run: the longest pause after a kill,
const KILL_MS: u64 = 3000;
/// and the usual one while another program takes over.
const UPGRADE_MS: u64 = 1000;

/// Each of those that last wants two CPUs for itself.
static ALONE: Mutex<()> = Mutex::new(());

fn seconds() -> u64 {
    let told = std::env::var("ASHLAR_KILL_SECONDS").ok();
    told.map_or(SECONDS_USUAL, |told| told.parse().expect("seconds"))
}

/// Past the test runner, which shows nothing that a test prints if it passes.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Loads, one after the other, until the daemon was killed often enough under one of them, and was
/// back in time.
fn kill_under(ring: &str, more: &str) {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 32M");
    daemon.ok("export create e --volume v");
    let is_shown = |longer: u64| {
        let (kills, gap_ms) = killed_under(&mut daemon, ring, more, longer * seconds());
        kills >= KILLS_MIN && gap_ms < KILL_MS
    };
    assert!(LONGER.into_iter().any(is_shown), "it is hardly killed, or comes back too late");
}

/// Kills the daemon at random moments as long as the load lasts; how often, and the longest pause
/// in milliseconds.
fn killed_under(daemon: &mut Daemon, ring: &str, more: &str, seconds: u64) -> (u64, u64) {
    daemon.wait_unused("e");
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
    say(&format!(
        "{ring} {more}: {times} kills, {verified} reads verified, longest gap {gap_ms} ms \
         ({KILL_MS} promised)"
    ));
    assert!(gap_ms < GAP_MS_MAX && (gap_ms > 0 || times == 0), "{gap_ms} ms");
    // Where counting begins, those under way may be verified before and answered after.
    assert!(verified.abs_diff(reads) <= 3 * 32, "{verified} of {reads}");
    assert!(!daemon.log().contains("was stopped"), "{}", daemon.log());
    (times, gap_ms)
}

#[test]
fn rings_go_on_after_kills() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    kill_under("split", "");
    kill_under("packed", "--descriptors direct --segments 3 --block 12K");
}

fn memfds(daemon: &Daemon) -> usize {
    let files = std::fs::read_dir(daemon.proc("fd")).unwrap();
    // One may be closed meanwhile.
    let links = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("/memfd:")).count()
}

/// Its front end would see it if the socket were closed.
#[test]
fn guests_stay_connected_while_another_program_takes_over() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 32M");
    daemon.ok("export create e --volume v");
    let mut count = 0;
    for ring in ["split", "packed"] {
        let is_shown = |longer: u64| {
            let mut pauses = upgraded_under(&daemon, ring, longer * UPGRADE_SECONDS, &mut count);
            pauses.sort_unstable();
            pauses.len() >= UPGRADES_MIN && pauses[pauses.len() / 2] < UPGRADE_MS
        };
        assert!(LONGER.into_iter().any(is_shown), "{ring}: guests wait for too long");
    }
    assert_eq!(daemon.array_state("a"), "optimal");
}

/// Upgrades the daemon as long as the load lasts; how long guests waited each time, in
/// milliseconds. `count`: how many there were so far.
fn upgraded_under(daemon: &Daemon, ring: &str, seconds: u64, count: &mut u64) -> Vec<u64> {
    let line = format!(
        "bench vhost --socket @/export/e.sock --force --rw randrw --verify --size 8M --queues 3 \
         --depth 32 --ring {ring} --seconds {seconds} --json"
    );
    let mut load = daemon.run_beside(seconds + 60, &line);
    daemon.wait_for("export show e", |export| export["queues_active"] == 3);
    let process = daemon.json("status")["pid"].clone();
    assert!(memfds(daemon) > 0, "a guest's memory");
    let mut pauses = Vec::new();
    while load.try_wait().unwrap().is_none() {
        let after = daemon.json("upgrade");
        *count += 1;
        assert_eq!((&after["count"], &after["error"]), (&(*count).into(), &Value::Null));
        assert_eq!(daemon.json("status")["pid"], process);
        pauses.push(after["paused_ms"].as_u64().unwrap());
    }
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{ring}: {said}\n{}", daemon.log());
    say(&format!("{ring}: upgrades, guests waited for {pauses:?} ms ({UPGRADE_MS} promised)"));
    assert!(pauses.iter().all(|ms| *ms < GAP_MS_MAX), "{pauses:?}");
    // It is gone, and no file of its memory is left.
    daemon.wait_for("export show e", |_| memfds(daemon) == 0);
    pauses
}

/// Each waits half a second for its lease, however fast the machine is.
#[test]
fn several_arrays_are_taken_over_side_by_side() {
    const ARRAYS: u64 = 6;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let daemon = Daemon::with_drives(6);
    for number in 0..ARRAYS {
        daemon.ok(&format!("array create a{number} --level 0 --drives d{number}"));
        daemon.ok(&format!("volume create v{number} --array a{number} --size 16M"));
        daemon.ok(&format!("export create e{number} --volume v{number}"));
    }
    let took = |_| daemon.json("upgrade")["paused_ms"].as_u64().unwrap();
    assert!((0..3).map(took).any(|ms| ms < (ARRAYS - 1) * 500), "one after the other");
    for number in 0..ARRAYS {
        assert_eq!(daemon.json(&format!("export show e{number}"))["state"], "listening");
    }
}

#[test]
fn a_front_end_within_a_message_delays_nobody_for_long() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    let mut front_end = UnixStream::connect(daemon.path("export/e.sock")).unwrap();
    front_end.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    front_end.write_all(&[1, 0, 0]).unwrap();
    daemon.wait_for("export show e", |export| export["state"] == "connected");
    let after = daemon.json("upgrade");
    assert_eq!((&after["count"], &after["error"]), (&1.into(), &Value::Null));
    assert!(after["paused_ms"].as_u64().unwrap() < GAP_MS_MAX, "{after}");
    assert_eq!(daemon.json("export show e")["state"], "listening");
    let end = front_end.read(&mut [0]).map_err(|error| error.kind());
    assert!(matches!(end, Ok(0) | Err(ErrorKind::ConnectionReset)), "{end:?}");
}

#[test]
fn a_program_that_cannot_take_over_does_not() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    for (binary, said) in [
        ("/nowhere/ashlar", "there is no program"),
        ("/bin/true", "it says nothing"),
        ("/bin/false", "it says nothing"),
    ] {
        let refused = daemon.refused(&format!("upgrade --binary {binary}"));
        assert!(refused.contains(said) && refused.contains("goes on as it is"), "{refused}");
    }
    // One that consents and is gone when it is wanted.
    let program = daemon.path("program");
    let script = "#!/bin/sh\nrm -- \"$0\"\necho takes over: ashlar 9\n";
    std::fs::write(&program, script).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(&program, executable).unwrap();
    let output = daemon.run(&format!("upgrade --binary {}", program.display()));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("did not take over") && said.contains("goes on"), "{said}");
    assert_eq!(daemon.json("export show e")["state"], "listening");
    assert_eq!(daemon.array_state("a"), "optimal");
    // Memory would be lost.
    daemon.ok("drive attach ram:64M --name m0");
    daemon.ok("drive attach ram:64M --name m1");
    daemon.ok("array create fleeting --level 1 --drives m0,m1");
    assert!(daemon.refused("upgrade").contains("memory of this process"));
}
