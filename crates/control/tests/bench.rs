//! Goal: `ashlar bench` measures what it was asked for and says so; whatever cannot be is refused
//! with the option that mends it, and no drive or disk is overwritten without consent.
//! Method: runs that end after a number of requests, on small drives.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;

use daemon::{DRIVE_BYTES, Daemon};
use serde_json::Value;

const SMALL: &str = "--drives ram:64M*3 --size 4M --ios 2000";
const PRECIOUS: &[u8] = b"precious";

fn report(daemon: &Daemon, line: &str) -> Value {
    serde_json::from_str(&daemon.ok(&format!("{line} --json"))).unwrap()
}

/// What a bench that cannot be said: its error and its fix.
fn refused(daemon: &Daemon, line: &str) -> String {
    let said = daemon.refused(line);
    assert!(said.contains("\nfix: "), "{line}: {said}");
    said
}

#[test]
fn the_engine_is_measured() {
    let daemon = Daemon::start();
    let its = report(&daemon, &format!("bench engine {SMALL} --rw randrw --verify --rounds 2"));
    assert_eq!((&its["bench"], &its["setup"]["level"]), (&"engine".into(), &"5".into()));
    let rounds = its["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 2);
    for round in rounds {
        assert_eq!(round["all"]["requests"], 2000);
        assert_eq!(round["reads"]["requests"], round["reads_verified"]);
        assert!(round["all"]["latency"]["max_ns"].as_u64() > Some(0));
    }
    let text = daemon.ok(&format!("bench engine {SMALL} --rw randwrite --degraded 1"));
    assert!(text.contains("IOPS") && text.contains("write"), "{text}");
    assert!(text.contains("degraded 1") && !text.contains("read "), "{text}");
    let null = "--drives null:1T*5 --size 16M --ios 2000";
    for what in ["drive", "raid", "volume"] {
        let its = report(&daemon, &format!("bench engine {null} --what {what}"));
        assert_eq!(its["setup"]["what"], what);
    }
    let timed = "bench engine --members 3 --drive-size 64M --size 4M --seconds 1 --warm-up 0";
    let its = report(&daemon, timed);
    assert!(its["rounds"][0]["all"]["requests"].as_u64() > Some(0), "{its}");
}

#[test]
fn our_own_target_is_measured() {
    let daemon = Daemon::start();
    let its = report(&daemon, &format!("bench vhost {SMALL} --rw randrw --verify --queues 2"));
    assert_eq!((&its["bench"], &its["setup"]["ring"]), (&"vhost".into(), &"split".into()));
    assert_eq!(its["rounds"][0]["all"]["requests"], 2000);
    let text = daemon.ok(&format!("bench vhost {SMALL} --descriptors direct --segments 4"));
    assert!(text.contains("descriptors direct"), "{text}");
}

#[test]
fn a_daemons_export_is_measured_and_overwritten_only_with_consent() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 8M");
    daemon.ok("export create e --volume v");
    let socket = daemon.json("export show e")["socket"].as_str().unwrap().to_owned();
    let at = format!("bench vhost --socket {socket} --ios 500");
    assert_eq!(report(&daemon, &at)["rounds"][0]["reads_verified"], 0);
    daemon.wait_unused("e");
    for writes in ["--rw randwrite", "--rw randread --verify", "--fill"] {
        let said = daemon.refused(&format!("{at} {writes}"));
        assert!(said.contains("would be overwritten") && said.contains("--force"), "{said}");
    }
    let its = report(&daemon, &format!("{at} --rw randrw --verify --force"));
    assert!(its["rounds"][0]["reads_verified"].as_u64() > Some(100), "{its}");
    daemon.wait_unused("e");
    for (wrong, part) in [
        ("--size 9M", "--size"),
        ("--queues 65", "--queues"),
        ("--level 6", "leave --level"),
        ("--core 0", "leave --core"),
    ] {
        let said = refused(&daemon, &format!("{at} {wrong}"));
        assert!(said.contains(part), "{wrong}: {said}");
    }
    let turns = format!("{at} --against {socket} --rounds 2");
    let its = report(&daemon, &turns);
    assert_eq!(its["a"]["rounds"].as_array().map(Vec::len), Some(2));
    assert_eq!(its["comparison"][0]["measure"], "iops");
    let text = daemon.ok(&turns);
    assert!(text.contains("B/A") && text.contains("VERDICT"), "{text}");
}

#[test]
fn a_neighbour_is_at_work_for_as_long() {
    let daemon = Daemon::with_array(5, 3);
    for name in ["quiet", "noisy"] {
        daemon.ok(&format!("volume create {name} --array a --size 16M"));
        daemon.ok(&format!("export create {name} --volume {name} --path @/{name}.sock"));
    }
    let turns = "bench vhost --socket @/quiet.sock --neighbour @/noisy.sock --ios 300 --rounds 2 \
                 --neighbour-depth 64 --neighbour-block 16K";
    let compared = report(&daemon, turns);
    let said = |side: &str| compared[side]["setup"]["neighbour"].as_str().unwrap().to_owned();
    assert!(said("a").starts_with("randread, 4096 bytes, depth 32, at "), "{}", said("a"));
    assert!(said("b").starts_with("randread, 16384 bytes, depth 64, at "), "{}", said("b"));
    assert_eq!(compared["b"]["rounds"][1]["all"]["requests"], 300);
    assert!(
        compared["comparison"].as_array().unwrap().iter().any(|its| its["measure"] == "p99_ns")
    );
    let counters = daemon.json("export show noisy")["counters"].clone();
    let (reads, bytes) = (counters["reads"].as_u64(), counters["read_bytes"].as_u64());
    // Of the noisy one's two rounds at least what it has under way.
    assert!(bytes > reads.map(|reads| reads * 4096 + 2 * 64 * 12288), "{counters}");
    assert_eq!(daemon.json("export show quiet")["counters"]["reads"], 4 * 300);
    daemon.misused("bench vhost --neighbour @/noisy.sock");
    daemon.misused("bench vhost --socket @/quiet.sock --neighbour-depth 4");
}

