//! Goal: a member that is away comes back or is replaced, and nobody has to be there for it.
//! Method: drives are pulled and attached again under a daemon with and without spares.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use daemon::{DRIVE_BYTES, Daemon};
use serde_json::{Value, json};

fn spares(daemon: &Daemon) -> Vec<(String, Value)> {
    let list = daemon.json("spare list");
    let spares = list.as_array().unwrap().iter();
    spares.map(|s| (s["drive"].as_str().unwrap().to_owned(), s["array"].clone())).collect()
}

#[test]
fn spares_are_kept_until_they_are_let_go() {
    let mut daemon = Daemon::with_array(5, 4);
    for name in ["s0", "s1", "s2"] {
        daemon.attach_new(name);
    }
    assert!(daemon.ok("spare add s0").contains("for all arrays"));
    assert!(daemon.ok("spare add s1 --array a").contains("for array a"));
    daemon.ok("spare add s2");
    let all = [("s0", Value::Null), ("s1", json!("a")), ("s2", Value::Null)];
    let all = all.map(|(name, array)| (name.to_owned(), array));
    assert_eq!(spares(&daemon), all);
    for by_force in [false, true] {
        if by_force {
            daemon.kill()
        } else {
            daemon.stop()
        }
        daemon.start_again();
        assert_eq!(spares(&daemon), all);
    }
    assert_eq!(daemon.json("drive show s0")["state"], "spare");
    assert!(daemon.ok("status").contains("s1     a"));
    daemon.ok("spare remove s0");
    assert_eq!(daemon.json("drive show s0")["state"], "free");
    let said = daemon.ok("drive detach s2");
    assert!(said.contains("it is no spare"), "{said}");
    assert_eq!(spares(&daemon), all[1..2]);
    // What it was kept for is gone.
    daemon.ok("array delete a");
    assert_eq!(spares(&daemon), []);
}

#[test]
fn spares_that_cannot_be() {
    let daemon = Daemon::with_array(1, 2);
    for name in ["s0", "old", "new"] {
        daemon.attach_new(name);
    }
    daemon.ok("array create b --level 0 --drives old");
    daemon.ok("array replace a --member 0 --new new --force --wait");
    daemon.ok("spare add s0");
    for (line, what) in [
        ("spare add x", "no drive x"),
        ("spare add s0", "a spare already"),
        ("spare add d1", "in use"),
        ("spare add d0", "member 0 of array a"),
        ("spare add s0 --array x", "no array x"),
        ("spare remove d0", "no spare d0"),
        ("array create c --level 0 --drives s0", "is a spare"),
        ("array replace a --member 1 --new s0 --force", "is a spare"),
    ] {
        let said = daemon.refused(line);
        assert!(said.contains(what) && said.contains("\nfix: "), "{line}: {said}");
    }
    daemon.misused("spare");
    daemon.misused("spare add");
    daemon.ok("spare add d0 --force");
}

