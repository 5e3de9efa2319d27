//! Goal: everything an operator does in the life of an array works from the command line.
//! Method: a real daemon on drive files, driven through `ashlar` as a person would.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::os::unix::net::UnixStream;

use daemon::{DRIVE_BYTES, Daemon};
use serde_json::Value;

fn members(array: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let members = array["members"].as_array().unwrap().iter();
    members.map(|member| (text(&member["drive"]), text(&member["state"]))).collect()
}

#[test]
fn every_level_from_blank_drives_to_blank_drives() {
    let daemon = Daemon::with_drives(14);
    for (level, count, data) in [
        ("0", 3, 3),
        ("1", 2, 1),
        ("5", 4, 3),
        ("6", 5, 3),
        ("10", 6, 3),
        ("50", 6, 4),
        ("60", 8, 4),
        ("1+1", 2, 1),
        ("4+1", 5, 4),
        ("6+2", 8, 6),
        ("7.3", 6, 3),
        ("70", 10, 4),
        ("10+4", 14, 10),
    ] {
        daemon.create_array("a", level, count);
        let array = daemon.json("array show a");
        assert_eq!((&array["state"], &array["level"]), (&"optimal".into(), &level.into()));
        let (inspected, stored) = (daemon.json("inspect @/d0.img"), &array["groups"]);
        assert_eq!(inspected["superblock"]["level"], level);
        assert_eq!(&inspected["superblock"]["groups"], stored);
        let capacity = array["capacity_bytes"].as_u64().unwrap();
        assert!((data * DRIVE_BYTES * 9 / 10..data * DRIVE_BYTES).contains(&capacity), "{level}");
        assert_eq!(array["free_bytes"], array["capacity_bytes"]);
        assert_eq!(array["members"].as_array().unwrap().len(), count);

        daemon.ok("volume create v --array a --size 16M");
        daemon.ok("volume resize v --size 24M");
        let volume = daemon.json("volume show v");
        assert_eq!((&volume["bytes"], &volume["array"]), (&Value::from(24 << 20), &"a".into()));
        assert_eq!(daemon.json("volume show a/v"), volume);
        daemon.ok("volume create w --array a --size 16M");
        daemon.ok("volume delete v");
        daemon.ok("volume create v2 --array a --size 24M");
        assert_eq!(daemon.json("volume list").as_array().unwrap().len(), 2);

        daemon.ok("array stop a");
        assert_eq!(daemon.array_state("a"), "stopped");
        daemon.ok("array start a");
        assert_eq!(daemon.json("volume list").as_array().unwrap().len(), 2);
        daemon.ok("volume delete w");
        daemon.ok("volume delete v2");
        daemon.ok("array delete a");
        for drive in daemon.json("drive list").as_array().unwrap() {
            assert_eq!(drive["content"], "blank", "level {level}: {drive}");
            assert_eq!(drive["state"], "free");
        }
    }
}

#[test]
fn policies_are_usual_chosen_and_changed() {
    let mut daemon = Daemon::with_drives(4);
    for (level, usual) in [("0", "none"), ("1", "bitmap"), ("5", "journal"), ("3+1", "journal")] {
        daemon.create_array("a", level, 4);
        assert_eq!(daemon.json("array show a")["settings"]["policy"], usual, "{level}");
        daemon.ok("array delete a");
    }
    daemon.ok("array create a --level 6 --drives d0,d1,d2,d3 --policy none");
    for policy in ["none", "journal", "bitmap"] {
        let said = daemon.ok(&format!("array set a --policy {policy}"));
        assert!(said.contains(policy), "{said}");
        daemon.kill();
        daemon.start_again();
        assert_eq!(daemon.json("array show a")["settings"]["policy"], policy);
    }
    assert!(daemon.ok("array show a").contains("policy      bitmap"));
}

