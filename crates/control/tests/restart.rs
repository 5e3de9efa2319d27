//! Goal: what was promised before a stop, a kill or the loss of the host holds afterwards.
//! Method: a daemon stopped, killed, started again, with drives missing or its state gone.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use daemon::Daemon;
use serde_json::Value;

#[test]
fn everything_comes_back() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    daemon.attach_new("x");
    daemon.attach_new("y");
    daemon.ok("array create stopped --level 1 --drives x,y");
    daemon.ok("array stop stopped");
    for by_force in [false, true] {
        if by_force {
            daemon.kill()
        } else {
            daemon.stop()
        }
        assert!(by_force || !daemon.path("api.sock").exists(), "the socket is left behind");
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "optimal");
        assert_eq!(daemon.array_state("stopped"), "stopped");
        assert_eq!(daemon.json("export show e")["state"], "listening");
        assert_eq!(daemon.json("volume show v")["bytes"], 16 << 20);
        assert_eq!(daemon.json("status")["problems"], serde_json::json!([]));
    }
}

#[test]
fn a_kill_is_a_power_cut_for_lossy_drives() {
    let mut daemon = Daemon::start();
    for drive in 0..3 {
        daemon.ok(&format!("drive attach lossy:@/l{drive}.img --size 64M"));
    }
    daemon.ok("array create a --level 5 --drives l0,l1,l2");
    assert_eq!(daemon.json("drive show l1")["kind"], "lossy");
    // What the daemon answered for is durable; its drives keep nothing else for certain.
    for number in 0..8 {
        daemon.ok(&format!("volume create v{number} --array a --size 1M"));
        daemon.kill();
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "optimal");
        let volumes = daemon.json("volume list").as_array().unwrap().len();
        assert_eq!(volumes, number + 1);
    }
    // A stop is none, nor is to let a drive go.
    daemon.ok("array stop a");
    daemon.ok("array start a");
    daemon.ok("drive detach l0 --force");
    daemon.ok("drive attach lossy:@/l0.img");
    daemon.ok("array rebuild a --wait");
    daemon.stop();
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "optimal");
}

#[test]
fn arrays_assemble_from_their_labels_alone() {
    let mut daemon = Daemon::with_drives(7);
    daemon.create_array("a", 5, 4);
    daemon.ok("array create b --level 1 --drives d4,d5");
    daemon.ok("volume create v --array a --size 16M");
    daemon.stop();
    daemon.start_without_state();
    assert!(daemon.ok("array start --scan").contains("no array"));
    for name in ["d6", "d3", "d5", "d1", "d4", "d0", "d2"] {
        daemon.ok(&format!("drive attach @/{name}.img"));
    }
    daemon.ok("array start --scan");
    assert_eq!(daemon.array_state("a"), "optimal");
    assert_eq!(daemon.array_state("b"), "optimal");
    assert_eq!(daemon.json("volume show v")["array"], "a");
    // Known again: they start with the daemon.
    daemon.stop();
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "optimal");
}

/// A daemon that was started while one drive of its array was elsewhere.
fn without_d2() -> Daemon {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.stop();
    std::fs::rename(daemon.path("d2.img"), daemon.path("away")).unwrap();
    daemon.start_again();
    daemon
}