#[test]
fn programs_are_compared_in_turns() {
    let daemon = Daemon::start();
    let own = env!("CARGO_BIN_EXE_ashlar");
    let line = format!("bench engine {SMALL} --against {own} --rounds 2");
    let its = report(&daemon, &line);
    for side in ["a", "b"] {
        assert_eq!(its[side]["rounds"].as_array().map(Vec::len), Some(2), "{its}");
        assert_eq!(its[side]["rounds"][1]["all"]["requests"], 2000);
    }
    for (program, part) in
        [("/nowhere/ashlar", "cannot be run"), ("/bin/true", "no report"), ("/bin/false", "failed")]
    {
        let said = daemon.refused(&format!("bench engine {SMALL} --against {program}"));
        assert!(said.contains("error: B: ") && said.contains(part), "{said}");
    }
}

#[test]
fn drives_with_data_are_overwritten_only_with_consent() {
    let daemon = Daemon::start();
    for number in 0..3 {
        daemon.make_drive(&format!("f{number}"));
    }
    let file = File::options().read(true).write(true).open(daemon.path("f1.img")).unwrap();
    file.write_all_at(PRECIOUS, 4096).unwrap();
    let line = "bench engine --drives @/f0.img,@/f1.img,@/f2.img --size 4M --ios 500 --verify";
    let said = refused(&daemon, line);
    assert!(said.contains("f1.img carries data") && said.contains("--force"), "{said}");
    let mut bytes = [0; PRECIOUS.len()];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, PRECIOUS);
    daemon.ok(&format!("{line} --force"));
    // They are blank now: nobody needs to agree to anything.
    daemon.ok(line);
    file.read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [0; PRECIOUS.len()]);
    assert_eq!(file.metadata().unwrap().len(), DRIVE_BYTES);
    // One that the daemon has is not taken from it.
    daemon.ok("drive attach @/f0.img");
    let said = refused(&daemon, &format!("{line} --force"));
    assert!(said.contains("held by another process"), "{said}");
}

#[test]
fn what_cannot_be_measured_is_refused_with_what_mends_it() {
    let daemon = Daemon::start();
    for (wrong, part) in [
        ("engine --degraded 2", "--degraded 1"),
        ("engine --what drive --degraded 1", "--what raid"),
        ("engine --block 1000", "--block"),
        ("engine --block 2M", "--block"),
        ("engine --size 1T", "--size"),
        ("engine --size 1K", "--size"),
        ("engine --level 7", "use 0, 1, 5"),
        ("engine --level 10+4", "--members 14"),
        ("engine --members 2", "--members"),
        ("engine --chunk 5K", "--chunk"),
        ("engine --drive-size 1M", "64M"),
        ("engine --drives ram:64M*x", "ram:512M*5"),
        ("engine --drives ram:1E", "--drive-size"),
        ("engine --drives null:64M*5 --verify", "ram:SIZE"),
        ("engine --drives @/missing", "missing"),
        ("engine --seconds 0", "--seconds 1"),
        ("engine --verify --size 64K", "--depth"),
        ("engine --core 1000", "--core"),
        ("engine --level 5 --policy bitmap --integrity", "array create"),
        ("vhost --what raid", "--what"),
        ("vhost --segments 3", "--segments"),
        ("vhost --queues 65", "--queues"),
        ("vhost --depth 1024 --descriptors direct", "--descriptors indirect"),
        ("vhost --client-core 1000", "--client-core"),
        ("vhost --socket @/nowhere", "--socket"),
    ] {
        let given = ["--drives", "--members", "--drive-size", "--socket"];
        let small = if given.iter().any(|o| wrong.contains(o)) { "" } else { "--drive-size 64M" };
        let said = refused(&daemon, &format!("bench {wrong} {small}"));
        assert!(said.contains(part), "{wrong}: {said}");
    }
}

#[test]
fn who_does_not_speak_vhost_user_is_named() {
    let daemon = Daemon::start();
    let said = refused(&daemon, "bench vhost --socket @/api.sock");
    assert!(said.contains("does not speak vhost-user"), "{said}");
    let _silent = UnixListener::bind(daemon.path("silent")).unwrap();
    let said = refused(&daemon, "bench vhost --socket @/silent");
    assert!(said.contains("does not answer") && said.contains("one front end"), "{said}");
}

#[test]
fn misuse_is_status_two() {
    let daemon = Daemon::start();
    for line in [
        "bench",
        "bench nothing",
        "bench engine --wr read",
        "bench engine --rw reed",
        "bench engine --mix 101",
        "bench engine --depth 0",
        "bench engine --rounds 0",
        "bench engine --ios 0",
        "bench engine --ios 5 --seconds 5",
        "bench engine --drives ram:64M --members 3",
        "bench engine --level five",
        "bench engine --what disk",
        "bench engine --seconds x",
        "bench engine --queues 2",
        "bench engine --socket",
        "bench vhost --ring round",
        "bench vhost --against x",
        "bench vhost --descriptors none",
    ] {
        daemon.misused(line);
    }
}