#[test]
fn arrays_with_checksums_keep_their_policy() {
    let mut daemon = Daemon::with_drives(4);
    let drives = "--drives d0,d1,d2,d3";
    let said = daemon.refused(&format!("array create a --level 0 {drives} --integrity"));
    assert!(said.contains("without --integrity"), "{said}");
    let said =
        daemon.refused(&format!("array create a --level 5 {drives} --integrity --policy bitmap"));
    assert!(said.contains("policy journal"), "{said}");
    for level in ["1", "6"] {
        daemon.ok(&format!("array create a --level {level} {drives} --integrity"));
        daemon.kill();
        daemon.start_again();
        let array = daemon.json("array show a");
        assert_eq!(array["integrity"], true);
        assert_eq!(array["settings"]["policy"], "journal");
        assert!(daemon.ok("array show a").contains("a checksum of every block"));
        let said = daemon.refused("array set a --rebuild-share 90 --policy bitmap");
        assert!(said.contains("--integrity"), "{said}");
        assert_eq!(daemon.json("array show a")["settings"]["rebuild_percent"], 30);
        assert!(daemon.ok("drive show d1").contains("wrong     0 blocks, 0 checksums"));
        assert_eq!(daemon.json("drive show d1")["counters"]["wrong_blocks"], 0);
        // A larger drive takes the place of one, with room for the checksums of what it adds.
        daemon.attach_new("new");
        daemon.ok("array replace a --old d1 --new new --force --wait");
        assert_eq!(daemon.array_state("a"), "optimal");
        daemon.ok("array delete a");
        daemon.ok("drive detach new");
    }
    daemon.create_array("a", "5", 4);
    assert_eq!(daemon.json("array show a")["integrity"], false);
}