#[test]
fn a_missing_drive_leaves_the_array_degraded() {
    let daemon = without_d2();
    let array = daemon.json("array show a");
    assert_eq!(array["state"], "degraded");
    assert_eq!(array["members"][2]["last_drive"], "d2");
    let drive = daemon.json("drive show d2");
    assert_eq!(drive["state"], "missing");
    assert!(drive["error"].as_str().unwrap().contains("does not exist"));
    let status = daemon.ok("status");
    assert!(status.contains("! drive d2 is missing"), "{status}");
    // It comes back elsewhere, under its old name.
    daemon.ok("drive attach @/away --name d2");
    daemon.ok("array rebuild a --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
}

/// Its driver finds it a moment after the daemon has started.
#[test]
fn a_drive_that_comes_late_is_taken() {
    let daemon = without_d2();
    assert_eq!(daemon.array_state("a"), "degraded");
    let said = daemon.ok("status");
    assert!(said.contains("once it is there"), "{said}");
    daemon.ok("volume create v --array a --size 16M");
    std::fs::rename(daemon.path("away"), daemon.path("d2.img")).unwrap();
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

/// As a daemon that was killed holds them, until the kernel is done with what it asked of them.
fn held(daemon: &Daemon, drives: &[&str]) -> Vec<std::fs::File> {
    let hold = |drive: &&str| {
        let file = std::fs::File::open(daemon.path(&format!("{drive}.img"))).unwrap();
        // The daemon may have it for a moment yet.
        file.lock().unwrap();
        file
    };
    drives.iter().map(hold).collect()
}

#[test]
fn drives_that_are_held_at_the_start_are_taken_as_soon_as_they_are_let_go() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    daemon.kill();
    // Too many for the array to start without them: it does once they are there.
    let held_by_another = held(&daemon, &["d0", "d1", "d2", "d3"]);
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "unavailable");
    assert!(daemon.ok("status").contains("is held by another process"));
    drop(held_by_another);
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    daemon.wait_for("export show e", |export| export["state"] == "listening");
    let bench = "bench vhost --socket @/export/e.sock --ios 500 --rw randrw --verify --force";
    daemon.ok(bench);
    daemon.kill();
    // One that it starts without: what it missed is rebuilt.
    let held_by_another = held(&daemon, &["d2"]);
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "degraded");
    daemon.ok(bench);
    drop(held_by_another);
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

#[test]
fn an_array_that_cannot_start_does_not_stop_the_daemon() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    daemon.stop();
    for name in ["d1", "d2"] {
        std::fs::rename(daemon.path(&format!("{name}.img")), daemon.path(name)).unwrap();
    }
    daemon.start_again();
    let array = daemon.json("array show a");
    assert_eq!(array["state"], "unavailable");
    assert!(array["error"].as_str().unwrap().contains("2 of 3 members"), "{array}");
    assert_eq!(daemon.json("export show e")["state"], "down");
    let said = daemon.refused("volume create w --array a --size 1M");
    assert!(said.contains("does not run"), "{said}");
    daemon.refused("array start a");
    daemon.ok("drive attach @/d1 --name d1");
    daemon.ok("array start a");
    assert_eq!(daemon.array_state("a"), "degraded");
    assert_eq!(daemon.json("export show e")["state"], "listening");
    // A missing drive can be forgotten.
    daemon.ok("drive detach d2");
    daemon.refused("drive show d2");
}

#[test]
fn a_drive_that_missed_writes_is_not_trusted() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("drive detach d0 --force");
    // d0 misses this.
    daemon.ok("volume delete v");
    daemon.ok("volume create w --array a --size 16M");
    // Whatever happens to the daemon next:
    daemon.kill();
    std::fs::rename(daemon.path("d1.img"), daemon.path("away")).unwrap();
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "unavailable");
    daemon.ok("drive attach @/d0.img");
    let said = daemon.refused("array start a");
    assert!(said.contains("newer data") && said.contains("--force"), "{said}");
    // On a host that knows nothing of it, too.
    daemon.stop();
    daemon.start_without_state();
    daemon.ok("drive attach @/d0.img");
    let said = daemon.refused("array start --scan");
    assert!(said.contains("newer data"), "{said}");
    // With the other drive here, the array is the newer one, and d0 is given what it missed.
    daemon.ok("drive attach @/away --name d1");
    daemon.ok("array start --scan");
    daemon.ok("volume show w");
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    daemon.refused("volume show v");
}

#[test]
fn half_a_mirror_starts_if_it_is_the_current_half() {
    for by_force in [false, true] {
        let mut daemon = Daemon::with_array(1, 2);
        daemon.ok("volume create v --array a --size 16M");
        if by_force {
            daemon.kill()
        } else {
            daemon.stop()
        }
        std::fs::rename(daemon.path("d0.img"), daemon.path("away")).unwrap();
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "degraded", "by force: {by_force}");
        daemon.ok("volume show v");
        // And once more, now that the other half may have been left behind.
        daemon.ok("volume create w --array a --size 8M");
        daemon.kill();
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "degraded");
        daemon.ok("volume show w");
    }
}