#[test]
fn a_member_that_comes_back_is_taken_back() {
    let daemon = Daemon::with_array(6, 5);
    daemon.attach_new("s0");
    daemon.ok("spare add s0");
    daemon.ok("drive detach d1 --force");
    // Two of them miss this.
    daemon.ok("volume create v --array a --size 16M");
    daemon.wait_for("array show a", |array| array["members"][1]["takeover"]["spare"] == "s0");
    let left = daemon.json("array show a")["members"][1]["takeover"]["remaining_ms"].clone();
    assert!((150_000..=180_000).contains(&left.as_u64().unwrap()), "{left}");
    let said = daemon.ok("array show a");
    assert!(said.contains("spare s0 takes over in "), "{said}");
    daemon.ok("drive attach @/d1.img");
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert_eq!(spares(&daemon).len(), 1);
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

/// As when the power of an enclosure fails: nobody has to be there when it is back.
#[test]
fn an_array_that_failed_takes_its_drives_back() {
    let daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    assert_eq!(daemon.json("array show a")["may_lose"], 1);
    daemon.ok("drive detach d1 --force");
    daemon.ok("volume create w --array a --size 16M");
    assert_eq!(daemon.json("array show a")["may_lose"], 0);
    let said = daemon.ok("status");
    assert!(
        said.contains("! array a is degraded: drive d1 is away; attach it again, or"),
        "{said}"
    );
    for drive in ["d2", "d3"] {
        daemon.ok(&format!("drive detach {drive} --force"));
    }
    assert_eq!(daemon.array_state("a"), "failed");
    let said = daemon.ok("status");
    assert!(said.contains("! array a has failed: some blocks cannot be read"), "{said}");
    for drive in ["d2", "d3"] {
        assert!(said.contains(&format!("; drive {drive} is away: attach it again; ")), "{said}");
    }
    // The one that missed something cannot be first.
    for drive in ["d1", "d3", "d2"] {
        daemon.ok(&format!("drive attach @/{drive}.img"));
    }
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    daemon.ok("volume show w");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
    assert!(!daemon.ok("status").contains("! "));
}

#[test]
fn spares_that_fit_nothing() {
    let daemon = Daemon::start();
    for name in ["d0", "d1", "d2", "d3"] {
        daemon.ok(&format!("drive attach @/{name}.img --size {}", 2 * DRIVE_BYTES));
    }
    ["s0", "s1"].iter().for_each(|name| daemon.attach_new(name));
    daemon.ok("spare add s0");
    assert!(daemon.json("spare list")[0]["error"].is_null());
    daemon.ok("array create zero --level 0 --drives d0");
    daemon.ok("array create a --level 5 --drives d1,d2,d3");
    let said = daemon.ok("spare list");
    assert!(said.contains("no array could use it: drive s0 is too small"), "{said}");
    let said = daemon.ok("status");
    assert!(said.contains("! spare s0 cannot take over: no array could"), "{said}");
    for (line, what) in [
        ("spare add s1", "no array could use it: drive s1 is too small"),
        ("spare add s1 --array a", "drive s1 is too small: it has 64M, a member of array a"),
        ("spare add s1 --array zero", "array zero has level 0"),
    ] {
        let said = daemon.refused(line);
        assert!(said.contains(what) && said.contains("\nfix: "), "{line}: {said}");
    }
    daemon.ok("array stop a");
    daemon.ok("spare add s1");
}

/// In the group that lacks most members first.
#[test]
fn a_spare_takes_the_place_of_a_member_that_stays_away() {
    let daemon = Daemon::with_drives(8);
    let drives = "d0,d1,d2,d3,d4,d5,d6,d7";
    daemon.ok(&format!("array create a --level 60 --drives {drives} --group-size 4"));
    daemon.ok("volume create v --array a --size 16M");
    for drive in ["d0", "d4", "d5"] {
        daemon.ok(&format!("drive detach {drive} --force"));
    }
    daemon.attach_new("s0");
    daemon.ok("spare add s0");
    daemon.wait_for("array show a", |array| array["members"][4]["takeover"]["spare"] == "s0");
    daemon.ok("array set a --spare-delay 0s");
    let has = |array: &Value, member: usize, drive: &str| {
        let its = &array["members"][member];
        its["drive"] == drive && its["state"] == "trusted"
    };
    daemon.wait_for("array show a", |array| has(array, 4, "s0"));
    assert_eq!(spares(&daemon), []);
    assert_eq!(daemon.array_state("a"), "degraded");
    for spare in ["s1", "s2"] {
        daemon.attach_new(spare);
        daemon.ok(&format!("spare add {spare}"));
    }
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    let array = daemon.json("array show a");
    assert!(has(&array, 0, "s1") && has(&array, 5, "s2"), "{array}");
    assert!(daemon.log().contains("a spare has taken its place"), "{}", daemon.log());
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

/// What is on it may be what nobody else has.
#[test]
fn a_drive_that_was_used_elsewhere_is_not_overwritten_by_itself() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("drive detach d1 --force");
    daemon.ok("volume create v --array a --size 16M");
    daemon.stop();
    daemon.start_on_host(1);
    daemon.ok("drive attach @/d1.img");
    daemon.ok("array start --scan --force");
    daemon.ok("volume create w --array a --size 16M");
    daemon.stop();
    daemon.start_on_first_host();
    assert_eq!(daemon.array_state("a"), "degraded");
    daemon.ok("drive attach @/d1.img");
    let passed_over = |drive: &Value| !drive["error"].is_null();
    daemon.wait_for("drive show d1", passed_over);
    let said = daemon.ok("status");
    assert!(said.contains("! drive d1 is not used: ") && said.contains("used elsewhere"), "{said}");
    for line in ["array rebuild a", "array replace a --member 1 --new d1"] {
        let said = daemon.refused(line);
        assert!(said.contains("used elsewhere") && said.contains("--force"), "{line}: {said}");
    }
    assert_eq!(daemon.array_state("a"), "degraded");
    assert_eq!(daemon.log().matches("not used: ").count(), 1, "{}", daemon.log());
    daemon.ok("array replace a --member 1 --new d1 --force --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
    daemon.ok("volume show v");
    daemon.refused("volume show w");
}

#[test]
fn a_drive_that_was_replaced_is_not_used_again() {
    let daemon = Daemon::with_array(5, 4);
    daemon.attach_new("new");
    daemon.ok("drive detach d1 --force");
    daemon.ok("array replace a --old d1 --new new --wait");
    let said = daemon.ok("drive attach @/d1.img");
    assert!(said.contains("another drive has its place in array a"), "{said}");
    assert_eq!(daemon.json("drive show d1")["state"], "replaced");
    daemon.wait_for("drive show d1", |_| daemon.log().contains("not used: another drive has"));
    let array = daemon.json("array show a");
    assert_eq!(
        (&array["state"], &array["members"][1]["drive"]),
        (&json!("optimal"), &json!("new"))
    );
    assert!(daemon.refused("spare add d1").contains("member 1 of array a"));
}

#[test]
fn a_new_drive_in_an_old_slot_is_nobodys() {
    let daemon = Daemon::with_array(6, 5);
    for slot in ["d1", "d4"] {
        daemon.ok(&format!("drive detach {slot} --force"));
        daemon.make_drive(&format!("new-{slot}"));
        daemon.ok(&format!("drive attach @/new-{slot}.img --name {slot}"));
    }
    // The array still holds what was pulled, under the same names.
    daemon.ok("array replace a --member 1 --new d1");
    assert_eq!(daemon.json("drive show d4")["state"], "free");
    // Nor does it take what has become another array's.
    daemon.ok("array create b --level 0 --drives d4");
    // Refused where there is nothing to rebuild any more; the members are noted all the same.
    daemon.run("array rebuild a");
    let drive = daemon.json("drive show d4");
    assert_eq!((&drive["state"], &drive["array"]), (&json!("member"), &json!("b")));
    assert_eq!(drive["health"], "healthy");
    daemon.ok("array delete b");
    daemon.ok("array replace a --member 4 --new d4 --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
}