#[test]
fn settings_are_usual_chosen_changed_and_kept() {
    let mut daemon = Daemon::with_drives(3);
    let shown = |daemon: &Daemon| daemon.json("array show a")["settings"].clone();
    let expected = |settings: [u64; 5]| {
        let [share, hedge, atomic, delay, scrub] = settings;
        serde_json::json!({
            "policy": "journal",
            "rebuild_percent": share,
            "hedge_percent": hedge,
            "atomic_bytes": atomic,
            "spare_delay_s": delay,
            "scrub_period_s": scrub,
        })
    };
    daemon.create_array("a", "5", 3);
    assert_eq!(shown(&daemon), expected([30, 0, 64 << 10, 180, 30 * 24 * 3600]));
    daemon.ok("array delete a");
    daemon.ok("array create a --level 5 --drives d0,d1,d2 --rebuild-share 100 --scrub-every never");
    assert_eq!(shown(&daemon), expected([100, 0, 64 << 10, 180, 0]));
    daemon.ok("array set a --hedge 5 --atomic 128K --spare-delay 0 --scrub-every 7d");
    let all = expected([100, 5, 128 << 10, 0, 7 * 24 * 3600]);
    assert_eq!(shown(&daemon), all);
    daemon.refused("array set a --hedge 9 --atomic 1M");
    daemon.kill();
    daemon.start_again();
    assert_eq!(shown(&daemon), all);
    let said = daemon.ok("array show a");
    for line in ["share       100 %", "hedge       up to 5 %", "atomic      128K", "every 7d"] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn groups_are_as_large_as_they_shall_be() {
    let daemon = Daemon::with_drives(8);
    let drives: Vec<String> = (0..8).map(|number| format!("d{number}")).collect();
    let drives = drives.join(",");
    daemon.ok(&format!("array create a --level 50 --drives {drives} --group-size 4"));
    let array = daemon.json("array show a");
    let shape = ["groups", "data_chunks", "parity_chunks"].map(|field| array[field].clone());
    assert_eq!(shape, [2, 3, 1].map(Value::from));
    let said = daemon.ok("array list");
    assert!(said.contains("RAID 50, 2 groups of 3+1 chunks of 64K"), "{said}");
    // One drive of each group may go, and a new one need only hold what one member does.
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("drive detach d0 --force");
    daemon.ok("drive detach d5 --force");
    assert_eq!(daemon.array_state("a"), "degraded");
    daemon.attach_new("new");
    daemon.attach_new("newer");
    daemon.ok("array replace a --old d0 --new new --wait");
    daemon.ok("array replace a --old d5 --new newer --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

#[test]
fn a_lost_drive_is_replaced() {
    let daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 32M");
    daemon.attach_new("new");
    let said = daemon.ok("drive detach d1 --force");
    assert!(said.contains("member 1 of array a"), "{said}");
    let array = daemon.json("array show a");
    assert_eq!(array["state"], "degraded");
    let lost = &array["members"][1];
    assert_eq!((&lost["drive"], &lost["last_drive"]), (&Value::Null, &"d1".into()));
    assert_eq!(lost["present"], false);
    assert!(daemon.ok("status").contains("! array a is degraded"));

    // By the name of the drive that is gone.
    daemon.ok("array replace a --old d1 --new new --wait");
    let array = daemon.json("array show a");
    assert_eq!(array["state"], "optimal");
    assert_eq!(members(&array)[1], ("new".into(), "trusted".into()));
    let scrub = daemon.json("array scrub a --wait");
    assert_eq!(
        (&scrub["scrub"]["state"], &scrub["scrub"]["mismatched_stripes"]),
        (&"finished".into(), &0.into())
    );
    daemon.ok("array scrub a --repair --wait");
}

#[test]
fn a_pulled_drive_comes_back() {
    let daemon = Daemon::with_array(6, 5);
    daemon.ok("drive detach d3 --force");
    daemon.ok("drive detach d4 --force");
    // The array changes without them: they miss a write.
    daemon.ok("volume create v --array a --size 32M");
    assert_eq!(daemon.array_state("a"), "degraded");
    assert!(daemon.refused("array rebuild a").contains("array replace"));
    // The same file under another name, while the array may still hold the old descriptor.
    daemon.ok("drive attach @/d3.img --name back");
    let back = ("back".into(), "trusted".into());
    daemon.wait_for("array show a", |array| members(array)[3] == back);
    daemon.ok("drive attach @/d4.img");
    // By itself within a second; nobody has to wait for that.
    daemon.ok("array rebuild a --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
    // Nothing to do is no error.
    assert!(daemon.ok("array rebuild a --wait").contains("optimal"));
    assert!(daemon.ok("array rebuild a").contains("optimal"));
}

#[test]
fn as_many_members_may_go_as_there_are_parity_chunks() {
    let daemon = Daemon::with_array("4+4", 8);
    daemon.ok("volume create v --array a --size 32M");
    for lost in ["d0", "d3", "d5", "d7"] {
        daemon.ok(&format!("drive detach {lost} --force"));
        assert_eq!(daemon.array_state("a"), "degraded", "{lost}");
    }
    let said = daemon.ok("array show a");
    assert_eq!(said.matches("missing").count(), 4, "{said}");
    daemon.ok("volume create w --array a --size 32M");
    for lost in ["d0", "d3", "d5", "d7"] {
        let new = format!("new-{lost}");
        daemon.attach_new(&new);
        daemon.ok(&format!("array replace a --old {lost} --new {new} --wait"));
    }
    assert_eq!(daemon.array_state("a"), "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
    let said = daemon.ok("array show a");
    assert!(
        said.contains("RAID 4+4, chunks of 64K") && said.contains("not in place yet"),
        "{said}"
    );
}

#[test]
fn a_drive_that_is_well_is_replaced_only_by_force() {
    let daemon = Daemon::with_array(1, 2);
    daemon.attach_new("new");
    let said = daemon.refused("array replace a --member 0 --new new");
    assert!(said.contains("--force"), "{said}");
    daemon.ok("array replace a --member 0 --new new --force --wait");
    let array = daemon.json("array show a");
    assert_eq!(array["state"], "optimal");
    assert_eq!(members(&array)[0].0, "new");
    // The old drive is free, but labelled: it is not taken for something new by mistake.
    let old = daemon.json("drive show d0");
    assert_eq!(old["state"], "replaced");
    daemon.attach_new("d9");
    let said = daemon.refused("array create b --level 1 --drives d0,d9");
    assert!(said.contains("member 0 of array a"), "{said}");
    daemon.ok("array create b --level 1 --drives d0,d9 --force");
    assert_eq!(daemon.array_state("b"), "optimal");
}

#[test]
fn a_member_that_the_others_cannot_stand_for_is_not_replaced() {
    let daemon = Daemon::with_array(1, 2);
    daemon.attach_new("new");
    daemon.ok("drive detach d1 --force");
    daemon.ok("volume create v --array a --size 16M");
    // d1 has missed that; d0 alone has it.
    for alive in [true, false] {
        if !alive {
            daemon.ok("drive detach d0 --force");
        }
        let said = daemon.refused("array replace a --member 0 --new new --force");
        assert!(said.contains("what no other member that is here has"), "{said}");
        assert!(said.contains("bring its own drive or the other members back"), "{said}");
    }
    daemon.ok("drive attach @/d0.img");
    // By this, or by itself just before: then there is nothing to rebuild.
    daemon.run("array rebuild a");
    daemon.wait_for("array show a", |array| array["state"] == "degraded");
    daemon.ok("volume show v");
    daemon.ok("array replace a --member 1 --new new --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
}

#[test]
fn several_arrays_live_side_by_side() {
    let daemon = Daemon::with_drives(5);
    daemon.ok("array create one --level 1 --drives d0,d1");
    daemon.ok("array create two --level 5 --drives d2,d3,d4 --chunk 16K");
    assert_eq!(daemon.json("array show two")["chunk_bytes"], 16 << 10);
    daemon.ok("volume create v --array one --size 8M");
    let said = daemon.refused("volume create v --array two --size 8M");
    assert!(said.contains("on array one"), "{said}");
    daemon.ok("volume create w --array two --size 8M");
    daemon.ok("array stop one");
    assert_eq!(daemon.json("volume list").as_array().unwrap().len(), 1);
    let said = daemon.refused("volume show v");
    assert!(said.contains("no volume v"), "{said}");
    daemon.ok("array start one");
    daemon.ok("volume show one/v");
}

#[test]
fn what_drives_still_carry_is_told() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("drive detach d1 --force");
    let said = daemon.ok("drive attach @/d1.img");
    assert!(said.contains("array a runs, and takes the drive back by itself"), "{said}");
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    daemon.ok("array stop a");
    daemon.ok("drive detach d0");
    let said = daemon.ok("drive attach @/d0.img");
    assert!(said.contains("`ashlar array start --scan` starts array a"), "{said}");
    // Of drives that are away, a deleted array would come back without a word.
    ["d0", "d1"].iter().for_each(|name| drop(daemon.ok(&format!("drive detach {name}"))));
    let said = daemon.ok("array delete a --force");
    assert!(said.contains("note: drives d0, d1 were not attached"), "{said}");
    ["d0", "d1"].iter().for_each(|name| drop(daemon.ok(&format!("drive attach @/{name}.img"))));
    assert!(daemon.ok("array start --scan").contains("array a started"));
    // Of those that are here nothing is to be said.
    assert!(!daemon.ok("array delete a").contains("note"));
    // Two of one name, as of another host.
    daemon.ok("array create a --level 1 --drives d0,d1");
    daemon.ok("array stop a");
    ["d0", "d1"].iter().for_each(|name| drop(daemon.ok(&format!("drive detach {name}"))));
    daemon.ok("array delete a --force");
    daemon.attach_new("d2");
    daemon.ok("array create a --level 0 --drives d2");
    ["d0", "d1"].iter().for_each(|name| drop(daemon.ok(&format!("drive attach @/{name}.img"))));
    let said = daemon.ok("array start --scan");
    assert!(said.contains("is called a on its drives"), "{said}");
}

#[test]
fn memory_serves_as_drives() {
    let daemon = Daemon::start();
    daemon.ok("drive attach ram:64M --name r0");
    daemon.ok("drive attach ram:64M --name r1");
    daemon.ok("drive attach ram:64M");
    daemon.ok("array create a --level 5 --drives r0,r1,ram0");
    daemon.ok("volume create v --array a --size 16M");
    // It lives as long as the drives are attached.
    daemon.ok("array stop a");
    daemon.ok("array start a");
    daemon.ok("volume show v");
    daemon.ok("drive detach r1 --force");
    daemon.ok("drive attach ram:64M --name r2");
    daemon.ok("array replace a --old r1 --new r2 --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
    daemon.ok("array delete a --force");
    assert_eq!(daemon.json("drive show r0")["content"], "blank");
    daemon.refused("drive attach ram:1P");
    daemon.refused("drive attach ram:64");
    daemon.refused("drive attach ram:lots");
}

#[test]
fn modelled_drives_serve_at_their_pace() {
    let daemon = Daemon::start();
    daemon.ok("drive attach model:64M,iops=100000,mbps=2000,latency-us=3000 --name m0");
    daemon.ok("drive attach model:64M,mbps=2000,iops=100000");
    let said = daemon.ok("drive show model0");
    assert!(said.contains("kind      model"), "{said}");
    assert!(said.contains("model:64M,iops=100000,mbps=2000,latency-us=0"), "{said}");
    daemon.ok("array create a --level 1 --drives m0,model0");
    daemon.ok("volume create v --array a --size 16M");
    let drive = daemon.json("drive show m0");
    let writes = &drive["latency"]["writes"];
    assert!(writes["operations"].as_u64().unwrap() > 0, "{drive}");
    // Its latency, in a class of a sixteenth; how late a busy machine looks has no bound.
    assert!(writes["p50_ns"].as_u64().unwrap() >= 3_000_000, "{drive}");
    assert_eq!((&drive["kind"], &drive["slow"]), (&"model".into(), &false.into()));
    assert_eq!(drive["counters"]["timeouts"], 0);
    let said = daemon.ok("drive show m0");
    assert!(said.contains("timeouts  0") && said.contains("write     p50 "), "{said}");
    assert!(daemon.ok("drive list").contains("WRITE p99"));
    for wrong in [
        "model:64M",
        "model:64M,iops=1",
        "model:64M,iops=0,mbps=1",
        "model:64M,iops=1,mbps=1,iops=2",
        "model:64M,iops=1,mbps=1,latency-us=9999999",
        "model:1P,iops=1,mbps=1",
    ] {
        daemon.refused(&format!("drive attach {wrong}"));
    }
}

#[test]
fn exports_are_made_and_withdrawn() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    let said = daemon.ok("export create e --volume v");
    let socket = daemon.path("export/e.sock");
    assert!(said.starts_with(&format!("{}\n", socket.display())), "{said}");
    assert!(said.contains("-device vhost-user-blk-pci"), "{said}");
    assert!(socket.exists());
    let export = daemon.json("export show e");
    assert_eq!((&export["state"], &export["volume"]), (&"listening".into(), &"v".into()));
    assert_eq!(export["socket"], socket.to_str().unwrap());
    let qemu = daemon.ok("export show e --qemu");
    assert!(qemu.contains("reconnect=1") && qemu.contains("-m 4G ") && qemu.contains("size=4G,"));
    let libvirt = daemon.ok("export show e --libvirt");
    assert!(libvirt.contains("type='vhostuser'") && libvirt.contains("e.sock"), "{libvirt}");
    daemon.ok("export create f --volume a/v --path @/f.sock --queues 2");
    assert!(daemon.path("f.sock").exists());
    assert_eq!(daemon.json("volume show v")["exports"], serde_json::json!(["e", "f"]));

    assert!(daemon.refused("volume delete v").contains("is exported"));
    assert!(daemon.refused("export create e --volume v").contains("already"));
    assert!(daemon.refused("export create g --volume v --path @/f.sock").contains("busy"));
    assert!(daemon.refused("export create g --volume nope").contains("no volume nope"));
    daemon.refused("export create g --volume v --queues 0");
    daemon.refused("export create g --volume v --queues 1000");
    daemon.refused("export show g");
    daemon.refused("export delete g");

    // Stopping the array takes its exports along, starting it brings them back.
    daemon.ok("array stop a");
    assert_eq!(daemon.json("export show e")["state"], "down");
    let stopped = daemon.refused("volume show v");
    assert!(stopped.contains("on array a, which does not run"), "{stopped}");
    daemon.ok("array start a");
    assert_eq!(daemon.json("export show e")["state"], "listening");
    daemon.ok("export delete e");
    assert!(!socket.exists());
    daemon.ok("export delete f");
    daemon.ok("volume delete v");
}

#[test]
fn a_guest_keeps_its_disk() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    let guest = UnixStream::connect(daemon.path("export/e.sock")).unwrap();
    daemon.wait_for("export show e", |export| export["state"] == "connected");
    assert!(daemon.refused("array stop a").contains("used by a guest"));
    assert!(daemon.refused("export delete e").contains("used by a guest"));
    drop(guest);
    daemon.wait_for("export show e", |export| export["state"] == "listening");
    daemon.ok("array stop a");
    daemon.ok("array start a");
    let _guest = UnixStream::connect(daemon.path("export/e.sock")).unwrap();
    daemon.wait_for("export show e", |export| export["state"] == "connected");
    let said = daemon.ok("array delete a --force");
    assert!(said.contains("export e was deleted with it"), "{said}");
}

#[test]
fn files_are_made_on_demand() {
    let daemon = Daemon::start();
    daemon.ok("drive attach @/new.img --size 64M");
    assert_eq!(std::fs::metadata(daemon.path("new.img")).unwrap().len(), DRIVE_BYTES);
    daemon.ok("drive detach new");
    // It exists now, and has this size.
    daemon.ok("drive attach @/new.img --size 64M --name again");
    assert!(daemon.refused("drive attach @/none.img").contains("--size"));
}

#[test]
fn help_for_shells_and_readers() {
    let daemon = Daemon::with_array(1, 2);
    for shell in ["bash", "zsh", "fish"] {
        assert!(daemon.ok(&format!("completions {shell}")).contains("ASHLAR_COMPLETE"), "{shell}");
    }
    daemon.ok("man @/man");
    assert!(daemon.path("man/ashlar-array-create.1").exists());
    let document = daemon.json("openapi");
    assert!(document["paths"]["/v1/arrays/{name}/replace"]["post"].is_object());
    assert!(document["components"]["schemas"]["ErrorBody"].is_object());
}

#[test]
fn a_refused_replacement_costs_nothing() {
    let daemon = Daemon::start();
    for number in 0..3 {
        daemon.ok(&format!("drive attach @/d{number}.img --size 128M"));
    }
    daemon.create_array("a", 5, 3);
    daemon.attach_new("small");
    let said = daemon.refused("array replace a --member 1 --new small --force");
    assert!(said.contains("too small"), "{said}");
    daemon.ok("array delete a");
    daemon.create_array("a", 0, 3);
    daemon.ok("drive attach @/large.img --size 128M");
    let said = daemon.refused("array replace a --member 1 --new large --force");
    assert!(said.contains("level 0"), "{said}");
    // A drive is not its own replacement.
    let said = daemon.refused("array replace a --member 1 --new d1 --force");
    assert!(said.contains("in use"), "{said}");
}