/// The older half of a mirror was started by force, and is the array from then on: however often
/// the other had been started before, and also if that is all that is there.
#[test]
fn a_half_that_was_left_behind_stays_behind() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("drive detach d1 --force");
    daemon.ok("volume create w --array a --size 16M");
    for _ in 0..3 {
        daemon.stop();
        daemon.start_again();
    }
    daemon.stop();
    std::fs::rename(daemon.path("d0.img"), daemon.path("away")).unwrap();
    daemon.start_again();
    daemon.ok("drive attach @/d1.img");
    daemon.refused("array start a");
    daemon.ok("array start a --force");
    daemon.ok("volume create x --array a --size 16M");
    // Only the one that was left behind is there.
    daemon.kill();
    std::fs::rename(daemon.path("away"), daemon.path("d0.img")).unwrap();
    std::fs::rename(daemon.path("d1.img"), daemon.path("d1.away")).unwrap();
    daemon.start_again();
    daemon.run("drive attach @/d0.img");
    let said = daemon.refused("array start a");
    assert!(said.contains("newer data"), "{said}");
    // Both are, and the daemon knows which of them it had last.
    daemon.kill();
    std::fs::rename(daemon.path("d1.away"), daemon.path("d1.img")).unwrap();
    daemon.start_again();
    is_left_alone(&daemon, "d0");
    daemon.ok("volume show x");
    daemon.refused("volume show w");
    // One that never had it does not.
    daemon.kill();
    std::fs::remove_file(daemon.path("state/catalog.json")).unwrap();
    daemon.start_again();
    daemon.ok("drive attach @/d0.img");
    daemon.ok("drive attach @/d1.img");
    let said = daemon.refused("array start --scan");
    assert!(said.contains("d0 went on without d1") && said.contains("drive detach"), "{said}");
    // Whichever is chosen stays chosen. Where the other was used later it has to be said again.
    for (other, chosen, gone) in [("d0", "x", "w"), ("d1", "w", "x")] {
        daemon.kill();
        std::fs::remove_file(daemon.path("state/catalog.json")).unwrap();
        daemon.start_again();
        daemon.ok("drive attach @/d0.img");
        daemon.ok("drive attach @/d1.img");
        daemon.ok(&format!("drive detach {other}"));
        daemon.ok("array start a");
        daemon.ok(&format!("drive attach @/{other}.img"));
        is_left_alone(&daemon, other);
        daemon.kill();
        daemon.start_again();
        if other == "d0" {
            is_left_alone(&daemon, other);
        } else {
            let said = daemon.refused("array start a");
            assert!(said.contains("went on without"), "{said}");
            daemon.ok("drive detach d1");
            daemon.ok("array start a");
        }
        daemon.ok(&format!("volume show {chosen}"));
        daemon.refused(&format!("volume show {gone}"));
    }
}

fn is_left_alone(daemon: &Daemon, drive: &str) {
    daemon.wait_for(&format!("drive show {drive}"), |shown| {
        shown["error"].as_str().is_some_and(|error| error.contains("used elsewhere"))
    });
}

