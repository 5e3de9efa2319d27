//! Goal: an export goes no faster than an operator has said, from that moment on, also after a
//! restart; and a limit keeps nobody from ending it.
//! Method: as many requests as take a known time under a limit, from a front end of our own. Only
//! too little time is an error.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use daemon::Daemon;
use serde_json::json;

fn limited_daemon(options: &str) -> Daemon {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok(&format!("export create e --volume v --path @/e.sock {options}"));
    daemon
}

/// How many seconds a run of requests took.
fn took(daemon: &Daemon, asked: &str) -> f64 {
    let bench = "bench vhost --socket @/e.sock --size 4M --depth 16 --force --rounds 1";
    let report = daemon.json(&format!("{bench} {asked}"));
    report["rounds"][0]["seconds"].as_f64().unwrap_or_else(|| panic!("{report}"))
}

#[test]
fn requests_and_bytes_come_no_faster_than_was_said() {
    let mut daemon = limited_daemon("--write-iops 100 --burst 0s");
    assert!(took(&daemon, "--rw randwrite --ios 151") >= 1.5);
    assert!(daemon.json("export show e")["counters"]["limited"].as_u64().unwrap() > 100);
    let said = daemon.ok("export set e --write-iops none --read-bandwidth 400K");
    assert_eq!(said, "reads 400K/s, burst 0s\n");
    assert!(took(&daemon, "--rw randread --ios 151") >= 1.5);
    daemon.stop();
    daemon.start_again();
    let limits = daemon.json("export show e")["limits"].clone();
    assert_eq!(limits["read_bytes_per_second"], 400 << 10);
    assert!(took(&daemon, "--rw randread --ios 51") >= 0.5);
    daemon.ok("export set e --read-bandwidth none");
    let none = json!({ "read_iops": null, "write_iops": null, "read_bytes_per_second": null,
        "write_bytes_per_second": null, "burst_s": 0 });
    assert_eq!(daemon.json("export set e")["limits"], none);
}

#[test]
fn an_export_ends_though_its_guest_waits_for_hours() {
    let daemon = limited_daemon("--read-iops 1 --write-iops 1");
    let bench = "bench vhost --socket @/e.sock --size 4M --depth 32 --ios 9999 --force";
    let mut guest = daemon.run_beside(60, bench);
    daemon.wait_for("export show e", |export| export["counters"]["limited"].as_u64() > Some(20));
    daemon.ok("export delete e --force");
    guest.kill().unwrap();
    guest.wait().unwrap();
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    let daemon = limited_daemon("");
    for mistake in ["--read-iops 0", "--write-bandwidth x", "--read-iops -1", "--burst soon"] {
        daemon.misused(&format!("export set e {mistake}"));
    }
    assert!(daemon.refused("export set e --burst 2h").contains("3600"));
    assert!(daemon.refused("export set e --write-bandwidth 4095").contains("at least 4K"));
    assert!(daemon.refused("export set nobody --read-iops 5").contains("export list"));
}