/// What keeps the daemon from storing what it knows is said, for as long as that is so.
#[test]
fn what_cannot_be_stored_is_said() {
    let daemon = Daemon::with_array(1, 2);
    let in_the_way = daemon.path("state").join("catalog.json.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let what = "the catalog in";
    let is_told = |status: &Value| {
        let problems = status["problems"].as_array().unwrap();
        problems.iter().any(|its| its.as_str().unwrap().starts_with(what))
    };
    assert!(!is_told(&daemon.json("status")));
    let output = daemon.run("volume create v --array a --size 16M");
    assert!(String::from_utf8_lossy(&output.stderr).contains(what));
    assert!(is_told(&daemon.json("status")));
    std::fs::remove_dir(&in_the_way).unwrap();
    daemon.wait_for("status", |status| !is_told(status));
    daemon.ok("volume create v --array a --size 16M");
}

/// Sizes of drives, and of a volume that fills most of three: on a machine that is done with small
/// ones before it can be looked at, larger ones are tried.
const REBUILT: [(&str, &str); 3] = [("64M", "100M"), ("512M", "850M"), ("2G", "3400M")];
/// Of a member, what is rebuilt before its daemon is killed: one turn more, just then, does not end
/// it, nor does the next daemon's first.
const REBUILT_PERCENT_MAX: u64 = 50;

/// How much of member 0 is filled, in percent, and for how long it is being rebuilt, in
/// milliseconds; `None`: it is not.
fn rebuilt(array: &Value) -> Option<(u64, u64)> {
    let elapsed_ms = array["rebuild"]["elapsed_ms"].as_u64()?;
    Some((array["members"][0]["rebuilt_percent"].as_u64()?, elapsed_ms))
}

/// The same once it `is_far`; `None`: it is done by then, or almost.
fn under_way(daemon: &Daemon, is_far: impl Fn((u64, u64)) -> bool) -> Option<(u64, u64)> {
    let array = daemon.wait_for("array show a", |array| {
        array["state"] == "optimal" || rebuilt(array).is_some_and(&is_far)
    });
    rebuilt(&array).filter(|(percent, _)| *percent < REBUILT_PERCENT_MAX)
}

/// Its daemon is killed, and it goes on from where it was.
#[test]
fn a_rebuild_goes_on_after_a_restart() {
    let goes_on = |(drive, volume)| rebuild_goes_on(drive, volume).is_some();
    assert!(REBUILT.into_iter().any(goes_on), "it is done before it can be looked at");
}

/// `None`: it was done too soon to say.
fn rebuild_goes_on(drive: &str, volume: &str) -> Option<()> {
    let mut daemon = Daemon::start();
    for name in ["d0", "d1", "d2", "new"] {
        daemon.ok(&format!("drive attach @/{name}.img --size {drive}"));
    }
    daemon.create_array("a", 5, 3);
    // A few megabytes, and a rest of more than two seconds.
    daemon.ok("array set a --rebuild-share 1");
    daemon.ok(&format!("volume create v --array a --size {volume}"));
    daemon.ok("export create e --volume v");
    let fill = format!("--force --fill --size {volume} --ios 1");
    daemon.ok(&format!("bench vhost --socket @/export/e.sock {fill}"));
    daemon.ok("drive detach d0 --force");
    daemon.ok("array replace a --member 0 --new new --force");
    let (first, at_ms) = under_way(&daemon, |(percent, _)| percent >= 4)?;
    // It is made durable every two seconds: that it goes on after them shows that it was.
    let (second, _) = under_way(&daemon, |(_, elapsed_ms)| elapsed_ms > at_ms + 2500)?;
    under_way(&daemon, |(percent, _)| percent > second)?;
    daemon.kill();
    daemon.start_again();
    let after = rebuilt(&daemon.json("array show a")).map(|(percent, _)| percent);
    assert!(after >= Some(first / 2) && after < Some(100), "{first}, {second}, then {after:?}");
    daemon.ok("array set a --rebuild-share 100");
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
    Some(())
}

#[test]
fn a_full_state_directory_keeps_no_array_from_its_guests() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    daemon.attach_new("x");
    daemon.ok("array create b --level 0 --drives x");
    for drive_away in [true, false] {
        daemon.kill();
        // A directory where the new catalog would be written stands for a disk that refuses it.
        let new = daemon.path("state/catalog.json.new");
        // There is a file of that name if the daemon was killed while it wrote a catalog.
        let _ = std::fs::remove_file(&new);
        std::fs::create_dir(&new).unwrap();
        if drive_away {
            // Its generation is another than the stored one, so there is something to record.
            std::fs::rename(daemon.path("d3.img"), daemon.path("away")).unwrap();
        }
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "degraded");
        assert_eq!(daemon.array_state("b"), "optimal");
        assert_eq!(daemon.json("export show e")["state"], "listening");
        assert!(daemon.refused("volume create w --array a --size 1M").contains("catalog"));
        std::fs::remove_dir(&new).unwrap();
        daemon.ok(&format!("volume create w{drive_away} --array a --size 1M"));
    }
}
